"""The report on a federated run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gradbus.actors.federated.client_names import label_of
from gradbus.actors.federated.controller.participation import FOR_GOOD
from gradbus.actors.federated.controller.report import MAX_CLIENTS, ClientTimeline, RoundReport
from gradbus.actors.federated.controller.update_admission import Strike
from gradbus.commands.amounts import duration, size
from gradbus.commands.amounts import number as decimal
from gradbus.commands.files import ControllerFile
from gradbus.commands.report import figures as draw
from gradbus.commands.report import style
from gradbus.commands.report.metric_parts import (
    accuracy_columns,
    client_columns,
    client_tiles,
    metric_columns,
    quality_name,
    quality_tiles,
)
from gradbus.commands.report.page import (
    MAX_ROWS,
    Page,
    PageFigure,
    PageTable,
    Section,
    Tile,
    byte_column,
    column,
    column_table,
    row_table,
    run_page,
    time_column,
)
from gradbus.commands.report.shown_metrics import MAX_SHOWN_METRICS
from gradbus.commands.rundir.reading import RunFiles
from gradbus.commands.rundir.whole_run import MAX_NAMES, RoundFaults, Uneven, WholeRun
from gradbus.runtime.config.federated import TRUST_MEANS
from gradbus.runtime.plain_text import plain_line

MAX_FAULTS = 60  # rows of a table of faults

SPREAD = ("mean", "median", "std", "min", "max")  # of a metric over clients


def page_of(run: RunFiles) -> Page:
    """The page on one run."""
    reports = run.rounds
    names = [str(run.setting("federated", key, "fp32")) for key in ("codec.name", "downlink_codec.name")]
    up, down = map(style.look_of, names)
    curve = draw.curve_of_rounds(reports, up, run.spent)
    what = "Federated run" + (", codec {} up and {} down".format(*names) if run.config else "")
    return run_page(
        run,
        what,
        ControllerFile(),
        tiles=tiles_of(run) if reports else [],
        notes=[*run.missing, *(_notes(run) if reports else [])],
        sections=[
            Section(
                title="Learning",
                figures=[
                    PageFigure(
                        "learning",
                        partial(draw.draw_curves, [curve], counted="round", sent="sent, up and down"),
                        f"{quality_name(reports)} and loss over rounds, bytes and time",
                        f"Above: {quality_name(reports)} of the global model on the test set. Below: mean loss of "
                        "the clients' "
                        "training, and of the test set. Bytes are encoded updates and models, up and down together; "
                        "time includes the evaluation.",
                    )
                ],
            ),
            Section(
                title="Training at the clients",
                figures=[
                    PageFigure(
                        "client-training",
                        partial(draw.draw_client_training, reports, run.names),
                        "Training at each client",
                        f"As the clients announce them. {of_each(run.whole)}".rstrip(),
                    )
                ],
            ),
            evaluation(run),
            _time(reports, run.whole, run.names),
            Section(
                title="Bytes",
                figures=[
                    PageFigure(
                        "bytes",
                        partial(draw.draw_bytes, reports, up=up, down=down),
                        "Bytes of each round, up and down",
                        "Encoded updates that count, and the encoded model times the clients it went to. What "
                        "frames, DDS and repetitions add is not included.",
                    )
                ],
            ),
            Section(
                title="Residuals of the codecs",
                figures=[
                    PageFigure(
                        "norms",
                        partial(draw.draw_norms, reports, run.names),
                        "L2 norms of updates, and of the residuals of their codecs",
                        "A lossy codec sends a part of an update; the rest is its residual, and is sent later. It "
                        "should stay "
                        "within a few times an update; one that only grows is never sent. Controller: the residual "
                        "of its message to the clients.",
                    )
                ],
            ),
            faults(run.whole.faults, run.names, any_round=bool(reports)),
            Section(title="Rounds", tables=[rounds_table(reports, run.whole.sums.rounds)] if reports else []),
        ],
    )


def tiles_of(run: RunFiles) -> list[Tile]:
    """The key numbers of a run with a report."""
    reports, whole = run.rounds, run.whole
    count, sums = whole.sums.rounds, whole.sums.sums
    clients = f"{len(whole.clients)}" + (" or more" if len(whole.clients) >= MAX_NAMES else "")
    wanted, wall_s, epsilon = run.setting("federated", "rounds"), run.number("wall_s"), reports[-1].epsilon
    budget, trust = run.setting("federated", "privacy.epsilon"), run.setting("federated", "limits.trust")
    allowed = f", of {budget:g} allowed" if isinstance(budget, int | float) else ""
    return [
        *quality_tiles(reports),
        *client_tiles(reports),
        Tile("rounds", str(count), f"of {wanted}" if wanted else ""),
        Tile("clients", clients, "whose updates count"),
        *([Tile("trust", str(trust), TRUST_MEANS[trust])] if trust in TRUST_MEANS else []),
        Tile("up", size(sums["bytes_up"]), f"{size(int(sums['bytes_up']) // count)} a round"),
        Tile("down", size(sums["bytes_down"]), f"{size(int(sums['bytes_down']) // count)} a round"),
        Tile("a round", duration(whole.median_s), "median, without evaluation"),
        Tile("evaluation", duration(sums["eval_s"]), "in all, on the controller; no bytes"),
        *(
            [Tile("epsilon", f"{epsilon:.3g}", f"of differential privacy, spent{allowed}")]
            if epsilon is not None
            else []
        ),
        *([Tile("the run", duration(wall_s), "from start to end, all included")] if wall_s else []),
    ]


def _notes(run: RunFiles) -> list[str]:
    """Return what a reader has to know first: an early end, and contradictions between the files of a run that has done
    a round."""
    notes, last, wanted = [], run.rounds[-1].round_id, run.setting("federated", "rounds")
    if run.whole.gaps.count:
        notes.append(f"Of round {run.whole.gaps.text} there is no report.")
    if early := run.summary.get("ended_early"):
        notes.append(f"The run ended after round {last} of {wanted}: {early}.")
    elif run.summary.get("outcome") == "done" and isinstance(wanted, int) and last < wanted:
        notes.append(f"By its summary the run is done, but its last report is of round {last} of {wanted}.")
    never = run.summary.get("never_counted")
    named = [one for one in never if isinstance(one, dict)] if isinstance(never, list) else []
    notes += [f"Of client {_client_in(one)} no update has ever counted: {one.get('reason')}." for one in named]
    if not run.whole.has_timelines:
        notes.append("There are no timelines of clients: the run was made by an older program.")
    return notes


def _client_in(entry: Mapping[str, Any]) -> str:
    """Id and name of a client that a summary names."""
    return f"{entry.get('client')} ({entry['name']})" if "name" in entry else str(entry.get("client"))


# -- evaluation by clients ---------------------------------------------------------------------------------------------


def evaluation(run: RunFiles) -> Section:
    """Return what clients have found on data of their own, and local models on the data of all; empty where none was
    asked."""
    figures = [*client_figures(run), *cross_site_figures(run)]
    return Section(title="Evaluation by clients", figures=figures, tables=evaluation_tables(run))


def client_figures(run: RunFiles) -> list[PageFigure]:
    """The metrics of evaluations by clients; none where there were none."""
    if not any(report.by_clients.metrics for report in run.rounds):
        return []
    return [
        PageFigure(
            "clients-metrics",
            partial(draw.draw_client_metrics, run.rounds),
            "What clients find on data of their own",
            "The global model on samples that each client does not train on. Line: mean over clients, weighted by "
            "samples; band: from the least to the largest value.",
        )
    ]


def cross_site_figures(run: RunFiles) -> list[PageFigure]:
    """A heat map for each of the first metrics of a cross-site evaluation."""
    found = run.cross_site
    if found is None:
        return []
    return [
        PageFigure(
            f"cross-site-{place}",
            partial(draw.draw_cross_site, found, name, run.names),
            f"{plain_line(name)} of each model on the data of each client",
            f"After round {found.round_id}. The models are those of each client's last training, and the global one. "
            "An empty cell: the client was lost, or had no result.",
        )
        for place, name in enumerate(found.names()[:MAX_SHOWN_METRICS])
    ]


def evaluation_tables(run: RunFiles) -> list[PageTable]:
    """The newest evaluation by clients, metric by metric; why results are missing; models that were not shown."""
    newest = next((report for report in reversed(run.rounds) if report.by_clients.asked), None)
    if newest is None and run.cross_site is None:
        return []
    tables: list[PageTable] = []
    if newest is not None:
        found = newest.by_clients
        rows = [
            [
                plain_line(name),
                *(decimal(one.spread.get(of), 4) for of in SPREAD),
                str(one.clients),
                ", ".join(f"{run.client(who)} ({decimal(value, 4)})" for who, value in one.worst),
            ]
            for name, one in found.metrics.items()
        ]
        title = f"After round {newest.round_id}: {found.answered} of {found.asked} clients, {found.num_samples} samples"
        tables.append(
            row_table(
                "by-clients",
                ("metric", *SPREAD, "clients", "worst clients"),
                rows,
                "metrics",
                title=title,
            )
        )
        tables.append(
            row_table(
                "by-clients-missing",
                ("why there is no result", "clients"),
                [[reason, str(count)] for reason, count in found.missing.items()],
                "reasons",
            )
        )
    if run.cross_site is not None:
        tables.append(
            row_table(
                "cross-site-missing",
                ("client", "why its model was not evaluated"),
                [
                    ["global" if row.model is None else run.client(row.model), row.failure]
                    for row in run.cross_site.rows
                    if row.failure
                ],
                "clients",
                most=MAX_FAULTS,
            )
        )
    return [table for table in tables if table.rows]


# -- time --------------------------------------------------------------------------------------------------------------

_TIMELINE = (
    "Send: the command and the offer on their way; at the end, the model. Wait: for the model, or for earlier work. "
    "Queue: until the controller lets the client send, and until it is the update's turn to be added. Decode: into the "
    "sum. On the right the same from where each client's training ended, and for the controller from the last update "
    "on. Clients report how long they worked, by their own clocks; all else is by the clock of the controller."
)


def _time(reports: Sequence[RoundReport], whole: WholeRun, names: Mapping[int, str]) -> Section:
    shown = [PageFigure(
        "round-times", partial(draw.draw_round_times, reports), "Time of each round",
        "From the command to the published model. Training and encoding are those of the slowest client; wire and "
        "waiting is what is left of the time until the last update was in.",
    )]  # fmt: skip
    for index, (what, report) in enumerate(draw.typical_rounds(reports), start=1):
        rows = min(len(report.timeline), draw.MAX_CLIENTS)
        some = f" Of {report.updates} clients the {rows} that counted last." if report.updates > rows else ""
        title = f"Where the time went in {what}: round {report.round_id}, {duration(report.seconds)}"
        caption = (_TIMELINE if index == 1 else "As above.") + some
        shown.append(PageFigure(f"timeline-{index}", partial(draw.draw_timeline, report, names), title, caption))
    return Section(title="Time", figures=shown, tables=clients_tables(reports, whole, names))


def clients_tables(reports: Sequence[RoundReport], whole: WholeRun, names: Mapping[int, str]) -> list[PageTable]:
    """The means of each client over its rounds, as far as these are kept; no table without timelines."""
    of_client: dict[int, list[ClientTimeline]] = {}
    for report in reports:
        for client in report.timeline:
            of_client.setdefault(client.client_id, []).append(client)
    if not of_client:
        return []
    ids = sorted(of_client)
    pieces = {i: [piece for timeline in of_client[i] for piece in timeline.pieces()] for i in ids}

    def mean_s(phase: str) -> list[float]:
        return [sum(p.end_s - p.start_s for p in pieces[i] if p.phase == phase) / len(of_client[i]) for i in ids]

    phases = ("send", "wait", "train", "encode", "queue", "upload", "decode")
    columns = [
        column("client", ids)._replace(cells=[label_of(i, names) for i in ids]),
        column("rounds", [len(of_client[i]) for i in ids]),
        *(time_column(phase, mean_s(phase)) for phase in phases),
        byte_column("update", [sum(t.num_bytes for t in of_client[i]) / len(of_client[i]) for i in ids]),
    ]
    return [column_table("clients", columns, "clients", title="Clients: means per round", caption=of_each(whole))]


def of_each(whole: WholeRun) -> str:
    """Return which rounds figures of single clients are of, where these are not all."""
    known = [f"Only rounds in which the client was among the {MAX_CLIENTS} that counted last."] * whole.some_timelines
    return " ".join([*known, *["Only of a sample of the rounds."] * whole.is_thinned])


def rounds_table(reports: Sequence[RoundReport], total: int | None = None) -> PageTable:
    """A row for each round. ``total``: rounds, of which ``reports`` has the first and the last, and some others."""
    if total is not None and total > MAX_ROWS:
        reports = [*reports[: MAX_ROWS // 2], *reports[-(MAX_ROWS // 2) :]]
    updates = column("clients", [r.updates for r in reports])
    columns = [
        column("round", [r.round_id for r in reports]),
        updates._replace(cells=[f"{cell}/{r.expected}" for cell, r in zip(updates.cells, reports, strict=True)]),
        column("loss", [r.loss for r in reports], digits=4),
        *accuracy_columns(reports),
        column("test loss", [r.eval_loss for r in reports], digits=4),
        *metric_columns([r.metrics for r in reports]),
        *metric_columns([r.train_metrics for r in reports], " in training"),
        *client_columns(reports),
        byte_column("up", [r.bytes_up for r in reports]),
        byte_column("down", [r.bytes_down for r in reports]),
        time_column("train", [r.train_s for r in reports]),
        time_column("encode", [r.encode_s for r in reports]),
        time_column("wire", [r.wire_s for r in reports]),
        time_column("aggregate", [r.aggregate_s for r in reports]),
        time_column("checkpoint", [r.checkpoint_s for r in reports]),
        time_column("publish", [r.publish_s for r in reports]),
        time_column("total", [r.seconds for r in reports]),
        time_column("evaluate", [r.eval_s for r in reports]),
        column("dropped", [sum(r.dropped.values()) for r in reports]),
    ]
    return column_table("rounds", columns, "rounds", file="rounds.jsonl", total=total)


# -- faults ------------------------------------------------------------------------------------------------------------

REASONS = {
    "client lost": "died, or left, while its update was expected",
    "client silent": "lived and sent nothing for too long outside of its training",
    "training failed": "its training function raised; see its log",
    "non-finite loss": "its training ended with a loss of NaN or infinity; its update was not sent",
    "non-finite model": "its training ended with NaN or infinity in the model; its update was not sent",
    "cut short": "died in the middle of an upload",
    "stalled": "sent nothing for ten seconds in the middle of an upload",
    "stale": "offered for a round that was not open any more",
    "unexpected": "offered by a client that counts already, or does not take part",
    "malformed": "bytes that no codec accepts",
    "non-finite": "NaN or infinity in the update",
    "oversized": "more bytes than this codec and model can need",
    "samples": "a number of samples out of range",
    "refused": "the strategy could not use it",
    "quarantine": "offered by a client that is kept out",
    "no room": "there was no memory for one more update; not its client's fault",
    "mismatch": "frames that do not fit their offer",
    "late frame": "came when no round was open",
    "unexpected frame": "belongs to no update that was granted",
    "repeated frame": "came twice; harmless",
    "crc": "damaged on the way",
    "handler failed": "a mistake of gradbus; the log has its traceback",
}
"""The meaning of the reasons in a report. Others explain themselves, or come from the wire: see docs/wire.md."""


def faults(found: RoundFaults, names: Mapping[int, str], *, any_round: bool) -> Section:
    """Updates and frames that did not count, rounds that did not go smoothly, and clients with bad updates."""
    marked_clients = sorted({client for counts in found.marks.values() for client in counts})
    tables = [
        row_table(
            "dropped", ("reason", "times", "in round", "meaning"),
            [[reason, str(count), found.in_rounds[reason].text, REASONS.get(reason, "")]
             for reason, count in found.dropped.most_common()],
            "reasons", title="Not counted, by reason",
        ),
        row_table(
            "uneven", ("round", "clients", "attempts", "ended by"),
            [_row_of(one) for one in (*found.uneven_first, *found.uneven_last)], "rounds", most=MAX_FAULTS,
            title="Rounds that some client missed, or that were tried again", total=found.uneven,
        ),
        row_table(
            "strikes", ("client", "strikes", "in round", "the last", "what was wrong", "kept out"),
            [[label_of(client, names), str(struck.rounds.count), struck.rounds.text, struck.last.reason,
              struck.last.detail, _spans(struck.out)]
             for client, struck in sorted(found.strikes.items()) if struck.last is not None],
            "clients", most=MAX_FAULTS, title="Clients with bad updates",
        ),
        row_table(
            "marks", ("client", *found.marks),
            [[label_of(client, names), *(str(counts[client]) for counts in found.marks.values())]
             for client in marked_clients],
            "clients", most=MAX_FAULTS, title="Updates that did not count as they were, in how many rounds",
        ),
    ]  # fmt: skip
    shown = [table for table in tables if table.rows]
    smooth = "Every update that was expected counted, in the first attempt." if any_round and not shown else ""
    return Section(title="Drops and faults", text=smooth, tables=shown)


def _row_of(one: Uneven) -> list[str]:
    return [str(one.round_id), f"{one.updates} of {one.expected}", str(one.attempt), one.outcome]


def _spans(strikes: Sequence[Strike]) -> str:
    """The rounds for which a client was kept out."""
    spans = [
        f"from {s.round_id + 1} on" if s.out_until == FOR_GOOD else f"{s.round_id + 1} to {s.out_until - 1}"
        for s in strikes
        if s.out_until
    ]
    return ", ".join(spans) or "no"
