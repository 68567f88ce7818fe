"""A thread and all that it starts, as the system sees them: processor time, and the cores that they run on.

torch computes on threads of OpenMP, which Python does not know. Linux has a new thread inherit two things from the one
that starts it: its affinity, and its name. So a thread that sets both before it computes anything has them on all of
its own, and no other thread of the process has them: OpenMP keeps a pool of workers for each thread that computes, and
workers that another thread has started earlier stay as they are.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Collection
from pathlib import Path

from gradbus.runtime.errors import ConfigError

_TASKS = Path("/proc/self/task")
_LOOK_S = 0.1  # how often threads are looked for: the first parallel operation starts them
_PER_THREAD_CLOCK = 6  # of linux/posix-timers.h: CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED
_numbers = itertools.count()


def cpu_time_of(thread: int) -> float:
    """Return the processor time of a thread of this process, in seconds. ``thread``: its id as Linux has it.

    Raises:
        OSError: there is no such thread.
    """
    return time.clock_gettime((~thread << 3) | _PER_THREAD_CLOCK)  # as clock_getcpuclockid(3) has it for processes


class ThreadFamily:
    """Knows the threads that one thread has started, and itself. Where the system has no ``/proc``, or lets nobody name
    a thread there, all of the process stands for them."""

    def __init__(self) -> None:
        self._name = b"gradbus-%d" % (next(_numbers) % 10_000_000)  # of 15 bytes at most
        self._is_known = _TASKS.is_dir()
        self._cpu_s: dict[int, float] = {}  # by thread
        self._ended_s = 0.0  # of those that have ended
        self._looked_s = float("-inf")

    def enter(self, cores: Collection[int] = ()) -> None:
        """Make the calling thread the first one, before it has started any other.

        Args:
            cores: logical processors, as ``os.sched_getaffinity`` numbers them, that all of them run on; none: as the
                calling thread does.

        Raises:
            ConfigError: this system, or this process, cannot run threads there.
        """
        if self._is_known:
            try:
                (_TASKS / str(threading.get_native_id()) / "comm").write_bytes(self._name)
            except OSError:  # as in a container that may only read /proc
                self._is_known = False
        if cores:
            _run_on(cores)

    @property
    def threads(self) -> list[int]:
        """Return the ids of the threads that there are, ascending."""
        return sorted(thread for thread in map(int, os.listdir(_TASKS)) if self._is_ours(thread))

    def _is_ours(self, thread: int) -> bool:
        try:  # as bytes: a thread of the program may have any name, also half a character at its end
            return (_TASKS / str(thread) / "comm").read_bytes().rstrip(b"\n") == self._name
        except OSError:  # it has ended
            return False

    def cpu_s(self) -> float:
        """Return the processor time of all of them so far, in seconds."""
        if not self._is_known:
            return time.process_time()
        if time.monotonic() - self._looked_s >= _LOOK_S:
            self._cpu_s.update({thread: 0.0 for thread in self.threads if thread not in self._cpu_s})
            self._looked_s = time.monotonic()
        for thread in list(self._cpu_s):
            try:
                self._cpu_s[thread] = max(self._cpu_s[thread], cpu_time_of(thread))
            except OSError:  # it has ended: what it took stays, and its number may be given to a thread of others
                self._ended_s += self._cpu_s.pop(thread)
        return self._ended_s + sum(self._cpu_s.values())


def _run_on(cores: Collection[int]) -> None:
    """Have the calling thread run on these cores alone. Raises ConfigError: it cannot."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("client.budget.cores: this system has no sched_setaffinity. Leave it out")
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError, ValueError):
        os.sched_setaffinity(0, cores)
    if (found := os.sched_getaffinity(0)) != set(cores):
        os.sched_setaffinity(0, before)
        lacking = sorted(set(cores) - found) if found < set(cores) else sorted(cores)
        raise ConfigError(
            f"client.budget.cores is {sorted(cores)}: this process may not run on {lacking}. Take numbers that "
            f"'lscpu -e' lists as online; a container may allow fewer (os.sched_getaffinity(0))"
        )
