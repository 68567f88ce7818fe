"""The metrics that the console and the figures have room for, and the reports that carry them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gradbus.actors.federated.controller.report import RoundReport

MAX_SHOWN_METRICS = 3  # beside the accuracy; the report and the files have them all


class Evaluated(Protocol):
    """Holds what the reports of rounds and epochs have in common."""

    @property
    def accuracy(self) -> float | None:
        """Share of right answers."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Other numbers by name."""


def client_metric_names(reports: Sequence[RoundReport]) -> list[str]:
    """The first metrics of evaluations by clients."""
    names = dict.fromkeys(name for report in reports for name in report.by_clients.metrics)
    return list(names)[:MAX_SHOWN_METRICS]
