"""How a cost grows: the exponent of a power law, by least squares on logarithms, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradbus.experiments.bench.results import Figure, Run, summary


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


@dataclass(frozen=True, slots=True)
class Line:
    """The points of one series, in order.

    Attributes:
        name: what it costs. unit: of the cost. at: of what there is more and more. costs: medians.
    """

    name: str
    unit: str
    at: tuple[float, ...]
    costs: tuple[float, ...]
    quartiles: tuple[tuple[float, float], ...]

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
    x, y = [math.log(one) for one in at], [math.log(one) for one in costs]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    square_x = sum((one - mean_x) ** 2 for one in x)
    exponent = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / square_x
    offset = mean_y - exponent * mean_x
    rest = sum((b - offset - exponent * a) ** 2 for a, b in zip(x, y, strict=True))
    error = math.sqrt(rest / (len(x) - 2) / square_x) if len(x) > 2 else math.nan
    return Fit(exponent, error, math.exp(offset))


def lines(run: Run) -> list[Line]:
    """All series of a run that have points at two places or more."""
    series: dict[str, list[Figure]] = {}
    for one in run.figures:
        if one.series and one.at is not None:
            series.setdefault(one.series, []).append(one)
    found = []
    for name, points in series.items():
        points.sort(key=lambda one: one.at or 0.0)
        if len({one.at for one in points}) > 1:
            taken = [summary(one.samples) for one in points]
            found.append(
                Line(
                    name, points[0].unit, tuple(one.at or 0.0 for one in points), tuple(one.median for one in taken),
                    tuple((one.low, one.high) for one in taken),
                )
            )  # fmt: skip
    return found


def text_of(found: Fit) -> str:
    """As in "0.98 ± 0.03"."""
    return f"{found.exponent:.2f}" + ("" if math.isnan(found.error) else f" ± {found.error:.2f}")
