"""Server optimizers against their formulas, written down plainly in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from default_dtype import default_dtype
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation.adaptive import FedAdam
from gradbus.actors.aggregation.partial_sum import PartialSum
from gradbus.actors.aggregation.strategies import FedAvg, FedAvgM, Strategy, WrappedStrategy
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.runtime.choices import STRATEGIES, Choice
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import CheckpointError

DIM = 70_000  # more than one block
Vector = np.ndarray[Any, Any]

MAKE: dict[str, Callable[[], Strategy]] = {
    "fedavg": lambda: FedAvg(DIM),
    "fedavgm": lambda: FedAvgM(DIM, lr=0.7, momentum=0.9),
    "fedadam": lambda: FedAdam(DIM, lr=0.05, beta1=0.9, beta2=0.99, tau=1e-3),
}
each_strategy = pytest.mark.parametrize("name", MAKE)


def random_vector(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(DIM, generator=torch.Generator().manual_seed(seed))


def one_round(strategy: Strategy, weights: Tensor, round_id: int, *, base: Tensor | None = None) -> Vector:
    """Two clients train; the weights go on in place. Returns the mean of their differences in float64."""
    base = weights if base is None else base
    strategy.begin(round_id, base)
    total = np.zeros(DIM)
    for client_id, num_samples in ((0, 100), (1, 300)):
        delta = random_vector(1000 * round_id + client_id, 0.01)
        payload = codecs.get("fp32").encode(delta)
        strategy.add(
            Update(codecs.parse(payload, expected_dim=DIM)), Facts(client_id=client_id, num_samples=num_samples)
        )
        total += num_samples * delta.double().numpy()
    strategy.finish(weights)
    return total / 400


def reference(name: str) -> Callable[[Vector, Vector], Vector]:
    """The next weights from the weights and the mean difference."""
    m, v = np.zeros(DIM), np.zeros(DIM)

    def step(w: Vector, delta: Vector) -> Vector:
        match name:
            case "fedavg":
                return w + delta
            case "fedavgm":
                v[:] = 0.9 * v + delta
                return w + 0.7 * v
            case _:
                m[:] = 0.9 * m + (1 - 0.9) * delta
                v[:] = 0.99 * v + (1 - 0.99) * delta**2
                return w + 0.05 * m / (np.sqrt(v) + 1e-3)

    return step


@each_strategy
def test_several_rounds_follow_the_formula(name: str) -> None:
    strategy, step = MAKE[name](), reference(name)
    weights = random_vector(1)
    expected = weights.double().numpy()
    for round_id in range(1, 6):
        expected = step(expected, one_round(strategy, weights, round_id))
        assert np.abs(weights.double().numpy() - expected).max() < 2e-6  # a few roundings to float32


@pytest.mark.parametrize("name", ["fedavgm", "fedadam", "scaffold"])
def test_what_a_strategy_keeps_is_float32_whatever_the_default_dtype_of_the_script(name: str) -> None:
    with default_dtype(torch.bfloat16):
        strategy = STRATEGIES.table[name](DIM)
    kept = [tensor for tensor in strategy.state().values() if tensor.numel() == DIM]
    assert kept
    assert all(tensor.dtype == torch.float32 for tensor in kept)


def test_fedavg_is_the_mean_rounded_once() -> None:
    strategy = FedAvg(DIM)
    weights = random_vector(1)
    before = weights.clone()
    delta = one_round(strategy, weights, 1)
    ideal = torch.from_numpy(before.double().numpy() + delta)
    spacing = torch.maximum(ideal.abs().float(), torch.tensor(1e-3)).double() * 2.0**-23
    assert ((weights.double() - ideal).abs() <= 0.51 * spacing + 2.0**-31).all()


def test_clients_that_send_their_weights_and_clients_that_send_differences_count_alike() -> None:
    weights = random_vector(1)
    local = weights + random_vector(2, 0.01)
    results = []
    for payload in (local.numpy().tobytes(), codecs.get("fp32").encode(local - weights)):
        strategy, out = FedAvg(DIM), weights.clone()
        strategy.begin(1, weights)
        strategy.add(Update(codecs.parse(payload, expected_dim=DIM)), Facts(client_id=0, num_samples=10))
        strategy.finish(out)
        results.append(out)
    assert torch.allclose(results[0], local, rtol=0, atol=1e-6)
    assert torch.allclose(results[1], local, rtol=0, atol=1e-6)


def test_the_base_of_the_differences_need_not_be_the_weights() -> None:
    """With a lossy downlink the clients hold another model than the controller."""
    weights, held = random_vector(1), random_vector(2)
    local = held + random_vector(3, 0.01)
    strategy = FedAvg(DIM)
    strategy.begin(1, held)
    strategy.add(Update(codecs.parse(local.numpy().tobytes(), expected_dim=DIM)), Facts(client_id=0, num_samples=10))
    out = weights.clone()
    strategy.finish(out)
    expected = weights.double() + (local.double() - held.double())
    assert (out.double() - expected).abs().max() < 1e-6


@each_strategy
def test_a_round_that_is_started_again_forgets_its_first_attempt(name: str) -> None:
    results = []
    for attempts in (1, 2):
        strategy, weights = MAKE[name](), random_vector(1)
        if attempts == 2:
            strategy.begin(1, weights)
            strategy.add(
                Update(codecs.parse(codecs.get("fp32").encode(random_vector(9)), expected_dim=DIM)),
                Facts(client_id=0, num_samples=5),
            )
        one_round(strategy, weights, 1)
        results.append(weights)
    assert torch.equal(results[0], results[1])


@each_strategy
def test_a_run_goes_on_bit_for_bit_from_a_saved_state(name: str) -> None:
    unbroken, first = MAKE[name](), MAKE[name]()
    weights, saved_weights = random_vector(1), random_vector(1)
    for round_id in range(1, 5):
        one_round(unbroken, weights, round_id)
    for round_id in (1, 2):
        one_round(first, saved_weights, round_id)
    state = {key: tensor.clone() for key, tensor in first.state().items()}
    second = MAKE[name]()
    second.load_state({**state, "weights": saved_weights})  # a checkpoint holds more than the strategy's own
    for round_id in (3, 4):
        one_round(second, saved_weights, round_id)
    assert torch.equal(saved_weights, weights)


@pytest.mark.parametrize(
    ("strategy", "state", "words"),
    [
        (FedAvgM(4), {}, "no 'server_momentum' of 4 values for FedAvgM"),
        (FedAvgM(4), {"server_momentum": torch.zeros(5)}, "no 'server_momentum' of 4 values"),
        (FedAdam(4), {"server_m": torch.zeros(4)}, "no 'server_v' of 4 values for FedAdam"),
        (FedAdam(4), {"server_momentum": torch.zeros(4)}, "no 'server_m' of 4 values"),
    ],
)
def test_the_state_of_another_strategy_or_model_is_refused(
    strategy: Strategy, state: dict[str, Tensor], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        strategy.load_state(state)


def test_an_update_that_cannot_be_used_counts_not_at_all() -> None:
    strategy, weights = FedAvg(4), torch.zeros(4)
    strategy.begin(1, weights)
    strategy.add(
        Update(codecs.parse(codecs.get("fp32").encode(torch.ones(4)), expected_dim=4)),
        Facts(client_id=0, num_samples=10),
    )
    with pytest.raises(ValueError, match="does not fit"):
        strategy.add(
            Update(codecs.parse(codecs.get("fp32").encode(torch.full((4,), 1e30)), expected_dim=4)),
            Facts(client_id=1, num_samples=10),
        )
    strategy.finish(weights)
    assert weights.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", STRATEGIES.table)
def test_a_strategy_of_a_program_has_the_constants_of_one_that_the_configuration_names(name: str) -> None:
    def constants(strategy: Strategy) -> dict[str, float]:
        return {key: value for key, value in vars(strategy).items() if isinstance(value, float)}

    assert constants(STRATEGIES.table[name](8)) == constants(STRATEGIES.make(Choice(name=name), 8))


@pytest.mark.parametrize("name", STRATEGIES.table)
def test_a_strategy_that_was_made_without_a_model_is_once_laid_out_as_one_that_was_made_for_it(name: str) -> None:
    def content(strategy: Strategy) -> dict[str, Any]:
        flat = {**vars(strategy), **vars(strategy).get("_buffers", {})}
        flat.pop("_buffers", None)
        return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in flat.items()}

    checked, made_for_it = (STRATEGIES.make(Choice(name=name), dim) for dim in (1, 8))
    for shapes in ([[1]], [[3, 2], [2]]):
        checked.lay_out(shapes)
    made_for_it.lay_out([[3, 2], [2]])
    assert content(checked) == content(made_for_it)
    assert content(checked)["_dim"] == 8


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("fedavg", FedAvg, {}),
        ("fedavgm", FedAvgM, {"lr": 0.5, "momentum": 0.8}),
        ("fedadam", FedAdam, {"lr": 0.5, "beta1": 0.8, "beta2": 0.7, "tau": 0.1}),
    ],
)
def test_the_configuration_names_the_strategy_and_its_constants(
    name: str, kind: type[Strategy], options: dict[str, float]
) -> None:
    config = FederatedConfig(strategy={"name": name, **options})
    strategy = STRATEGIES.make(config.strategy, 1)
    assert type(strategy) is kind
    weights = torch.zeros(1)
    for round_id in (1, 2):
        strategy.begin(round_id, weights)
        strategy.add(
            Update(codecs.parse(codecs.get("fp32").encode(torch.ones(1)), expected_dim=1)),
            Facts(client_id=0, num_samples=1),
        )
        strategy.finish(weights)
    m, v = (0.2, 0.2 * 0.8 + 0.2), (0.3, 0.3 * 0.7 + 0.3)
    expected = {
        "fedavg": 2.0,
        "fedavgm": 0.5 * 1.0 + 0.5 * 1.8,
        "fedadam": sum(0.5 * m_ / (v_**0.5 + 0.1) for m_, v_ in zip(m, v, strict=True)),
    }
    assert weights.item() == pytest.approx(expected[name], rel=1e-6)


def test_a_wrapped_strategy_has_all_of_the_inner_one_but_its_sums_of_updates() -> None:
    members = {name: one for name, one in vars(Strategy).items() if callable(one) or isinstance(one, property)}
    own = ("Options", "add_sum", "begin", "add", "finish")
    names = [name for name in members if name[0] != "_" and name not in own]
    inner = SimpleNamespace(**{name: object() for name in (*names, *Strategy.__annotations__)})
    inner.weighs_samples = inner.adds_sums = inner.takes_repeats = inner.uses_steps = inner.metrics = None

    wrapped = WrappedStrategy(cast(Strategy, inner))

    assert len(names) >= 15
    assert [name for name in (*names, "epsilon") if getattr(wrapped, name) is not getattr(inner, name)] == []
    inner.name = "fedavg"
    with pytest.raises(NotImplementedError, match="fedavg needs the updates one by one"):
        wrapped.add_sum(cast(PartialSum, None))
