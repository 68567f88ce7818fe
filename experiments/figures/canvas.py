"""What the drawings share: the rows of a series, captions, means with their range, marks of published figures."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from gradbus.commands.report import style
from gradbus.experiments.figures.plan import Scale
from gradbus.experiments.figures.tables import BadData, TableRow
from gradbus.runtime.json_text import parse_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CAPTION_CHARS = 104  # of a line across a figure of the usual width
_CAPTION_PT = 9
_BAND_ALPHA = 0.18
_BUSY = 2.0  # processes that want a core: the runs themselves account for 1 to 1.5

R = TypeVar("R", bound=TableRow)
Curve = list[tuple[float, float]]


def pick(rows: Sequence[R], what: str = "rows", **columns: Any) -> list[R]:
    """The rows with these values. Raises BadData: there are none to draw."""
    found = [row for row in rows if all(getattr(row, name) == value for name, value in columns.items())]
    if not found:
        where = ", ".join(f"{name} {value}" for name, value in columns.items())
        raise BadData(f"no rows of {where or what}: run make figures again, without --draw-only")
    return found


def by_seed(rows: Sequence[R]) -> list[list[R]]:
    """The rows of each seed."""
    return [pick(rows, seed=seed) for seed in sorted({getattr(row, "seed") for row in rows})]  # noqa: B009 - of rows that have one


# Text


def finish(figure: Figure, scale: Scale, *sentences: str, timed: Sequence[Any] = (), compared: str = "") -> Figure:
    """Put a text under the figure, over its whole width.

    Args:
        timed: rows with times, of which it is said if the machine had other work.
        compared: the name of a figure whose published values are named.
    """
    quick = (
        f"QUICK: {scale.rounds} rounds of {scale.samples:,} samples, {scale.epochs} epochs, {scale.seeds} "
        f"seed{'' if scale.seeds == 1 else 's'}: shows how the figure looks, not how the methods do."
    )
    loads = [row.load_per_core for row in timed]
    busy = ""
    if loads and max(loads) >= _BUSY:
        busy = (
            f"Other work was going on: {min(loads):.1f} to {max(loads):.1f} processes wanted each core, so times are "
            "too long and their order may be chance."
        )
    note = published(compared)
    texts = (quick if scale.name == "quick" else "", *sentences, busy, note.sentence() if note else "")
    text = textwrap.fill(" ".join(filter(None, texts)), _CAPTION_CHARS)
    figure.supxlabel(text, x=0.01, ha="left", fontsize=_CAPTION_PT)
    return figure


def seeds_note(rows: Sequence[TableRow], series: str) -> str:
    """Return how many seeds the mean of a series has, counted in the data. ``series``: the column with its name."""
    seeds: dict[str, set[int]] = {}
    for row in rows:
        seeds.setdefault(getattr(row, series), set()).add(getattr(row, "seed"))  # noqa: B009 - of rows that have one
    fewest, most = min(map(len, seeds.values())), max(map(len, seeds.values()))
    if most == 1:
        return "one seed"
    return f"mean and range of {most} seeds" if fewest == most else f"mean and range of {fewest} to {most} seeds"


# Marks


def name_bars(axes: Axes, names: Sequence[str], **text: Any) -> None:
    """Name the places of the bars, and take the lines between them away."""
    axes.set_xticks(range(len(names)), names, **text)
    axes.grid(visible=False, axis="x")


def number_above(axes: Axes, at: float, top: float, text: str, *, points: int = 5) -> None:
    """A text so many points above a bar or its highest dot."""
    axes.annotate(text, (at, top), xytext=(0, points), textcoords="offset points", ha="center", fontsize=10)


def bar_with_dots(axes: Axes, at: float, values: Sequence[float], *, width: float, **look: Any) -> None:
    """A bar up to the median, its number above, and a dot for each value."""
    median = statistics.median(values)
    axes.bar([at], [median], width, **look)
    axes.scatter([at] * len(values), values, s=12, color="black", zorder=3)
    number_above(axes, at, max(values), f"{median:.3g}")


def star(axes: Axes, at: float, value: float, *, size: float, **look: Any) -> None:
    """The mark of a published value."""
    axes.plot([at], [value], style.REFERENCE.marker, markersize=size, **{"color": style.REFERENCE.color, **look})


def mean_with_range(axes: Axes, curves: Sequence[Curve], look: style.Look) -> None:
    """The mean of several curves of (x, y), and between the lowest and the highest of them a band.

    Args:
        curves: one for each seed, equally long.

    Raises:
        BadData: they are not.
    """
    if len({len(curve) for curve in curves}) != 1:
        raise BadData(f"{look.label}: curves of {sorted({len(curve) for curve in curves})} points cannot be averaged")
    x = [statistics.mean(at for at, _ in points) for points in zip(*curves, strict=True)]
    ys = [[y for _, y in points] for points in zip(*curves, strict=True)]
    axes.plot(x, [statistics.mean(values) for values in ys], **look.line)
    if len(curves) > 1:
        axes.fill_between(x, [*map(min, ys)], [*map(max, ys)], color=look.color, alpha=_BAND_ALPHA, linewidth=0)


# Published figures


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

    def sentence(self) -> str:
        """A sentence for a caption."""
        if self.comparable:
            return f"Stars: published by the original. {self.note}"
        listed = ", ".join(f"{name} {value:,g}" for name, value in self.values.items())
        return f"Published by the original, in {self.unit}: {listed}. {self.note}."


class PublishedFile(BaseModel):
    """All published values, and where they come from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    figures: Mapping[str, Published]

    @classmethod
    def load(cls) -> PublishedFile:
        """Read the file that comes with the code."""
        text = files("gradbus.experiments.figures").joinpath("published.json").read_text(encoding="utf-8")
        return cls.model_validate(parse_json(text))


def published(figure: str) -> Published | None:
    """The values published on the subject of a figure, or None."""
    return PublishedFile.load().figures.get(figure)


def stars(figure: str, *, fits: bool = True) -> dict[str, float]:
    """The published values that may be drawn, by series, counted as ours. ``fits``: whether the runs are as long."""
    found = published(figure)
    if found is None or not found.comparable or not fits:
        return {}
    return {name: value / found.divide_by for name, value in found.values.items()}
