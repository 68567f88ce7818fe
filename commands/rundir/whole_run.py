"""All rounds of a run in one pass: exact sums, counts and medians, and a bounded number of reports to draw and to list.

A run of 200,000 rounds has gigabytes of reports. Up to :data:`MAX_WHOLE` rounds all of them are kept as they are. Of
more, what is kept are the first and the last :data:`MAX_LISTED`, without what names clients, and of those between them
the extremes of each curve (:mod:`~gradbus.commands.rundir.thinned`).
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_high
from typing import Any, NamedTuple

from gradbus.actors.federated.controller.report import RoundReport
from gradbus.actors.federated.controller.rounds import Outcome
from gradbus.actors.federated.controller.update_admission import Strike
from gradbus.commands.rundir.report_size import names_in, weight_of
from gradbus.commands.rundir.thinned import Thinned

MAX_WHOLE = 2000  # rounds that are all kept
MAX_TIMELINES = 20_000  # of clients, of all rounds together: 1 kB each
MAX_WEIGHT = 2_000_000  # of rounds that are all kept, in ids of clients: 80 MB
_NAMES_OF_ONE = 50  # a round with so many names of metrics more counts as one round more
_LIGHT = 1000  # weight of a report that may stay as it is
_OF_TIMELINE = 25  # ids of clients that weigh as much as a timeline
_LEAST = 10  # timelines that a round counts as, so that no more than 2000 rounds are kept for theirs
MAX_LISTED = 200  # first rounds, and last rounds, that a table has
MAX_KEPT = 4000  # of more rounds
MAX_NAMES = 10_000  # clients and reasons that are told apart: a file may name any number
NAMED_ROUNDS = 8  # of each reason and of each client
NAMED_FAULTS = 60  # rounds that did not go as planned

_SIZES = ("bytes_up", "bytes_down", "bytes_up_shared", "bytes_down_shared")
_TIMES = ("train_s", "wire_s", "aggregate_s", "checkpoint_s", "publish_s", "eval_s")


class RoundSums:
    """Adds up rounds, in ascending order."""

    def __init__(self) -> None:
        self.rounds = 0
        self.sums: dict[str, float] = dict.fromkeys((*_SIZES, *_TIMES, "encode_s"), 0)
        self._accuracy: float | None = None
        self._best_accuracy: float | None = None
        self._eval_loss: float | None = None
        self._metrics: Mapping[str, float] = {}
        self._by_clients: dict[str, float] = {}
        self._last: RoundReport | None = None

    def add(self, report: RoundReport) -> None:
        """Take the next round."""
        self.rounds += 1
        for name in self.sums:
            self.sums[name] += getattr(report, name)
        if report.accuracy is not None:
            self._accuracy = report.accuracy
            self._best_accuracy = max(report.accuracy, self._best_accuracy or report.accuracy)
        if report.eval_loss is not None:
            self._eval_loss = report.eval_loss
        if report.metrics:
            self._metrics = report.metrics
        if report.by_clients.asked:
            self._by_clients = {name: one.mean for name, one in report.by_clients.metrics.items()}
        self._last = report

    def to_json(self) -> dict[str, Any]:
        """As the summary of a run has it."""
        last = self._last
        return {
            "rounds": self.rounds,
            "accuracy": self._accuracy,
            "best_accuracy": self._best_accuracy,
            "eval_loss": self._eval_loss,
            "metrics": dict(self._metrics),
            "by_clients": self._by_clients,
            "loss": None if last is None else last.loss,
            "train_metrics": {} if last is None else dict(last.train_metrics),
            **{name: self.sums[name] for name in _SIZES},
            **{name: round(self.sums[name], 3) for name in _TIMES},
            "weights_crc32": None if last is None else last.weights_crc32,
        }


def totals(reports: Iterable[RoundReport]) -> dict[str, Any]:
    """Return the sums over the rounds."""
    sums = RoundSums()
    for report in reports:
        sums.add(report)
    return sums.to_json()


@dataclass(slots=True)
class Some:
    """The first of many numbers, and how many there are."""

    first: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, number: int) -> None:
        """Take one more."""
        self.count += 1
        if len(self.first) < NAMED_ROUNDS:
            self.first.append(number)

    @property
    def text(self) -> str:
        """``1, 2, 3 and 7 more``."""
        more = f" and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        return ", ".join(map(str, self.first)) + more


@dataclass(slots=True)
class ClientStrikes:
    """The bad updates of one client: in which rounds, the last one, and those for which it was kept out."""

    rounds: Some = field(default_factory=Some)
    last: Strike | None = None
    out: list[Strike] = field(default_factory=list)


class Uneven(NamedTuple):
    """A round that some client missed, or that was tried again."""

    round_id: int
    updates: int
    expected: int
    attempt: int
    outcome: str


class RoundFaults:
    """What did not go as planned, over all rounds.

    Attributes:
        dropped: by reason, how many updates and frames did not count. in_rounds: by reason, in which rounds.
        strikes: by client. marks: by what was done to updates, in how many rounds of each client.
        uneven_first, uneven_last: the first and the last of ``uneven`` rounds.
    """

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self.in_rounds: dict[str, Some] = {}
        self.strikes: dict[int, ClientStrikes] = {}
        self.marks: dict[str, Counter[int]] = {}
        self.uneven = 0
        self.uneven_first: list[Uneven] = []
        self.uneven_last: deque[Uneven] = deque(maxlen=NAMED_FAULTS)

    def add(self, report: RoundReport) -> None:
        """Take the next round."""
        for reason, count in report.dropped.items():
            if reason in self.in_rounds or len(self.in_rounds) < MAX_NAMES:
                self.dropped[reason] += count
                self.in_rounds.setdefault(reason, Some()).add(report.round_id)
        for strike in report.strikes:
            if strike.client_id in self.strikes or len(self.strikes) < MAX_NAMES:
                found = self.strikes.setdefault(strike.client_id, ClientStrikes())
                found.rounds.add(strike.round_id)
                found.last = strike
                if strike.out_until and len(found.out) < NAMED_ROUNDS:
                    found.out.append(strike)
        for mark, clients in report.marks.items():
            if mark in self.marks or len(self.marks) < NAMED_FAULTS:
                counts = self.marks.setdefault(mark, Counter())
                counts.update(clients if len(counts) < MAX_NAMES else [one for one in clients if one in counts])
        as_planned = report.outcome in (Outcome.ALL.value, Outcome.ENOUGH.value)
        if report.attempt > 1 or report.updates < report.expected or not as_planned:
            self.uneven += 1
            found_round = Uneven(report.round_id, report.updates, report.expected, report.attempt, report.outcome)
            few = len(self.uneven_first) < NAMED_FAULTS
            (self.uneven_first if few else self.uneven_last).append(found_round)


class _Kept(NamedTuple):
    """A round, with what the run had spent when it was done."""

    report: RoundReport
    num_bytes: float
    seconds: float


class WholeRun:
    """Takes the rounds of a run, in ascending order.

    Attributes:
        sums, faults: over all of them. clients: whose updates counted, at most :data:`MAX_NAMES`.
        gaps: numbers up to the last round that have no report.
        has_timelines: whether some round has. some_timelines: whether some have but a part of their clients'.
    """

    def __init__(self) -> None:
        self.sums = RoundSums()
        self.faults = RoundFaults()
        self.clients: set[int] = set()
        self.gaps = Some()
        self.has_timelines = self.some_timelines = False
        self._last_id = 0
        self._bytes, self._spent_s = 0.0, 0.0
        self._seconds, self._other_seconds = array("d"), array("d")
        self._all: list[_Kept] | None = []
        self._timelines = self._weight = 0
        self._first: list[_Kept] = []
        self._last: deque[_Kept] = deque(maxlen=MAX_LISTED)  # heavy ones stripped; the newest whole:
        self._latest: _Kept | None = None
        self._newest: dict[str, _Kept] = {}  # of each kind of evaluation
        self._curves: Thinned[_Kept] = Thinned(
            _MEASURES, MAX_KEPT, weight=lambda kept: 1 + names_in(kept.report) // _NAMES_OF_ONE, strip=_stripped
        )
        self._timed: Thinned[_Kept] = Thinned(
            _MEASURES[:1], MAX_TIMELINES, weight=lambda kept: max(weight_of(kept.report) // _OF_TIMELINE, _LEAST)
        )

    @classmethod
    def of(cls, reports: Iterable[RoundReport]) -> WholeRun:
        """Take these reports."""
        whole = cls()
        for report in reports:
            whole.add(report)
        return whole

    def add(self, report: RoundReport) -> None:
        """Take the next round."""
        for missing in range(self._last_id + 1, min(report.round_id, self._last_id + 1 + NAMED_ROUNDS)):
            self.gaps.add(missing)
        self.gaps.count += max(0, report.round_id - self._last_id - 1 - NAMED_ROUNDS)
        self._last_id = max(self._last_id, report.round_id)
        self.sums.add(report)
        self.faults.add(report)
        if len(self.clients) < MAX_NAMES:
            self.clients.update(report.clients)
        self._bytes += report.bytes_up + report.bytes_down
        self._spent_s += report.seconds + report.eval_s
        self._seconds.append(report.seconds)
        self._other_seconds.append(report.seconds - report.train_s)
        if report.timeline:
            self.has_timelines = True
            self.some_timelines |= report.updates > len(report.timeline)
        self._keep(_Kept(report, self._bytes, self._spent_s))

    def _keep(self, kept: _Kept) -> None:
        if self._all is not None:
            self._all.append(kept)
            self._timelines += len(kept.report.timeline)
            self._weight += weight_of(kept.report)
            if len(self._all) <= MAX_WHOLE and self._timelines <= MAX_TIMELINES and self._weight <= MAX_WEIGHT:
                return
            all_so_far, self._all = self._all, None
            for earlier in all_so_far:
                self._thin(earlier)
        else:
            self._thin(kept)

    def _thin(self, kept: _Kept) -> None:
        report = kept.report
        if len(self._first) < MAX_LISTED:
            self._first.append(_stripped(kept))
        self._last.append(kept if weight_of(report) < _LIGHT else _stripped(kept))  # it would take a third of the time
        self._latest = kept
        if report.accuracy is not None or report.eval_loss is not None:
            self._newest["accuracy"] = kept
        if report.metrics:
            self._newest["metrics"] = kept
        if report.by_clients.asked:
            self._newest["clients"] = kept
        self._curves.add(kept)
        if report.timeline:
            self._timed.add(kept)

    @property
    def is_thinned(self) -> bool:
        """Whether :attr:`reports` are not all."""
        return self._all is None

    @property
    def reports(self) -> tuple[RoundReport, ...]:
        """Return the rounds that are kept, in ascending order."""
        return tuple(kept.report for kept in self._sorted())

    @property
    def spent(self) -> dict[int, tuple[float, float]]:
        """Bytes and seconds that the run had spent when each of these rounds was done."""
        return {kept.report.round_id: (kept.num_bytes, kept.seconds) for kept in self._sorted()}

    def _sorted(self) -> Sequence[_Kept]:
        if self._all is not None:
            return self._all
        found: dict[int, _Kept] = {}
        latest = [] if self._latest is None else [self._latest]
        ends = (*self._first, *map(_stripped, self._last), *latest)
        for kept in (*self._curves.items(), *ends, *self._newest.values(), *self._timed.items()):
            found[kept.report.round_id] = kept  # of one round, the later of these knows more
        return [found[round_id] for round_id in sorted(found)]

    @property
    def median_s(self) -> float:
        """The median length of a round."""
        return median_high(self._seconds)

    @property
    def median_other_s(self) -> float:
        """The same without the training of the slowest client, as the mean of the middle two."""
        return median(self._other_seconds)

    @property
    def median_mean_s(self) -> float:
        """The median length of a round, as the mean of the middle two."""
        return median(self._seconds)


def _stripped(kept: _Kept) -> _Kept:
    return kept._replace(report=kept.report.without_clients())


_MEASURES: Sequence[Callable[[_Kept], float | None]] = (
    lambda kept: kept.report.seconds,
    lambda kept: kept.report.loss,
    lambda kept: kept.report.accuracy,
    lambda kept: kept.report.eval_loss,
    lambda kept: kept.report.bytes_up,
    lambda kept: kept.report.bytes_down,
    lambda kept: next(iter(kept.report.metrics.values()), None),
)
