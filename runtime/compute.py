"""Tensor work off the event loop: one thread that computes, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Runs functions one after the other on a thread of its own.

    torch frees the GIL in its kernels, so the loop goes on meanwhile. A thread cannot be cancelled: a function that may
    run long asks :meth:`should_stop` from time to time. Whoever is cancelled while it waits sets that flag, and waits
    for the function to notice.
    """

    def __init__(self, name: str = "compute") -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"gradbus-{name}")
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def should_stop(self) -> bool:
        """Whether the running function is no longer wanted."""
        return self._stop.is_set()

    def stop_current(self) -> None:
        """Ask the running function to give up. The flag falls when the next one starts."""
        self._stop.set()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of ``function(*args, **kwargs)``, computed on the thread."""

        def call() -> T:
            self._stop.clear()
            return function(*args, **kwargs)

        future = asyncio.get_running_loop().run_in_executor(self._executor, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.cancel():
                self._stop.set()
                # What it works on belongs to the caller, who goes on only when the thread has let go of it.
                with contextlib.suppress(Exception):
                    await asyncio.wait([future], timeout=30.0)
            raise

    def close(self) -> None:
        """Ask what runs to stop, and take nothing new. Does not wait."""
        self._stop.set()
        self._executor.shutdown(wait=False, cancel_futures=True)
