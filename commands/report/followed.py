"""A controller, a client and a rank of this process as they stand, for metrics: whatever thread asks for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gradbus.actors import Client, EpochReport, Progress, RoundReport
from gradbus.actors.data_parallel.rank import Rank
from gradbus.actors.federated.controller.evaluation import ClientEvaluation
from gradbus.actors.virtual.host import ClientHost
from gradbus.actors.virtual.pool import TrainingPool
from gradbus.commands.report.scalars import PHASES
from gradbus.runtime.bus.bus import Bus

_SUMMED = (
    "bytes_up",
    "bytes_down",
    "bytes_up_shared",
    "bytes_down_shared",
    "seconds",
    *(f"{phase}_s" for phase in PHASES),
)


class Totals:
    """Sums over the reports of one run. Each report is looked at once, however many there are.

    Attributes:
        rounds: reports so far. sums: of their bytes and seconds, by the names of the fields. dropped: by reason.
        loss, train_metrics: of the newest report. accuracy, eval_loss, metrics by name: of the newest one that was
            evaluated; by_clients: of the newest one that clients have evaluated.
    """

    def __init__(self) -> None:
        self._of: Sequence[RoundReport] = ()
        self._clear()

    def _clear(self) -> None:
        self.rounds = 0
        self.sums: dict[str, float] = dict.fromkeys(_SUMMED, 0)
        self.dropped: Counter[str] = Counter()
        self.loss: float | None = None
        self.accuracy: float | None = None
        self.eval_loss: float | None = None
        self.metrics: Mapping[str, float] = {}
        self.train_metrics: Mapping[str, float] = {}
        self.by_clients = ClientEvaluation()

    def follow(self, reports: Sequence[RoundReport]) -> Totals:
        """Add those of the run's reports that are new; another list is that of another run, as a site may begin."""
        if reports is not self._of:
            self._clear()
            self._of = reports
        for report in reports[self.rounds :]:
            self.rounds += 1
            for name in _SUMMED:
                self.sums[name] += getattr(report, name)
            self.dropped.update(report.dropped)
            self.loss, self.train_metrics = report.loss, report.train_metrics
            if report.eval_loss is not None or report.accuracy is not None:
                self.accuracy, self.eval_loss, self.metrics = report.accuracy, report.eval_loss, report.metrics
            if report.by_clients.asked:
                self.by_clients = report.by_clients
        return self


class Measured(Protocol):
    """A job, as far as metrics need it."""

    @property
    def progress(self) -> Progress:
        """Return where its controller stands, or stood."""

    @property
    def totals(self) -> Totals:
        """Sums over its reports."""

    @property
    def running(self) -> bool:
        """Whether its controller runs."""

    @property
    def failed(self) -> bool:
        """Whether its controller ended with an error."""

    @property
    def rejected(self) -> Mapping[str, int]:
        """Samples that its bus dropped before they became a message, by reason."""


class FollowedJob:
    """A controller of this process, which may not have started yet.

    Attributes:
        progress, running, failed: as in :class:`Measured`.
    """

    def __init__(self) -> None:
        self.progress = Progress()
        self.running = True
        self.failed = False
        self._totals = Totals()
        self._bus: Bus | None = None

    def follow(self, progress: Progress, bus: Bus) -> None:
        """The controller is there."""
        self.progress, self._bus = progress, bus

    def end(self, *, failed: bool) -> None:
        """It has ended."""
        self.running, self.failed = False, failed

    @property
    def totals(self) -> Totals:
        return self._totals.follow(self.progress.reports)

    @property
    def rejected(self) -> Mapping[str, int]:
        return {} if self._bus is None else self._bus.rejected


class FollowedClient:
    """A client. ``client``: None: it does not run yet."""

    def __init__(self) -> None:
        self.client: Client | None = None


class FollowedHost:
    """A process that speaks for virtual clients. ``host``, ``pool``: None: it does not run yet."""

    def __init__(self) -> None:
        self.host: ClientHost | None = None
        self.pool: TrainingPool[Any] | None = None


class FollowedRank:
    """A rank.

    Attributes:
        worker: None: it does not run yet. report: the newest one. epochs, skipped_steps: of all reports.
    """

    def __init__(self) -> None:
        self.worker: Rank | None = None
        self.report: EpochReport | None = None
        self.epochs = self.skipped_steps = 0

    def epoch(self, report: EpochReport) -> None:
        """Take the report of an epoch."""
        self.epochs += report.finished
        self.skipped_steps += report.skipped_steps
        self.report = report
