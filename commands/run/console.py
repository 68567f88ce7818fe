"""The terminal of a command: lines for the user, and the log while a table is on the screen."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console

from gradbus.commands.choices import LogLevel, LogStyle
from gradbus.runtime import logs
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.plain_text import plain_line, plain_text

_HIDDEN = {"event", "level", "timestamp", "source", "traceback", "exception"}


@dataclass(frozen=True, slots=True)
class Screen:
    """The terminal of a command, and its log. ``live``: with a table that follows the run."""

    live: bool
    level: LogLevel | None = "info"  # None: for the command to choose
    style: LogStyle = "auto"
    console: Console = field(default_factory=Console)

    @property
    def table(self) -> bool:
        """Whether there will be a table: not where log lines of some style are asked for."""
        return self.live and self.style == "auto" and self.console.is_terminal and not self.console.is_dumb_terminal

    def configure_logs(self) -> None:
        """Log to stderr."""
        logs.configure(level=self.level or "info", style=self.style)

    @contextlib.contextmanager
    def logging_to(self, log: LogFile) -> Iterator[None]:
        """Send the log to the file meanwhile."""
        # The log's set-up takes sys.stderr as it finds it.
        with contextlib.redirect_stderr(log):
            logs.configure(level=self.level or "info", style="json")
        try:
            yield
        finally:
            self.configure_logs()

    def log_file(self, file: TextIO, *, hidden: Collection[str] = ()) -> LogFile:
        """The log of a run; its warnings are lines on stderr where there is no table, but for ``hidden`` events."""
        if self.table:  # rich puts the lines above the table
            return LogFile(file, None, self.say, hidden=hidden)
        return LogFile(file, lambda line: _to_stderr(f"warning: {plain_line(line)}"), _to_stderr, hidden=hidden)

    def say(self, text: str) -> None:
        """A line for the user."""
        self.console.print(plain_text(text), markup=False, highlight=False, soft_wrap=True)


def _to_stderr(text: str) -> None:
    print(plain_text(text), file=sys.stderr)


class LogFile:
    """A text stream that takes JSON log lines. ``warnings``: the last warnings and errors, as short lines."""

    def __init__(
        self,
        file: TextIO,
        on_warning: Callable[[str], None] | None = None,
        on_traceback: Callable[[str], None] | None = None,
        *,
        hidden: Collection[str] = (),
    ) -> None:
        """``on_warning``: gets these lines, but for events that are ``hidden``. ``on_traceback``: gets the traceback of
        an error elsewhere, many lines."""
        self._hidden = [f'"event": "{event}"' for event in hidden]
        self._file = file
        self._on_warning = on_warning
        self._on_traceback = on_traceback
        self.warnings: deque[str] = deque(maxlen=5)

    def write(self, text: str) -> int:
        self._file.write(text)
        for line in text.splitlines():
            worth_showing = '"level": "warning"' in line or '"level": "error"' in line
            if worth_showing and not any(event in line for event in self._hidden):
                self.show(readable(line))
                self._show_traceback(line)
        return len(text)

    def show(self, line: str) -> None:
        """Show this line to the user, too."""
        line = plain_line(line)
        self.warnings.append(line)
        if self._on_warning is not None:
            self._on_warning(line)

    def _show_traceback(self, line: str) -> None:
        if self._on_traceback is None or '"traceback": "' not in line:
            return
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # not a line of this logger
            self._on_traceback(textwrap.indent(plain_text(parse_json(line)["traceback"]), "  "))

    def flush(self) -> None:
        self._file.flush()

    def isatty(self) -> bool:
        return False


def readable(line: str) -> str:
    """A JSON log line as a person reads it: what happened, then the details. Other lines stay as they are."""
    try:
        entry = parse_json(line)
    except ValueError:
        return line
    if not isinstance(entry, dict):
        return line
    details = " ".join(f"{key}={value}" for key, value in entry.items() if key not in _HIDDEN)
    return f"{entry.get('event', '')} {details}".strip()
