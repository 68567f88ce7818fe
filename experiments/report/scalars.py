"""Numbers over rounds or steps, for TensorBoard. tensorboard is an extra, and is imported only where it is asked for.

Files are written by a thread of its own: the event loop and the training never wait for the disk. What that thread
cannot take in time is dropped and counted.
"""

from __future__ import annotations

import contextlib
import math
import queue
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.needs import install_line
from gradbus.runtime.private_folder import make_private

if TYPE_CHECKING:
    from gradbus.actors.data_parallel.report import EpochReport
    from gradbus.actors.federated.report import RoundReport
    from gradbus.runtime.profiling.summary import WindowStats

_MAX_WAITING = 1000  # reports and windows
_CLOSE_S = 5.0
_FLUSH_S = 5  # TensorBoard sees what is at most so old

Values = dict[str, float | None]

PHASES = ("train", "encode", "wire", "aggregate", "checkpoint", "publish", "eval")
"""Phases of a round; each has its seconds in a report."""

log = get_logger("scalars")


class Scalars:
    """Event files in one folder. A context manager: leaving it writes what is left, for at most 5 s.

    The horizontal axis is the round, or for workers the number of steps done. A run that goes on in the same folder
    replaces what was written from there on. NaN and infinity are left out.

    Attributes:
        folder: where they are. dropped: reports that the thread could not take in time.
    """

    def __init__(self, folder: Path) -> None:
        """Import tensorboard, which takes a second: not on an event loop.

        Raises:
            ConfigError: there is none, or the folder cannot be written.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"--tensorboard needs tensorboard, which cannot be imported here ({error}). "
                f"Install it: {install_line('tensorboard')}"
            ) from None
        try:
            make_private(folder)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(f"--tensorboard: {folder} cannot be written: {error.strerror}. Name another") from None
        self.folder = folder
        self.dropped = 0
        self._make_writer = SummaryWriter
        self._rounds: int | None = None
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="gradbus-scalars", daemon=True)  # a disk may hang
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self.dropped += self._jobs.qsize()
        if self.dropped:
            log.warning("scalars not complete", folder=str(self.folder), dropped=self.dropped)

    def rounds(self, reports: Sequence[RoundReport]) -> None:
        """Take the new rounds of a federated run. The first call takes all of its history, also after a resume."""
        new = reports[self._rounds or 0 :]
        if new:
            first = new[0].round_id if self._rounds is None else None
            self._put(_Job(first, [(report.round_id, round_values(report)) for report in new]))
        self._rounds = len(reports)

    def begin(self, step: int) -> None:
        """A data-parallel run goes on from this step: scalars of an earlier start after it are removed."""
        self._put(_Job(step + 1, []))

    def epoch(self, report: EpochReport) -> None:
        """Take the report of an epoch."""
        self._put(_Job(None, [(report.step, epoch_values(report))]))

    def window(self, window: WindowStats) -> None:
        """Take the means of a window of steps; from any thread."""
        self._put(_Job(None, [(window.last_step + 1, window_values(window))]))

    def _put(self, job: _Job) -> None:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:  # the disk is slower than the training, which does not wait for it
            self.dropped += 1

    # The thread

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:  # the disk is full, for example: training does not stop for it
            log.warning("scalars not written", folder=str(self.folder), error=f"{type(error).__name__}: {error}")
            self.dropped += 1
            while self._jobs.get() is not None:
                self.dropped += 1

    def _write(self) -> None:
        writer: Any = None
        while (job := self._jobs.get()) is not None:
            if writer is None:  # the first job has the step at which the run begins
                writer = self._make_writer(str(self.folder), purge_step=job.first, flush_secs=_FLUSH_S)
            for step, values in job.points:
                for name, value in values.items():
                    if value is not None and math.isfinite(value):
                        writer.add_scalar(name, value, step, walltime=job.unix_s)
        if writer is not None:
            writer.close()


def open_scalars(folder: Path | None) -> AbstractContextManager[Scalars | None]:
    """As :class:`Scalars`; without a folder there are none."""
    return contextlib.nullcontext() if folder is None else Scalars(folder)


@dataclass(frozen=True, slots=True)
class _Job:
    """Numbers for the thread, and the first step of the run if it begins with them."""

    first: int | None
    points: list[tuple[int, Values]]
    unix_s: float = field(default_factory=time.time)


def round_values(report: RoundReport) -> Values:
    """By the names that TensorBoard shows. None: there is no such number in this round."""
    return {
        "accuracy": report.accuracy,
        "loss/train": report.loss,
        "loss/eval": report.eval_loss,
        **{f"metrics/{name}": value for name, value in report.metrics.items()},
        "clients/updates": report.updates,
        "clients/expected": report.expected,
        "bytes/up": report.bytes_up,
        "bytes/down": report.bytes_down,
        "seconds/round": report.seconds,
        **{f"seconds/{phase}": getattr(report, f"{phase}_s") for phase in PHASES},
        **{f"dropped/{reason}": count for reason, count in report.dropped.items()},
    }


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
