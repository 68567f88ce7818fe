"""Steps whose exchange goes on while the next ones are computed.

With ``delay_steps`` of 1 there are three stages: while step t is computed, the gradients of step t - 1 are exchanged;
then these change the model, and those of step t go on their way. The gradients of step t were computed with weights
that lack step t - 1: they are as many steps old as the delay. All ranks apply the same steps in the same order, so
their models stay equal.

The exchanges of two steps never overlap: what an algorithm remembers of one is what the next one starts from.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from gradbus.actors.data_parallel.epoch_plan import EpochPlan
from gradbus.actors.data_parallel.state import Position
from gradbus.actors.data_parallel.step import TrainingStep
from gradbus.actors.data_parallel.stepping import GradientExchange, Stepper, StepperParts
from gradbus.runtime.collectives.programs import ProgramRuns
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.profiling.profile import Profile, StepProfile


class LateExchange(Protocol):
    """An exchange of a step that runs in the background."""

    @property
    def step(self) -> TrainingStep:
        """Return the step it is of."""

    @property
    def programs(self) -> ProgramRuns:
        """Return its programs."""

    def start(self) -> bool:
        """Start the programs. Returns whether they go on. On the thread in the background, as :meth:`resume`."""

    def resume(self, results: Sequence[Any]) -> bool:
        """Go on to the next phase. Returns whether there is one. ``results``: of the handles of ``programs``."""


E = TypeVar("E", bound=LateExchange)


class LateStepper(Stepper, Generic[E]):
    """Has exchanges run in the background, one after the other, and applies them in this order."""

    def __init__(self, parts: StepperParts, position: Position) -> None:
        super().__init__(parts, position)
        self._delay = parts.training.delay_steps
        # Programs that run while gradients are computed: the compute thread is busy then.
        self._background = ComputeThread("exchange")
        self._queue: deque[tuple[E, asyncio.Task[None]]] = deque()
        self._newest_task: asyncio.Task[None] | None = None

    async def drain(self) -> list[TrainingStep]:
        return await self._apply_before(None, self._profile)

    async def close(self) -> None:
        tasks = [task for _, task in self._queue if not task.done()]
        for task in tasks:
            task.cancel()
        await super().close()
        self._background.close()
        if tasks:
            await asyncio.wait(tasks)
        for _, task in self._queue:
            if not task.cancelled():
                task.exception()  # it has been raised by what waited for it
        self._queue.clear()

    def _launch(self, exchange: E) -> asyncio.Task[None]:
        """Run the programs of a step in the background, after those of the step before."""
        task = asyncio.get_running_loop().create_task(
            self._run(exchange, self._newest_task), name=f"exchange of step {exchange.step.number}"
        )
        self._newest_task = task
        self._queue.append((exchange, task))
        return task

    async def _run(self, exchange: E, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        goes_on = await self._background.run(exchange.start)
        while goes_on:
            results = [await handle for handle in exchange.programs.handles]
            goes_on = await self._background.run(exchange.resume, results)

    async def _apply_before(self, number: int | None, profile: Profile | StepProfile) -> list[TrainingStep]:
        """Apply the exchanges of the steps before this one, oldest first; None: all. Returns these steps."""
        applied = []
        while self._queue and (number is None or self._queue[0][0].step.number < number):
            exchange, task = self._queue[0]
            started_s = time.perf_counter()
            await self._result_of(exchange, task)
            self._queue.popleft()
            self._arrived(exchange, task, profile, waited_since_s=started_s)
            await self._compute.run(self._apply_late, exchange, profile)
            applied.append(exchange.step)
        if not self._queue:
            self._newest_task = None
        return applied

    async def _result_of(self, exchange: E, task: asyncio.Task[None]) -> None:
        """Wait until an exchange can be applied."""
        await task

    def _arrived(
        self, exchange: E, task: asyncio.Task[None], profile: Profile | StepProfile, *, waited_since_s: float
    ) -> None:
        """An exchange can be applied."""
        self._waited(waited_since_s, time.perf_counter(), profile)
        self._ended(exchange.programs)

    @abstractmethod
    def _apply_late(self, exchange: E, profile: Profile | StepProfile) -> None:
        """Apply an exchange that has run in the background. On the compute thread."""


class LateGradientStepper(LateStepper[GradientExchange]):
    """Steps whose gradients are applied some steps later."""

    async def step(self, plan: EpochPlan, position: Position, profile: StepProfile) -> list[TrainingStep]:
        step = self._training.new_step(plan, position)
        exchange = GradientExchange(step, self._open_exchange(step.number), self._algorithm, self.loss)
        late = [before.step.own for before, _ in self._queue if before.step.own is not None]
        await self._compute.run(self._training.compute, step, profile, late=late)
        self._on_sent(step.number + 1)
        self._launch(exchange)
        return await self._apply_before(step.number + 1 - self._delay, profile)

    def _apply_late(self, exchange: GradientExchange, profile: Profile | StepProfile) -> None:
        self._training.apply(exchange.step, profile)
