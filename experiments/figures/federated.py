"""Figures of federated runs: bytes, time and accuracy by codec."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from gradbus.experiments.figures.canvas import (
    bars,
    caption,
    lines_with_range,
    load_note,
    need,
    number_above,
    published,
    quick_note,
    seeds_note,
    spread,
    star,
)
from gradbus.experiments.figures.plan import CODECS, Scale
from gradbus.experiments.figures.tables import BadData, RoundRow, UpdateRow
from gradbus.experiments.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OLD: dict[str, Any] = dict(style.OLD_VERSION)
_REST = "checkpoint, publish"
# In the order in which a round goes through them: of the row, the colour of the phase, the name in the legend.
_PARTS = (
    ("train_s", "train", "train"), ("encode_s", "encode", "encode"), ("wire_s", "upload", "wire"),
    ("decode_s", "decode", "decode and add"), ("aggregate_s", "aggregate", "aggregate"),
)  # fmt: skip


def draw_bytes(rounds: Sequence[RoundRow], scale: Scale) -> Figure:
    """Bytes of a client in a round, both ways, in both versions of the bytes."""
    old = [row for row in rounds if row.group == "old_bytes"]
    new = [row for row in rounds if row.group == "codecs"]
    need(old, "version 1")
    need(new, "version 2")
    figure, (up, down) = style.new_figure(1, 2, height_in=4.0, sharey=True)
    for axes, title, count in ((up, "up: updates", _bytes_up), (down, "down: models", _bytes_down)):
        unit = style.byte_unit(max(map(count, [*old, *new])))
        for index, codec in enumerate(CODECS):
            color = style.look_of(codec).color
            for rows, offset, look in ((old, -0.2, _OLD), (new, 0.2, {})):
                height = _mean_of(rows, codec, count) / unit.factor
                text = f"{height:.1f}" if height >= 1 else f"{height:.2f}"
                bars(axes, [index + offset], [height], [text], width=0.38, color=color, **look)
        axes.set_title(title)
        _codec_ticks(axes)
        axes.margins(y=0.1)
        style.label(axes, x="codec", y="bytes per client and round" if axes is up else "", y_unit=unit.name)
    down.set_ylabel("")
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=style.GREY, label="version 1, models in plain float32", **_OLD),
        Patch(facecolor=style.GREY, label="version 2, the codec both ways"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=2)
    caption(
        figure, quick_note(scale),
        f"CNN of 1.2 million parameters; version 2: mean of {scale.rounds} rounds. The first model, which goes out in "
        "full before round 1, is not counted.",
    )  # fmt: skip
    return figure


def _bytes_up(row: RoundRow) -> float:
    return row.bytes_up / row.clients


def _bytes_down(row: RoundRow) -> float:
    return row.bytes_down / row.clients


def draw_dds(updates: Sequence[UpdateRow], scale: Scale) -> Figure:
    """The time of an update on the bus, client by client."""
    rows = [row for row in updates if row.group == "timing"]
    need(rows, "updates with a timeline")
    unit = style.time_unit(statistics.mean(row.dds_s for row in rows))
    figure, (axes,) = style.new_figure(height_in=4.0)
    clients = sorted({row.client_id for row in rows})
    width = 0.8 / len(clients)
    for index, codec in enumerate(CODECS):
        for number, client in enumerate(clients):
            values = [row.dds_s / unit.factor for row in rows if (row.codec, row.client_id) == (codec, client)]
            need(values, f"codec {codec}, client {client}")
            at, median = index + (number - (len(clients) - 1) / 2) * width, statistics.median(values)
            axes.bar([at], [median], width=0.92 * width, color=style.look_of(codec).color, alpha=1 - 0.35 * number)
            axes.scatter([at] * len(values), values, s=10, color="black", zorder=3)
            number_above(axes, at, max(values), median)
    axes.margins(y=0.1)
    _codec_ticks(axes)
    style.label(axes, x="codec; left bar client 0, right bar client 1", y="DDS time of an update", y_unit=unit.name)
    note = published("federated_dds")
    caption(
        figure, quick_note(scale),
        "From the client's offer until the controller has all of the update. Bars and numbers: median of "
        f"{_timed(rows)} rounds, dots: each of them. All processes on one machine.",
        load_note(rows),
        note.sentence() if note else "",
    )  # fmt: skip
    return figure


def draw_time(rounds: Sequence[RoundRow], scale: Scale) -> Figure:
    """From the command to the published model, in parts."""
    rows = [row for row in rounds if row.group == "timing"]
    need(rows, "rounds that were timed")
    if any(row.decode_s is None for row in rows):
        raise BadData("the timed runs did not record decoding: they were made by an older version. Run them again")
    figure, (whole, rest) = style.new_figure(1, 2, height_in=4.4)
    for axes, parts, title in ((whole, _PARTS, "all"), (rest, _PARTS[1:], "without training")):
        tops = [0.0] * len(CODECS)
        totals = [sum(_part_s(rows, codec, name) for name, _, _ in parts) for codec in CODECS]
        rests = [_part_s(rows, codec, "rest") for codec in CODECS]
        unit = style.time_unit(max(total + left for total, left in zip(totals, rests, strict=True)))
        for name, phase, label in (*parts, ("rest", "send", _REST)):
            heights = [_part_s(rows, codec, name) / unit.factor for codec in CODECS]
            axes.bar(range(len(CODECS)), heights, 0.7, bottom=tops, color=style.PHASES[phase], label=label)
            tops = [top + height for top, height in zip(tops, heights, strict=True)]
        for index, top in enumerate(tops):
            number_above(axes, index, top, top, points=2)
        axes.set_title(title)
        _codec_ticks(axes)
        axes.margins(y=0.08)
        style.label(axes, x="codec, in both directions", y="time of a round", y_unit=unit.name)
    figure.legend(*whole.get_legend_handles_labels(), loc="outside upper left", ncols=6, columnspacing=0.9, fontsize=10)
    note = published("federated_time")
    caption(
        figure, quick_note(scale),
        f"From the command to the published model; each part: median of {_timed(rows)} rounds with 2 clients "
        f"and {scale.samples:,} samples each. Training and encoding: the slower client's.",
        load_note(rows),
        note.sentence() if note else "",
    )  # fmt: skip
    return figure


def _timed(rows: Sequence[RoundRow] | Sequence[UpdateRow]) -> int:
    """Rounds of a run."""
    return len({row.round_id for row in rows})


def _part_s(rows: Sequence[RoundRow], codec: str, name: str) -> float:
    def part_s(row: RoundRow) -> float:
        if name != "rest":
            return float(getattr(row, name))
        return max(0.0, row.seconds - sum(float(getattr(row, part)) for part, _, _ in _PARTS))

    values = [part_s(row) for row in rows if row.codec == codec]
    need(values, f"codec {codec}")
    return statistics.median(values)  # a round in which the machine was busy with other things says nothing


def draw_accuracy(rounds: Sequence[RoundRow], scale: Scale) -> Figure:
    """Accuracy over rounds, and at the end."""
    rows = [row for row in rounds if row.group == "codecs" and row.accuracy is not None]
    need(rows, "evaluated rounds")
    figure, (curves, ends) = style.new_figure(1, 2, height_in=4.2, width_ratios=(3, 2))
    marks = published("federated_accuracy")
    published_marks = marks.marks() if marks and scale.rounds == 10 else {}
    for index, codec in enumerate(CODECS):
        look = style.look_of(codec)
        of_codec = [row for row in rows if row.codec == codec]
        lines_with_range(curves, _by_seed(of_codec), color=look.color, marker=look.marker, label=look.label)
        last = [accuracy for *_, (_, accuracy) in _by_seed(of_codec)]
        spread(ends, index, last)
        ends.scatter([index] * len(last), last, s=14, color="black", zorder=3)
        ends.plot([index], [statistics.mean(last)], look.marker, color=look.color, markersize=11, zorder=2)
        if codec in published_marks:
            star(ends, index + 0.3, published_marks[codec], size=9)
    style.whole_numbers(curves.xaxis)
    style.legend_above(curves)
    style.label(curves, x="round", y="test accuracy", y_unit="%")
    _codec_ticks(ends)
    ends.margins(x=0.12, y=0.15)
    ends.set_title(f"after {scale.rounds} rounds")
    style.label(ends, x="codec", y="test accuracy", y_unit="%")
    caption(
        figure, quick_note(scale),
        f"MNIST, CNN, 2 clients with equal shares, {scale.samples:,} samples each per round; the codec in both "
        f"directions, with error feedback; {seeds_note(rows, 'codec')}.",
        marks.sentence() if marks and published_marks else "",
    )  # fmt: skip
    return figure


def _by_seed(rows: Sequence[RoundRow]) -> list[list[tuple[float, float]]]:
    """(round, accuracy in percent), a curve for each seed."""
    return [
        [(row.round_id, 100 * row.accuracy) for row in rows if row.seed == seed and row.accuracy is not None]
        for seed in sorted({row.seed for row in rows})
    ]


def _mean_of(rows: Sequence[RoundRow], codec: str, value: Callable[[RoundRow], float]) -> float:
    values = [value(row) for row in rows if row.codec == codec]
    need(values, f"codec {codec}")
    return statistics.mean(values)


def _codec_ticks(axes: Axes) -> None:
    axes.set_xticks(range(len(CODECS)), CODECS)
    axes.grid(visible=False, axis="x")


_PANELS = (("codecs", "equal shares (IID)"), ("skewed", "unequal shares (Dirichlet 0.5)"))


def draw_tradeoff(rounds: Sequence[RoundRow], scale: Scale) -> Figure:
    """Accuracy over the bytes sent so far, both ways, all clients together."""
    figure, panels = style.new_figure(1, 2, height_in=4.4, sharey=True, sharex=True)
    notes = []
    for axes, (group, title) in zip(panels, _PANELS, strict=True):
        of_group = [row for row in rounds if row.group == group]
        need(of_group, title)
        notes.append(f"{title[0].upper()}{title[1:]}: {seeds_note(of_group, 'codec')}")
        for codec in CODECS:
            look = style.look_of(codec)
            curves = [
                list(_curve([row for row in of_group if (row.codec, row.seed) == (codec, seed)]))
                for seed in sorted({row.seed for row in of_group if row.codec == codec})
            ]
            lines_with_range(axes, curves, color=look.color, marker=look.marker, label=look.label)
        axes.set_xscale("log")
        axes.set_title(title)
        style.label(axes, x="sent, up and down", x_unit="MB", y="test accuracy", y_unit="%")
    panels[1].set_ylabel("")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(CODECS))
    caption(
        figure, quick_note(scale),
        f"MNIST, CNN, 2 clients, {scale.rounds} rounds of {scale.samples:,} samples per client; the codec in both "
        f"directions. {'. '.join(notes)}.",
    )  # fmt: skip
    return figure


def _curve(rows: Sequence[RoundRow]) -> Iterator[tuple[float, float]]:
    """(MB so far, accuracy in percent) after each round that was evaluated."""
    ordered = sorted(rows, key=lambda row: row.round_id)
    sent = accumulate((row.bytes_up + row.bytes_down) / 1e6 for row in ordered)
    for row, megabytes in zip(ordered, sent, strict=True):
        if row.accuracy is not None:
            yield megabytes, 100 * row.accuracy
