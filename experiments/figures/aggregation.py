"""Figures of in-network aggregation, from the simulator and from closed forms: scaling, memory, jobs, loss, cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gradbus.commands.report import style
from gradbus.commands.report.style import Look
from gradbus.commands.simulate.closed_forms import ring_factor, speed_up
from gradbus.experiments.figures import canvas
from gradbus.experiments.figures.plan import Scale
from gradbus.experiments.figures.tables import DeploymentRow, SimulationRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAYS: dict[str, Look] = {
    "ring": Look(style.BLUE, "o", "Ring"),
    "ps-1": Look(style.BLACK, "X", "PS-1"),
    "ps-n": Look(style.SKY, "P", "PS-N"),
    "hina": Look(style.GREEN, "^", "HINA"),
    "mtina": Look(style.ORANGE, "s", "MTINA"),
    "cina": Look(style.VERMILLION, "D", "CINA"),
    "switchml": Look(style.ORANGE, "s", "SwitchML"),
    "ra-ina": Look(style.PURPLE, "v", "RA-INA"),
    "atp": Look(style.SKY, "P", "ATP"),
    "esa": Look(style.GREY, "X", "ESA"),
    "ina": Look(style.GREEN, "^", "one switch"),
    "ring-packets": Look(style.BLUE, "o", "ring of packets"),
}
SCALING = ("ring", "ps-1", "ps-n", "hina", "mtina", "cina")
SHARED = ("ring", "switchml", "ra-ina", "atp", "esa")
LOSSY = ("ina", "ra-ina", "ring-packets", "ps-1")
_DASHED = {"mtina": (0, (4, 4))}  # where it lies on the line of HINA both are seen
_Point = tuple[float, float]


def aggregator_rate_for(world: int, rate_bytes_s: float, *, aggregators: int = 1) -> float:
    """The rate, in and out, that an aggregator needs to be as fast as a ring: ``N B / (A c)``, but never less than
    ``B / c``.

    It takes ``N K / A`` in and sends as much, which is to be done in the ``c K / B`` that a ring takes.
    """
    return max(world / aggregators, 1.0) * rate_bytes_s / ring_factor(world)


def draw_scaling(rows: Sequence[SimulationRow], scale: Scale, *, trace: str, model: str) -> Figure:
    """Step, samples a second, efficiency and speed-up over a ring for 8 to 1,024 ranks."""
    figure, panels = style.new_figure(2, 2, height_in=6.0, sharex=True)
    found = {way: canvas.pick(rows, group="scaling", model=trace, way=way) for way in SCALING}
    ring_s = {row.world: row.formula_step_s or 0.0 for row in found["ring"]}
    unit = style.time_unit(max(ring_s.values()))
    views: tuple[tuple[Axes, str, str, Callable[[SimulationRow, float], float]], ...] = (
        (panels[0], "step", unit.name, lambda _, step_s: step_s / unit.factor),
        (panels[1], "samples a second", "", lambda row, step_s: (row.samples_s or 0.0) * _known_s(row) / step_s),
        (panels[2], "efficiency", "%", lambda row, step_s: 100 * row.compute_s / step_s),
        (panels[3], "speed-up over a ring", "", lambda row, step_s: ring_s[row.world] / step_s),
    )
    for axes, name, unit_name, value in views:
        for way in SCALING:
            lines = [(row.world, value(row, row.formula_step_s)) for row in found[way] if row.formula_step_s]
            marks = [(row.world, value(row, row.step_s)) for row in found[way] if row.step_s]
            _line(axes, lines, WAYS[way]._replace(marker=""), linestyle=_DASHED.get(way, "-"))
            _line(axes, marks, WAYS[way], linestyle="", markersize=4.5, fillstyle="none")
        _powers_of_two(axes, sorted(ring_s))
        style.label(axes, x="ranks", y=name, y_unit=unit_name)
    for axes in panels[:2]:
        axes.set_yscale("log")
    for axes in panels[2:]:
        style.from_zero(axes)
    _legend(figure, SCALING)
    first = found["ring"][0]
    return canvas.finish(
        figure,
        scale,
        f"{model}, batches of 8, {first.compute_s * 1e3:.0f} ms of computing (a core's times by 0.01), 10 Gbit/s, "
        "5 µs to a switch, 64 hosts at a leaf, 128 packets of a gradient. Buckets go during the backward pass. "
        "Lines: closed forms; marks: simulated.",
    )


draw_resnet50 = partial(draw_scaling, trace="resnet50", model="ResNet-50")
draw_vgg19 = partial(draw_scaling, trace="vgg19", model="VGG19")


def draw_memory(rows: Sequence[SimulationRow], scale: Scale) -> Figure:
    """Completion time of jobs, and where their blocks are summed, against the memory of the switch."""
    figure, (times, shares) = style.new_figure(1, 2, height_in=4.2)
    found = {way: canvas.pick(rows, group="memory", way=way) for way in SHARED}
    ring_s = _known_s(found["ring"][0])
    per_job = [(row.memory or 0.0) / row.jobs for row in found["switchml"]]
    for way in SHARED:
        if way == "ring":
            times.axhline(1.0, color=WAYS[way].color, label=WAYS[way].label)
            continue
        shown = [row for row in found[way] if row.memory is not None]
        _line(times, [(_share(row), _known_s(row) / ring_s) for row in shown], WAYS[way])
        formulas = [(_share(row), row.formula_step_s / ring_s) for row in shown if row.formula_step_s]
        _line(times, formulas, WAYS[way]._replace(marker="", label=""), linestyle=":")
        _line(shares, [(_share(row), 100 * (row.in_network_share or 0.0)) for row in shown], WAYS[way])
    for axes in (times, shares):
        axes.set_xscale("log", base=2)
        axes.set_xticks(per_job, [f"{one:g}" for one in per_job])
    style.label(times, x="memory of a job, m", y="completion time, ring = 1")
    style.label(shares, x="memory of a job, m", y="blocks summed by the switch", y_unit="%")
    style.from_zero(times)
    shares.set_ylim(0, 105)
    _legend(figure, SHARED)
    row = found["ring"][0]
    return canvas.finish(
        figure,
        scale,
        f"{found['switchml'][0].jobs} jobs of {row.world} ranks on one switch, 100 Gbit/s, r = "
        f"{_exchange_share(found['switchml'][0], row):.2f}. m: slots in multiples of those that keep the links of a "
        "job busy. Dotted: K / (B m) for fixed slots, (K / B) c / (1 + m (c - 1)) for RA-INA.",
    )


def draw_jobs(rows: Sequence[SimulationRow], scale: Scale) -> Figure:
    """Completion time and the share of slots that is taken, against the number of jobs on one switch."""
    figure, (times, use) = style.new_figure(1, 2, height_in=4.2)
    found = {way: canvas.pick(rows, group="jobs", way=way) for way in SHARED}
    ring_s = _known_s(found["ring"][0])
    counts = sorted({row.jobs for row in found["switchml"]})
    times.axhline(1.0, color=WAYS["ring"].color, label=WAYS["ring"].label)
    for way in SHARED[1:]:
        _line(times, [(row.jobs, _known_s(row) / ring_s) for row in found[way]], WAYS[way])
        if way != "switchml":  # its slots are a job's, whether they hold something or not
            _line(use, [(row.jobs, 100 * (row.slot_share or 0.0)) for row in found[way]], WAYS[way])
    for axes in (times, use):
        _powers_of_two(axes, counts)
    style.label(times, x="jobs on one switch", y="completion time, ring = 1")
    style.label(use, x="jobs on one switch", y="slots that are taken", y_unit="%")
    style.from_zero(times)
    use.set_ylim(0, 105)
    _legend(figure, SHARED)
    memory = found["switchml"][0].memory
    return canvas.finish(
        figure,
        scale,
        f"Jobs of {found['ring'][0].world} ranks on one switch with the slots that {memory:g} of them need, 100 "
        "Gbit/s. Slots that are taken: the mean over time. Fixed ones, SwitchML's, are a job's all of the time.",
    )


def draw_loss(rows: Sequence[SimulationRow], scale: Scale) -> Figure:
    """The time of an exchange against the share of packets that each link loses."""
    figure, (axes,) = style.new_figure(1, 1, height_in=4.0)
    found = {way: canvas.pick(rows, group="loss", way=way) for way in LOSSY}
    losses = sorted({row.loss for row in found["ina"]})
    unit = style.time_unit(min(_exchanges(found["ina"], losses[-1])))
    for way in LOSSY:
        values = [[one / unit.factor for one in _exchanges(found[way], loss)] for loss in losses]
        _line(axes, [(at, statistics.mean(some)) for at, some in enumerate(values)], WAYS[way])
        axes.fill_between(
            range(len(losses)), [*map(min, values)], [*map(max, values)], color=WAYS[way].color, alpha=0.18, linewidth=0
        )
    axes.set_yscale("log")
    axes.set_xticks(range(len(losses)), [f"{100 * loss:g}" for loss in losses])
    style.label(axes, x="packets that each link loses", x_unit="%", y="exchange", y_unit=unit.name)
    _legend(figure, LOSSY)
    seeds = len({row.seed for row in found["ina"]})
    return canvas.finish(
        figure,
        scale,
        f"{found['ina'][0].world} ranks, 8.4 MB in 1,024 packets of 8 KiB, 100 Gbit/s; at most 80 packets of a rank "
        f"are under way. Mean and range of {seeds} seeds; every sum is exact.",
    )


def draw_deployment(rows: Sequence[DeploymentRow], scale: Scale) -> Figure:
    """Switches that add, and memory in each of them, for so many hosts."""
    figure, (switches, memory) = style.new_figure(1, 2, height_in=3.9)
    found = {way: canvas.pick(rows, way=way) for way in ("hina", "mtina", "cina")}
    for way, some in found.items():
        look = WAYS[way]
        _line(switches, [(row.hosts, row.adding) for row in some], look, linestyle=_DASHED.get(way, "-"))
        held = [(row.hosts, row.slot_bytes / 1e6) for row in some if row.slot_bytes is not None]
        if held:
            _line(memory, held, look)
    for axes in (switches, memory):
        _powers_of_two(axes, sorted({row.hosts for row in found["hina"]}), every=2)
        axes.set_yscale("log")
    style.label(switches, x="hosts", y="switches that add")
    style.label(memory, x="hosts", y="slots of each switch", y_unit="MB")
    _legend(figure, tuple(found))
    return canvas.finish(
        figure,
        scale,
        f"Switches of {found['hina'][0].ports} ports at 100 Gbit/s, 2 µs a hop, packets of 1 KiB. HINA: a tree; MTINA: "
        "leaves and four trees above them; CINA: leaves alone add, other switches forward. Slots: rate of a link times "
        "the way to the last switch and back.",
    )


def draw_break_even(rows: Sequence[SimulationRow], scale: Scale) -> Figure:
    """Return how much an aggregator gains against r, and how fast its link has to be."""
    figure, (gain, rate) = style.new_figure(1, 2, height_in=4.2)
    shares = [10 ** (step / 20 - 1) for step in range(41)]
    ring = {row.world: row for row in canvas.pick(rows, group="scaling", model="resnet50", way="ring")}
    tree = {row.world: row for row in canvas.pick(rows, group="scaling", model="resnet50", way="hina")}
    worlds = (2, 4, 8, 16, 1024)
    for index, world in enumerate(worlds):
        look = style.nth_look(index, f"N = {world:,}")
        _line(gain, [(r, _gain(r, ring_factor(world))) for r in shares], look._replace(marker=""))
        measured = [row.exchange_s for row in (ring.get(world), tree.get(world)) if row and row.exchange_s]
        if len(measured) == 2:
            marks = [(r, _gain(r, measured[0] / measured[1])) for r in shares[::10]]
            _line(gain, marks, look._replace(label=""), linestyle="", markersize=4.5, fillstyle="none")
    gain.set_xscale("log")
    style.label(gain, x="r: sending once / computing", y="gain over a ring", y_unit="%")
    gain.legend(fontsize=9)
    counts = [2**power for power in range(1, 11)]
    for index, aggregators in enumerate((1, 2, 4, 16)):
        needed = [(n, aggregator_rate_for(n, 1.0, aggregators=aggregators)) for n in counts]
        label = "1 aggregator" if aggregators == 1 else f"{aggregators} aggregators"
        _line(rate, needed, style.nth_look(index, label))
    _powers_of_two(rate, counts, every=3)
    rate.set_yscale("log")
    style.label(rate, x="ranks, N", y="rate of its link, a rank's = 1")
    rate.legend(fontsize=9)
    return canvas.finish(
        figure,
        scale,
        "Left: (1 + r c) / (1 + r) - 1 with c = 2 (N - 1) / N, without overlap; marks: with the exchanges of Ring and "
        "HINA as simulated for ResNet-50, in buckets. Right: from which rate on, in and out, aggregators of N ranks "
        "are as fast as a ring: N / (A c), but at least 1 / c.",
    )


# Parts


def _gain(exchange_share: float, factor: float) -> float:
    """In percent, of :func:`speed_up`."""
    return 100 * (speed_up(exchange_share, factor) - 1)


def _known_s(row: SimulationRow) -> float:
    return row.step_s or row.formula_step_s or 0.0


def _share(row: SimulationRow) -> float:
    """Return the share of a job, of the memory that it needs."""
    return (row.memory or 0.0) / row.jobs


def _exchange_share(row: SimulationRow, ring: SimulationRow) -> float:
    """r: sending a gradient once over computing."""
    once_s = (ring.formula_s or 0.0) / ring_factor(ring.world)
    return once_s / row.compute_s


def _exchanges(rows: Sequence[SimulationRow], loss: float) -> list[float]:
    return [row.exchange_s for row in canvas.pick(rows, loss=loss) if row.exchange_s]


def _line(axes: Axes, points: Iterable[_Point], look: Look, **more: object) -> None:
    found = list(points)
    axes.plot([x for x, _ in found], [y for _, y in found], **{**look.line, **more})


def _powers_of_two(axes: Axes, values: Sequence[int], *, every: int = 1) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(values[::every], [f"{value:,}" for value in values[::every]])
    axes.tick_params(axis="x", labelsize=9)
    axes.minorticks_off()


def _legend(figure: Figure, ways: Sequence[str]) -> None:
    """Over the whole figure: a line with its mark for each way."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            color=WAYS[way].color,
            marker=WAYS[way].marker,
            label=WAYS[way].label,
            linestyle=_DASHED.get(way, "-"),
        )
        for way in ways
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(ways), columnspacing=1.2, handletextpad=0.5)
