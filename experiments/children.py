"""Client processes of a demo: started, watched, and ended, one by one and by their own id."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from gradbus.experiments.run.lifecycle import before_abort

_KILL_AFTER_S = 3.0


@dataclass(frozen=True, slots=True)
class Child:
    """One process. ``log``: the file with its stdout and stderr."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    def last_lines(self, count: int = 5) -> list[str]:
        """The end of its log."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 8192))
            return file.read().decode(errors="replace").splitlines()[-count:]


class Children:
    """Processes that do not outlive the ``async with`` block."""

    def __init__(self) -> None:
        self.all: list[Child] = []

    async def __aenter__(self) -> Self:
        before_abort.append(self._kill)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            await self._end()
        finally:
            self._kill()  # also when this wait is cancelled
            before_abort.remove(self._kill)

    async def start(self, name: str, arguments: Sequence[str], log: Path) -> Child:
        """Run ``gradbus ARGUMENTS`` in a new process, its output in ``log``.

        It gets a session of its own, so that Ctrl-C in the terminal reaches the parent alone, which ends all in order.
        """
        environment = {key: text for key, text in os.environ.items() if not _is_setting(key)}
        with log.open("wb") as output:
            # -P: Python would put the current directory in front of everything that is installed.
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "gradbus", *arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=environment,
            )  # fmt: skip
        child = Child(name, process, log)
        self.all.append(child)
        return child

    async def watch(self, ended: Callable[[Child, int], None]) -> None:
        """Call ``ended`` with each child that ends and its exit code. Returns when all have."""

        async def wait(child: Child) -> None:
            ended(child, await child.process.wait())

        async with asyncio.TaskGroup() as group:
            for child in self.all:
                group.create_task(wait(child), name=f"watch-{child.name}")

    async def finish(self, timeout_s: float) -> None:
        """Wait for all to end by themselves, for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wait_all()

    async def _end(self) -> None:
        for child in self._running():
            with contextlib.suppress(ProcessLookupError):
                child.process.terminate()
        await self.finish(_KILL_AFTER_S)
        self._kill()
        await self._wait_all()

    async def _wait_all(self) -> None:
        for child in self.all:
            await child.process.wait()

    def _running(self) -> list[Child]:
        return [child for child in self.all if child.process.returncode is None]

    def _kill(self) -> None:
        for child in self._running():
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()


def _is_setting(name: str) -> bool:
    """Whether the variable holds a setting: the children's files say already what is in force."""
    return name.startswith("GRADBUS_") and "__" in name
