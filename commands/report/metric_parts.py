"""Parts of both reports about how good the models are: the accuracy, and the metrics of the task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gradbus.actors.federated.controller.report import RoundReport
from gradbus.commands.amounts import number, percent
from gradbus.commands.report.page import Column, Tile, column
from gradbus.commands.report.shown_metrics import MAX_SHOWN_METRICS, Evaluated
from gradbus.runtime.plain_text import plain_line

_MAX_COLUMNS = 32  # of metrics, in a table of rounds


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


def quality_name(reports: Sequence[Evaluated]) -> str:
    """By what these models are judged, as a title begins: the accuracy, unless the task has other metrics alone."""
    names = list(dict.fromkeys(name for report in reports for name in report.metrics))
    if not names or any(report.accuracy is not None for report in reports):
        return "Accuracy"
    return plain_line(names[0])


def newest_quality(reports: Sequence[Evaluated]) -> str:
    """Return how good the newest model is, in a cell: its accuracy, or the task's first metric by name."""
    known = [report.accuracy for report in reports if report.accuracy is not None]
    metrics = next((report.metrics for report in reversed(reports) if report.metrics), {})
    if known or not metrics:
        return percent(known[-1] if known else None)
    name, value = next(iter(metrics.items()))
    return f"{plain_line(name)} {number(value, 4)}"


def client_tiles(reports: Sequence[RoundReport]) -> list[Tile]:
    """The first metrics that clients have found on data of their own, with median and range."""
    newest = next((report.by_clients for report in reversed(reports) if report.by_clients.asked), None)
    shown = [] if newest is None else list(newest.metrics.items())[:MAX_SHOWN_METRICS]
    return [
        Tile(
            f"clients' {plain_line(name)}",
            number(one.mean, 4),
            f"median {number(one.median, 4)}, {number(one.min, 4)} to {number(one.max, 4)}",
        )
        for name, one in shown
    ]


def client_columns(reports: Sequence[RoundReport]) -> list[Column]:
    """A column of means for each metric that clients have found, and one of how many answered."""
    if not any(report.by_clients.asked for report in reports):
        return []
    of_all = [{name: one.mean for name, one in report.by_clients.metrics.items()} for report in reports]
    answered = [report.by_clients.answered if report.by_clients.asked else None for report in reports]
    return [*metric_columns(of_all, " of clients"), column("evaluated by", answered)]


def accuracy_columns(reports: Sequence[Evaluated]) -> list[Column]:
    """A column of the accuracy, unless the task has other metrics alone."""
    shares = [report.accuracy for report in reports]
    if set(shares) == {None} and any(report.metrics for report in reports):
        return []
    return [column("accuracy", shares, unit="%", factor=0.01, digits=2)]


def metric_columns(of_reports: Sequence[Mapping[str, float]], suffix: str = "") -> list[Column]:
    """A column for each metric that some report has; of very many, which clients may have made up, those of most."""
    names = [name for name, _ in Counter(name for metrics in of_reports for name in metrics).most_common(_MAX_COLUMNS)]
    return [
        column(f"{plain_line(name)}{suffix}", [metrics.get(name) for metrics in of_reports], digits=4) for name in names
    ]
