"""What a larger model costs: a controller and one client, 1 MB to 1 GB, up and down as fp32.

Through the memory of one host, and over DDS alone, as between machines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradbus.experiments.bench.results import Effort, Figure, figure
from gradbus.experiments.bench_overhead import WAYS, cpu_per_round_s, federated, periods_s

_MODELS_HELD = 12  # by both processes and shared memory at the worst moment, with some to spare
PLANS: dict[Effort, Sequence[tuple[float, int]]] = {  # megabytes, rounds
    "tiny": ((0.1, 5), (1, 5)),
    "quick": ((1, 12), (10, 10), (100, 5)),
    "full": ((1, 20), (3, 20), (10, 12), (30, 10), (100, 7), (300, 5), (1000, 5)),
}


def measure(effort: Effort) -> Iterator[Figure]:
    """Time and processor time of a round, and the controller's peak memory. What would not fit is left out."""
    for megabytes, rounds in PLANS[effort]:
        free = _available_bytes()
        if free < _MODELS_HELD * megabytes * 1e6:
            print(
                f"left out: {megabytes:g} MB needs {_MODELS_HELD} times that, {free / 1e9:.1f} GB free", file=sys.stderr
            )
            continue
        for way in WAYS:
            yield from points(megabytes, rounds, way)


def points(megabytes: float, rounds: int, way: str) -> Iterator[Figure]:
    """Of one size, one of :data:`WAYS`."""
    controller, clients = federated(
        round(megabytes * 1e6 / 4), clients=1, processes=1, rounds=rounds, timeout_s=240.0, round_timeout_s=120.0,
        dead_after_s=20.0, shared_memory=WAYS[way],
    )  # fmt: skip
    peak = (controller["peak_bytes"] - controller["idle_bytes"]) / 1e6
    for cost, unit, samples in (
        ("time of a round", "ms", [1e3 * one for one in periods_s(controller)]),
        ("processor time of a round, both processes", "ms", [1e3 * cpu_per_round_s(controller, clients, rounds)]),
        ("controller, peak memory above idle", "MB", [peak]),
    ):
        series = f"{cost}, {way}"
        note = f"{peak / megabytes:.2f} models" if unit == "MB" else ""
        yield figure(f"{series}, {megabytes:g} MB", unit, samples, series=series, at=megabytes, note=note)


def _available_bytes() -> float:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024.0
    return 0.0
