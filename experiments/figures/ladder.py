"""The figure of the ladder: star, ring, compression and overlap on links of 200 Mbit/s, measured and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradbus.commands.report import style
from gradbus.experiments.bench.rungs import link_share
from gradbus.experiments.figures import canvas
from gradbus.experiments.figures.plan import RUNGS, Scale
from gradbus.experiments.figures.tables import LadderRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = {"star": "star", "ring": "ring", "compression": "ByteGrad", "overlap": "ByteGrad,\noverlap"}
_WIDTH = 0.38


def draw_ladder(rows: Sequence[LadderRow], scale: Scale) -> Figure:
    """Return what a step takes, measured beside simulated, and the time until 97 % of the test set are right."""
    figure, (steps, target) = style.new_figure(1, 2, height_in=4.4)
    found = [canvas.pick(rows, "ladder", rung=rung)[0] for rung in RUNGS]
    unit = style.time_unit(max(row.step_s for row in found))
    for at, row in enumerate(found):
        left, right = at - _WIDTH / 2, at + _WIDTH / 2
        own, whole, simulated = (it / unit.factor for it in (row.compute_s, row.step_s, row.simulated_step_s))
        names = ("computing", "waiting for the exchange", "simulated") if at == 0 else ("", "", "")
        steps.bar([left], [own], _WIDTH, color=style.GREY, label=names[0])
        steps.bar([left], [max(0.0, whole - own)], _WIDTH, bottom=[own], color=style.ORANGE, label=names[1])
        steps.bar([right], [simulated], _WIDTH, color=style.BLUE, alpha=0.6, label=names[2])
        canvas.number_above(steps, left, whole, f"{1 - own / whole:.0%}", points=2)
        if row.to_target_s is not None:
            target.bar([at], [row.to_target_s], 0.6, color=style.ORANGE)
            canvas.number_above(target, at, row.to_target_s, f"{row.to_target_s:.0f} s", points=2)
        else:
            canvas.number_above(target, at, 0.0, "not\nreached", points=2)
    for axes in (steps, target):
        canvas.name_bars(axes, [_NAMES[rung] for rung in RUNGS], fontsize=9.5)
        axes.margins(y=0.12)
    style.label(steps, x="exchange of gradients", y="step", y_unit=unit.name)
    style.label(target, x="exchange of gradients", y="time to 97 %", y_unit="s")
    steps.legend(fontsize=9)
    called = [_NAMES[row.rung].replace("\n", " ") for row in found]
    samples = ", ".join(f"{name} {row.samples_s:.0f}" for name, row in zip(called, found, strict=True))
    used = ", ".join(
        f"{name} {link_share(row.bytes_out, row.step_s):.0%}" for name, row in zip(called, found, strict=True)
    )
    return canvas.finish(
        figure,
        scale,
        f"{scale.data_name}, CNN, 4 ranks, batches of 64 each, links of 200 Mbit/s between network namespaces of one "
        "machine. "
        "Above the bars: the share of a step that is waiting for the exchange. Time to 97 %: steps until so much of "
        f"the test set is right at the end of an epoch of {scale.ladder_samples:,} samples, times the step. "
        f"Samples a second: {samples}. "
        f"Utilisation of the link of the rank that sends most: {used}.",
        timed=found,
    )
