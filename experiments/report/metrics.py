"""The reports of a controller as Prometheus metrics, computed when they are collected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gradbus.actors import Progress, RoundReport

PHASES = ("train", "encode", "wire", "aggregate", "checkpoint", "publish", "eval")
"""Phases of a round; each has its seconds in a report."""

Family = CounterMetricFamily | GaugeMetricFamily


@dataclass(slots=True)
class Totals:
    """Sums over the reports of one run. Each report is looked at once, however many there are.

    Attributes:
        rounds: reports so far. bytes_up, bytes_down, bytes_up_shared, bytes_down_shared, seconds, phase_seconds,
            dropped: their sums.
        loss: of the newest report. accuracy, eval_loss: of the newest one that was evaluated.
    """

    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_up_shared: int = 0
    bytes_down_shared: int = 0
    seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    dropped: Counter[str] = field(default_factory=Counter)
    loss: float | None = None
    accuracy: float | None = None
    eval_loss: float | None = None

    def follow(self, reports: Sequence[RoundReport]) -> Totals:
        """Add those of the run's reports that are new."""
        for report in reports[self.rounds :]:
            self.rounds += 1
            self.bytes_up += report.bytes_up
            self.bytes_down += report.bytes_down
            self.bytes_up_shared += report.bytes_up_shared
            self.bytes_down_shared += report.bytes_down_shared
            self.seconds += report.seconds
            for phase in PHASES:
                self.phase_seconds[phase] += getattr(report, f"{phase}_s")
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
    put("seconds", totals.seconds)
    put("bytes", totals.bytes_up, "up")
    put("bytes", totals.bytes_down, "down")
    put("shared", totals.bytes_up_shared, "up")
    put("shared", totals.bytes_down_shared, "down")
    for phase, seconds in totals.phase_seconds.items():
        put("phases", seconds, phase)
    for reason, count in totals.dropped.items():
        put("dropped", count, reason)
    for reason, count in job.rejected.items():
        put("rejected", count, reason)
