"""Processes of this machine, as the kernel knows them: whether one that others know by its claim still runs.

A lease says that nothing has come for so long. That is no death where a machine is busy, or where a process was
stopped and goes on. The kernel knows: a pidfd becomes readable when its process has ended, however it ended, within a
millisecond, and at no other time.

Each process makes a claim: which kernel and namespace of process numbers it lives in, its number, and when it began. It
travels in what the process says, so it is sealed where that is, and a false one harms only the process that made it:
others take that one for gone when the process ends that it has named. The moment of its beginning tells a process from
a later one with the same number.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gradbus.runtime import fast_paths
from gradbus.runtime.logs import get_logger

SETTLE_S = 0.02  # after the end of a process until it is reported: what it sent last is on its way
MAX_WATCHED = 4096  # processes; a descriptor each
# Numbers that the kernel's calls take: anybody may say a larger one, for which they raise OverflowError.
_CLAIM = re.compile(r"([0-9a-f]{16}) ([1-9]\d{0,8}) (\d{1,19})", re.ASCII)

Ended = Callable[[str], None]
"""Gets the claim of a process that has ended, on a thread of its own; must not wait."""

log = get_logger("bus")


@functools.cache
def _space() -> str:
    """The kernel's boot, and its namespaces of process numbers, clocks and networks, as 16 digits that tell nobody the
    name of the machine. Empty where there is no such thing. Between two networks a link may fail while processes live,
    so there it is as between machines."""
    if fast_paths.PORTABLE:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [
            os.readlink(f"/proc/self/ns/{kind}")
            for kind in ("pid", "time", "net")
            if kind in os.listdir("/proc/self/ns")
        ]
    except (OSError, ValueError):
        return ""
    return hashlib.blake2b(" ".join((boot, *spaces)).encode(), digest_size=8).hexdigest()


def _status(process: int) -> tuple[str, int] | None:
    """State (a letter) and beginning (ticks since boot) of a process; None: it cannot be seen, or is none."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="latin-1")
        fields = text[text.rindex(")") + 1 :].split()  # its name may hold anything
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def own_claim() -> str:
    """Return what this process says of itself; empty where the kernel does not tell."""
    return _cached_claim_of(os.getpid())


def claim_of(process: int) -> str:
    """Return what a process of this machine says of itself; empty where the kernel does not tell."""
    status = _status(process)
    return f"{_space()} {process} {status[1]}" if _space() and status is not None else ""


_cached_claim_of = functools.cache(claim_of)  # by process: a child after a fork does not say what its parent is


def has_ended(claim: str) -> bool | None:
    """Whether a process is no more, now; None: the kernel does not tell here."""
    known = _parsed(claim)
    if known is None:
        return None
    status = _status(known[0])
    if status is None:
        return None if os.path.exists(f"/proc/{known[0]}") else True
    return status[1] != known[1] or status[0] in "ZX"


def is_stopped(claim: str) -> bool:
    """Whether the process stands still because somebody wants it to: stopped, or held by a debugger."""
    known = _parsed(claim)
    status = None if known is None else _status(known[0])
    return status is not None and known is not None and status[1] == known[1] and status[0] in "tT"


def _parsed(claim: str) -> tuple[int, int] | None:
    """Number and beginning, of a process whose end this kernel can tell of here."""
    found = _CLAIM.fullmatch(claim)
    return (int(found[2]), int(found[3])) if found is not None and found[1] == _space() else None


class PeerProcesses:
    """The processes that this one watches. There is one of these (:data:`watched`), with a thread while it has any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, list[Ended]] = {}  # by claim
        self._files: dict[int, str] = {}  # pidfd: claim
        self._epoll: select.epoll | None = None
        self._bell = -1  # an eventfd: there is nothing to watch any more
        self._thread: threading.Thread | None = None

    def watch(self, claim: str, ended: Ended) -> bool:
        """Have ``ended`` called when that process has ended; at once if it has already.

        Returns:
            Whether the kernel will tell. False: it is a process of another machine or container, or of another user
            whom this one may not see, or no process at all.
        """
        known = _parsed(claim)
        if known is None or not fast_paths.has_pidfd():
            return False
        if claim == own_claim():
            return True
        with self._lock:
            listeners = self._listeners.get(claim)
            if listeners is not None:
                listeners.append(ended)
                return True
            if len(self._listeners) >= MAX_WATCHED:
                return False
            try:
                file = os.pidfd_open(known[0])
            except ProcessLookupError:
                file = -1
            except OSError:  # no more descriptors, a kernel without them, a number that can be none
                return False
            if file >= 0:
                status = _status(known[0])
                if status is None or status[1] != known[1]:
                    os.close(file)
                    if status is None and os.path.exists(f"/proc/{known[0]}"):
                        return False  # it is there and hidden
                    file = -1
            if file >= 0:
                try:
                    self._add(file, claim)
                except (OSError, RuntimeError):  # no more descriptors, no more threads
                    os.close(file)
                    return False
                self._listeners[claim] = [ended]
                return True
        ended(claim)
        return True

    def unwatch(self, claim: str, ended: Ended) -> None:
        """Call it no more. It may be in the midst of a call."""
        with self._lock:
            listeners = self._listeners.get(claim, [])
            with contextlib.suppress(ValueError):
                listeners.remove(ended)
            if not listeners and self._listeners.pop(claim, None) is not None:
                file = next(file for file, one in self._files.items() if one == claim)
                self._remove(file)

    def rest(self) -> None:
        """Wait, not for long, for the end of a thread that has nothing to watch any more."""
        thread = self._thread
        if thread is not None and self._epoll is None:
            thread.join(1.0)

    def _add(self, file: int, claim: str) -> None:
        """With the lock. Raises OSError or RuntimeError: it cannot be watched, and nothing has changed."""
        if self._epoll is not None:
            self._epoll.register(file, select.EPOLLIN)
        else:
            self._start(file)
        self._files[file] = claim

    def _start(self, file: int) -> None:
        with contextlib.ExitStack() as undo:
            epoll = select.epoll()
            undo.callback(epoll.close)
            bell = os.eventfd(0, os.EFD_CLOEXEC)
            undo.callback(os.close, bell)
            for one in (bell, file):
                epoll.register(one, select.EPOLLIN)
            thread = threading.Thread(target=self._run, args=(epoll, bell), name="gradbus-processes", daemon=True)
            thread.start()
            undo.pop_all()
        self._epoll, self._bell, self._thread = epoll, bell, thread

    def _remove(self, file: int) -> None:
        """With the lock."""
        del self._files[file]
        if self._epoll is not None:
            self._epoll.unregister(file)
        os.close(file)
        if not self._files and self._epoll is not None:
            os.eventfd_write(self._bell, 1)  # the thread takes down what it works with
            self._epoll = None

    def _run(self, epoll: select.epoll, bell: int) -> None:
        try:
            while True:
                events = epoll.poll()
                if any(file == bell for file, _ in events):
                    return
                time.sleep(SETTLE_S)
                for file, _ in events:
                    self._tell(file)
        finally:
            epoll.close()
            os.close(bell)

    def _tell(self, file: int) -> None:
        with self._lock:
            claim = self._files.get(file)
            if claim is None or not _is_readable(file):
                return  # closed meanwhile, and its number may be another's now; an end is reported until it is told
            listeners = self._listeners.pop(claim)
            self._remove(file)
        for ended in listeners:
            try:
                ended(claim)
            except Exception:
                log.exception("a listener to the end of a process failed")

    def forget(self) -> None:
        """In a child after a fork: its parent's thread and descriptors are the parent's."""
        for file in self._files:
            with contextlib.suppress(OSError):
                os.close(file)
        if self._epoll is not None:
            self._epoll.close()
            with contextlib.suppress(OSError):
                os.close(self._bell)
        self.__init__()  # type: ignore[misc]


def _is_readable(file: int) -> bool:
    """Whether there is news of a file now: of a pidfd, that its process has ended."""
    look = select.poll()
    look.register(file, select.POLLIN)
    return bool(look.poll(0))


watched = PeerProcesses()
"""Of this process."""

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=watched.forget)


def network_place() -> str:
    """The network that this process lives in, the same for all that can meet on its ``lo``; empty: unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""
