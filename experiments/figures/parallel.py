"""Figures of data-parallel runs: bytes, accuracy and waiting, dense against int8 against Deep Gradient Compression."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gradbus.commands.report import style
from gradbus.experiments.figures import canvas
from gradbus.experiments.figures.plan import EXCHANGES, Scale
from gradbus.experiments.figures.tables import EpochRow, RankRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = {"dense": "dense fp32", "int8": "int8\n(baseline of the original)", "dgc": "DGC 0.1 %"}
_MIB = 1 << 20


def _setting(scale: Scale) -> str:
    return f"{scale.data_name}, perceptron 784-512-10, 2 ranks, batches of 128 each"


def draw_bytes(epochs: Sequence[EpochRow], scale: Scale) -> Figure:
    """Payload that a rank sends in a step, once the density has come to its end."""
    rows = canvas.pick(epochs, "epochs", overlap=False)
    last = max(row.epoch for row in rows)
    figure, (axes,) = style.new_figure(height_in=4.4)
    marks = canvas.stars("parallel_bytes")
    for index, exchange in enumerate(EXCHANGES):
        value = statistics.mean(row.bytes_per_step for row in canvas.pick(rows, exchange=exchange, epoch=last))
        unit = style.byte_unit(value)
        axes.bar([index], [value], 0.6, color=style.look_of(exchange).color)
        canvas.number_above(axes, index, value, f"{value / unit.factor:.3g} {unit.name}", points=2)
        if exchange in marks:
            canvas.star(axes, index + 0.38, marks[exchange] * _MIB, size=11)
    axes.set_yscale("log")
    axes.set_ylim(1e3, 1e7)
    canvas.name_bars(axes, [_NAMES[name] for name in EXCHANGES])
    style.label(axes, x="exchange of gradients", y="sent per step and rank", y_unit="B")
    dgc = canvas.pick(rows, exchange="dgc")
    unit = style.byte_unit(mean := sum(r.bytes_per_step * r.steps for r in dgc) / sum(r.steps for r in dgc))
    return canvas.finish(
        figure,
        scale,
        f"{_setting(scale)}: payload in the last of {last} epochs. Over all epochs, those of the warm-up included, "
        f"DGC sends {mean / unit.factor:.3g} {unit.name} per step.",
        compared="parallel_bytes",
    )


def draw_accuracy(epochs: Sequence[EpochRow], scale: Scale) -> Figure:
    """Accuracy over epochs."""
    # All ranks hold the same model, and report the same accuracy.
    rows = [row for row in canvas.pick(epochs, "epochs", overlap=False, rank=0) if row.accuracy is not None]
    figure, (axes,) = style.new_figure(height_in=4.4)
    marks = canvas.stars("parallel_accuracy", fits=scale.epochs == 10 and scale.data == "mnist")
    last = max(row.epoch for row in rows)
    for index, exchange in enumerate(EXCHANGES):
        look = style.look_of(exchange)._replace(label=_NAMES[exchange].replace("\n", " "))
        curves = [
            [(float(row.epoch), 100 * (row.accuracy or 0.0)) for row in of_seed]
            for of_seed in canvas.by_seed(canvas.pick(rows, exchange=exchange))
        ]
        canvas.mean_with_range(axes, curves, look)
        if exchange in marks:
            at = last + 0.25 * index
            canvas.star(axes, at, marks[exchange], size=13, color=look.color, markeredgecolor=style.BLACK)
    style.whole_numbers(axes.xaxis)
    style.label(axes, x="epoch", y="test accuracy", y_unit="%")
    style.legend_above(axes)
    return canvas.finish(
        figure,
        scale,
        f"{_setting(scale)}; learning rate 0.05, momentum 0.9; {canvas.seeds_note(rows, 'exchange')}.",
        compared="parallel_accuracy" if marks else "",
    )


def draw_wait(ranks: Sequence[RankRow], scale: Scale) -> Figure:
    """The wait of a step for the others and for the network: mean and maximum."""
    kinds = [("dense", True), ("dense", False), ("int8", False), ("dgc", False)]
    figure, panels = style.new_figure(1, 2, height_in=4.4)
    # Of a run: the mean over its ranks, the worst of its ranks.
    of_run: tuple[tuple[str, str, Callable[[list[float]], float]], ...] = (
        ("mean", "wait_s_mean", statistics.mean),
        ("maximum", "wait_s_max", max),
    )
    for axes, (title, column, of_ranks) in zip(panels, of_run, strict=True):
        unit = style.time_unit(max(float(getattr(row, column)) for row in canvas.pick(ranks, "ranks")))
        for index, (exchange, overlap) in enumerate(kinds):
            runs = canvas.by_seed(canvas.pick(ranks, exchange=exchange, overlap=overlap))
            values = [of_ranks([float(getattr(row, column)) / unit.factor for row in rows]) for rows in runs]
            look = {"color": style.look_of(exchange).color, "alpha": 0.55 if overlap else 1.0}
            canvas.bar_with_dots(axes, index, values, width=0.65, **look)
        axes.set_title(title)
        canvas.name_bars(axes, ["dense,\noverlap", "dense", "int8\n(original)", "DGC\n0.1 %"], fontsize=9.5)
        axes.margins(y=0.12)
        style.label(axes, x="exchange of gradients", y="communication time per step", y_unit=unit.name)
    return canvas.finish(
        figure,
        scale,
        f"{_setting(scale)}, over DDS on one machine: from the end of a rank's own work to the end of the step's last "
        "exchange, all steps. Bars: median of the runs, dots: each run. With overlap, the default, a part is hidden "
        "behind the backward pass.",
        timed=ranks,
        compared="parallel_wait",
    )
