"""All ranks of a job on this machine: started together, shown together, ended together.

The first signal is passed on to the ranks, the second kills them. Where one rank fails, the others are told to end, and
killed if they do not. No rank outlives the launcher, also where that is killed itself (Linux sees to it).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gradbus.experiments.blame import End, culprit
from gradbus.experiments.cli.exit_codes import ExitCode
from gradbus.experiments.rank_output import Sink, prefix
from gradbus.experiments.rank_process import RankProcess, allow_files, fill_standard_files

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "the end of its terminal", signal.SIGPIPE: "the end of its reader"}
_SETTLE_S = 2.0  # for the rank that failed first to be gone, where another one, which misses it, was gone before
_EOF_S = 2.0  # for the last words of ranks that have ended
_DEAD_S = 5.0  # for the kernel to end what was killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start.

    Attributes:
        world: number of ranks.
        command: program and arguments of a rank.
        environment: variables of a rank, besides those of the launcher; None takes one away.
        grace_s: between the request to end and the kill.
    """

    world: int
    command: Callable[[int], Sequence[str]]
    environment: Callable[[int], Mapping[str, str | None]] = lambda rank: {}
    grace_s: float = 5.0


class Launcher:
    """Runs one :class:`Launch`, once."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._ranks = [RankProcess(number) for number in range(launch.world)]
        self._ends: list[End] = []
        self._signals: list[signal.Signals] = []
        self._stopped_by: signal.Signals | None = None
        self._changed = asyncio.Event()

    async def run(self) -> int:
        """Start the ranks and wait until all have ended.

        Returns:
            0; the exit code of the first rank that failed, 128 + n where signal n killed it; 128 + n where this process
            was stopped by signal n.

        Raises:
            LaunchFailed: a rank could not be started. Those that were have been killed.
        """
        loop = asyncio.get_running_loop()
        fill_standard_files()
        out = Sink(1, on_broken=partial(loop.call_soon_threadsafe, self._on_signal, signal.SIGPIPE))
        # One file: one pipe for both, so that a rank's lines keep their order. Two files: nobody can see it.
        err = out if _same_file(1, 2) else Sink(2)
        say = partial(_say, err)
        with self._signals_caught(loop), self._nobody_left():
            await self._start(out, err)
            for sink in {out, err}:  # not before: the ranks are forked, and a thread may hold a lock meanwhile
                sink.start()
            async with asyncio.TaskGroup() as group:
                watchers = [group.create_task(self._watch(rank)) for rank in self._ranks if rank.running]
                await self._supervise(say)
                for watcher in watchers:
                    watcher.cancel()  # of a rank that not even the kernel can end
            await self._until(lambda: not any(rank.open_pipes for rank in self._ranks), _EOF_S)
            code = self._conclude(say)
            await self._close({out, err})
        return code

    async def _start(self, out: Sink, err: Sink) -> None:
        allow_files(5 * self._launch.world + 64)
        out_has_colours, err_has_colours = _has_colours(1), _has_colours(2)
        for rank in self._ranks:
            if self._signals:
                return
            changes = self._launch.environment(rank.number)
            await rank.start(
                self._launch.command(rank.number),
                {name: text for name, text in {**os.environ, **changes}.items() if text is not None},
                out=(out, prefix(rank.number, colour=out_has_colours)),
                err=(err, prefix(rank.number, colour=err_has_colours)),
                changed=self._changed.set,
            )

    async def _watch(self, rank: RankProcess) -> None:
        code = await rank.wait()
        self._ends.append(End(rank.number, code, rank.asked))
        self._changed.set()

    async def _supervise(self, say: Callable[[str], None]) -> None:
        """Returns when all have ended."""
        await self._until_over(lambda: self._signals or self._culprit())
        if self._missed_another():
            await self._until_over(lambda: self._signals or not self._missed_another(), _SETTLE_S)
        told, first = len(self._signals), self._culprit()
        if told:
            self._stopped_by = self._signals[0]
        if not any(rank.running for rank in self._ranks):
            return
        if first is not None and not told:
            say(f"rank {first.rank} {first}; ending the others")
        signum = self._stopped_by if self._stopped_by in _SIGNALS else signal.SIGTERM
        for rank in self._ranks:
            rank.send(signum)
        await self._until_over(lambda: len(self._signals) > told, self._launch.grace_s)
        stubborn = [rank for rank in self._ranks if rank.running]
        if stubborn:
            say(f"killing {_names(stubborn)}")
            for rank in stubborn:
                rank.kill()
            await self._until_over(lambda: False, _DEAD_S)

    def _culprit(self) -> End | None:
        """As far as is known now: output may come after the end of its process."""
        return culprit([replace(end, has_traceback=self._ranks[end.rank].tail.has_traceback) for end in self._ends])

    def _missed_another(self) -> bool:
        """Whether ranks have failed, but only such as say that another one was lost, or did not come."""
        first = self._culprit()
        return first is not None and (first.is_consequence or first.code == ExitCode.NOBODY_CAME)

    async def _until_over(self, condition: Callable[[], object], timeout_s: float | None = None) -> None:
        """Wait until it holds, or all ranks have ended, or the time has passed."""
        await self._until(lambda: condition() or not any(rank.running for rank in self._ranks), timeout_s)

    async def _until(self, condition: Callable[[], object], timeout_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

    def _conclude(self, say: Callable[[str | bytes], None]) -> int:
        if self._stopped_by is not None:
            say(f"stopped by {_NAMES.get(self._stopped_by, self._stopped_by.name)}")
            return 128 + self._stopped_by
        end = self._culprit()
        if end is None:
            return 0
        lines = self._ranks[end.rank].tail.excerpt()
        say(f"the last lines of rank {end.rank}:" if lines else f"rank {end.rank} has said nothing")
        for line in lines:
            say(line)
        say(f"rank {end.rank} {end}")
        return end.exit_code

    async def _close(self, sinks: Iterable[Sink]) -> None:
        """Wait until all is written; a signal ends that, where nobody reads."""
        loop, told, unfinished = asyncio.get_running_loop(), len(self._signals), set(sinks)

        def closed(sink: Sink) -> None:
            unfinished.discard(sink)
            self._changed.set()

        for sink in tuple(unfinished):
            sink.close(partial(loop.call_soon_threadsafe, closed, sink))
        await self._until(lambda: not unfinished or len(self._signals) > told, None)

    @contextlib.contextmanager
    def _nobody_left(self) -> Iterator[None]:
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


def _say(sink: Sink, text: str | bytes) -> None:
    sink.put(b"gradbus run: " + text.encode() if isinstance(text, str) else b"  " + text)


def _names(ranks: Sequence[RankProcess]) -> str:
    numbers = [str(rank.number) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"


def _same_file(one: int, other: int) -> bool:
    first, second = os.fstat(one), os.fstat(other)
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def _has_colours(fd: int) -> bool:
    return os.isatty(fd) and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
