"""The lines that a file gains while another process writes it: each is read once."""

from __future__ import annotations

import os
from pathlib import Path

from gradbus.commands.rundir.reading import reason
from gradbus.runtime.foreign_files import MAX_LINE_BYTES, open_inside

_STEP_BYTES = 1 << 20


class GrowingFile:
    """Follows one file.

    Of a file that is there already, at most the last ``max_bytes`` are read, from the next line on. A file that is
    replaced by another, or becomes shorter, is read anew.

    Attributes:
        name: as it was given.
        changed_s: when the file was last written, in seconds since the epoch; 0 while there is none.
        refused: why the file is not read, as a clause; "" where it is, or is not there.
    """

    def __init__(self, folder: Path, name: str, *, max_bytes: int) -> None:
        """``name``: relative to the folder. Links are not followed, and nothing but a regular file is read."""
        self._folder = folder
        self.name = name
        self._max_bytes = max_bytes
        self._inode = -1
        self._at = 0
        self._rest = b""
        self._skips = False  # up to the next line end: the line began before what is read
        self.changed_s = 0.0
        self.refused = ""

    def new_lines(self) -> tuple[bool, list[str]]:
        """Whether the file is another one than before, so that what was read does not count; and its new lines.

        A line that has no end yet waits for it. One that is too long is left out. At most ``max_bytes`` are read.
        """
        try:
            opened = open_inside(self._folder, self.name)
        except OSError as error:
            self.refused = "" if isinstance(error, FileNotFoundError) else reason(error)
            was_there, self._inode, self.changed_s = self._inode >= 0, -1, 0.0
            return was_there, []
        self.refused = ""
        with opened as file:
            now = os.fstat(file.fileno())
            self.changed_s = now.st_mtime
            is_anew = now.st_ino != self._inode or now.st_size < self._at
            if is_anew:
                self._inode, self._rest = now.st_ino, b""
                self._at = max(0, now.st_size - self._max_bytes)
                self._skips = self._at > 0
            lines: list[str] = []
            file.seek(self._at)
            end = self._at + self._max_bytes
            while self._at < end and (some := file.read(min(_STEP_BYTES, end - self._at))):
                self._at += len(some)
                lines += self._split(some)
        return is_anew, lines

    def _split(self, some: bytes) -> list[str]:
        *whole, self._rest = (self._rest + some).split(b"\n")
        if self._skips and whole:
            whole, self._skips = whole[1:], False
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest, self._skips = b"", True
        return [line.decode("utf-8", errors="replace") for line in whole if line.strip()]
