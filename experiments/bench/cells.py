"""One collective at one size on one rank: its call through each backend and on a ``Group``, its check, its timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradbus.experiments.bench.processes import BenchRank, dds_group, unsealed_group
from gradbus.experiments.bench.timing import block, size_text, timed
from gradbus.runtime.bus import background
from gradbus.runtime.collectives import Group, join_group
from gradbus.torch.groups import acquire_bus

_SHARED = ("/memfd:", "/dev/shm/", "/dev/zero", "/SYSV")  # how the kernel names what processes share


class Cells(NamedTuple):
    """The cells that the ranks of one launch measure: every collective at every size, in bytes of a rank's tensor."""

    collectives: Sequence[str]
    sizes: Sequence[int]
    repeats: int


class Cell:
    """One collective at one size, on one rank."""

    def __init__(self, place: BenchRank, collective: str, size: int) -> None:
        self.collective = collective
        self.size = size
        self._place = place
        self._tensor = torch.zeros(size // 4)
        self._outputs = [torch.empty(size // 4) for _ in range(place.world)] if collective == "all_gather" else []

    def call(self, group: dist.ProcessGroup) -> Callable[[], Any]:
        """The call to be timed."""
        tensor, outputs = self._tensor, self._outputs
        if self.collective == "all_gather":
            return lambda: dist.all_gather(outputs, tensor, group=group)
        return lambda: dist.all_reduce(tensor, group=group)

    def check(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """Compare the results of all groups with what must come out. All tensors are zero after it.

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


def _values(rank: int, size: int) -> Tensor:
    return torch.rand(size // 4, generator=torch.Generator().manual_seed(rank))


class _GroupApi:
    """A Group on the bus that the process group has already, called from this thread."""

    def __init__(self, place: BenchRank) -> None:
        self._bus = acquire_bus(dist.distributed_c10d._get_default_store(), dist.get_rank())
        self._stack = AsyncExitStack()
        joining = join_group(self._bus.bus, rank=place.rank, world=place.world, name="bench")
        self._group = self._bus.start(self._stack.enter_async_context(joining)).result()

    def block(self, cell: Cell, calls: int) -> list[float]:
        """Seconds of each call, as the event loop of the bus sees them."""
        return self._bus.start(cell.on_group(self._group, calls)).result()

    def close(self) -> None:
        """Leave the group."""
        self._bus.start(self._stack.aclose()).result()
        background.release(self._bus)


def time_cells(place: BenchRank) -> dict[str, Any]:
    """The role of a rank: medians of each repeat, for each cell, and its segments of shared memory. Spec: Cells."""
    before = _shared_segments()
    spec: Cells = place.spec
    groups = place.start_both()
    gloo = groups["gloo"]
    if place.transport == "one-host":
        groups["none"] = unsealed_group()
    else:
        groups |= {"none": groups["ours"], "ours": dds_group()}
    cells = [Cell(place, collective, size) for collective in spec.collectives for size in spec.sizes]
    found: list[dict[str, Any]] = []
    for cell in cells:
        cell.check(groups)
        blocks = {name: partial(block, cell.call(group)) for name, group in groups.items()}
        medians = timed(blocks, gloo, spec.repeats)
        found.append({"collective": cell.collective, "bytes": cell.size, "median_s": medians})
    segments = sorted(_shared_segments() - before)
    api = _GroupApi(place)  # not before: it could cost the others something
    for cell, facts in zip(cells, found, strict=True):
        blocks = {"Group": partial(api.block, cell), "gloo": partial(block, cell.call(gloo))}
        facts["on_group"] = {"median_s": timed(blocks, gloo, spec.repeats)}
    api.close()
    dist.barrier(group=gloo)
    for name in ("ours", "none"):
        dist.destroy_process_group(groups[name])
    return {"cells": found, "segments": segments}


def _shared_segments() -> set[str]:
    """Inode and name of all memory that is mapped here and shared with other processes."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    mapped = (line.split(maxsplit=5) for line in lines)
    return {f"{fields[4]} {fields[5]}" for fields in mapped if len(fields) == 6 and fields[5].startswith(_SHARED)}
