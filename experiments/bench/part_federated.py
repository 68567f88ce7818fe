"""What a federated round costs beside training, by payload and number of clients, against bare TCP.

Real processes: a controller, and the clients in two. Training returns at once. What it is measured against: the model
to each client and an update from each, one after the other, over one TCP connection. TCP carries every byte, so it
compares with the way between machines ("DDS only"); that within one host, through shared memory, stands beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gradbus.experiments.bench.results import Effort, Figure, figure
from gradbus.experiments.bench.tcp import Echo
from gradbus.experiments.bench_overhead import WAYS, cpu_per_round_s, federated, periods_s

_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Case:
    """``dim``: parameters, of 4 bytes each. ``ways``: some of the WAYS."""

    dim: int
    clients: int
    rounds: int
    ways: tuple[str, ...] = tuple(WAYS)

    @property
    def name(self) -> str:
        return f"{4 * self.dim / 1e6:.3g} MB, {self.clients} clients"


_MB, _CNN, _LARGE = 250_000, 1_199_882, 25_000_000
PLANS: dict[Effort, tuple[int, Sequence[Case]]] = {  # launches, cases
    "tiny": (1, [Case(1000, 2, 5)]),
    "quick": (3, [Case(_MB, 8, 12), Case(_CNN, 2, 16)]),
    "full": (
        3,
        [Case(dim, clients, rounds) for dim, many in ((_MB, 40), (_CNN, 30))
         for clients, rounds in ((2, many), (8, many // 2), (32, many // 4))]
        # 32 clients over DDS alone would take as long as all others together.
        + [Case(_LARGE, 2, 5), Case(_LARGE, 8, 4), Case(_LARGE, 32, 4, ("one host",))],
    ),
}  # fmt: skip


def measure(effort: Effort) -> list[Figure]:
    """Each case both ways, in turn, in each launch."""
    launches, cases = PLANS[effort]
    turns = [(case, way) for case in cases for way in case.ways]
    taken: dict[tuple[Case, str], list[tuple[float, float, float]]] = {turn: [] for turn in turns}
    with Echo() as echo:
        for number in range(launches):
            for case, way in turns[::-1] if number % 2 else turns:
                taken[case, way].append(launch(case, way, echo))
    figures = []
    for (case, way), values in taken.items():
        overhead, cpu, bare = zip(*values, strict=True)
        note = f"median of {case.rounds} rounds in each launch"
        figures += [
            figure(
                f"round overhead, {case.name}, {way}", "ms", (1e3 * one for one in overhead),
                against=("TCP", (1e3 * one for one in bare)), note=note,
            ),
            figure(
                f"processor time of a round, {case.name}, {way}", "ms", (1e3 * one for one in cpu),
                note="all processes",
            ),
        ]  # fmt: skip
    return figures


def launch(case: Case, way: str, echo: Echo) -> tuple[float, float, float]:
    """Seconds of overhead of a round, of processor time, and of bare TCP before and after. ``way``: one of the WAYS."""
    size = 4 * case.dim
    trips = [echo.round_trip_s(size) for _ in range(4)][1:]
    controller, clients = federated(
        case.dim, clients=case.clients, processes=_PROCESSES, rounds=case.rounds, timeout_s=400.0, dead_after_s=20.0,
        shared_memory=WAYS[way],
    )  # fmt: skip
    trips += [echo.round_trip_s(size) for _ in range(3)]
    overhead_s = statistics.median(periods_s(controller))
    return overhead_s, cpu_per_round_s(controller, clients, case.rounds), case.clients * statistics.median(trips)
