"""The results of the runs as tables: one row a round, a client's update, an epoch, a rank. All figures come from these.

The tables are CSV files beside the figures. They are written from the JSONL files of the runs, read back, and checked
on both ways: nothing reaches a figure that its column does not allow.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.commands.simulate.closed_forms import Fabric, slot_bytes
from gradbus.commands.simulate.comparison import ComparisonRow
from gradbus.commands.simulate.topology import LinkSpec
from gradbus.experiments.figures.deployment import deployment
from gradbus.experiments.figures.plan import FederatedRun, LadderRun, ParallelRun, SimulationRun, ThinLinkRun
from gradbus.experiments.figures.store import StoredRun
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.profiling.summary import read_summary


class BadData(ConfigError):
    """A file of a run, or a table, lacks what a figure needs, or holds something else."""


class TableRow(BaseModel):
    """Base of all rows. An empty cell is None; NaN and infinity are no values. Of a line, only columns are taken."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        return None if value == "" else value


class RoundRow(TableRow):
    """A round of a federated run. Times in seconds, bytes of all clients together.

    Attributes:
        group: of the plan, see :class:`gradbus.experiments.figures.plan.Plan`.
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


class _ParallelRow(TableRow):
    exchange: str
    overlap: bool
    seed: int
    rank: int


class EpochRow(_ParallelRow):
    """An epoch of a data-parallel run, as one rank saw it."""

    epoch: int
    steps: int = Field(ge=1)
    density: float
    accuracy: float | None
    bytes_per_step: float = Field(gt=0)


class RankRow(_ParallelRow):
    """All steps of one rank. ``wait``: from the end of its own work to the end of the step's last exchange.
    ``load_per_core``: see :class:`RoundRow`."""

    steps: int = Field(ge=1)
    step_s_mean: float = Field(gt=0)
    wait_s_mean: float = Field(ge=0)
    wait_s_max: float = Field(ge=0)
    load_per_core: float = Field(ge=0)


class LadderRow(TableRow):
    """A rung of the ladder: see :class:`gradbus.experiments.bench.rungs.RungTimes`. Times in seconds.

    Attributes:
        load_per_core: see :class:`RoundRow`.
    """

    rung: str
    seed: int
    step_s: float = Field(gt=0)
    compute_s: float = Field(ge=0)
    simulated_step_s: float = Field(gt=0)
    bytes_out: float = Field(gt=0)
    samples_s: float = Field(gt=0)
    steps: int = Field(ge=1)
    accuracy: float | None
    to_target_s: float | None
    load_per_core: float = Field(ge=0)


class ThinLinkRow(TableRow):
    """A window of a training on a thin link: see :class:`gradbus.experiments.bench.thin_link.LossWindow`.

    Attributes:
        load_per_core: see :class:`RoundRow`.
    """

    way: str
    seed: int
    until_s: float = Field(gt=0)
    steps: float = Field(ge=0)
    loss: float | None
    load_per_core: float = Field(ge=0)


class ComparedRow(ComparisonRow, TableRow):
    """A way to sum gradients under one set of conditions, as a run leaves it."""


class SimulationRow(ComparedRow):
    """The same, with the ``group`` of the plan."""

    group: str


class DeploymentRow(TableRow):
    """Holds what aggregating switches of so many ports take for so many hosts, by formulas alone.

    Attributes:
        adding, forwarding: switches. used_ports: of those that add. slot_bytes: memory of each, that keeps the links
            busy; None: not counted for this way.
    """

    way: str
    ports: int
    hosts: int
    adding: int
    forwarding: int
    used_ports: int
    slot_bytes: float | None


TABLES: Mapping[str, type[TableRow]] = {
    "rounds": RoundRow, "updates": UpdateRow, "epochs": EpochRow, "ranks": RankRow, "ladder": LadderRow,
    "thin_link": ThinLinkRow,    "simulations": SimulationRow, "deployments": DeploymentRow,
}  # fmt: skip

R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")


def collect(finished: Iterable[tuple[str, StoredRun]]) -> dict[str, list[TableRow]]:
    """All rows of these runs, by table. Each run comes with the name of its group.

    Raises:
        BadData: a file is missing, or does not hold what a row needs.
    """
    tables: dict[str, list[TableRow]] = {name: [] for name in TABLES}
    tables["deployments"] += deployment_rows()
    for group, done in finished:
        load = float(done.machine.get("load_1min", 0.0)) / max(1, int(done.machine.get("cores") or 1))
        match done.run:
            case FederatedRun() as run:
                _add_rounds(tables, group, run, done.path, load)
            case LadderRun() as run:
                tables["ladder"] += _ladder_rows(run, done.path, load)
            case ThinLinkRun() as run:
                tables["thin_link"] += _thin_link_rows(run, done.path, load)
            case SimulationRun():
                path = done.path / "comparison.csv"
                tables["simulations"] += [
                    _row(SimulationRow, str(path), {**one.model_dump(), "group": group})
                    for one in read_table(path, ComparedRow)
                ]
            case ParallelRun() as run:
                for rank in range(run.world):
                    tables["epochs"] += _epoch_rows(run, done.path, rank)
                    tables["ranks"].append(_rank_row(run, done.path, rank, load))
    return tables


_OF_THE_RUN = ("codec", "downlink", "version", "partition", "seed", "samples")


def _add_rounds(tables: dict[str, list[TableRow]], group: str, run: FederatedRun, folder: Path, load: float) -> None:
    shared = {"group": group, "load_per_core": load, **{name: getattr(run, name) for name in _OF_THE_RUN}}
    for where, report in _reports(folder / "run" / "rounds.jsonl", RoundReport, run.rounds, folder):
        decode_s = sum(one.counted_s - one.adding_s for one in report.timeline)
        times = {
            "decode_s": decode_s if report.timeline else None, "aggregate_s": max(0.0, report.aggregate_s - decode_s),
            "clients": len(report.clients),
        }  # fmt: skip
        tables["rounds"].append(_row(RoundRow, where, {**_fields_of(report), **shared, **times}))
        for one in report.timeline:
            more = {"round_id": report.round_id, "dds_s": one.received_s - one.offered_s}
            tables["updates"].append(_row(UpdateRow, where, {**_fields_of(one), **shared, **more}))


def _epoch_rows(run: ParallelRun, folder: Path, rank: int) -> Iterator[TableRow]:
    before = 0
    for where, report in _reports(folder / f"epochs-rank-{rank}.jsonl", EpochReport, run.epochs, folder):
        more = {"epoch": report.epoch + 1, "steps": report.step - before, "bytes_per_step": report.bytes_out_per_step}
        before = report.step
        yield _row(EpochRow, where, {**_fields_of(report), **_way(run), **more, "rank": rank})


def _ladder_rows(run: LadderRun, folder: Path, load: float) -> Iterator[TableRow]:
    """One row; none where the run could not be done on this machine."""
    path = folder / "ladder.json"
    found = _json_of(path)
    if "missing" not in found:
        yield _row(LadderRow, str(path), {**found, "seed": run.seed, "load_per_core": load})


def _thin_link_rows(run: ThinLinkRun, folder: Path, load: float) -> Iterator[TableRow]:
    """A row for each window; none where the run could not be done on this machine."""
    path = folder / "thin_link.json"
    shared = {"way": run.way, "seed": run.seed, "load_per_core": load}
    for window in _json_of(path).get("windows", ()):
        yield _row(ThinLinkRow, str(path), {**window, **shared})


def _json_of(path: Path) -> dict[str, Any]:
    """Return what a run has left as one JSON object. Raises BadData."""
    try:
        return dict(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise BadData(f"{path} cannot be read: {error}. Remove {path.parent} and run again") from None


_PORTS = 64
_LINK = LinkSpec(rate_bytes_s=12.5e9, latency_s=2e-6)
_BLOCK_BYTES = 1024.0


def deployment_rows() -> Iterator[DeploymentRow]:
    """Trees, several trees and chains of switches of 64 ports at 100 Gbit/s, in two layers, for up to 2,048 hosts."""
    ways: tuple[Literal["hina", "mtina", "cina"], ...] = ("hina", "mtina", "cina")
    for way, hosts in product(ways, (8, 16, 32, 64, 128, 256, 512, 1024, 2048)):
        needed = deployment(way, hosts, _PORTS)
        per_leaf = _PORTS - (2 if way == "cina" else 1)
        fabric = Fabric(world=hosts, network=_LINK, hosts_per_leaf=per_leaf if hosts > _PORTS else None)
        yield DeploymentRow(
            way=way,
            ports=_PORTS,
            hosts=hosts,
            adding=needed.adding,
            forwarding=needed.forwarding,
            used_ports=needed.ports,
            slot_bytes=None if way == "mtina" else slot_bytes(way, fabric, _BLOCK_BYTES),
        )


def _fields_of(report: Any) -> dict[str, Any]:
    """The fields of a report, by name."""
    return {item.name: getattr(report, item.name) for item in fields(report)}


def _way(run: ParallelRun) -> dict[str, Any]:
    return {"exchange": run.exchange, "overlap": run.overlap, "seed": run.seed}


def _rank_row(run: ParallelRun, folder: Path, rank: int, load: float) -> TableRow:
    path = folder / f"profile-rank-{rank}.jsonl"
    try:
        profile = read_summary(path)
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror}. Remove {folder} and run again") from None
    if profile is None or not {"wait_s", "step_s"} <= profile.mean.keys() & profile.max.keys():
        raise BadData(f"{path}: no summary of steps with wait_s and step_s. Remove {folder} and run again")
    times = {f"{name}_mean": amount for name, amount in profile.mean.items()} | {"wait_s_max": profile.max["wait_s"]}
    return _row(RankRow, str(path), {**_way(run), **times, "rank": rank, "steps": profile.steps, "load_per_core": load})


def _row(kind: type[R], where: str, values: Mapping[str, Any]) -> R:
    """A row of these values. Raises BadData, with the place where they stand."""
    with _named(where):
        return kind.model_validate(values)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Raises BadData for values that do not fit, with the place where they stand."""
    try:
        yield
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        column = ".".join(map(str, fault["loc"]))
        raise BadData(f"{where}: {column}: {fault['msg'].lower()}, got {fault['input']!r}") from None


def _reports(path: Path, kind: type[T], count: int, folder: Path) -> list[tuple[str, T]]:
    """The reports in a JSONL file, of which there must be so many, and where they stand."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(f"{path} cannot be read: {error}") from None
    check: TypeAdapter[T] = TypeAdapter(kind)
    found = []
    for number, text in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        with _named(where):
            found.append((where, check.validate_json(text)))
    if len(found) != count:
        raise BadData(f"{path}: expected {count} lines, got {len(found)}. Remove {folder} and run again")
    return found


def write_table(path: Path, kind: type[TableRow], rows: Sequence[TableRow]) -> None:
    """One line with the names of the columns, and one for each row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(kind.model_fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.model_dump() for row in rows)


def read_table(path: Path, kind: type[R]) -> list[R]:
    """The rows of a file that :func:`write_table` has written.

    Raises:
        BadData: the file is not there, has other columns, or a cell is not what its column says.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            lines = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadData(f"{path} cannot be read: {error}") from None
    if reader.fieldnames != list(kind.model_fields):
        found = ", ".join(reader.fieldnames or ["none"])
        raise BadData(f"{path}: expected the columns {', '.join(kind.model_fields)}, got {found}")
    return [_row(kind, f"{path}, line {number}", line) for number, line in enumerate(lines, start=2)]
