"""Numbers over rounds or steps, for the trackers that a run asks for: TensorBoard, MLflow, Weights & Biases.

Each tracker is written by a thread of its own: the event loop and the training never wait for a disk or a network, nor
one tracker for another. What a thread cannot take in time is dropped and counted.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gradbus.commands.report.trackers import Mlflow, TensorBoard, Tracker, WeightsAndBiases
from gradbus.runtime.logs import get_logger

if TYPE_CHECKING:
    from gradbus.actors.data_parallel.report import EpochReport
    from gradbus.actors.federated.controller.evaluation import ClientEvaluation
    from gradbus.actors.federated.controller.report import RoundReport
    from gradbus.commands.files import ControllerFile, WorkerFile
    from gradbus.runtime.profiling.summary import WindowStats

MAX_WAITING = 1000  # reports and windows
CLOSE_S = 5.0

Values = dict[str, float | None]

PHASES = ("train", "encode", "wire", "aggregate", "checkpoint", "publish", "eval")
"""Phases of a round; each has its seconds in a report."""

log = get_logger("scalars")


class Scalars:
    """Holds what a run tells its trackers. A context manager: leaving it writes what is left, for at most 5 s.

    It is a callback, too: of the Controller of a program of your own, of ``gradbus.simulate``, or of a Worker.
    The horizontal axis is the round, or for workers the number of steps done. NaN and infinity are left out.
    """

    def __init__(self, *trackers: Tracker) -> None:
        self._feeds = [_Feed(tracker) for tracker in trackers]
        self._rounds: int | None = None
        self._of: Sequence[RoundReport] = ()

    @property
    def dropped(self) -> int:
        """Reports that a thread could not take in time, over all trackers."""
        return sum(feed.dropped for feed in self._feeds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        until = time.monotonic() + CLOSE_S
        for feed in self._feeds:
            feed.end(until)
        for feed in self._feeds:
            feed.join(until)

    def rounds(self, reports: Sequence[RoundReport]) -> None:
        """Take the new rounds of a federated run. The first call takes all of its history, also after a resume;
        so does one with another list, which is that of another run, as a site may begin."""
        if reports is not self._of:
            self._rounds, self._of = None, reports
        new = reports[self._rounds or 0 :]
        if new:
            first = new[0].round_id if self._rounds is None else None
            self._put(_Job(first, [(report.round_id, round_values(report)) for report in new]))
        self._rounds = len(reports)

    def on_report(self, report: RoundReport) -> None:
        """Take the report of a round, as a callback of a Controller."""
        self._put(_Job(report.round_id, [(report.round_id, round_values(report))]))

    def on_epoch(self, report: EpochReport) -> None:
        """Take the report of an epoch, as a callback of a Worker."""
        self.epoch(report)

    def begin(self, step: int) -> None:
        """A data-parallel run goes on from this step: what TensorBoard has of an earlier start after it is removed."""
        self._put(_Job(step + 1, []))

    def epoch(self, report: EpochReport) -> None:
        """Take the report of an epoch."""
        self._put(_Job(None, [(report.step, epoch_values(report))]))

    def window(self, window: WindowStats) -> None:
        """Take the means of a window of steps; from any thread."""
        self._put(_Job(None, [(window.last_step + 1, window_values(window))]))

    def _put(self, job: _Job) -> None:
        for feed in self._feeds:
            feed.put(job)


class _Feed:
    """The thread that writes to one tracker, and what waits for it."""

    def __init__(self, tracker: Tracker) -> None:
        self.dropped = 0
        self._tracker = tracker
        self._jobs: queue.Queue[_Job | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"gradbus-{tracker.name}", daemon=True)  # it may hang
        self._thread.start()

    def put(self, job: _Job) -> None:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:  # the tracker is slower than the training, which does not wait for it
            self.dropped += 1

    def end(self, until: float) -> None:
        """Nothing more comes. ``until``: of the monotonic clock, in seconds."""
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=max(0.0, until - time.monotonic()))

    def join(self, until: float) -> None:
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self.dropped += self._jobs.qsize()
        if self.dropped:
            log.warning("scalars not complete", **self._named, dropped=self.dropped)

    @property
    def _named(self) -> dict[str, Any]:
        return {"tracker": self._tracker.name, "where": self._tracker.where}

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:  # a full disk, a server that is gone: training does not stop for it
            log.warning("scalars not written", **self._named, error=f"{type(error).__name__}: {error}")
            self.dropped += 1
            while self._jobs.get() is not None:
                self.dropped += 1

    def _write(self) -> None:
        opened = False
        while (job := self._jobs.get()) is not None:
            if not opened:  # the first job has the step at which the run begins
                self._tracker.open(job.first)
                opened = True
            for step, values in job.points:
                finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
                if finite:
                    self._tracker.write(step, finite, job.unix_s)
        if opened:
            self._tracker.close()


def open_scalars(file: ControllerFile | WorkerFile, run_dir: Path) -> AbstractContextManager[Scalars | None]:
    """For the trackers that the settings ask for, as :class:`Scalars`; without any there are none.

    Raises:
        ConfigError: the package of one of them is missing, or it cannot be used here.
    """
    trackers: list[Tracker] = []
    if file.tensorboard is not None:
        trackers.append(TensorBoard(file.tensorboard))
    # Of the settings, what makes the run: not addresses, folders and keys.
    told = file.model_dump(mode="json", include={"task", "federated", "parallel", "parameter_server"})
    if file.mlflow is not None:
        trackers.append(Mlflow(file.mlflow, file.bus.job, run_dir, told))
    if file.wandb is not None:
        trackers.append(WeightsAndBiases(file.wandb, file.bus.job, run_dir, told))
    return Scalars(*trackers) if trackers else contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class _Job:
    """Numbers for the threads, and the first step of the run if it begins with them."""

    first: int | None
    points: list[tuple[int, Values]]
    unix_s: float = field(default_factory=time.time)


def round_values(report: RoundReport) -> Values:
    """By the names that trackers show. None: there is no such number in this round."""
    return {
        "accuracy": report.accuracy,
        "loss/train": report.loss,
        "loss/eval": report.eval_loss,
        **{f"metrics/{name}": value for name, value in report.metrics.items()},
        **{f"train/{name}": value for name, value in report.train_metrics.items()},
        **_by_clients(report.by_clients),
        "clients/updates": report.updates,
        "clients/expected": report.expected,
        "bytes/up": report.bytes_up,
        "bytes/down": report.bytes_down,
        "privacy/epsilon": report.epsilon,
        "seconds/round": report.seconds,
        **{f"seconds/{phase}": getattr(report, f"{phase}_s") for phase in PHASES},
        **{f"dropped/{reason}": count for reason, count in report.dropped.items()},
    }


def _by_clients(found: ClientEvaluation) -> dict[str, float | None]:
    """Return what clients have found on data of their own: of each metric the mean and its spread over them."""
    values: dict[str, float | None] = {}
    for name, one in found.metrics.items():
        values |= {f"by_clients/{name}/{key}": value for key, value in one.spread.items()}
    if found.asked:
        values["by_clients/answered"] = found.answered
    return values


def epoch_values(report: EpochReport) -> Values:
    """The scalars of an epoch, by name."""
    return {
        "accuracy": report.accuracy,
        "loss/train": report.loss,
        "loss/eval": report.eval_loss,
        **{f"metrics/{name}": value for name, value in report.metrics.items()},
        **{f"metrics/train/{name}": value for name, value in report.train_metrics.items()},
        "epoch/seconds": report.seconds,
        "epoch/density": report.density,
        "epoch/skipped_steps": report.skipped_steps,
    }


def window_values(window: WindowStats) -> Values:
    """The scalars of a window of steps: mean seconds and bytes of one step on this rank, and the longest of each."""
    return {
        **_seconds("seconds", window.mean),
        **_seconds("seconds_max", window.max),
        "bytes/out": window.mean.get("bytes_out"),
        "bytes/in": window.mean.get("bytes_in"),
    }


def _seconds(group: str, amounts: Mapping[str, float]) -> Values:
    return {f"{group}/{name.removesuffix('_s')}": amount for name, amount in amounts.items() if name.endswith("_s")}
