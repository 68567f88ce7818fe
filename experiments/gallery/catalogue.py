"""The figures: what each is called, what it shows, and which tables it is drawn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradbus.experiments.gallery import federated_figures, parallel_figures, tradeoff_figure
from gradbus.experiments.gallery.plan import Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Entry:
    """One figure.

    Attributes:
        name: of its files. title: of its section. table: that it is drawn from. groups: of runs that it needs.
        draw: takes the rows of that table. in_docs: whether docs/images has a copy; times belong to a machine, so that
            figures of times are drawn where they are looked at.
    """

    name: str
    title: str
    table: str
    groups: tuple[str, ...]
    draw: Callable[[Any, Scale], Figure]
    in_docs: bool = False


CATALOGUE: Mapping[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "parallel_bytes", "Data parallel: bytes of a step", "epochs", ("parallel",),
            parallel_figures.draw_bytes, in_docs=True,
        ),
        Entry(
            "parallel_accuracy", "Data parallel: accuracy over epochs", "epochs", ("parallel",),
            parallel_figures.draw_accuracy, in_docs=True,
        ),
        Entry(
            "parallel_wait", "Data parallel: communication time of a step", "ranks", ("parallel", "overlapped"),
            parallel_figures.draw_wait,
        ),
        Entry(
            "federated_bytes", "Federated: bytes of a round, up and down", "rounds", ("codecs", "old_bytes"),
            federated_figures.draw_bytes, in_docs=True,
        ),
        Entry(
            "federated_dds", "Federated: DDS time of each client", "updates", ("timing",),
            federated_figures.draw_dds,
        ),
        Entry(
            "federated_time", "Federated: where the time of a round goes", "rounds", ("timing",),
            federated_figures.draw_time,
        ),
        Entry(
            "federated_accuracy", "Federated: accuracy over rounds", "rounds", ("codecs",),
            federated_figures.draw_accuracy, in_docs=True,
        ),
        Entry(
            "tradeoff", "Federated: accuracy against bytes sent", "rounds", ("codecs", "skewed"),
            tradeoff_figure.draw_tradeoff, in_docs=True,
        ),
    )
}  # fmt: skip
