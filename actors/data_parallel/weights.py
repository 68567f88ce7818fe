"""Steps of an algorithm that exchanges weights: each rank's optimizer takes its own gradients.

Three orders, by what the algorithm declares and by the delay:

- it ``overlaps``: the weights that the gradients are computed with are exchanged meanwhile, replaced by the result, and
  then the optimizer steps;
- it does not: the optimizer steps, then the weights are exchanged, and replaced;
- with a delay the weights are copied after the optimizer's step, exchanged while the next steps are computed, and the
  algorithm says what the weights of then become by the result: live += result - copy, where it says nothing else.

A rank whose gradients are not finite skips its step alone. The result of an exchange that is not finite on some rank is
dropped by all: a step of finite gradients may overflow. The rank whose own weights are not finite then goes on from
those of the last exchange, where the algorithm has them.

That takes a second message, as what two ranks send each other tells no third one. Over a distant link nobody is to wait
for it: a rank goes on with a result that is finite on itself, and takes it back, live -= what it has changed, where it
learns that another rank had none. It looks before the next exchange begins, and where all steps must be final: so after
the same step in each run, whenever the message came. Elastic ranks, which may be lost in between, and those whose
exchange ``overlaps`` computing, apply no result that is not agreed on.

Of elastic ranks some may have the late result of an exchange, and others not, when one is lost. So it counts where it
is applied, with what the algorithm remembers of it, and leaves no trace on a rank before that: all weights that were
sent are still what differs from the last exchange that counts, and go with the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import partial
from typing import Any

import torch

from gradbus.actors.data_parallel.state import Position
from gradbus.actors.data_parallel.stepping import Stepper, summed
from gradbus.actors.data_parallel.training import EpochPlan, TrainingStep
from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms.base import bucket_of
from gradbus.runtime.algorithms.live_weights import apply_result, restart, take_back
from gradbus.runtime.algorithms.requests import Program
from gradbus.runtime.logs import get_logger
from gradbus.runtime.profiling.profile import Profile, StepProfile


class WeightStepper(Stepper):
    """Steps whose weights are exchanged, in some of them or in all."""

    def __init__(self, *args: Any, waits_for_all: bool, max_nonfinite_steps: int, **options: Any) -> None:
        """As a :class:`Stepper`.

        Args:
            waits_for_all: apply no result before all ranks have agreed that it counts.
            max_nonfinite_steps: a rank that has skipped so many steps in a row announces it to all ranks with its next
                exchange, see ``is_diverged``; 0: never.
        """
        super().__init__(*args, **options)
        self._waits_for_all = waits_for_all or self._algorithm.overlaps
        self._commits_late = waits_for_all and self._delay > 0
        self._max_nonfinite_steps = max_nonfinite_steps
        self._unsettled: deque[tuple[TrainingStep, asyncio.Task[None]]] = deque()  # applied, perhaps to be taken back
        self._log = get_logger("worker", rank=self._algorithm.place.rank)

    async def step(self, plan: EpochPlan, position: Position, profile: StepProfile) -> list[TrainingStep]:
        training, run = self._training, self._compute.run
        self._look_at_unsettled()
        step = training.new_step(plan, position)
        # With a delay the loss before may be known on one rank already, and on another not yet.
        is_due = self._algorithm.is_due(self._step_of(step, with_loss=not self._delay))
        is_early = is_due and self._algorithm.overlaps and not self._delay
        if is_early:
            # Without this step's own loss, which may be there when its program starts.
            step.as_begun = self._step_of(step)
            step.skipped_in_row = position.skipped_in_row  # without this step, too
            await self._begin_exchange(step, profile)
        await run(self._compute_gradients, step, profile)
        if not is_early:
            step.skipped_in_row = 0 if step.is_finite else position.skipped_in_row + 1
        self._on_sent(step)
        if is_early:
            await self._apply_before(None, profile)
            await self._settle(profile)
        if is_due and not self._delay and (self._algorithm.needs_loss or (self._waits_for_all and not is_early)):
            # Elastic ranks find here who was lost since the last exchange: before the step leaves a trace.
            await self._agree_on_loss(step, profile)
        if self._commits_late:  # here they find it with a delay
            await self._wait_before(step.number + 1 - self._delay, profile)
        await run(training.apply, step, profile)
        await self._apply_before(step.number + 1 - self._delay, profile)
        if is_due and not is_early:
            await self._begin_exchange(step, profile)
            if not self._delay:
                await self._apply_before(None, profile)
        if self._waits_for_all:
            await self._settle(profile)
        if training.optimizer.has_own_schedule:  # not before: a step whose exchange is lost is made again
            await run(training.optimizer.step_has_ended)
        return [step]

    async def drain(self) -> list[TrainingStep]:
        """As above; the steps were made, and returned, when their gradients were there: none is left."""
        await super().drain()
        await self._settle(self._profile)
        return []

    async def close(self) -> None:
        tasks = [task for _, task in self._unsettled]
        self._unsettled.clear()
        for task in tasks:
            task.cancel()
        await super().close()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin_exchange(self, step: TrainingStep, profile: StepProfile) -> None:
        await self._settle(profile)
        self._opened(step.exchange)
        await self._compute.run(self._copy_weights, step)
        self._launch(step)

    async def _run(self, step: TrainingStep, before: asyncio.Task[None] | None) -> None:
        loop = asyncio.get_running_loop()
        if not self._waits_for_all:
            step.on_result = partial(loop.call_soon_threadsafe, step.has_result.set)
        try:
            await super()._run(step, before)
        finally:
            step.has_result.set()

    async def _wait_before(self, number: int, profile: StepProfile) -> None:
        """Wait for the results of the steps before this one, and apply none yet."""
        started_s = time.perf_counter()
        for step, task in self._queue:
            if step.number < number:
                await self._result_of(step, task)
        self._waited(started_s, time.perf_counter(), profile)

    async def _result_of(self, step: TrainingStep, task: asyncio.Task[None]) -> None:
        await step.has_result.wait()
        if task.done():
            await task

    def _arrived(
        self, step: TrainingStep, task: asyncio.Task[None], profile: Profile | StepProfile, *, waited_since_s: float
    ) -> None:
        if self._delay:
            self._waited(waited_since_s, time.perf_counter(), profile)
        else:  # to code messages is no wait
            for start_s, end_s in step.exchange.take_waits():
                self._waited(max(start_s, min(waited_since_s, end_s)), end_s, profile)
        self._add_spans(step.exchange)
        self._unsettled.append((step, task))

    def _look_at_unsettled(self) -> None:
        """Raise the error of an exchange that has failed after its result was there, and let go of what need not be
        taken back: the next exchange may be far away."""
        for step, task in self._unsettled:
            if task.done():
                task.result()
                step.change = step.change if not step.counts else None

    async def _settle(self, profile: Profile | StepProfile) -> None:
        """Take back what was applied of exchanges that do not count."""
        while self._unsettled:
            step, task = self._unsettled[0]
            started_s = time.perf_counter()
            await task
            self._unsettled.popleft()
            self._waited(started_s, time.perf_counter(), profile)
            self._ended(step.exchange)
            self.is_diverged |= step.verdict is not None and bool(step.verdict[1])
            if not step.counts:
                await self._compute.run(self._take_back, step)

    async def _agree_on_loss(self, step: TrainingStep, profile: StepProfile) -> None:
        """Sum up the losses of all ranks before an exchange, which may depend on it."""
        exchange = self._training.new_exchange(step.number)
        self._opened(exchange)
        status = await self._compute.run(self._take_status, step)  # it waits for the device
        exchange.start("loss", summed(status))
        exchange.all_sent()
        while exchange.goes_on:
            exchange.resume([await handle for handle in exchange.handles])
        for start_s, end_s in exchange.waits:
            self._waited(start_s, end_s, profile)
        self._ended(exchange)
        self._note_loss(step)

    # On the compute thread

    @torch.no_grad()
    def _copy_weights(self, step: TrainingStep) -> None:
        step.weights = bucket_of(self._training.trained)
        step.before = step.weights.flat.clone() if self._delay else None

    def _compute_gradients(self, step: TrainingStep, profile: StepProfile) -> None:
        self._training.compute(step, profile, lambda bucket: None, overlaps=False)
        step.is_finite = self._training.gradients_are_finite(step)
        if not step.is_finite:
            step.skipped_by = (self._algorithm.place.rank,)

    def _apply_late(self, step: TrainingStep, profile: Profile | StepProfile) -> None:
        assert step.weights is not None
        self.ended_exchanges += 1
        if step.staged is not None:
            self._algorithm.memory.commit_taken(step.staged)
        if step.counts if self._waits_for_all else step.has_finite_result:
            live, result = self._training.trained, step.weights.flat
            assert step.as_begun is not None
            change = apply_result(live, self._algorithm, step.as_begun, result, step.before)
            step.change = None if self._waits_for_all else change
        else:
            self._restart()
        step.weights = step.before = step.staged = None

    def _take_back(self, step: TrainingStep) -> None:
        self.skipped_exchanges += 1
        self._log.warning("exchange skipped: NaN or infinity", step=step.number + 1)
        if step.change is not None:
            take_back(self._training.trained, step.change)
        self._restart()

    def _restart(self) -> None:
        live = self._training.trained
        if are_finite([one.detach() for one in live.values()]):
            return
        if restart(live, self._algorithm.weights_of_joiner):  # else no exchange would count any more
            self._log.warning("weights are not finite: back to those of the last exchange")

    # In the background

    def _start_late(self, step: TrainingStep) -> bool:
        step.exchange.start("weights", self._exchange(step))
        step.exchange.all_sent()
        return step.exchange.goes_on or self._conclude(step)

    def _exchange(self, step: TrainingStep) -> Program[None]:
        """Exchange, then agree whether the result is finite everywhere."""
        assert step.weights is not None
        if self._delay and self._algorithm.needs_loss:
            yield from summed(self._take_status(step), "loss")
            self._note_loss(step)
        step.as_begun = step.as_begun or self._step_of(step)
        yield from self._program(step, step.weights)
        step.has_finite_result = are_finite([step.weights.flat])
        step.on_result()
        is_diverged = 0 < self._max_nonfinite_steps <= step.skipped_in_row
        verdict = torch.tensor([float(not step.has_finite_result), float(is_diverged)])
        yield from summed(verdict, "result")
        step.verdict = verdict

    def _conclude(self, step: TrainingStep) -> bool:
        if step.verdict is None:
            return False  # it was cancelled
        step.counts = not step.verdict[0]
        if step.counts and self._commits_late:
            step.staged = self._algorithm.memory.take_staged()
        else:
            (self._algorithm.commit if step.counts else self._algorithm.roll_back)()
        return False
