"""The HTML of the live pages: a list of runs, and a run. What comes from files is text in it, never markup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from gradbus.actors.federated.client_names import label_of
from gradbus.commands.amounts import DASH, size
from gradbus.commands.dashboard.drawings import figures_of
from gradbus.commands.dashboard.following import MAX_NAMED, Following
from gradbus.commands.files import ControllerFile, WorkerFile
from gradbus.commands.report import federated, parallel
from gradbus.commands.report.metric_parts import newest_quality
from gradbus.commands.report.page import PageFigure, PageTable, Section, Tile, settings_section, template
from gradbus.commands.report.shown_metrics import Evaluated
from gradbus.commands.rundir.reading import RunFiles

MAX_ROWS = 25  # of the newest rounds or epochs
_PACKAGE = "gradbus.commands.dashboard"


class Chip(NamedTuple):
    """A client of the open round. ``state``: in, or expected."""

    client: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Holds what goes on at this moment.

    Attributes:
        text: in a line. done, total: of rounds or epochs; total 0: it is not known.
        since_s: since when, in seconds since the epoch; 0: that is not shown. chips: clients of the open round.
        more: how many clients have no chip.
    """

    text: str
    done: int
    total: int
    since_s: float = 0.0
    chips: tuple[Chip, ...] = ()
    more: int = 0


class Row(NamedTuple):
    """A run in the list. ``changed_s``: since the epoch; now: what it does; cells: text behind its name and state."""

    name: str
    state: str
    now: str
    changed_s: float
    cells: tuple[str, ...]


HEAD = ("job", "kind", "done", "clients or ranks", "quality", "bytes")


def list_body(rows: list[Row], folder: str) -> str:
    """The changing part of the list of runs."""
    return template("list.html", _PACKAGE).render(rows=rows, head=HEAD, folder=folder)


def run_body(run: Following, figures_version: int) -> str:
    """The changing part of the page on a run."""
    files, state = run.files, run.state
    reports: Any = files.rounds if files.kind == "federated" else files.epochs
    tiles: list[Tile] = []
    if reports:
        tiles = federated.tiles_of(files) if files.kind == "federated" else parallel.tiles_of(files)
    unread = Section(title="What cannot be read", text=" ".join(files.missing))
    sections = [section for section in (unread, *_sections(files)) if section.tables or section.text]
    figures: list[PageFigure] = figures_of(files)
    return template("run.html", _PACKAGE).render(
        run=files,
        state=state,
        good=state in ("running", "done"),
        tiles=tiles,
        now=now_of(run),
        sections=sections,
        figures=figures,
        figures_version=figures_version,
        lead=_lead(files),
        settings=_settings(files),
    )


def shell(title: str, body: str, *, home: str) -> str:
    """A whole page, with this changing part. ``home``: the address of the list of runs; "" on the list itself."""
    return template("shell.html", _PACKAGE).render(title=title, body=body, home=home)


def row_of(name: str, run: Following) -> Row:
    """The run, as a row of the list."""
    files, newest, now = run.files, run.newest, now_of(run)
    done = f"{now.done}/{now.total}" if now.total else str(now.done)
    unit = "rounds" if files.kind == "federated" else "epochs"
    members, sent = DASH, 0.0
    if files.kind == "federated":
        sent = float(sum(report.bytes_up + report.bytes_down for report in files.rounds))
        if run.open_round is not None and run.open_round.expected:
            members = str(len(run.open_round.expected))
        elif newest is not None:
            members = str(newest.expected)
    else:
        members = str(files.config.get("world") or len(files.profiles) or DASH)
        steps = [0, *(report.step for report in files.epochs)]
        sent = sum(
            r.bytes_out_per_step * max(0, r.step - before) for r, before in zip(files.epochs, steps, strict=False)
        )
    reports: tuple[Evaluated, ...] = (*files.rounds, *files.epochs)
    kind = "federated" if files.kind == "federated" else "data parallel"
    cells = (files.job, kind, f"{done} {unit}", members, newest_quality(reports), size(sent))
    return Row(name, run.state, now.text if run.state == "running" else "", run.changed_s, cells)


def now_of(run: Following) -> Now:
    """Return what the run is doing."""
    return _round_now(run) if run.files.kind == "federated" else _step_now(run)


def _round_now(run: Following) -> Now:
    files, open_round = run.files, run.open_round
    done = files.rounds[-1].round_id if files.rounds else 0
    total = _whole(files.setting("federated", "rounds"))
    if run.state != "running":
        return Now(text=f"{run.state}, after round {done}", done=done, total=total)
    if open_round is None or open_round.number <= done:
        text = f"round {done} is done, the next one begins" if done else "waiting for clients"
        return Now(text=text, done=done, total=total, since_s=run.changed_s)
    expected, counted = open_round.expected, open_round.counted
    what = "evaluation of its model" if open_round.committed else "training"
    refused = f", {open_round.refused} refused" if open_round.refused else ""
    text = f"round {open_round.number}: {what}, {len(counted)} of {len(expected | counted)} updates{refused}"
    ids = sorted(expected | counted)
    names = {**files.names, **open_round.names}
    chips = tuple(Chip(label_of(one, names), "in" if one in counted else "expected") for one in ids[:MAX_NAMED])
    return Now(
        text=text, done=done, total=total, since_s=open_round.since_s, chips=chips, more=max(0, len(ids) - MAX_NAMED)
    )


def _step_now(run: Following) -> Now:
    files = run.files
    done = files.epochs[-1].epoch + files.epochs[-1].finished if files.epochs else 0
    total = _whole(files.setting("parallel", "epochs"))
    if run.state != "running":
        return Now(text=f"{run.state}, after epoch {done}", done=done, total=total)
    steps = [found[-1].last_step + 1 for found in files.windows.values() if found]
    steps += [files.epochs[-1].step] if files.epochs else []
    text = f"epoch {done + 1}: training" + (f", step {max(steps):,} or later" if steps else "")
    return Now(text=text, done=done, total=total, since_s=run.changed_s)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 40 else 0


def _lead(files: RunFiles) -> str:
    kind = "Federated run" if files.kind == "federated" else "Data-parallel run"
    what = [kind, files.task, parallel.algorithm_of(files)]
    codec = files.setting("federated", "codec.name")
    what += [f"codec {codec} up and {files.setting('federated', 'downlink_codec.name')} down"] if codec else []
    what += [f"strategy {name}"] if (name := files.setting("federated", "strategy.name")) else []
    return ", ".join(str(part) for part in what if part)


def _sections(files: RunFiles) -> list[Section]:
    """Tables: the newest reports first, then clients or ranks, then faults."""
    if files.kind == "federated":
        reports = files.rounds
        newest = list(reversed(reports[-MAX_ROWS:]))
        tables: list[PageTable] = [federated.rounds_table(newest)] if reports else []
        left = _left_out(len(reports), "rounds")
        return [
            Section(title="Newest rounds", text=left, tables=tables),
            Section(title="Evaluation by clients", tables=federated.evaluation_tables(files)),
            Section(title="Clients", tables=_clients_tables(files)),
            federated.faults(files.whole.faults, files.names, any_round=bool(reports)),
        ]
    newest_epochs = list(reversed(files.epochs[-MAX_ROWS:]))
    return [
        Section(
            title="Newest epochs",
            text=_left_out(len(files.epochs), "epochs"),
            tables=[parallel.epochs_table(newest_epochs)] if newest_epochs else [],
        ),
        Section(title="Ranks", tables=[parallel.ranks_table(files.profiles)] if files.profiles else []),
    ]


def _clients_tables(files: RunFiles) -> list[PageTable]:
    return federated.clients_tables([r for r in files.rounds if r.timeline], files.whole, files.names)


def _left_out(count: int, unit: str) -> str:
    return f"{count - MAX_ROWS} earlier {unit} are left out." if count > MAX_ROWS else ""


def _settings(files: RunFiles) -> Section:
    defaults = ControllerFile() if files.kind == "federated" else WorkerFile()
    return settings_section(files.config, defaults.model_dump(mode="json"))
