"""What a collective gives back at once: something to await."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.errors import BusClosed, CollectiveTimeout

T = TypeVar("T")

TimedOut = Callable[[Operation, float], Exception]


def collective_timeout(operation: Operation, timeout_s: float) -> Exception:
    """The error at the deadline."""
    return CollectiveTimeout(operation.key.name, operation.missing, timeout_s)


class _Running(Generic[T]):
    """A collective until it has ended, whether its handle is still there or not: its clock, and what comes of it."""

    __slots__ = ("_loop", "_operation", "_timed_out", "_timeout_s", "_timer", "future")

    def __init__(
        self, operation: Operation, loop: asyncio.AbstractEventLoop, timeout_s: float, timed_out: TimedOut
    ) -> None:
        self._operation = operation
        self._loop = loop
        self._timeout_s = timeout_s
        self._timed_out = timed_out
        self._timer: asyncio.TimerHandle | None = None
        self.future: asyncio.Future[T] = loop.create_future()
        operation.on_end.append(self._ended)

    def arm(self, on_loop: bool) -> None:
        """Start the clock. ``on_loop``: this is the thread of the event loop."""
        if on_loop:
            self._arm()
            return
        try:
            self._loop.call_soon_threadsafe(self._arm)
        except RuntimeError:  # the loop is closed, and nobody would watch the deadline
            self._operation.fail(BusClosed("the event loop of the group is closed"))

    def _arm(self) -> None:
        self.future.add_done_callback(self._settled)
        if not self._operation.done:
            self._timer = self._loop.call_later(self._timeout_s, self._expire)
        else:
            self._resolve()

    def _expire(self) -> None:
        self._operation.fail(self._timed_out(self._operation, self._timeout_s))

    def _ended(self, operation: Operation) -> None:
        """On whatever thread ended it."""
        try:
            self._loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    def _resolve(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.future.done():
            return
        error = self._operation.error
        if error is None:
            self.future.set_result(self._operation.value)
        elif isinstance(error, asyncio.CancelledError):
            self.future.cancel()
        else:
            self.future.set_exception(error)
            self.future.exception()  # seen: a handle that nobody awaits any more is no reason for a warning

    def _settled(self, future: asyncio.Future[T]) -> None:
        if future.cancelled():
            self._operation.fail(asyncio.CancelledError())


class Handle(Generic[T]):
    """A collective that is running. ``await`` gives its value, as often as asked.

    It runs whether awaited or not, and ends at its deadline. When it has ended, well or with an error, its buffers are
    the caller's again. To cancel it, or the task that awaits it, ends it on this rank; the others find out at their
    deadline. A handle that is dropped while it runs, and was neither awaited nor asked for its end, warns: its errors
    would be lost.

    Raises (on await):
        CollectiveTimeout: some ranks stayed silent; ``.missing`` names them.
        PeerLost: ranks have died or left; ``.ranks``.
        CollectiveError: the ranks do not call the same, or a bound was passed.
        BusClosed: group or bus were closed.
        asyncio.CancelledError: it was cancelled.
    """

    def __init__(
        self, operation: Operation, loop: asyncio.AbstractEventLoop, timeout_s: float,
        timed_out: TimedOut = collective_timeout,
    ) -> None:  # fmt: skip
        self._operation = operation
        self._running: _Running[T] = _Running(operation, loop, timeout_s, timed_out)
        self._is_used = True  # until it runs: a call that was refused has nobody to wait for it

    def arm(self, on_loop: bool) -> None:
        """Start the clock. ``on_loop``: this is the thread of the event loop."""
        self._is_used = False
        self._running.arm(on_loop)

    def __del__(self) -> None:
        if not self._is_used and not self._operation.done:
            name = self._operation.key.name
            warnings.warn(
                f"collective {name!r} was started and its handle dropped: whether it ends well, nobody will know. "
                "Write 'await' before the call, or keep what it returns and await that",
                RuntimeWarning,
                stacklevel=2,
            )

    def __await__(self) -> Generator[Any, None, T]:
        self._is_used = True
        return self._running.future.__await__()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
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
        """Ranks that something is still owed by; after a failure, that were owing then."""
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
        """Payload handed to DDS so far. What goes to all ranks counts once."""
        return self._operation.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Payload taken from the others so far."""
        return self._operation.received_bytes
