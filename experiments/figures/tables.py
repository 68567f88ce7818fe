"""The results of the runs as tables: one row a round, a client's update, an epoch, a rank. All figures come from these.

The tables are CSV files beside the figures. They are written from the JSONL files of the runs, read back, and checked
on both ways: nothing reaches a figure that its column does not allow.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gradbus.experiments.figures.plan import FederatedRun, ParallelRun
from gradbus.experiments.figures.store import StoredRun
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.profiling.summary import read_summary


class BadData(ConfigError):
    """A file of a run, or a table, lacks what a figure needs, or holds something else."""


class TableRow(BaseModel):
    """Base of all rows. An empty cell is None; NaN and infinity are no values."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        return None if value == "" else value


class RoundRow(TableRow):
    """A round of a federated run. Times in seconds, bytes of all clients together.

    Attributes:
        group: of the plan, see :class:`gradbus.experiments.figures.plan.FigurePlan`.
        decode_s: decoding the updates and adding them up. aggregate_s: the server's step. Where the run did not
            record decoding, it is None and part of aggregate_s.
        seconds: from the command to the published model.
        load_per_core: of the machine at the end of the run; well above 1, other work was going on.
    """

    group: str
    codec: str
    downlink: str
    version: int
    partition: str
    seed: int
    round_id: int
    clients: int = Field(ge=1)
    samples: int
    accuracy: float | None
    bytes_up: int = Field(ge=1)
    bytes_down: int = Field(ge=1)
    train_s: float = Field(ge=0)
    encode_s: float = Field(ge=0)
    wire_s: float = Field(ge=0)
    decode_s: float | None = Field(ge=0)
    aggregate_s: float = Field(ge=0)
    checkpoint_s: float = Field(ge=0)
    publish_s: float = Field(ge=0)
    seconds: float = Field(gt=0)
    load_per_core: float = Field(ge=0)


class UpdateRow(TableRow):
    """An update of one client, by the controller's clock.

    Attributes:
        dds_s: from the client's offer until all of the update was there. load_per_core: see :class:`RoundRow`.
    """

    group: str
    codec: str
    seed: int
    round_id: int
    client_id: int
    num_bytes: int = Field(ge=1)
    dds_s: float = Field(ge=0)
    load_per_core: float = Field(ge=0)


class EpochRow(TableRow):
    """An epoch of a data-parallel run, as one rank saw it. ``samples``: of the training set."""

    exchange: str
    overlap: bool
    seed: int
    rank: int
    epoch: int
    steps: int = Field(ge=1)
    density: float
    accuracy: float | None
    bytes_per_step: float = Field(gt=0)


class RankRow(TableRow):
    """All steps of one rank. ``wait``: from the end of its own work to the end of the step's last exchange.
    ``load_per_core``: see :class:`RoundRow`."""

    exchange: str
    overlap: bool
    seed: int
    rank: int
    steps: int = Field(ge=1)
    step_s_mean: float = Field(gt=0)
    wait_s_mean: float = Field(ge=0)
    wait_s_max: float = Field(ge=0)
    load_per_core: float = Field(ge=0)


TABLES: Mapping[str, type[TableRow]] = {"rounds": RoundRow, "updates": UpdateRow, "epochs": EpochRow, "ranks": RankRow}

R = TypeVar("R", bound=TableRow)


_COPIED = (
    "round_id", "accuracy", "bytes_up", "bytes_down", "train_s", "encode_s", "wire_s", "checkpoint_s", "publish_s",
    "seconds",
)  # fmt: skip


def collect(finished: Iterable[tuple[str, StoredRun]]) -> dict[str, list[TableRow]]:
    """All rows of these runs, by table. Each run comes with the name of its group.

    Raises:
        BadData: a file is missing, or does not hold what a row needs.
    """
    tables: dict[str, list[TableRow]] = {name: [] for name in TABLES}
    for group, done in finished:
        load = float(done.machine.get("load_1min", 0.0)) / max(1, int(done.machine.get("cores") or 1))
        match done.run:
            case FederatedRun() as run:
                for row in _federated_rows(group, run, done.path, load):
                    tables["rounds" if isinstance(row, RoundRow) else "updates"].append(row)
            case ParallelRun() as run:
                for rank in range(run.world):
                    tables["epochs"] += _epoch_rows(run, done.path, rank)
                    tables["ranks"].append(_rank_row(run, done.path, rank, load))
    return tables


def _federated_rows(group: str, run: FederatedRun, folder: Path, load: float) -> Iterator[TableRow]:
    shared = {"group": group, "codec": run.codec, "seed": run.seed, "load_per_core": load}
    for line in _lines(folder / "run" / "rounds.jsonl", run.rounds, "rounds", folder):
        timeline = [line.within(one) for one in line.get("timeline", [])]
        aggregate_s = line.get("aggregate_s")
        decode_s = sum(one.get("counted_s") - one.get("adding_s") for one in timeline)
        yield line.row(
            RoundRow, **shared, downlink=run.downlink, version=run.version, partition=run.partition,
            samples=run.samples, clients=len(line.get("clients")), decode_s=decode_s if timeline else None,
            aggregate_s=max(0.0, aggregate_s - decode_s), **{name: line.get(name) for name in _COPIED},
        )  # fmt: skip
        for one in timeline:
            yield line.row(
                UpdateRow, **shared, round_id=line.get("round_id"), client_id=one.get("client_id"),
                num_bytes=one.get("num_bytes"), dds_s=one.get("received_s") - one.get("offered_s"),
            )  # fmt: skip


def _epoch_rows(run: ParallelRun, folder: Path, rank: int) -> Iterator[TableRow]:
    before = 0
    for line in _lines(folder / f"epochs-rank-{rank}.jsonl", run.epochs, "epochs", folder):
        step = line.get("step")
        yield line.row(
            EpochRow, exchange=run.exchange, overlap=run.overlap, seed=run.seed, rank=rank,
            epoch=line.get("epoch") + 1, steps=step - before, density=line.get("density"),
            accuracy=line.get("accuracy"), bytes_per_step=line.get("bytes_out_per_step"),
        )  # fmt: skip
        before = step


def _rank_row(run: ParallelRun, folder: Path, rank: int, load: float) -> TableRow:
    path = folder / f"profile-rank-{rank}.jsonl"
    try:
        profile = read_summary(path)
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror}. Remove {folder} and run again") from None
    if profile is None or not {"wait_s", "step_s"} <= profile.mean.keys() & profile.max.keys():
        raise BadData(f"{path}: no summary of steps with wait_s and step_s. Remove {folder} and run again")
    return _Line(str(path), {}).row(
        RankRow, exchange=run.exchange, overlap=run.overlap, seed=run.seed, rank=rank, steps=profile.steps,
        step_s_mean=profile.mean["step_s"], wait_s_mean=profile.mean["wait_s"], wait_s_max=profile.max["wait_s"],
        load_per_core=load,
    )  # fmt: skip


_NO_DEFAULT: Any = object()


@dataclass(frozen=True, slots=True)
class _Line:
    """A JSON object, and where it stands."""

    where: str
    fields: Any

    def within(self, fields: Any) -> _Line:
        """An object inside this one."""
        return _Line(self.where, fields)

    def get(self, key: str, default: Any = _NO_DEFAULT) -> Any:
        if not isinstance(self.fields, Mapping):
            raise BadData(f"{self.where}: expected a JSON object, got {type(self.fields).__name__}")
        found = self.fields.get(key, default)
        if found is _NO_DEFAULT:
            raise BadData(f"{self.where}: no {key!r}; there are: {', '.join(map(str, self.fields))}")
        return found

    def row(self, kind: type[R], **values: Any) -> R:
        try:
            return kind.model_validate(values)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False)[0]
            column = ".".join(map(str, fault["loc"]))
            raise BadData(f"{self.where}: {column}: {fault['msg'].lower()}, got {fault['input']!r}") from None


def _lines(path: Path, count: int, what: str, folder: Path) -> Iterator[_Line]:
    """The lines of a JSONL file, of which there must be so many."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(f"{path} cannot be read: {error}") from None
    found = []
    for number, text in enumerate(lines, start=1):
        try:
            found.append(_Line(f"{path}, line {number}", parse_json(text)))
        except ValueError as error:
            raise BadData(f"{path}, line {number}: not JSON: {error}") from None
    if len(found) != count:
        raise BadData(f"{path}: expected {count} {what}, got {len(found)}. Remove {folder} and run again")
    return iter(found)


def write_table(path: Path, kind: type[TableRow], rows: Sequence[TableRow]) -> None:
    """One line with the names of the columns, and one for each row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(kind.model_fields)
        writer.writerows(["" if cell is None else cell for cell in row.model_dump().values()] for row in rows)


def read_table(path: Path, kind: type[R]) -> list[R]:
    """The rows of a file that :func:`write_table` has written.

    Raises:
        BadData: the file is not there, has other columns, or a cell is not what its column says.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadData(f"{path} cannot be read: {error}") from None
    columns = list(kind.model_fields)
    if not lines or lines[0] != columns:
        found = ", ".join(lines[0]) if lines else "none"
        raise BadData(f"{path}: expected the columns {', '.join(columns)}, got {found}")
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        if len(cells) != len(columns):
            raise BadData(f"{path}, line {number}: expected {len(columns)} cells, got {len(cells)}")
        rows.append(_Line(f"{path}, line {number}", {}).row(kind, **dict(zip(columns, cells, strict=True))))
    return rows
