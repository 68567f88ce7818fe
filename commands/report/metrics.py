"""The reports of a controller as Prometheus metrics, computed when they are collected."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gradbus.commands.report.followed import Measured, Totals
from gradbus.commands.report.scalars import PHASES

Family = CounterMetricFamily | GaugeMetricFamily


class JobCollector(Collector):
    """Gives the metrics of some jobs to a Prometheus registry, one label ``job`` each.

    Counters cover the whole run: a controller that was started again from its state directory goes on where it was.
    """

    def __init__(self, jobs: Mapping[str, Measured], run_dirs: Mapping[str, Path] | None = None) -> None:
        """``jobs`` by name; it may grow later. Any thread may collect: it reads what the event loop changes.

        ``run_dirs``: run directories by job, whose disk is measured; they may not exist yet.
        """
        self._jobs = jobs
        self._run_dirs = {} if run_dirs is None else run_dirs
        self._collecting = threading.Lock()  # two at once would count a new report twice

    def describe(self) -> Iterable[Metric]:
        return self._families().values()

    def collect(self) -> Iterator[Metric]:
        families = self._families()
        with self._collecting:
            for name, job in list(self._jobs.items()):
                _measure(families, name, job)
                if name in self._run_dirs:
                    _measure_disk(families, name, self._run_dirs[name])
        yield from families.values()

    @staticmethod
    def _families() -> dict[str, Family]:
        def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"gradbus_{name}", text, labels=["job", *labels])

        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"gradbus_{name}", text, labels=["job", *labels])

        return {
            "up": gauge("controller_up", "1 while the controller runs, waiting for clients included"),
            "failed": gauge("controller_failed", "1 after the controller ended with an error"),
            "clients": gauge("clients", "Clients that are there"),
            "quarantined": gauge("clients_quarantined", "Clients in quarantine, whose updates do not count"),
            "committed": gauge(
                "last_commit_timestamp_seconds", "Unix time of the newest committed round; of the start before it"
            ),
            "disk_free": gauge("disk_free_bytes", "Bytes that may still be written to the disk of the run directory"),
            "disk_size": gauge("disk_size_bytes", "Size of the disk of the run directory"),
            "names": gauge(
                "client_info", "1 for each client, or range of clients of a host, with a name", "client", "name"
            ),
            "ready": gauge("updates_ready", "Updates of the open round that are in"),
            "expected": gauge("updates_expected", "Updates of the open round that are expected"),
            "accuracy": gauge("accuracy", "Accuracy of the newest evaluated model, 0 to 1"),
            "eval_loss": gauge("eval_loss", "Loss of the newest evaluated model on the test set"),
            "epsilon": gauge("epsilon", "Epsilon of differential privacy that the committed rounds have spent"),
            "budget": gauge("epsilon_budget", "Epsilon of differential privacy that the run may spend"),
            "metric": gauge("metric", "Metrics of the newest evaluated model, by name", "name"),
            "by_clients": gauge(
                "client_metric", "What clients find on their own data: mean, median, std, min, max", "name", "of"
            ),
            "answered": gauge("evaluation_clients", "Clients whose result counts in the newest evaluation by clients"),
            "loss": gauge("train_loss", "Mean training loss of the newest round, weighted by samples"),
            "train_metric": gauge(
                "train_metric", "Metrics of the newest round's training, weighted by samples", "name"
            ),
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


def _measure_by_name(put: Callable[..., None], totals: Totals) -> None:
    """Put what trainings and evaluations have found, by name."""
    for family, metrics in (("metric", totals.metrics), ("train_metric", totals.train_metrics)):
        for metric, value in metrics.items():
            put(family, value, metric)
    if totals.by_clients.asked:
        put("answered", totals.by_clients.answered)
    for metric, found in totals.by_clients.metrics.items():
        for of, value in found.spread.items():
            put("by_clients", value, metric, of)


def _measure_disk(families: Mapping[str, Family], name: str, run_dir: Path) -> None:
    """Put the disk of a run directory; nothing where the system does not say."""
    path = run_dir.absolute()
    with contextlib.suppress(OSError):
        disk = shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists()))
        families["disk_free"].add_metric([name], disk.free)
        families["disk_size"].add_metric([name], disk.total)


def _measure(families: Mapping[str, Family], name: str, job: Measured) -> None:
    def put(family: str, value: float, *labels: str) -> None:
        families[family].add_metric([name, *labels], value)

    progress, totals = job.progress, job.totals
    put("up", job.running)
    put("failed", job.failed)
    put("clients", len(progress.clients) if job.running else 0)
    put("quarantined", len(progress.out))
    put("committed", progress.committed_unix_s)
    for ids, named in progress.names.rows(progress.clients) if job.running else ():
        put("names", 1, ids, named)
    put("ready", progress.ready)
    put("expected", progress.expected)
    for key, value in (
        ("accuracy", totals.accuracy),
        ("eval_loss", totals.eval_loss),
        ("loss", totals.loss),
        ("epsilon", progress.epsilon),
        ("budget", progress.epsilon_budget),
    ):
        if value is not None:  # no sample is better than an invented one
            put(key, value)
    _measure_by_name(put, totals)
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
