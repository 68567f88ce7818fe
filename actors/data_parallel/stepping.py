"""The order of a step: compute gradients, exchange them, change the model. With a delay these go on at the same time.

Without a delay the exchange of a bucket starts in the midst of the backward pass, and the step ends with the last one.
With ``delay_steps`` of 1 there are three stages: while step t is computed, the gradients of step t - 1 are exchanged;
then these change the model, and those of step t go on their way. The gradients of step t were computed with weights
that lack step t - 1: they are as many steps old as the delay. All ranks apply the same steps in the same order, so
their models stay equal.

The exchanges of two steps never overlap: what an algorithm remembers of one is what the next one starts from.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradbus.actors.data_parallel.exchange import StepExchange
from gradbus.actors.data_parallel.state import Position
from gradbus.actors.data_parallel.training import EpochPlan, ShardTraining, TrainingStep
from gradbus.runtime.algorithms.base import Step, TensorBucket
from gradbus.runtime.algorithms.requests import AllReduce, Program
from gradbus.runtime.collectives.staging import exchange_of
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.profiling.profile import Profile, StepProfile


def summed(status: Tensor, name: str = "status") -> Program[None]:
    """Add up the status of all ranks, in place. The bits are equal on all ranks. ``name``: of the request."""
    yield AllReduce(name, status, "sum", out=status)


class Stepper(ABC):
    """Makes steps, one after the other.

    Attributes:
        mean_loss: of the last step that was not skipped, over the ranks that made it; NaN if nobody needs it. Where
            weights are exchanged, of the step before the exchange, and NaN if no rank has made that one.
        ended_exchanges: exchanges of weights so far whose results were applied, or dropped by all ranks.
        skipped_exchanges: those of them that were dropped.
        is_diverged: whether a rank has announced with an exchange of weights that it had skipped as many steps in a row
            as it may; equal on all ranks.
        wait_s: seconds that this rank waited for others, so far.
    """

    def __init__(
        self, training: ShardTraining, compute: ComputeThread, profile: Profile, *,
        on_sent: Callable[[TrainingStep], object],
    ) -> None:  # fmt: skip
        """
        Args:
            compute: the thread of ``training``.
            on_sent: called when the gradients of a step are computed, and on their way if there is no delay.
        """
        self._training = training
        self._algorithm = training.algorithm
        self._compute = compute
        self._delay = training.delay_steps
        self._profile = profile
        self._on_sent = on_sent
        # Programs that run while gradients are computed: the compute thread is busy then.
        self._background = ComputeThread("exchange")
        self._queue: deque[tuple[TrainingStep, asyncio.Task[None]]] = deque()
        self._newest_task: asyncio.Task[None] | None = None
        self._exchanges: list[StepExchange] = []  # that have not ended
        self.mean_loss = math.nan
        self.ended_exchanges = 0
        self.skipped_exchanges = 0
        self.is_diverged = False
        self.wait_s = 0.0

    @abstractmethod
    async def step(self, plan: EpochPlan, position: Position, profile: StepProfile) -> list[TrainingStep]:
        """Make the next step. Returns those that have been applied, or skipped, this one or former ones."""

    async def drain(self) -> list[TrainingStep]:
        """Apply what is still on its way. Returns the steps that have been applied, or skipped, by that."""
        return await self._apply_before(None, self._profile)

    @abstractmethod
    def _apply_late(self, step: TrainingStep, profile: Profile | StepProfile) -> None:
        """Apply a step whose programs have run in the background. On the compute thread."""

    async def close(self) -> None:
        """Cancel what is on its way; buffers are given back."""
        tasks = [task for _, task in self._queue if not task.done()]
        for task in tasks:
            task.cancel()
        for exchange in self._exchanges:
            exchange.cancel()
        self._background.close()
        if tasks:
            await asyncio.wait(tasks)
        for _, task in self._queue:
            if not task.cancelled():
                task.exception()  # it has been raised by what waited for it
        self._queue.clear()

    # Programs

    def _step_of(self, step: TrainingStep, *, with_loss: bool = True) -> Step:
        return Step(step.number, step.epoch, step.active, self.mean_loss if with_loss else math.nan)

    def _program(self, step: TrainingStep, bucket: TensorBucket) -> Program[None]:
        return exchange_of(self._algorithm, bucket, step.as_begun or self._step_of(step))

    def _take_status(self, step: TrainingStep) -> Tensor:
        """This rank's, to be summed up."""
        counts = step.batches > 0 and self._training.own_is_finite(step)
        loss = float(step.loss) / step.batches if counts else 0.0
        step.status = torch.tensor([float(not step.is_finite), loss, float(counts)], dtype=torch.float64)
        return step.status

    def _share_loss(self, step: TrainingStep) -> None:
        """It travels with the exchange of the step."""
        if self._algorithm.needs_loss:
            step.exchange.start("loss", summed(self._take_status(step)))

    def _note_loss(self, step: TrainingStep) -> None:
        """The status is that of all ranks. The loss follows from it alone, so it has equal bits on all of them."""
        if self._algorithm.needs_loss and step.status is not None:
            self.mean_loss = float(step.status[1] / step.status[2])  # NaN: no rank has one that is finite

    def _opened(self, exchange: StepExchange) -> None:
        self._exchanges.append(exchange)

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

    # In the background

    def _launch(self, step: TrainingStep) -> None:
        """Run the programs of a step in the background, after those of the step before."""
        task = asyncio.get_running_loop().create_task(
            self._run(step, self._newest_task), name=f"exchange of step {step.number}"
        )
        self._newest_task = task
        self._queue.append((step, task))

    async def _run(self, step: TrainingStep, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        goes_on = await self._background.run(self._start_late, step)
        while goes_on:
            results = [await handle for handle in step.exchange.handles]
            goes_on = await self._background.run(self._resume_late, step, results)

    @abstractmethod
    def _start_late(self, step: TrainingStep) -> bool:
        """Start the programs of a step. Returns whether they go on. On the thread in the background."""

    def _resume_late(self, step: TrainingStep, results: Sequence[Any]) -> bool:
        step.exchange.resume(results)
        return step.exchange.goes_on or self._conclude(step)

    @abstractmethod
    def _conclude(self, step: TrainingStep) -> bool:
        """All programs of a step have ended: it counts, or not, as follows from what is equal on all ranks. False."""

    async def _apply_before(self, number: int | None, profile: Profile | StepProfile) -> list[TrainingStep]:
        """Apply the steps before this one, oldest first; None: all."""
        applied = []
        while self._queue and (number is None or self._queue[0][0].number < number):
            step, task = self._queue[0]
            started_s = time.perf_counter()
            await self._result_of(step, task)
            self._queue.popleft()
            self._arrived(step, task, profile, waited_since_s=started_s)
            await self._compute.run(self._apply_late, step, profile)
            applied.append(step)
        if not self._queue:
            self._newest_task = None
        return applied

    async def _result_of(self, step: TrainingStep, task: asyncio.Task[None]) -> None:
        """Wait until a step can be applied."""
        await task

    def _arrived(
        self, step: TrainingStep, task: asyncio.Task[None], profile: Profile | StepProfile, *, waited_since_s: float
    ) -> None:
        """A step can be applied."""
        self._waited(waited_since_s, time.perf_counter(), profile)
        self._ended(step.exchange)


class GradientStepper(Stepper):
    """Steps whose gradients are exchanged."""

    def __init__(self, *args: Any, overlap: bool, **options: Any) -> None:
        """``overlap``: buckets are sent during the backward pass."""
        super().__init__(*args, **options)
        self._overlaps = overlap and self._algorithm.scope == "bucket" and not self._delay
        self._newest: TrainingStep

    async def step(self, plan: EpochPlan, position: Position, profile: StepProfile) -> list[TrainingStep]:
        step = self._newest = self._training.new_step(plan, position)
        step.late = [before.own for before, _ in self._queue if before.own is not None]
        self._opened(step.exchange)
        await self._compute.run(self._compute_gradients, step, profile)
        self._on_sent(step)
        if self._delay:
            self._launch(step)
            return await self._apply_before(step.number + 1 - self._delay, profile)
        goes_on = True
        while goes_on:
            results = [await handle for handle in step.exchange.handles]
            goes_on = await self._compute.run(self._resume, step, results, profile)
        for start_s, end_s in step.exchange.waits:
            self._waited(start_s, end_s, profile)
        self._ended(step.exchange)
        return [step]

    def _compute_gradients(self, step: TrainingStep, profile: StepProfile) -> None:
        self._training.compute(step, profile, self._on_bucket, overlaps=self._overlaps)
        if not self._delay:
            self._share_loss(step)
            step.exchange.all_sent()

    def _on_bucket(self, bucket: TensorBucket) -> None:
        """A bucket is full. With a delay the exchange of the step before may not have ended."""
        if not self._delay:
            self._newest.exchange.start(f"grad/{bucket.index}", self._program(self._newest, bucket))

    def _resume(self, step: TrainingStep, results: Sequence[Any], profile: StepProfile) -> bool:
        with profile.span("decode"):
            step.exchange.resume(results)
        if step.exchange.goes_on:
            return True
        with profile.span("apply"):  # a look at every gradient, whatever has exchanged them
            self._conclude(step)
        self._training.apply(step, profile)
        return False

    def _start_late(self, step: TrainingStep) -> bool:
        for bucket in step.gradients:
            step.exchange.start(f"grad/{bucket.index}", self._program(step, bucket))
        self._share_loss(step)
        step.exchange.all_sent()
        return step.exchange.goes_on or self._conclude(step)

    def _conclude(self, step: TrainingStep) -> bool:
        if self._training.gradients_are_finite(step):
            self._algorithm.commit()
            self._note_loss(step)
        else:
            self._algorithm.roll_back()
            step.skipped_by = self._algorithm.not_finite
        return False

    def _apply_late(self, step: TrainingStep, profile: Profile | StepProfile) -> None:
        self._training.apply(step, profile)
