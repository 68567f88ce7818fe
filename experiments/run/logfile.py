"""Where the log goes while a table is on the screen: into a file, with the last warnings kept for the table."""

from __future__ import annotations

import contextlib
import textwrap
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import TextIO

from gradbus.runtime import logs
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.plain_text import plain_line, plain_text

_HIDDEN = {"event", "level", "timestamp", "source", "traceback", "exception"}


class LogFile:
    """A text stream that takes JSON log lines.

    Attributes:
        warnings: the last warnings and errors, as short lines for people.
    """

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
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # of another kind than ours: it is in the file
            self._on_traceback(textwrap.indent(plain_text(parse_json(line)["traceback"]), "  "))

    def flush(self) -> None:
        self._file.flush()

    def isatty(self) -> bool:
        return False


@contextlib.contextmanager
def logging_to(stream: LogFile, *, level: str, back_to: Callable[[], None]) -> Iterator[None]:
    """Send the log there meanwhile; ``back_to`` sets up what comes after."""
    # The log's set-up takes sys.stderr as it finds it.
    with contextlib.redirect_stderr(stream):
        logs.configure(level=level, style="json")
    try:
        yield
    finally:
        back_to()


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
