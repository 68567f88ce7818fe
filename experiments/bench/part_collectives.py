"""Collectives through ``torch.distributed`` and on a ``Group``, against gloo in the same processes, by turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradbus.experiments.bench.results import Effort, Figure, figure
from gradbus.experiments.bench_collectives_ranks import TRANSPORTS, Transport, run_ranks
from gradbus.experiments.bench_collectives_timing import KIB, MIB, size_text, slowest_of, time_cells


@dataclass(frozen=True, slots=True)
class World:
    """Processes of their own, ``launches`` times: from start to start the ranks lie otherwise in memory and on cores,
    which one start would not show."""

    ranks: int
    transport: Transport
    collectives: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """``repeats``: blocks of each backend in one launch."""

    sizes: Sequence[int]
    launches: int
    repeats: int
    worlds: Sequence[World]


_BOTH = ("all_reduce", "all_gather")
PLANS: dict[Effort, Plan] = {
    "tiny": Plan(sizes=(4 * KIB,), launches=1, repeats=2, worlds=(World(2, "dds-only", ("all_reduce",)),)),
    "quick": Plan(
        sizes=(4 * KIB, MIB, 4 * MIB),
        launches=3,
        repeats=2,
        worlds=(
            World(2, "one-host", ("all_reduce",)),
            World(2, "dds-only", _BOTH),
            World(4, "one-host", ("all_reduce",)),
        ),
    ),
    "full": Plan(
        sizes=(4 * KIB, 64 * KIB, MIB, 4 * MIB, 64 * MIB, 100 * MIB),
        launches=3,
        repeats=3,
        worlds=tuple(World(ranks, transport, _BOTH) for ranks in (2, 4) for transport in TRANSPORTS),
    ),
}


def measure(effort: Effort) -> list[Figure]:
    """Every cell of the plan."""
    plan = PLANS[effort]
    taken: dict[str, tuple[list[float], list[float]]] = {}
    for _ in range(plan.launches):
        for world in plan.worlds:
            spec = {"collectives": list(world.collectives), "sizes": list(plan.sizes), "repeats": plan.repeats}
            found = run_ranks(time_cells, world.ranks, world.transport, spec, timeout_s=400.0)
            where = f"{TRANSPORTS[world.transport]}, world {world.ranks}"
            for cell in zip(*(of_rank["cells"] for of_rank in found), strict=True):
                name = f"{cell[0]['collective']} {size_text(cell[0]['bytes'])}, {where}"
                through_torch = slowest_of(cell)
                on_group = slowest_of([of_rank["on_group"] for of_rank in cell])
                _add(taken, name, through_torch["ours"], through_torch["gloo"])
                _add(taken, f"{name}, on a Group", on_group["Group"], on_group["gloo"])
    return [
        figure(name, "ms", (1e3 * one for one in ours), against=("gloo", (1e3 * one for one in gloo)))
        for name, (ours, gloo) in taken.items()
    ]


def _add(
    taken: dict[str, tuple[list[float], list[float]]], name: str, ours: Sequence[float], gloo: Sequence[float]
) -> None:
    mine, theirs = taken.setdefault(name, ([], []))
    mine += ours
    theirs += gloo
