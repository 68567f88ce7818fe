"""Where the log goes while a table is on the screen: into a file, with the last warnings kept for the table."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from gradbus.runtime import logs

_HIDDEN = {"event", "level", "timestamp", "source", "traceback", "exception"}


class LogFile:
    """A text stream that takes JSON log lines.

    Attributes:
        warnings: the last warnings and errors, as short lines for people.
    """

    def __init__(self, file: TextIO, on_warning: Callable[[str], None] | None = None) -> None:
        self._file = file
        self._on_warning = on_warning
        self.warnings: deque[str] = deque(maxlen=5)

    def write(self, text: str) -> int:
        self._file.write(text)
        for line in text.splitlines():
            if '"level": "warning"' in line or '"level": "error"' in line:
                self.show(readable(line))
        return len(text)

    def show(self, line: str) -> None:
        """Show this line to the user, too."""
        self.warnings.append(line)
        if self._on_warning is not None:
            self._on_warning(line)

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
        entry: dict[str, Any] = json.loads(line)
    except ValueError:
        return line
    details = " ".join(f"{key}={value}" for key, value in entry.items() if key not in _HIDDEN)
    return f"{entry.get('event', '')} {details}".strip()
