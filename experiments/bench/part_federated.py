"""What a federated round costs beside training, by payload and number of clients, against bare TCP.

Real processes: a controller, and the clients in two. Training returns at once. What it is measured against: the model
to each client and an update from each, one after the other, over one TCP connection.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gradbus.experiments.bench.results import Effort, Figure, figure
from gradbus.experiments.bench.tcp import Echo
from gradbus.experiments.bench_overhead import cpu_per_round_s, federated, periods_s

_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Case:
    """``dim``: parameters, of 4 bytes each."""

    dim: int
    clients: int
    rounds: int

    @property
    def name(self) -> str:
        return f"{4 * self.dim / 1e6:.3g} MB, {self.clients} clients"


_MB, _CNN, _LARGE = 250_000, 1_199_882, 25_000_000
PLANS: dict[Effort, tuple[int, Sequence[Case]]] = {  # launches, cases
    "tiny": (1, [Case(1000, 2, 5)]),
    "quick": (3, [Case(_MB, 8, 12), Case(_CNN, 2, 16)]),
    "full": (
        3,
        [Case(dim, clients, rounds) for dim, many in ((_MB, 40), (_CNN, 30), (_LARGE, 5))
         for clients, rounds in ((2, many), (8, max(4, many // 2)), (32, max(4, many // 4)))],
    ),
}  # fmt: skip


def measure(effort: Effort) -> list[Figure]:
    """Each case in turn, in each launch."""
    launches, cases = PLANS[effort]
    taken: dict[Case, list[tuple[float, float, float]]] = {case: [] for case in cases}
    with Echo() as echo:
        for number in range(launches):
            for case in cases[::-1] if number % 2 else cases:
                taken[case].append(_launch(case, echo))
    figures = []
    for case, values in taken.items():
        overhead, cpu, bare = zip(*values, strict=True)
        note = f"median of {case.rounds} rounds in each launch"
        figures += [
            figure(
                f"round overhead, {case.name}", "ms", (1e3 * one for one in overhead),
                against=("TCP", (1e3 * one for one in bare)), note=note,
            ),
            figure(f"processor time of a round, {case.name}", "ms", (1e3 * one for one in cpu), note="all processes"),
        ]  # fmt: skip
    return figures


def _launch(case: Case, echo: Echo) -> tuple[float, float, float]:
    """Seconds of overhead of a round, of processor time, and of bare TCP before and after."""
    size = 4 * case.dim
    trips = [echo.round_trip_s(size) for _ in range(4)][1:]
    controller, clients = federated(
        case.dim, clients=case.clients, processes=_PROCESSES, rounds=case.rounds, timeout_s=400.0, dead_after_s=20.0
    )
    trips += [echo.round_trip_s(size) for _ in range(3)]
    overhead_s = statistics.median(periods_s(controller))
    return overhead_s, cpu_per_round_s(controller, clients, case.rounds), case.clients * statistics.median(trips)
