"""Evaluate in a training loop of your own: each rank counts on its part of the test set, all get the whole result.

    counts = task.evaluate_shard(model, rank=group.rank, world=group.world)     # or any object with these counts
    result = await sum_counts(group, counts, round_id=epoch)
    print(result.accuracy, result.loss)

Sums and counts travel, never means: ranks need not have equally many samples, and a rank may have none. A Worker
combines its evaluations with the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, get_args

from gradbus.actors.data_parallel.metrics import MetricKind, combined, tally
from gradbus.actors.data_parallel.task import ShardCounts
from gradbus.runtime.collectives import Group
from gradbus.runtime.errors import CollectiveError

MAX_SAMPLES = 1 << 53  # of a rank: whole numbers up to here are exact in any program


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Holds what all ranks counted together, equal on all of them.

    Attributes:
        test_samples: number of samples. correct: right answers; None if some rank counted none.
        loss_sum: sum of the losses of all samples.
        metrics: by name, combined over all ranks as their kind says.
    """

    test_samples: int
    correct: int | None
    loss_sum: float
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """Return the share of right answers; None without samples, or where they were not counted."""
        return self.correct / self.test_samples if self.test_samples and self.correct is not None else None

    @property
    def loss(self) -> float | None:
        """Return the mean loss of a sample; None without samples."""
        return self.loss_sum / self.test_samples if self.test_samples else None

    @classmethod
    def of(cls, tallies: Sequence[Sequence[Any]]) -> Self:
        """Combine the tallies of all ranks, in rank order: samples, sum of losses, right answers, metrics of each.

        Raises:
            ValueError: ranks report a metric with different kinds.
        """
        totals, loss_sums, corrects, metrics = zip(*tallies, strict=True)
        return cls(
            test_samples=sum(totals),
            correct=None if None in corrects else sum(corrects),
            loss_sum=sum(loss_sums),
            metrics=combined(metrics),
        )


async def sum_counts(
    group: Group,
    counts: ShardCounts | None,
    *,
    name: str = "evaluation",
    round_id: int = 0,
    timeout_s: float | None = None,
) -> Evaluation:
    """Add up what the ranks of a group counted, each on its own part of the test set. All ranks call it.

    Args:
        counts: of this rank: ``total``, ``loss_sum``, and, where they are there, ``correct`` and ``metrics``, as
            ``gradbus.models.ShardResult`` has them. None: this rank has no test samples.
        name, round_id, timeout_s: as of any collective; one evaluation is told from the next by its ``round_id``.

    Raises:
        ValueError: these are no counts, as with more right answers than samples.
        CollectiveError: those of another rank are none; the text names the rank. And what collectives raise.
    """
    own = list(tally(counts))
    if problem := _problem_of(own):
        raise ValueError(f"sum_counts: {problem}")
    of_ranks: list[Any] = await group.all_gather_object(name, own, round_id=round_id, timeout_s=timeout_s)
    for rank, one in enumerate(of_ranks):
        if problem := _problem_of(one):
            raise CollectiveError(f"{name}: rank {rank} of {group.world} sent no counts: {problem}")
    try:
        return Evaluation.of(of_ranks)
    except ValueError as error:
        raise CollectiveError(f"{name}: {error}") from None


def _problem_of(counts: Any) -> str:
    """Return what is wrong with a tally; "" if nothing is."""
    match counts:
        case [int(total), float(), int() | None as correct, dict(metrics)] if not isinstance(total, bool):
            pass
        case _:
            return f"expected samples, sum of losses, right answers and metrics, got {counts!r:.100}"
    if not 0 <= total <= MAX_SAMPLES:
        return f"{total} samples, expected 0 to 2**53"
    if correct is not None and not 0 <= correct <= total:
        return f"{correct} right answers of {total} samples"
    wrong = (text for name, metric in metrics.items() if (text := _problem_of_metric(name, metric)))
    return next(wrong, "")


def _problem_of_metric(name: Any, metric: Any) -> str:
    match metric:
        case [str(kind), float(), float(count)] if isinstance(name, str) and kind in get_args(MetricKind):
            return "" if count >= 0 else f"metric {name!r:.70} has count {count}"
    return f"metric {name!r:.70} is {metric!r:.70}, expected kind, value and count"
