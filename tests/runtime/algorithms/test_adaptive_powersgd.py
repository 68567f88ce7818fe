"""PowerSGD whose rank follows the loss, with all ranks in one process."""

from __future__ import annotations

import math
from typing import Any

import oracles
import pytest
import torch

from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.runtime.algorithms.adaptive_powersgd import AdaptivePowerSGD, relative_spread
from gradbus.runtime.algorithms.base import Place, Step, bucket_of, make_algorithm
from gradbus.runtime.errors import ConfigError

SHAPES = {"a": (40, 33), "b": (30, 50), "bias": (6,)}


class Ranks:
    """The algorithm on all ranks, with a bucket for each tensor."""

    def __init__(self, world: int, **options: Any) -> None:
        found = [make_algorithm("adaptive-powersgd", Place(r, world), {"min_rate": 0, **options}) for r in range(world)]
        self.algorithms: list[AdaptivePowerSGD] = found  # type: ignore[assignment]
        self.lockstep = Lockstep(world)
        self.number = 0

    def step(self, loss: float, *, bad: bool = False) -> list[int]:
        """One step after one with this loss. Returns the rank that each tensor had, "a" and "b"."""
        torch.manual_seed(self.number)
        step = Step(self.number, active=len(self.algorithms), loss=loss)
        for index, (name, shape) in enumerate(SHAPES.items()):
            buckets = [bucket_of({name: torch.randn(shape)}, index) for _ in self.algorithms]
            if bad:
                buckets[0].flat.fill_(math.nan)
            self.lockstep.run([a.exchange(b, step) for a, b in zip(self.algorithms, buckets, strict=True)])
            assert all(torch.equal(b.flat, buckets[0].flat) or bad for b in buckets)
        for algorithm in self.algorithms:
            (algorithm.roll_back if bad else algorithm.commit)()
        self.number += not bad
        first, *others = [[int(a.memory.find("q", name).shape[1]) for name in "ab"] for a in self.algorithms]  # type: ignore[union-attr]
        assert all(other == first for other in others)
        return first


def losses_of(kind: str, steps: int) -> list[float]:
    noise = torch.rand(steps, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    falling = [2.0 - 0.005 * step for step in range(steps)]
    spread = {"steady": 0.0, "between": 0.2, "unsteady": 1.5}[kind]
    return [one + spread * (float(more) - 0.5) for one, more in zip(falling, noise, strict=True)]


@pytest.mark.parametrize(("kind", "last"), [("steady", 2), ("between", 4), ("unsteady", 8)])
def test_the_rank_follows_the_spread_of_the_loss_within_its_bounds(kind: str, last: int) -> None:
    losses = losses_of(kind, 60)
    ranks = Ranks(2)
    found = [ranks.step(math.nan)[0]] + [ranks.step(loss)[0] for loss in losses]
    assert found == [4, *oracles.ranks_by_loss(losses, 4, 2, 8, 10)]
    assert found[-1] == last
    assert set(found[:10]) == {4}  # not before the window is full


def test_a_loss_that_falls_steadily_has_no_spread_and_its_unit_does_not_matter() -> None:
    assert relative_spread([3 - 0.1 * step for step in range(10)]) < 1e-12
    losses = losses_of("unsteady", 10)
    assert relative_spread([loss * 1024 for loss in losses]) == relative_spread(losses)
    assert relative_spread([-loss for loss in losses]) == relative_spread(losses)
    assert relative_spread([0.0] * 5) == 0


def test_all_tensors_have_the_rank_of_the_step_whatever_their_bucket() -> None:
    ranks = Ranks(2, window_steps=3)
    for loss in losses_of("unsteady", 20):
        first, second = ranks.step(loss)
        assert first == second


def test_columns_of_q_that_stay_are_kept_when_the_rank_changes() -> None:
    ranks = Ranks(1, rank=4)
    ranks.step(1.0)
    algorithm = ranks.algorithms[0]
    before = algorithm.memory.find("q", "a")
    assert before is not None
    for rank in (3, 5):
        q = algorithm._q("a", rank, 33)  # noqa: SLF001 - a step would have multiplied it already
        kept = min(rank, 4)
        assert torch.equal(q[:kept], before.T[:kept] / before.T[:kept].abs().amax(1, keepdim=True))
        assert bool((q != 0).any(1).all())


def test_a_step_that_is_skipped_does_not_count_its_loss_twice() -> None:
    losses = losses_of("unsteady", 40)
    once, twice = Ranks(2), Ranks(2)
    for number, loss in enumerate(losses):
        if number % 7 == 3:
            twice.step(loss, bad=True)
        assert once.step(loss) == twice.step(loss)


def test_a_run_goes_on_with_its_rank_and_window() -> None:
    losses = losses_of("unsteady", 40)
    whole, first, then = Ranks(2, window_steps=7), Ranks(2, window_steps=7), Ranks(2, window_steps=7)
    expected = [whole.step(loss) for loss in losses]
    for loss in losses[:25]:
        first.step(loss)
    for old, new in zip(first.algorithms, then.algorithms, strict=True):
        new.load_state(old.own_state(), first.algorithms[0].shared_state())
    then.number = 25
    assert [then.step(loss) for loss in losses[25:]] == expected[25:]


def test_bounds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected smallest_rank <= rank <= largest_rank, got 2, 1, 8"):
        make_algorithm("adaptive-powersgd", Place(0, 1), {"rank": 1})
    with pytest.raises(ConfigError, match="has to be less than grow_above"):
        make_algorithm("adaptive-powersgd", Place(0, 1), {"shrink_below": 0.2})
