"""Virtual processes, and what Python's ``time`` and ``os`` give to each of them.

Every callback of the virtual loop runs in a context that names its process, so a function that the code under test
calls can tell which process calls it. Where none is named (:func:`current` is None) everything is real.

A process that is killed stops at once: its descriptors are closed, which frees its locks, and nothing of it runs any
more. If it is killed in the middle of a call, :class:`Killed` unwinds the stack; what ``finally`` blocks do meanwhile
has no effect, as the functions here do nothing for a dead process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import os
import random
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fault_simulation.world import World

START_S = 1000.0  # the clocks at the start of each run
WALL_NS = 1_790_000_000_000_000_000


class Clock:
    """The virtual time. ``now_s`` is None while no simulation runs: then the real clocks answer."""

    now_s: float | None = None


CLOCK = Clock()
_process: contextvars.ContextVar[VirtualProcess | None] = contextvars.ContextVar("virtual_process", default=None)
real: dict[str, Callable[..., Any]] = {
    name: getattr(os, name) for name in ("urandom", "getpid", "open", "close", "write", "fsync", "replace", "unlink")
}
_real_time = {
    name: getattr(time, name)
    for name in ("monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns", "time_ns")
}
_real_hostname = socket.gethostname


class Killed(BaseException):
    """Unwinds the stack of a process that was killed in the middle of a call."""


class VirtualProcess:
    """One start of one actor.

    Attributes:
        role: ``controller`` or ``client-N``. name: the role and the number of this start.
        machine: processes of one machine share a kernel, which reports their ends, and a disk.
        claim: how it identifies itself to others; see ``gradbus.runtime.transport.peer_processes``.
        entropy: what ``os.urandom`` gives. wall_ns: its wall clock is wrong by so much.
        files: open descriptors, and which file each is.
        tasks: of its coroutines, kept until the run is over: a coroutine that is collected runs its ``finally`` blocks.
        is_stranger: it has a key that is not on the allow list.
        lost_power: its kernel has ended with it, and told nobody.
        replaced: another start has taken its place while it was paused: what it does is no longer part of the run.
        parked: callbacks that wait while it is paused. blocked_s: how long a write would have held its thread.
        slow_until_s: it takes nothing from its readers until then. went_on_s: when its last pause was over.
    """

    def __init__(self, world: World, role: str, start: int, *, machine: int, pid: int) -> None:
        self.world = world
        self.role = role
        self.name = f"{role}.{start}"
        self.machine = machine
        self.pid = pid
        self.claim = f"{machine + 1:016x} {pid} {pid * 7}"
        self.entropy = generator(world.seed, self.name)
        self.wall_ns = 0
        self.files: dict[int, tuple[int, int]] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.participants: list[Any] = []
        self.watchers: list[tuple[Callable[[str], None], contextvars.Context]] = []
        self.parked: list[Any] = []
        self.dead = self.killed = self.paused = self.replaced = self.is_stranger = self.lost_power = False
        self.blocked_s = self.slow_until_s = self.went_on_s = 0.0
        self.started_s = now_s()
        self.ended_s = 0.0
        self.result: Any = None
        self.main: asyncio.Task[None] | None = None
        self.context = contextvars.Context()
        self.context.run(_process.set, self)

    def take_blocked_s(self) -> float:
        """Return how long writes have held the thread that runs, and forget it."""
        blocked_s, self.blocked_s = self.blocked_s, 0.0
        return blocked_s

    def close_files(self) -> None:
        """Close all descriptors, as the kernel does at the end of a process. One that an object has closed meanwhile
        may be another process's by now."""
        for file, opened in self.files.items():
            with contextlib.suppress(OSError):  # nobody has this number
                if _identity(file) == opened:
                    real["close"](file)
        self.files.clear()


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def now_s() -> float:
    """Return the virtual time. Raises RuntimeError: no simulation runs."""
    if CLOCK.now_s is None:
        raise RuntimeError("no simulation runs: there is no virtual time")
    return CLOCK.now_s


def current() -> VirtualProcess | None:
    """Return the process that runs; None: it is none of the simulation."""
    return _process.get()


def process_of(context: contextvars.Context) -> VirtualProcess | None:
    """Return the process to which a context belongs."""
    return context.get(_process)


def running() -> VirtualProcess:
    """Return the process that runs. Raises RuntimeError: there is none."""
    process = _process.get()
    if process is None:
        raise RuntimeError("the simulation itself called a function of a virtual process")
    return process


def generator(*names: object) -> random.Random:
    """Return a generator of random numbers that is seeded by these names, whatever PYTHONHASHSEED is."""
    return random.Random("/".join(map(str, names)))


# Replacements for functions of Python, see patches.py. Each is the real function where no process runs.


def _clock(name: str, read: Callable[[float], float]) -> Callable[[], float]:
    real_clock = _real_time[name]

    def clock() -> float:
        now = CLOCK.now_s
        return real_clock() if now is None else read(now)

    return clock


def _wall_ns(now: float) -> int:
    process = _process.get()
    return WALL_NS + int(now * 1e9) + (0 if process is None else process.wall_ns)


CLOCKS = {
    "monotonic": _clock("monotonic", lambda now: now),
    "perf_counter": _clock("perf_counter", lambda now: now),
    "monotonic_ns": _clock("monotonic_ns", lambda now: int(now * 1e9)),
    "perf_counter_ns": _clock("perf_counter_ns", lambda now: int(now * 1e9)),
    "time_ns": _clock("time_ns", _wall_ns),
    "time": _clock("time", lambda now: _wall_ns(now) / 1e9),
}


def urandom(size: int) -> bytes:
    """Return random bytes of the generator of the process."""
    process = _process.get()
    return bytes(real["urandom"](size)) if process is None else process.entropy.randbytes(size)


def getpid() -> int:
    """Return the number of the process."""
    process = _process.get()
    return int(real["getpid"]()) if process is None else process.pid


def gethostname() -> str:
    """Return one name for all machines: each Hello contains it, and so does the trace."""
    return _real_hostname() if _process.get() is None else "simulated"


def open_file(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
    """Open a file, and note that it is closed when the process dies."""
    process = _process.get()
    if process is None:
        return int(real["open"](path, flags, mode, **more))
    if process.dead:
        raise OSError(errno.EIO, "the process is dead")
    file = int(real["open"](path, flags, mode, **more))
    process.files[file] = _identity(file)
    return file


def close_file(file: int) -> None:
    """Close a file; the number of one that the kernel closed at the end of its process may be another's by now."""
    process = _process.get()
    if process is not None:
        if file not in process.files:
            return
        del process.files[file]
    real["close"](file)


def write_file(file: int, data: Any) -> int:
    """Write to a file; a dead process writes nothing, and does not live to see it."""
    process = _process.get()
    return len(data) if process is not None and process.dead else int(real["write"](file, data))


def fsync(file: int) -> None:
    """Have the disk of the machine keep a file, or a folder's entries."""
    process = _process.get()
    if process is None:
        real["fsync"](file)
    elif process.dead:
        raise Killed
    else:
        process.world.disk.sync(process, file)


def replace(source: Any, target: Any, **more: Any) -> None:
    """Rename a file; the disk keeps that once the folder is synced."""
    process = _process.get()
    if process is None:
        real["replace"](source, target, **more)
    elif not process.dead:
        process.world.disk.replace(process, source, target)


def unlink(path: Any, **more: Any) -> None:
    """Remove a file; the disk keeps that once the folder is synced. A dead process removes none."""
    process = _process.get()
    if process is None or more:
        real["unlink"](path, **more)
    elif not process.dead:
        process.world.disk.remove(process, path)
