"""Folders of finished runs, found again by what decides a run: its settings, and the code that ran.

A folder counts once ``done.json`` is in it, which is written last: a run that was interrupted is done again. Several
programs may use one store at the same time: a program that needs a run which another one is just doing waits for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradbus import actors, codecs, models, runtime
from gradbus.commands.rundir.directory import write_json
from gradbus.commands.rundir.versions import versions
from gradbus.experiments.bench.results import machine
from gradbus.experiments.figures.plan import AnyRun, settings_of
from gradbus.runtime.json_text import parse_json

# Of commands and experiments, what decides how a run goes. A changed colour or table is no reason to train again.
RUNNING = (
    "experiments.bench.processes", "experiments.bench.training", "experiments.figures.int8", "experiments.figures.runs",
    "commands.buses", "commands.files", "commands.configured_task",
    "commands.run.demo", "commands.run.federated", "commands.lifecycle",
    "commands.simulate.aggregation_plan", "commands.simulate.closed_forms", "commands.simulate.comparison",
    "commands.simulate.in_network", "commands.simulate.network", "commands.simulate.steps",
    "commands.simulate.topology", "commands.simulate.ways",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run that was done.

    Attributes:
        run: what was asked. path: the files it left. code: hash of what ran. seconds: that it took.
        machine: where, when, and under which versions.
    """

    run: AnyRun
    path: Path
    code: str
    seconds: float
    machine: dict[str, Any]


class Store:
    """The finished runs in one folder."""

    def __init__(self, root: Path, *, code: str | None = None) -> None:
        """``root`` is made when it is needed. ``code``: hash of what runs now, by default :func:`code_version`."""
        self.root = root
        self.code = code_version() if code is None else code

    def folder(self, run: AnyRun) -> Path:
        """Return where this run belongs."""
        return self.root / f"{run.label}-{_digest(settings_of(run))}-{self.code}"

    def find(self, run: AnyRun) -> StoredRun | None:
        """The run, if this code has done it to its end."""
        return _read(self.folder(run), run)

    def find_any(self, run: AnyRun) -> StoredRun | None:
        """The newest that any version of the code has done, this one's first."""
        found = [_read(path, run) for path in self.root.glob(f"{run.label}-{_digest(settings_of(run))}-*")]
        known = [one for one in found if one is not None]
        return max(known, key=lambda one: (one.code == self.code, str(one.machine.get("date", ""))), default=None)

    def ensure(self, run: AnyRun, execute: Callable[[Path], None]) -> tuple[StoredRun, bool]:
        """The run, and whether it had been done before. ``execute`` gets an empty folder to do it in.

        Raises:
            What ``execute`` raises; its folder then stays as it is, to be looked at, until the run is tried again.
        """
        with self._alone(run):
            found = self.find(run)
            if found is not None:
                return found, True
            folder = self.folder(run)
            shutil.rmtree(folder, ignore_errors=True)  # what was interrupted counts for nothing
            folder.mkdir(parents=True)
            write_json(folder / "run.json", {**settings_of(run), "code": self.code, "versions": versions()})
            started_s = time.perf_counter()
            execute(folder)
            facts = {"code": self.code, "seconds": round(time.perf_counter() - started_s, 1), "machine": machine()}
            write_json(folder / "done.json", facts)
            done = self.find(run)
            assert done is not None
            return done, False

    @contextmanager
    def _alone(self, run: AnyRun) -> Iterator[None]:
        """Keep all other programs from doing this run meanwhile. The kernel releases the lock of one that dies."""
        locks = self.root / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / self.folder(run).name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # as long as the run takes, which has its own deadline
            yield


def _read(folder: Path, run: AnyRun) -> StoredRun | None:
    try:
        facts = parse_json((folder / "done.json").read_text(encoding="utf-8"))
        return StoredRun(run, folder, str(facts["code"]), float(facts["seconds"]), dict(facts["machine"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]


def code_version() -> str:
    """Hash of the files that decide how a run goes, and of the versions of what they are built on."""
    root = Path(__file__).resolve().parents[2]
    files = [root.joinpath(*name.split(".")).with_suffix(".py") for name in RUNNING]
    for layer in (actors, codecs, models, runtime):
        assert layer.__file__ is not None
        files += Path(layer.__file__).parent.rglob("*.py")
    texts = {f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return _digest({"files": texts, "versions": versions()})
