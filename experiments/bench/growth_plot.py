"""Growth as a figure: every series over its size, on logarithmic axes, with the fitted line and its exponent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gradbus.experiments.bench.growth import Line, lines, text_of
from gradbus.experiments.bench.results import Results
from gradbus.experiments.bench.suite import SCALE
from gradbus.experiments.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AT = {"clients": ("clients in one process", ""), "ranks": ("processes", ""), "payload": ("model", "MB")}


def draw(path: Path, results: Results) -> bool:
    """A PNG with one panel for each part and unit. False: there is nothing to draw.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    panels: list[tuple[str, str, list[Line]]] = []
    for part in SCALE:
        run = results.run(part)
        by_unit: dict[str, list[Line]] = {}
        for line in lines(run) if run is not None else []:
            by_unit.setdefault(line.unit, []).append(line)
        panels += [(part, unit, found) for unit, found in by_unit.items()]
    if not panels:
        return False
    with style.drawing():
        columns = 2 if len(panels) > 1 else 1
        rows = -(-len(panels) // columns)
        figure, all_axes = style.new_figure(rows, columns, width_in=14.0, height_in=4.4 * rows)
        for axes in all_axes[len(panels) :]:
            axes.set_visible(False)
        for axes, (part, unit, found) in zip(all_axes, panels, strict=False):
            _panel(axes, part, unit, found)
        path.parent.mkdir(parents=True, exist_ok=True)
        style.save(figure, path)
    return True


def _panel(axes: Axes, part: str, unit: str, found: list[Line]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for number, line in enumerate(found):
        look = style.nth_look(number, f"{line.name}: {text_of(line.whole)}")
        low, high = (
            [abs(q[side] - cost) for q, cost in zip(line.quartiles, line.costs, strict=True)] for side in (0, 1)
        )
        axes.errorbar(line.at, line.costs, yerr=[low, high], linestyle="none", capsize=3, **look.line)
        fitted = line.whole
        ends = [line.at[0], line.at[-1]]
        axes.plot(ends, [fitted.factor * at**fitted.exponent for at in ends], color=look.color, linewidth=1.0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    name, at_unit = _AT[part]
    axes.set_xticks(sorted({at for line in found for at in line.at}), minor=False)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    style.label(axes, x=name, x_unit=at_unit, y="cost", y_unit=unit)
    style.legend_above(axes, columns=1)
