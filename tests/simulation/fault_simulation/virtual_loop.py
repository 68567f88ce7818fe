"""An event loop whose time is virtual, and which never sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol, cast

from fault_simulation.kernel import CLOCK, Killed, VirtualProcess, now_s, process_of

STEP_S = 1e-6  # the cost of one callback: no two run at the same time, and code that polls the clock comes to an end
MAX_READY = 200_000  # callbacks in a row without a timer


class Deadlock(Exception):
    """Nothing is ready, nothing is scheduled, and an actor still waits."""


class Livelock(Exception):
    """Callbacks schedule callbacks without end, and time stands still."""


class Handle:
    """A callback that can be cancelled."""

    __slots__ = ("arguments", "context", "function", "when_s")

    def __init__(
        self, function: Callable[..., object], arguments: tuple[Any, ...], context: contextvars.Context, when_s: float
    ) -> None:
        self.function: Callable[..., object] | None = function
        self.arguments = arguments
        self.context = context
        self.when_s = when_s

    def cancel(self) -> None:
        """Do not call it."""
        self.function = None

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self.function is None

    def when(self) -> float:
        """Return the time for which it is scheduled."""
        return self.when_s


class _NumberedFuture(asyncio.Future[Any]):
    """Its hash is a number, not an address: sets of futures have the same order in each process."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class _NumberedTask(asyncio.Task[Any]):
    """As :class:`_NumberedFuture`: a TaskGroup keeps a set of its tasks, and cancels them in that order."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class Observer(Protocol):
    """What a loop reports to the world that it runs."""

    def before_step(self, steps: int) -> None:
        """So many callbacks have run; faults may be injected now."""

    def on_loop_error(self, context: dict[str, Any]) -> None:
        """See :meth:`asyncio.loop.call_exception_handler`."""


class VirtualLoop:
    """Runs the callbacks of all virtual processes, one at a time. Nothing of a dead process runs.

    It has what asyncio and the code under test call of :class:`asyncio.AbstractEventLoop`, and no ``_ready``: so no
    consumer of a bus polls DDS on it.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.for_asyncio: asyncio.AbstractEventLoop = cast(Any, self)
        self._ready_calls: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._timer_numbers, self._numbers = itertools.count(), itertools.count(1)
        self._closed = False
        self.steps = 0

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._closed

    def time(self) -> float:
        return now_s()

    def create_future(self) -> asyncio.Future[Any]:
        future = _NumberedFuture(loop=self.for_asyncio)
        future.number = next(self._numbers)
        return future

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: object = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task = _NumberedTask(coro, loop=self.for_asyncio, name=str(name or "task"), context=context)
        task.number = next(self._numbers)
        process = process_of(contextvars.copy_context() if context is None else context)
        if process is not None:
            process.tasks.append(task)
        return task

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        context = contextvars.copy_context() if context is None else context
        handle = Handle(callback, args, context, CLOCK.now_s or 0.0)
        self._ready_calls.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        handle = Handle(callback, args, contextvars.copy_context() if context is None else context, when)
        heapq.heappush(self._timers, (when, next(self._timer_numbers), handle))
        return handle

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        return self.call_at(now_s() + delay, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        from fault_simulation.drivers import VirtualExecutor  # which imports gradbus

        pool = VirtualExecutor() if executor is None else executor
        return asyncio.wrap_future(pool.submit(func, *args), loop=self.for_asyncio)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._observer.on_loop_error(context)

    def resume(self, process: VirtualProcess) -> None:
        """Run what a process was to run while it was paused."""
        self._ready_calls.extend(process.parked)
        process.parked.clear()

    def run_until(self, is_over: Callable[[], bool], until_s: float) -> bool:
        """Run until ``is_over()``, or until that time. Returns whether it is over.

        Raises:
            Deadlock, Livelock.
        """
        with self.running():
            while not is_over():
                handle = self._next(until_s)
                if handle is None:
                    return False
                self._run(handle)
            return True

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Be the running loop of this thread meanwhile."""
        set_running = events._set_running_loop  # noqa: SLF001 - what asyncio has for loops
        set_running(self.for_asyncio)
        try:
            yield
        finally:
            set_running(None)

    _in_a_row = 0

    def _next(self, until_s: float) -> Handle | None:
        """Return the next callback, and move the clock to its time; None: it is later than ``until_s``."""
        ready, timers = self._ready_calls, self._timers
        if ready:
            self._in_a_row += 1
            if self._in_a_row > MAX_READY:
                raise Livelock(f"{MAX_READY} callbacks without a timer")
            if timers and timers[0][0] <= now_s():
                ready.append(heapq.heappop(timers)[2])
            return ready.popleft()
        self._in_a_row = 0
        while timers and timers[0][2].function is None:
            heapq.heappop(timers)
        if not timers:
            raise Deadlock("nothing is scheduled")
        if timers[0][0] > until_s:
            return None
        when, _, handle = heapq.heappop(timers)
        CLOCK.now_s = max(now_s(), when)
        return handle

    def _run(self, handle: Handle) -> None:
        if handle.function is None or not self._may_run(handle):
            return
        CLOCK.now_s = now_s() + STEP_S
        self.steps += 1
        self._observer.before_step(self.steps)
        if handle.function is None or not self._may_run(handle):  # a fault has just cancelled it, or hit its process
            return
        try:
            handle.context.run(handle.function, *handle.arguments)
        except Killed:
            pass
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.call_exception_handler({"message": f"callback {handle.function} failed", "exception": error})

    @staticmethod
    def _may_run(handle: Handle) -> bool:
        process = process_of(handle.context)
        if process is None:
            return True
        if process.paused and not process.dead:
            process.parked.append(handle)
            return False
        return not process.dead

    def shut(self) -> None:
        """Drop all callbacks: the run is over."""
        self._closed = True
        self._ready_calls.clear()
        self._timers.clear()
