"""The controller's allow list, as it stands in its file now.

Who replaces the file does it in one step, and who writes it by hand, or copies over it, does not: for a moment it is
empty, then a part of it is there. Who is not in that part would be removed. So a list is used when two looks have found
the same file, and never one of no bytes: a list of nobody has a line that says so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.security.identity.allow_list import AllowList, load_allow_list


class _Stamp(NamedTuple):
    """What changes when a file is replaced or written. Its owner can set the time of a change back, and programs that
    copy files do; ``ctime_ns`` is the kernel's own, which nobody can set."""

    ctime_ns: int
    mtime_ns: int
    device: int
    inode: int
    size: int


class AllowListWatcher:
    """The file, and which state of it was read last.

    Attributes:
        allowed: the list, as it was when it could be read last.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: it cannot be read, or is no list."""
        self._path = path
        self._seen = self._looked = self._stamp()  # before it is read: what changes meanwhile is found at the next look
        self.allowed = self._read(self._seen)

    @property
    def is_changing(self) -> bool:
        """Whether the last look has found another state than was read last."""
        return self._looked != self._seen

    def news(self) -> AllowList | None:
        """Another list than was read last; None: the file is as it was, or was another one at the last look. Raises
        ConfigError, once for each state."""
        before, self._looked = self._looked, self._stamp()
        if not self.is_changing or self._looked != before:
            return None
        self._seen = self._looked
        allowed = self._read(self._seen)
        if self._stamp() != self._seen:
            return None  # it was changed in the midst of that
        self.allowed = allowed
        return allowed

    def _read(self, stamp: _Stamp | None) -> AllowList:
        if stamp is not None and not stamp.size:
            raise ConfigError(
                f"allow list {self._path} is empty. A list of nobody has a comment in it, as 'gradbus keys remove' "
                f"leaves it; 'gradbus keys allow' makes a new list"
            )
        return load_allow_list(self._path)

    def _stamp(self) -> _Stamp | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return _Stamp(status.st_ctime_ns, status.st_mtime_ns, status.st_dev, status.st_ino, status.st_size)
