"""The directory of a run: what was asked, what came of it, in files that other programs can read.

``config.json`` (a configuration of its own: the run can be started again from it), ``rounds.jsonl`` (one report a line,
written as they come), ``summary.json``, ``accuracy.png``, ``controller.log``, the checkpoints in ``state/``, and in
``history/`` what happened, for ``gradbus check``.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self, TextIO

from gradbus.experiments.rundir.versions import machine, versions
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import MAX_LINE_CHARS, parse_json, read_text
from gradbus.runtime.private_folder import keep_private, make_private

if TYPE_CHECKING:
    from gradbus.actors.federated.report import RoundReport


MAX_FILE_BYTES = 64 << 20  # of what is read again


class RunDirectory:
    """Writes the files of one run. A context manager, for its log file.

    Attributes:
        path: the directory. log: controller.log, open for appending. summary: as it was written, once it was.
    """

    def __init__(self, path: Path) -> None:
        """Make the directory if need be. Raises ConfigError: it cannot be written."""
        self.path = path
        self.summary: dict[str, Any] = {}
        self._written = 0
        self.log = open_log(path, "controller.log")
        for folder in (self.state, self.history):
            keep_private(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.close()

    @property
    def state(self) -> Path:
        """Where the checkpoints of the run go."""
        return self.path / "state"

    @property
    def history(self) -> Path:
        """Where what happened is noted, for ``gradbus check``."""
        return self.path / "history"

    def write_config(self, values: Any) -> None:
        """Keep the settings in force."""
        write_json(self.path / "config.json", values)

    def add(self, reports: Sequence[RoundReport]) -> None:
        """Append what is new in the history of the run.

        The first call writes the file anew: the controller's history is the truth after a resume, also for a round that
        was committed just before the process died. But a checkpoint is written in the midst of a round: it lacks what
        came after it (bytes and seconds of sending, accuracy), timelines, who took part in rounds of some time ago, and
        rounds of long ago. So a row of a round with the same model stays as it was, and what only the history knows is
        added.
        """
        path = self.path / "rounds.jsonl"
        if self._written and self._written <= len(reports):
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json_text(report.to_json()) + "\n" for report in reports[self._written :])
        else:
            temporary = path.with_name(f"{path.name}.tmp")
            with (
                path.open("rb") if path.exists() else io.BytesIO() as old,
                temporary.open("w", encoding="utf-8") as new,
            ):
                new.writelines(_anew(old, reports))
            temporary.replace(path)
        self._written = len(reports)

    def finish(self, reports: Sequence[RoundReport], *, outcome: str, seconds: float, **more: Any) -> dict[str, Any]:
        """Write the summary, and return it.

        Args:
            outcome: done, stopped or failed.
            seconds: of this start of the controller, from start to end.
            more: further entries.
        """
        self.summary = {
            "outcome": outcome, **totals(self._rows() or reports), "wall_s": round(seconds, 3), **more,
            **about_this_program(),
        }  # fmt: skip
        write_json(self.path / "summary.json", self.summary)
        return self.summary

    def _rows(self) -> list[RoundReport]:
        """The rounds as they stand in the file, without what names clients: more than the controller remembers."""
        from gradbus.actors.federated.report import RoundReport

        path = self.path / "rounds.jsonl"
        if not self._written or not path.exists():
            return []
        known = {field.name for field in fields(RoundReport)}
        rows = []
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_CHARS):
                entry = {key: value for key, value in parse_json(line.decode()).items() if key in known}
                rows.append(RoundReport.from_json(entry).figures())
        return rows


def open_log(path: Path, name: str) -> TextIO:
    """A file in a run directory, for appending; the directory is made if need be. Raises ConfigError."""
    try:
        make_private(path, tell=True)
        return (path / name).open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"run directory {path} cannot be written: {error.strerror}. Name another (--run-dir)"
        ) from None


def about_this_program() -> dict[str, Any]:
    """What a summary says beside the run itself."""
    return {
        "versions": versions(), "machine": machine(), "platform": platform.platform(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }  # fmt: skip


def new_path(job: str) -> Path:
    """``runs/<job>-<time>`` below the current directory."""
    return Path("runs", f"{job}-{time.strftime('%Y%m%d-%H%M%S')}")


def totals(reports: Sequence[RoundReport]) -> dict[str, Any]:
    """What the rounds add up to."""
    evaluated = [report.accuracy for report in reports if report.accuracy is not None]
    return {
        "rounds": len(reports),
        "accuracy": evaluated[-1] if evaluated else None,
        "best_accuracy": max(evaluated, default=None),
        "loss": reports[-1].loss if reports else None,
        "bytes_up": sum(report.bytes_up for report in reports),
        "bytes_down": sum(report.bytes_down for report in reports),
        "bytes_up_shared": sum(report.bytes_up_shared for report in reports),
        "bytes_down_shared": sum(report.bytes_down_shared for report in reports),
        "train_s": round(sum(report.train_s for report in reports), 3),
        "wire_s": round(sum(report.wire_s for report in reports), 3),
        "aggregate_s": round(sum(report.aggregate_s for report in reports), 3),
        "checkpoint_s": round(sum(report.checkpoint_s for report in reports), 3),
        "publish_s": round(sum(report.publish_s for report in reports), 3),
        "eval_s": round(sum(report.eval_s for report in reports), 3),
        "weights_crc32": reports[-1].weights_crc32 if reports else None,
    }


def write_json(path: Path, values: Any) -> None:
    """For programs and for people, whole or not at all."""
    write_text(path, json_text(values, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Whoever reads meanwhile, or after a crash, finds the old file or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _anew(old: BinaryIO, reports: Sequence[RoundReport]) -> Iterator[str]:
    """The lines of these reports, with what only the file as it was knows of them and of the rounds before."""
    first = reports[0].round_id if reports else 0
    places: dict[tuple[int, int], int] = {}  # by round and checksum of its model: a round done again is another one
    while line := old.readline(MAX_LINE_CHARS):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            entry = parse_json(line.decode())
            round_id, crc32 = int(entry["round_id"]), int(entry["weights_crc32"])
            if round_id < first:
                yield json_text(entry) + "\n"
            else:
                places[round_id, crc32] = old.tell() - len(line)
    for report in reports:
        values = report.to_json()
        place = places.get((report.round_id, report.weights_crc32))
        if place is not None:
            old.seek(place)
            entry = parse_json(old.readline(MAX_LINE_CHARS).decode())
            for key, known in entry.items():
                if known not in (None, [], {}) and _is_like(known, values.get(key)):
                    values[key] = known
        yield json_text(values) + "\n"


def _is_like(old: Any, new: Any) -> bool:
    """Whether a value of a file, which anybody may have edited, is of the kind that belongs there."""
    if new is None or isinstance(new, int | float):
        return isinstance(old, int | float) and not isinstance(old, bool)
    return isinstance(old, type(new))


class Finished(NamedTuple):
    """A run of which nothing is left to be done."""

    rounds: int
    run_id: int


def finished(path: Path, state: Path, wanted: int) -> Finished | None:
    """The run in this directory, if all the ``wanted`` rounds are done and written down; else None.

    ``state``: where its checkpoints are. Nothing is written.
    """
    try:
        summary = parse_json(read_text(path / "summary.json", MAX_FILE_BYTES))
        rounds = int(summary["rounds"])
        if summary["outcome"] != "done" or rounds < wanted or not (path / "rounds.jsonl").exists():
            return None
        checkpoint = parse_json(read_text(state / f"round-{rounds:06d}.json", MAX_FILE_BYTES))
        return Finished(rounds, int(checkpoint["meta"]["run_id"], 16))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # whatever is wrong there, the controller says it better


def json_text(values: Any, *, indent: int | None = None) -> str:
    """JSON that every program can read: it has no NaN and no infinity, so null stands for them."""
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
