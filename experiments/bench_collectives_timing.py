"""Collectives through ``torch.distributed``, ours and gloo's by turns in the same processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradbus.experiments.bench_children import ChildFailed
from gradbus.experiments.bench_collectives_leftovers import Holdings
from gradbus.experiments.bench_collectives_ranks import (
    TRANSPORTS,
    Place,
    Transport,
    failed,
    new_group,
    run_ranks,
    unsealed_group,
)
from gradbus.experiments.bench_rows import Row, at_least, at_most, shown
from gradbus.runtime.collectives.group import Group, join_group
from gradbus.torch import bus_thread

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 64 * MIB)
MAX_SEALED = 1.05  # of the time without sealing, where data goes through shared memory
REPEATS = 15  # of 0.12 s each: with 7 of them the median of the ratios moved by 15 % from run to run
FEW_REPEATS = 7  # of what takes longer
_BLOCK_S = 0.12
_MIN_CALLS, _MAX_CALLS = 3, 1000
_WARM_UP_CALLS = 5
_WARM_UP_S = 0.1


Block = Callable[[int], list[float]]  # makes so many calls; returns the seconds of each


class Setup(NamedTuple):
    """Processes of their own. ``limits``: for each collective what is asked, ours/gloo, for each of ``SIZES``."""

    transport: Transport
    world: int
    limits: dict[str, tuple[float, ...]]


SETUPS = (
    Setup("one-host", 2, {"all_reduce": (0.6, 0.5, 0.5, 0.4, 0.5)}),
    Setup("dds-only", 2, {"all_reduce": (0.8, 0.9, 1.0, 1.1, 1.2), "all_gather": (0.9, 1.0, 1.1, 0.9, 0.6)}),
    Setup("one-host", 4, {"all_reduce": (0.4, 0.4, 0.8, 0.7, 0.8)}),
)


class Cell:
    """One collective at one size, on one rank. ``size``: bytes of the rank's tensor."""

    def __init__(self, place: Place, collective: str, size: int) -> None:
        self.collective = collective
        self.size = size
        self._place = place
        self._tensor = torch.empty(size // 4)
        self._outputs = [torch.empty(size // 4) for _ in range(place.world)] if collective == "all_gather" else []

    def call(self, group: dist.ProcessGroup) -> Callable[[], Any]:
        """The call to be timed."""
        tensor, outputs = self._tensor, self._outputs
        if self.collective == "all_gather":
            return lambda: dist.all_gather(outputs, tensor, group=group)
        return lambda: dist.all_reduce(tensor, group=group)

    def check(self, groups: dict[str, dist.ProcessGroup]) -> None:
        """Compare both results with what must come out. All tensors are zero after it.

        Raises:
            RuntimeError: a result is wrong.
        """
        inputs = [_values(rank, self.size) for rank in range(self._place.world)]
        for name, group in groups.items():
            self._tensor.copy_(inputs[self._place.rank])
            self.call(group)()
            if self.collective == "all_gather":
                right = all(map(torch.equal, self._outputs, inputs))
            else:  # ranks may be added in any order
                right = torch.allclose(self._tensor, torch.stack(inputs).sum(0), rtol=1e-5, atol=1e-5)
            if not right:
                raise RuntimeError(f"{self.collective} of {size_text(self.size)}: the result of {name!r} is wrong")
        self._tensor.zero_()  # sums would grow from call to call

    async def on_group(self, group: Group, calls: int) -> list[float]:
        """Seconds of each of so many calls on our own API."""
        taken = []
        for _ in range(calls):
            began_s = time.perf_counter()
            if self.collective == "all_gather":
                await group.all_gather("bench", self._tensor)
            else:
                await group.all_reduce("bench", self._tensor, out=self._tensor)
            taken.append(time.perf_counter() - began_s)
        return taken


def _values(rank: int, size: int) -> Tensor:
    return torch.rand(size // 4, generator=torch.Generator().manual_seed(rank))


def block(call: Callable[[], Any], calls: int) -> list[float]:
    """Seconds of each of so many calls, one after the other."""
    taken = []
    for _ in range(calls):
        began_s = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began_s)
    return taken


def calls_for(seconds: float, run: Block, gloo: dist.ProcessGroup, most: int = _MAX_CALLS) -> int:
    """How many calls take about so long, the same number on all ranks. It warms up, too."""
    calls = _WARM_UP_CALLS
    for aim_s in (_WARM_UP_S, seconds):
        typical_s = statistics.median(run(calls))
        count = torch.tensor([max(_MIN_CALLS, min(most, round(aim_s / typical_s)))])
        dist.broadcast(count, 0, group=gloo)
        calls = int(count)
    return calls


class NoTorch:
    """A group of our own API on the bus that the process group has already."""

    def __init__(self, place: Place) -> None:
        self._bus = bus_thread.acquire(dist.distributed_c10d._get_default_store(), dist.get_rank())
        self._stack = AsyncExitStack()
        joining = join_group(self._bus.bus, rank=place.rank, world=place.world, name="bench")
        self._group = self._bus.start(self._stack.enter_async_context(joining)).result()

    def block(self, cell: Cell, calls: int) -> list[float]:
        """Seconds of each call, as its event loop sees them."""
        return self._bus.start(cell.on_group(self._group, calls)).result()

    def close(self) -> None:
        """Leave it."""
        self._bus.start(self._stack.aclose()).result()
        bus_thread.release(self._bus)


def time_cells(place: Place) -> dict[str, Any]:
    """The role of a rank: medians of each repeat, for each collective and size, and what shared memory it has then.

    Its spec: ``collectives``, ``sizes``, ``repeats``.
    """
    before = Holdings.now()
    groups = place.start_both()
    gloo = groups["gloo"]
    if place.transport == "one-host":
        groups["none"] = unsealed_group()
    else:
        groups |= {"none": groups["ours"], "ours": new_group()}
    cells = [Cell(place, collective, size) for collective in place.spec["collectives"] for size in place.spec["sizes"]]
    found = []
    for cell in cells:
        cell.check(groups)
        blocks = {name: partial(block, cell.call(group)) for name, group in groups.items()}
        medians = timed(blocks, gloo, place.spec["repeats"])
        found.append({"collective": cell.collective, "bytes": cell.size, "median_s": medians})
    segments = Holdings.now().since(before)["segments"]
    plain = NoTorch(place)  # not before: it could cost the others something
    for cell, facts in zip(cells, found, strict=True):
        blocks = {"Group": partial(plain.block, cell), "gloo": partial(block, cell.call(gloo))}
        facts["on_group"] = {"median_s": timed(blocks, gloo, place.spec["repeats"])}
    plain.close()
    dist.barrier(group=gloo)
    for name in ("ours", "none"):
        dist.destroy_process_group(groups[name])
    return {"cells": found, "segments": segments}


def timed(blocks: Mapping[str, Block], gloo: dist.ProcessGroup, repeats: int) -> dict[str, list[float]]:
    """The median of the calls of each repeat, by name: one block after the other, all ranks at once."""
    counts = {name: calls_for(_BLOCK_S, run, gloo) for name, run in blocks.items()}
    medians: dict[str, list[float]] = {name: [] for name in blocks}
    for name in in_turns(blocks, repeats):
        dist.barrier(group=gloo)
        medians[name].append(statistics.median(blocks[name](counts[name])))
    return medians


def cell_rows(
    setups: Sequence[Setup] = SETUPS, *, sizes: Sequence[int] = SIZES, repeats: int = REPEATS
) -> tuple[list[Row], dict[str, Any]]:
    """A row for each cell, one for what sealing costs in it, and one for the same on our own API; one for whether there
    was shared memory."""
    rows: list[Row] = []
    taken: dict[str, Any] = {}
    for setup in setups:
        where = f"{TRANSPORTS[setup.transport]}, world {setup.world}"
        spec = {"collectives": list(setup.limits), "sizes": list(sizes), "repeats": repeats}
        try:
            found = run_ranks(time_cells, setup.world, setup.transport, spec, timeout_s=600.0)
        except ChildFailed as error:
            rows.append(failed(where, error))
            continue
        taken[where] = found
        counts = [len(of_rank["segments"]) for of_rank in found]
        name = f"shared-memory segments in use, {where}"
        if setup.transport == "dds-only":
            rows.append(Row(name, "none", max(counts), "", not any(counts)))
        else:
            rows.append(at_least(name, min(counts), 1, ""))
        for ranks in zip(*(of_rank["cells"] for of_rank in found), strict=True):
            rows += _rows_of(ranks, where, setup.limits)
    return rows, taken


def _rows_of(ranks: Sequence[dict[str, Any]], where: str, limits: dict[str, tuple[float, ...]]) -> list[Row]:
    size, collective = ranks[0]["bytes"], ranks[0]["collective"]
    ratios, ms = ratios_of(ranks)
    name = f"{collective} {size_text(size)}, {where}"
    through_memory = where.startswith(TRANSPORTS["one-host"])
    compared = "ours" if through_memory else "none"  # over the network gloo does not encrypt either
    note = f"{ms[compared]:.3g} / {ms['gloo']:.3g} ms; {spread(ratios[compared])}"
    measured = statistics.median(ratios[compared])
    row = shown(name, measured, "x gloo", note)
    if size in SIZES:
        limit = limits[collective][SIZES.index(size)]
        row = at_most(name, measured, limit, "x gloo", note)
    sealing = ratios_of(ranks, base="none")[0]["ours"]
    note = f"{ms['ours']:.3g} / {ms['none']:.3g} ms; {spread(sealing)}"
    sealed = ("  the same, sealed as by default", statistics.median(sealing))
    seals = at_most(*sealed, MAX_SEALED, "x none", note) if through_memory else shown(*sealed, "x none", note)
    ratios, ms = ratios_of([of_rank["on_group"] for of_rank in ranks])
    note = f"{ms['Group']:.3g} / {ms['gloo']:.3g} ms; {spread(ratios['Group'])}"
    return [row, seals, shown("  the same on Group, no torch", statistics.median(ratios["Group"]), "x gloo", note)]


def in_turns(names: Iterable[str], repeats: int) -> list[str]:
    """All of them in every repeat, in the opposite order in every second one."""
    forth = list(names)
    return [name for number in range(repeats) for name in (forth[::-1] if number % 2 else forth)]


def ratios_of(ranks: Sequence[dict[str, Any]], base: str = "gloo") -> tuple[dict[str, list[float]], dict[str, float]]:
    """From ``median_s`` of all ranks, of which the slowest counts in each repeat.

    Returns:
        What each repeat took by the time of ``base`` in it, and the median of the repeats in ms; both by name.
    """
    slowest = slowest_of(ranks)
    ratios = {
        name: [mine / theirs for mine, theirs in zip(values, slowest[base], strict=True)]
        for name, values in slowest.items()
    }
    return ratios, {name: 1e3 * statistics.median(values) for name, values in slowest.items()}


def slowest_of(ranks: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """From ``median_s`` of all ranks: seconds of the slowest in each repeat, by name."""
    return {
        name: [max(repeat) for repeat in zip(*(rank["median_s"][name] for rank in ranks), strict=True)]
        for name in ranks[0]["median_s"]
    }


def spread(ratios: Sequence[float]) -> str:
    """The ratios of the repeats."""
    return f"{len(ratios)} repeats, {min(ratios):.3g} .. {max(ratios):.3g}"


def size_text(size: int) -> str:
    """As in "64 KiB"."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
