"""The order of a step: compute gradients, exchange them, change the model.

The exchange of a bucket starts in the midst of the backward pass, and the step ends with the last one. With a delay
these go on at the same time: see :mod:`.late_stepping`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradbus.actors.data_parallel.epoch_plan import EpochPlan
from gradbus.actors.data_parallel.exchange import GradientExchange, StepExchange
from gradbus.actors.data_parallel.mean_loss import MeanLoss
from gradbus.actors.data_parallel.state import Position
from gradbus.actors.data_parallel.step import TrainingStep
from gradbus.actors.data_parallel.training import ShardTraining
from gradbus.runtime.collectives import Group
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.profiling.profile import Profile, StepProfile


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
        is_diverged: whether a rank has announced with an exchange of weights that it had skipped as many steps in a row
            as it may; equal on all ranks.
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
        self._exchanges: list[StepExchange] = []  # that have not ended
        self.loss = MeanLoss(position.mean_loss, is_needed=self._algorithm.needs_loss)
        self.ended_exchanges = position.ended_exchanges
        self.skipped_exchanges = 0
        self.is_diverged = False
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

    def _open_exchange(self, number: int) -> StepExchange:
        """For programs of a step, with nothing started."""
        exchange = StepExchange(self._group, round_id=number, timeout_s=self._timeout_s)
        self._exchanges.append(exchange)
        return exchange

    def _ended(self, exchange: StepExchange) -> None:
        """An exchange is over."""
        self._exchanges.remove(exchange)
        self._add_spans(exchange)

    def _add_spans(self, exchange: StepExchange) -> None:
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
