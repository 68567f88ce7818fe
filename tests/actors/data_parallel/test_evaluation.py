"""Counts of all ranks in a training loop of one's own: one result, equal on all of them."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
from dds_domains import new_domain
from group_node import as_ranks

from gradbus.actors import Evaluation, sum_counts
from gradbus.models import Metric
from gradbus.models.task import ShardResult
from gradbus.runtime.collectives import Group
from gradbus.runtime.errors import CollectiveError

COUNTS = [
    ShardResult(correct=3, total=4, loss_sum=2.0, metrics={"rmse": Metric(8.0, 4, "root_mean")}),
    ShardResult(correct=0, total=1, loss_sum=3.0, metrics={"rmse": Metric(1.0, 5, "root_mean")}),
    None,
]


def in_group(script: Any, world: int) -> list[Any]:
    return asyncio.run(as_ranks({"job": "evaluation", "domain": new_domain()}, world, script))


def test_ranks_of_unequal_shares_get_the_numbers_of_the_whole_test_set() -> None:
    async def script(group: Group) -> list[Evaluation]:
        return [await sum_counts(group, COUNTS[group.rank], round_id=epoch) for epoch in range(2)]

    found = [one for of_rank in in_group(script, 3) for one in of_rank]
    assert found == [Evaluation(test_samples=5, correct=3, loss_sum=5.0, metrics={"rmse": 1.0})] * 6
    assert (found[0].accuracy, found[0].loss) == (0.6, 1.0)


def test_ranks_without_right_answers_or_samples_have_no_accuracy() -> None:
    async def script(group: Group) -> list[Evaluation]:
        regression = SimpleNamespace(total=2, loss_sum=1.0)  # a type of one's own
        return [await sum_counts(group, regression), await sum_counts(group, None, name="nothing")]

    for some, nothing in in_group(script, 2):
        assert (some.accuracy, some.loss, some.test_samples) == (None, 0.5, 4)
        assert (nothing.accuracy, nothing.loss, nothing.test_samples) == (None, None, 0)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (ShardResult(correct=5, total=4, loss_sum=0.0), "5 right answers of 4 samples"),
        (ShardResult(correct=None, total=-1, loss_sum=0.0), "-1 samples"),
        (ShardResult(1, 1, 0.0, {"loss": Metric(1.0, math.nan)}), "metric 'loss' has count nan"),
    ],
)
def test_what_cannot_be_counts_is_refused_where_it_is_given(counts: ShardResult, text: str) -> None:
    async def script(group: Group) -> None:
        with pytest.raises(ValueError, match=text):
            await sum_counts(group, counts)

    in_group(script, 1)


@pytest.mark.parametrize(
    "sent",
    [
        None,
        [1, 2.0],
        [1, 2.0, 2, {}],
        [-1, 0.0, None, {}],
        [1, "2", None, {}],
        [1, 1.0, None, {"a": [1, 2]}],
        [1, 1.0, None, {"a": ["mean", 1.0, -1.0]}],
        [1, 1.0, None, {"a": ["median", 1.0, 1.0]}],
        [True, 1.0, True, [1]],
    ],
    ids=str,
)
def test_a_rank_that_sends_something_else_is_named(sent: Any) -> None:
    async def script(group: Group) -> None:
        if group.rank == 1:
            await group.all_gather_object("evaluation", sent)
            return
        with pytest.raises(CollectiveError, match="rank 1 of 2 sent no counts"):
            await sum_counts(group, COUNTS[0])

    in_group(script, 2)


def test_ranks_that_count_a_metric_in_two_ways_are_told_on_all_ranks() -> None:
    async def script(group: Group) -> None:
        kind: Any = ("mean", "max")[group.rank]
        with pytest.raises(CollectiveError, match="rank 1 reports metric 'a' as max, and as mean before"):
            await sum_counts(group, ShardResult(None, 1, 0.0, {"a": Metric(1.0, 1, kind)}))

    in_group(script, 2)
