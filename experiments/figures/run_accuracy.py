"""The figure that a run leaves in its directory. matplotlib is an extra: without it there is none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from gradbus.experiments.report import style

if TYPE_CHECKING:
    from gradbus.actors.data_parallel.report import EpochReport
    from gradbus.actors.federated.report import RoundReport


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
    if not points or not style.have_matplotlib():
        return False
    counts, amounts, accuracy = zip(*points, strict=True)
    with style.drawing():
        figure, (over_counts, over_amounts) = style.new_figure(1, 2, sharey=True)
        look = style.nth_look(0, title)
        over_counts.plot(counts, accuracy, color=look.color, marker=look.marker)
        over_amounts.plot(amounts, accuracy, color=look.color, marker=look.marker)
        style.label(over_counts, x=labels[0], y="test accuracy", y_unit="%")
        over_amounts.set_xlabel(labels[1])
        style.whole_numbers(over_counts.xaxis)
        figure.suptitle(title)
        style.save(figure, path)
    return True
