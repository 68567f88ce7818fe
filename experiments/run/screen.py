"""Which display a command gets, and where its log goes then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console

from gradbus.experiments.cli.choices import LogLevel, LogStyle
from gradbus.experiments.files import ControllerFile
from gradbus.experiments.run.live import Display, LiveTable, PlainLines
from gradbus.experiments.run.logfile import LogFile, logging_to
from gradbus.experiments.rundir.directory import RunDirectory
from gradbus.runtime import logs
from gradbus.runtime.plain_text import plain_line, plain_text

if TYPE_CHECKING:
    from gradbus.actors import Controller


@dataclass(frozen=True, slots=True)
class Screen:
    """What the user wants to see.

    Attributes:
        live: a table that follows the run; it needs a terminal.
    """

    live: bool
    level: LogLevel = LogLevel.INFO
    style: LogStyle = LogStyle.AUTO
    console: Console = field(default_factory=Console)

    @property
    def table(self) -> bool:
        """Whether there will be a table."""
        return self.live and self.console.is_terminal and not self.console.is_dumb_terminal

    def configure_logs(self) -> None:
        """Log to stderr."""
        logs.configure(level=self.level.value, style=self.style.value)

    def log_file(self, run: RunDirectory, *, hidden: Collection[str] = ()) -> LogFile:
        """The log of this run; its warnings are lines on stderr where there is no table, but for ``hidden`` events."""
        if self.table:  # rich puts the lines above the table
            return LogFile(run.log, None, self.say, hidden=hidden)
        return LogFile(
            run.log, lambda line: print(f"warning: {plain_line(line)}", file=sys.stderr), _to_stderr, hidden=hidden
        )

    def logging(self, log: LogFile) -> AbstractContextManager[None]:
        """Send the log there meanwhile."""
        return logging_to(log, level=self.level.value, back_to=self.configure_logs)

    def display(self, log: LogFile, file: ControllerFile) -> Callable[[Controller], Display]:
        """Makes the display of a controller."""
        if self.table:
            title, clients = f"job {file.bus.job}", file.federated.num_clients or 0
            return lambda controller: LiveTable(self.console, controller.progress, log, title, clients)
        return lambda controller: PlainLines(self.console, controller.progress)

    def silent(self) -> Callable[[Controller], Display]:
        """Makes a display that shows nothing: the log says it all."""
        return lambda controller: PlainLines(Console(quiet=True), controller.progress)

    def say(self, text: str) -> None:
        """A line for the user."""
        self.console.print(plain_text(text), markup=False, highlight=False, soft_wrap=True)


def _to_stderr(text: str) -> None:
    print(plain_text(text), file=sys.stderr)
