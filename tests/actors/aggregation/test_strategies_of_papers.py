"""Strategies against their papers' formulas, written down plainly in float64 with NumPy."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation import updates
from gradbus.actors.aggregation.adaptive import FedAdagrad, FedYogi
from gradbus.actors.aggregation.bulyan import Bulyan
from gradbus.actors.aggregation.clipping import scaled
from gradbus.actors.aggregation.fednova import FedNova
from gradbus.actors.aggregation.geometric_median import GeometricMedian
from gradbus.actors.aggregation.qfedavg import QFedAvg
from gradbus.actors.aggregation.scaffold import Scaffold
from gradbus.actors.aggregation.strategies import Strategy
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.actors.federated.controller.combinations import check_combination
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError

DIM = 35_000  # more than one block
Vector = NDArray[np.float64]
encode = codecs.get("fp32").encode


def random_vector(seed: int, scale: float = 0.01) -> Tensor:
    return scale * torch.randn(DIM, generator=torch.Generator().manual_seed(seed))


def as_array(tensor: Tensor) -> Vector:
    return tensor.double().numpy()


def sent(delta: Tensor, **others: Tensor) -> Update:
    payload = updates.join([("model", encode(delta)), *((name, encode(one)) for name, one in others.items())])
    return updates.parse(payload, expected_dim=DIM, others={name: one.numel() for name, one in others.items()})


def assert_close(found: Tensor, expected: Vector) -> None:
    np.testing.assert_allclose(as_array(found), expected, rtol=1e-6, atol=1e-6)


Second = Callable[[Vector, Vector], Vector]
SECOND: dict[str, tuple[Strategy, float, Second]] = {
    "fedyogi": (FedYogi(DIM, lr=0.05), 0.9, lambda v, d: v - (1 - 0.99) * d**2 * np.sign(v - d**2)),
    "fedadagrad": (FedAdagrad(DIM, lr=0.05, beta1=0.0), 0.0, lambda v, d: v + d**2),
}


@pytest.mark.parametrize("name", SECOND)
def test_adaptive_servers_follow_their_formula(name: str) -> None:
    strategy, beta1, second = SECOND[name]
    weights = random_vector(1, 1.0)
    w, m, v = as_array(weights.clone()), np.zeros(DIM), np.zeros(DIM)
    for round_id in (1, 2, 3):
        delta = random_vector(10 + round_id)
        strategy.begin(round_id, weights.clone())
        strategy.add(sent(delta), Facts(client_id=0, num_samples=7))
        strategy.finish(weights)
        d = as_array(delta)
        m, v = beta1 * m + (1 - beta1) * d, second(v, d)
        w = w + 0.05 * m / (np.sqrt(v) + 1e-3)
        assert_close(weights, w)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_divides_each_update_by_the_reach_of_its_steps(momentum: float) -> None:
    strategy, weights = FedNova(DIM, momentum=momentum), random_vector(1, 1.0)
    base = as_array(weights.clone())
    strategy.begin(1, weights.clone())
    mean, effective = np.zeros(DIM), 0.0
    for client_id, (steps, samples) in enumerate([(1, 10), (7, 30), (40, 60)]):
        delta = random_vector(client_id)
        strategy.add(sent(delta), Facts(client_id=client_id, num_samples=samples, steps=steps))
        a = sum((1 - momentum ** (steps - k)) / (1 - momentum) for k in range(steps))  # ||a||_1, one by one
        mean += samples / 100 * as_array(delta) / a
        effective += samples / 100 * a
    strategy.finish(weights)
    assert_close(weights, base + effective * mean)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "fits"),
    [
        ("fednova", "task", True),
        ("fednova", {"name": "sgd"}, True),
        ("fednova", {"name": "sgd", "momentum": 0.9}, False),
        ({"name": "fednova", "momentum": 0.9}, {"name": "sgd", "momentum": 0.9}, True),
        ({"name": "fednova", "momentum": 0.9}, {"name": "sgd", "momentum": 0.9, "nesterov": True}, False),
        ("fednova", "adamw", False),
        ("scaffold", {"name": "sgd"}, True),
        ("scaffold", "adamw", False),
    ],
)
def test_a_strategy_that_counts_steps_of_sgd_refuses_another_optimizer_at_the_start(
    strategy: Any, optimizer: Any, fits: bool
) -> None:
    training = {"optimizer": optimizer, "rule": "scaffold" if strategy == "scaffold" else "plain"}
    config = FederatedConfig(strategy=strategy, training=training, clients={"num": 2})
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=r"federated\.training\.optimizer"):
        check_combination(config)


def test_fednova_refuses_an_update_that_does_not_say_how_many_steps_it_took() -> None:
    strategy = FedNova(DIM)
    strategy.begin(1, torch.zeros(DIM))
    with pytest.raises(ValueError, match="no optimizer steps"):
        strategy.add(sent(torch.ones(DIM)), Facts(client_id=0, num_samples=1))


@pytest.mark.parametrize("q", [0.0, 1.0, 5.0])
def test_qfedavg_weighs_by_the_loss_before_training(q: float) -> None:
    strategy, weights, ell = QFedAvg(DIM, q=q), random_vector(1, 1.0), 10.0
    strategy.check(FederatedConfig(training={"lr": 1 / ell}))  # type: ignore[arg-type]
    base = as_array(weights.clone())
    strategy.begin(1, weights.clone())
    above, below = np.zeros(DIM), 0.0
    for client_id, loss in enumerate([0.3, 1.0, 2.4]):
        delta = random_vector(client_id)
        strategy.add(sent(delta), Facts(client_id=client_id, num_samples=client_id, metrics={"loss_before": loss}))
        big = -ell * as_array(delta)
        above += loss**q * big
        below += q * loss ** (q - 1) * float(big @ big) + ell * loss**q
    strategy.finish(weights)
    assert_close(weights, base - above / below)


@pytest.mark.parametrize("metrics", [{}, {"loss_before": -1.0}, {"loss_before": 1e9}])
def test_qfedavg_refuses_an_update_without_a_loss_that_can_be(metrics: dict[str, float]) -> None:
    strategy = QFedAvg(DIM)
    strategy.begin(1, torch.zeros(DIM))
    with pytest.raises(ValueError, match="loss_before"):
        strategy.add(sent(torch.ones(DIM)), Facts(client_id=0, num_samples=1, metrics=metrics))


def test_scaffold_moves_the_model_and_the_control_variate_and_keeps_the_latter() -> None:
    strategy, weights = Scaffold(DIM, lr=0.5), random_vector(1, 1.0)
    strategy.check(FederatedConfig(clients={"num": 4}))  # type: ignore[arg-type]
    w, c = as_array(weights.clone()), np.zeros(DIM)
    for round_id in (1, 2):
        strategy.begin(round_id, weights.clone())
        deltas = [random_vector(10 * round_id + i) for i in range(3)]
        controls = [random_vector(100 * round_id + i) for i in range(3)]
        for i in (2, 0, 1):
            strategy.add(sent(deltas[i], control=controls[i]), Facts(client_id=i, num_samples=1 + i))
        strategy.finish(weights)
        w = w + 0.5 * sum((1 + i) / 6 * as_array(deltas[i]) for i in range(3))
        # Nothing is known of the fourth client: its samples are taken to be the mean of the others', 2.
        c = c + sum((1 + i) / 8 * as_array(controls[i]) for i in range(3))
        assert_close(weights, w)
        assert_close(strategy.broadcast(), c)
    again = Scaffold(DIM)
    again.check(FederatedConfig(clients={"num": 4}))  # type: ignore[arg-type]
    again.load_state(strategy.state())
    assert torch.equal(again.broadcast(), strategy.broadcast())


def test_a_control_variate_that_is_too_large_leaves_nothing_behind() -> None:
    strategy, weights = Scaffold(DIM), torch.zeros(DIM)
    strategy.check(FederatedConfig(clients={"num": 2}))  # type: ignore[arg-type]
    strategy.begin(1, torch.zeros(DIM))
    strategy.add(sent(torch.ones(DIM), control=torch.ones(DIM)), Facts(client_id=0, num_samples=1))
    with pytest.raises(ValueError, match="control variate"):
        strategy.add(sent(torch.ones(DIM), control=torch.full((DIM,), 1e30)), Facts(client_id=1, num_samples=1))
    strategy.finish(weights)
    assert (float(weights[0]), float(strategy.broadcast()[0])) == (1.0, 0.5)


@pytest.mark.parametrize("absent", [(), (2, 5, 6)])  # rounds without the second client, of which nothing is known
def test_scaffold_tends_to_the_optimum_of_the_mean_over_samples(absent: tuple[int, ...]) -> None:
    optima, samples, lr, steps = (0.0, 10.0), (97, 3), 0.1, 5
    strategy, weights = Scaffold(1), torch.zeros(1)
    strategy.check(FederatedConfig(clients={"num": 2}))  # type: ignore[arg-type]
    own = [0.0, 0.0]
    for round_id in range(1, 121):
        w, c = float(weights), float(strategy.broadcast())
        strategy.begin(round_id, weights.clone())
        for i, (optimum, num_samples) in enumerate(zip(optima, samples, strict=True)):
            if i == 1 and round_id in {1, *absent}:
                continue
            y = w
            for _ in range(steps):
                y -= lr * ((y - optimum) - own[i] + c)  # Algorithm 1, line 10
            change = (w - y) / (steps * lr) - c  # option II
            own[i] += change
            payload = updates.join(
                [(name, encode(torch.tensor([v]))) for name, v in (("model", y - w), ("control", change))]
            )
            update = updates.parse(payload, expected_dim=1, others={"control": 1})
            strategy.add(update, Facts(client_id=i, num_samples=num_samples))
        strategy.finish(weights)
    assert float(weights) == pytest.approx(0.3, abs=0.01)  # and not 5.0, that of the mean over clients


def test_scaffold_has_to_know_how_many_clients_there_are() -> None:
    with pytest.raises(ConfigError, match=r"clients\.num"):
        Scaffold(DIM).check(FederatedConfig())


def rows_added(strategy: Strategy, rows: Vector) -> Tensor:
    weights = torch.zeros(DIM)
    strategy.begin(1, weights.clone())
    for client_id, row in enumerate(rows):
        strategy.add(sent(torch.from_numpy(row).float()), Facts(client_id=client_id, num_samples=1))
    strategy.finish(weights)
    return weights


def hostile_rows(count: int, hostile: int) -> Vector:
    rows = np.stack([as_array(random_vector(i, 1.0)) for i in range(count)])
    rows[:hostile] = 50.0
    return rows.astype(np.float32).astype(np.float64)


def test_the_geometric_median_is_where_weiszfeld_ends() -> None:
    rows = hostile_rows(7, 2)
    v: Any = rows.mean(axis=0)
    for _ in range(32):
        weights = 1 / np.maximum(1e-6, np.linalg.norm(rows - v, axis=1))
        v = (weights[:, None] * rows).sum(axis=0) / weights.sum()
    found = rows_added(GeometricMedian(DIM, byzantine=2), rows)
    assert_close(found, v)
    assert float(found.abs().max()) < 10 < 50.0


def test_bulyan_averages_what_is_next_to_the_median_of_those_that_krum_chooses() -> None:
    f, rows = 2, hostile_rows(11, 2)
    left, picked = list(range(11)), []
    while len(picked) < 11 - 2 * f:
        scores = [
            sum(sorted(float(((rows[a] - rows[b]) ** 2).sum()) for b in left if b != a)[: len(left) - f - 2])
            for a in left
        ]
        picked.append(left.pop(int(np.argmin(scores))))
    chosen = np.sort(rows[picked], axis=0)
    middle = np.median(chosen, axis=0)
    near = np.argsort(np.abs(chosen - middle), axis=0, kind="stable")[: len(picked) - 2 * f]
    found = rows_added(Bulyan(DIM, byzantine=f), rows)
    assert_close(found, np.take_along_axis(chosen, near, axis=0).mean(axis=0))
    assert float(found.abs().max()) < 10 < 50.0


def test_qfedavg_takes_a_loss_of_zero_and_goes_on_where_no_client_has_any() -> None:
    strategy, weights = QFedAvg(DIM, q=2.0), torch.ones(DIM)
    strategy.begin(1, weights.clone())
    strategy.add(sent(torch.zeros(DIM)), Facts(client_id=0, num_samples=1, metrics={"loss_before": 0.0}))
    strategy.finish(weights)
    assert torch.equal(weights, torch.ones(DIM))


def test_a_power_of_the_loss_that_no_float_has_spoils_no_sum() -> None:
    strategy, weights = QFedAvg(DIM, q=20.0), torch.zeros(DIM)
    strategy.begin(1, weights.clone())
    strategy.add(sent(torch.ones(DIM)), Facts(client_id=0, num_samples=1, metrics={"loss_before": 1.0}))
    with pytest.raises(ValueError, match="to the power"):
        strategy.add(sent(torch.zeros(DIM)), Facts(client_id=1, num_samples=1, metrics={"loss_before": 9e5}))
    strategy.finish(weights)
    assert bool(torch.isfinite(weights).all())


def test_an_exact_sum_refuses_what_a_strategy_has_scaled_to_no_number() -> None:
    strategy = FedNova(DIM)
    strategy.begin(1, torch.zeros(DIM))
    spoilt = scaled(sent(torch.zeros(DIM)).model, torch.zeros(DIM), math.inf)
    with pytest.raises(ValueError, match="exact sum"):
        strategy.add(Update(spoilt), Facts(client_id=0, num_samples=1, steps=1))
