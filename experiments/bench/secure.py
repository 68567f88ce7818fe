"""What secure aggregation adds to a federated round: the same run with it and without, by turns.

Training takes a while in which the processor is free, as that of a client with a machine of its own: keys are agreed on
and masks are made meanwhile. The clients of one process train one after the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.rounds import Rounds, run_rounds
from gradbus.experiments.bench.timing import by_turns

DIM = 1_199_882
TRAIN_S = 0.2
LAUNCHES, ROUNDS = 3, 14


class SecureCase(NamedTuple):
    """``clients``: in so many ``processes``. ``at_most_ms``: that secure aggregation may add to a round."""

    clients: int
    processes: int
    at_most_ms: float | None


CASES = (SecureCase(2, 2, 50.0), SecureCase(10, 5, 50.0))


def launch(case: SecureCase, dim: int, rounds: int, *, secure: bool) -> Rounds:
    """One run."""
    return run_rounds(
        dim, clients=case.clients, processes=case.processes, rounds=rounds, train_s=TRAIN_S,
        min_clients=2, secure_aggregation={"enabled": secure},
    )  # fmt: skip


def measure(
    dim: int = DIM, launches: int = LAUNCHES, rounds: int = ROUNDS, cases: tuple[SecureCase, ...] = CASES
) -> Iterator[Measurement]:
    """Time, processor time and bytes of a round, beside those of a plain one."""
    for case in cases:
        run = partial(launch, case, dim, rounds)
        taken = by_turns({"plain": partial(run, secure=False), "secure": partial(run, secure=True)}, launches)
        plain, secure = taken["plain"], taken["secure"]
        what = f"{4 * dim / 1e6:.3g} MB, {case.clients} clients in {case.processes} processes"
        periods = {name: [1e3 * statistics.median(one.overheads_s) for one in runs] for name, runs in taken.items()}
        added = [one - other for one, other in zip(periods["secure"], periods["plain"], strict=True)]
        note = f"beside training: {' '.join(f'{one:.0f}' for one in periods['plain'])} ms of a plain round"
        yield measurement(
            f"added to a round by secure aggregation, {what}", "ms", added, at_most=case.at_most_ms, note=note
        )
        yield measurement(
            f"processor time of a round with secure aggregation, {what}", "ms", [1e3 * one.cpu_s for one in secure],
            against=("plain", [1e3 * one.cpu_s for one in plain]), note="all processes",
        )  # fmt: skip
        yield measurement(
            f"bytes of updates with secure aggregation, {what}", "MB", [one.bytes_up / 1e6 for one in secure],
            against=("plain", [one.bytes_up / 1e6 for one in plain]), at_most=2.0,
        )  # fmt: skip
