"""Parts of both reports about how good the models are: the accuracy, and the metrics of the task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradbus.experiments.amounts import number, percent
from gradbus.experiments.report.page import Column, Tile, column
from gradbus.experiments.run.live import MAX_SHOWN_METRICS, Evaluated
from gradbus.runtime.plain_text import plain_line


def quality_tiles(reports: Sequence[Evaluated]) -> list[Tile]:
    """The accuracy, unless the task has other metrics alone, and the first of these."""
    known = [report.accuracy for report in reports if report.accuracy is not None]
    metrics = next((report.metrics for report in reversed(reports) if report.metrics), {})
    shown = list(metrics.items())[:MAX_SHOWN_METRICS]
    tiles = [Tile(plain_line(name), number(value, 4), "on the test set") for name, value in shown]
    if known or not tiles:
        best = f"best {percent(max(known))}" if known else ""
        tiles.insert(0, Tile("test accuracy", percent(known[-1] if known else None), best))
    return tiles


def metric_columns(of_reports: Sequence[Mapping[str, float]], suffix: str = "") -> list[Column]:
    """A column for each metric that some report has."""
    names = dict.fromkeys(name for metrics in of_reports for name in metrics)
    return [
        column(f"{plain_line(name)}{suffix}", [metrics.get(name) for metrics in of_reports], digits=4) for name in names
    ]
