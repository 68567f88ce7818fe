"""Figures of a run. matplotlib is an extra: without it there are none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradbus.actors.report import RoundReport


def draw_accuracy(path: Path, reports: Sequence[RoundReport], *, title: str) -> bool:
    """Accuracy over rounds, and over the bytes that were sent until then. False: nothing drawn."""
    sent = list(accumulate((report.bytes_up + report.bytes_down) / 1e6 for report in reports))
    points = [(r.round_id, mb, 100 * r.accuracy) for r, mb in zip(reports, sent, strict=True) if r.accuracy is not None]
    if not points:
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    rounds, megabytes, accuracy = zip(*points, strict=True)
    figure = Figure(figsize=(9, 3.6), layout="constrained")  # no pyplot: it keeps global state, and looks for a screen
    FigureCanvasAgg(figure)
    over_rounds, over_bytes = figure.subplots(1, 2, sharey=True)
    over_rounds.plot(rounds, accuracy, marker="o")
    over_rounds.set(xlabel="round", ylabel="test accuracy / %")
    over_rounds.xaxis.set_major_locator(MaxNLocator(integer=True))
    over_bytes.plot(megabytes, accuracy, marker="o")
    over_bytes.set(xlabel="sent, up and down / MB")
    for axes in (over_rounds, over_bytes):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    return True
