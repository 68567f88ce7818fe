"""Local SGD, post-local SGD and NoLoCo against NumPy, with all ranks in one process."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch
from local_training import LocalTraining, gradients_of
from pydantic import ValidationError

from gradbus.runtime.algorithms.base import Place, Step, make_algorithm
from gradbus.runtime.algorithms.noloco import NoLoCo, random_partner
from gradbus.runtime.errors import ConfigError

LR, SIZE = 0.05, 41


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("steps", "dense_steps"), [(1, None), (3, None), (4, 5), (2, 0)])
def test_weights_are_the_mean_after_every_few_steps(world: int, steps: int, dense_steps: int | None) -> None:
    name, options = ("local-sgd", {}) if dense_steps is None else ("post-local-sgd", {"dense_steps": dense_steps})
    training = LocalTraining(name, world, torch.ones(SIZE), LR, steps=steps, **options)
    ranks = [oracles.LocalRank(np.ones(SIZE), LR) for _ in range(world)]
    for number, gradients in enumerate(gradients_of(world, 13, SIZE)):
        training.step(gradients)
        for rank, gradient in zip(ranks, gradients, strict=True):
            rank.step(gradient.numpy())
        if (number + 1) % steps == 0 or number < (dense_steps or 0):
            average = oracles.mean([rank.theta for rank in ranks])
            for rank in ranks:
                rank.theta = average.copy()
        for own, rank in zip(training.weights, ranks, strict=True):
            assert np.array_equal(own.numpy(), rank.theta)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_pairs_step_as_the_formulas_say(world: int) -> None:
    options = {"outer_lr": 0.7, "outer_momentum": 0.3, "consensus": 0.9}
    training = LocalTraining("noloco", world, torch.ones(SIZE), LR, steps=3, seed=4, **options)
    oracle = oracles.NolocoOracle(np.ones(SIZE), world, LR, **options)
    for number, gradients in enumerate(gradients_of(world, 14, SIZE)):
        training.step(gradients)
        exchange = (number + 1) // 3
        partners = [random_partner(rank, world, exchange, 4) for rank in range(world)]
        oracle.step([one.numpy() for one in gradients], partners if (number + 1) % 3 == 0 else None)
        for own, rank in zip(training.weights, oracle.ranks, strict=True):
            assert np.abs(own.numpy() - rank.theta).max() < 1e-5


@pytest.mark.parametrize("world", [1, 2, 3, 8, 9])
def test_all_ranks_are_paired_but_for_one_and_in_time_with_everybody(world: int) -> None:
    met = {rank: set[int]() for rank in range(world)}
    for number in range(200):
        partners = [random_partner(rank, world, number, seed=1) for rank in range(world)]
        assert partners.count(None) == world % 2
        for rank, partner in enumerate(partners):
            if partner is not None:
                assert partners[partner] == rank != partner
                met[rank].add(partner)
    assert all(others == set(range(world)) - {rank} for rank, others in met.items())
    assert [random_partner(0, 9, number, 1) for number in range(9)] != [random_partner(0, 9, n, 2) for n in range(9)]


def test_ranks_of_noloco_stay_close_where_local_steps_alone_would_drift() -> None:
    training = LocalTraining("noloco", 4, torch.zeros(SIZE), LR, steps=2)
    apart = LocalTraining("local-sgd", 4, torch.zeros(SIZE), LR, steps=1000)
    for gradients in gradients_of(4, 200, SIZE):
        training.step(gradients)
        apart.step(gradients)

    def spread(one: LocalTraining) -> float:
        return float(torch.stack(one.weights).std(dim=0).norm())

    assert spread(training) < spread(apart) / 4


@pytest.mark.parametrize(("momentum", "consensus"), [(0.0, 1.9), (0.3, 0.7), (0.5, 1.0), (0.7, 0.5), (0.9, 0.3)])
def test_ranks_that_are_apart_come_together_with_every_consensus_that_is_allowed(
    momentum: float, consensus: float
) -> None:
    options = {"outer_momentum": momentum, "consensus": consensus, "outer_lr": 0.1}
    training = LocalTraining("noloco", 16, torch.zeros(SIZE), LR, steps=1, **options)
    for gradients in gradients_of(16, 3, SIZE):
        training.step(gradients)
    before = torch.stack(training.weights).std(dim=0).norm()
    for _ in range(250):
        training.step([torch.zeros(SIZE) for _ in range(16)])
    assert torch.stack(training.weights).std(dim=0).norm() < before / 5


def test_a_consensus_that_drives_ranks_apart_is_refused() -> None:
    for momentum, consensus in ((0.9, 1.0), (0.9, 0.7), (0.3, 1.9), (0.0, 2.0)):
        with pytest.raises(ValidationError, match="variance between them grows"):
            NoLoCo.Options(outer_momentum=momentum, consensus=consensus)


def test_what_one_exchange_of_noloco_sends_does_not_grow_with_the_ranks() -> None:
    for world in (2, 8):
        training = LocalTraining("noloco", world, torch.zeros(SIZE), LR, steps=2)
        for gradients in gradients_of(world, 2, SIZE):
            training.step(gradients)
        assert training.lockstep.cost.bytes_out == [2 * 4 * SIZE] * world
    assert not make_algorithm("local-sgd", Place(0, 1), {"steps": 1}).is_due(Step(0))


@pytest.mark.parametrize(
    ("name", "options", "most"),
    [
        ("local-sgd", {"steps": 3}, 3),
        ("post-local-sgd", {"steps": 3, "dense_steps": 0}, 3),
        ("post-local-sgd", {"steps": 3, "dense_steps": 5}, 1),
        ("async-averaging", {"every_steps": 2}, 2),
        ("decentralized", {"peers": "all", "interval_steps": 2}, 2),
        ("sparseloco", {"steps": 3}, 3),
        ("noloco", {"steps": 3}, 3),
    ],
)
def test_ranks_come_together_with_the_longest_delay_that_is_allowed_and_a_longer_one_is_refused(
    name: str, options: dict[str, int | str], most: int
) -> None:
    training = LocalTraining(name, 2, torch.zeros(SIZE), LR, **options)
    with pytest.raises(ConfigError, match=f"every {most} steps.*at most {most}$"):
        training.algorithms[0].check_delay(most + 1)
    for algorithm in training.algorithms:
        algorithm.delay_steps = algorithm.check_delay(most)
    for gradients in gradients_of(2, 7, SIZE):
        training.step(gradients)
    for _ in range(40):
        training.step([torch.zeros(SIZE)] * 2)
    assert torch.allclose(*training.weights, atol=1e-6)
