"""Figures of federated runs: bytes, time and accuracy by codec."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from gradbus.commands.report import style
from gradbus.experiments.figures import canvas
from gradbus.experiments.figures.plan import CODECS, Scale
from gradbus.experiments.figures.tables import BadData, RoundRow, UpdateRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OLD: dict[str, Any] = dict(style.OLD_VERSION)
# In the order in which a round goes through them: of the row, the colour of the phase, the name in the legend.
_PARTS = (
    ("train_s", "train", "train"), ("encode_s", "encode", "encode"), ("wire_s", "upload", "wire"),
    ("decode_s", "decode", "decode and add"), ("aggregate_s", "aggregate", "aggregate"),
    ("rest", "send", "checkpoint, publish"),
)  # fmt: skip


def draw_bytes(rounds: Sequence[RoundRow], scale: Scale) -> Figure:
    """Bytes of a client in a round, both ways, in both versions of the bytes."""
    from matplotlib.patches import Patch

    old, new = canvas.pick(rounds, group="old_bytes"), canvas.pick(rounds, group="codecs")
    figure, panels = style.new_figure(1, 2, height_in=4.0, sharey=True)
    ways: tuple[tuple[str, Callable[[RoundRow], float]], ...] = (
        ("up: updates", lambda row: row.bytes_up / row.clients),
        ("down: models", lambda row: row.bytes_down / row.clients),
    )
    for axes, (title, count) in zip(panels, ways, strict=True):
        unit = style.byte_unit(max(map(count, [*old, *new])))
        for index, codec in enumerate(CODECS):
            for rows, offset, look in ((old, -0.2, _OLD), (new, 0.2, {})):
                height = statistics.mean(map(count, canvas.pick(rows, codec=codec))) / unit.factor
                axes.bar([index + offset], [height], 0.38, color=style.look_of(codec).color, **look)
                text = f"{height:.1f}" if height >= 1 else f"{height:.2f}"
                canvas.number_above(axes, index + offset, height, text, points=2)
        axes.set_title(title)
        canvas.name_bars(axes, CODECS)
        axes.margins(y=0.1)
        style.label(axes, x="codec", y="bytes per client and round", y_unit=unit.name)
    panels[1].set_ylabel("")
    handles = [
        Patch(facecolor=style.GREY, label="version 1, models in plain float32", **_OLD),
        Patch(facecolor=style.GREY, label="version 2, the codec both ways"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=2)
    return canvas.finish(
        figure,
        scale,
        f"CNN of 1.2 million parameters; version 2: mean of {scale.rounds} rounds. The first model, which goes out in "
        "full before round 1, is not counted.",
    )


def draw_dds(updates: Sequence[UpdateRow], scale: Scale) -> Figure:
    """The time of an update on the bus, client by client."""
    rows = canvas.pick(updates, group="timing")
    unit = style.time_unit(statistics.mean(row.dds_s for row in rows))
    figure, (axes,) = style.new_figure(height_in=4.0)
    clients = sorted({row.client_id for row in rows})
    width = 0.8 / len(clients)
    for index, codec in enumerate(CODECS):
        for number, client in enumerate(clients):
            values = [row.dds_s / unit.factor for row in canvas.pick(rows, codec=codec, client_id=client)]
            at, color = index + (number - (len(clients) - 1) / 2) * width, style.look_of(codec).color
            canvas.bar_with_dots(axes, at, values, width=0.92 * width, color=color, alpha=1 - 0.35 * number)
    axes.margins(y=0.1)
    canvas.name_bars(axes, CODECS)
    style.label(axes, x="codec; left bar client 0, right bar client 1", y="DDS time of an update", y_unit=unit.name)
    return canvas.finish(
        figure,
        scale,
        "From the client's offer until the controller has all of the update. Bars and numbers: median of "
        f"{len({row.round_id for row in rows})} rounds, dots: each of them. All processes on one machine.",
        timed=rows,
        compared="federated_dds",
    )


def draw_time(rounds: Sequence[RoundRow], scale: Scale) -> Figure:
    """From the command to the published model, in parts."""
    rows = canvas.pick(rounds, group="timing")
    if any(row.decode_s is None for row in rows):
        raise BadData("the timed runs did not record decoding: they were made by an older version. Run them again")
    # The median of each part: a round in which the machine was busy with other things says nothing.
    seconds = {
        codec: {
            name: statistics.median(_part_s(row, name) for row in canvas.pick(rows, codec=codec))
            for name, _, _ in _PARTS
        }
        for codec in CODECS
    }
    figure, panels = style.new_figure(1, 2, height_in=4.4)
    for axes, parts, title in zip(panels, (_PARTS, _PARTS[1:]), ("all", "without training"), strict=True):
        unit = style.time_unit(max(sum(of[name] for name, _, _ in parts) for of in seconds.values()))
        tops = [0.0] * len(CODECS)
        for name, phase, label in parts:
            heights = [seconds[codec][name] / unit.factor for codec in CODECS]
            axes.bar(range(len(CODECS)), heights, 0.7, bottom=tops, color=style.PHASES[phase], label=label)
            tops = [top + height for top, height in zip(tops, heights, strict=True)]
        for index, top in enumerate(tops):
            canvas.number_above(axes, index, top, f"{top:.3g}", points=2)
        axes.set_title(title)
        canvas.name_bars(axes, CODECS)
        axes.margins(y=0.08)
        style.label(axes, x="codec, in both directions", y="time of a round", y_unit=unit.name)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=6, columnspacing=0.9, fontsize=10)
    return canvas.finish(
        figure,
        scale,
        f"From the command to the published model; each part: median of {len({row.round_id for row in rows})} rounds "
        f"with 2 clients and {scale.samples:,} samples each. Training and encoding: the slower client's.",
        timed=rows,
        compared="federated_time",
    )


def _part_s(row: RoundRow, name: str) -> float:
    if name != "rest":
        return float(getattr(row, name))
    return max(0.0, row.seconds - sum(float(getattr(row, part)) for part, _, _ in _PARTS[:-1]))


def draw_accuracy(rounds: Sequence[RoundRow], scale: Scale) -> Figure:
    """Accuracy over rounds, and at the end."""
    rows = [row for row in canvas.pick(rounds, group="codecs") if row.accuracy is not None]
    figure, (over_rounds, ends) = style.new_figure(1, 2, height_in=4.2, width_ratios=(3, 2))
    marks = canvas.stars("federated_accuracy", fits=scale.rounds == 10 and scale.data == "mnist")
    for index, codec in enumerate(CODECS):
        look = style.look_of(codec)
        curves = [
            [(float(row.round_id), 100 * (row.accuracy or 0.0)) for row in of_seed]
            for of_seed in canvas.by_seed(canvas.pick(rows, codec=codec))
        ]
        canvas.mean_with_range(over_rounds, curves, look)
        last = [curve[-1][1] for curve in curves]
        ends.plot([index, index], [min(last), max(last)], color="black", linewidth=1)
        ends.scatter([index] * len(last), last, s=14, color="black", zorder=3)
        ends.plot([index], [statistics.mean(last)], look.marker, color=look.color, markersize=11, zorder=2)
        if codec in marks:
            canvas.star(ends, index + 0.3, marks[codec], size=9)
    style.whole_numbers(over_rounds.xaxis)
    style.legend_above(over_rounds)
    style.label(over_rounds, x="round", y="test accuracy", y_unit="%")
    canvas.name_bars(ends, CODECS)
    ends.margins(x=0.12, y=0.15)
    ends.set_title(f"after {scale.rounds} rounds")
    style.label(ends, x="codec", y="test accuracy", y_unit="%")
    return canvas.finish(
        figure,
        scale,
        f"{scale.data_name}, CNN, 2 clients with equal shares, {scale.samples:,} samples each per round; the codec in "
        f"both directions, with error feedback; {canvas.seeds_note(rows, 'codec')}.",
        compared="federated_accuracy" if marks else "",
    )


_PANELS = (("codecs", "equal shares (IID)"), ("skewed", "unequal shares (Dirichlet 0.5)"))


def draw_tradeoff(rounds: Sequence[RoundRow], scale: Scale) -> Figure:
    """Accuracy over the bytes sent so far, both ways, all clients together."""
    figure, panels = style.new_figure(1, 2, height_in=4.4, sharey=True, sharex=True)
    notes = []
    for axes, (group, title) in zip(panels, _PANELS, strict=True):
        of_group = canvas.pick(rounds, group=group)
        notes.append(f"{title[0].upper()}{title[1:]}: {canvas.seeds_note(of_group, 'codec')}")
        for codec in CODECS:
            curves = [list(_over_bytes(of_seed)) for of_seed in canvas.by_seed(canvas.pick(of_group, codec=codec))]
            canvas.mean_with_range(axes, curves, style.look_of(codec))
        axes.set_xscale("log")
        axes.set_title(title)
        style.label(axes, x="sent, up and down", x_unit="MB", y="test accuracy", y_unit="%")
    panels[1].set_ylabel("")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(CODECS))
    return canvas.finish(
        figure,
        scale,
        f"{scale.data_name}, CNN, 2 clients, {scale.rounds} rounds of {scale.samples:,} samples per client; the codec "
        f"in both directions. {'. '.join(notes)}.",
    )


def _over_bytes(rows: Sequence[RoundRow]) -> Iterator[tuple[float, float]]:
    """(MB so far, accuracy in percent) after each round that was evaluated."""
    ordered = sorted(rows, key=lambda row: row.round_id)
    sent = accumulate((row.bytes_up + row.bytes_down) / 1e6 for row in ordered)
    for row, megabytes in zip(ordered, sent, strict=True):
        if row.accuracy is not None:
            yield megabytes, 100 * row.accuracy
