"""What growth costs: more clients, more ranks, larger models. The parts of ``make bench PART=scale``.

Clients: 2 to 200 as actors on one loop and one bus, with a tiny model. One process has the controller, another all
clients, so the controller's figures are its own. Clients of one process share a DDS participant: a machine has places
for about 120 of them.

Ranks: a group forms, and reduces, with 2 to 16 processes of one torch thread each.

Payload: a controller and one client, 1 MB to 1 GB, up and down as fp32, on one host and over DDS alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gradbus
from gradbus.experiments.bench.processes import DOMAIN, LEASE_S, BenchRank, run_ranks
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.rounds import WAYS, run_rounds
from gradbus.experiments.bench.timing import KIB, MIB, cpu_s, size_text

_CLIENTS_DIM, _CLIENTS_ROUNDS = 1000, 7
_MEMORY = Path("/proc/meminfo")
_MODELS_HELD = 12  # by both processes and shared memory at the worst moment, with some to spare

CLIENTS: dict[str, tuple[Sequence[int], int]] = {  # clients, launches of each
    "tiny": ((2, 4), 1),
    "quick": ((2, 10, 50, 200), 1),
    "full": ((2, 5, 10, 20, 50, 100, 200), 2),
}
PAYLOADS: dict[str, Sequence[tuple[float, int]]] = {  # megabytes, rounds
    "tiny": ((0.1, 5), (1, 5)),
    "quick": ((1, 12), (10, 10), (100, 5)),
    "full": ((1, 20), (3, 20), (10, 12), (30, 10), (100, 7), (300, 5), (1000, 5)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksPlan:
    """``formations``: groups formed one after the other. ``calls``: of each collective."""

    worlds: Sequence[int]
    formations: int
    calls: int
    sizes: Sequence[int] = (64 * KIB, 4 * MIB)


RANKS = {
    "tiny": RanksPlan(worlds=(2, 3), formations=1, calls=2, sizes=(4 * KIB,)),
    "quick": RanksPlan(worlds=(2, 4, 8, 16), formations=2, calls=10),
    "full": RanksPlan(worlds=(2, 3, 4, 6, 8, 12, 16), formations=5, calls=30),
}


def measure_clients(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Processor time, period and memory of a round, by the number of clients."""
    counts, launches = CLIENTS[chosen.effort]
    for count in counts:
        runs = [
            run_rounds(_CLIENTS_DIM, clients=count, processes=1, rounds=_CLIENTS_ROUNDS, timeout_s=150.0)
            for _ in range(launches)
        ]
        for series, unit, samples in (
            ("controller, processor time of a round", "ms", [1e3 * it.controller_cpu_s for it in runs]),
            ("all clients, processor time of a round", "ms", [1e3 * it.clients_cpu_s for it in runs]),
            ("time of a round", "ms", [1e3 * statistics.median(it.overheads_s) for it in runs]),
            ("controller, peak memory above empty", "MB", [_above(it.controller, "empty_bytes") for it in runs]),
            ("all clients, peak memory above empty", "MB", [_above(it.clients[0], "empty_bytes") for it in runs]),
        ):
            yield measurement(f"{series}, {count} clients", unit, samples, series=series, at=count)


def _above(process: dict[str, Any], base: str) -> float:
    return float(process["peak_bytes"] - process[base]) / 1e6


async def grow(place: BenchRank) -> dict[str, tuple[list[float], list[float]]]:
    """The role of a rank: seconds, and processor seconds, of each formation and of a call of each collective.

    Groups form one after the other, each on a bus of its own. Its spec: RanksPlan.
    """
    plan: RanksPlan = place.spec
    forming: tuple[list[float], list[float]] = ([], [])
    found = {"a group forms": forming}
    network = gradbus.NetworkConfig(lease_s=LEASE_S)
    async with place.group() as group:
        for number in range(plan.formations):
            async with gradbus.connect(job=f"{place.job}-{number}", domain=DOMAIN, network=network) as bus:
                await group.barrier(f"opened/{number}")
                began_s, used_s = time.perf_counter(), cpu_s()
                async with gradbus.join_group(bus, rank=group.rank, world=group.world):
                    forming[0].append(time.perf_counter() - began_s)
                    await group.barrier(f"formed/{number}")
                    forming[1].append(cpu_s() - used_s)
        for size in plan.sizes:
            tensor = torch.zeros(size // 4)
            for _ in range(3):
                await group.all_reduce(f"reduce/{size}", tensor, out=tensor)
            await group.barrier(f"ready/{size}")
            taken, used_s = [], cpu_s()
            for _ in range(plan.calls):
                began_s = time.perf_counter()
                await group.all_reduce(f"reduce/{size}", tensor, out=tensor)
                taken.append(time.perf_counter() - began_s)
            found[f"all_reduce {size_text(size)}"] = taken, [(cpu_s() - used_s) / plan.calls]
    return found


def measure_ranks(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Wall time of the slowest rank, and processor time of all, by the number of ranks."""
    plan = RANKS[chosen.effort]
    for world in plan.worlds:
        ranks = run_ranks(grow, world, plan)
        for what in ranks[0]:
            wall, used = (zip(*(rank[what][clock] for rank in ranks), strict=True) for clock in (0, 1))
            wall_ms, used_ms = [1e3 * max(of_call) for of_call in wall], [1e3 * sum(of_call) for of_call in used]
            if what != "a group forms":  # three samples of many short calls
                wall_ms = [statistics.median(wall_ms[start::3]) for start in range(min(3, len(wall_ms)))]
            for series, samples in ((f"{what}, time", wall_ms), (f"{what}, processor time of all ranks", used_ms)):
                yield measurement(f"{series}, world {world}", "ms", samples, series=series, at=world)


def available_bytes() -> int:
    """Memory that new processes can have."""
    return next(1024 * int(line.split()[1]) for line in _MEMORY.read_text().splitlines() if "MemAvailable" in line)


def measure_payload(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Time and processor time of a round, and the controller's peak memory, by the size of the model.

    A size that would not fit into memory is left out.
    """
    for megabytes, rounds in PAYLOADS[chosen.effort]:
        free = available_bytes()
        if free < _MODELS_HELD * megabytes * 1e6:
            why = f"{megabytes:g} MB needs {_MODELS_HELD} times that, {free / 1e9:.1f} GB free"
            print(f"left out: {why}", file=sys.stderr)
            continue
        for way in WAYS:
            yield from payload_figures(megabytes, rounds, way)


def payload_figures(megabytes: float, rounds: int, way: str) -> Iterator[Measurement]:
    """The figures of one size, one of the WAYS."""
    found = run_rounds(
        round(megabytes * 1e6 / 4),
        clients=1,
        processes=1,
        rounds=rounds,
        timeout_s=240.0,
        round={"timeout_s": 120.0},
        shared_memory=WAYS[way],
    )
    peak = _above(found.controller, "idle_bytes")
    for cost, unit, samples in (
        ("time of a round", "ms", [1e3 * one for one in found.overheads_s]),
        ("processor time of a round, both processes", "ms", [1e3 * found.cpu_s]),
        ("controller, peak memory above idle", "MB", [peak]),
    ):
        series = f"{cost}, {way}"
        note = f"{peak / megabytes:.2f} models" if unit == "MB" else ""
        yield measurement(f"{series}, {megabytes:g} MB", unit, samples, series=series, at=megabytes, note=note)
