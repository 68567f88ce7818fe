"""What more ranks cost: a group forms, and reduces, with 2 to 16 processes of one torch thread each."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import gradbus
from gradbus.experiments.bench.results import Effort, Figure, figure
from gradbus.experiments.bench_collectives_timing import KIB, MIB, size_text
from gradbus.experiments.bench_ddp_process import DOMAIN, NETWORK, run_ranks
from gradbus.experiments.bench_process import cpu_s
from gradbus.runtime.collectives import Group
from gradbus.runtime.dds.network import NetworkConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """``formations``: groups formed one after the other. ``calls``: of each collective."""

    worlds: Sequence[int]
    formations: int
    calls: int
    sizes: Sequence[int] = (64 * KIB, 4 * MIB)


PLANS: dict[Effort, Plan] = {
    "tiny": Plan(worlds=(2, 3), formations=1, calls=2, sizes=(4 * KIB,)),
    "quick": Plan(worlds=(2, 4, 8, 16), formations=2, calls=10),
    "full": Plan(worlds=(2, 3, 4, 6, 8, 12, 16), formations=5, calls=30),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Grow:
    """The role of a rank. ``job``: of the groups that form, one after the other, each on buses of its own."""

    world: int
    job: str
    plan: Plan
    network: NetworkConfig | None = None

    async def run(self, group: Group) -> dict[str, Any]:
        """Seconds, and processor seconds, of each formation and of a call of each collective."""
        found: dict[str, Any] = {"form": [], "form_cpu": []}
        for number in range(self.plan.formations):
            async with gradbus.connect(job=f"{self.job}-{number}", domain=DOMAIN, network=NETWORK) as bus:
                await group.barrier(f"opened/{number}")
                began_s, used_s = time.perf_counter(), cpu_s()
                async with gradbus.join_group(bus, rank=group.rank, world=group.world):
                    found["form"].append(time.perf_counter() - began_s)
                    await group.barrier(f"formed/{number}")
                    found["form_cpu"].append(cpu_s() - used_s)
        for size in self.plan.sizes:
            tensor = torch.zeros(size // 4)
            for _ in range(3):
                await group.all_reduce(f"reduce/{size}", tensor, out=tensor)
            await group.barrier(f"ready/{size}")
            taken, used_s = [], cpu_s()
            for _ in range(self.plan.calls):
                began_s = time.perf_counter()
                await group.all_reduce(f"reduce/{size}", tensor, out=tensor)
                taken.append(time.perf_counter() - began_s)
            found[size_text(size)] = taken
            found[f"{size_text(size)}_cpu"] = [(cpu_s() - used_s) / self.plan.calls]
        return found


def measure(effort: Effort) -> Iterator[Figure]:
    """Wall time of the slowest rank, and processor time of all."""
    plan = PLANS[effort]
    for world in plan.worlds:
        ranks = run_ranks(Grow(world=world, job=f"grow-{os.getpid()}-{world}", plan=plan), timeout_s=120.0)
        for key, what in (
            ("form", "a group forms"),
            *((size_text(size), f"all_reduce {size_text(size)}") for size in plan.sizes),
        ):
            wall = [1e3 * max(of_call) for of_call in zip(*(rank[key] for rank in ranks), strict=True)]
            used = [1e3 * sum(of_call) for of_call in zip(*(rank[f"{key}_cpu"] for rank in ranks), strict=True)]
            if key != "form":
                wall = [statistics.median(wall[start::3]) for start in range(min(3, len(wall)))]
            for series, samples in ((f"{what}, time", wall), (f"{what}, processor time of all ranks", used)):
                yield figure(f"{series}, world {world}", "ms", samples, series=series, at=world)
