"""What the drawings share: captions, bars with their values, means with their range."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gradbus.experiments.gallery.plan import Scale
from gradbus.experiments.gallery.tables import BadData

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
    """What a caption has to say of a plan that was cut down."""
    if scale.name != "quick":
        return ""
    return (
        f"QUICK: {scale.rounds} rounds of {scale.samples:,} samples, {scale.epochs} epochs, "
        f"{_counted(scale.seeds, 'seed')}: shows how the figure looks, not how the methods do."
    )


def seeds_note(rows: Iterable[Any], series: str) -> str:
    """Of how many seeds the mean of a series is, counted in the data. ``series``: the column that tells them apart."""
    seeds: dict[str, set[int]] = {}
    for row in rows:
        seeds.setdefault(getattr(row, series), set()).add(row.seed)
    fewest, most = min(map(len, seeds.values())), max(map(len, seeds.values()))
    if most == 1:
        return "one seed"
    return f"mean and range of {most} seeds" if fewest == most else f"mean and range of {fewest} to {most} seeds"


def load_note(rows: Sequence[Any]) -> str:
    """What the caption of a figure of times has to say where the machine was busy with other things as well."""
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
    """Raises BadData: nothing of this is there to be drawn."""
    if not rows:
        raise BadData(f"no rows of {what}: run make figures again, without --draw-only")


def bars(axes: Axes, at: Sequence[float], heights: Sequence[float], texts: Sequence[str], **look: Any) -> None:
    """Bars, each with a text on top."""
    drawn = axes.bar(at, heights, **look)
    axes.bar_label(drawn, texts, padding=2, fontsize=10)


def spread(axes: Axes, at: float, values: Sequence[float]) -> None:
    """From the smallest to the largest, across a bar."""
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
