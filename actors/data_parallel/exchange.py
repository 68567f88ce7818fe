"""What a step exchanges on this rank: its programs, all at once, from their start to their end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradbus.actors.data_parallel.buckets import gradients_are_finite
from gradbus.actors.data_parallel.mean_loss import MeanLoss, summed
from gradbus.actors.data_parallel.step import TrainingStep
from gradbus.runtime.algorithms.base import Algorithm, TensorBucket
from gradbus.runtime.algorithms.requests import Program
from gradbus.runtime.collectives import CollectiveHandle, Group
from gradbus.runtime.collectives.programs import ProgramRun
from gradbus.runtime.collectives.staging import exchange_of


class StepExchange:
    """Several programs that go from phase to phase together. One thread at a time starts and resumes them:

        exchange.start(...)                 # one or more; may be called by a hook, in the midst of a backward pass
        while exchange.goes_on:
            exchange.resume([await handle for handle in exchange.handles])

    Attributes:
        waits: of each of these phases the time, by ``time.perf_counter``,
            when nothing was left to compute, and when the last handle ended.
    """

    __slots__ = (
        "_ended",
        "_group",
        "_is_cancelled",
        "_round_id",
        "_runs",
        "_sent_s",
        "_timeout_s",
        "_waiting",
        "waits",
    )

    def __init__(self, group: Group, *, round_id: int, timeout_s: float) -> None:
        """``timeout_s``: of each request."""
        self._group = group
        self._round_id = round_id
        self._timeout_s = timeout_s
        self._runs: list[ProgramRun[Any]] = []
        self._waiting: list[ProgramRun[Any]] = []
        self._ended: deque[CollectiveHandle[Any]] = deque()
        self.waits: deque[tuple[float, float]] = deque()
        self._sent_s = 0.0
        self._is_cancelled = False

    def start(self, name: str, program: Program[Any]) -> None:
        """Run a program to its first request. ``name``: equal on all ranks, and of no other program of the step.

        After :meth:`cancel` nothing is started, whatever thread this is called on.
        """
        run = ProgramRun(self._group, program, name, round_id=self._round_id, timeout_s=self._timeout_s)
        self._runs.append(run)
        if self._is_cancelled:  # asked when cancel() can see the run: one of the two finds the other
            run.cancel()
        elif run.start():
            self._waiting.append(run)

    @property
    def goes_on(self) -> bool:
        """Return whether a program waits for a request."""
        return bool(self._waiting)

    @property
    def handles(self) -> list[CollectiveHandle[Any]]:
        """Handles of the requests under way; may be empty although a program waits."""
        return [handle for run in self._waiting for handle in run.handles]

    def all_sent(self) -> None:
        """Nothing is left to compute in this phase: from here on a rank waits."""
        self._sent_s = time.perf_counter()

    def resume(self, results: Sequence[Any]) -> bool:
        """Go on to the next phase. Returns whether there is one. ``results``: of ``handles``, in their order."""
        handles = self.handles
        ended_s = [self._sent_s if handle.finished_s is None else handle.finished_s for handle in handles]
        self.waits.append((self._sent_s, max([self._sent_s, *ended_s])))
        self._ended += handles
        waiting, self._waiting = self._waiting, []
        start = 0
        for run in waiting:
            count = len(run.handles)
            if run.resume(results[start : start + count]):
                self._waiting.append(run)
            start += count
        self.all_sent()
        return bool(self._waiting)

    def take_waits(self) -> list[tuple[float, float]]:
        """Return ``waits``, each once, as :meth:`take_ended`."""
        return [self.waits.popleft() for _ in range(len(self.waits))]

    def take_ended(self) -> list[CollectiveHandle[Any]]:
        """Return handles of the phases that are over, each once. Another phase may end on another thread meanwhile."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def cancel(self) -> None:
        """Give up: buffers are given back, what has ended stays as it is."""
        self._is_cancelled = True
        for run in self._runs:
            run.cancel()


class GradientExchange:
    """The exchange of a step's gradients, from its first bucket until the step counts, or is skipped by all ranks.

    Attributes:
        step: whose gradients they are. programs: those of its buckets, and of the loss.
    """

    __slots__ = ("_algorithm", "_as_begun", "_loss", "_status", "programs", "step")

    def __init__(self, step: TrainingStep, programs: StepExchange, algorithm: Algorithm, loss: MeanLoss) -> None:
        """``loss``: of the steps before, which this one replaces if it counts."""
        self.step = step
        self.programs = programs
        self._algorithm = algorithm
        self._loss = loss
        self._as_begun = loss.step_with(step)
        self._status: Tensor | None = None

    def start_bucket(self, bucket: TensorBucket) -> None:
        """Start the exchange of a bucket. A hook may call this, in the midst of the backward pass."""
        algorithm, step = self._algorithm, self._as_begun
        is_here = bucket.flat.is_cpu  # else perhaps in a copy on the CPU
        program = algorithm.exchange(bucket, step) if is_here else exchange_of(algorithm, bucket, step)
        self.programs.start(f"grad/{bucket.index}", program)

    def all_started(self) -> None:
        """All buckets are on their way: the loss follows, if the algorithm needs it, and nothing is left to compute."""
        if self._loss.is_needed:
            self._status = self._loss.status_of(self.step)
            self.programs.start("loss", summed(self._status))
        self.programs.all_sent()

    def start(self) -> bool:
        """Start the exchange of all buckets at once, with the loss as it is by now. Returns whether it goes on."""
        self._as_begun = self._loss.step_with(self.step)
        for bucket in self.step.gradients:
            self.start_bucket(bucket)
        self.all_started()
        return self._goes_on(self.programs.goes_on)

    def resume(self, results: Sequence[Any]) -> bool:
        """Go on to the next phase. Returns whether there is one. ``results``: of the handles of ``programs``."""
        return self._goes_on(self.programs.resume(results))

    def _goes_on(self, goes_on: bool) -> bool:
        if not goes_on:
            self.conclude()
        return goes_on

    def conclude(self) -> None:
        """End the exchange, all of whose programs have ended: the step counts, or not, as follows from gradients that
        are equal on all ranks."""
        if gradients_are_finite(self.step.gradients):
            self._algorithm.commit()
            if self._status is not None:
                self._loss.note(self._status)
        else:
            self._algorithm.roll_back()
            self.step.skipped_by = self._algorithm.not_finite
