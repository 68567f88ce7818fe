"""Which batches the ranks of an elastic group take, whatever happens to their number."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from gradbus.actors.data_parallel.elastic_plan import ElasticPlan


def order(total: int) -> Iterator[int]:
    return iter(range(total))


def taken(plan: ElasticPlan, step: int) -> list[list[int]]:
    """What each rank takes in one step."""
    return [
        list(itertools.islice(plan.pick(lambda *_: order(plan.total), rank, step), plan.batches_in(rank, step)))
        for rank in range(len(plan.batches))
    ]


@pytest.mark.parametrize("seed", range(40))
def test_no_batch_is_lost_or_taken_twice_however_the_world_changes(seed: int) -> None:
    chance = random.Random(seed)
    total, done, step, accumulation = chance.randint(1, 60), 0, 0, chance.randint(1, 4)
    seen: list[int] = []
    while done < total:
        plan = ElasticPlan.rest_of(total, chance.randint(1, 6), accumulation, done=done, first_step=step)
        last = min(plan.steps, step + chance.randint(0, 4))
        for number in range(step, last):
            mine = taken(plan, number)
            assert len([some for some in mine if some]) == plan.active(number)
            seen += itertools.chain.from_iterable(mine)
        step, done = last, plan.batches_done(last)
    assert seen == list(range(total))
    assert plan.steps == step


def test_a_rank_takes_the_batches_that_it_has_with_a_fixed_world() -> None:
    plan = ElasticPlan.rest_of(12, 3, 1, done=0, first_step=0)
    assert [taken(plan, step) for step in range(plan.steps)] == [
        [[0], [1], [2]],
        [[3], [4], [5]],
        [[6], [7], [8]],
        [[9], [10], [11]],
    ]
    assert plan.batches == (4, 4, 4)


def test_each_batch_of_a_step_has_the_same_part_in_its_mean() -> None:
    plan = ElasticPlan.rest_of(5, 3, 2, done=0, first_step=0)
    counts = [plan.batches_in(rank, 0) for rank in range(3)]
    assert counts == [2, 2, 1]
    shares = [plan.weight(rank, 0) / plan.active(0) / counts[rank] for rank in range(3)]
    assert shares == pytest.approx([1 / 5] * 3)
    full = ElasticPlan.rest_of(6, 3, 2, done=0, first_step=0)
    assert [full.weight(rank, 0) for rank in range(3)] == [1.0] * 3


def test_a_rank_without_a_batch_does_not_count() -> None:
    plan = ElasticPlan.rest_of(4, 3, 1, done=3, first_step=1)
    assert (plan.steps, plan.active(1)) == (2, 1)
    assert taken(plan, 1) == [[3], [], []]


def test_an_epoch_that_was_gone_through_has_no_steps_left() -> None:
    plan = ElasticPlan.rest_of(6, 2, 1, done=6, first_step=3)
    assert plan.steps == 3
    with pytest.raises(ValueError, match="at least one batch"):
        ElasticPlan.rest_of(0, 2, 1, done=0, first_step=0)


@pytest.mark.parametrize("follows", [{0}, {1}, {0, 1}, {0, 2}])
def test_ranks_with_data_are_counted_whichever_ranks_still_wait_for_the_state(follows: set[int]) -> None:
    """The rank that lacks the state may be any of them: a rank that was lost in a step leaves some behind."""
    plan = ElasticPlan.rest_of(20, 3, 1, done=3, first_step=1, follows=follows)
    for step in range(plan.first_step, plan.steps):
        shares = [plan.batches_in(rank, step) for rank in range(3)]
        assert plan.active(step) == sum(share > 0 for share in shares) > 0
        assert sum(plan.weight(rank, step) * (share > 0) for rank, share in enumerate(shares)) == plan.active(step)
