"""All ranks of a job on this machine: started together, shown together, ended together.

The first signal is passed on to the ranks, the second kills them. Where one rank fails, the others are asked to end,
and killed if they do not. No rank outlives the launcher: where that is killed, the kernel ends the ranks (on Linux).

Why not ``torch.distributed.elastic.multiprocessing``: its ranks outlive an agent that is killed; it shows output by
polling log files, a tenth of a second late and without the order between stdout and stderr; and at the first exit code
that is not 0 it ends all ranks, so that the failure it names first is often that of a rank which only missed another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gradbus.commands.exit_codes import ExitCode
from gradbus.commands.launch.first_failure import RankExit, first_failure
from gradbus.commands.launch.output import LineSplitter, OutputWriter, Tail, prefix
from gradbus.runtime.errors import GradbusError
from gradbus.runtime.forks import die_with_parent
from gradbus.runtime.tasks import TaskGroup

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "the end of its terminal", signal.SIGPIPE: "the end of its reader"}
_SETTLE_S = 2.0  # for the rank that failed first to exit, where another one, which misses it, has exited before
_EOF_S = 2.0  # for the last output of ranks that have exited
_DEAD_S = 5.0  # for the kernel to end ranks that were killed


class LaunchFailed(GradbusError):
    """A process could not be started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The processes to start: ``world`` ranks, each with program and arguments, and variables of its environment.

    ``command`` gets the rank, and whether it is started again. A variable that is None is removed. ``grace_s``: between
    the request to end and the kill. ``name``: of a rank, for people. ``goes_on_without``: whether the others go on when
    these ranks have failed, each with an exit code, which is negative where a signal has killed it. ``restarts``: how
    often ranks that something has killed are started again in all. ``ends_together``: whether ranks that have
    come to the end of the run end at about the same time, so that nobody goes on without one that fails then.
    ``has_ended``: whether the run has come to its end, as what it has written says. ``serves``: whether a rank serves
    the others and does not end by itself: it is asked to when all others have. ``program``: the command of ``gradbus``,
    for messages.
    """

    world: int
    command: Callable[[int, bool], Sequence[str]]
    environment: Callable[[int], Mapping[str, str | None]] = lambda rank: {}
    grace_s: float = 5.0
    name: Callable[[int], str] = lambda rank: f"rank {rank}"
    goes_on_without: Callable[[Mapping[int, int]], bool] = lambda ranks: False
    ends_together: bool = False
    has_ended: Callable[[], bool] = lambda: True
    serves: Callable[[int], bool] = lambda rank: False
    restarts: int = 0
    program: str = "run"


class LaunchedRank:
    """The process of a rank, in a session of its own: Ctrl-C in the terminal reaches the launcher alone.

    ``open_pipes``: outputs that some process may still write to. ``was_asked``: it was sent a signal.
    """

    def __init__(self, number: int, changed: Callable[[], None]) -> None:
        """``changed`` is called when one of its outputs has come to its end."""
        self.number = number
        self.tail = Tail()
        self.open_pipes = 0
        self.was_asked = False
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._has_exited = False

    @property
    def running(self) -> bool:
        """Whether it was started and has not exited yet."""
        return self._process is not None and not self._has_exited

    async def start(self, launch: Launch, out: OutputWriter, err: OutputWriter, *, again: bool = False) -> None:
        """Start it. Its lines go to the writers; where these are one, stdout and stderr share a pipe and keep their
        order. Raises LaunchFailed."""
        program, *arguments = launch.command(self.number, again)
        variables = {**os.environ, **launch.environment(self.number)}
        try:
            with contextlib.ExitStack() as writing_ends:
                name = launch.name(self.number)
                stdout = await self._pipe(1, out, name, writing_ends)
                stderr = stdout if err is out else await self._pipe(2, err, name, writing_ends)
                self._process = await asyncio.create_subprocess_exec(
                    program,
                    *arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env={name: text for name, text in variables.items() if text is not None},
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                )
        except OSError as error:
            raise LaunchFailed(
                f"{launch.name(self.number)} could not be started: {program}: {error.strerror}"
            ) from None

    async def _pipe(self, fd: int, writer: OutputWriter, name: str, writing_ends: contextlib.ExitStack) -> int:
        # Pipes of our own: asyncio's would have ``wait`` go on while a process that the rank has left behind has them.
        reading, writing = os.pipe()
        writing_ends.callback(os.close, writing)
        colour = os.isatty(fd) and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        put = partial(self._put, writer, prefix(self.number, name, colour=colour))
        pipe = os.fdopen(reading, "rb", buffering=0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: _LineProtocol(put, self._at_end), pipe)
        self.open_pipes += 1
        return writing

    def _put(self, writer: OutputWriter, head: bytes, lines: list[bytes]) -> None:
        for line in lines:
            self.tail.add(line)
            writer.put(head + line)

    def _at_end(self) -> None:
        self.open_pipes -= 1
        self._changed()

    async def wait(self) -> RankExit:
        """Wait until it exits, and kill the processes that it has left behind."""
        assert self._process is not None
        code = await self._process.wait()
        self._kill_session()  # now, while the number is still its own
        self._has_exited = True
        return RankExit(self.number, code, self.was_asked)

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the rank alone, which has to end its own children."""
        if self._process is not None and self.running:
            self.was_asked = True
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    def kill(self) -> None:
        """Kill it at once, and every process of its session."""
        if self.running:
            self.was_asked = True
            self._kill_session()

    def _kill_session(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


class _LineProtocol(asyncio.Protocol):
    """Splits the output of a rank into lines."""

    def __init__(self, put: Callable[[list[bytes]], None], at_end: Callable[[], None]) -> None:
        self._put, self._at_end, self._lines = put, at_end, LineSplitter()

    def data_received(self, data: bytes) -> None:
        self._put(self._lines.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._put(self._lines.close())
        self._at_end()


class Launcher:
    """Runs one :class:`Launch`, once.

    Attributes:
        ended_s: when each rank exited for the last time, as of ``time.monotonic``.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._changed = asyncio.Event()
        self._ranks = [LaunchedRank(number, self._changed.set) for number in range(launch.world)]
        self.ended_s: dict[int, float] = {}
        self._exits: list[RankExit] = []
        self._signals: list[signal.Signals] = []
        self._stopped_by: signal.Signals | None = None
        self._restarts = launch.restarts

    async def run(self) -> int:
        """Start the ranks and wait until all have exited.

        Returns 0, or the exit code of the rank that failed first, 128 + n where signal n killed it or this process.
        Raises LaunchFailed: a rank could not be started. Those that were have been killed.
        """
        loop = asyncio.get_running_loop()
        _fill_standard_files()
        _allow_files(5 * self._launch.world + 64)
        out, err = _outputs(partial(loop.call_soon_threadsafe, self._on_signal, signal.SIGPIPE))
        say = partial(_say, err, self._launch.program)
        with self._signals_caught(loop), self._all_killed_at_end():
            for rank in self._ranks:
                if not self._signals:
                    await rank.start(self._launch, out, err)
            for writer in {out, err}:  # not before: the ranks are forked, and a thread may hold a lock meanwhile
                writer.start()
            async with TaskGroup() as group:
                running = [rank for rank in self._ranks if rank.running]
                watchers = [group.create_task(self._watch(rank, out, err)) for rank in running]
                await self._supervise(say)
                for watcher in watchers:
                    watcher.cancel()  # of a rank that not even the kernel can end
            await self._until(lambda: not any(rank.open_pipes for rank in self._ranks), _EOF_S)
            code = self._conclude(say)
            await self._close({out, err})
        return code

    async def _watch(self, rank: LaunchedRank, out: OutputWriter, err: OutputWriter) -> None:
        end = await rank.wait()
        while self._comes_again(end):
            self._restarts -= 1
            left = f"{self._restarts} restarts are left"
            _say(err, self._launch.program, f"{self._launch.name(end.rank)} {end}; starting it again, {left}")
            former, rank = rank, LaunchedRank(end.rank, self._changed.set)
            self._ranks[end.rank] = rank
            try:
                await rank.start(self._launch, out, err, again=True)
            except LaunchFailed as error:  # for want of memory, say: the rank is lost, as any other without restarts
                self._ranks[end.rank] = former  # which has the last lines
                _say(err, self._launch.program, str(error))
                break
            end = await rank.wait()
        self.ended_s[end.rank] = time.monotonic()
        self._exits.append(end)
        self._changed.set()
        failed = end.code != 0 and not end.was_asked and not self._signals
        if failed and self._first_failure() is None and any(rank.running for rank in self._ranks):
            goes_on = "" if self._failure_at_end() else "; the others go on"
            _say(err, self._launch.program, f"{self._launch.name(end.rank)} {end}{goes_on}")

    def _comes_again(self, end: RankExit) -> bool:
        """Whether a rank that has exited is started again: something has killed it, and there are others to join."""
        is_killed = end.code < 0 and not end.was_asked
        return is_killed and self._restarts > 0 and not self._signals and any(rank.running for rank in self._ranks)

    async def _supervise(self, say: Callable[[str], None]) -> None:
        """Return when all ranks have exited; after a failure or a signal, have them exit."""
        await self._until_over(lambda: self._signals or self._first_failure() or self._is_served())
        if self._missed_another():
            await self._until_over(lambda: self._signals or not self._missed_another(), _SETTLE_S)
        received, first = len(self._signals), self._first_failure()
        if received:
            self._stopped_by = self._signals[0]
        if not any(rank.running for rank in self._ranks):
            return
        if first is not None and not received:
            say(f"{self._launch.name(first.rank)} {first}; ending the others")
        for rank in self._ranks:
            rank.send(self._stopped_by if self._stopped_by in _SIGNALS else signal.SIGTERM)
        await self._until_over(lambda: len(self._signals) > received, self._launch.grace_s)
        names = [self._launch.name(rank.number) for rank in self._ranks if rank.running]
        if names:
            say(f"killing {', '.join(names)}")
            for rank in self._ranks:
                rank.kill()
            await self._until_over(lambda: False, _DEAD_S)

    def _is_served(self) -> bool:
        """Return whether only ranks that serve others are left."""
        return all(self._launch.serves(rank.number) for rank in self._ranks if rank.running)

    def _first_failure(self) -> RankExit | None:
        """As far as is known now: the output of a process may arrive after its exit."""
        failed = {end.rank: end.code for end in self._exits if end.code != 0}
        if failed and self._launch.goes_on_without(failed):
            return None
        return first_failure(self._ends)

    def _failure_at_end(self) -> RankExit | None:
        """The first rank that has failed by itself when the run was over, so that nobody goes on without it.

        With an error of its checkpoints a rank ends before the first generation or at the end of the run, never in
        between; at the end it may exit before those that end well. Any other failure is one of the end if it comes
        last: one that ends well may have left while the others train. Where the last one has waited for the others in
        vain, misses them or is killed by a signal, that is a failure unless the run has ended.
        """
        ends = self._ends if self._launch.ends_together else []
        is_over = not any(rank.running for rank in self._ranks)
        for number, end in enumerate(ends, 1):
            is_own = end.code > 0 and not end.was_asked and not end.is_consequence and end.code != ExitCode.NOBODY_CAME
            is_last = is_over and number == len(ends)
            if is_own and (end.code == ExitCode.CHECKPOINT or is_last):
                return end
            if is_last and end.code != 0 and not end.was_asked and not self._launch.has_ended():
                return end
        return None

    @property
    def _ends(self) -> list[RankExit]:
        """In the order of time."""
        return [replace(end, has_traceback=self._ranks[end.rank].tail.has_traceback) for end in self._exits]

    def _missed_another(self) -> bool:
        """Whether all failures so far are of ranks that missed another one, which has not exited yet."""
        first = self._first_failure()
        return first is not None and (first.is_consequence or first.code == ExitCode.NOBODY_CAME)

    async def _until_over(self, condition: Callable[[], object], timeout_s: float | None = None) -> None:
        """Wait until it holds, or all ranks have exited, or the time has passed."""
        await self._until(lambda: condition() or not any(rank.running for rank in self._ranks), timeout_s)

    async def _until(self, condition: Callable[[], object], timeout_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

    def _conclude(self, say: Callable[[str | bytes], None]) -> int:
        """Print the cause of the end. Returns the exit code."""
        if self._stopped_by is not None:
            say(f"stopped by {_NAMES.get(self._stopped_by, self._stopped_by.name)}")
            return 128 + self._stopped_by
        first = self._first_failure() or self._failure_at_end()
        if first is None:
            return 0
        lines = self._ranks[first.rank].tail.excerpt()
        name = self._launch.name(first.rank)
        say(f"the last lines of {name}:" if lines else f"{name} has printed nothing")
        for line in lines:
            say(line)
        say(f"{name} {first}")
        return first.exit_code

    async def _close(self, writers: set[OutputWriter]) -> None:
        """Wait until everything is written; a signal ends the wait, where nobody reads."""
        loop, received = asyncio.get_running_loop(), len(self._signals)
        unfinished = set(writers)

        def closed(writer: OutputWriter) -> None:
            unfinished.discard(writer)
            self._changed.set()

        for writer in writers:
            writer.close(partial(loop.call_soon_threadsafe, closed, writer))
        await self._until(lambda: not unfinished or len(self._signals) > received, None)

    @contextlib.contextmanager
    def _all_killed_at_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            for rank in self._ranks:
                rank.kill()

    @contextlib.contextmanager
    def _signals_caught(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        # nohup wants that the end of the terminal ends nothing.
        wanted = [signum for signum in _SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
        for signum in wanted:
            loop.add_signal_handler(signum, self._on_signal, signum)
        try:
            yield
        finally:
            for signum in wanted:
                loop.remove_signal_handler(signum)

    def _on_signal(self, signum: signal.Signals) -> None:
        self._signals.append(signum)
        self._changed.set()


def _outputs(on_broken: Callable[[], object]) -> tuple[OutputWriter, OutputWriter]:
    """The writers of stdout and stderr: one where these are the same file, so that lines of a rank keep their order."""
    out = OutputWriter(1, on_broken=on_broken)
    return out, out if os.path.sameopenfile(1, 2) else OutputWriter(2)


def _say(writer: OutputWriter, program: str, text: str | bytes) -> None:
    writer.put(f"gradbus {program}: {text}".encode() if isinstance(text, str) else b"  " + text)


def _fill_standard_files() -> None:
    """Open those that are missing. Where this process was started without stdout or stderr, a pipe would take that
    number, and our own output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one


def _allow_files(count: int) -> None:
    """Let this process have so many files open, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft not in (resource.RLIM_INFINITY, hard) and soft < count:
        limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
