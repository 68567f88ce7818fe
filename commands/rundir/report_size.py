"""Bounds on what one report of a run may hold, where somebody else may have written it, and what reports weigh.

A line of a file is bounded in bytes, but three bytes of JSON may become a hundred in memory, and thousands of reports
are kept. So a line with more than any run of ours writes is no report, and whoever keeps many adds up their weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.runtime.json_text import count_values

MAX_VALUES = 2_000_000  # of JSON in a line, 200 MB at most: 10,000 clients with timelines have 200,000
MAX_CLIENTS = 100_000  # in a list of a report: as many as a run can have
MAX_NAMES = (
    1000  # in a mapping: a message has room for 32 metrics of a client, and a Controller's own task may have more
)
MAX_TEXT_CHARS = 1000  # of a name, an outcome, or a reason
_SMALL_CHARS = 8192  # a line no longer than this holds little, whatever is in it
_TIMELINE, _NAME = 25, 4  # ids of clients that weigh as much as a timeline, 1 kB, and as a metric

Report: TypeAlias = RoundReport | EpochReport


def check_line(text: str) -> None:
    """Raise ValueError if a line has too many values to be parsed."""
    if len(text) > _SMALL_CHARS and (found := count_values(text)) > MAX_VALUES:
        raise ValueError(f"it has {found:,} values, at most {MAX_VALUES:,} are read")


def check_report(report: Report, text: str) -> None:
    """Raise ValueError if the report in a line has more clients, names or text than any run of ours writes."""
    if len(text) <= _SMALL_CHARS:
        return
    for names in _mappings(report):
        if len(names) > MAX_NAMES:
            raise ValueError(f"it has {len(names):,} names of metrics or reasons, at most {MAX_NAMES:,} are read")
        _check_texts(names)
    if isinstance(report, RoundReport):
        clients = [len(report.clients), len(report.strikes), len(report.timeline), *map(len, report.marks.values())]
        if max(clients) > MAX_CLIENTS:
            raise ValueError(f"it has a list of {max(clients):,} clients, at most {MAX_CLIENTS:,} are read")
        _check_texts((report.outcome, *(text for one in report.strikes for text in (one.reason, one.detail))))


def weight_of(report: Report) -> int:
    """Return how much memory a report takes, in ids of clients: each is some 40 bytes."""
    weight = _NAME * names_in(report)
    if isinstance(report, RoundReport):
        weight += len(report.clients) + _TIMELINE * (len(report.timeline) + len(report.strikes))
        for clients in report.marks.values():
            weight += len(clients)
    return weight


def names_in(report: Report) -> int:
    """Return how many names of metrics and reasons a report has."""
    return sum(map(len, _mappings(report)))


def _mappings(report: Report) -> tuple[Mapping[str, object], ...]:
    if isinstance(report, RoundReport):
        found = report.by_clients
        return (
            report.metrics,
            report.train_metrics,
            report.dropped,
            report.marks,
            found.metrics,
            found.missing,
        )
    return report.metrics, report.train_metrics


def _check_texts(texts: Iterable[str]) -> None:
    for text in texts:
        if len(text) > MAX_TEXT_CHARS:
            raise ValueError(f"it has a text of {len(text):,} characters, at most {MAX_TEXT_CHARS:,} are read")
