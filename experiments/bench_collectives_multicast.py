"""What goes to all ranks, by multicast and to each by itself, on our own API over DDS alone.

Both in the same processes, by turns. They are two buses in two domains, because the network of a domain is configured
once per process.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gradbus
from gradbus.experiments.bench_children import ChildFailed
from gradbus.experiments.bench_collectives_ranks import DOMAIN, Place, failed, run_ranks
from gradbus.experiments.bench_collectives_timing import FEW_REPEATS, KIB, MIB, ratios_of, size_text, spread, timed
from gradbus.experiments.bench_rows import Row, at_least, shown
from gradbus.runtime.collectives import Group
from gradbus.runtime.dds.network import NetworkConfig

WORLDS = (3, 4, 8)
SIZES = (64 * KIB, MIB, 16 * MIB)
_LEASE_S = 20.0  # eight processes on a busy machine
_COUNTED_BYTES = 4 * MIB

Call = Callable[[Group, Tensor], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "broadcast": lambda group, tensor: group.broadcast("bench", tensor),
    "all_gather": lambda group, tensor: group.all_gather("bench", tensor),
    "all_reduce": lambda group, tensor: group.all_reduce("bench", tensor, out=tensor),
}


class Groups(NamedTuple):
    """Two groups of the same ranks."""

    unicast: Group
    multicast: Group


def time_both(place: Place) -> dict[str, Any]:
    """The role of a rank: medians of each repeat, for each collective and size; and what rank 0 sent by multicast.

    Its spec: ``job``, ``sizes``, ``repeats``.
    """
    gloo = place.start("gloo")
    spec = place.spec
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        groups = runner.run(_join(stack, place))
        sent = runner.run(_octets_by_multicast(groups))
        found = []
        for collective, call in CALLS.items():
            for size in spec["sizes"]:
                tensor = torch.zeros(size // 4)

                def block(calls: int, group: Group, call: Call = call, tensor: Tensor = tensor) -> list[float]:
                    return runner.run(_calls(call, group, tensor, calls))

                blocks = {name: partial(block, group=group) for name, group in groups._asdict().items()}
                medians = timed(blocks, gloo, spec["repeats"])
                found.append({"collective": collective, "bytes": size, "median_s": medians})
        runner.run(stack.aclose())
    return {"cells": found, "by_multicast": sent}


async def _join(stack: AsyncExitStack, place: Place) -> Groups:
    joined = {}
    for number, name in enumerate(Groups._fields):
        network = NetworkConfig(multicast=name == "multicast", lease_s=_LEASE_S, shared_memory=False)
        connecting = gradbus.connect(job=place.spec["job"], domain=DOMAIN + number, network=network)
        bus = await stack.enter_async_context(connecting)
        joining = gradbus.join_group(bus, rank=place.rank, world=place.world)
        joined[name] = await stack.enter_async_context(joining)
    return Groups(**joined)


async def _calls(call: Call, group: Group, tensor: Tensor, calls: int) -> list[float]:
    taken = []
    for _ in range(calls):
        began_s = time.perf_counter()
        await call(group, tensor)
        taken.append(time.perf_counter() - began_s)
    return taken


async def _octets_by_multicast(groups: Groups) -> dict[str, float]:
    """What rank 0 sends by multicast in a broadcast, in payloads, on either group."""
    found = {}
    for name, group in groups._asdict().items():
        before = multicast_octets()
        await group.broadcast("counted", torch.zeros(_COUNTED_BYTES // 4))
        found[name] = (multicast_octets() - before) / _COUNTED_BYTES
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
    worlds: Sequence[int] | None = None, *, sizes: Sequence[int] | None = None, repeats: int = FEW_REPEATS
) -> tuple[list[Row], dict[str, Any]]:
    """A row for each collective, size and world, and one for whether multicast was used at all."""
    rows: list[Row] = []
    taken: dict[str, Any] = {}
    for world in worlds or WORLDS:
        where = f"DDS only, world {world}"
        spec = {"job": f"bench-multicast-{os.getpid()}", "sizes": list(sizes or SIZES), "repeats": repeats}
        try:
            found = run_ranks(time_both, world, "dds-only", spec, timeout_s=300.0)
        except ChildFailed as error:
            rows.append(failed(f"multicast, {where}", error))
            continue
        taken[f"multicast, {where}"] = found
        rows.append(sent_row(found[0]["by_multicast"], where, world))
        for ranks in zip(*(of_rank["cells"] for of_rank in found), strict=True):
            ratios, ms = ratios_of(ranks, base="unicast")
            note = f"{ms['multicast']:.3g} / {ms['unicast']:.3g} ms; {spread(ratios['multicast'])}"
            name = f"{ranks[0]['collective']} {size_text(ranks[0]['bytes'])} by multicast, {where}"
            rows.append(shown(name, statistics.median(ratios["multicast"]), "x unicast", note))
    return rows, taken


def sent_row(by_multicast: dict[str, float], where: str, world: int) -> Row:
    """What rank 0 has sent by multicast, in payloads, on either group. One reader gets everything by unicast."""
    name = f"payloads of a broadcast that leave by multicast, {where}"
    note = f"without multicast {by_multicast['unicast']:.3g}"
    sent = by_multicast["multicast"]
    return at_least(name, sent, 1, "", note) if world > 2 else shown(name, sent, "", note)
