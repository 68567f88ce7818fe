"""What the runs left, as tables: one row a round, a client's update, an epoch, a rank. All figures come from these.

The tables are CSV files beside the figures. They are written from the JSONL files of the runs, read back, and checked
on both ways: nothing reaches a figure that is not what its column says.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gradbus.experiments.gallery.plan import FederatedRun, ParallelRun
from gradbus.experiments.gallery.store import Finished
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.profiling.summary import read_summary


class BadData(ConfigError):
    """A file of a run, or a table, does not hold what a figure needs."""


class Row(BaseModel):
    """Base. An empty cell is None; NaN and infinity are no values."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        return None if value == "" else value


class RoundRow(Row):
    """A round of a federated run. Times in seconds, bytes of all clients together.

    Attributes:
        group: of the plan, see :class:`gradbus.experiments.gallery.plan.Plan`.
        decode_s: decoding the updates and adding them up. aggregate_s: the server's step. Where the run says nothing of
            decoding, it is None and in aggregate_s.
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


class UpdateRow(Row):
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


class EpochRow(Row):
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


class RankRow(Row):
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


TABLES: Mapping[str, type[Row]] = {"rounds": RoundRow, "updates": UpdateRow, "epochs": EpochRow, "ranks": RankRow}

R = TypeVar("R", bound=Row)


def collect(finished: Iterable[tuple[str, Finished]]) -> dict[str, list[Row]]:
    """All rows of these runs, by table. Each run comes with the name of its group.

    Raises:
        BadData: a file is missing, or says something else.
    """
    tables: dict[str, list[Row]] = {name: [] for name in TABLES}
    for group, done in finished:
        load = float(done.machine.get("load_1min", 0.0)) / max(1, int(done.machine.get("cores") or 1))
        match done.run:
            case FederatedRun() as run:
                for row in _federated_rows(group, run, done.path / "run" / "rounds.jsonl", load):
                    tables["rounds" if isinstance(row, RoundRow) else "updates"].append(row)
            case ParallelRun() as run:
                tables["epochs"] += _epoch_rows(run, done.path)
                tables["ranks"] += _rank_rows(run, done.path, load)
    return tables


def _federated_rows(group: str, run: FederatedRun, path: Path, load: float) -> Iterator[Row]:
    lines = list(_json_lines(path))
    if len(lines) != run.rounds:
        raise BadData(f"{path}: expected {run.rounds} rounds, got {len(lines)}. Remove {path.parents[1]} and run again")
    for where, line in lines:
        timeline = _get(line, "timeline", where, default=[])
        decode_s = sum(_get(one, "counted_s", where) - _get(one, "adding_s", where) for one in timeline)
        aggregate_s = _get(line, "aggregate_s", where)
        yield _row(
            RoundRow, where, group=group, codec=run.codec, downlink=run.downlink, version=run.version,
            partition=run.partition, seed=run.seed, samples=run.samples,
            clients=len(_get(line, "clients", where)),
            decode_s=decode_s if timeline else None,
            aggregate_s=max(0.0, aggregate_s - decode_s), load_per_core=load,
            **{name: _get(line, name, where) for name in _COPIED},
        )  # fmt: skip
        for one in timeline:
            yield _row(
                UpdateRow, where, group=group, codec=run.codec, seed=run.seed,
                round_id=_get(line, "round_id", where), client_id=_get(one, "client_id", where),
                num_bytes=_get(one, "num_bytes", where),
                dds_s=_get(one, "received_s", where) - _get(one, "offered_s", where), load_per_core=load,
            )  # fmt: skip


_COPIED = (
    "round_id", "accuracy", "bytes_up", "bytes_down", "train_s", "encode_s", "wire_s", "checkpoint_s", "publish_s",
    "seconds",
)  # fmt: skip


def _epoch_rows(run: ParallelRun, folder: Path) -> Iterator[Row]:
    for rank in range(run.world):
        path = folder / f"epochs-rank-{rank}.jsonl"
        lines, before = list(_json_lines(path)), 0
        if len(lines) != run.epochs:
            raise BadData(f"{path}: expected {run.epochs} epochs, got {len(lines)}. Remove {folder} and run again")
        for where, line in lines:
            step = _get(line, "step", where)
            yield _row(
                EpochRow, where, exchange=run.exchange, overlap=run.overlap, seed=run.seed, rank=rank,
                epoch=_get(line, "epoch", where) + 1, steps=step - before, density=_get(line, "density", where),
                accuracy=_get(line, "accuracy", where), bytes_per_step=_get(line, "bytes_out_per_step", where),
            )  # fmt: skip
            before = step


def _rank_rows(run: ParallelRun, folder: Path, load: float) -> Iterator[Row]:
    for rank in range(run.world):
        path = folder / f"profile-rank-{rank}.jsonl"
        try:
            profile = read_summary(path)
        except OSError as error:
            raise BadData(f"{path} cannot be read: {error.strerror}. Remove {folder} and run again") from None
        if profile is None or not {"wait_s", "step_s"} <= profile.mean.keys() & profile.max.keys():
            raise BadData(f"{path}: no summary of steps with wait_s and step_s. Remove {folder} and run again")
        yield _row(
            RankRow, str(path), exchange=run.exchange, overlap=run.overlap, seed=run.seed, rank=rank,
            steps=profile.steps, step_s_mean=profile.mean["step_s"], wait_s_mean=profile.mean["wait_s"],
            wait_s_max=profile.max["wait_s"], load_per_core=load,
        )  # fmt: skip


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Each line, and where it stands."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            yield f"{path}, line {number}", parse_json(line)
        except ValueError as error:
            raise BadData(f"{path}, line {number}: not JSON: {error}") from None


_NO_DEFAULT: Any = object()


def _get(line: Any, key: str, where: str, *, default: Any = _NO_DEFAULT) -> Any:
    if not isinstance(line, Mapping):
        raise BadData(f"{where}: expected a JSON object, got {type(line).__name__}")
    if key not in line and default is not _NO_DEFAULT:
        return default
    if key not in line:
        raise BadData(f"{where}: no {key!r}; there are: {', '.join(map(str, line))}")
    return line[key]


def _row(kind: type[R], where: str, **values: Any) -> R:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        column = ".".join(map(str, fault["loc"]))
        raise BadData(f"{where}: {column}: {fault['msg'].lower()}, got {fault['input']!r}") from None


def write_table(path: Path, kind: type[Row], rows: Sequence[Row]) -> None:
    """One line of names, and one for each row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(kind.model_fields)
        writer.writerows(["" if cell is None else cell for cell in row.model_dump().values()] for row in rows)


def read_table(path: Path, kind: type[R]) -> list[R]:
    """The inverse.

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
        raise BadData(
            f"{path}: expected the columns {', '.join(columns)}, got {', '.join(lines[0]) if lines else 'none'}"
        )
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        if len(cells) != len(columns):
            raise BadData(f"{path}, line {number}: expected {len(columns)} cells, got {len(cells)}")
        rows.append(_row(kind, f"{path}, line {number}", **dict(zip(columns, cells, strict=True))))
    return rows
