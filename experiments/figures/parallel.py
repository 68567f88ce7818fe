"""Figures of data-parallel runs: bytes, accuracy and waiting, dense against int8 against Deep Gradient Compression."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    star,
)
from gradbus.experiments.figures.plan import EXCHANGES, Scale
from gradbus.experiments.figures.tables import EpochRow, RankRow
from gradbus.experiments.report import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = {"dense": "dense fp32", "int8": "int8\n(baseline of the original)", "dgc": "DGC 0.1 %"}
_SETTING = "MNIST, perceptron 784-512-10, 2 ranks, batches of 128 each"
_MIB = 1 << 20


def draw_bytes(epochs: Sequence[EpochRow], scale: Scale) -> Figure:
    """Payload that a rank sends in a step, once the density has come to its end."""
    rows = [row for row in epochs if not row.overlap]
    need(rows, "epochs")
    last = max(row.epoch for row in rows)
    figure, (axes,) = style.new_figure(height_in=4.4)
    marks = published("parallel_bytes")
    for index, exchange in enumerate(EXCHANGES):
        in_the_end = [row.bytes_per_step for row in rows if (row.exchange, row.epoch) == (exchange, last)]
        need(in_the_end, f"exchange {exchange}")
        value = statistics.mean(in_the_end)
        unit = style.byte_unit(value)
        bars(
            axes, [index], [value], [f"{value / unit.factor:.3g} {unit.name}"], width=0.6,
            color=style.look_of(exchange).color,
        )  # fmt: skip
        if marks and exchange in marks.marks():
            star(axes, index + 0.38, marks.marks()[exchange] * _MIB, size=11)
    axes.set_yscale("log")
    axes.set_ylim(1e3, 1e7)
    axes.set_xticks(range(len(EXCHANGES)), [_NAMES[name] for name in EXCHANGES])
    axes.grid(visible=False, axis="x")
    style.label(axes, x="exchange of gradients", y="sent per step and rank", y_unit="B")
    dgc = [row for row in rows if row.exchange == "dgc"]
    unit = style.byte_unit(mean := sum(r.bytes_per_step * r.steps for r in dgc) / sum(r.steps for r in dgc))
    caption(
        figure, quick_note(scale),
        f"{_SETTING}: payload in the last of {last} epochs. Over all epochs, those of the warm-up included, DGC sends "
        f"{mean / unit.factor:.3g} {unit.name} per step.",
        marks.sentence() if marks else "",
    )  # fmt: skip
    return figure


def draw_accuracy(epochs: Sequence[EpochRow], scale: Scale) -> Figure:
    """Accuracy over epochs."""
    # All ranks hold the same model, and report the same accuracy.
    rows = [row for row in epochs if not row.overlap and row.rank == 0 and row.accuracy is not None]
    need(rows, "evaluated epochs")
    figure, (axes,) = style.new_figure(height_in=4.4)
    marks = published("parallel_accuracy")
    published_marks = marks.marks() if marks and scale.epochs == 10 else {}
    last = max(row.epoch for row in rows)
    for index, exchange in enumerate(EXCHANGES):
        look = style.look_of(exchange)
        of_exchange = [row for row in rows if row.exchange == exchange]
        curves = [
            [(float(row.epoch), 100 * row.accuracy) for row in of_exchange if row.seed == seed and row.accuracy]
            for seed in sorted({row.seed for row in of_exchange})
        ]
        name = _NAMES[exchange].replace("\n", " ")
        lines_with_range(axes, curves, color=look.color, marker=look.marker, label=name)
        if exchange in published_marks:
            look_of_star = {"color": look.color, "markeredgecolor": style.BLACK}
            star(axes, last + 0.25 * index, published_marks[exchange], size=13, **look_of_star)
    style.whole_numbers(axes.xaxis)
    style.label(axes, x="epoch", y="test accuracy", y_unit="%")
    style.legend_above(axes)
    caption(
        figure, quick_note(scale), f"{_SETTING}; learning rate 0.05, momentum 0.9; {seeds_note(rows, 'exchange')}.",
        marks.sentence() if marks and published_marks else "",
    )  # fmt: skip
    return figure


def draw_wait(ranks: Sequence[RankRow], scale: Scale) -> Figure:
    """The wait of a step for the others and for the network: mean and maximum."""
    kinds = [("dense", True), ("dense", False), ("int8", False), ("dgc", False)]
    names = ["dense,\noverlap", "dense", "int8\n(original)", "DGC\n0.1 %"]
    need(ranks, "ranks")
    figure, panels = style.new_figure(1, 2, height_in=4.4)
    for axes, title, column in zip(panels, ("mean", "maximum"), ("wait_s_mean", "wait_s_max"), strict=True):
        unit = style.time_unit(max(float(getattr(row, column)) for row in ranks))
        for index, (exchange, overlap) in enumerate(kinds):
            rows = [row for row in ranks if (row.exchange, row.overlap) == (exchange, overlap)]
            need(rows, f"exchange {exchange}")
            values = [float(getattr(row, column)) / unit.factor for row in rows]
            # Of a run: the mean over its ranks, the worst of its ranks. Of the runs: the median.
            of_runs = [
                (statistics.mean if column == "wait_s_mean" else max)(
                    value for row, value in zip(rows, values, strict=True) if row.seed == seed
                )
                for seed in sorted({row.seed for row in rows})
            ]
            middle = statistics.median(of_runs)
            look = style.look_of(exchange)
            axes.bar([index], [middle], 0.65, color=look.color, alpha=0.55 if overlap else 1.0)
            axes.scatter([index] * len(of_runs), of_runs, s=14, color="black", zorder=3)
            number_above(axes, index, max(of_runs), middle)
        axes.set_title(title)
        axes.set_xticks(range(len(kinds)), names, fontsize=9.5)
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.12)
        style.label(axes, x="exchange of gradients", y="communication time per step", y_unit=unit.name)
    note = published("parallel_wait")
    caption(
        figure, quick_note(scale),
        f"{_SETTING}, over DDS on one machine: from the end of a rank's own work to the end of the step's last "
        "exchange, all steps. Bars: median of the runs, dots: each run. With overlap, the default, a part is hidden "
        "behind the backward pass.",
        load_note(ranks),
        note.sentence() if note else "",
    )  # fmt: skip
    return figure
