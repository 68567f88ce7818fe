"""The figure that a run leaves in its directory. matplotlib is an extra: without it there is none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from gradbus.commands.report import style
from gradbus.commands.report.shown_metrics import Evaluated
from gradbus.runtime.plain_text import plain_line

if TYPE_CHECKING:
    from gradbus.actors.data_parallel.report import EpochReport
    from gradbus.actors.federated.controller.report import RoundReport


def draw_rounds(folder: Path, reports: Sequence[RoundReport], *, title: str) -> bool:
    """Return how good the model was over rounds, and over the bytes that were sent until then. False: nothing drawn."""
    sent = list(accumulate((report.bytes_up + report.bytes_down) / 1e6 for report in reports))
    points = [(report.round_id, megabytes, report) for report, megabytes in zip(reports, sent, strict=True)]
    return _draw(folder, points, title=title, labels=("round", "sent, up and down / MB"))


def draw_epochs(folder: Path, reports: Sequence[EpochReport], *, title: str) -> bool:
    """Draw the same over epochs, and over the time they took. False: nothing drawn."""
    spent = list(accumulate(report.seconds for report in reports))
    points = [(report.epoch + 1, seconds, report) for report, seconds in zip(reports, spent, strict=True)]
    return _draw(folder, points, title=title, labels=("epoch", "time / s"))


def _draw(folder: Path, points: Sequence[tuple[int, float, Evaluated]], *, title: str, labels: tuple[str, str]) -> bool:
    """The accuracy as ``accuracy.png``; of a task without one its first metric, as ``metric.png``."""
    known = [(x, amount, 100 * r.accuracy) for x, amount, r in points if r.accuracy is not None]
    name, y, unit = "accuracy.png", "test accuracy", "%"
    if not known and (metric := next((key for _, _, r in points for key in r.metrics), None)):
        name, y, unit = "metric.png", style.plain(plain_line(metric)), ""
        known = [(x, amount, r.metrics[metric]) for x, amount, r in points if metric in r.metrics]
    if not known or not style.have_matplotlib():
        return False
    counts, amounts, values = zip(*known, strict=True)
    with style.drawing():
        figure, (over_counts, over_amounts) = style.new_figure(1, 2, sharey=True)
        look = style.nth_look(0, title)
        over_counts.plot(counts, values, color=look.color, marker=look.marker)
        over_amounts.plot(amounts, values, color=look.color, marker=look.marker)
        style.label(over_counts, x=labels[0], y=y, y_unit=unit)
        over_amounts.set_xlabel(labels[1])
        style.whole_numbers(over_counts.xaxis)
        figure.suptitle(title)
        style.save(figure, folder / name)
    return True
