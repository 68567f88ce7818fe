"""The runs below a folder, found by what their directories hold."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from pathlib import Path

from gradbus.commands.dashboard.following import Following
from gradbus.commands.rundir.reading import Kind, kind_if_any
from gradbus.runtime.errors import ConfigError

MAX_RUNS = 100  # newest ones, that are listed
_MAX_ENTRIES = 10_000  # of the folder, that are looked at
_LOOK_EVERY_S = 1.0


class Runs:
    """Runs by name: those directly in a folder, or the one that the folder itself is. For any number of threads.

    A name is looked up among those that were found, and never made into a path; links are left out.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError: there is no such folder, or it cannot be read."""
        if not folder.is_dir():
            what = "is a file, not a directory" if folder.exists() else "does not exist"
            raise ConfigError(f"{folder} {what}. Name the folder of your runs, such as runs, or the directory of one")
        self.folder = folder.resolve()
        self._lock = threading.Lock()
        self._found: OrderedDict[str, tuple[Path, Kind]] = OrderedDict()  # newest first
        self._known: dict[str, Following] = {}
        self._kinds: dict[Path, tuple[_Seen, Kind | None]] = {}
        self._looked_s = -_LOOK_EVERY_S
        self._is_one_run = kind_if_any(self.folder) is not None
        try:
            os.scandir(self.folder).close()
        except OSError as error:
            raise ConfigError(f"{folder} cannot be read: {error.strerror}") from None

    def names(self) -> list[str]:
        """The newest runs, newest first."""
        with self._lock:
            self._look()
            return list(self._found)

    def open(self, name: str) -> Following | None:
        """The run of this name, as it stands now; None: there is none."""
        with self._lock:
            if name not in self._found:
                self._look()
            if name not in self._found:
                return None
            path, kind = self._found[name]
            run = self._known.get(name)
            if run is None or run.files.kind != kind:
                run = self._known[name] = Following(path, kind)
            run.refresh()
            return run

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        paths = [self.folder] if self._is_one_run else list(self._inside())
        newest = sorted(((_written_s(path), path) for path in paths), reverse=True)
        found: OrderedDict[str, tuple[Path, Kind]] = OrderedDict()
        kinds: dict[Path, tuple[_Seen, Kind | None]] = {}
        for _, path in newest:
            if len(found) == MAX_RUNS:
                break
            kinds[path] = self._kind_of(path)
            kind = kinds[path][1]
            if kind is not None:
                found[path.name] = (path, kind)
        self._found, self._kinds = found, kinds
        for name in self._known.keys() - found.keys():
            del self._known[name]

    def _kind_of(self, path: Path) -> tuple[_Seen, Kind | None]:
        """The kind of a run, if there is one, and what it depends on: it is found out once, not at each look."""
        seen = tuple(_identity(one) for one in (path, path / "config.json"))
        known = self._kinds.get(path)
        return known if known is not None and known[0] == seen else (seen, kind_if_any(path))

    def _inside(self) -> list[Path]:
        try:
            with os.scandir(self.folder) as entries:
                names = [
                    entry.name
                    for _, entry in zip(range(_MAX_ENTRIES), entries, strict=False)
                    if entry.is_dir(follow_symlinks=False)
                ]
        except OSError:
            return []
        return [self.folder / name for name in names if name.isprintable() and not name.startswith(".")]


_Seen = tuple[tuple[int, int, int] | None, ...]


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _written_s(path: Path) -> float:
    """When something was last written to the run, in seconds since the epoch; 0: that is not known."""
    newest = 0.0
    for name in ("", "rounds.jsonl", "epochs.jsonl", "history/controller.jsonl", "history/rank-0.jsonl"):
        try:
            newest = max(newest, (path / name).lstat().st_mtime)
        except OSError:
            continue
    return newest
