"""One collective at one size on one rank: its call through each backend, and on a ``Group``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import gradbus
from gradbus.experiments.bench.processes import DOMAIN, BenchRank, dds_group, unsealed_group
from gradbus.experiments.bench.timing import block, timed
from gradbus.runtime.bus import background
from gradbus.runtime.collectives import Group, join_group
from gradbus.runtime.network.network_config import NetworkConfig

_MULTICAST_LEASE_S = 20.0  # eight processes on a busy machine


class Cells(NamedTuple):
    """The cells that the ranks of one launch measure: every collective at every size, in bytes of a rank's tensor."""

    collectives: Sequence[str]
    sizes: Sequence[int]
    repeats: int

    def of(self, place: BenchRank) -> list[Cell]:
        """The cells of one rank, size by size of each collective."""
        return [Cell(place.world, collective, size) for collective in self.collectives for size in self.sizes]


class Cell:
    """One collective at one size, on one rank."""

    def __init__(self, world: int, collective: str, size: int) -> None:
        self.collective = collective
        self._tensor = torch.zeros(size // 4)
        self._outputs = [torch.empty(size // 4) for _ in range(world)] if collective == "all_gather" else []

    def call(self, group: dist.ProcessGroup) -> Callable[[], Any]:
        """The call to be timed."""
        tensor, outputs = self._tensor, self._outputs
        if self.collective == "all_gather":
            return lambda: dist.all_gather(outputs, tensor, group=group)
        return lambda: dist.all_reduce(tensor, group=group)

    async def on_group(self, group: Group, calls: int) -> list[float]:
        """Seconds of each of so many calls on a Group."""
        taken = []
        for _ in range(calls):
            began_s = time.perf_counter()
            match self.collective:
                case "all_gather":
                    await group.all_gather("bench", self._tensor)
                case "all_reduce":
                    await group.all_reduce("bench", self._tensor, out=self._tensor)
                case "broadcast":
                    await group.broadcast("bench", self._tensor)
            taken.append(time.perf_counter() - began_s)
        return taken


class CellTimes(NamedTuple):
    """Holds, of one rank, the seconds of a call, the median of each repeat, by name.

    Attributes:
        through_torch: dds as by default ("ours"), dds that encrypts nothing ("none"), gloo. on_group: "Group", gloo.
    """

    through_torch: dict[str, list[float]]
    on_group: dict[str, list[float]]


def time_cells(place: BenchRank) -> list[CellTimes]:
    """The role of a rank: the times of each cell. Its spec: Cells."""
    spec: Cells = place.spec
    gloo = place.start("gloo")
    from gradbus.torch.groups import acquire_bus, job_number  # which an older torch, good for other parts, cannot load

    ours, none = dds_group(), unsealed_group()
    groups = {"ours": ours, "gloo": gloo, "none": none}
    cells = spec.of(place)
    through_torch = [
        timed({name: partial(block, cell.call(group)) for name, group in groups.items()}, gloo, spec.repeats)
        for cell in cells
    ]
    # A Group on the bus that the process group has already. Not before: it could cost the others something.
    number = job_number(dist.distributed_c10d._get_default_store())  # noqa: SLF001 - torch has no public name for it
    bus, stack = acquire_bus(number, dist.get_rank()), AsyncExitStack()
    joining = join_group(bus.bus, rank=place.rank, world=place.world, name="bench")
    group = bus.start(stack.enter_async_context(joining)).result()

    def on_group(cell: Cell, calls: int) -> list[float]:
        return bus.start(cell.on_group(group, calls)).result()

    on_groups = [
        timed({"Group": partial(on_group, cell), "gloo": partial(block, cell.call(gloo))}, gloo, spec.repeats)
        for cell in cells
    ]
    bus.start(stack.aclose()).result()
    background.release(bus)
    dist.barrier(group=gloo)
    for group_of_dds in (ours, none):
        dist.destroy_process_group(group_of_dds)
    return [CellTimes(*times) for times in zip(through_torch, on_groups, strict=True)]


def time_multicast(place: BenchRank) -> list[dict[str, list[float]]]:
    """The role of a rank: the times of each cell on a Group over DDS, with multicast and without it. Its spec: Cells.

    They are two buses in two domains, because the network of a domain is configured once per process.
    """
    gloo, spec = place.start("gloo"), place.spec
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        groups = runner.run(_join_both(stack, place))

        def block_of(cell: Cell, group: Group, calls: int) -> list[float]:
            return runner.run(cell.on_group(group, calls))

        found = [
            timed({name: partial(block_of, cell, group) for name, group in groups.items()}, gloo, spec.repeats)
            for cell in spec.of(place)
        ]
        runner.run(stack.aclose())
    return found


async def _join_both(stack: AsyncExitStack, place: BenchRank) -> dict[str, Group]:
    joined = {}
    for number, name in enumerate(("unicast", "multicast")):
        network = NetworkConfig(multicast=name == "multicast", lease_s=_MULTICAST_LEASE_S, shared_memory=False)
        bus = await stack.enter_async_context(gradbus.connect(place.job, domain=DOMAIN + number, network=network))
        joined[name] = await stack.enter_async_context(gradbus.join_group(bus, rank=place.rank, world=place.world))
    return joined
