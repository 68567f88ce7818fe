"""Sums through aggregators against those of the ranks alone: by each topology, with and without loss.

Workers and aggregators are processes of this machine with all data over DDS; each sum is checked to be exact. Direct
sums and those through aggregators take turns. A packet is lost by chance before its sender hands it to DDS.

Part ``within-host`` is of another kind: workers are on two hosts, network namespaces with links of a given rate, and
their aggregators on a third; ranks of a host add up first, or each one sends by itself.

``make bench PART=aggregation``. On one machine nothing can be won: direct sums have one process less on the same cores.
What the figures show is what the protocol costs, and what loss adds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gradbus.actors.in_network.aggregator import AggregatorActor, AggregatorConfig
from gradbus.commands.lab.conditions import LinkConditions
from gradbus.commands.lab.namespaces import Host, hosts_on_a_switch
from gradbus.experiments.bench.command import Benchmark, Part, add_effort
from gradbus.experiments.bench.processes import LEASE_S, BenchRank, run_ranks
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.timing import cpu_s, in_turns, size_text
from gradbus.runtime.collectives import join_group
from gradbus.runtime.collectives.in_network import join_aggregator
from gradbus.runtime.in_network.options import InNetworkOptions, InNetworkRoute
from gradbus.runtime.in_network.topology import SINGLE, AggregatorTopology, WithinHost
from gradbus.runtime.network.network_config import NetworkConfig

TOPOLOGIES: Mapping[str, AggregatorTopology] = {
    "single": SINGLE,
    "2 side by side": AggregatorTopology(roots=2),
    "tree": AggregatorTopology(kind="tree", leaves=2),
    "2 trees": AggregatorTopology(kind="tree", leaves=2, roots=2),
    "chain": AggregatorTopology(kind="chain", leaves=2),
}
LOSSES = (0.0, 0.01, 0.1)
WORLDS = (2, 3, 4)
NUMEL = 1 << 20
RETRANSMIT_S = 0.05  # above what a packet takes here at worst


@dataclass(frozen=True, kw_only=True)
class AggregatorBench:
    """One set-up: so many workers, and the aggregators of a topology, by whose side the rest is measured.

    Attributes:
        losses: one after the other. numel: int32 entries of a vector. repeats: sums of each way and loss.
        shared_memory: whether processes of one host may use it. retransmit_s: above what a packet takes at worst.
    """

    world: int
    topology: AggregatorTopology = SINGLE
    route: InNetworkRoute = "ina"
    losses: tuple[float, ...] = (0.0,)
    numel: int = NUMEL
    block_elems: int = 1 << 16
    repeats: int = 9
    shared_memory: bool = False
    retransmit_s: float = RETRANSMIT_S


@dataclass
class WorkerTimes:
    """Holds what one worker has seen at one loss: seconds of each sum by way; processor seconds and bytes of a sum
    through aggregators, and how many of its packets were lost."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"direct": [], "aggregated": []})
    processor_s: dict[str, float] = field(default_factory=lambda: {"direct": 0.0, "aggregated": 0.0})
    sent_bytes: float = 0.0
    lost_packets: int = 0


async def member(place: BenchRank) -> Any:
    """The role of a worker, or of an aggregator, which are the ranks after the workers. Its spec: AggregatorBench."""
    plan: AggregatorBench = place.spec
    async with place.bus(NetworkConfig(lease_s=LEASE_S, shared_memory=plan.shared_memory)) as bus:
        if place.rank >= plan.world:
            actor = AggregatorActor(
                AggregatorConfig(slots=1024, block_elems=plan.block_elems, retransmit_s=plan.retransmit_s)
            )
            used_s = cpu_s()
            for _ in plan.losses:
                await actor.serve(bus, plan.world, node=place.rank - plan.world, nodes=plan.topology.num_nodes)
            return cpu_s() - used_s
        async with join_group(bus, rank=place.rank, world=plan.world, name="workers") as group:
            found = []
            for loss in plan.losses:
                options = InNetworkOptions(
                    route=plan.route,
                    block_elems=plan.block_elems,
                    topology=plan.topology,
                    loss=loss,
                    timeout_s=30.0,
                    retransmit_s=plan.retransmit_s,
                )
                async with join_aggregator(group, options) as sums:
                    found.append(await _take_turns(group, sums, plan))
            return found


async def _take_turns(group: Any, sums: Any, plan: AggregatorBench) -> WorkerTimes:
    inputs = [
        torch.randint(-(1 << 27), 1 << 27, (plan.numel,), generator=torch.Generator().manual_seed(rank)).int()
        for rank in range(group.world)
    ]
    own, expected = inputs[group.rank], torch.stack(inputs).sum(0).int()
    times, before = WorkerTimes(), 0
    ways = tuple(times.seconds)
    for number, way in enumerate((*ways, *in_turns(ways, plan.repeats))):
        await group.barrier(f"before {number}")
        began_s, used_s = time.perf_counter(), cpu_s()
        if way == "direct":
            total = await group.all_reduce("direct", own, op="sum")
        else:
            before = sums.sent_bytes
            total, _ = await sums.all_reduce(own)
        seconds, used_s = time.perf_counter() - began_s, cpu_s() - used_s
        if not total.equal(expected):
            raise AssertionError(f"rank {group.rank}: sum {number}, {way}, is not that of the workers' vectors")
        if number >= len(ways):  # the first turn warms up
            times.seconds[way].append(seconds)
            times.processor_s[way] += used_s / plan.repeats
    if sums.session is None:
        raise AssertionError(f"rank {group.rank}: the aggregators were lost, and sums made without them")
    times.sent_bytes, times.lost_packets = sums.sent_bytes - before, sums.session.streams.lost_packets
    return times


def measure(plan: AggregatorBench, name: str, hosts: tuple[Host, ...] = ()) -> Iterator[Measurement]:
    """Milliseconds of a sum through aggregators against a direct one, the slowest worker of each turn, by loss."""
    ends = run_ranks(
        member,
        plan.world + plan.topology.num_nodes,
        plan,
        transport="one-host" if plan.shared_memory else "dds-only",
        timeout_s=600.0,
        hosts=hosts,
    )
    workers: list[list[WorkerTimes]] = ends[: plan.world]
    aggregators_s = sum(ends[plan.world :]) / (len(plan.losses) * (plan.repeats + 1))
    for at, loss in enumerate(plan.losses):
        ranks = [worker[at] for worker in workers]
        ms = {
            way: [1e3 * max(turn) for turn in zip(*(rank.seconds[way] for rank in ranks), strict=True)]
            for way in ranks[0].seconds
        }
        typical_ms = statistics.median(ms["aggregated"])
        used_ms = {way: 1e3 * max(rank.processor_s[way] for rank in ranks) for way in ms}
        note = (
            f"{4 * plan.numel / typical_ms / 1e3:.0f} MB/s; {max(rank.sent_bytes for rank in ranks) / 1e6:.1f} MB of a "
            f"worker; processor: a worker {used_ms['aggregated']:.0f} ms, direct {used_ms['direct']:.0f} ms, "
            f"aggregators {1e3 * aggregators_s:.0f} ms in all"
        )
        if loss:
            note += f"; {sum(rank.lost_packets for rank in ranks)} packets of workers lost"
        title = f"sum of {size_text(4 * plan.numel)}, {plan.world} workers, {name}, loss {loss:.0%}"
        yield measurement(title, "ms", ms["aggregated"], against=("direct", ms["direct"]), note=note)


def _measure_all(chosen: argparse.Namespace, losses: tuple[float, ...]) -> Iterator[Measurement]:
    effort = chosen.effort
    worlds = [chosen.world] if chosen.world else {"tiny": (2,), "quick": (2, 4), "full": WORLDS}[effort]
    names = [chosen.topology] if chosen.topology else {"tiny": ("tree",)}.get(effort, tuple(TOPOLOGIES))
    for world in worlds:
        for name in names:
            plan = AggregatorBench(
                world=world,
                topology=TOPOLOGIES[name],
                losses=losses,
                numel=(1 << 16) if effort == "tiny" else chosen.numel,
                block_elems=(1 << 12) if effort == "tiny" else 1 << 16,
                repeats={"tiny": 2, "quick": 5, "full": 9}[effort],
            )
            yield from measure(plan, name)


def _measure_within_host(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Four workers on two hosts, two aggregators on a third one."""
    effort = chosen.effort
    with hosts_on_a_switch(3, LinkConditions(rate_bit_s=1e6 * chosen.rate_mbit_s)) as network:
        ways: tuple[tuple[WithinHost, str], ...] = (
            ("none", "each rank sends"),
            ("ring-reduce", "the host adds up first"),
        )
        for within_host, text in ways:
            plan = AggregatorBench(
                world=4,
                topology=AggregatorTopology(roots=2, within_host=within_host),
                shared_memory=True,
                retransmit_s=4.0,  # a window of whole vectors of all workers waits for the aggregators' link
                numel=(1 << 16) if effort == "tiny" else chosen.numel,
                block_elems=(1 << 12) if effort == "tiny" else 1 << 16,
                repeats={"tiny": 2, "quick": 5, "full": 9}[effort],
            )
            yield from measure(plan, f"2 hosts at {chosen.rate_mbit_s:g} Mbit/s, {text}", network.hosts)


def _options(parser: argparse.ArgumentParser) -> None:
    add_effort(parser, "fewer repeats, 2 and 4")
    parser.add_argument("--world", type=int, choices=WORLDS, help="only so many workers")
    parser.add_argument("--topology", choices=list(TOPOLOGIES), help="only this")
    parser.add_argument("--rate-mbit-s", type=float, default=100.0, help="of each host's link, of part within-host")
    parser.add_argument("--numel", type=int, default=NUMEL, help="int32 entries of a vector")


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        "topologies": Part(lambda it: _measure_all(it, LOSSES[:1]), "each topology, without loss", 60, 40),
        "loss": Part(
            lambda it: _measure_all(it, LOSSES[1:]), "each topology, with 1 and 10 % of the packets lost", 180, 60
        ),
        "within-host": Part(_measure_within_host, "ranks of two hosts add up before they send", 60, 40),
    },
    _options,
    default=("topologies", "loss"),  # the other needs network namespaces
)
