"""What makes a model of updates that come late, against their formulas in float64 of NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation.decoupled import Decoupled
from gradbus.actors.aggregation.delayed_nesterov import DelayedNesterov
from gradbus.actors.aggregation.strategies import FedAvg, FedAvgM, Strategy
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.actors.federated.controller.asynchronous import BaseGone, Bases
from gradbus.runtime.config.federated import AsynchronousSettings
from gradbus.runtime.errors import CheckpointError, ConfigError

SHAPES = [(200, 300), (300,), (40, 30), (5,)]
DIM = sum(int(np.prod(shape)) for shape in SHAPES)  # more than one block
Vector = np.ndarray[Any, Any]


def vector(seed: int, scale: float = 0.01) -> Tensor:
    return scale * torch.randn(DIM, generator=torch.Generator().manual_seed(seed))


def parsed(values: Tensor, version: int = 2) -> codecs.Parsed:
    return codecs.parse(codecs.get("fp32", version=version).encode(values), expected_dim=DIM)


def commit(strategy: Strategy, weights: Tensor, updates: Sequence[tuple[Tensor, int]], round_id: int = 1) -> None:
    strategy.begin(round_id, weights)
    for client_id, (delta, num_samples) in enumerate(updates):
        strategy.add(Update(parsed(delta)), Facts(client_id=client_id, num_samples=num_samples))
    strategy.finish(weights)


def worst(weights: Tensor, expected: Vector) -> float:
    return float(np.abs(weights.double().numpy() - expected).max())


@pytest.mark.parametrize("version", [1, 2])
def test_a_buffer_weighs_each_update_by_its_staleness_whatever_the_order(version: int) -> None:
    codec = codecs.get("fp32", version=version)
    bases = Bases(AsynchronousSettings(), codec, DIM)
    models = {round_id: vector(round_id, 1.0) for round_id in range(1, 5)}
    for round_id, model in models.items():
        bases.keep(round_id, model)
    arrivals = [(4, 100, 11), (2, 300, 12), (4, 200, 13), (1, 50, 14)]  # round, samples, seed of the difference
    found = []
    for order in (arrivals, arrivals[::-1]):
        weights, strategy = models[4].clone(), FedAvg(DIM)
        strategy.begin(4, weights)
        for client_id, (round_id, samples, seed) in enumerate(order):
            delta = vector(seed)
            update = parsed(models[round_id] + delta if version == 1 else delta, version)
            brought = bases.brought(update, round_id, 4 - round_id)
            strategy.add(Update(brought), Facts(client_id=client_id, num_samples=samples))
        strategy.finish(weights)
        found.append(weights)
    assert torch.equal(*found)
    change = sum(n * vector(seed).double().numpy() / np.sqrt(1 + 4 - r) for r, n, seed in arrivals)
    assert worst(found[0], models[4].double().numpy() + change / 650) < 1e-6


def test_a_base_that_had_to_make_room_is_missed_only_by_updates_that_hold_weights() -> None:
    settings = AsynchronousSettings(bases_bytes=3 * 4 * DIM)
    for version in (1, 2):
        bases = Bases(settings, codecs.get("fp32", version=version), DIM)
        for round_id in range(1, 6):
            bases.keep(round_id, vector(round_id))
        old = parsed(vector(9), version)
        bases.brought(old, 3, 2)
        if version == 2:
            bases.brought(old, 1, 4)
            continue
        with pytest.raises(BaseGone, match="before round 1 is no longer kept"):
            bases.brought(old, 1, 4)
    Bases(AsynchronousSettings(bases_bytes=2 * 4 * DIM), codecs.get("fp32", version=1), DIM)
    with pytest.raises(ConfigError, match="two models"):  # the newest is one of them
        Bases(AsynchronousSettings(bases_bytes=2 * 4 * DIM - 1), codecs.get("fp32", version=1), DIM)
    with pytest.raises(ConfigError, match=r"no room .* set federated.codec.version=2"):
        Bases(AsynchronousSettings(bases_bytes=100), codecs.get("fp32", version=1), DIM)


def test_nesterov_momentum_at_the_server_follows_diloco() -> None:
    weights, m, strategy = vector(1, 1.0), np.zeros(DIM), FedAvgM(DIM, lr=0.7, momentum=0.9, nesterov=True)
    expected = weights.double().numpy()
    for round_id in range(1, 5):
        deltas = [vector(10 * round_id + client_id) for client_id in range(2)]
        commit(strategy, weights, [(delta, 10) for delta in deltas], round_id)
        outer = -sum(delta.double().numpy() for delta in deltas) / 2  # Delta = mean(theta - theta_k)
        m = 0.9 * m + outer
        expected = expected - 0.7 * (outer + 0.9 * m)
        assert worst(weights, expected) < 2e-6


def test_delayed_nesterov_changes_its_momentum_at_every_nth_arrival_also_after_a_resume() -> None:
    every, lr, beta = 3, 0.7, 0.9
    weights, strategy = vector(1, 1.0), DelayedNesterov(DIM, lr=lr, momentum=beta, every=every)
    theta, m, delta = weights.double().numpy(), np.zeros(DIM), np.zeros(DIM)
    for arrival in range(1, 9):
        commit(strategy, weights, [(vector(arrival), 7 * arrival)], arrival)
        g = -vector(arrival).double().numpy()
        theta, delta = theta - lr * g / every, delta + g
        if arrival % every == 0:
            m = beta * m + delta / every
            theta, delta = theta - lr * beta * m, np.zeros(DIM)
        assert worst(weights, theta) < 1e-6
        resumed = DelayedNesterov(DIM, lr=lr, momentum=beta, every=every)
        resumed.load_state({name: tensor.clone() for name, tensor in strategy.state().items()})
        strategy = resumed
    with pytest.raises(CheckpointError, match="server_arrived"):
        DelayedNesterov(DIM, every=2).load_state({**strategy.state(), "server_arrived": torch.tensor([2])})


def test_the_decoupled_merge_is_the_mean_length_times_the_mean_direction_of_each_matrix() -> None:
    updates = [(vector(seed, scale), samples) for seed, scale, samples in ((1, 0.01, 10), (2, 0.05, 30), (3, 0.02, 5))]
    found = []
    for order in (updates, updates[::-1]):
        weights, strategy = vector(9, 1.0), Decoupled(DIM, lr=1.0, momentum=0.0, nesterov=False)
        strategy.lay_out(SHAPES)
        commit(strategy, weights, order)
        found.append(weights)
    assert torch.equal(*found)
    expected, start, total = vector(9, 1.0).double().numpy(), 0, sum(n for _, n in updates)
    for shape in SHAPES:
        place = slice(start, start := start + int(np.prod(shape)))
        parts = [(delta.double().numpy()[place], n) for delta, n in updates]
        if len(shape) == 1:
            expected[place] += sum(n * part for part, n in parts) / total
            continue
        unit = sum(n * part / np.linalg.norm(part) for part, n in parts) / total
        expected[place] += sum(n * np.linalg.norm(part) for part, n in parts) / total * unit / np.linalg.norm(unit)
    assert worst(found[0], expected) < 1e-6


def test_a_matrix_that_nobody_changed_stays_as_it_is() -> None:
    weights, strategy = vector(9, 1.0), Decoupled(DIM)
    before = weights.clone()
    strategy.lay_out(SHAPES)
    commit(strategy, weights, [(torch.zeros(DIM), 3)])
    assert torch.equal(weights, before)


def test_the_merge_of_directions_takes_no_matrix_that_is_longer_than_the_exact_sum_has_room_for() -> None:
    strategy, weights = Decoupled(DIM), torch.zeros(DIM)
    strategy.lay_out([(DIM // 2, 2), (DIM % 2,)])
    strategy.begin(1, weights.clone())
    with pytest.raises(ValueError, match="norm"):
        strategy.add(Update(parsed(torch.full((DIM,), 1e30), 2)), Facts(client_id=0, num_samples=1))
