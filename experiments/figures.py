"""Figures of a run. matplotlib is an extra: without it there are none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradbus.actors.report import RoundReport
    from gradbus.actors.worker_report import EpochReport


def draw_accuracy(path: Path, reports: Sequence[RoundReport], *, title: str) -> bool:
    """Accuracy over rounds, and over the bytes that were sent until then. False: nothing drawn."""
    sent = list(accumulate((report.bytes_up + report.bytes_down) / 1e6 for report in reports))
    points = [(r.round_id, mb, 100 * r.accuracy) for r, mb in zip(reports, sent, strict=True) if r.accuracy is not None]
    return _draw(path, points, title=title, labels=("round", "sent, up and down / MB"))


def draw_epochs(path: Path, reports: Sequence[EpochReport], *, title: str) -> bool:
    """Accuracy over epochs, and over the time they took. False: nothing drawn."""
    spent = list(accumulate(report.seconds for report in reports))
    points = [
        (report.epoch + 1, seconds, 100 * report.accuracy)
        for report, seconds in zip(reports, spent, strict=True)
        if report.accuracy is not None
    ]
    return _draw(path, points, title=title, labels=("epoch", "time / s"))


def _draw(path: Path, points: Sequence[tuple[int, float, float]], *, title: str, labels: tuple[str, str]) -> bool:
    """The third of each point over the first and over the second."""
    if not points:
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    counts, amounts, accuracy = zip(*points, strict=True)
    figure = Figure(figsize=(9, 3.6), layout="constrained")  # no pyplot: it keeps global state, and looks for a screen
    FigureCanvasAgg(figure)
    over_counts, over_amounts = figure.subplots(1, 2, sharey=True)
    over_counts.plot(counts, accuracy, marker="o")
    over_counts.set(xlabel=labels[0], ylabel="test accuracy / %")
    over_counts.xaxis.set_major_locator(MaxNLocator(integer=True))
    over_amounts.plot(amounts, accuracy, marker="o")
    over_amounts.set(xlabel=labels[1])
    for axes in (over_counts, over_amounts):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    return True
