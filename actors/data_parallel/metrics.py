"""Metrics by name: numbers that a task reports of batches and of its part of a test set, combined over all of them.

Sums and counts are combined, never means: ranks, and batches, need not have equally many samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

MAX_METRICS = 64
MAX_NAME_CHARS = 64
MetricKind = Literal["sum", "mean", "root_mean", "max", "min"]


class MetricLike(Protocol):
    """A number that can be combined with others of its name. ``gradbus.models.Metric`` is one."""

    @property
    def value(self) -> float | Tensor:
        """The sum over the samples; for ``max`` and ``min`` that value."""

    @property
    def count(self) -> float | Tensor:
        """Samples."""

    @property
    def kind(self) -> str:
        """One of :data:`MetricKind`."""


Reported = Mapping[str, MetricLike | tuple[float | Tensor, float | Tensor]]
"""What a task reports: by name a metric, or a pair of a sum and a count, which stands for a mean."""

Plain = dict[str, tuple[str, float, float]]
"""By name kind, value and count, as JSON and the wire have them."""


class MetricSums:
    """Metrics so far. Values may be tensors, which are not read before :meth:`plain`: that would wait for a device."""

    def __init__(self, plain: Mapping[str, Any] | None = None) -> None:
        """``plain``: as :meth:`plain` gives it."""
        self._sums: dict[str, tuple[str, Any, Any]] = {name: tuple(entry) for name, entry in (plain or {}).items()}

    @torch.no_grad()
    def add(self, reported: Reported, whose: str) -> None:
        """Add what a task reports.

        Args:
            whose: what reports it, for errors.

        Raises:
            ValueError: it is no metric, has another kind than before, or there are too many.
        """
        for name, metric in reported.items():
            kind, value, count = _read(name, metric, whose)
            self._add(name, kind, _number(value), _number(count), whose)

    def merged(self, other: MetricSums) -> MetricSums:
        """These and those of other batches of this rank."""
        sums = MetricSums(self._sums)
        sums.add_plain(other._sums, "the task")
        return sums

    def add_plain(self, plain: Mapping[str, Any], whose: str) -> None:
        """Add others, which are as :meth:`plain` gives them. Raises ValueError: see :meth:`add`."""
        for name, (kind, value, count) in plain.items():
            self._add(name, kind, value, count, whose)

    def _add(self, name: str, kind: str, value: Any, count: Any, whose: str) -> None:
        before = self._sums.get(name)
        if before is None:
            if len(self._sums) == MAX_METRICS:
                raise ValueError(f"{whose} reports more than {MAX_METRICS} metrics, the newest is {name!r}")
            self._sums[name] = (kind, value, count)
            return
        if before[0] != kind:
            raise ValueError(f"{whose} reports metric {name!r} as {kind}, and as {before[0]} before")
        self._sums[name] = (kind, _combined(kind, before[1], value), before[2] + count)

    def plain(self) -> Plain:
        """As JSON can hold it."""
        return {name: (kind, float(value), float(count)) for name, (kind, value, count) in self._sums.items()}


def combined(of_ranks: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of all ranks together, by name in alphabetical order.

    Args:
        of_ranks: as :meth:`MetricSums.plain` gives them; a rank need not have each of them.

    Raises:
        ValueError: ranks report one name with different kinds.
    """
    sums = MetricSums()
    for rank, plain in enumerate(of_ranks):
        sums.add_plain(plain, f"rank {rank}")
    return {name: _result(*entry) for name, entry in sorted(sums.plain().items())}


def _read(name: Any, metric: Any, whose: str) -> tuple[Any, Any, Any]:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ValueError(f"{whose}: names of metrics are texts of 1 to {MAX_NAME_CHARS} characters, got {name!r:.100}")
    if isinstance(metric, tuple) and len(metric) == 2:
        return "mean", *metric
    kind, value, count = (getattr(metric, key, None) for key in ("kind", "value", "count"))
    if kind not in get_args(MetricKind) or value is None or count is None:
        raise ValueError(
            f"{whose}: metric {name!r} is a {type(metric).__name__}, expected gradbus.models.Metric, or a pair of a "
            f"sum and a count: from means alone no mean over all ranks can be made"
        )
    return kind, value, count


def _number(value: Any) -> Any:
    """A tensor is copied, as float64: the task may go on with it."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(torch.float64, copy=True)
    return float(value)


def _combined(kind: str, one: Any, other: Any) -> Any:
    if kind not in ("max", "min"):
        return one + other
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        pair = torch.stack([torch.as_tensor(one, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64)])
        return pair.max() if kind == "max" else pair.min()
    return max(one, other) if kind == "max" else min(one, other)


def _result(kind: str, value: float, count: float) -> float:
    if kind not in ("mean", "root_mean"):
        return value
    mean = value / count if count else math.nan
    return math.sqrt(mean) if kind == "root_mean" and mean >= 0 else mean if kind == "mean" else math.nan


def tally(counts: Any) -> tuple[int, float, int | None, Plain]:
    """Return what a rank counted on its part of the test set: samples, sum of losses, right answers, metrics; None if
    the task does not count them. ``counts``: of the task; None: it has no test set."""
    if counts is None:
        return 0, 0.0, 0, {}
    sums = MetricSums()
    sums.add(getattr(counts, "metrics", None) or {}, "evaluate_shard() of the task")
    correct = getattr(counts, "correct", None)
    return int(counts.total), float(counts.loss_sum), None if correct is None else int(correct), sums.plain()
