"""The disks of the machines: what is on them after the power fails, and when they are full.

The files are real ones. A disk keeps what was synced: when the power of a machine fails, an unsynced file may be cut
short, empty, or whole, and an unsynced rename or removal may not have happened. The journals are left alone: they are
the notebook of those who check the run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fault_simulation.kernel import now_s, real

if TYPE_CHECKING:
    from fault_simulation.kernel import VirtualProcess


class Disk:
    """The files of one run. ``at_sync`` is called before and after each sync: the process may be killed there."""

    def __init__(self, folder: Path, rng: random.Random, at_sync: Callable[[VirtualProcess, str], None]) -> None:
        self._folder = folder
        self._rng = rng
        self._at_sync = at_sync
        self._synced: dict[int, tuple[int, int]] = {}  # by inode: size and time of change as they were synced
        self._entries: dict[Path, bytes | None] = {}  # renamed to, folder not synced: what was there; None: nothing
        self._removed: dict[Path, bytes] = {}  # the same of what was removed
        self._full_until_s: dict[str, float] = {}  # by role
        self._copies: dict[str, Path] = {}  # by role: the copy that it works with
        self.refused_s: dict[str, float] = {}  # by role: when there was no room for a sync last

    def folder_of(self, role: str) -> Path:
        """Return the folder in which an actor keeps its state."""
        return self._copies.get(role, self._folder / ("state" if role == "controller" else "clients/" + role))

    def copy_folder(self, role: str) -> None:
        """Give the next start of an actor a copy of its state, which is on the disk: the one before keeps its own."""
        before = self.folder_of(role)
        copy = before.with_name(
            f"{before.name.partition('-copy-')[0]}-copy-{len(list(before.parent.glob('*-copy-*')))}"
        )
        if before.is_dir():
            shutil.copytree(before, copy)
            for path in copy.rglob("*"):
                self._keep(path)
        self._copies[role] = copy

    def fill(self, role: str, seconds: float) -> None:
        """Leave no room for what this role syncs, for so long."""
        self._full_until_s[role] = now_s() + seconds

    def is_full(self, role: str) -> bool:
        """Return whether there is no room for what this role syncs."""
        return now_s() < self._full_until_s.get(role, 0.0)

    def full_for_s(self, role: str) -> float:
        """Return for how long there is no room for what this role syncs."""
        return max(0.0, self._full_until_s.get(role, 0.0) - now_s())

    def sync(self, process: VirtualProcess, file: int) -> None:
        """Keep the content of a file, or the entries of a folder. Raises OSError: the disk is full."""
        self._at_sync(process, "before")
        if self.is_full(process.role):
            self.refused_s[process.role] = now_s()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        status = os.fstat(file)
        if stat.S_ISDIR(status.st_mode):
            for path in [one for one in self._entries if one.parent.stat().st_ino == status.st_ino]:
                del self._entries[path]
            for path in [one for one in self._removed if one.parent.stat().st_ino == status.st_ino]:
                del self._removed[path]
        else:
            self._synced[status.st_ino] = (status.st_size, status.st_mtime_ns)
        self._at_sync(process, "after")

    def replace(self, process: VirtualProcess, source: Any, target: Any) -> None:
        """Rename a file, and remember what was there until the folder is synced."""
        path = Path(target)
        if path.is_relative_to(self.folder_of(process.role)):
            before = path.read_bytes() if path.exists() else self._removed.pop(path, None)
            self._entries.setdefault(path, before)
        real["replace"](source, target)

    def remove(self, process: VirtualProcess, target: Any) -> None:
        """Remove a file, and remember what was in it until the folder is synced."""
        path = Path(target)
        if path.is_relative_to(self.folder_of(process.role)) and path.is_file():
            content = path.read_bytes()
            self._removed[path] = self._entries.pop(path, content) or content
        real["unlink"](target)

    def lose_power(self, role: str) -> list[str]:
        """Lose what the disk need not have kept of an actor's state. Returns what was lost, in words."""
        folder, lost = self.folder_of(role), []
        for path in sorted(one for one in self._entries if one.is_relative_to(folder)):
            before = self._entries.pop(path)
            if self._rng.random() < 0.5:
                lost.append(f"the rename to {path.name}")
                if before is None:
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        real["unlink"](path)
                else:
                    path.write_bytes(before)
                    self._keep(path)
        for path in sorted(one for one in self._removed if one.is_relative_to(folder)):
            content = self._removed.pop(path)
            if self._rng.random() < 0.5 and not path.exists():
                lost.append(f"the removal of {path.name}")
                path.write_bytes(content)
                self._keep(path)
        for path in sorted(folder.rglob("*")):
            status = path.lstat()
            is_kept = self._synced.get(status.st_ino) == (status.st_size, status.st_mtime_ns)
            if stat.S_ISREG(status.st_mode) and status.st_size and not is_kept:
                kept = self._rng.choice([0, self._rng.randrange(status.st_size), status.st_size])
                os.truncate(path, kept)
                lost.append(f"{path.name} after {kept} of {status.st_size} bytes")
                self._keep(path)
        return lost

    def _keep(self, path: Path) -> None:
        status = path.stat()
        self._synced[status.st_ino] = (status.st_size, status.st_mtime_ns)
