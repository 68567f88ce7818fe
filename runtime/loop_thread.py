"""A coroutine on an event loop of its own, in a thread: for callers without asyncio, or inside of another loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from gradbus.runtime.tasks import single_error

T = TypeVar("T")

_START_S = 5.0  # for which a cancellation waits for the loop


class LoopThread(Generic[T]):
    """Runs one coroutine. The thread ends with it."""

    def __init__(self, main: Coroutine[Any, Any, T], name: str, *, daemon: bool = False) -> None:
        """A thread that has not started. ``daemon``: whether the interpreter may end before the coroutine has."""
        self._main = main
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)
        self._started, self._ended = threading.Event(), threading.Event()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._outcome: list[T] = []
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the coroutine has ended."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """The error that the coroutine has ended with; None: it runs, or has returned."""
        return self._error

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the loop; nothing happens where the coroutine has not begun, or has ended."""
        if self._running is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed just now
                self._running[0].call_soon_threadsafe(function, *arguments)

    def cancel(self) -> None:
        """Cancel the coroutine. Does not wait until it has ended."""
        self._started.wait(_START_S)
        if self._running is not None:
            self.call_soon(self._running[1].cancel)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the coroutine has ended, at most for so long; whether it has."""
        # Not the thread's join: one that is interrupted takes the thread for ended (CPython 3.11).
        return self._ended.wait(timeout_s)

    def result(self) -> T:
        """Wait for the coroutine and return what it returns. Ctrl-C here cancels it, and waits until it has ended.

        Raises:
            What the coroutine raises, without groups around a single error.
        """
        try:
            self.wait()
        except BaseException:
            self.cancel()
            self.wait()
            raise
        if self._error is not None:
            raise self._error
        return self._outcome[0]

    def _run(self) -> None:
        try:
            self._outcome.append(asyncio.run(self._call()))
        except BaseExceptionGroup as errors:
            self._error = single_error(errors)
        except BaseException as error:  # raised where the result is asked for
            self._error = error
        finally:
            self._started.set()
            self._ended.set()

    async def _call(self) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._running = asyncio.get_running_loop(), task
        self._started.set()
        return await self._main
