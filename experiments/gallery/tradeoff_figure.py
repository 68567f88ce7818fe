"""Accuracy against what was sent for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from gradbus.experiments.gallery.canvas import caption, lines_with_range, need, quick_note, seeds_note
from gradbus.experiments.gallery.plan import CODECS, Scale
from gradbus.experiments.gallery.tables import RoundRow
from gradbus.experiments.report import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = (("codecs", "equal shares (IID)"), ("skewed", "unequal shares (Dirichlet 0.5)"))


def draw_tradeoff(rounds: Sequence[RoundRow], scale: Scale) -> Figure:
    """Accuracy over the bytes sent so far, both ways, all clients together."""
    figure, panels = style.new_figure(1, 2, height_in=4.4, sharey=True, sharex=True)
    notes = []
    for axes, (group, title) in zip(panels, _PANELS, strict=True):
        of_group = [row for row in rounds if row.group == group]
        need(of_group, title)
        notes.append(f"{title[0].upper()}{title[1:]}: {seeds_note(of_group, 'codec')}")
        for codec in CODECS:
            look = style.look_of(codec)
            curves = [
                list(_curve([row for row in of_group if (row.codec, row.seed) == (codec, seed)]))
                for seed in sorted({row.seed for row in of_group if row.codec == codec})
            ]
            lines_with_range(axes, curves, color=look.color, marker=look.marker, label=look.label)
        axes.set_xscale("log")
        axes.set_title(title)
        style.label(axes, x="sent, up and down", x_unit="MB", y="test accuracy", y_unit="%")
    panels[1].set_ylabel("")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(CODECS))
    caption(
        figure, quick_note(scale),
        f"MNIST, CNN, 2 clients, {scale.rounds} rounds of {scale.samples:,} samples per client; the codec in both "
        f"directions. {'. '.join(notes)}.",
    )  # fmt: skip
    return figure


def _curve(rows: Sequence[RoundRow]) -> Iterator[tuple[float, float]]:
    """(MB so far, accuracy in percent) after each round that was evaluated."""
    ordered = sorted(rows, key=lambda row: row.round_id)
    sent = accumulate((row.bytes_up + row.bytes_down) / 1e6 for row in ordered)
    for row, megabytes in zip(ordered, sent, strict=True):
        if row.accuracy is not None:
            yield megabytes, 100 * row.accuracy
