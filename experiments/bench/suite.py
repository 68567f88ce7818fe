"""The parts of the suite, how long they take, and running them one after the other."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gradbus.experiments.bench import bus, codecs, collectives, data_parallel, federated, scale
from gradbus.experiments.bench.results import Effort, Measurement, PartRun, fault_of, machine, make_run


class SuitePart(NamedTuple):
    """One part. ``seconds``: what ``measure`` takes on 2 cores with nothing else to do."""

    measure: Callable[[Effort], Iterable[Measurement]]
    title: str
    seconds: Mapping[Effort, int]


PARTS: dict[str, SuitePart] = {
    "bus": SuitePart(bus.measure, "Bus", {"quick": 20, "full": 30}),
    "codecs": SuitePart(codecs.measure, "Codecs", {"quick": 5, "full": 30}),
    "collectives": SuitePart(collectives.measure, "Collectives", {"quick": 60, "full": 1200}),
    "federated": SuitePart(federated.measure, "Federated rounds", {"quick": 30, "full": 300}),
    "parallel": SuitePart(data_parallel.measure, "Data-parallel steps", {"quick": 30, "full": 120}),
}
SCALE: dict[str, SuitePart] = {
    "clients": SuitePart(scale.measure_clients, "Growth with the clients", {"quick": 40, "full": 90}),
    "ranks": SuitePart(scale.measure_ranks, "Growth with the ranks", {"quick": 20, "full": 60}),
    "payload": SuitePart(scale.measure_payload, "Growth with the payload", {"quick": 20, "full": 140}),
}
ALL = PARTS | SCALE


def expected_s(names: Sequence[str], effort: Effort) -> int:
    """How long these parts take in all."""
    return sum(ALL[name].seconds.get(effort, 10) for name in names)


def measure(names: Sequence[str], effort: Effort) -> Iterator[PartRun]:
    """Measure the parts in turn. The run of one that fails has the reason, and the others go on."""
    for name in names:
        print(f"measuring: {name}, about {expected_s([name], effort)} s", file=sys.stderr, flush=True)
        facts, began_s, fault = machine(), time.perf_counter(), ""
        figures: list[Measurement] = []
        try:
            figures.extend(ALL[name].measure(effort))  # what came before a fault stays
        except Exception as error:
            traceback.print_exc()
            fault = fault_of(error)
        seconds = time.perf_counter() - began_s
        yield make_run(name, figures, facts=facts, seconds=seconds, configuration={"effort": effort}, fault=fault)
