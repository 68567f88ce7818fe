"""The awaitable handle of a running collective, its deadline, and the wait of an event loop's thread for it."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator
from typing import Any, Generic, NamedTuple, TypeVar

from gradbus.runtime.bus.handover import TURN_S
from gradbus.runtime.collectives.engine import Engine
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.errors import BusClosed, CollectiveTimeout
from gradbus.runtime.spinning import PollHistory

POLLED_BYTES = 64 * 1024  # sent by a collective that is polled for
_FEW = 64

T = TypeVar("T")

TimedOut = Callable[[Operation, float], Exception]


def collective_timeout(operation: Operation, timeout_s: float) -> Exception:
    """The error at the deadline."""
    return CollectiveTimeout(operation.key.name, operation.missing, timeout_s)


class DeadlineTimer:
    """Ends collectives at their deadlines, on the event loop. One for all of a group: most are over long before, so
    they cost an entry in a list and no timer. Calls on other threads do not wake the loop while a timer is set that
    comes no later than their deadline: to wake it takes as long as the rest of the call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_pending: Callable[[], None]) -> None:
        """``on_pending``: called when a collective that was started on the loop has not ended in its next turn, and
        perhaps for those of other threads."""
        self._loop = loop
        self._on_pending = on_pending
        self._new: list[_Deadline] = []
        self._is_called = False
        self._lock = threading.Lock()
        self._running: list[_Deadline] = []  # a heap
        self._forget_at = _FEW
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf  # when the timer comes; infinity: there is none

    def watch(self, operation: Operation, timeout_s: float, timed_out: TimedOut, *, on_loop: bool) -> None:
        """End a collective with an error after ``timeout_s``. ``on_loop``: this is the thread of the event loop."""
        at_s = time.monotonic() + timeout_s
        with self._lock:
            self._new.append(_Deadline(at_s, id(operation), weakref.ref(operation), timeout_s, timed_out))
            can_wait = not on_loop and self._timer_s <= at_s and len(self._new) < _FEW and not self._loop.is_closed()
            if self._is_called or can_wait:
                return
            self._is_called = True
        try:
            (self._loop.call_soon if on_loop else self._loop.call_soon_threadsafe)(self._look)
        except RuntimeError:  # the loop is closed, and nothing would watch the deadline
            with self._lock:
                new, self._new, self._is_called = self._new, [], False
            for one in new:
                unwatched = one.operation()
                if unwatched is not None:
                    unwatched.fail(BusClosed("the event loop of the group is closed"))

    def _look(self) -> None:
        with self._lock:
            new, self._new, self._is_called = self._new, [], False
        pending = [one for one in new if one.is_pending]
        if pending:
            self._on_pending()
        for one in pending:
            heapq.heappush(self._running, one)
        now_s = time.monotonic()
        while self._running and (self._running[0].at_s <= now_s or not self._running[0].is_pending):
            heapq.heappop(self._running).expire()
        if len(self._running) > self._forget_at:
            self._running = [one for one in self._running if one.is_pending]
            heapq.heapify(self._running)
            self._forget_at = max(_FEW, 2 * len(self._running))
        self._set_timer(now_s)

    def _set_timer(self, now_s: float) -> None:
        """One timer, for the next deadline. It may come too early."""
        if not self._running:
            return
        at_s = self._running[0].at_s
        if self._timer is not None:
            if self._timer_s <= at_s:
                return
            self._timer.cancel()
        self._timer_s = at_s
        self._timer = self._loop.call_later(max(0.0, at_s - now_s), self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_s = None, math.inf  # first: it may be early by a little, and is needed again then
        self._look()


class _Deadline(NamedTuple):
    at_s: float
    number: int  # two of one time are in some order
    operation: weakref.ref[Operation]  # it may hold much
    timeout_s: float
    timed_out: TimedOut

    @property
    def is_pending(self) -> bool:
        operation = self.operation()
        return operation is not None and not operation.done

    def expire(self) -> None:
        operation = self.operation()
        if operation is not None and not operation.done:
            operation.fail(self.timed_out(operation, self.timeout_s))


class CollectiveWait:
    """The wait of an event loop's thread for a small collective: it polls for a moment before it sleeps in the loop, as
    to be woken there takes longer than the collective."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._thread = threading.get_ident()
        self._history = PollHistory()
        self._turn_s = 0.0
        self._waits_for_turn = False

    @property
    def is_here(self) -> bool:
        """Whether this is the thread of the event loop."""
        return threading.get_ident() == self._thread

    def poll(self, operation: Operation) -> None:
        """Poll for the end of a collective. Afterwards it has ended, or the threads of the bus handle its frames."""
        engine = self._engine
        if engine.pending > 1 or not operation.is_sent or operation.traffic.sent_bytes > POLLED_BYTES:
            engine.progress.wake_io_thread()
            return
        if self._history.next_polls():
            engine.progress.poll_briefly(lambda: operation.settled)
            self._history.note_poll(found=operation.settled)
            if operation.settled and not engine.pending:
                return
        engine.progress.wake_io_thread()  # also for what other threads have started in this group

    @property
    def loop_is_due(self) -> bool:
        """Whether the event loop had no turn for ``TURN_S``, as all that was awaited was there at once."""
        now_s = time.monotonic()
        if not self._waits_for_turn:
            self._waits_for_turn = True
            self._turn_s = now_s
            self._loop.call_soon(self._on_turn)
        return now_s > self._turn_s + TURN_S

    def _on_turn(self) -> None:
        self._waits_for_turn = False


class CollectiveHandle(Generic[T]):
    """A running collective. ``await`` gives its value, as often as asked.

    It runs whether awaited or not, and ends at its deadline. When it has ended, with or without an error, its buffers
    are the caller's again. To cancel it, or the task that awaits it, ends it on this rank; on the others it ends at
    their deadline. A handle that is dropped while it runs, and was neither awaited nor asked for its end, warns: its
    errors would be lost.

    Raises (on await):
        CollectiveTimeout: some ranks stayed silent; ``.missing`` names them.
        PeerLost: ranks have died or left; ``.ranks``.
        CollectiveError: the ranks do not call the same, or a bound was passed.
        BusClosed: group or bus were closed.
        asyncio.CancelledError: it was cancelled.
    """

    def __init__(self, operation: Operation, loop: asyncio.AbstractEventLoop, wait: CollectiveWait) -> None:
        self._operation = operation
        self._loop = loop
        self._wait = wait
        self._future: asyncio.Future[T] | None = None
        self._is_used = False

    def __del__(self) -> None:
        if not self._is_used and not self._operation.done:
            name = self._operation.key.name
            warnings.warn(
                f"collective {name!r} was started and its handle dropped, so its errors are lost. "
                "Write 'await' before the call, or keep what it returns and await that",
                RuntimeWarning,
                stacklevel=2,
            )

    def __await__(self) -> Generator[Any, None, T]:
        self._is_used = True
        operation = self._operation
        if self._future is None and self._wait.is_here:
            if not operation.settled:
                self._wait.poll(operation)
            if operation.settled and operation.error is None:
                if self._wait.loop_is_due:
                    yield
                value: T = operation.value
                return value
        if self._future is None:
            self._future = self._loop.create_future()
            self._future.add_done_callback(self._on_done)
            operation.when_settled(self._on_settled)
        return (yield from self._future.__await__())

    def _on_settled(self, operation: Operation) -> None:
        """On whatever thread ended it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits any more
            self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        future, error = self._future, self._operation.error
        if future is None or future.done():
            return
        if error is None:
            future.set_result(self._operation.value)
        elif isinstance(error, asyncio.CancelledError):
            future.cancel()
        else:
            future.set_exception(error)
            future.exception()  # retrieved: a handle that is not awaited any more is no reason for a warning

    def _on_done(self, future: asyncio.Future[T]) -> None:
        if future.cancelled():
            self._operation.fail(asyncio.CancelledError())

    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        self._is_used = True
        return self._operation.done

    def cancel(self) -> None:
        """End it on this rank. Its buffers are free when this returns."""
        self._is_used = True
        self._operation.fail(asyncio.CancelledError())

    @property
    def name(self) -> str:
        """The name it was called with."""
        return self._operation.key.name

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of which something is still outstanding; after a failure, that of its moment."""
        return self._operation.missing

    @property
    def started_s(self) -> float:
        """``time.perf_counter`` at the call."""
        return self._operation.started_s

    @property
    def finished_s(self) -> float | None:
        """``time.perf_counter`` at the end, None before."""
        return self._operation.finished_s

    @property
    def sent_bytes(self) -> int:
        """Payload sent so far. What goes to all ranks counts once."""
        return self._operation.traffic.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Payload received from the others so far."""
        return self._operation.traffic.received_bytes
