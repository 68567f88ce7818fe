"""What becomes of this package in a process that was forked from one that uses it.

Neither DDS nor any thread survives a fork: in the child, a lock that a thread held is held for ever, shared memory is
still the parent's, and a counter of envelopes goes on where the parent's does. So the child forgets: what was made
before the fork refuses to work in it, without a call into DDS, and is dropped without one. The parent notices nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from gradbus.runtime.errors import ForkedProcess
from gradbus.runtime.fast_paths import IS_LINUX

generation = 0  # how often this process, since it began, is the child of a fork


def _next_generation() -> None:
    global generation
    generation += 1


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_prctl = ctypes.CDLL(None).prctl if IS_LINUX else None  # looked up here: not in a child of a process with threads


def die_with_parent() -> Callable[[], None] | None:
    """For a child, between its fork and what it does: a function that has the kernel kill it when the thread that forks
    it dies. Made before the fork. None: Linux alone can."""
    prctl, parent = _prctl, os.getpid()
    if prctl is None:
        return None

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that was in force
            os._exit(1)

    return arm


def in_child(function: Callable[[], Any]) -> None:
    """Have a function called in every child by fork, before anything else happens there."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=function)


class ForkLock:
    """Is a lock that is free in a child, whichever thread held it in the parent: for the state of a module.

    It is never freed itself, as Python keeps what it is to call in children.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        in_child(self._renew)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _renew(self) -> None:
        self._lock = threading.Lock()


def refusal(what: str) -> ForkedProcess:
    """The error for a use of ``what`` in a child."""
    return ForkedProcess(
        f"{what} belongs to the process that this one (process {os.getpid()}) was forked from: neither DDS nor its "
        f"threads survive a fork. Start processes that use the bus by spawn, as multiprocessing.get_context('spawn') "
        f"does, or fork before the first bus is opened"
    )


def check(made_in: int, what: str) -> None:
    """Raises ForkedProcess: ``what`` was made in generation ``made_in``, and this process is a child of that one."""
    if made_in != generation:
        raise refusal(what)


in_child(_next_generation)
