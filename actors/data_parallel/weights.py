"""Steps of an algorithm that exchanges weights: each rank's optimizer takes its own gradients.

Three orders, by what the algorithm declares and by the delay:

- it ``overlaps``: the weights that the gradients are computed with are exchanged meanwhile, replaced by the result, and
  then the optimizer steps;
- it does not: the optimizer steps, then the weights are exchanged, and replaced;
- with a delay the weights are copied after the optimizer's step, exchanged while the next steps are computed, and the
  algorithm says what the weights of then become by the result: live += result - copy, where it says nothing else.

Without a delay all ranks agree, in a step with an exchange, that the gradients and weights of all are finite, and else
skip it together. In a step without one, and with a delay, a rank skips its own step alone. The result of an exchange
that is not finite on some rank is dropped by all: a step of finite gradients may overflow. The rank whose own weights
are not finite then goes on from those of the last exchange, where the algorithm has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradbus.actors.data_parallel.exchange import StepExchange
from gradbus.actors.data_parallel.state import Position
from gradbus.actors.data_parallel.stepping import Stepper, summed
from gradbus.actors.data_parallel.training import EpochPlan, TrainingStep
from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms.base import bucket_of, views_of
from gradbus.runtime.algorithms.requests import Program
from gradbus.runtime.logs import get_logger
from gradbus.runtime.profiling.profile import Profile, StepProfile


class WeightStepper(Stepper):
    """Steps whose weights are exchanged, in some of them or in all."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As a :class:`Stepper`."""
        super().__init__(*args, **options)
        self._log = get_logger("worker", rank=self._algorithm.place.rank)

    async def step(self, plan: EpochPlan, position: Position, profile: StepProfile) -> list[TrainingStep]:
        training, run = self._training, self._compute.run
        step = training.new_step(plan, position)
        # With a delay the loss before may be known on one rank already, and on another not yet.
        is_due = self._algorithm.is_due(self._step_of(step, with_loss=not self._delay))
        is_early = is_due and self._algorithm.overlaps and not self._delay
        if is_due:
            self._opened(step.exchange)
        if is_early:
            # Without this step's own loss, which may be there when its program starts.
            step.as_begun = self._step_of(step)
            await run(self._copy_weights, step)
            self._launch(step)
        if self._delay or not is_due:
            await run(self._step_alone, step, profile)
            self._on_sent(step)
            await self._apply_before(step.number + 1 - self._delay, profile)
            if is_due:
                await run(self._copy_weights, step)
                self._launch(step)
            return [step]
        agreement = training.new_exchange(step.number) if is_early else step.exchange
        if is_early:
            self._opened(agreement)
        await run(self._step_together, step, agreement, profile)
        self._on_sent(step)
        goes_on = True
        while goes_on:
            results = [await handle for handle in agreement.handles]
            goes_on = await run(self._resume, agreement, results, profile)
        for start_s, end_s in agreement.waits:
            self._waited(start_s, end_s, profile)
        self._ended(agreement, profile)
        await self._apply_before(None, profile)
        return [step]

    async def drain(self) -> list[TrainingStep]:
        """As above; the steps were made, and returned, when their gradients were there: none is left."""
        await super().drain()
        return []

    # On the compute thread

    @torch.no_grad()
    def _copy_weights(self, step: TrainingStep) -> None:
        step.weights = bucket_of(self._training.trained)
        step.before = step.weights.flat.clone() if self._delay else None

    @torch.no_grad()
    def _replace_weights(self, step: TrainingStep) -> None:
        assert step.weights is not None
        for name, parameter in self._training.trained.items():
            parameter.copy_(step.weights.tensors[name])

    def _compute_gradients(self, step: TrainingStep, profile: StepProfile) -> None:
        self._training.compute(step, profile, lambda bucket: None, overlaps=False)
        step.is_finite = self._training.gradients_are_finite(step)

    def _step_alone(self, step: TrainingStep, profile: StepProfile) -> None:
        self._compute_gradients(step, profile)
        if not step.is_finite:
            step.skipped_by = (self._algorithm.place.rank,)
        self._training.apply(step, profile)

    def _step_together(self, step: TrainingStep, agreement: StepExchange, profile: StepProfile) -> None:
        self._compute_gradients(step, profile)
        step.is_finite = step.is_finite and self._training.weights_are_finite()
        self._take_status(step)
        agreement.start("status", self._agree(step) if self._algorithm.overlaps else self._all_of(step, profile))
        agreement.all_sent()

    def _agree(self, step: TrainingStep) -> Program[None]:
        assert step.status is not None
        yield from summed(step.status)
        if step.status[0]:
            step.skipped_by = ()
        else:
            self._note_loss(step)

    def _all_of(self, step: TrainingStep, profile: StepProfile) -> Program[None]:
        """Agree, step, exchange."""
        yield from self._agree(step)
        self._training.apply(step, profile)
        if step.skipped_by is not None:
            self._restart()
            return
        self._copy_weights(step)
        yield from self._exchange(step)
        self._end_exchange(step)

    def _exchange(self, step: TrainingStep) -> Program[None]:
        """Exchange, then agree whether the result is finite everywhere; else the step has no weights afterwards."""
        assert step.weights is not None
        yield from self._program(step, step.weights)
        not_finite = torch.tensor([float(not are_finite([step.weights.flat]))])
        yield from summed(not_finite, "result")
        if not_finite[0]:
            step.weights = None

    def _end_exchange(self, step: TrainingStep) -> None:
        """Without a delay: apply the result, or drop it."""
        if step.weights is None:
            self._algorithm.roll_back()
            self._note_dropped(step)
        else:
            self._replace_weights(step)
            self._algorithm.commit()

    def _note_dropped(self, step: TrainingStep) -> None:
        self.skipped_exchanges += 1
        self._log.warning("exchange skipped: NaN or infinity", step=step.number + 1)
        self._restart()

    @torch.no_grad()
    def _restart(self) -> None:
        """Go on from the weights of the last exchange if the own ones are not finite: else no exchange would count any
        more."""
        if self._training.weights_are_finite():
            return
        begun = self._algorithm.weights_of_joiner(bucket_of(self._training.trained).flat)
        if are_finite([begun]):
            self._log.warning("weights are not finite: back to those of the last exchange")
            for name, tensor in views_of(begun, self._training.trained).items():
                self._training.trained[name].copy_(tensor)

    def _resume(self, exchange: StepExchange, results: Sequence[Any], profile: StepProfile) -> bool:
        with profile.span("decode"):
            exchange.resume(results)
        return exchange.goes_on

    @torch.no_grad()
    def _apply_late(self, step: TrainingStep, profile: Profile | StepProfile) -> None:
        if not self._delay:
            if step.skipped_by is None:
                self._end_exchange(step)
            else:
                self._algorithm.roll_back()
                self._restart()
            self._training.apply(step, profile)
        elif step.weights is None:
            self._note_dropped(step)
        else:
            assert step.before is not None
            live = bucket_of(self._training.trained).flat
            made = self._algorithm.applied_late(self._step_of(step), live, step.before, step.weights.flat)
            for name, tensor in views_of(made, self._training.trained).items():
                self._training.trained[name].copy_(tensor)
        step.weights = step.before = None

    # In the background

    def _start_late(self, step: TrainingStep) -> bool:
        step.exchange.start("weights", self._late(step) if self._delay else self._exchange(step))
        step.exchange.all_sent()
        return step.exchange.goes_on or self._conclude(step)

    def _late(self, step: TrainingStep) -> Program[None]:
        """Exchange, then agree whether the result is finite everywhere: what two ranks send each other tells no third.
        Nobody waits for it, as the next step is computed meanwhile."""
        assert step.weights is not None
        yield from self._program(step, step.weights)
        status = self._take_status(step)
        status[0] = float(not are_finite([step.weights.flat]))
        yield from summed(status)

    def _conclude(self, step: TrainingStep) -> bool:
        if not self._delay or step.status is None:
            return False  # the ranks have not agreed yet; or the exchange was cancelled before it began
        self._note_loss(step)
        if step.status[0]:
            self._algorithm.roll_back()
            step.weights = None
        else:
            self._algorithm.commit()
        return False
