"""The figure of loss over time on a thin and distant link: exchanges in every step against local steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradbus.commands.report import style
from gradbus.experiments.figures import canvas
from gradbus.experiments.figures.plan import WAYS, Scale
from gradbus.experiments.figures.tables import ThinLinkRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = {
    "DDP": "DDP, dense fp32", "DGC": "DGC 0.1 %", "DiLoCo": "DiLoCo q8, H = 50",
    "streaming": "streaming DiLoCo q4, H = 50, 5 fragments, 5 steps late",
}  # fmt: skip
_TICKS_S = (1, 2, 5, 10, 20, 30, 60, 120)


def draw_loss(rows: Sequence[ThinLinkRow], scale: Scale) -> Figure:
    """Training loss over seconds, on logarithmic scales."""
    figure, (axes,) = style.new_figure(height_in=4.6)
    steps = []
    for index, way in enumerate(WAYS):
        of_way = canvas.pick(rows, "thin_link", way=way)
        missing = {row.until_s for row in of_way if row.loss is None}  # no step ended in that window
        curves = [
            [(row.until_s, row.loss) for row in of_seed if row.loss is not None and row.until_s not in missing]
            for of_seed in canvas.by_seed(of_way)
        ]
        canvas.mean_with_range(axes, curves, style.nth_look(index, _NAMES[way]))
        last = max(row.until_s for row in of_way)
        made = statistics.mean(row.steps for row in of_way if row.until_s == last)
        steps.append(f"{_NAMES[way].split(',')[0]} {made:,.0f}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [at for at in _TICKS_S if at <= last]
    axes.set_xticks(ticks, [f"{at}" for at in ticks])
    axes.set_xticks([], minor=True)
    style.label(axes, x="time", x_unit="s", y="training loss")
    axes.legend(fontsize=9)
    return canvas.finish(
        figure,
        scale,
        f"{scale.data_name}, CNN, 2 ranks, batches of 16 each, a link of 50 Mbit/s and 50 ms one way between network "
        f"namespaces of one machine; {canvas.seeds_note(rows, 'way')}. "
        f"Steps of a rank in that time: {', '.join(steps)}.",
        timed=rows,
    )
