"""What more clients cost: 2 to 200 of them as actors on one loop and one bus, with a tiny model.

One process has the controller, another all clients: so the controller's figures are its own. Clients of one process
share a DDS participant, whose domain they would share anyway; 200 participants would be more than one machine has
places for in DDS (120).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from gradbus.experiments.bench.results import Effort, Figure, figure
from gradbus.experiments.bench_overhead import cpu_per_round_s, federated, periods_s

_DIM = 1000
_ROUNDS = 7
PLANS: dict[Effort, tuple[Sequence[int], int]] = {  # clients, launches of each
    "tiny": ((2, 4), 1),
    "quick": ((2, 10, 50, 200), 1),
    "full": ((2, 5, 10, 20, 50, 100, 200), 2),
}


def measure(effort: Effort) -> Iterator[Figure]:
    """Processor time, period and memory of a round."""
    counts, launches = PLANS[effort]
    for count in counts:
        taken: dict[str, list[float]] = {}
        for _ in range(launches):
            controller, clients = federated(
                _DIM, clients=count, processes=1, rounds=_ROUNDS, timeout_s=150.0, dead_after_s=20.0
            )
            own_s = cpu_per_round_s(controller, [], _ROUNDS)
            all_s = cpu_per_round_s(controller, clients, _ROUNDS)
            for name, value in (
                ("controller, processor time of a round/ms", 1e3 * own_s),
                ("all clients, processor time of a round/ms", 1e3 * (all_s - own_s)),
                ("time of a round/ms", 1e3 * statistics.median(periods_s(controller))),
                ("controller, peak memory above empty/MB",
                 (controller["peak_bytes"] - controller["empty_bytes"]) / 1e6),
                ("all clients, peak memory above empty/MB",
                 (clients[0]["peak_bytes"] - clients[0]["empty_bytes"]) / 1e6),
            ):  # fmt: skip
                taken.setdefault(name, []).append(value)
        for name, values in taken.items():
            series, unit = name.split("/")
            yield figure(f"{series}, {count} clients", unit, values, series=series, at=count)
