"""The reports of a controller as Prometheus metrics, computed when they are collected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gradbus.actors import Progress, RoundReport
from gradbus.experiments.report.scalars import PHASES

_SUMMED = (
    "bytes_up", "bytes_down", "bytes_up_shared", "bytes_down_shared", "seconds", *(f"{phase}_s" for phase in PHASES)
)  # fmt: skip

Family = CounterMetricFamily | GaugeMetricFamily


class Totals:
    """Sums over the reports of one run. Each report is looked at once, however many there are.

    Attributes:
        rounds: reports so far. sums: of their bytes and seconds, by the names of the fields. dropped: by reason.
        loss: of the newest report. accuracy, eval_loss: of the newest one that was evaluated.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.sums: dict[str, float] = dict.fromkeys(_SUMMED, 0)
        self.dropped: Counter[str] = Counter()
        self.loss: float | None = None
        self.accuracy: float | None = None
        self.eval_loss: float | None = None

    def follow(self, reports: Sequence[RoundReport]) -> Totals:
        """Add those of the run's reports that are new."""
        for report in reports[self.rounds :]:
            self.rounds += 1
            for name in _SUMMED:
                self.sums[name] += getattr(report, name)
            self.dropped.update(report.dropped)
            self.loss = report.loss
            if report.accuracy is not None:
                self.accuracy, self.eval_loss = report.accuracy, report.eval_loss
        return self


class Measured(Protocol):
    """A job, as far as metrics need it."""

    @property
    def progress(self) -> Progress:
        """Where its controller stands, or stood."""

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


class JobCollector(Collector):
    """Gives the metrics of some jobs to a Prometheus registry, one label ``job`` each.

    Counters cover the whole run: a controller that was started again from its state directory goes on where it was.
    """

    def __init__(self, jobs: Mapping[str, Measured]) -> None:
        """``jobs`` by name; it may grow later. Collect on the event loop that the jobs run on."""
        self._jobs = jobs

    def describe(self) -> Iterable[Metric]:
        return self._families().values()

    def collect(self) -> Iterator[Metric]:
        families = self._families()
        for name, job in self._jobs.items():
            _measure(families, name, job)
        yield from families.values()

    @staticmethod
    def _families() -> dict[str, Family]:
        def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"gradbus_{name}", text, labels=["job", *labels])

        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"gradbus_{name}", text, labels=["job"])

        return {
            "up": gauge("controller_up", "1 while the controller runs, waiting for clients included"),
            "failed": gauge("controller_failed", "1 after the controller ended with an error"),
            "clients": gauge("clients", "Clients that are there"),
            "ready": gauge("updates_ready", "Updates of the open round that are in"),
            "expected": gauge("updates_expected", "Updates of the open round that are expected"),
            "accuracy": gauge("accuracy", "Accuracy of the newest evaluated model, 0 to 1"),
            "eval_loss": gauge("eval_loss", "Loss of the newest evaluated model on the test set"),
            "loss": gauge("train_loss", "Mean training loss of the newest round, weighted by samples"),
            "rounds": counter("rounds", "Committed rounds"),
            "seconds": counter("round_seconds", "Seconds from the command of a round to its published model"),
            "phases": counter(
                "phase_seconds", "Seconds of the rounds by phase; of clients, the slowest one's", "phase"
            ),
            "bytes": counter("bytes", "Encoded updates (up), and encoded models times clients (down)", "direction"),
            "shared": counter("bytes_shared", "Those of them that passed through memory, not over DDS", "direction"),
            "dropped": counter("updates_dropped", "Updates and frames of rounds that were not counted", "reason"),
            "rejected": counter("samples_rejected", "Samples that were dropped before they became messages", "reason"),
        }


def _measure(families: Mapping[str, Family], name: str, job: Measured) -> None:
    def put(family: str, value: float, *labels: str) -> None:
        families[family].add_metric([name, *labels], value)

    progress, totals = job.progress, job.totals
    put("up", job.running)
    put("failed", job.failed)
    put("clients", len(progress.clients) if job.running else 0)
    put("ready", progress.ready)
    put("expected", progress.expected)
    for key, value in ("accuracy", totals.accuracy), ("eval_loss", totals.eval_loss), ("loss", totals.loss):
        if value is not None:  # no sample is better than an invented one
            put(key, value)
    put("rounds", totals.rounds)
    put("seconds", totals.sums["seconds"])
    for direction in ("up", "down"):
        put("bytes", totals.sums[f"bytes_{direction}"], direction)
        put("shared", totals.sums[f"bytes_{direction}_shared"], direction)
    for phase in PHASES:
        put("phases", totals.sums[f"{phase}_s"], phase)
    for reason, count in totals.dropped.items():
        put("dropped", count, reason)
    for reason, count in job.rejected.items():
        put("rejected", count, reason)
