"""One rank of a launch: its process, its pipes, its last lines."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from gradbus.experiments.rank_output import LineSplitter, Sink, Tail
from gradbus.runtime.errors import GradbusError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class LaunchFailed(GradbusError):
    """A process could not be started."""


class RankProcess:
    """A process in a session of its own: Ctrl-C in the terminal reaches the launcher alone, which passes it on once.

    Attributes:
        number: the rank.
        tail: its last lines.
        open_pipes: how many of its outputs somebody may still write to.
        asked: it has been told to end.
        ended: its process is gone.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.tail = Tail()
        self.open_pipes = 0
        self.asked = False
        self.ended = False
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended yet."""
        return self._process is not None and not self.ended

    async def start(
        self, command: Sequence[str], environment: Mapping[str, str], *, out: tuple[Sink, bytes],
        err: tuple[Sink, bytes], changed: Callable[[], None],
    ) -> None:  # fmt: skip
        """Start it, with its output going to the sinks, each line with the bytes that go before it.

        Args:
            changed: called when one of its outputs has come to its end.

        Raises:
            LaunchFailed: it cannot be started.
        """
        program, *arguments = command
        try:
            with contextlib.ExitStack() as writers:
                stdout = await self._pipe(out, changed, writers)
                stderr = stdout if err[0] is out[0] else await self._pipe(err, changed, writers)
                self._process = await asyncio.create_subprocess_exec(
                    program, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                    env=environment, start_new_session=True, preexec_fn=_die_with_parent(),
                )  # fmt: skip
        except OSError as error:
            raise LaunchFailed(f"rank {self.number} could not be started: {program}: {error.strerror}") from None

    async def _pipe(self, where: tuple[Sink, bytes], changed: Callable[[], None], writers: contextlib.ExitStack) -> int:
        """The writing end of a new pipe."""
        reader, writer = os.pipe()
        writers.callback(os.close, writer)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: _Lines(self, *where, changed), os.fdopen(reader, "rb", buffering=0))
        return writer

    async def wait(self) -> int:
        """Until it ends, and with it all that it has left behind.

        Returns:
            Its exit code; minus the number of the signal that killed it.
        """
        assert self._process is not None
        code = await self._process.wait()
        self._kill_group()  # now, while the number is still its own
        self.ended = True
        return code

    def send(self, signum: signal.Signals) -> None:
        """To the rank alone: how its own children end is its business."""
        if self.running:
            assert self._process is not None
            self.asked = True
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    def kill(self) -> None:
        """At once, and every process that it has started and that stayed in its session."""
        if self.running:
            self.asked = True
            self._kill_group()

    def _kill_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


class _Lines(asyncio.Protocol):
    """Takes what a rank writes."""

    def __init__(self, rank: RankProcess, sink: Sink, head: bytes, changed: Callable[[], None]) -> None:
        self._rank, self._sink, self._head, self._changed = rank, sink, head, changed
        self._lines = LineSplitter()
        rank.open_pipes += 1

    def data_received(self, data: bytes) -> None:
        self._show(self._lines.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._show(self._lines.close())
        self._rank.open_pipes -= 1
        self._changed()

    def _show(self, lines: list[bytes]) -> None:
        for line in lines:
            self._rank.tail.add(line)
            self._sink.put(self._head + line)


def _die_with_parent() -> Callable[[], None] | None:
    """For between fork and exec: lets the kernel kill this process when the launcher dies. Linux alone has that."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that was in force
            os._exit(1)

    return arm


def fill_standard_files() -> None:
    """Where this process was started without stdout or stderr, a pipe would take that number, and get our output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one


def allow_files(count: int) -> None:
    """Let this process have so many files open, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft not in (resource.RLIM_INFINITY, hard) and soft < count:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (count if hard == resource.RLIM_INFINITY else min(count, hard), hard)
        )
