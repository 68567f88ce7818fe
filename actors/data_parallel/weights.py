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

import torch

from gradbus.actors.data_parallel.buckets import gradients_are_finite
from gradbus.actors.data_parallel.epoch_plan import EpochPlan
from gradbus.actors.data_parallel.late_stepping import LateStepper
from gradbus.actors.data_parallel.mean_loss import summed
from gradbus.actors.data_parallel.parameter_exchange import ExchangeRules, ParameterExchange, WeightCopy
from gradbus.actors.data_parallel.state import Position
from gradbus.actors.data_parallel.step import TrainingStep
from gradbus.actors.data_parallel.stepping import StepperParts
from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms.base import Step, bucket_of
from gradbus.runtime.algorithms.live_weights import restart
from gradbus.runtime.logs import get_logger
from gradbus.runtime.profiling.profile import Profile, StepProfile


class WeightStepper(LateStepper[ParameterExchange]):
    """Steps whose weights are exchanged, in some of them or in all."""

    def __init__(
        self, parts: StepperParts, position: Position, *, waits_for_all: bool, max_nonfinite_steps: int
    ) -> None:
        """
        Args:
            waits_for_all: apply no result before all ranks have agreed that it counts.
            max_nonfinite_steps: a rank that has skipped so many steps in a row announces it to all ranks with its next
                exchange, see :meth:`take_diverged`; 0: never.
        """
        super().__init__(parts, position)
        algorithm = self._algorithm
        self._rules = ExchangeRules(
            algorithm,
            self.loss,
            agrees_on_loss=self._delay > 0 and algorithm.needs_loss,
            waits_for_all=waits_for_all or algorithm.overlaps,
            commits_late=waits_for_all and self._delay > 0,
        )
        self._max_nonfinite_steps = max_nonfinite_steps
        self._unsettled: deque[tuple[ParameterExchange, asyncio.Task[None]]] = (
            deque()
        )  # applied, perhaps to be taken back
        self._log = get_logger("worker", rank=algorithm.place.rank)

    async def step(self, plan: EpochPlan, position: Position, profile: StepProfile) -> list[TrainingStep]:
        training, run, rules = self._training, self._compute.run, self._rules
        self._look_at_unsettled()
        step = training.new_step(plan, position)
        # With a delay the loss before may be known on one rank already, and on another not yet.
        is_due = self._algorithm.is_due(
            Step(step.number, step.epoch, step.active) if self._delay else self.loss.step_with(step)
        )
        is_early = is_due and self._algorithm.overlaps and not self._delay
        if is_early:
            # Without this step's own loss, which may be there when its program starts; nor does it count as skipped.
            await self._begin_exchange(step, position.skipped_in_row, profile, as_begun=self.loss.step_with(step))
        await run(self._compute_gradients, step, profile)
        self._on_sent(step.number + 1)
        if is_early:
            await self._apply_before(None, profile)
            await self._settle(profile)
        if is_due and not self._delay and (self.loss.is_needed or (rules.waits_for_all and not is_early)):
            # Elastic ranks find here who was lost since the last exchange: before the step leaves a trace.
            await self._agree_on_loss(step, profile)
        if rules.commits_late:  # here they find it with a delay
            await self._wait_before(step.number + 1 - self._delay, profile)
        await run(training.apply, step, profile)
        await self._apply_before(step.number + 1 - self._delay, profile)
        if is_due and not is_early:
            await self._begin_exchange(step, 0 if step.is_finite else position.skipped_in_row + 1, profile)
            if not self._delay:
                await self._apply_before(None, profile)
        if rules.waits_for_all:
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

    async def _begin_exchange(
        self, step: TrainingStep, skipped_in_row: int, profile: StepProfile, as_begun: Step | None = None
    ) -> None:
        """``skipped_in_row``: steps that this rank has skipped by itself, the last ones."""
        await self._settle(profile)
        programs = self._open_exchange(step.number)
        copy = await self._compute.run(self._copy_weights)
        exchange = ParameterExchange(
            step,
            programs,
            self._rules,
            copy,
            as_begun=as_begun,
            is_diverging=0 < self._max_nonfinite_steps <= skipped_in_row,
        )
        self._launch(exchange).add_done_callback(lambda _: exchange.has_result.set())

    async def _wait_before(self, number: int, profile: StepProfile) -> None:
        """Wait for the results of the steps before this one, and apply none yet."""
        started_s = time.perf_counter()
        for exchange, task in self._queue:
            if exchange.step.number < number:
                await self._result_of(exchange, task)
        self._waited(started_s, time.perf_counter(), profile)

    async def _result_of(self, exchange: ParameterExchange, task: asyncio.Task[None]) -> None:
        await exchange.has_result.wait()
        if task.done():
            await task

    def _arrived(
        self,
        exchange: ParameterExchange,
        task: asyncio.Task[None],
        profile: Profile | StepProfile,
        *,
        waited_since_s: float,
    ) -> None:
        if self._delay:
            self._waited(waited_since_s, time.perf_counter(), profile)
        else:  # to code messages is no wait
            for start_s, end_s in exchange.programs.take_waits():
                self._waited(max(start_s, min(waited_since_s, end_s)), end_s, profile)
        self._add_spans(exchange.programs)
        self._unsettled.append((exchange, task))

    def _look_at_unsettled(self) -> None:
        """Raise the error of an exchange that has failed after its result was there, and let go of what need not be
        taken back: the next exchange may be far away."""
        for exchange, task in self._unsettled:
            if task.done():
                task.result()
                exchange.forget_change()

    async def _settle(self, profile: Profile | StepProfile) -> None:
        """Take back what was applied of exchanges that do not count."""
        while self._unsettled:
            exchange, task = self._unsettled[0]
            started_s = time.perf_counter()
            await task
            self._unsettled.popleft()
            self._waited(started_s, time.perf_counter(), profile)
            self._ended(exchange.programs)
            self._is_diverged |= exchange.is_diverged
            if not exchange.counts:
                await self._compute.run(self._take_back, exchange)

    async def _agree_on_loss(self, step: TrainingStep, profile: StepProfile) -> None:
        """Sum up the losses of all ranks before an exchange, which may depend on it."""
        exchange = self._open_exchange(step.number)
        status = await self._compute.run(self.loss.status_of, step)  # it waits for the device
        exchange.start("loss", summed(status))
        exchange.all_sent()
        while exchange.goes_on:
            exchange.resume([await handle for handle in exchange.handles])
        for start_s, end_s in exchange.waits:
            self._waited(start_s, end_s, profile)
        self._ended(exchange)
        if self.loss.is_needed:
            self.loss.note(status)

    # On the compute thread

    @torch.no_grad()
    def _copy_weights(self) -> WeightCopy:
        bucket = bucket_of(self._training.trained)
        return WeightCopy(bucket, bucket.flat.clone() if self._delay else None)

    def _compute_gradients(self, step: TrainingStep, profile: StepProfile) -> None:
        self._training.compute(step, profile)
        step.is_finite = gradients_are_finite(step.gradients)
        if not step.is_finite:
            step.skipped_by = (self._algorithm.place.rank,)

    def _apply_late(self, exchange: ParameterExchange, profile: Profile | StepProfile) -> None:
        self.ended_exchanges += 1
        if not exchange.apply(self._training.trained):
            self._restart()

    def _take_back(self, exchange: ParameterExchange) -> None:
        self.skipped_exchanges += 1
        self._log.warning("exchange skipped: NaN or infinity", step=exchange.step.number + 1)
        exchange.take_back(self._training.trained)
        self._restart()

    def _restart(self) -> None:
        live = self._training.trained
        if are_finite([one.detach() for one in live.values()]):
            return
        if restart(live, self._algorithm.weights_of_joiner):  # else no exchange would count any more
            self._log.warning("weights are not finite: back to those of the last exchange")
