"""The drawings of a report: of a federated run, of a data-parallel run, and of several runs side by side.

Each function draws within :func:`style.drawing` and returns None where there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.federated.client_names import label_of
from gradbus.actors.federated.controller.evaluation import CrossSite
from gradbus.actors.federated.controller.report import ClientTimeline, Piece, RoundReport
from gradbus.commands.report import style
from gradbus.commands.report.shown_metrics import MAX_SHOWN_METRICS, client_metric_names
from gradbus.commands.report.style import Look
from gradbus.commands.rundir.reading import StepSpan
from gradbus.commands.rundir.whole_run import RoundSums
from gradbus.runtime.plain_text import plain_line
from gradbus.runtime.profiling.summary import ProfileSummary, WindowStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BARS = 60  # rounds that are drawn as bars; more become an area
MAX_CLIENTS = 24  # rows of a timeline
MAX_RANKS = 16  # bars
MAX_HEAT = 48  # clients of a heat map
MAX_WRITTEN = 150  # cells of one whose numbers are written
NO_NAMES: Mapping[int, str] = MappingProxyType({})
MAX_LINES = 10  # clients or ranks that get a line of their own; of more there is the median in a band

Bar = Sequence[tuple[str, str, float]]
"""A stacked bar: label, colour and length of each part."""

ROUND_PARTS: Sequence[tuple[str, str, str]] = (
    ("train (slowest)", style.PHASES["train"], "train_s"),
    ("encode (slowest)", style.PHASES["encode"], "encode_s"),
    ("wire and waiting", style.PHASES["upload"], "wire_s"),
    ("decode, aggregate", style.PHASES["aggregate"], "aggregate_s"),
    ("checkpoint", style.PHASES["checkpoint"], "checkpoint_s"),
    ("publish", style.PHASES["send"], "publish_s"),
)
"""Parts of the time of a round: label, colour, field of its report. Their sum is the round, to rounding."""

STEP_PARTS: Mapping[str, tuple[str, str]] = {
    "compute_s": ("compute", style.PHASES["train"]),
    "forward_s": ("forward", style.PHASES["send"]),
    "backward_s": ("backward", style.PHASES["train"]),
    "encode_s": ("encode", style.PHASES["encode"]),
    "wait_s": ("wait", style.PHASES["queue"]),
    "decode_s": ("decode", style.PHASES["decode"]),
    "apply_s": ("apply", style.PHASES["aggregate"]),
    "other_s": ("other", style.PHASES["checkpoint"]),
}
"""Parts of a step, as docs/profile.md explains them: label and colour."""
COLLECTIVE = ("exchange", style.PHASES["upload"])


def _new(rows: int = 1, cols: int = 1, *, height_in: float, **options: object) -> tuple[Figure, list[Axes]]:
    return style.new_figure(rows, cols, width_in=9.0, height_in=height_in, **options)  # as wide as a page


# -- learning ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Curve:
    """Tells how good a model was and what it had cost until then, with a value for each round or epoch.

    Attributes:
        look: of its lines. counts: rounds or epochs. num_bytes: sent until then, both ways. seconds: spent until then.
        accuracy, loss, eval_loss: NaN where there is none.
        metrics: other numbers of the model by name, NaN where there is none.
    """

    look: Look
    counts: Sequence[float]
    num_bytes: Sequence[float]
    seconds: Sequence[float]
    accuracy: Sequence[float]
    loss: Sequence[float]
    eval_loss: Sequence[float]
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def has_accuracy(self) -> bool:
        """Whether some round or epoch has an accuracy."""
        return any(map(math.isfinite, self.accuracy))


def curve_of_rounds(
    reports: Sequence[RoundReport], look: Look, spent: Mapping[int, tuple[float, float]] | None = None
) -> Curve:
    """The curve of a federated run. Its time includes the evaluation, as the clock on the wall does.

    Args:
        spent: bytes and seconds that the run had spent when each of these rounds was done, where they are not all.
    """
    until = spent or dict(
        zip(
            (report.round_id for report in reports),
            zip(
                accumulate(report.bytes_up + report.bytes_down for report in reports),
                accumulate(report.seconds + report.eval_s for report in reports),
                strict=True,
            ),
            strict=True,
        )
    )
    return Curve(
        look,
        [report.round_id for report in reports],
        [until[report.round_id][0] for report in reports],
        [until[report.round_id][1] for report in reports],
        [_or_nan(report.accuracy) for report in reports],
        [_or_nan(report.loss) for report in reports],
        [_or_nan(report.eval_loss) for report in reports],
        _metrics_of(reports),
    )


def curve_of_epochs(
    reports: Sequence[EpochReport], look: Look, spent: Mapping[int, tuple[float, float]] | None = None
) -> Curve:
    """The curve of a data-parallel run, with the bytes of the rank that reports. ``spent``: as for rounds."""
    steps = [after - before for before, after in pairwise([0, *(report.step for report in reports)])]
    sent = (report.bytes_out_per_step * max(0, count) for report, count in zip(reports, steps, strict=True))
    return Curve(
        look,
        [report.epoch + 1 for report in reports],
        [spent[report.epoch][0] for report in reports] if spent else list(accumulate(sent)),
        [spent[report.epoch][1] for report in reports] if spent else list(accumulate(r.seconds for r in reports)),
        [_or_nan(report.accuracy) for report in reports],
        [report.loss for report in reports],
        [_or_nan(report.eval_loss) for report in reports],
        _metrics_of(reports),
    )


def _metrics_of(reports: Sequence[RoundReport] | Sequence[EpochReport]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for report in reports for name in report.metrics)
    return {name: [report.metrics.get(name, math.nan) for report in reports] for name in names}


def shown_quality(curves: Sequence[Curve]) -> str:
    """By which number the models of these runs are shown: "" for the accuracy, else the first metric that all of them
    have."""
    if any(curve.has_accuracy for curve in curves):
        return ""
    return next((name for curve in curves[:1] for name in curve.metrics if all(name in c.metrics for c in curves)), "")


def draw_curves(curves: Sequence[Curve], *, counted: str, sent: str) -> Figure | None:
    """Accuracy, or a metric of the task where there is none, and loss over rounds or epochs, bytes and time."""
    curves = [curve for curve in curves if curve.counts]
    if not curves:
        return None
    bytes_ = style.byte_unit(max(max(curve.num_bytes) for curve in curves))
    times = style.time_unit(max(max(curve.seconds) for curve in curves))
    many, metric = len(curves) > 1, shown_quality(curves)
    figure, axes = _new(2, 3, height_in=4.6, sharex="col", sharey="row")
    for curve in curves:
        marker = curve.look.marker if len(curve.counts) <= MAX_BARS else ""
        across = (curve.counts, _scaled(curve.num_bytes, bytes_), _scaled(curve.seconds, times))
        for upper, lower, xs in zip(axes[:3], axes[3:], across, strict=True):
            values = curve.metrics[metric] if metric else [100 * share for share in curve.accuracy]
            known = [(x, y) for x, y in zip(xs, values, strict=True) if math.isfinite(y)]
            _plot(upper, known, color=curve.look.color, marker=marker, label=curve.look.label)
            lower.plot(xs, curve.loss, label="training", color=curve.look.color, marker=marker)
            tested = [(x, y) for x, y in zip(xs, curve.eval_loss, strict=True) if math.isfinite(y)]
            if tested and not many:
                _plot(lower, tested, label="test", color=style.GREY, linestyle="--", marker=marker, fillstyle="none")
    for axis in axes[:3]:
        axis.margins(y=0.08)
    losses = [value for curve in curves for value in curve.loss if math.isfinite(value) and value > 0]
    if losses and max(losses) > 20 * min(losses):
        axes[3].set_yscale("log")
    axes[0].set_ylabel(style.plain(metric) if metric else "test accuracy / %")
    axes[3].set_ylabel("training loss" if many else "loss")
    for axis, text in zip(axes[3:], (counted, f"{sent} / {bytes_.name}", f"time / {times.name}"), strict=True):
        axis.set_xlabel(text)
    style.whole_numbers(axes[3].xaxis)
    if many:
        _legend(figure, axes[0], columns=3)
    else:
        axes[5].legend(loc="upper right")
    return figure


# -- a federated run ---------------------------------------------------------------------------------------------------


def draw_round_times(reports: Sequence[RoundReport]) -> Figure | None:
    """Return where the time of each round went; on the right without training, which hides the rest."""
    if not reports:
        return None
    figure, panels = _new(1, 2, height_in=3.7)
    for axes, title, parts in zip(
        panels, ("all of it", "without training"), (ROUND_PARTS, ROUND_PARTS[1:]), strict=True
    ):
        values = [(color, [getattr(report, part) for report in reports]) for _, color, part in parts]
        _stack(axes, [report.round_id for report in reports], values)
        axes.set_title(title)
    style.legend_of_colors(figure, {label: color for label, color, _ in ROUND_PARTS})
    return figure


def _stack(
    axes: Axes, rounds: Sequence[int], parts: Sequence[tuple[str, Sequence[float]]], unit: style.Unit | None = None
) -> None:
    """Stacked bars over rounds, by default of seconds; an area where there are too many rounds for bars."""
    if unit is None:
        unit = style.time_unit(max(sum(values) for values in zip(*(values for _, values in parts), strict=True)))
        axes.set_ylabel(f"time / {unit.name}")
    below = [0.0] * len(rounds)
    for color, values in parts:
        top = [low + value / unit.factor for low, value in zip(below, values, strict=True)]
        if len(rounds) > MAX_BARS:
            axes.fill_between(rounds, below, top, color=color, linewidth=0)
        else:
            heights = [high - low for high, low in zip(top, below, strict=True)]
            axes.bar(rounds, heights, bottom=below, color=color, width=style.bar_width(len(rounds)))
        below = top
    axes.set_ylim(bottom=0.0)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("round")
    style.whole_numbers(axes.xaxis)


def typical_rounds(reports: Sequence[RoundReport]) -> list[tuple[str, RoundReport]]:
    """Return, of the rounds with a timeline, the one of median length and the longest."""
    known = sorted((report for report in reports if report.timeline), key=lambda report: report.seconds)
    if not known:
        return []
    median, longest = known[(len(known) - 1) // 2], known[-1]
    chosen = [("a typical round", median)]
    return chosen if longest is median else [*chosen, ("the longest round", longest)]


def draw_timeline(report: RoundReport, names: Mapping[int, str] = NO_NAMES) -> Figure:
    """A row for each client, from the command to the sum, and one for the controller.

    On the right the same from the end of each client's training, and for the controller from the last update on.
    """
    shown = sorted(sorted(report.timeline, key=lambda c: c.counted_s)[-MAX_CLIENTS:], key=lambda c: c.client_id)
    own = list(_controller_pieces(report))
    panels = {
        "from the command": [*(client.pieces() for client in shown), own],
        "from the end of training": [
            *(list(_after_training(client.pieces())) for client in shown), list(_since(own, own[0].start_s))
        ],
    }  # fmt: skip
    spans = {
        title: [
            [TimelineSpan(piece.phase, style.PHASES[piece.phase], piece.start_s, piece.end_s) for piece in row]
            for row in rows
        ]
        for title, rows in panels.items()
    }
    rows = [*(f"client {label_of(client.client_id, names)}" for client in shown), "controller"]
    return _draw_spans(spans, rows, style.PHASES, row_in=0.3, widths=[3, 2])


def _controller_pieces(report: RoundReport) -> Iterator[Piece]:
    """The work of the controller once the updates are in: the model, the checkpoint, the message."""
    end_s = report.seconds - report.command_s
    published_s, saved_s = end_s - report.publish_s, end_s - report.publish_s - report.checkpoint_s
    yield Piece("aggregate", saved_s - report.step_s, saved_s)
    yield Piece("checkpoint", saved_s, published_s)
    yield Piece("send", published_s, end_s)


def _since(pieces: Iterable[Piece], origin_s: float) -> Iterator[Piece]:
    return (Piece(piece.phase, piece.start_s - origin_s, piece.end_s - origin_s) for piece in pieces)


def _after_training(pieces: Sequence[Piece]) -> Iterator[Piece]:
    for index, piece in enumerate(pieces):
        if piece.phase == "train":
            yield from _since(pieces[index + 1 :], piece.end_s)


def draw_bytes(reports: Sequence[RoundReport], *, up: Look, down: Look) -> Figure | None:
    """Return what each round sent: updates to the controller, models to the clients."""
    if not reports:
        return None
    unit = style.byte_unit(max(max(report.bytes_up, report.bytes_down) for report in reports))
    figure, (left, right) = _new(1, 2, height_in=2.9, sharex=True)
    for axes, title, look, sizes in (
        (left, "up: the updates that count", up, [report.bytes_up for report in reports]),
        (right, "down: model times clients", down, [report.bytes_down for report in reports]),
    ):
        _stack(axes, [report.round_id for report in reports], [(look.color, sizes)], unit)
        axes.set_title(f"{title} ({look.label})", fontsize=11)
        axes.set_ylabel(f"per round / {unit.name}")
    return figure


def draw_client_training(reports: Sequence[RoundReport], known: Mapping[int, str] = NO_NAMES) -> Figure | None:
    """Return the loss of each client's training, and the first metrics that it announced, with their means."""
    trained = [client for report in reports for client in report.timeline]
    announced = [*(client.metrics for client in trained), *(report.train_metrics for report in reports)]
    names = list(dict.fromkeys(name for metrics in announced for name in metrics))[:MAX_SHOWN_METRICS]
    if not names and all(client.loss is None for client in trained):
        return None
    figure, panels = _new(1, 1 + len(names), height_in=3.3, sharex=True)
    _client_lines(panels[0], reports, lambda client: client.loss, "training loss", known)
    _mean_line(panels[0], {report.round_id: report.loss for report in reports})
    for axes, name in zip(panels[1:], names, strict=True):
        _client_lines(axes, reports, partial(_metric_of, name), style.plain(plain_line(name)), known)
        _mean_line(axes, {report.round_id: report.train_metrics.get(name) for report in reports})
    _legend(figure, panels[0], columns=5)
    return figure


def _mean_line(axes: Axes, means: Mapping[int, float | None]) -> None:
    points = [(float(round_id), mean) for round_id, mean in means.items() if mean is not None]
    if points:
        _plot(axes, points, color=style.BLACK, linestyle="--", label="mean, by samples")


def _metric_of(name: str, client: ClientTimeline) -> float | None:
    return client.metrics.get(name)


def draw_norms(reports: Sequence[RoundReport], known: Mapping[int, str] = NO_NAMES) -> Figure | None:
    """Return how far training moved each client's model, and the residual that its codec keeps."""
    if not any(client.update_norm is not None for report in reports for client in report.timeline):
        return None
    figure, (moved, residual) = _new(1, 2, height_in=3.3, sharex=True)
    _client_lines(moved, reports, lambda client: client.update_norm, "L2 norm", known)
    _client_lines(residual, reports, lambda client: client.residual_norm, "L2 norm", known)
    down = [(float(r.round_id), r.downlink_residual_norm) for r in reports if r.downlink_residual_norm]
    if down:
        _plot(residual, down, color=style.BLACK, linestyle="--", label="controller")
    for axes, title in ((moved, "of the update"), (residual, "of the residual")):
        style.from_zero(axes)
        axes.set_title(title)
    _legend(figure, residual, columns=5)
    return figure


def _client_lines(
    axes: Axes,
    reports: Sequence[RoundReport],
    number: Callable[[ClientTimeline], float | None],
    y: str,
    known: Mapping[int, str],
) -> None:
    lines: dict[int, list[tuple[float, float]]] = {}
    for report in reports:
        for client in report.timeline:
            if (value := number(client)) is not None:
                lines.setdefault(client.client_id, []).append((report.round_id, value))
    _lines(axes, {f"client {label_of(one, known)}": lines[one] for one in sorted(lines)}, "all clients")
    style.label(axes, x="round", y=y)
    style.whole_numbers(axes.xaxis)


def draw_client_metrics(reports: Sequence[RoundReport]) -> Figure | None:
    """The first metrics that clients have found on their own data: mean and median, in a band from least to largest."""
    names = client_metric_names(reports)
    if not names:
        return None
    figure, panels = _new(1, len(names), height_in=3.2, sharex=True)
    for axes, name in zip(panels, names, strict=True):
        known = [(r.round_id, r.by_clients.metrics[name]) for r in reports if name in r.by_clients.metrics]
        rounds = [number for number, _ in known]
        least, largest = [one.min for _, one in known], [one.max for _, one in known]
        axes.fill_between(rounds, least, largest, color=style.BLUE, alpha=0.25, linewidth=0, label="all clients")
        marker = "o" if len(known) <= MAX_BARS else ""
        _plot(axes, [(n, one.mean) for n, one in known], color=style.BLUE, marker=marker, label="mean")
        if medians := [(n, one.median) for n, one in known if one.median is not None]:
            _plot(axes, medians, color=style.BLUE, linestyle=":", label="median")
        style.label(axes, x="round", y=style.plain(plain_line(name)))
        style.whole_numbers(axes.xaxis)
    _legend(figure, panels[0], columns=3)
    return figure


def draw_cross_site(found: CrossSite, name: str, names: Mapping[int, str] = NO_NAMES) -> Figure | None:
    """One metric of each model on the data of each client, as a heat map; empty cells stay empty."""
    rows = [row for row in found.rows if any(name in metrics for metrics in row.results.values())]
    clients = found.clients[:MAX_HEAT]
    if not rows or not clients:
        return None
    rows = rows[: MAX_HEAT + 1]
    cells = [[row.results.get(one, {}).get(name, math.nan) for one in clients] for row in rows]
    height_in = 1.6 + 0.32 * len(rows)
    figure, (axes,) = _new(1, 1, height_in=height_in)
    image = axes.imshow(cells, aspect="auto", cmap="viridis")
    axes.grid(visible=False)
    axes.set_xticks(range(len(clients)), [label_of(one, names) for one in clients])
    axes.set_yticks(range(len(rows)), ["global" if row.model is None else label_of(row.model, names) for row in rows])
    axes.set_xlabel("evaluated on the data of client")
    axes.set_ylabel("model of")
    figure.colorbar(image, ax=axes, label=style.plain(plain_line(name)))
    if len(rows) * len(clients) <= MAX_WRITTEN:
        low, high = image.get_clim()
        for y, values in enumerate(cells):
            for x, value in enumerate(values):
                if math.isfinite(value):
                    dark = high > low and (value - low) / (high - low) < 0.5
                    axes.text(x, y, f"{value:.3g}", ha="center", va="center", color="white" if dark else "black")
    return figure


# -- a data-parallel run -----------------------------------------------------------------------------------------------


def draw_step_parts(profiles: Sequence[ProfileSummary]) -> Figure | None:
    """The mean step of each rank, part by part. Of very many ranks, those that wait least."""
    shown = sorted(profiles, key=lambda profile: profile.mean.get("wait_s", 0.0))[:MAX_RANKS]
    shown = sorted((profile for profile in shown if profile.steps), key=lambda profile: profile.rank)
    return draw_parts({f"rank {profile.rank}": step_bar([profile]) for profile in shown}, across="mean step", panels=1)


def draw_windows(windows: Mapping[int, Sequence[WindowStats]]) -> Figure | None:
    """Draw step time, wait and bytes sent of a step over the run, as means of windows of steps."""
    known = {rank: found for rank, found in windows.items() if found}
    if not known:
        return None
    figure, panels = _new(1, 3, height_in=3.2, sharex=True)
    steps = panels[0]
    shown = (
        ("step_s", "step", style.time_unit),
        ("wait_s", "wait of a step", style.time_unit),
        ("bytes_out", "sent in a step", style.byte_unit),
    )
    for axes, (key, label, unit_for) in zip(panels, shown, strict=True):
        unit = unit_for(max(_finite(w.mean.get(key, 0.0)) for found in known.values() for w in found))
        lines = {
            f"rank {rank}": [(float(w.last_step), w.mean.get(key, 0.0) / unit.factor) for w in found]
            for rank, found in known.items()
        }
        _lines(axes, lines, "all ranks")
        style.label(axes, x="step", y=label, y_unit=unit.name)
        style.from_zero(axes)
        style.whole_numbers(axes.xaxis, most=5)
    _legend(figure, steps, columns=6)
    return figure


def draw_step(spans: Mapping[int, Sequence[StepSpan]]) -> Figure | None:
    """One step of each rank: what it computed, and below what was on its way meanwhile."""
    if not spans:
        return None
    looks = {**STEP_PARTS, "exchange_s": COLLECTIVE}
    rows = [
        [
            TimelineSpan(
                *(COLLECTIVE if span.row == "collectives" else looks.get(f"{span.name}_s", COLLECTIVE)),
                span.start_s,
                span.end_s,
                *_STEP_ROWS.get(span.row, (0.2, 0.18)),
            )
            for span in found
            if span.row != "step"
        ]
        for found in spans.values()
    ]
    return _draw_spans({"": rows}, [f"rank {rank}" for rank in spans], dict(looks.values()), row_in=0.62)


_STEP_ROWS = {"compute": (-0.42, 0.4), "collectives": (0.0, 0.18)}
"""Where the spans of a row of the trace are drawn: lower edge and height, in rows."""


def draw_step_bytes(reports: Sequence[EpochReport], look: Look) -> Figure | None:
    """Bytes that a step handed to the bus, epoch by epoch; and the share of the gradient that was sent."""
    if not reports:
        return None
    unit = style.byte_unit(max(report.bytes_out_per_step for report in reports))
    epochs = [report.epoch + 1 for report in reports]
    sparse = any(report.density < 1 for report in reports)
    figure, axes = _new(1, 2 if sparse else 1, height_in=2.7)
    values = [report.bytes_out_per_step / unit.factor for report in reports]
    axes[0].bar(epochs, values, color=look.color, width=style.bar_width(len(epochs)))
    axes[0].grid(visible=False, axis="x")
    style.label(axes[0], x="epoch", y="sent per step", y_unit=unit.name)
    if sparse:
        axes[1].plot(epochs, [100 * report.density for report in reports], color=look.color, marker=look.marker)
        axes[1].set_yscale("log")
        style.label(axes[1], x="epoch", y="share of the gradient", y_unit="%")
    for axis in axes:
        style.whole_numbers(axis.xaxis)
    return figure


# -- runs side by side -------------------------------------------------------------------------------------------------


def round_bar(sums: RoundSums) -> Bar:
    """The mean round, part by part."""
    return [(name, color, sums.sums[part] / sums.rounds) for name, color, part in ROUND_PARTS] if sums.rounds else []


def step_bar(profiles: Sequence[ProfileSummary]) -> Bar:
    """The mean step of all ranks, part by part."""
    steps = sum(profile.steps for profile in profiles)
    if not steps:
        return []
    return [
        (*look, sum(_finite(p.mean.get(key, 0.0)) * p.steps for p in profiles) / steps)
        for key, look in STEP_PARTS.items()
    ]


def draw_parts(bars: Mapping[str, Bar], *, across: str = "time", panels: int = 2) -> Figure | None:
    """A bar for each name; in a second panel without the first part, which hides the rest."""
    if not any(bars.values()):
        return None
    figure, all_axes = _new(1, panels, height_in=1.45 + 0.38 * len(bars), sharey=True)
    for first, axes in enumerate(all_axes):
        unit = style.time_unit(max(sum(value for _, _, value in bar[first:]) for bar in bars.values()))
        for row, bar in enumerate(bars.values()):
            left = 0.0
            for _, color, value in bar[first:]:
                axes.barh(row, value / unit.factor, left=left, color=color, height=0.7)
                left += value / unit.factor
        _across(axes, f"{across} / {unit.name}")
    _name_rows(all_axes[0], list(bars))
    style.legend_of_colors(figure, {label: color for bar in bars.values() for label, color, value in bar if value})
    return figure


# -- pieces of drawings ------------------------------------------------------------------------------------------------


def _plot(axes: Axes, points: Sequence[tuple[float, float]], **line: object) -> None:
    axes.plot([x for x, _ in points], [y for _, y in points], **line)  # type: ignore[arg-type]


class TimelineSpan(NamedTuple):
    """A piece of a row of a timeline; ``low`` and ``height``: its lower edge and height, in rows."""

    label: str
    color: str
    start_s: float
    end_s: float
    low: float = -0.36
    height: float = 0.72


def _draw_spans(
    panels: Mapping[str, Sequence[Sequence[TimelineSpan]]],
    names: Sequence[str],
    colors: Mapping[str, str],
    *,
    row_in: float,
    widths: Sequence[int] = (1,),
) -> Figure:
    """Rows of spans, in panels by their title. ``colors``: of the legend, which has those that the first panel uses."""
    height_in = 1.4 + row_in * len(names)
    figure, all_axes = _new(1, len(panels), height_in=height_in, sharey=True, gridspec_kw={"width_ratios": widths})
    for axes, (title, rows) in zip(all_axes, panels.items(), strict=True):
        unit = style.time_unit(max((span.end_s for row in rows for span in row), default=0.0))
        for index, row in enumerate(rows):
            for span in row:
                across = (span.start_s / unit.factor, (span.end_s - span.start_s) / unit.factor)
                axes.broken_barh([across], (index + span.low, span.height), facecolors=span.color)
        axes.set_title(title)
        axes.set_xlim(left=0.0)
        _across(axes, f"time / {unit.name}")
    _name_rows(all_axes[0], names)
    used = {span.label for row in next(iter(panels.values())) for span in row}
    style.legend_of_colors(figure, {label: color for label, color in colors.items() if label in used})
    return figure


def _lines(axes: Axes, lines: Mapping[str, Sequence[tuple[float, float]]], all_of_them: str) -> None:
    """A line for each label; of very many the median, and a band from the least to the largest."""
    if len(lines) <= MAX_LINES:
        for index, (label, points) in enumerate(lines.items()):
            look = style.nth_look(index, label)
            _plot(axes, points, **(look._replace(marker="") if len(points) > MAX_BARS else look).line)
        return
    by_x: dict[float, list[float]] = {}
    for points in lines.values():
        for x, y in points:
            by_x.setdefault(x, []).append(_finite(y))
    ordered = {x: sorted(by_x[x]) for x in sorted(by_x)}
    least, largest = ([values[end] for values in ordered.values()] for end in (0, -1))
    axes.fill_between(list(ordered), least, largest, color=style.BLUE, alpha=0.25, linewidth=0, label=all_of_them)
    _plot(axes, [(x, values[len(values) // 2]) for x, values in ordered.items()], color=style.BLUE, label="median")


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def _across(axes: Axes, text: str) -> None:
    axes.set_xlabel(text)
    axes.grid(visible=False, axis="y")


def _legend(figure: Figure, axes: Axes, *, columns: int) -> None:
    """The legend of these axes, over the whole figure."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, columnspacing=1.2)


def _scaled(values: Sequence[float], unit: style.Unit) -> list[float]:
    return [value / unit.factor for value in values]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
