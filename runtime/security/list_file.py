"""The controller's allow list, as it stands in its file now."""

from __future__ import annotations

import os
from pathlib import Path

from gradbus.runtime.security.allow_list import AllowList, load_allow_list


class ListFile:
    """The file, and which state of it was read last.

    Attributes:
        allowed: the list, as it was when it could be read last.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: it cannot be read, or is no list."""
        self._path = path
        self.allowed = self._read()

    def _read(self) -> AllowList:
        self._seen = self._stamp()  # before it is read: what changes meanwhile is found at the next look
        return load_allow_list(self._path)

    def news(self) -> AllowList | None:
        """Another list than was read last; None: the file is as it was. Raises ConfigError, once for each state."""
        if self._stamp() == self._seen:
            return None
        self.allowed = self._read()
        return self.allowed

    def _stamp(self) -> tuple[int, int, int] | None:
        """What changes when a file is replaced or written."""
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size
