"""Decentralized SGD and the Adam family against NumPy, with all ranks in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
import torch

from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.runtime.algorithms.base import Place, Step, bucket_of, make_algorithm
from gradbus.runtime.algorithms.decentralized import partner
from gradbus.runtime.errors import ConfigError

WORLDS = (1, 2, 3, 4, 5, 8)


class Weights:
    """The weights of all ranks, ``[rank]`` float32 of shape (n,), and an algorithm that averages them."""

    def __init__(self, world: int, numel: int = 200, **options: Any) -> None:
        torch.manual_seed(world)
        self.now = [torch.randn(numel) for _ in range(world)]
        self.algorithms = [make_algorithm("decentralized", Place(r, world), options) for r in range(world)]
        self.lockstep = Lockstep(world)
        self.step = 0

    def exchange(self) -> None:
        buckets = [bucket_of({"w": weights}) for weights in self.now]
        step = Step(self.step, active=len(self.now))
        self.lockstep.run([a.exchange(b, step) for a, b in zip(self.algorithms, buckets, strict=True)])
        for algorithm in self.algorithms:
            algorithm.commit()
        self.now = [bucket.flat for bucket in buckets]
        self.step += 1

    @property
    def mean(self) -> torch.Tensor:
        return torch.stack(self.now).double().mean(0)

    @property
    def spread(self) -> float:
        return float(torch.stack(self.now).std(0, correction=0).mean())


@pytest.mark.parametrize("world", WORLDS)
def test_partners_are_mutual_and_all_pairs_meet(world: int) -> None:
    rounds = world - 1 + world % 2
    met = set()
    for number in range(rounds):
        for rank in range(world):
            peer = partner(rank, world, number)
            if peer is not None:
                assert partner(peer, world, number) == rank != peer
                met.add(frozenset((rank, peer)))
        alone = [rank for rank in range(world) if partner(rank, world, number) is None]
        assert len(alone) == world % 2
    assert len(met) == world * (world - 1) // 2
    with pytest.raises(ConfigError):
        partner(world, world, 0)


@pytest.mark.parametrize("world", WORLDS)
def test_shift_one_is_the_mean_with_the_partner(world: int) -> None:
    weights = Weights(world, peers="shift-one")
    for step in range(5):
        before = [one.numpy() for one in weights.now]
        weights.exchange()
        for rank, found in enumerate(weights.now):
            peer = partner(rank, world, step)
            expected = before[rank] if peer is None else (before[rank] + before[peer]) * np.float32(0.5)
            assert found.numpy().tobytes() == expected.tobytes()


def test_all_is_the_mean_of_all() -> None:
    weights = Weights(3, peers="all")
    expected = oracles.mean([one.numpy() for one in weights.now])
    weights.exchange()
    assert all(one.numpy().tobytes() == expected.tobytes() for one in weights.now)


@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("options", [{"peers": "shift-one"}, {"peers": "ring"}, {"peers": "choco", "density": 0.2}])
def test_ranks_come_together_and_their_mean_stays(world: int, options: dict[str, Any]) -> None:
    weights = Weights(world, **options)
    mean, spread, before = weights.mean, weights.spread, weights.spread
    for _ in range(120):
        weights.exchange()
        assert weights.spread <= before * 1.05 + 1e-6
        before = weights.spread
    assert weights.spread < max(1e-6, 0.02 * spread)
    assert float((weights.mean - mean).abs().max()) < 1e-5


def test_no_kind_of_state_means_one_thing_for_the_ring_and_another_for_choco() -> None:
    kinds = []
    for peers in ("ring", "choco"):
        weights = Weights(3, peers=peers)
        for _ in range(2):
            weights.exchange()
        kinds.append({name.partition("/")[0] for name in weights.algorithms[0].own_state()})
    assert kinds == [{"replica", "left", "right", "residual"}, {"known", "around"}]


@pytest.mark.parametrize("world", [2, 3, 5])
def test_replicas_of_neighbours_are_what_these_have_bit_by_bit(world: int) -> None:
    weights = Weights(world, peers="ring", chunk_elems=64)
    for _ in range(4):
        weights.exchange()
        for rank, algorithm in enumerate(weights.algorithms):
            for kind, peer in (("left", (rank - 1) % world), ("right", (rank + 1) % world)):
                kept = algorithm.memory.find(kind, "bucket0")
                theirs = weights.algorithms[peer].memory.find("replica", "bucket0")
                assert kept is not None
                assert theirs is not None
                assert torch.equal(kept, theirs)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_ring_is_the_mean_with_both_neighbours_in_8_bits(world: int) -> None:
    weights = Weights(world, peers="ring", chunk_elems=64)
    expected, step = oracles.low_precision_ring([one.numpy() for one in weights.now], 6, 64)
    for one in expected:
        weights.exchange()
        for found, wanted in zip(weights.now, one, strict=True):
            off = np.abs(found.numpy() - wanted)
            assert off.max() <= 1.01 * step  # a value in the middle of two may go up
            assert np.median(off) < 1e-6


def test_choco_is_algorithm_2_of_its_paper() -> None:
    world, gamma, density, numel = 4, 0.3, 0.1, 200
    weights = Weights(world, numel, peers="choco", consensus=gamma, density=density)
    x = [one.numpy().astype(np.float64) for one in weights.now]
    x_hat = [np.zeros(numel) for _ in range(world)]
    for _ in range(6):
        for rank in range(world):
            chosen = oracles.largest((x[rank] - x_hat[rank]).astype(np.float32), int(density * numel))
            x_hat[rank][chosen] = x[rank][chosen]
        x = [
            x[r] + gamma * sum((x_hat[p] - x_hat[r]) / 3 for p in ((r - 1) % world, (r + 1) % world))
            for r in range(world)
        ]
        weights.exchange()
        for rank in range(world):
            assert np.abs(weights.now[rank].numpy() - x[rank]).max() < 1e-5


@pytest.mark.parametrize("world", [2, 4, 8])
def test_shift_one_sends_one_model_a_step(world: int) -> None:
    weights = Weights(world, peers="shift-one")
    weights.exchange()
    assert weights.lockstep.cost.bytes_out == [4 * 200] * world


def test_an_interval_leaves_steps_without_a_request() -> None:
    weights = Weights(3, peers="all", interval_steps=4)
    phases = []
    for _ in range(9):
        weights.exchange()
        phases.append(max(weights.lockstep.cost.phases))
    assert phases == [1, 1, 1, 1, 2, 2, 2, 2, 3]


def adam(gradients: list[np.ndarray], warmup: int) -> list[np.ndarray]:
    """Steps of Adam, without the learning rate, on mean gradients; after the warm-up v is frozen."""
    m, v, found = np.zeros(gradients[0].size), np.zeros(gradients[0].size), []
    for t, g in enumerate(gradients, start=1):
        m = 0.9 * m + 0.1 * g
        if t <= warmup:
            v = 0.999 * v + 0.001 * g * g
        found.append((m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999 ** min(t, warmup))) + 1e-8))
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", ["qadam", "onebit-adam"])
def test_the_adam_family_is_adam_with_a_frozen_second_moment(name: str, world: int) -> None:
    torch.manual_seed(0)
    steps = [[torch.randn(300) for _ in range(world)] for _ in range(12)]
    if name == "qadam":  # the mean of momenta in 8 bits is nearly that of gradients
        tolerance = 0.05
        expected = adam([oracles.mean([one.numpy() for one in step]).astype(np.float64) for step in steps], warmup=8)
    else:
        tolerance = 1e-4
        expected = oracles.one_bit_adam([[one.numpy() for one in step] for step in steps], warmup=8)
    algorithms = [make_algorithm(name, Place(r, world), {"warmup_steps": 8}) for r in range(world)]
    lockstep = Lockstep(world)
    for number, own in enumerate(steps):
        buckets = [bucket_of({"a": x[:100].reshape(10, 10), "b": x[100:]}) for x in own]
        step = Step(number, active=world)
        lockstep.run([a.exchange(b, step) for a, b in zip(algorithms, buckets, strict=True)])
        for algorithm in algorithms:
            algorithm.commit()
        assert all(torch.equal(bucket.flat, buckets[0].flat) for bucket in buckets)
        worst = float(np.abs(buckets[0].flat.numpy() - expected[number]).max())
        assert worst < (1e-4 if number < 8 else tolerance * float(np.abs(expected[number]).max()))


def test_what_one_bit_adam_leaves_out_is_kept_by_both_sides() -> None:
    """The sum of what was applied and of both errors is the sum of what came in, in each step."""
    world, numel = 3, 90
    torch.manual_seed(1)
    algorithms = [make_algorithm("onebit-adam", Place(r, world), {"warmup_steps": 1}) for r in range(world)]
    sums = []
    for algorithm in algorithms:
        m = torch.randn(numel)
        sums.append((algorithm, m))

    def momenta(number: int) -> list[Any]:
        return [
            a.mean_momentum(m, bucket_of({"a": m}), Step(number))  # type: ignore[attr-defined]
            for a, m in sums
        ]

    total_in, total_out = torch.zeros(numel).double(), torch.zeros(numel).double()
    lockstep = Lockstep(world)
    for number in range(5):
        total_out += lockstep.run(momenta(number))[0].double()
        total_in += torch.stack([m for _, m in sums]).double().mean(0)
        for algorithm, _ in sums:
            algorithm.commit()
        worker = torch.stack([a.memory.find("worker_error", "a") for a, _ in sums]).double().mean(0)  # type: ignore[misc]
        server = torch.cat([a.memory.find("server_error", "a") for a, _ in sums]).double()  # type: ignore[misc]
        assert torch.allclose(total_out + worker + server, total_in, atol=1e-5)
