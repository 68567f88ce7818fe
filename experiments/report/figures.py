"""The figures of a report on a federated run, drawn from its reports alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from gradbus.actors.federated.report import RoundReport
from gradbus.actors.federated.timeline import ClientTimeline, Piece
from gradbus.experiments.report import style
from gradbus.experiments.report.style import Look
from gradbus.experiments.report.svg import Picture, new_figure, picture_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_BARS = 60  # rounds that are drawn as bars; more become an area
MAX_ROWS = 24  # clients of a timeline
MAX_LINES = 10  # clients that get a line of their own


@dataclass(frozen=True, slots=True)
class Curve:
    """How good a model was, and what it had cost until then; a value for each report.

    Attributes:
        look: of its lines. counts: rounds or epochs. num_bytes: sent until then, both ways. seconds: spent until then.
        accuracy, loss, eval_loss: NaN where there is none.
    """

    look: Look
    counts: Sequence[float]
    num_bytes: Sequence[float]
    seconds: Sequence[float]
    accuracy: Sequence[float]
    loss: Sequence[float]
    eval_loss: Sequence[float]


def curve_of(reports: Sequence[RoundReport], look: Look) -> Curve:
    """Of a federated run. The time has the evaluation in it, as the clock on the wall has."""
    return Curve(
        look,
        [report.round_id for report in reports],
        list(accumulate(report.bytes_up + report.bytes_down for report in reports)),
        list(accumulate(report.seconds + report.eval_s for report in reports)),
        [_or_nan(report.accuracy) for report in reports],
        [_or_nan(report.loss) for report in reports],
        [_or_nan(report.eval_loss) for report in reports],
    )


def draw_curves(curves: Sequence[Curve], name: str, *, counted: str, sent: str = "sent, up and down") -> Picture | None:
    """Accuracy and loss over rounds or epochs, over bytes and over time. None: there are none."""
    curves = [curve for curve in curves if curve.counts]
    if not curves:
        return None
    bytes_ = style.byte_unit(max(max(curve.num_bytes) for curve in curves))
    times = style.time_unit(max(max(curve.seconds) for curve in curves))
    many = len(curves) > 1
    with style.drawing():
        figure, axes = new_figure(2, 3, height_in=4.6, sharex="col", sharey="row")
        for curve in curves:
            across = (
                list(curve.counts),
                [value / bytes_.factor for value in curve.num_bytes],
                [value / times.factor for value in curve.seconds],
            )
            line: dict[str, Any] = {
                "color": curve.look.color,
                "marker": curve.look.marker if len(curve.counts) <= MAX_BARS else "",
            }
            for column, xs in enumerate(across):
                upper, lower = axes[column], axes[3 + column]
                known = [(x, 100 * y) for x, y in zip(xs, curve.accuracy, strict=True) if math.isfinite(y)]
                upper.plot(*zip(*known, strict=True) if known else ([], []), label=curve.look.label, **line)
                lower.plot(xs, curve.loss, label="training", **line)
                tested = [(x, y) for x, y in zip(xs, curve.eval_loss, strict=True) if math.isfinite(y)]
                if tested and not many:
                    lower.plot(
                        *zip(*tested, strict=True), label="test", color=style.GREY, linestyle="--",
                        marker=line["marker"], markerfacecolor="none",
                    )  # fmt: skip
        for axis in axes[:3]:
            axis.margins(y=0.08)
        losses = [value for curve in curves for value in curve.loss if math.isfinite(value) and value > 0]
        if losses and max(losses) > 20 * min(losses):
            axes[3].set_yscale("log")
        axes[0].set_ylabel("test accuracy / %")
        axes[3].set_ylabel("training loss" if many else "loss")
        axes[3].set_xlabel(counted)
        axes[4].set_xlabel(f"{sent} / {bytes_.name}")
        axes[5].set_xlabel(f"time / {times.name}")
        style.whole_numbers(axes[3].xaxis)
        if many:
            handles, labels = axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper left", ncols=3, columnspacing=1.2)
        else:
            axes[5].legend(loc="upper right")
        return picture_of(figure, name)


PARTS: tuple[tuple[str, str, Callable[[RoundReport], float]], ...] = (
    ("train (slowest)", style.PHASES["train"], lambda report: report.train_s),
    ("encode (slowest)", style.PHASES["encode"], lambda report: report.encode_s),
    ("wire and waiting", style.PHASES["upload"], lambda report: report.wire_s),
    ("decode, aggregate", style.PHASES["aggregate"], lambda report: report.aggregate_s),
    ("checkpoint", style.PHASES["checkpoint"], lambda report: report.checkpoint_s),
    ("publish", style.PHASES["send"], lambda report: report.publish_s),
)
"""Parts of a round's time: label, colour, seconds. They add up to the round, to rounding."""


def draw_round_times(reports: Sequence[RoundReport], name: str) -> Picture | None:
    """Where the time of each round went; and once more without training, which hides the rest."""
    if not reports:
        return None
    rounds = [report.round_id for report in reports]
    with style.drawing():
        figure, (whole, rest) = new_figure(1, 2, height_in=3.7)
        _stack(whole, rounds, [(label, color, [of(r) for r in reports]) for label, color, of in PARTS])
        overhead = [(label, color, [of(r) for r in reports]) for label, color, of in PARTS[1:]]
        _stack(rest, rounds, overhead)
        whole.set_title("all of it")
        rest.set_title("without training")
        for axes in (whole, rest):
            axes.set_xlabel("round")
            style.whole_numbers(axes.xaxis)
        style.legend_of_colors(figure, {label: color for label, color, _ in PARTS})
        return picture_of(figure, name)


def _stack(axes: Axes, xs: Sequence[int], parts: Sequence[tuple[str, str, Sequence[float]]]) -> None:
    """Stacked bars of seconds over rounds; an area where there are too many for bars."""
    total_s = max((sum(values[i] for _, _, values in parts) for i in range(len(xs))), default=0.0)
    unit = style.time_unit(total_s)
    axes.set_ylabel(f"time / {unit.name}")
    axes.grid(visible=False, axis="x")
    scaled = [[value / unit.factor for value in values] for _, _, values in parts]
    if len(xs) > MAX_BARS:
        labels, colors = [label for label, _, _ in parts], [color for _, color, _ in parts]
        axes.stackplot(xs, scaled, labels=labels, colors=colors)
        return
    below = [0.0] * len(xs)
    for (label, color, _), values in zip(parts, scaled, strict=True):
        axes.bar(xs, values, bottom=below, color=color, label=label, width=style.bar_width(len(xs)))
        below = [low + value for low, value in zip(below, values, strict=True)]


def typical_rounds(reports: Sequence[RoundReport]) -> list[tuple[str, RoundReport]]:
    """Rounds whose timelines are worth looking at: the one of median length and the longest; those that have one."""
    known = sorted((report for report in reports if report.timeline), key=lambda report: report.seconds)
    if not known:
        return []
    median, longest = known[(len(known) - 1) // 2], known[-1]
    chosen = [("a typical round", median)]
    return chosen if longest is median else [*chosen, ("the longest round", longest)]


def draw_timeline(report: RoundReport, name: str) -> Picture:
    """A row for each client, from the command to the sum, and one for the controller; on the right once more from where
    the training of each ended, and the last update was in."""
    shown = sorted(sorted(report.timeline, key=lambda c: c.counted_s)[-MAX_ROWS:], key=lambda c: c.client_id)
    rows = [(f"client {client.client_id}", client.pieces()) for client in shown]
    rows.append(("controller", list(controller_pieces(report))))
    own = rows[-1][1]
    after = [
        *(list(_after_training(pieces)) for _, pieces in rows[:-1]),
        [Piece(piece.phase, piece.start_s - own[0].start_s, piece.end_s - own[0].start_s) for piece in own],
    ]
    height_in = 1.45 + 0.3 * len(rows)
    with style.drawing():
        figure, (whole, rest) = new_figure(1, 2, height_in=height_in, sharey=True, gridspec_kw={"width_ratios": [3, 2]})
        _rows(whole, [pieces for _, pieces in rows])
        _rows(rest, after)
        whole.set_yticks(range(len(rows)), [label for label, _ in rows])
        whole.invert_yaxis()
        whole.set_title("from the command")
        rest.set_title("from the end of training")
        used = {piece.phase: style.PHASES[piece.phase] for _, pieces in rows for piece in pieces}
        style.legend_of_colors(figure, {phase: used[phase] for phase in style.PHASES if phase in used})
        return picture_of(figure, name)


def controller_pieces(report: RoundReport) -> Iterator[Piece]:
    """What the controller does when the updates are in: the model, the checkpoint, the message."""
    end_s = report.seconds - report.command_s
    published_s, saved_s = end_s - report.publish_s, end_s - report.publish_s - report.checkpoint_s
    yield Piece("aggregate", saved_s - report.step_s, saved_s)
    yield Piece("checkpoint", saved_s, published_s)
    yield Piece("send", published_s, end_s)


def _after_training(pieces: Iterable[Piece]) -> Iterator[Piece]:
    trained_s = None
    for piece in pieces:
        if trained_s is not None:
            yield Piece(piece.phase, piece.start_s - trained_s, piece.end_s - trained_s)
        if piece.phase == "train":
            trained_s = piece.end_s


def _rows(axes: Axes, rows: Sequence[Sequence[Piece]]) -> None:
    unit = style.time_unit(max((piece.end_s for pieces in rows for piece in pieces), default=0.0))
    for row, pieces in enumerate(rows):
        spans = [(piece.start_s / unit.factor, (piece.end_s - piece.start_s) / unit.factor) for piece in pieces]
        axes.broken_barh(spans, (row - 0.36, 0.72), facecolors=[style.PHASES[piece.phase] for piece in pieces])
    axes.set_xlabel(f"time / {unit.name}")
    axes.grid(visible=False, axis="y")
    axes.set_xlim(left=0.0)


def draw_bytes(reports: Sequence[RoundReport], name: str, *, up: Look, down: Look) -> Picture | None:
    """What each round sent: updates to the controller, models to the clients."""
    if not reports:
        return None
    unit = style.byte_unit(max(max(report.bytes_up, report.bytes_down) for report in reports))
    rounds = [report.round_id for report in reports]
    with style.drawing():
        figure, axes = new_figure(1, 2, height_in=2.9, sharex=True)
        for axis, title, look, sizes in (
            (axes[0], "up: the updates that count", up, [report.bytes_up for report in reports]),
            (axes[1], "down: model times clients", down, [report.bytes_down for report in reports]),
        ):
            _stack_bytes(axis, rounds, [size / unit.factor for size in sizes], look)
            axis.set_title(f"{title} ({look.label})", fontsize=11)
            style.label(axis, x="round", y="per round", y_unit=unit.name)
            style.whole_numbers(axis.xaxis)
        return picture_of(figure, name)


def _stack_bytes(axes: Axes, xs: Sequence[int], values: Sequence[float], look: Look) -> None:
    axes.grid(visible=False, axis="x")
    if len(xs) > MAX_BARS:
        axes.fill_between(xs, values, color=look.color)
        axes.set_ylim(bottom=0.0)
    else:
        axes.bar(xs, values, color=look.color, width=style.bar_width(len(xs)))


def draw_norms(reports: Sequence[RoundReport], name: str) -> Picture | None:
    """How far training moved each client's model, and what its codec owes. None: nothing is known."""
    clients = sorted({client.client_id for report in reports for client in report.timeline})
    known = any(client.update_norm is not None for report in reports for client in report.timeline)
    if not known:
        return None
    with style.drawing():
        figure, (moved, owed) = new_figure(1, 2, height_in=3.3, sharex=True)
        for axes, norm in ((moved, _update_norm), (owed, _residual_norm)):
            if len(clients) <= MAX_LINES:
                for index, client_id in enumerate(clients):
                    points = list(_of_client(reports, client_id, norm))
                    look = style.nth_look(index, f"client {client_id}")
                    if points:
                        axes.plot(*zip(*points, strict=True), **look.line)
            else:
                _spread(axes, reports, norm)
            style.label(axes, x="round", y="L2 norm")
            style.whole_numbers(axes.xaxis)
        down = [(r.round_id, r.downlink_residual_norm) for r in reports if r.downlink_residual_norm]
        if down:
            owed.plot(*zip(*down, strict=True), color=style.BLACK, linestyle="--", label="controller")
        for axes in (moved, owed):
            style.from_zero(axes)
        moved.set_title("of the update")
        owed.set_title("of what is still owed")
        handles, labels = owed.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=5, columnspacing=1.2)
        return picture_of(figure, name)


def _update_norm(client: ClientTimeline) -> float | None:
    return client.update_norm


def _residual_norm(client: ClientTimeline) -> float | None:
    return client.residual_norm


Norm = Callable[[ClientTimeline], float | None]


def _of_client(reports: Sequence[RoundReport], client_id: int, norm: Norm) -> Iterator[tuple[int, float]]:
    for report in reports:
        for client in report.timeline:
            value = norm(client)
            if client.client_id == client_id and value is not None:
                yield report.round_id, value


def _spread(axes: Axes, reports: Sequence[RoundReport], norm: Norm) -> None:
    """The middle one of many clients, and the band from the least to the largest."""
    known = [(report.round_id, sorted(_known(norm(client) for client in report.timeline))) for report in reports]
    known = [(round_id, values) for round_id, values in known if values]
    rounds = [round_id for round_id, _ in known]
    axes.fill_between(
        rounds, [values[0] for _, values in known], [values[-1] for _, values in known], color=style.BLUE, alpha=0.25,
        linewidth=0, label="all clients",
    )  # fmt: skip
    axes.plot(rounds, [values[len(values) // 2] for _, values in known], color=style.BLUE, marker="o", label="median")


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
