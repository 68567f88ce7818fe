"""The lines that a file gains while another process writes it: each is read once."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gradbus.runtime.json_text import MAX_LINE_CHARS

_STEP_BYTES = 1 << 20


def open_regular(path: Path) -> int:
    """A descriptor of a regular file, for reading; the caller closes it.

    Raises:
        OSError: there is none. It is also raised for links, pipes and devices, which may lead elsewhere or never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return descriptor


def read_regular(path: Path, max_bytes: int) -> str:
    """The text of a regular file. Raises OSError: there is none. ValueError: it is larger, or not UTF-8."""
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"more than {max_bytes} bytes")
    return data.decode("utf-8")


class GrowingFile:
    """Follows one file.

    Of a file that is there already, at most the last ``max_bytes`` are read, from the next line on. A file that is
    replaced by another, or becomes shorter, is read anew.

    Attributes:
        changed_s: when the file was last written, in seconds since the epoch; 0 while there is none.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._inode = -1
        self._at = 0
        self._rest = b""
        self._skips = False  # up to the next line end: the line began before what is read
        self.changed_s = 0.0

    def new_lines(self) -> tuple[bool, list[str]]:
        """Whether the file is another one than before, so that what was read does not count; and its new lines.

        A line that has no end yet waits for it. One that is too long is left out. At most ``max_bytes`` are read.
        """
        try:
            descriptor = open_regular(self._path)
        except OSError:
            was_there, self._inode, self.changed_s = self._inode >= 0, -1, 0.0
            return was_there, []
        with os.fdopen(descriptor, "rb") as file:
            now = os.fstat(descriptor)
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
        if len(self._rest) > MAX_LINE_CHARS:
            self._rest, self._skips = b"", True
        return [line.decode("utf-8", errors="replace") for line in whole if line.strip()]
