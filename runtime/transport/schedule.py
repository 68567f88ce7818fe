"""When a transport that keeps its own time does something: at points of time, on one thread at a time.

:class:`ThreadSchedule` does so in real time, on a thread of its own. A simulation has a schedule in virtual time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gradbus.runtime import forks
from gradbus.runtime.errors import BusError

Call = tuple[float, int, Callable[..., object], tuple[Any, ...]]


class NetworkSchedule(Protocol):
    """Calls functions of a transport at their time."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Return what is held by whoever looks at the transport or changes it; the functions are called with it."""

    def now_s(self) -> float:
        """Return the time."""

    def at(self, when_s: float, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function at that time. Those of the same time are called in the order of these calls."""

    def wait(self, node: Any, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Let the caller, a thread of ``node`` that holds the lock, wait until ``is_over()``, for so long at most. The
        lock is free meanwhile. Returns ``is_over()``. Raises BusError: as :meth:`check`."""

    def check(self) -> None:
        """Raise BusError if the transport has failed: then nothing arrives any more. The caller holds the lock."""

    def notify(self) -> None:
        """Have those that wait look again. The caller holds the lock."""

    def close(self) -> None:
        """Call nothing more."""


class ThreadSchedule:
    """Does so in real time. Its thread starts with the first call, and ends with :meth:`close`, or when a function
    raises: then all waits and writes fail."""

    def __init__(self, what: str, *, thread_name: str) -> None:
        """``what``: has this schedule, in words for errors."""
        self._what = what
        self._thread_name = thread_name
        lock = threading.RLock()
        self.lock = threading.Condition(lock)  # of those that wait for what happens
        self._clock = threading.Condition(lock)  # of the thread, which waits for the next call
        self._calls: list[Call] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._fault: Exception | None = None
        self._made_in = forks.generation

    def now_s(self) -> float:
        """Return the time of ``time.monotonic``."""
        return time.monotonic()

    def at(self, when_s: float, function: Callable[..., object], *arguments: Any) -> None:
        """See :meth:`NetworkSchedule.at`. Raises ForkedProcess: in a child by fork, which has no such thread."""
        forks.check(self._made_in, self._what)
        with self.lock:
            if self._is_closed:
                return
            call = (when_s, next(self._numbers), function, arguments)
            heapq.heappush(self._calls, call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
                self._thread.start()
            elif self._calls[0] is call:  # else it waits for an earlier one
                self._clock.notify()

    def wait(self, node: Any, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """See :meth:`NetworkSchedule.wait`."""
        is_done = self.lock.wait_for(lambda: self._fault is not None or is_over(), timeout_s)
        self.check()
        return is_done

    def check(self) -> None:
        """See :meth:`NetworkSchedule.check`."""
        if self._fault is not None:
            raise BusError(f"{self._what} has failed with {self._fault!r}: nothing arrives any more") from self._fault

    def notify(self) -> None:
        """See :meth:`NetworkSchedule.notify`."""
        self.lock.notify_all()

    def close(self) -> None:
        """Call nothing more, and end the thread."""
        with self.lock:
            self._is_closed = True
            self._calls.clear()
            self._clock.notify()
            self.lock.notify_all()
        if self._thread is not None:
            self._thread.join(10.0)

    def _run(self) -> None:
        with self.lock:
            while not self._is_closed:
                due_in_s = self._calls[0][0] - time.monotonic() if self._calls else math.inf
                if due_in_s > 0.0:
                    self._clock.wait(None if due_in_s == math.inf else due_in_s)
                    continue
                _, _, function, arguments = heapq.heappop(self._calls)
                try:
                    function(*arguments)
                except Exception as error:
                    self._fault, self._is_closed = error, True
                self.lock.notify_all()  # those that wait look at what it has changed
