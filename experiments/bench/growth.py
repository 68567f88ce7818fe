"""How a cost grows: the exponent of a power law by least squares on logarithms, with its standard error, and a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gradbus.commands.report import style
from gradbus.experiments.bench.results import PartRun, Results, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# By part, in the order of the panels: the label and the unit of the x axis.
_AT = {"clients": ("clients in one process", ""), "ranks": ("processes", ""), "payload": ("model", "MB")}


class Fit(NamedTuple):
    """``cost = factor * at ** exponent``.

    Attributes:
        exponent: 0: it does not grow, 1: linear, 2: quadratic.
        error: its standard error, from how far the points lie off the line; nan with only two.
        factor: the cost at 1.
    """

    exponent: float
    error: float
    factor: float


class Line(NamedTuple):
    """The points of one series, in order.

    Attributes:
        name: what it costs. unit: of the cost. at: of what there is more and more. summaries: of the costs there.
    """

    name: str
    unit: str
    at: tuple[float, ...]
    summaries: tuple[Summary, ...]

    @property
    def costs(self) -> tuple[float, ...]:
        """The medians."""
        return tuple(one.median for one in self.summaries)

    @property
    def whole(self) -> Fit:
        """Through all points. A fixed cost that weighs at the small end makes it too low for the large one."""
        return fit(self.at, self.costs)

    @property
    def end(self) -> Fit:
        """Through the last three points: what to expect beyond them."""
        return fit(self.at[-3:], self.costs[-3:])


def fit(at: Sequence[float], costs: Sequence[float]) -> Fit:
    """The straight line through the logarithms.

    Raises:
        ValueError: fewer than two different places, or a cost that is not above 0.
    """
    if len(set(at)) < 2 or len(at) != len(costs) or min(at) <= 0 or min(costs) <= 0:
        raise ValueError(f"growth needs two different places and costs above 0, got {list(at)} and {list(costs)}")
    x, y = np.log(at), np.log(costs)
    if len(x) == 2:  # no point is left for an error
        (exponent, offset), error = np.polyfit(x, y, 1), math.nan
    else:
        (exponent, offset), covariance = np.polyfit(x, y, 1, cov=True)
        error = math.sqrt(max(0.0, covariance[0, 0]))
    return Fit(float(exponent), error, math.exp(offset))


def lines(run: PartRun) -> list[Line]:
    """All series of a run that have points at two places or more."""
    series: dict[tuple[str, str], dict[float, Summary]] = {}
    for one in run.figures:
        if one.series and one.at is not None:
            series.setdefault((one.series, one.unit), {})[one.at] = one.summary
    return [
        Line(name, unit, tuple(sorted(points)), tuple(points[at] for at in sorted(points)))
        for (name, unit), points in series.items()
        if len(points) > 1
    ]


def text_of(found: Fit) -> str:
    """The exponent and its standard error, as in "0.98 ± 0.03"."""
    return f"{found.exponent:.2f}" + ("" if math.isnan(found.error) else f" ± {found.error:.2f}")


def draw(path: Path, results: Results) -> bool:
    """Draw a PNG with one panel for each part and unit. Returns False if there is nothing to draw, or no matplotlib."""
    panels: dict[tuple[str, str], list[Line]] = {}  # by part and unit
    for part in _AT:
        run = results.run(part)
        for line in lines(run) if run is not None else ():
            panels.setdefault((part, line.unit), []).append(line)
    if not panels or not style.have_matplotlib():  # in this order: to ask for matplotlib takes half a second
        return False
    with style.drawing():
        columns = min(2, len(panels))
        rows = math.ceil(len(panels) / columns)
        figure, all_axes = style.new_figure(rows, columns, width_in=14.0, height_in=4.4 * rows)
        for axes in all_axes[len(panels) :]:
            axes.set_visible(False)
        for axes, ((part, unit), found) in zip(all_axes, panels.items(), strict=False):
            _panel(axes, part, unit, found)
        path.parent.mkdir(parents=True, exist_ok=True)
        style.save(figure, path)
    return True


def _panel(axes: Axes, part: str, unit: str, found: list[Line]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for number, line in enumerate(found):
        look = style.nth_look(number, f"{line.name}: {text_of(line.whole)}")
        spread = [[one.median - one.low for one in line.summaries], [one.high - one.median for one in line.summaries]]
        axes.errorbar(line.at, line.costs, yerr=spread, linestyle="none", capsize=3, **look.line)
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
