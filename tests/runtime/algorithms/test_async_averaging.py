"""Asynchronous model averaging against NumPy, with all ranks in one process."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch

from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.runtime.algorithms.base import Place, Step, bucket_of, make_algorithm

LR = 0.1


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize(("every", "delay"), [(1, 1), (4, 1), (3, 2), (2, 2)])
def test_averages_are_applied_late_and_in_order(world: int, every: int, delay: int) -> None:
    """As drivers do: what the exchange of a step has changed is added ``delay`` steps later; all of it at the end."""
    random = torch.Generator().manual_seed(world)
    gradients = [[torch.randn(50, generator=random) for _ in range(world)] for _ in range(11)]
    arrays = [[one.double().numpy() for one in step] for step in gradients]
    expected, last = oracles.averaged_late(arrays, np.ones(50), LR, every, delay)
    algorithms = [make_algorithm("async-averaging", Place(r, world), {"every_steps": every}) for r in range(world)]
    lockstep, live, pending = Lockstep(world), [torch.ones(50) for _ in range(world)], {}
    for number, own in enumerate(gradients):
        for weights, gradient in zip(live, own, strict=True):
            weights.sub_(gradient, alpha=LR)
        for weights, change in zip(live, pending.pop(number - delay, ()), strict=False):
            weights.add_(change)
        if algorithms[0].is_due(Step(number)):
            buckets = [bucket_of({"w": weights}) for weights in live]
            lockstep.run([a.exchange(b, Step(number)) for a, b in zip(algorithms, buckets, strict=True)])
            pending[number] = [b.flat - weights for b, weights in zip(buckets, live, strict=True)]
        for weights, there in zip(live, expected[number], strict=True):
            assert np.abs(weights.numpy() - there).max() < 1e-5
    for number in sorted(pending):
        for weights, change in zip(live, pending[number], strict=True):
            weights.add_(change)
    for weights, there in zip(live, last, strict=True):
        assert np.abs(weights.numpy() - there).max() < 1e-5
    alone = 1 - LR * sum(rank for step in arrays for rank in step) / world
    assert np.abs(np.mean(last, axis=0) - alone).max() < 1e-9  # an average does not change the mean
    assert lockstep.cost.phases == ([11 // every] * world if world > 1 else [0])


def test_it_is_declared_late_and_its_replicas_may_differ() -> None:
    algorithm = make_algorithm("async-averaging", Place(0, 2))
    assert (algorithm.scope, algorithm.delay_steps, algorithm.equal_replicas) == ("weights", 1, False)
    assert not make_algorithm("async-averaging", Place(0, 1)).is_due(Step(3))
