"""What is won by one measure after the other where the link is slow: star, ring, compression, overlap; and by hosts.

Ranks are processes in network namespaces of this machine, whose links to a switch are limited to a rate (tbf), and so
slow that the processors here are not the bottleneck. ``make bench PART=ladder``; it needs the right to make namespaces.

``hosts``: two hosts of two ranks at 1 Gbit/s, the route over hosts beside reduce-scatter and gather over all.

``pipeline``: two hosts of one rank at 400 Mbit/s, where a step whose results come a step later should take as long as
computing or exchanging alone, whichever is longer. What these take is measured in runs without overlap, by turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradbus import models
from gradbus.commands.lab.conditions import LinkConditions
from gradbus.commands.lab.namespaces import hosts_on_a_switch, sent_bytes
from gradbus.experiments.bench.command import Benchmark, Part, add_effort
from gradbus.experiments.bench.data_parallel import EVERY_STEP, steps_of, typical
from gradbus.experiments.bench.processes import BenchRank, run_ranks
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.rungs import RUNGS, TARGET, LadderPlan, climb, link_share
from gradbus.experiments.bench.timing import by_turns, in_turns
from gradbus.experiments.bench.training import Training
from gradbus.runtime.algorithms.base import Place
from gradbus.runtime.algorithms.requests import AllReduce, Program
from gradbus.runtime.algorithms.routes import hierarchical
from gradbus.runtime.collectives.programs import run_program
from gradbus.runtime.compute import ComputeThread

HOSTS_RATE_MBIT_S = 1000.0
HOSTS_NUMEL, TINY_NUMEL = 4 << 20, 1 << 20
PIPELINE_RATE_MBIT_S = 400.0
_PIPELINE_WARM_UP = 4


@dataclass(frozen=True, kw_only=True)
class RoutesPlan:
    """Which ways are timed, how often, on vectors of ``numel`` float32."""

    ways: tuple[str, ...]
    repeats: int
    numel: int


def _by_shards(place: Place, x: torch.Tensor) -> Program[torch.Tensor]:
    total: torch.Tensor = yield AllReduce("sum", x, route="shards")
    return total


WAYS: Mapping[str, Callable[[Place, torch.Tensor], Program[torch.Tensor]]] = {
    "shards": _by_shards,
    "hierarchical": hierarchical,
}


async def time_routes(place: BenchRank) -> list[tuple[str, float, int]]:
    """The role of a rank: way, seconds, and bytes that left its host in that time, of each turn. Its spec: RoutesPlan.

    Every rank of a host counts for the whole host.
    """
    plan: RoutesPlan = place.spec
    assert place.host is not None
    compute, found = ComputeThread(f"rank-{place.rank}"), []
    at = Place(
        place.rank, place.world, tuple(f"host {r * len(place.hosts) // place.world}" for r in range(place.world))
    )
    x = torch.full((plan.numel,), float(place.rank))
    try:
        async with place.group() as group:
            for number, way in enumerate((*plan.ways, *in_turns(plan.ways, plan.repeats))):
                await group.barrier(f"before {number}")
                before, began_s = sent_bytes(place.host.interface), time.perf_counter()
                total = await run_program(group, WAYS[way](at, x), f"{way} {number}", compute=compute.run)
                taken_s = time.perf_counter() - began_s
                assert float(total[0]) == float(total[-1]) == sum(range(place.world))
                await group.barrier(f"after {number}")  # all of it has left
                if number >= len(plan.ways):  # the first turn warms up
                    found.append((way, taken_s, sent_bytes(place.host.interface) - before))
    finally:
        compute.close()
    return found


def measure_hosts(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """The route over hosts against reduce-scatter and gather over all, by turns."""
    repeats = {"tiny": 1, "quick": 5, "full": 15}[chosen.effort]
    numel = TINY_NUMEL if chosen.effort == "tiny" else HOSTS_NUMEL
    plan = RoutesPlan(ways=tuple(WAYS), repeats=repeats, numel=numel)
    with hosts_on_a_switch(2, LinkConditions(rate_bit_s=1e6 * HOSTS_RATE_MBIT_S)) as network:
        ranks: list[list[tuple[str, float, int]]] = run_ranks(
            time_routes, 4, plan, hosts=network.hosts, timeout_s=300.0
        )
    ms: dict[str, list[float]] = {way: [] for way in WAYS}
    sent: dict[str, list[float]] = {way: [] for way in WAYS}
    for turns in zip(*ranks, strict=True):
        way = turns[0][0]
        ms[way].append(1e3 * max(taken_s for _, taken_s, _ in turns))
        sent[way].append(max(size for _, _, size in turns) / 1e6)
    size_mb = 4 * plan.numel / 1e6
    title = f"all-reduce of {size_mb:.1f} MB, 2 hosts of 2 ranks, 1 Gbit/s"
    shards = ("shards", ms["shards"])
    yield measurement(f"{title}, hierarchical", "ms", ms["hierarchical"], against=shards, at_most=1 / 1.5)
    note = f"payload 2 (M - 1) / M K = {size_mb:.1f} MB; the rest are headers and what was sent again"
    against = ("shards", sent["shards"])
    yield measurement(f"{title}: bytes", "MB", sent["hierarchical"], against=against, at_most=0.6, note=note)


def measure_pipeline(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """A dense step of the CNN with ``delay_steps = 1``, against the longer of computing and exchanging."""
    launches, steps = {"tiny": (1, 3), "quick": (1, 16), "full": (3, 24)}[chosen.effort]
    batch_size = 4 if chosen.effort == "tiny" else 64
    ways: Mapping[str, Mapping[str, Any]] = {"pipeline": {"delay_steps": 1}, "apart": {"overlap": False}}
    with hosts_on_a_switch(2, LinkConditions(rate_bit_s=1e6 * PIPELINE_RATE_MBIT_S)) as network:

        def times(way: str) -> dict[str, list[list[float]]]:
            config = {**EVERY_STEP, **ways[way], "max_steps": _PIPELINE_WARM_UP + steps}
            run = Training(
                model=models.mnist_cnn,
                batch_size=batch_size,
                config=config,
                data="glyphs",
                samples=2 * batch_size * (_PIPELINE_WARM_UP + steps),  # one epoch: what is late is awaited at its end
            )
            return steps_of(run, _PIPELINE_WARM_UP, network.hosts)

        taken = by_turns({way: partial(times, way) for way in ways}, launches)
    step_ms = [1e3 * typical(max, run["step_s"]) for run in taken["pipeline"]]
    exchange_ms = [1e3 * typical(min, run["wait_s"]) for run in taken["apart"]]
    compute_ms = [
        1e3
        * statistics.median(
            max(step - wait for step, wait in zip(*ranks, strict=True))
            for ranks in zip(zip(*run["step_s"], strict=True), zip(*run["wait_s"], strict=True), strict=True)
        )
        for run in taken["apart"]
    ]
    title = f"dense step of the CNN, batch {batch_size}, 2 hosts, {PIPELINE_RATE_MBIT_S:g} Mbit/s"
    longer = [max(both) for both in zip(compute_ms, exchange_ms, strict=True)]
    against, limit = ("max(compute, exchange)", longer), 1.1 if chosen.effort == "full" else None
    yield measurement(f"{title}: a step late", "ms", step_ms, against=against, at_most=limit)
    apart = [1e3 * typical(max, run["step_s"]) for run in taken["apart"]]
    yield measurement(f"{title}: without overlap", "ms", apart, against=("max(compute, exchange)", longer))
    yield measurement(f"{title}: compute", "ms", compute_ms)
    yield measurement(f"{title}: exchange", "ms", exchange_ms)


def measure_rungs(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Each rung against the first one."""
    plan = PLANS[chosen.effort]
    found = [climb(rung, plan) for rung in RUNGS]
    star = found[0]
    for one in found:
        target = f"{TARGET:.0%} after {one.to_target_s:.0f} s" if one.to_target_s else f"{TARGET:.0%} not reached"
        used = link_share(one.bytes_out, one.step_s, plan.rate_mbit_s)
        note = (
            f"{1 - one.compute_s / one.step_s:.0%} exchange, {one.samples_s:.0f} samples/s, "
            f"{one.bytes_out / 1e6:.2f} MB of the rank that sends most, {used:.0%} of its link, "
            f"{target} ({one.steps} steps); simulated {1e3 * one.simulated_step_s:.0f} ms"
        )
        name = f"step of the CNN, {plan.world} hosts, {plan.rate_mbit_s:g} Mbit/s: {one.rung}"
        yield measurement(name, "ms", [1e3 * one.step_s], against=("star", [1e3 * star.step_s]), note=note)


PLANS = {
    "tiny": LadderPlan(world=2, samples=128, batch_size=16, epochs=1, data="glyphs"),
    "quick": LadderPlan(samples=2048, epochs=2),
    "full": LadderPlan(),
}


def _options(parser: argparse.ArgumentParser) -> None:
    add_effort(parser, "fewer steps")


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        "rungs": Part(measure_rungs, "star, ring, compression, overlap at 200 Mbit/s", 300, 60, needs_mnist=True),
        "hosts": Part(measure_hosts, "hierarchical on two hosts at 1 Gbit/s", 60, 30),
        "pipeline": Part(measure_pipeline, "a step late, against the longer of computing and exchanging", 60, 20),
    },
    _options,
)
