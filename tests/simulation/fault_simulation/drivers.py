"""The drive of a bus in virtual time: steps, executors and deferred functions as timers of the virtual loop.

They stand in for the threads of :mod:`gradbus.runtime.drive`. What runs on a thread there runs between two callbacks
here, at a cost in virtual time that the seed decides.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar, cast

from fault_simulation.kernel import Killed, now_s, running
from gradbus.runtime.bus.wait_loop import WaitLoop
from gradbus.runtime.drive import SteppedWork

T = TypeVar("T")
WAKE_S = (1e-5, 1e-4)  # from the moment a step is due until a thread does it
DEFERRED_S = (1e-4, 5e-3)
ACKNOWLEDGED_S = 2e-3  # from the arrival of a sample until its writer knows
EARLY_SHARE = 0.05  # of a computation's cost: its effect comes after so much of it, or at its end


class StepDriver:
    """Calls the steps of a worker when they are due."""

    ident: int | None = None

    def __init__(self, worker: SteppedWork, run: Callable[[], object], name: str) -> None:
        self._worker = worker
        self._world = running().world
        self._timer: Any = None
        self._soon = self._over = False

    def start(self) -> None:
        """Call the first step soon."""
        self._context = contextvars.copy_context()
        if isinstance(self._worker, WaitLoop):
            cast(Any, self._worker.waiter).on_news = self.step_due
        self.step_due()

    def step_due(self) -> None:
        """Call a step soon, if none is scheduled so soon."""
        if not self._soon and not self._over:
            self._soon = True
            if self._timer is not None:
                self._timer.cancel()
            wait_s = self._world.rng.uniform(*WAKE_S)
            self._timer = self._world.loop.call_later(wait_s, self._step, context=self._context)

    def _step(self) -> None:
        self._soon, self._timer = False, None
        if self._over:
            return
        if self._worker.stopping:
            self._finish()
            return
        if isinstance(self._worker, WaitLoop) and (late_s := running().slow_until_s - now_s()) > 0.0:
            self._timer = self._world.loop.call_later(late_s, self._step, context=self._context)
            return
        try:
            due_in_s = self._worker.step() + running().take_blocked_s()
        except Exception as error:
            self._worker.fail(error)
            self._finish()
            return
        if due_in_s <= 0.0:
            self.step_due()
        elif not self._soon and due_in_s != float("inf"):
            self._timer = self._world.loop.call_later(due_in_s, self._step, context=self._context)

    def _finish(self) -> None:
        if not self._over:
            self._over = True
            self._worker.drop_rest()

    def join(self, timeout_s: float) -> None:
        """Finish at once: nothing else runs meanwhile."""
        self._finish()

    def is_alive(self) -> bool:
        """Return whether it has not finished."""
        return not self._over


class DeferredCall:
    """Calls a function once, a moment later, or when somebody waits for it."""

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self._function = function
        self._called = False
        world = running().world
        world.loop.call_later(world.rng.uniform(*DEFERRED_S), self.join)

    def join(self, timeout_s: float | None = None) -> None:
        """Call the function now, if it was not called."""
        if not self._called:
            self._called = True
            self._function()

    def is_running(self) -> bool:
        """Return whether it was not called."""
        return not self._called


class VirtualExecutor(Executor):
    """Computes one function after the other. The effect comes early in its time or at its end, as the seed says: a
    process that is killed in between, or a caller that is cancelled, finds it done or not."""

    def __init__(self) -> None:
        self._world = running().world
        self._waiting: deque[tuple[Future[Any], partial[Any], contextvars.Context]] = deque()
        self._busy = self._closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See :meth:`concurrent.futures.Executor.submit`."""
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[T] = Future()
        running()  # each computation belongs to a process
        self._waiting.append((future, partial(fn, *args, **kwargs), contextvars.copy_context()))
        if not self._busy:
            self._begin_next()
        return future

    def _begin_next(self) -> None:
        self._busy = bool(self._waiting)
        if self._waiting:
            future, call, context = self._waiting.popleft()
            cost_s = self._world.compute_cost_s(call.func)
            self._world.loop.call_later(EARLY_SHARE * cost_s, self._claim, future, call, cost_s, context=context)

    def _claim(self, future: Future[Any], call: Callable[[], Any], cost_s: float) -> None:
        if not future.set_running_or_notify_cancel():
            self._begin_next()
            return
        rest_s = (1 - EARLY_SHARE) * cost_s
        if self._world.rng.random() < 0.3:
            self._world.loop.call_later(rest_s, self._end, future, *self._outcome(call))
        else:
            self._world.loop.call_later(rest_s, self._compute_and_end, future, call)

    def _compute_and_end(self, future: Future[Any], call: Callable[[], Any]) -> None:
        self._end(future, *self._outcome(call))

    @staticmethod
    def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        try:
            return call(), None
        except Killed:
            raise
        except BaseException as error:
            return None, error

    def _end(self, future: Future[Any], value: Any, error: BaseException | None) -> None:
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
        self._begin_next()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more functions; ``cancel_futures``: and drop those that wait."""
        self._closed = True
        if cancel_futures:
            for future, *_ in self._waiting:
                future.cancel()
                future.set_running_or_notify_cancel()
            self._waiting.clear()


async def drain_topic(bus: Any, kind: type[Any], timeout_s: float) -> bool:
    """Stand in for ``Bus.drain``."""
    writer = bus._writers.get(kind)  # noqa: SLF001 - what the shipped method asks
    return writer is None or await _drained([writer], timeout_s)


async def drain_endpoints(port: Any, timeout_s: float) -> bool:
    """Stand in for ``RawEndpoints.drain``."""
    return await _drained(port._writers, timeout_s)  # noqa: SLF001 - likewise


async def _drained(writers: Collection[Any], timeout_s: float) -> bool:
    until_s = now_s() + timeout_s
    while not all(writer.is_acknowledged for writer in writers):
        if now_s() >= until_s:
            return False
        await asyncio.sleep(ACKNOWLEDGED_S)
    return True


def virtual_executor(name: str) -> VirtualExecutor:
    """Stand in for :func:`gradbus.runtime.drive.executor`."""
    return VirtualExecutor()
