"""Run the work that no event loop does: the steps of a bus, deletions, and computations. In production, on threads.

Bus and actors start such work here and nowhere else. So the same work can run in virtual time: the simulation of
``tests/simulation`` replaces the three functions of this module, in a process of its own. No setting, environment
variable or argument does so.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol

from gradbus.runtime.closing_thread import ClosingThread


class SteppedWork(Protocol):
    """Does its work step by step; one driver at a time calls it."""

    @property
    def stopping(self) -> bool:
        """Whether no further step is wanted: :meth:`drop_rest` comes next."""

    def step(self) -> float:
        """Do what is due, and return the seconds until something is due again."""

    def drop_rest(self) -> None:
        """Let go of what is left, after the last step."""

    def fail(self, error: BaseException) -> None:
        """Take note that a step raised: there will be no further one."""


class Driver(Protocol):
    """Calls the steps of a worker from its start until it has finished."""

    @property
    def ident(self) -> int | None:
        """Return the number of the thread that calls the steps, as :func:`threading.get_ident`; None before its
        start."""

    def start(self) -> None:
        """Begin to call the steps."""

    @property
    def step_due(self) -> Callable[[], None] | None:
        """Return what is to be called, on any thread, when a step is due at once. None: the worker's own loop waits for
        that itself."""

    def join(self, timeout_s: float) -> None:
        """Wait until the worker has finished, for at most ``timeout_s``."""

    def is_alive(self) -> bool:
        """Return whether it has been started and the worker has not finished."""


class ThreadDriver:
    """Runs a worker's own loop over its steps on a daemon thread. The loop waits for what makes a step due.

    It holds its thread rather than being one: a subclass of :class:`threading.Thread` shares the names of its private
    attributes with Python's own, which change from release to release.
    """

    step_due = None

    def __init__(self, run: Callable[[], object], name: str) -> None:
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    @property
    def ident(self) -> int | None:
        """Return the number of the thread; None before its start."""
        return self._thread.ident

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, for at most ``timeout_s``."""
        self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()


class Deferred(Protocol):
    """A function that runs by itself."""

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has returned, for at most ``timeout_s``."""

    def is_running(self) -> bool:
        """Return whether it has not returned yet."""


def driver(worker: SteppedWork, run: Callable[[], object], name: str) -> Driver:
    """Return what drives a worker. ``run``: its own loop over its steps, for a thread, which gets this name."""
    return ThreadDriver(run, name)


class OwnThread(ABC):
    """Does its work step by step on the thread that :meth:`start` starts: the sender and the wait loop of a bus."""

    stopping: bool

    def __init__(self, run: Callable[[], object], name: str) -> None:
        """``run``: calls the steps until there is no more to do, and :meth:`drop_rest`; for the thread of this name."""
        self._driver = driver(self, run, name)

    @abstractmethod
    def step(self) -> float:
        """Do what is due, and return the seconds until something is due again."""

    @abstractmethod
    def drop_rest(self) -> None:
        """Let go of what is left, after the last step, on the thread that has called it."""

    def fail(self, error: BaseException) -> None:
        """Take note that a step raised: there will be no further one."""
        self.stopping = True

    def start(self) -> None:
        """Start the thread."""
        self._driver.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, for at most ``timeout_s``."""
        self._driver.join(timeout_s)

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._driver.is_alive()

    @property
    def ident(self) -> int | None:
        """Return the number of the thread, as :func:`threading.get_ident` does there; None before its start."""
        return self._driver.ident


def later(function: Callable[[], object], name: str) -> Deferred:
    """Run a function that may wait on a thread of its own, also while the interpreter ends. Raises RuntimeError: no
    thread can be started."""
    thread = ClosingThread(function, name)
    thread.start()
    return thread


def executor(name: str) -> Executor:
    """Return an executor that runs functions one after the other, in the order of their submission."""
    return ThreadPoolExecutor(1, thread_name_prefix=name)
