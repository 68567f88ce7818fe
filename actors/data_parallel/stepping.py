"""The order of a step: compute gradients, exchange them, change the model.

The exchange of a bucket starts in the midst of the backward pass, and the step ends with the last one. With a delay
these go on at the same time: see :mod:`.late_stepping`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradbus.actors.data_parallel.buckets import gradients_are_finite
from gradbus.actors.data_parallel.epoch_plan import EpochPlan
from gradbus.actors.data_parallel.mean_loss import MeanLoss, summed
from gradbus.actors.data_parallel.state import Position
from gradbus.actors.data_parallel.step import TrainingStep
from gradbus.actors.data_parallel.training import ShardTraining
from gradbus.runtime.algorithms.base import Algorithm, TensorBucket
from gradbus.runtime.collectives import Group
from gradbus.runtime.collectives.programs import ProgramRuns
from gradbus.runtime.collectives.staging import exchange_of
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.profiling.profile import Profile, StepProfile


class GradientExchange:
    """The exchange of a step's gradients, from its first bucket until the step counts, or is skipped by all ranks.

    Attributes:
        step: whose gradients they are. programs: those of its buckets, and of the loss.
    """

    __slots__ = ("_algorithm", "_as_begun", "_loss", "_status", "programs", "step")

    def __init__(self, step: TrainingStep, programs: ProgramRuns, algorithm: Algorithm, loss: MeanLoss) -> None:
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
        algorithm = self._algorithm
        if gradients_are_finite(self.step.gradients):
            # Where nothing is kept from step to step, as with dense gradients, nothing is to be committed.
            if algorithm.memory.staged or type(algorithm).commit is not Algorithm.commit:
                algorithm.commit()
            if self._status is not None:
                self._loss.note(self._status)
        else:
            algorithm.roll_back()
            self.step.skipped_by = algorithm.not_finite


@dataclass(frozen=True, slots=True)
class StepperParts:
    """What a stepper works with.

    Attributes:
        group: of the ranks that make the steps. timeout_s: of each request.
        training: model, data and algorithm. compute: the thread of ``training``. profile: of this process.
        on_sent: called with the number of a step, from 1 on, when its gradients are computed, and on their way if there
            is no delay; None: nothing is.
    """

    group: Group
    timeout_s: float
    training: ShardTraining
    compute: ComputeThread
    profile: Profile
    on_sent: Callable[[int], object] | None = None


class Stepper(ABC):
    """Makes steps, one after the other.

    Attributes:
        loss: the mean over the ranks, as far as the algorithm needs it.
        ended_exchanges: exchanges of weights so far whose results were applied, or dropped by all ranks.
        skipped_exchanges: those of them that were dropped.
        wait_s: seconds that this rank waited for others, so far.
    """

    def __init__(self, parts: StepperParts, position: Position) -> None:
        """``position``: where the run stands."""
        self._group = parts.group
        self._timeout_s = parts.timeout_s
        self._training = parts.training
        self._algorithm = parts.training.algorithm
        self._compute = parts.compute
        self._profile = parts.profile
        self._on_sent = parts.on_sent or (lambda number: None)
        self._exchanges: list[ProgramRuns] = []  # that have not ended
        self.loss = MeanLoss(position.mean_loss, is_needed=self._algorithm.needs_loss)
        self.ended_exchanges = position.ended_exchanges
        self.skipped_exchanges = 0
        self._is_diverged = False
        self.wait_s = 0.0

    @abstractmethod
    async def step(self, plan: EpochPlan, position: Position, profile: StepProfile) -> list[TrainingStep]:
        """Make the next step. Returns those that have been applied, or skipped, this one or former ones."""

    async def drain(self) -> list[TrainingStep]:
        """Apply what is still on its way. Returns the steps that have been applied, or skipped, by that."""
        return []

    async def close(self) -> None:
        """Cancel what is on its way; buffers are given back."""
        for exchange in self._exchanges:
            exchange.cancel()

    def take_diverged(self) -> bool:
        """Return, once, whether a rank has announced with an exchange of weights that it had skipped as many steps in a
        row as it may; equal on all ranks."""
        is_diverged, self._is_diverged = self._is_diverged, False
        return is_diverged

    def _open_exchange(self, number: int) -> ProgramRuns:
        """For programs of a step, with nothing started."""
        exchange = ProgramRuns(self._group, round_id=number, timeout_s=self._timeout_s)
        self._exchanges.append(exchange)
        return exchange

    def _ended(self, exchange: ProgramRuns) -> None:
        """An exchange is over."""
        self._exchanges.remove(exchange)
        self._add_spans(exchange)

    def _add_spans(self, exchange: ProgramRuns) -> None:
        """Add the phases that have ended since the last call to the trace."""
        for handle in exchange.take_ended():
            if handle.finished_s is not None:
                self._profile.add_span(handle.name, handle.started_s, handle.finished_s)

    def _waited(self, start_s: float, end_s: float, profile: Profile | StepProfile) -> None:
        profile.add_span("wait", start_s, end_s)
        self.wait_s += end_s - start_s


class GradientStepper(Stepper):
    """Steps whose gradients are exchanged, and applied before the next step begins."""

    def __init__(self, parts: StepperParts, position: Position, *, overlap: bool) -> None:
        """``overlap``: buckets are sent during the backward pass, if the algorithm exchanges each by itself."""
        super().__init__(parts, position)
        self._overlaps = overlap and self._algorithm.scope == "bucket"

    async def step(self, plan: EpochPlan, position: Position, profile: StepProfile) -> list[TrainingStep]:
        step = self._training.new_step(plan, position)
        exchange = GradientExchange(step, self._open_exchange(step.number), self._algorithm, self.loss)
        await self._compute.run(self._compute_gradients, exchange, profile)
        self._on_sent(step.number + 1)
        goes_on = True
        while goes_on:
            results = [await handle for handle in exchange.programs.handles]
            goes_on = await self._compute.run(self._resume, exchange, results, profile)
        for start_s, end_s in exchange.programs.waits:
            self._waited(start_s, end_s, profile)
        self._ended(exchange.programs)
        return [step]

    def _compute_gradients(self, exchange: GradientExchange, profile: StepProfile) -> None:
        self._training.compute(exchange.step, profile, exchange.start_bucket, overlaps=self._overlaps)
        exchange.all_started()

    def _resume(self, exchange: GradientExchange, results: Sequence[Any], profile: StepProfile) -> bool:
        with profile.span("decode"):
            if exchange.programs.resume(results):
                return True
        with profile.span("apply"):  # a look at every gradient, whatever has exchanged them
            exchange.conclude()
        self._training.apply(exchange.step, profile)
        return False
