"""Collectives through ``torch.distributed`` and on a ``Group``, against gloo in the same processes, by turns.

``make bench-collectives`` or ``python -m gradbus.experiments.bench.collectives`` compares with limits; the exit code is
1 if a figure falls short. Real processes of one torch thread each on this machine, both backends in the same processes;
a figure is the median of whole repeats. --profile shows where the time of one cell goes instead.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradbus.experiments.bench import limits
from gradbus.experiments.bench.call_profile import print_profile
from gradbus.experiments.bench.cells import Cells, time_cells
from gradbus.experiments.bench.ddp_step import step_rows
from gradbus.experiments.bench.limits import Part, Row, Taken, at_least, at_most, failed, shown
from gradbus.experiments.bench.multicast import multicast_rows
from gradbus.experiments.bench.processes import TRANSPORTS, BenchRank, ProcessFailed, Transport, run_ranks
from gradbus.experiments.bench.results import Effort, Measurement, measurement
from gradbus.experiments.bench.timing import (
    KIB,
    MIB,
    memory_bytes,
    ratio_note,
    ratios_of,
    reset_peak,
    size_text,
    slowest_of,
)

SIZES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 64 * MIB)
REPEATS = 15  # of 0.12 s each: with 7 of them the median of the ratios moved by 15 % from run to run
FEW_REPEATS = 7  # of what takes longer
GB = 10**9
_MAX_SEALED = 1.05  # of the time without encryption, where data goes through shared memory
_CHECKED_AT_ONCE = 1 << 20


# In the suite


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivesPlan:
    """The measurements of the suite, in worlds of some ranks.

    Attributes:
        launches: of each world: from start to start the ranks lie otherwise in memory and on cores.
        repeats: blocks of each backend in one launch.
    """

    sizes: Sequence[int]
    launches: int
    repeats: int
    worlds: Sequence[tuple[int, Transport, Sequence[str]]]


_BOTH = ("all_reduce", "all_gather")
PLANS: dict[Effort, CollectivesPlan] = {
    "tiny": CollectivesPlan(sizes=(4 * KIB,), launches=1, repeats=2, worlds=((2, "dds-only", ("all_reduce",)),)),
    "quick": CollectivesPlan(
        sizes=(4 * KIB, MIB, 4 * MIB), launches=3, repeats=2,
        worlds=((2, "one-host", ("all_reduce",)), (2, "dds-only", _BOTH), (4, "one-host", ("all_reduce",))),
    ),
    "full": CollectivesPlan(
        sizes=(*SIZES, 100 * MIB), launches=3, repeats=3,
        worlds=tuple((ranks, transport, _BOTH) for ranks in (2, 4) for transport in TRANSPORTS),
    ),
}  # fmt: skip


def measure(effort: Effort) -> list[Measurement]:
    """Every cell of the plan, through ``torch.distributed`` and on a Group."""
    plan = PLANS[effort]
    taken: dict[str, tuple[list[float], list[float]]] = {}
    for _ in range(plan.launches):
        for world, transport, collectives in plan.worlds:
            spec = Cells(collectives, plan.sizes, plan.repeats)
            found = run_ranks(time_cells, world, spec, transport=transport, timeout_s=400.0)
            for cell in zip(*(of_rank["cells"] for of_rank in found), strict=True):
                name = _name(cell[0], transport, world)
                through_torch, on_group = slowest_of(cell), slowest_of([of_rank["on_group"] for of_rank in cell])
                for title, mine, gloo in (
                    (name, through_torch["ours"], through_torch["gloo"]),
                    (f"{name}, on a Group", on_group["Group"], on_group["gloo"]),
                ):
                    samples = taken.setdefault(title, ([], []))
                    samples[0].extend(1e3 * one for one in mine)
                    samples[1].extend(1e3 * one for one in gloo)
    return [measurement(name, "ms", mine, against=("gloo", gloo)) for name, (mine, gloo) in taken.items()]


def _name(cell: Mapping[str, Any], transport: Transport, world: int) -> str:
    return f"{cell['collective']} {size_text(cell['bytes'])}, {TRANSPORTS[transport]}, world {world}"


# Beside limits


class Setup(NamedTuple):
    """Processes of their own. ``limits``: for each collective the most of ours/gloo, for each of ``SIZES``."""

    transport: Transport
    world: int
    limits: dict[str, tuple[float, ...]]


SETUPS = (
    Setup("one-host", 2, {"all_reduce": (0.6, 0.5, 0.5, 0.4, 0.5)}),
    Setup("dds-only", 2, {"all_reduce": (0.8, 0.9, 1.0, 1.1, 1.2), "all_gather": (0.9, 1.0, 1.1, 0.9, 0.6)}),
    Setup("one-host", 4, {"all_reduce": (0.4, 0.4, 0.8, 0.7, 0.8)}),
)


def cell_rows(setups: Sequence[Setup] = SETUPS, *, sizes: Sequence[int] = SIZES, repeats: int = REPEATS) -> Taken:
    """Measure set-ups.

    Returns:
        For each set-up a row on whether there was shared memory; for each cell a row for its time, one for what
        encryption costs in it, and one for the same on a Group.
    """
    rows: list[Row] = []
    taken: dict[str, Any] = {}
    for setup in setups:
        where = f"{TRANSPORTS[setup.transport]}, world {setup.world}"
        spec = Cells(list(setup.limits), list(sizes), repeats)
        try:
            found = run_ranks(time_cells, setup.world, spec, transport=setup.transport, timeout_s=600.0)
        except ProcessFailed as error:
            rows.append(failed(where, error))
            continue
        taken[where] = found
        counts = [len(of_rank["segments"]) for of_rank in found]
        name = f"shared-memory segments in use, {where}"
        if setup.transport == "dds-only":
            rows.append(Row(name, "none", max(counts), "", not any(counts)))
        else:
            rows.append(at_least(name, min(counts), 1, ""))
        for cell in zip(*(of_rank["cells"] for of_rank in found), strict=True):
            rows += _rows_of(cell, setup)
    return rows, taken


def _rows_of(cell: Sequence[dict[str, Any]], setup: Setup) -> list[Row]:
    size, collective = cell[0]["bytes"], cell[0]["collective"]
    through_memory = setup.transport == "one-host"
    compared = "ours" if through_memory else "none"  # over the network gloo does not encrypt either
    ratios, ms = ratios_of(cell)
    time_row = (_name(cell[0], setup.transport, setup.world), statistics.median(ratios[compared]))
    note = ratio_note(ratios, ms, compared, "gloo")
    row = shown(*time_row, "x gloo", note)
    if size in SIZES:
        row = at_most(*time_row, setup.limits[collective][SIZES.index(size)], "x gloo", note)
    ratios, ms = ratios_of(cell, base="none")
    sealed = ("  the same, sealed as by default", statistics.median(ratios["ours"]))
    note = ratio_note(ratios, ms, "ours", "none")
    seals = at_most(*sealed, _MAX_SEALED, "x none", note) if through_memory else shown(*sealed, "x none", note)
    ratios, ms = ratios_of([of_rank["on_group"] for of_rank in cell])
    note = ratio_note(ratios, ms, "Group", "gloo")
    return [row, seals, shown("  the same on Group, no torch", statistics.median(ratios["Group"]), "x gloo", note)]


def reduce_big(place: BenchRank) -> dict[str, Any]:
    """The role of a rank: one collective on a large tensor, and the memory of the process meanwhile. Spec: its bytes.

    Raises:
        RuntimeError: the result is wrong.
    """
    place.start("dds")
    small = torch.zeros(MIB // 4)
    for _ in range(3):
        dist.all_reduce(small)
    dist.barrier()
    reset_peak()
    baseline = memory_bytes("VmRSS")
    elements = place.spec // 4
    tensor = torch.arange(elements, dtype=torch.float32).mul_(1 + place.rank)
    dist.barrier()
    began_s = time.perf_counter()
    dist.all_reduce(tensor)
    took_s = time.perf_counter() - began_s
    peak = memory_bytes("VmHWM")
    for start in range(0, elements, _CHECKED_AT_ONCE):
        one = torch.arange(start, min(elements, start + _CHECKED_AT_ONCE), dtype=torch.float32)
        expected = one.clone()
        for rank in range(1, place.world):
            expected += one * (1 + rank)
        if not torch.equal(tensor[start : start + len(one)], expected):
            raise RuntimeError(f"all_reduce of {elements} elements: wrong from {start} on")
    dist.destroy_process_group()
    return {"baseline_bytes": baseline, "peak_bytes": peak, "took_s": took_s}


def big_rows(transports: Iterable[Transport] = TRANSPORTS, *, size: int = GB) -> Taken:
    """Peak memory of one large all_reduce of two ranks: a row for each transport."""
    rows: list[Row] = []
    taken: dict[str, Any] = {}
    for transport in transports:
        name = f"peak memory, all_reduce of {size / GB:g} GB, {TRANSPORTS[transport]}, world 2"
        try:
            found = run_ranks(reduce_big, 2, size, transport=transport)
        except ProcessFailed as error:
            rows.append(failed(name, error))
            continue
        taken[name] = found
        above = max(of_rank["peak_bytes"] - of_rank["baseline_bytes"] for of_rank in found)
        took_s = max(of_rank["took_s"] for of_rank in found)
        note = f"VmHWM above VmRSS before the tensor was made, tensor included, worst rank; first call {took_s:.2f} s"
        rows.append(at_most(name, above / size, 3, "tensors", note))
    return rows, taken


# The command


PARTS = {
    "collectives": "all_reduce and all_gather, worlds 2 and 4: 3 min",
    "multicast": "what goes to all ranks, with multicast and without: 2 min",
    "ddp": "a step of DistributedDataParallel: 3.5 min",
    "big": "memory for a tensor of 1 GB: 30 s",
}


def parts(chosen: argparse.Namespace) -> dict[str, Part]:
    """All parts, with the chosen options."""
    transports: Sequence[Transport] = (chosen.transport,) if chosen.transport else tuple(TRANSPORTS)
    repeats, few = chosen.repeats or REPEATS, chosen.repeats or FEW_REPEATS
    worlds = chosen.world and (chosen.world,)
    measures: dict[str, Callable[[], Taken]] = {
        "collectives": partial(cell_rows, _setups(chosen), sizes=chosen.sizes or SIZES, repeats=repeats),
        "multicast": partial(multicast_rows, worlds, sizes=chosen.sizes, repeats=few),
        # Blocks of two steps. The two differ by a hundredth, and repeats scatter by two of them.
        "ddp": partial(step_rows, transports, repeats=6 * few + 1),
        "big": partial(big_rows, transports),
    }
    return {name: Part(measures[name], about) for name, about in PARTS.items()}


def size_of(text: str) -> int:
    """The bytes in "64KiB". Raises ArgumentTypeError: it is no size, or not of whole float32."""
    found = re.fullmatch(r"(\d+) *(KiB|MiB|B?)", text)
    size = int(found[1]) * {"KiB": KIB, "MiB": MIB}.get(found[2], 1) if found else 0
    if size < 4 or size % 4:
        raise argparse.ArgumentTypeError(f"a size is a multiple of 4 bytes, such as 64KiB, got {text!r}")
    return size


def _setups(chosen: argparse.Namespace) -> list[Setup]:
    ranks, transport = chosen.world, chosen.transport
    return [it for it in SETUPS if ranks in (None, it.world) and transport in (None, it.transport)]


def main(arguments: list[str] | None = None) -> int:
    """Measure the parts that are asked for, all by default, and compare them with the limits; or profile."""
    parser = limits.parser_of(__doc__, "runs/bench-collectives.json", PARTS)
    few = f"whole repeats, for medians; by default {REPEATS}, or {FEW_REPEATS} of what takes long"
    parser.add_argument("--repeats", type=int, help=few)
    parser.add_argument("--sizes", nargs="+", type=size_of, help="of tensors, such as 4KiB 1MiB")
    parser.add_argument("--world", type=int, help="only set-ups with so many ranks; with --profile any number")
    only = "only this; one-host: what the backend picks by itself"
    parser.add_argument("--transport", choices=list(TRANSPORTS), help=only)
    parser.add_argument("--profile", action="store_true", help="where the time goes, for each of --sizes")
    parser.add_argument("--collective", choices=_BOTH, default="all_reduce", help="to profile")
    parser.add_argument("--seconds", type=float, default=1.0, help="of calls to profile")
    parser.add_argument("--ranks", nargs="+", type=int, default=[0], help="whose profiles are printed")
    chosen = parser.parse_args(arguments)
    if chosen.profile:
        return _profile(chosen, None if chosen.out == parser.get_default("out") else chosen.out)
    names = chosen.part or list(PARTS)
    if "collectives" in names and not _setups(chosen):
        parser.error(f"there are no limits for {chosen.world or 'any'} ranks, {chosen.transport or 'any transport'}")
    return limits.main("torch.distributed, ours against gloo: asked and measured", names, parts(chosen), chosen.out)


def _profile(chosen: argparse.Namespace, out: Path | None) -> int:
    transport: Transport = chosen.transport or "one-host"
    world = chosen.world or 2
    found = {
        size: print_profile(chosen.collective, size, transport, world, chosen.seconds, chosen.ranks)
        for size in chosen.sizes or [4 * KIB]
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
