"""The report on a federated run."""

from __future__ import annotations

from collections.abc import Sequence

from gradbus.actors.federated.report import RoundReport
from gradbus.actors.federated.timeline import MAX_CLIENTS, ClientTimeline
from gradbus.experiments.files import ControllerFile
from gradbus.experiments.report import figures as figures
from gradbus.experiments.report import style
from gradbus.experiments.report.faults import faults
from gradbus.experiments.report.page import (
    Column,
    Figure,
    Page,
    Section,
    Table,
    Tile,
    duration,
    facts_table,
    listed,
    rows_of,
    settings_tables,
    thinned,
)
from gradbus.experiments.report.style import Look
from gradbus.experiments.run.live import percent, size
from gradbus.experiments.rundir.directory import totals
from gradbus.experiments.rundir.reading import Run

MAX_TABLE_ROWS = 400


def page_of(run: Run) -> Page:
    """All that its files tell."""
    reports = run.rounds
    wanted = run.setting("federated", "rounds")
    outcome = str(run.summary.get("outcome") or "not finished")
    return Page(
        title=str(run.summary.get("job") or run.setting("bus", "job") or run.name),
        lead=_lead(run),
        state=outcome,
        good=outcome == "done",
        tiles=_tiles(run, wanted),
        notes=_notes(run, wanted),
        sections=(
            Section(title="Learning", figures=[_learning(run)]),
            _time(reports),
            _bytes(run),
            _norms(reports),
            faults(reports),
            Section(title="Rounds", tables=[rounds_table(reports)] if reports else []),
            Section(
                title="Configuration",
                text="Settings in bold are not the default." if run.config else "",
                tables=settings_tables(run.config, ControllerFile().model_dump(mode="json")),
            ),
            Section(title="Versions and machine", tables=[facts_table(run.summary)] if run.summary else []),
        ),
    )


def codec_look(run: Run, key: str) -> Look:
    """How curves of the codec look that ``federated.codec`` or ``federated.downlink_codec`` names."""
    name = str(run.setting("federated", key, "fp32"))
    return style.look_of(name) if name in style.CODECS else style.nth_look(0, name)


def _lead(run: Run) -> str:
    up, down = (run.setting("federated", key, "?") for key in ("codec", "downlink_codec"))
    what = f"Federated run, codec {up} up and {down} down" if run.config else "Federated run"
    return f"{what}; {told}." if (told := task_of(run)) else f"{what}."


def task_of(run: Run) -> str:
    """Model and data in a few words; where the data lie is in the table of facts."""
    own, model = run.setting("task", "task"), run.setting("task", "model")
    data = str(run.summary.get("data") or "").split(" from ")[0]
    return " on ".join(str(part) for part in (own or model, data) if part)


def _tiles(run: Run, wanted: int | None) -> list[Tile]:
    reports = run.rounds
    if not reports:
        return []
    sums = totals(reports)
    clients = {client for report in reports for client in report.clients}
    return [
        Tile(name="test accuracy", value=percent(sums["accuracy"]), note=f"best {percent(sums['best_accuracy'])}"),
        Tile(name="rounds", value=f"{len(reports)}", note=f"of {wanted}" if wanted else ""),
        Tile(name="clients", value=str(len(clients)), note="whose updates count"),
        Tile(name="up", value=size(sums["bytes_up"]), note=f"{size(sums['bytes_up'] // len(reports))} a round"),
        Tile(name="down", value=size(sums["bytes_down"]), note=f"{size(sums['bytes_down'] // len(reports))} a round"),
        Tile(
            name="a round", value=duration(sorted(r.seconds for r in reports)[len(reports) // 2]),
            note="median, without evaluation",
        ),
        Tile(name="evaluation", value=duration(sums["eval_s"]), note="in all, on the controller; no bytes"),
        *([Tile(name="the run", value=duration(run.summary["wall_s"]), note="from start to end, all included")]
          if run.summary.get("wall_s") else []),
    ]  # fmt: skip


def _notes(run: Run, wanted: int | None) -> list[str]:
    notes = list(run.missing)
    reports = run.rounds
    if not reports:
        return notes
    gaps = sorted(set(range(1, reports[-1].round_id + 1)) - {report.round_id for report in reports})
    if gaps:
        notes.append(f"Of round {listed(gaps)} there is no report.")
    if run.summary.get("outcome") == "done" and wanted and reports[-1].round_id < wanted:
        notes.append(f"The run is said to be done, but its last report is of round {reports[-1].round_id} of {wanted}.")
    never = run.summary.get("never_counted")
    named = [one for one in never if isinstance(one, dict)] if isinstance(never, list) else []
    notes += [f"Of client {one.get('client')} no update has ever counted: {one.get('reason')}." for one in named]
    if not any(report.timeline for report in reports):
        notes.append("There are no timelines of clients: the run was made by an older program.")
    return notes


def _learning(run: Run) -> Figure:
    curve = figures.curve_of(run.rounds, codec_look(run, "codec"))
    return Figure(
        picture=figures.draw_curves([curve], "learning", counted="round"),
        title="Accuracy and loss over rounds, bytes and time",
        caption="Above: accuracy of the global model on the test set. Below: mean loss of the clients' training, and "
        "of the test set. Bytes are encoded updates and models, up and down together; time includes the evaluation.",
    )


def _time(reports: Sequence[RoundReport]) -> Section:
    shown = [
        Figure(
            picture=figures.draw_round_times(reports, "round-times"),
            title="Time of each round",
            caption="From the command to the published model. Training and encoding are those of the slowest client; "
            "wire and waiting is what is left of the time until the last update was in.",
        )
    ]
    for index, (what, report) in enumerate(figures.typical_rounds(reports)):
        left_out = report.updates - min(len(report.timeline), figures.MAX_ROWS)
        who = f" Of {report.updates} clients the {report.updates - left_out} that counted last." if left_out else ""
        shown.append(
            Figure(
                picture=figures.draw_timeline(report, f"timeline-{index + 1}"),
                title=f"Where the time went in {what}: round {report.round_id}, {duration(report.seconds)}",
                caption=(_TIMELINE if index == 0 else "As above.") + who,
            )
        )
    return Section(title="Time", figures=shown, tables=[table] if (table := clients_table(reports)) else [])


_TIMELINE = (
    "Send: the command and the offer on their way; at the end, the model. Wait: for the model, or for earlier work. "
    "Queue: until the controller lets the client send, and until it is the update's turn to be added. Decode: into the "
    "sum. On the right the same from where each client's training ended, and for the controller from the last update "
    "on. Clients say how long they worked, by their own clocks; all else is by the clock of the controller."
)


def clients_table(reports: Sequence[RoundReport]) -> Table | None:
    """Means of each client over its rounds. None: there are no timelines."""
    of_client: dict[int, list[ClientTimeline]] = {}
    for report in reports:
        for client in report.timeline:
            of_client.setdefault(client.client_id, []).append(client)
    if not of_client:
        return None
    known = sorted(of_client.items())
    means: dict[str, list[float]] = {phase: [] for phase in _CLIENT_PHASES}
    for _, timelines in known:
        pieces = [piece for timeline in timelines for piece in timeline.pieces()]
        for phase, values in means.items():
            spent_s = sum(piece.end_s - piece.start_s for piece in pieces if piece.phase == phase)
            values.append(spent_s / len(timelines))
    columns = [
        Column(name="client", values=[client_id for client_id, _ in known]),
        Column(name="rounds", values=[len(timelines) for _, timelines in known]),
        *(Column.of_times(phase, values) for phase, values in means.items()),
        Column.of_bytes("update", [sum(t.num_bytes for t in found) / len(found) for _, found in known]),
    ]
    shown, left_out = thinned(rows_of(columns), MAX_TABLE_ROWS)
    many = any(report.updates > len(report.timeline) > 0 for report in reports)
    return Table(
        name="clients", title="Clients: means per round",
        head=[column.head for column in columns], rows=shown,
        caption=(f"Only rounds in which the client was among the {MAX_CLIENTS} that counted last. " if many else "")
        + (f"{left_out} clients are left out." if left_out else ""),
    )  # fmt: skip


_CLIENT_PHASES = ("send", "wait", "train", "encode", "queue", "upload", "decode")


def _bytes(run: Run) -> Section:
    up, down = codec_look(run, "codec"), codec_look(run, "downlink_codec")
    return Section(
        title="Bytes",
        figures=[
            Figure(
                picture=figures.draw_bytes(run.rounds, "bytes", up=up, down=down),
                title="Bytes of each round, up and down",
                caption="Encoded updates that count, and the encoded model times the clients it went to. What frames, "
                "DDS and repetitions add is not in here.",
            )
        ],
    )


def _norms(reports: Sequence[RoundReport]) -> Section:
    return Section(
        title="What the codecs owe",
        figures=[
            Figure(
                picture=figures.draw_norms(reports, "norms"),
                title="L2 norms of updates, and of the residuals of their codecs",
                caption="A lossy codec does not say all of an update; the rest is its residual, and is said later. It "
                "should stay within a few times an update; one that only grows is never paid back. Controller: what "
                "its message to the clients did not say.",
            )
        ],
    )


def rounds_table(reports: Sequence[RoundReport]) -> Table:
    """A row for each round."""
    columns = [
        Column(name="round", values=[r.round_id for r in reports]),
        Column(name="clients", values=[r.updates for r in reports]),
        Column(name="loss", values=[r.loss for r in reports], digits=4),
        Column(name="accuracy", values=[r.accuracy for r in reports], unit="%", factor=0.01, digits=2),
        Column(name="test loss", values=[r.eval_loss for r in reports], digits=4),
        Column.of_bytes("up", [r.bytes_up for r in reports]),
        Column.of_bytes("down", [r.bytes_down for r in reports]),
        Column.of_times("train", [r.train_s for r in reports]),
        Column.of_times("encode", [r.encode_s for r in reports]),
        Column.of_times("wire", [r.wire_s for r in reports]),
        Column.of_times("aggregate", [r.aggregate_s for r in reports]),
        Column.of_times("checkpoint", [r.checkpoint_s for r in reports]),
        Column.of_times("publish", [r.publish_s for r in reports]),
        Column.of_times("total", [r.seconds for r in reports]),
        Column.of_times("evaluate", [r.eval_s for r in reports]),
        Column(name="dropped", values=[sum(r.dropped.values()) for r in reports]),
    ]
    rows = rows_of(columns)
    for row, report in zip(rows, reports, strict=True):
        row[1] += f"/{report.expected}"
    shown, left_out = thinned(rows, MAX_TABLE_ROWS)
    return Table(
        name="rounds",
        head=[column.head for column in columns],
        rows=shown,
        caption=f"{left_out} rounds are left out; rounds.jsonl has all of them." if left_out else "",
    )  # fmt: skip
