"""Collectives of a ``Group`` over DDS alone, with multicast and without it: a part of ``make bench-collectives``.

Both in the same processes, by turns. They are two buses in two domains, because the network of a domain is configured
once per process.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gradbus
from gradbus.experiments.bench.cells import Cell, Cells
from gradbus.experiments.bench.limits import Row, Taken, at_least, failed, shown
from gradbus.experiments.bench.processes import DOMAIN, BenchRank, ProcessFailed, run_ranks
from gradbus.experiments.bench.timing import KIB, MIB, ratio_note, ratios_of, size_text, timed
from gradbus.runtime.collectives import Group
from gradbus.runtime.dds.network import NetworkConfig

WORLDS = (3, 4, 8)
SIZES = (64 * KIB, MIB, 16 * MIB)
_LEASE_S = 20.0  # eight processes on a busy machine
_COUNTED_BYTES = 4 * MIB

COLLECTIVES = ("broadcast", "all_gather", "all_reduce")


def time_both(place: BenchRank) -> dict[str, Any]:
    """The role of a rank: medians of each repeat, for each cell, and what rank 0 sent by multicast. Its spec: Cells."""
    gloo, spec = place.start("gloo"), place.spec
    found = []
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        groups = runner.run(_join(stack, place))
        sent = {name: runner.run(_payloads_by_multicast(group)) for name, group in groups.items()}
        for cell in [Cell(place, collective, size) for collective in spec.collectives for size in spec.sizes]:

            def block(calls: int, group: Group, cell: Cell = cell) -> list[float]:
                return runner.run(cell.on_group(group, calls))

            blocks = {name: partial(block, group=group) for name, group in groups.items()}
            medians = timed(blocks, gloo, spec.repeats)
            found.append({"collective": cell.collective, "bytes": cell.size, "median_s": medians})
        runner.run(stack.aclose())
    return {"cells": found, "by_multicast": sent}


async def _join(stack: AsyncExitStack, place: BenchRank) -> dict[str, Group]:
    joined = {}
    for number, name in enumerate(("unicast", "multicast")):
        network = NetworkConfig(multicast=name == "multicast", lease_s=_LEASE_S, shared_memory=False)
        connecting = gradbus.connect(job=place.job, domain=DOMAIN + number, network=network)
        bus = await stack.enter_async_context(connecting)
        joining = gradbus.join_group(bus, rank=place.rank, world=place.world)
        joined[name] = await stack.enter_async_context(joining)
    return joined


async def _payloads_by_multicast(group: Group) -> float:
    """The octets that rank 0 sends by multicast in a broadcast, in payloads."""
    before = multicast_octets()
    await group.broadcast("counted", torch.zeros(_COUNTED_BYTES // 4))
    found = (multicast_octets() - before) / _COUNTED_BYTES
    await group.barrier("counted")  # nobody sends anything else meanwhile
    return found


def multicast_octets() -> int:
    """Octets that this machine (its network namespace) has sent by IP multicast; 0 where the system does not count."""
    try:
        lines = Path("/proc/net/netstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    names, values = (line.split() for line in lines if line.startswith("IpExt:"))
    return int(dict(zip(names, values, strict=True)).get("OutMcastOctets", 0))


def multicast_rows(
    worlds: Sequence[int] | None = None, *, sizes: Sequence[int] | None = None, repeats: int = 7
) -> Taken:
    """A row for each collective, size and world, and one for whether multicast was used at all."""
    rows: list[Row] = []
    taken: dict[str, Any] = {}
    for world in worlds or WORLDS:
        where = f"DDS only, world {world}"
        spec = Cells(COLLECTIVES, sizes or SIZES, repeats)
        try:
            found = run_ranks(time_both, world, spec, transport="dds-only", timeout_s=300.0)
        except ProcessFailed as error:
            rows.append(failed(f"multicast, {where}", error))
            continue
        taken[f"multicast, {where}"] = found
        rows.append(sent_row(found[0]["by_multicast"], where, world))
        for ranks in zip(*(of_rank["cells"] for of_rank in found), strict=True):
            ratios, ms = ratios_of(ranks, base="unicast")
            name = f"{ranks[0]['collective']} {size_text(ranks[0]['bytes'])} by multicast, {where}"
            note = ratio_note(ratios, ms, "multicast", "unicast")
            rows.append(shown(name, statistics.median(ratios["multicast"]), "x unicast", note))
    return rows, taken


def sent_row(by_multicast: dict[str, float], where: str, world: int) -> Row:
    """A row for the octets that rank 0 has sent by multicast, in payloads. One reader gets everything by unicast."""
    name = f"payloads of a broadcast that leave by multicast, {where}"
    note = f"without multicast {by_multicast['unicast']:.3g}"
    sent = by_multicast["multicast"]
    return at_least(name, sent, 1, "", note) if world > 2 else shown(name, sent, "", note)
