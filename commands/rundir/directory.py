"""The directory of a run: its settings and results, in files that other programs can read; docs/report.md lists them.

Ranks that see the directory of rank 0 share it. The directory is its owner's alone, and each file is replaced as a
whole: a reader finds, also after a crash, the old file or the new one.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import platform
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self, TextIO, TypeVar

from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.federated.client_names import NAMES_FILE, ClientNames, json_rows
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.commands.files import CLIENT_ONLY_SETTINGS, WorkerFile
from gradbus.commands.rundir.traces import trace_of
from gradbus.commands.rundir.versions import machine, versions
from gradbus.commands.rundir.whole_run import totals
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.foreign_files import (
    FileRefused,
    check_no_link,
    check_replaceable,
    clear_way,
    is_there,
    open_inside,
    open_to_append,
    own_lines,
    text_inside,
)
from gradbus.runtime.json_text import json_text, parse_json
from gradbus.runtime.logs import get_logger
from gradbus.runtime.private_folder import keep_private, make_private

if TYPE_CHECKING:
    from gradbus.actors.data_parallel.report import WorkerSummary
    from gradbus.actors.federated.controller.evaluation import CrossSite
    from gradbus.runtime.config.data_parallel import DataParallelConfig
    from gradbus.runtime.config.federated import FederatedConfig
    from gradbus.runtime.profiling.summary import ProfileSummary

MAX_FILE_BYTES = 16 << 20  # of what is read again
MAX_CHECKPOINT_BYTES = 256 << 20  # of the JSON of a checkpoint
_MARK = ".rank-0"
_MAX_MARK_BYTES = 64

log = get_logger("cli")

C = TypeVar("C", "FederatedConfig", "DataParallelConfig")


class RunDirectory:
    """Holds what the directories of all runs have in common. ``summary``: as it was written, once it was."""

    reports_file: str  # a report a line

    def __init__(self, path: Path, *, tell: bool = True) -> None:
        """Make the directory if need be. ``tell``: log a line if others can read it.

        Raises:
            ConfigError: it cannot be written, or one of its folders is a link: the run would write, and remove old
                checkpoints, wherever that leads, and somebody else may have made the directory.
        """
        self.path = path
        self.summary: dict[str, Any] = {}
        with _writing(path):
            make_private(path, tell=tell)
            for folder, setting in ((self.state, "checkpoint.dir"), (self.history, "history.dir")):
                _check_no_link(folder, setting)
                keep_private(folder)

    @property
    def state(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / "state"

    @property
    def history(self) -> Path:
        """The folder of the run's events, for ``gradbus check``."""
        return self.path / "history"

    def settled(self, config: C) -> C:
        """The settings, with the folders of this directory where they name none."""
        for group, folder in (("checkpoint", self.state), ("history", self.history)):
            if getattr(config, group).dir is None:
                config = config.replaced(f"{group}.dir", folder)
        return config

    @contextlib.contextmanager
    def _unless_full(self, what: str, **more: Any) -> Iterator[None]:
        """Log what is not written, where the disk is full: what the run does, or how it has ended, matters more than
        these files. It is in the memory of its processes, and in their checkpoints."""
        try:
            yield
        except OSError as error:
            log.warning("not written", what=what, path=str(self.path), error=error.strerror, **more)

    def write_reports(self, lines: Iterable[str], *, anew: bool) -> None:
        path = self.path / self.reports_file
        if anew:
            write_text(path, lines)
        else:
            with os.fdopen(open_to_append(path), "a", encoding="utf-8") as file:
                file.writelines(lines)

    def write_summary(self, **entries: Any) -> None:
        self.summary = {
            **entries, "versions": versions(), "machine": machine(), "platform": platform.platform(),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }  # fmt: skip
        write_json(self.path / "summary.json", self.summary)


class ControllerDirectory(RunDirectory):
    """The directory of a federated run. A context manager, for ``log``: controller.log, open for appending."""

    reports_file = "rounds.jsonl"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._written = 0
        self._of: Sequence[RoundReport] = ()  # the list that this many are of
        self.cross_site: CrossSite | None = None  # once it was written
        self._names: list[dict[str, str]] = []  # as they were written
        self.log = open_log(path, "controller.log")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.close()

    def write_config(self, values: Any) -> None:
        """Keep the settings in force."""
        write_json(self.path / "config.json", values)

    def add(self, reports: Sequence[RoundReport]) -> None:
        """Append what is new in the history of the run.

        The first call writes the file anew: after a resume the controller's history counts, also for a round that was
        committed just before the process died. But a checkpoint lacks what came after it in its round (bytes and
        seconds of sending, accuracy), timelines, and rounds of long ago: so a row of a round with the same model stays
        as it was, and what only the history has is added.

        Where the disk is full, that is logged, and the next call writes the file anew.
        """
        written, self._written = self._written, 0  # if this fails, the last line may be cut off
        with self._unless_full("rounds"):
            if written and reports is self._of:  # another list is that of another run, as a site may begin
                self.write_reports(map(_line, reports[written:]), anew=False)
            else:
                is_new = not is_there(self.path, self.reports_file)
                with io.BytesIO() if is_new else open_inside(self.path, self.reports_file) as old:
                    self.write_reports(_merged(old, reports), anew=True)
            self._written, self._of = len(reports), reports

    def write_cross_site(self, found: CrossSite) -> None:
        """Keep the table of a cross-site evaluation, for programs and for spreadsheets. Where the disk is full, that is
        logged."""
        names = found.names()
        self.cross_site = found
        rows = [["model", "client", "samples", *map(_cell, names), "missing"]]
        for row in found.rows:
            model = "global" if row.model is None else str(row.model)
            for client_id in found.clients:
                metrics = row.results.get(client_id, {})
                cells = [str(metrics[name]) if name in metrics else "" for name in names]
                why = "" if client_id in row.results else row.failure or row.missing.get(client_id, "")
                rows.append([model, str(client_id), str(row.num_samples.get(client_id, "")), *cells, _cell(why)])
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        with self._unless_full("cross-site evaluation"):
            write_json(self.path / "cross_site.json", found.to_json())
            write_text(self.path / "cross_site.csv", [text.getvalue()])

    def write_names(self, names: ClientNames) -> None:
        """Keep the names of clients, if there are new ones. Where the disk is full, that is logged."""
        rows = json_rows(names)
        if rows != self._names:
            self._names = rows
            with self._unless_full("names of clients"):
                write_json(self.path / NAMES_FILE, {"names": rows})

    def finish(self, reports: Sequence[RoundReport], *, outcome: str, seconds: float, **more: Any) -> None:
        """Write the summary. Where the disk is full, that is logged.

        Args:
            outcome: done, stopped or failed. seconds: of this start.
        """
        with self._unless_full("summary"):
            is_written = self._written and is_there(self.path, self.reports_file)
            sums = totals(self._rows() if is_written else reports)
            self.write_summary(outcome=outcome, **sums, wall_s=round(seconds, 3), **more)

    def _rows(self) -> Iterator[RoundReport]:
        """The rounds as they stand in the file, without what names clients: more than the controller remembers."""
        known = {field.name for field in fields(RoundReport)}
        with open_inside(self.path, self.reports_file) as file:
            for _, line in own_lines(file):
                entry = parse_json(line.decode())
                yield RoundReport.from_json(
                    {key: value for key, value in entry.items() if key in known}
                ).without_clients()


class WorkerDirectory(RunDirectory):
    """The directory that one rank writes to."""

    reports_file = "epochs.jsonl"

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, tell=rank == 0)
        self._rank = rank
        self._written = False
        self._unwritten: dict[int, str] = {}  # lines by epoch, of reports that could not be written
        if rank == 0:
            with _writing(path):
                clear_way(path / _MARK)
                (path / _MARK).write_text(secrets.token_hex(16))

    @classmethod
    def meet(cls, invitation: Mapping[str, str], own: Path | None, rank: int) -> WorkerDirectory:
        """The directory of another rank: that of rank 0 if it is visible here, else its own, else one of that name."""
        seen = Path(invitation["path"])
        if (mark := _mark_in(seen)) and mark == invitation["mark"]:
            return cls(seen, rank)
        return cls(own or Path("runs", seen.name), rank)

    def invitation(self) -> dict[str, str]:
        """The path for the other ranks, and a random mark in it, new with every start: ranks that read it share it."""
        return {"path": str(self.path.absolute()), "mark": _mark_in(self.path)}

    def write_config(self, file: WorkerFile) -> None:
        """Keep the settings in force, as a file that can be read again, by any rank."""
        unset = {"threads"} - file.task.model_fields_set  # how many it were depends on the machine
        # What the settings do not name, the task may bring: named here, it would be that of the settings the next time.
        of_task = {"optimizer", "schedule"} - file.parallel.model_fields_set
        exclude: Any = {"rank": True, "task": set(CLIENT_ONLY_SETTINGS) | unset, "parallel": of_task}
        values = file.model_dump(mode="json", exclude=exclude)
        write_json(self.path / "config.json", values)

    def add(self, report: EpochReport) -> None:
        """Append the report of an epoch. Epochs of an earlier start behind its checkpoint are removed.

        Where the disk is full, that is logged, and it is written with the next one.
        """
        self._unwritten[report.epoch] = _line(report)
        lines, anew = self._unwritten, not self._written
        if anew:
            before = (entry for entry in self._entries() if entry["epoch"] < report.epoch)
            lines = lines | {entry["epoch"]: json_text(entry) + "\n" for entry in before}
        self._written = False  # if this fails, its last line may be cut off: the next one writes the file anew
        with self._unless_full("report", epoch=report.epoch):
            self.write_reports([lines[epoch] for epoch in sorted(lines)], anew=anew)
            self._written = True
            self._unwritten.clear()

    def reports(self) -> list[EpochReport]:
        """The epochs of all starts of the run."""
        return [EpochReport.from_json(entry) for entry in self._entries()]

    def _entries(self) -> list[dict[str, Any]]:
        """The lines of the file of reports, without what is cut off."""
        entries: list[dict[str, Any]] = []
        if not is_there(self.path, self.reports_file):
            return entries
        with open_inside(self.path, self.reports_file) as file:
            for _, line in own_lines(file):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    entry = parse_json(line.decode())
                    entry["epoch"] + 0  # a number, in an object
                    entries.append(entry)
        return entries

    def is_finished(self, rules: DataParallelConfig, folder: str = "rank-0") -> bool:
        """Whether all that these rules ask for is done and written down. Nothing is written. ``folder``: of the
        checkpoints."""
        if not rules.checkpoint.resume:
            return False
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # others report what is wrong there
            summary = _summary_in(self.path)
            steps = int(summary["steps"])
            enough = int(summary["epochs"]) >= rules.epochs or (
                rules.max_steps is not None and steps >= rules.max_steps
            )
            saved = (rules.checkpoint.dir or self.state) / folder / f"round-{steps:06d}.json"
            written = (self.path / self.reports_file).exists()
            return enough and summary["outcome"] == "done" and saved.exists() and written
        return False

    @property
    def trace(self) -> Path:
        """The timeline of this rank, for chrome://tracing or ui.perfetto.dev."""
        return trace_of(self.path, self._rank)

    def finish(
        self,
        summary: WorkerSummary,
        *,
        outcome: str,
        seconds: float,
        profiles: Sequence[ProfileSummary] = (),
        **more: Any,
    ) -> None:
        """Write the summary, with the best accuracy of all epochs of the run. Where the disk is full, that is logged.

        Args:
            summary: of this rank. outcome: done, left, stopped or failed. seconds: of this start.
            profiles: of all ranks, where they are known.
        """
        with self._unless_full("summary"):
            known = [entry["accuracy"] for entry in self._entries() if entry.get("accuracy") is not None]
            values = {field.name: getattr(summary, field.name) for field in fields(summary) if field.name != "profile"}
            self.write_summary(
                outcome=outcome,
                **values,
                wall_s=round(seconds, 3),
                **more,
                profiles=[profile.to_json() for profile in profiles or [summary.profile]],
                best_accuracy=max(known, default=None),
            )


class FinishedRun(NamedTuple):
    """A run of which nothing is left to be done."""

    rounds: int
    run_id: int
    incarnation: int  # of the start of the controller that committed its last round


def finished(path: Path, state: Path, wanted: int) -> FinishedRun | None:
    """The federated run in this directory, if all the ``wanted`` rounds are done and written down; else None.

    ``state``: where its checkpoints are. Nothing is written.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # the controller reports what is wrong there
        summary = _summary_in(path)
        rounds = int(summary["rounds"])
        if summary["outcome"] == "done" and rounds >= wanted and (path / ControllerDirectory.reports_file).exists():
            checkpoint = parse_json(text_inside(state, f"round-{rounds:06d}.json", MAX_CHECKPOINT_BYTES))
            meta = checkpoint["meta"]
            return FinishedRun(rounds, int(meta["run_id"], 16), int(meta["incarnation"]))
    return None


def outcome_of(path: Path) -> tuple[str, str] | None:
    """How and when the run in this directory has ended, as its summary says; None: there is none. Nothing is
    written."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        summary = _summary_in(path)
        return str(summary["outcome"]), str(summary["finished"])
    return None


def job_in(path: Path) -> str | None:
    """The job whose run this directory is of, as its settings say; None: there are none. Nothing is written."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(parse_json(text_inside(path, "config.json", MAX_FILE_BYTES))["bus"]["job"])
    return None


def begun_at(path: Path) -> int:
    """When training has begun in this directory, at the newest start that has come so far, which writes its settings
    then: a time of the file system, in ns; 0: never."""
    with contextlib.suppress(OSError):
        return (path / "config.json").stat().st_mtime_ns
    return 0


def open_log(path: Path, name: str) -> TextIO:
    """A file in a run directory, for appending; the directory is made if need be. Raises ConfigError."""
    with _writing(path):
        make_private(path)
        return os.fdopen(open_to_append(path / name), "a", encoding="utf-8")


def new_path(job: str) -> Path:
    """``runs/<job>-<time>`` below the current directory."""
    return Path("runs", f"{job}-{time.strftime('%Y%m%d-%H%M%S')}")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"run directory {path} cannot be written: {error.strerror}. Name another (--run-dir)"
        ) from None


def _check_no_link(folder: Path, setting: str) -> None:
    try:
        check_no_link(folder)
    except FileRefused:
        raise ConfigError(
            f"{folder} is a link, and a run writes through no link in its directory. Put the folder itself there; or "
            f"remove the link, and name the place where it leads in {setting}"
        ) from None


def _cell(text: str) -> str:
    """Text of a peer for a spreadsheet, which would take some first characters for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _summary_in(path: Path) -> Any:
    return parse_json(text_inside(path, "summary.json", MAX_FILE_BYTES))


def _mark_in(folder: Path) -> str:
    """The mark there; "" if there is none, or something else by its name."""
    with contextlib.suppress(OSError, ValueError):
        return text_inside(folder, _MARK, _MAX_MARK_BYTES)
    return ""


def _line(report: RoundReport | EpochReport) -> str:
    return json_text(report.to_json()) + "\n"


def _merged(old: BinaryIO, reports: Sequence[RoundReport]) -> Iterator[str]:
    """The lines of these reports, with what only the file as it was knows of them and of the rounds before."""
    first = reports[0].round_id if reports else 0
    places: dict[
        tuple[int, int], tuple[int, int]
    ] = {}  # by round and checksum of its model: a round done again is another one
    for place, line in own_lines(old):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            entry = parse_json(line.decode())
            round_id, crc32 = int(entry["round_id"]), int(entry["weights_crc32"])
            if round_id < first:
                yield json_text(entry) + "\n"
            else:
                places[round_id, crc32] = place, len(line)
    for report in reports:
        values = report.to_json()
        found = places.get((report.round_id, report.weights_crc32))
        if found is not None:
            place, num_bytes = found
            old.seek(place)
            entry = parse_json(old.read(num_bytes).decode())
            for key, known in entry.items():
                if known not in (None, [], {}) and _is_like(known, values.get(key)):
                    values[key] = known
        yield json_text(values) + "\n"


def _is_like(old: Any, new: Any) -> bool:
    """Whether a value of a file, which may have been edited, is of the kind that belongs there."""
    if new is None or isinstance(new, int | float):
        return isinstance(old, int | float) and not isinstance(old, bool)
    return isinstance(old, type(new))


# -- text --------------------------------------------------------------------------------------------------------------


def write_json(path: Path, values: Any) -> None:
    """Write JSON for programs and for people, whole or not at all."""
    write_text(path, [json_text(values, indent=2), "\n"])


def write_text(path: Path, pieces: Iterable[str]) -> None:
    """Replace a file as a whole."""
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(pieces)


def check_named(path: Path, option: str) -> None:
    """Check that a file may be written where the user says. ``option``: which has named it. Raises ConfigError."""
    try:
        check_replaceable(path)
    except FileRefused as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Name another ({option})") from None


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Write the file that this yields; it takes the place of ``path`` at the end, or is gone if there was an error."""
    temporary = path.with_name(f"{path.name}.tmp")
    clear_way(temporary)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
