"""Tensor work off the event loop: one thread that computes, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from gradbus.runtime import drive

LET_GO_S = 10.0

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Runs functions one after the other on a thread of its own.

    torch frees the GIL in its kernels, so the loop goes on meanwhile. A thread cannot be cancelled: a function that may
    run long asks :meth:`should_stop` from time to time. Whoever is cancelled while it waits sets that flag, and waits
    for the function to notice.
    """

    def __init__(self, name: str = "compute") -> None:
        self._executor = drive.executor(name=f"gradbus-{name}")
        self._running = threading.Event()  # the stop flag of the function that runs
        self._closed = threading.Event()
        self._latest = self._running  # of the one that was brought last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def should_stop(self) -> bool:
        """Whether the running function is no longer wanted."""
        return self._running.is_set()

    def rest(self, timeout_s: float) -> None:
        """Wait so long, on any thread but the event loop's, or until the running function is asked to stop. A function
        that goes on although it was asked waits all the same, until the thread is closed."""
        (self._closed if self.should_stop() else self._running).wait(timeout_s)

    def stop_current(self) -> None:
        """Ask the function that runs, or is just about to, to give up. It does not concern those that follow."""
        self._running.set()
        self._latest.set()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of ``function(*args, **kwargs)``, computed on the thread.

        When the caller is cancelled, the function is asked to stop, and the caller goes on when the thread has let go
        of what it works on, or after ``LET_GO_S``.

        Raises:
            RuntimeError: it raised StopIteration, which no future can hold, or SystemExit. And what else it raises.
        """

        stop = self._latest = threading.Event()

        def call() -> T:
            self._running = stop
            try:
                return function(*args, **kwargs)
            except StopIteration as error:  # a future refuses it, and its waiter would wait for ever
                name = getattr(function, "__qualname__", repr(function))
                raise RuntimeError(f"{name} raised StopIteration") from error
            except SystemExit as error:  # asyncio would end the event loop, without a word to the other processes
                left = RuntimeError(f"sys.exit was called, with {error.code!r}: raise an error that says what is wrong")
                raise left.with_traceback(error.__traceback__) from None

        running = self._executor.submit(call)
        future = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # Ask the executor's own future: that of asyncio says "cancelled" although the thread goes on.
            if not running.cancel():
                stop.set()
                await asyncio.wait([future], timeout=LET_GO_S)
            if future.done() and not future.cancelled():
                future.exception()  # nobody is left to hear it
            raise
        finally:
            # An error's traceback holds this frame, and these the error: what the function worked on, which may be
            # large, would stay until the garbage collector comes.
            del running, future

    async def run_or_follow(self, function: Callable[[], T]) -> T:
        """The same; where the thread is closed, on another one once the last function has ended."""
        task, was_closed = asyncio.current_task(), self._closed.is_set()
        cancels = task.cancelling() if task else 0
        try:
            if not was_closed:
                return await self.run(function)
        except asyncio.CancelledError:
            if not self._closed.is_set() or (task and task.cancelling() > cancels):
                raise
            # It is the function that was cancelled, not the caller: it had not begun when the thread was closed.

        def after_the_last() -> T:
            self._executor.shutdown(wait=True)
            return function()

        return await asyncio.to_thread(after_the_last)

    def close(self) -> None:
        """Ask what runs to stop, and take nothing new. Does not wait."""
        self._closed.set()
        self.stop_current()
        self._executor.shutdown(wait=False, cancel_futures=True)
