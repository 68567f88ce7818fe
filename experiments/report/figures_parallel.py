"""The figures of a report on a data-parallel run, drawn from what its ranks have left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from gradbus.actors.data_parallel.report import EpochReport
from gradbus.experiments.report import style
from gradbus.experiments.report.figures import Curve
from gradbus.experiments.report.style import Look
from gradbus.experiments.report.svg import Picture, new_figure, picture_of
from gradbus.experiments.rundir.reading import Span
from gradbus.runtime.profiling.summary import ProfileSummary, WindowStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_RANKS = 16  # bars
MAX_LINES = 8  # ranks that get a line of their own

PARTS: dict[str, tuple[str, str]] = {
    "compute_s": ("compute", style.PHASES["train"]),
    "encode_s": ("encode", style.PHASES["encode"]),
    "wait_s": ("wait", style.PHASES["queue"]),
    "decode_s": ("decode", style.PHASES["decode"]),
    "apply_s": ("apply", style.PHASES["aggregate"]),
    "other_s": ("other", style.PHASES["checkpoint"]),
}
"""Parts of a step, as docs/profile.md explains them: label and colour."""
COLLECTIVE = ("exchange", style.PHASES["upload"])


def curve_of_epochs(reports: Sequence[EpochReport], look: Look) -> Curve:
    """Of a data-parallel run; the bytes are those of the rank that reports."""
    steps = [after - before for before, after in pairwise([0, *(report.step for report in reports)])]
    sent = (report.bytes_out_per_step * max(0, count) for report, count in zip(reports, steps, strict=True))
    return Curve(
        look,
        [report.epoch + 1 for report in reports],
        list(accumulate(sent)),
        list(accumulate(report.seconds for report in reports)),
        [math.nan if report.accuracy is None else report.accuracy for report in reports],
        [report.loss for report in reports],
        [math.nan if report.eval_loss is None else report.eval_loss for report in reports],
    )


def draw_step_parts(profiles: Sequence[ProfileSummary], name: str) -> Picture | None:
    """A bar for each rank: the mean step, part by part. Of very many ranks, those that wait least."""
    shown = sorted(profiles, key=lambda profile: profile.mean.get("wait_s", 0.0))[:MAX_RANKS]
    shown = sorted((profile for profile in shown if profile.steps), key=lambda profile: profile.rank)
    if not shown:
        return None
    unit = style.time_unit(max(profile.mean.get("step_s", 0.0) for profile in shown))
    with style.drawing():
        figure, (axes,) = new_figure(height_in=1.4 + 0.36 * len(shown))
        rows = range(len(shown))
        left = [0.0] * len(shown)
        for key, (label, color) in PARTS.items():
            widths = [_finite(profile.mean.get(key, 0.0)) / unit.factor for profile in shown]
            if any(widths):
                axes.barh(rows, widths, left=left, color=color, label=label, height=0.7)
                left = [low + width for low, width in zip(left, widths, strict=True)]
        axes.set_yticks(rows, [f"rank {profile.rank}" for profile in shown])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"mean step / {unit.name}")
        style.legend_above(axes)
        return picture_of(figure, name)


def draw_windows(windows: Mapping[int, Sequence[WindowStats]], name: str) -> Picture | None:
    """Step time and wait over the run: the means of windows of steps."""
    known = {rank: found for rank, found in windows.items() if found}
    if not known:
        return None
    with style.drawing():
        figure, (steps, waits) = new_figure(1, 2, height_in=3.2, sharex=True)
        for axes, key, label in ((steps, "step_s", "step"), (waits, "wait_s", "wait of a step")):
            largest_s = max(_finite(window.mean.get(key, 0.0)) for found in known.values() for window in found)
            unit = style.time_unit(largest_s)
            _lines(axes, known, key, unit.factor)
            style.label(axes, x="step", y=label, y_unit=unit.name)
            style.from_zero(axes)
            style.whole_numbers(axes.xaxis, most=5)
        handles, labels = steps.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=6, columnspacing=1.2)
        return picture_of(figure, name)


def _lines(axes: Axes, windows: Mapping[int, Sequence[WindowStats]], key: str, factor: float) -> None:
    if len(windows) <= MAX_LINES:
        for index, (rank, found) in enumerate(windows.items()):
            look = style.nth_look(index, f"rank {rank}")
            values = [window.mean.get(key, 0.0) / factor for window in found]
            marker = look.marker if len(found) <= 40 else ""
            axes.plot([window.last_step for window in found], values, color=look.color, marker=marker, label=look.label)
        return
    by_step: dict[int, list[float]] = {}
    for found in windows.values():
        for window in found:
            by_step.setdefault(window.last_step, []).append(_finite(window.mean.get(key, 0.0)) / factor)
    steps = sorted(by_step)
    middle = [sorted(by_step[step]) for step in steps]
    axes.fill_between(
        steps, [found[0] for found in middle], [found[-1] for found in middle], color=style.BLUE, alpha=0.25,
        linewidth=0, label="all ranks",
    )  # fmt: skip
    axes.plot(steps, [found[len(found) // 2] for found in middle], color=style.BLUE, label="median")


def draw_step(spans: Mapping[int, Sequence[Span]], name: str) -> Picture | None:
    """One step of each rank: what it computed, and below what was on its way meanwhile."""
    if not spans:
        return None
    everything = [span for found in spans.values() for span in found]
    unit = style.time_unit(max(span.end_s for span in everything))
    used: set[str] = set()
    with style.drawing():
        figure, (axes,) = new_figure(height_in=1.3 + 0.62 * len(spans))
        for row, found in enumerate(spans.values()):
            for span in found:
                label, color = PARTS.get(f"{span.name}_s", COLLECTIVE)
                if span.row == "step":
                    continue
                if span.row == "collectives":
                    label, color = COLLECTIVE
                used.add(label)
                low = row - 0.42 if span.row == "compute" else row + (0.0 if span.row == "collectives" else 0.2)
                height = 0.4 if span.row == "compute" else 0.18
                width = (span.end_s - span.start_s) / unit.factor
                axes.broken_barh([(span.start_s / unit.factor, width)], (low, height), facecolors=color)
        axes.set_yticks(range(len(spans)), [f"rank {rank}" for rank in spans])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlim(left=0.0)
        axes.set_xlabel(f"time / {unit.name}")
        style.legend_of_colors(
            figure, {label: color for label, color in [*PARTS.values(), COLLECTIVE] if label in used}
        )
        return picture_of(figure, name)


def draw_step_bytes(reports: Sequence[EpochReport], name: str, look: Look) -> Picture | None:
    """Bytes that a step handed to the bus, epoch by epoch; and the share of the gradient that was sent."""
    if not reports:
        return None
    unit = style.byte_unit(max(report.bytes_out_per_step for report in reports))
    epochs = [report.epoch + 1 for report in reports]
    sparse = any(report.density < 1 for report in reports)
    with style.drawing():
        figure, axes = new_figure(1, 2 if sparse else 1, height_in=2.7)
        values = [report.bytes_out_per_step / unit.factor for report in reports]
        axes[0].bar(epochs, values, color=look.color, width=style.bar_width(len(epochs)))
        style.label(axes[0], x="epoch", y="sent per step", y_unit=unit.name)
        axes[0].grid(visible=False, axis="x")
        if sparse:
            axes[1].plot(epochs, [100 * report.density for report in reports], color=look.color, marker=look.marker)
            axes[1].set_yscale("log")
            style.label(axes[1], x="epoch", y="share of the gradient", y_unit="%")
        for axis in axes:
            style.whole_numbers(axis.xaxis)
        return picture_of(figure, name)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
