"""What the drawings share: captions, bars with their values, means with their range, marks of published figures."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from gradbus.experiments.figures.plan import Scale
from gradbus.experiments.figures.tables import BadData
from gradbus.experiments.report import style
from gradbus.runtime.json_text import parse_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CAPTION_CHARS = 104  # of a line across a figure of the usual width
_CAPTION_PT = 9
BAND_ALPHA = 0.18
_BUSY = 2.0  # processes that want a core: the runs themselves account for 1 to 1.5


def caption(figure: Figure, *sentences: str) -> None:
    """A text under the figure, over its whole width."""
    text = " ".join(sentence for sentence in sentences if sentence)
    figure.supxlabel(textwrap.fill(text, _CAPTION_CHARS), x=0.01, ha="left", fontsize=_CAPTION_PT)


def quick_note(scale: Scale) -> str:
    """A sentence for captions of a plan that was cut down, else nothing."""
    if scale.name != "quick":
        return ""
    return (
        f"QUICK: {scale.rounds} rounds of {scale.samples:,} samples, {scale.epochs} epochs, "
        f"{_counted(scale.seeds, 'seed')}: shows how the figure looks, not how the methods do."
    )


def seeds_note(rows: Iterable[Any], series: str) -> str:
    """How many seeds the mean of a series has, counted in the data. ``series``: the column with its name."""
    seeds: dict[str, set[int]] = {}
    for row in rows:
        seeds.setdefault(getattr(row, series), set()).add(row.seed)
    fewest, most = min(map(len, seeds.values())), max(map(len, seeds.values()))
    if most == 1:
        return "one seed"
    return f"mean and range of {most} seeds" if fewest == most else f"mean and range of {fewest} to {most} seeds"


def load_note(rows: Sequence[Any]) -> str:
    """A sentence for captions of times where the machine was busy with other work as well, else nothing."""
    low, high = min(row.load_per_core for row in rows), max(row.load_per_core for row in rows)
    if high < _BUSY:
        return ""
    return (
        f"Other work was going on: {low:.1f} to {high:.1f} processes wanted each core, so times are too long and their "
        "order may be chance."
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def need(rows: Sequence[Any], what: str) -> None:
    """Raises BadData: there are no such rows to draw."""
    if not rows:
        raise BadData(f"no rows of {what}: run make figures again, without --draw-only")


def bars(axes: Axes, at: Sequence[float], heights: Sequence[float], texts: Sequence[str], **look: Any) -> None:
    """Bars, each with a text on top."""
    drawn = axes.bar(at, heights, **look)
    axes.bar_label(drawn, texts, padding=2, fontsize=10)


def number_above(axes: Axes, at: float, top: float, value: float, *, points: int = 5) -> None:
    """The value in three digits, so many points above a bar or its highest dot."""
    axes.annotate(f"{value:.3g}", (at, top), xytext=(0, points), textcoords="offset points", ha="center", fontsize=10)


def star(axes: Axes, at: float, value: float, *, size: float, **look: Any) -> None:
    """The mark of a published value."""
    axes.plot([at], [value], style.REFERENCE.marker, markersize=size, **{"color": style.REFERENCE.color, **look})


def spread(axes: Axes, at: float, values: Sequence[float]) -> None:
    """A line from the smallest value to the largest, across a bar."""
    if len(values) > 1:
        low, high, mean = min(values), max(values), statistics.mean(values)
        axes.errorbar([at], [mean], yerr=[[mean - low], [high - mean]], color="black", capsize=3, linewidth=1)


def lines_with_range(
    axes: Axes, series: Sequence[Sequence[tuple[float, float]]], *, color: str, marker: str, label: str
) -> None:
    """The mean of several curves of (x, y), and between the lowest and the highest of them a band.

    Args:
        series: one for each seed, equally long.

    Raises:
        BadData: they are not.
    """
    need(series, label)
    if len({len(curve) for curve in series}) != 1:
        raise BadData(f"{label}: curves of {sorted({len(curve) for curve in series})} points cannot be averaged")
    x = [statistics.mean(curve[index][0] for curve in series) for index in range(len(series[0]))]
    ys = [[curve[index][1] for curve in series] for index in range(len(series[0]))]
    axes.plot(x, [statistics.mean(values) for values in ys], color=color, marker=marker, label=label)
    if len(series) > 1:
        axes.fill_between(x, [*map(min, ys)], [*map(max, ys)], color=color, alpha=BAND_ALPHA, linewidth=0)


class Published(BaseModel):
    """Values that others have published on the subject of one figure, from published.json.

    Attributes:
        comparable: whether they may be drawn beside ours. values: by series. unit: of the values, as published.
        divide_by: what makes of a published value one that counts the same as ours.
        note: why they are comparable only so far, or not at all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    comparable: bool
    unit: str
    values: Mapping[str, float]
    divide_by: Annotated[float, Field(gt=0)] = 1.0
    note: str

    def marks(self) -> dict[str, float]:
        """The values that may be drawn, by series, counted as ours; empty if nothing is comparable."""
        return {name: value / self.divide_by for name, value in self.values.items()} if self.comparable else {}

    def sentence(self) -> str:
        """A sentence for a caption."""
        if self.comparable:
            return f"Stars: published by the original. {self.note}"
        listed = ", ".join(f"{name} {value:,g}" for name, value in self.values.items())
        return f"Published by the original, in {self.unit}: {listed}. {self.note}."


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    figures: Mapping[str, Published]


def published(figure: str) -> Published | None:
    """The values published on the subject of a figure, or None."""
    return _load().figures.get(figure)


def source() -> str:
    """The source of all published values."""
    return _load().source


def _load() -> _File:
    text = files("gradbus.experiments.figures").joinpath("published.json").read_text(encoding="utf-8")
    return _File.model_validate(parse_json(text))
