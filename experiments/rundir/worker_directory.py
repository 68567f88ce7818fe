"""The directory of a data-parallel run. Ranks that see the same directory share it.

Rank 0 writes ``config.json`` (the run can be started again from it), ``epochs.jsonl`` (a line for each, as they come),
``summary.json``, ``accuracy.png``, and ``trace.json``: the traces of all ranks that share the directory, as one. Every
rank writes its windows of the profile, ``trace-rank-R.json``, and its checkpoints in ``state/``.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradbus.experiments.files import OF_CLIENTS, WorkerFile
from gradbus.experiments.rundir.directory import MAX_FILE_BYTES, about_this_program, json_text, write_json
from gradbus.experiments.rundir.traces import trace_of
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import lines_of, parse_json, read_text
from gradbus.runtime.private_folder import keep_private, make_private

if TYPE_CHECKING:
    from gradbus.actors.data_parallel.report import EpochReport
    from gradbus.runtime.config.data_parallel import DataParallelConfig

_MARK = ".rank-0"
_MAX_MARK_BYTES = 64


class WorkerDirectory:
    """Writes what one rank leaves.

    Attributes:
        path: the directory.
    """

    def __init__(self, path: Path, rank: int) -> None:
        """Make the directory if need be. Raises ConfigError: it cannot be written."""
        self.path = path
        self._rank = rank
        self._written = False
        try:
            make_private(path, tell=rank == 0)
            if rank == 0:
                (path / _MARK).write_text(secrets.token_hex(16))
            for folder in (self.state, self.history):
                keep_private(folder)
        except OSError as error:
            raise ConfigError(
                f"run directory {path} cannot be written: {error.strerror}. Name another (--run-dir)"
            ) from None

    @property
    def state(self) -> Path:
        """Where the checkpoints of the run go."""
        return self.path / "state"

    @property
    def history(self) -> Path:
        """Where what happened is noted, for ``gradbus check``."""
        return self.path / "history"

    @property
    def mark(self) -> str:
        """Random, and new with every start of rank 0: who reads the same at this path sees the same directory."""
        return _mark_in(self.path)

    @classmethod
    def meet(cls, told: Mapping[str, str], own: Path | None, rank: int) -> WorkerDirectory:
        """For a rank other than 0: that of rank 0 if it can be seen here, else its own, else one of the same name.

        Args:
            told: by rank 0, from :meth:`invitation`.
        """
        seen = Path(told["path"])
        if (mark := _mark_in(seen)) and mark == told["mark"]:
            return cls(seen, rank)
        return cls(own or Path("runs", seen.name), rank)

    def invitation(self) -> dict[str, str]:
        """What the other ranks need to find this directory."""
        return {"path": str(self.path.absolute()), "mark": self.mark}

    def write_config(self, file: WorkerFile) -> None:
        """Keep the settings in force, as a file that can be read again, by any rank."""
        unset = {"threads"} - file.task.model_fields_set  # how many it were depends on the machine
        values = file.model_dump(mode="json", exclude={"rank": True, "task": set(OF_CLIENTS) | unset})
        write_json(self.path / "config.json", values)

    def add(self, report: EpochReport) -> None:
        """Append the report of an epoch. What an earlier start has done after the checkpoint it was resumed from is
        taken out: it did not happen."""
        path = self.path / "epochs.jsonl"
        before = [] if self._written else [line for line in _lines(path) if parse_json(line)["epoch"] < report.epoch]
        with path.open("a" if self._written else "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in [*before, json_text(report.to_json())])
        self._written = True

    def is_finished(self, rules: DataParallelConfig) -> bool:
        """Whether all that these rules ask for is done and written down. Nothing is written."""
        if not rules.resume:
            return False
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # what is wrong there others say better
            summary = parse_json(read_text(self.path / "summary.json", MAX_FILE_BYTES))
            steps = int(summary["steps"])
            enough = int(summary["epochs"]) >= rules.epochs or (
                rules.max_steps is not None and steps >= rules.max_steps
            )
            saved = (rules.state_dir or self.state) / "rank-0" / f"round-{steps:06d}.json"
            return enough and summary["outcome"] == "done" and saved.exists() and (self.path / "epochs.jsonl").exists()
        return False

    @property
    def trace(self) -> Path:
        """The timeline of this rank, for chrome://tracing or ui.perfetto.dev."""
        return trace_of(self.path, self._rank)

    def finish(self, **entries: Any) -> None:
        """Write the summary."""
        write_json(self.path / "summary.json", {**entries, **about_this_program()})


def _mark_in(folder: Path) -> str:
    """The mark there; "" if there is none, or something else by its name."""
    with contextlib.suppress(OSError, ValueError):
        return read_text(folder / _MARK, _MAX_MARK_BYTES)
    return ""


def _lines(path: Path) -> list[str]:
    """Of a file of reports, without what is cut off."""
    if not path.exists():
        return []
    lines = []
    for line in (text.rstrip("\n") for text in lines_of(path)):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            parse_json(line)["epoch"]
            lines.append(line)
    return lines
