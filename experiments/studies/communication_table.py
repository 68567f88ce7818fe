"""The table of docs/algorithms.md: what ways to combine gradients cost, counted for 2, 4 and 8 ranks.

    python -m gradbus.experiments.studies.communication_table [--write PAGE]

Bytes are counted where ranks hand them to DDS and where they take them from it, headers included, in a run of real
ranks: buses of this process, without shared memory, one vector for each rank. What goes to all ranks is handed over
once, and received by each. Rounds are the most messages that follow one another until a rank has its
result; they are counted on the same programs in lockstep, and through an aggregator on the packets of its protocol.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradbus.actors.in_network.aggregator import AggregatorActor, AggregatorConfig
from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.runtime import logs
from gradbus.runtime.algorithms.base import Place, Step, bucket_of, make_algorithm
from gradbus.runtime.algorithms.requests import AllReduce, Program
from gradbus.runtime.algorithms.routes import ROUTES, Route
from gradbus.runtime.bus.bus import Bus, connect
from gradbus.runtime.collectives import Group, join_group
from gradbus.runtime.collectives.in_network import join_aggregator
from gradbus.runtime.collectives.programs import run_program
from gradbus.runtime.in_network.options import InNetworkOptions
from gradbus.runtime.in_network.packets import WORKERS, Packet
from gradbus.runtime.in_network.topology import SINGLE
from gradbus.runtime.in_network.tree import TreeNode
from gradbus.runtime.in_network.worker import RingWorker, WorkerConfig
from gradbus.runtime.network.network_config import NetworkConfig

WORLDS = (2, 4, 8)
NUMEL = 1 << 18
"""Entries of the vector, float32 or int32: so many that headers are less than the last digit shown."""
DOMAIN = 93
_BLOCK_ELEMS = 1 << 14
_TIMEOUT_S = 120.0

ProgramsOf = Callable[[Place, Tensor], list[Program[Any]]]
"""Programs of a rank, one after the other, of which the last one is counted."""


@dataclass(frozen=True, slots=True)
class CommunicationWay:
    """A way to combine vectors of K bytes on N ranks: its orders, and the programs of a rank; None: an aggregator."""

    name: str
    latency: str
    bandwidth: str
    programs: ProgramsOf | None


@dataclass(frozen=True, slots=True)
class Counted:
    """Holds what was counted in one world.

    Attributes:
        rounds: the most messages that followed one another. sent, received: by the busiest member, in K. all_received:
            by all members together.
    """

    rounds: int
    sent: float
    received: float
    all_received: float


@dataclass(slots=True)
class MemberBytes:
    """Bytes of one member."""

    sent: int = 0
    received: int = 0

    @classmethod
    def of(cls, bus: Bus, before: MemberBytes | None = None) -> MemberBytes:
        """Return what a bus has sent and received, less what it had before."""
        start = before or cls()
        return cls(sum(bus.sent_bytes.values()) - start.sent, sum(bus.received_bytes.values()) - start.received)


def _route(name: Route) -> ProgramsOf:
    return lambda place, x: [ROUTES[name](place, x)]


def _sharded(place: Place, x: Tensor) -> list[Program[Any]]:
    def program() -> Program[Tensor]:
        total: Tensor = yield AllReduce("sharded", x, route="shards")
        return total

    return [program()]


def _decentralized(peers: str) -> ProgramsOf:
    def programs(place: Place, x: Tensor) -> list[Program[Any]]:
        """In the first step neighbours learn whole weights from each other, where they send changes."""
        algorithm = make_algorithm("decentralized", place, {"peers": peers})
        bucket = bucket_of({"weights": x.clone()})
        algorithm.begin(bucket)

        def second() -> Program[None]:
            algorithm.commit()
            yield from algorithm.exchange(bucket, Step(1))

        return [algorithm.exchange(bucket, Step(0)), second()]

    return programs


WAYS = (
    CommunicationWay("ring (route `ring`)", "2 (N - 1) a", "2 (N - 1) / N K", _route("ring")),
    CommunicationWay("tree (route `tree`)", "2 log2 N a", "log2 N K", _route("tree")),
    CommunicationWay(
        "halving and doubling (route `halving-doubling`)", "2 log2 N a", "2 (N - 1) / N K", _route("halving-doubling")
    ),
    CommunicationWay("parameter server, rank 0 (route `star`)", "2 a", "(N - 1) K", _route("star")),
    CommunicationWay("parameter server, a share on each rank (route `shards`)", "2 a", "2 (N - 1) / N K", _sharded),
    CommunicationWay("in-network, one aggregator (route `ina`)", "2 a", "K a rank, N K the aggregator", None),
    CommunicationWay("decentralised, one other rank (`shift-one`)", "a", "K", _decentralized("shift-one")),
    CommunicationWay("decentralised, both neighbours in 8 bits (`ring`)", "a", "K / 2", _decentralized("ring")),
)


# Bytes, on real ranks


@asynccontextmanager
async def _buses(job: str, count: int, domain: int) -> AsyncIterator[list[Bus]]:
    async with AsyncExitStack() as stack:
        network = NetworkConfig(shared_memory=False, lease_s=30.0)
        yield [await stack.enter_async_context(connect(job, domain=domain, network=network)) for _ in range(count)]


async def _in_group(
    bus: Bus, rank: int, world: int, act: Callable[[Group], Awaitable[Any]], prepare: Callable[[Group], Awaitable[Any]]
) -> MemberBytes:
    """Return what a rank sends and receives for what it does in a group of all ranks, after it has prepared it."""
    async with join_group(bus, rank=rank, world=world, timeout_s=_TIMEOUT_S) as group:
        await prepare(group)
        await group.barrier("before")
        before = MemberBytes.of(bus)
        await group.barrier("all have counted")  # nothing arrives before
        await act(group)
        await group.barrier("after")  # all has arrived, by all
        used = MemberBytes.of(bus, before)
        await group.barrier("end")
        return used


async def _traffic_of(way: CommunicationWay, world: int, job: str, domain: int) -> list[MemberBytes]:
    vector = torch.arange(NUMEL)
    async with _buses(job, world + (way.programs is None), domain) as buses:
        if way.programs is None:
            return await _traffic_through_aggregator(buses, world, vector.int())
        of_ranks = [way.programs(Place(rank, world), vector.float()) for rank in range(world)]

        async def run(group: Group, programs: Sequence[Program[Any]], name: str) -> None:
            for program in programs:
                await run_program(group, program, name, compute=asyncio.to_thread)

        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    _in_group(
                        buses[rank],
                        rank,
                        world,
                        lambda group: run(group, of_ranks[group.rank][-1:], "counted"),
                        lambda group: run(group, of_ranks[group.rank][:-1], "before"),
                    )
                )
                for rank in range(world)
            ]
        return [one.result() for one in running]


async def _traffic_through_aggregator(buses: Sequence[Bus], world: int, vector: Tensor) -> list[MemberBytes]:
    """Return those of the workers, and of the aggregator."""
    options = InNetworkOptions(route="ina", block_elems=_BLOCK_ELEMS, retransmit_s=10.0)
    actor = AggregatorActor(AggregatorConfig(slots=1024, block_elems=_BLOCK_ELEMS, retransmit_s=10.0))
    joined, found = [MemberBytes()] * (world + 1), [MemberBytes()] * (world + 1)

    async def work(rank: int) -> None:
        async with (
            join_group(buses[rank], rank=rank, world=world, timeout_s=_TIMEOUT_S) as group,
            join_aggregator(group, options, timeout_s=_TIMEOUT_S) as sums,
        ):
            await group.barrier("before")
            for member in (rank, world) if rank == 0 else (rank,):
                joined[member] = MemberBytes.of(buses[member])
            await group.barrier("all have counted")
            await sums.all_reduce(vector)
            await group.barrier("after")
            for member in (rank, world) if rank == 0 else (rank,):
                found[member] = MemberBytes.of(buses[member], joined[member])

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(actor.serve(buses[world], world, timeout_s=_TIMEOUT_S))
        for rank in range(world):
            tasks.create_task(work(rank))
    return found


# Rounds, on the same programs and packets


def _rounds_of(way: CommunicationWay, world: int) -> int:
    if way.programs is None:
        return _rounds_through_aggregator(world)
    before = 0
    for programs in zip(*(way.programs(Place(rank, world), torch.zeros(64)) for rank in range(world)), strict=True):
        lockstep = Lockstep(world)
        lockstep.run(programs)
        before = max(lockstep.cost.rounds)
    return before


def _rounds_through_aggregator(world: int) -> int:
    """Deliver the packets of one group, each with the number of those that it came after."""
    nodes = SINGLE.nodes(["host"] * world, window_groups=1, block_elems=1)
    (node,) = (TreeNode(config) for config in nodes.values())
    workers = [RingWorker(WorkerConfig(rank, world, block_elems=1, uses_ring=False)) for rank in range(world)]
    rounds = [0] * (world + 1)
    waiting: deque[tuple[Packet, int]] = deque()
    for worker in workers:
        blocks = np.ones((1, world, 1), dtype=np.int32)
        waiting.extend((packet, 1) for packet in worker.submit(blocks, np.empty_like(blocks), 0.0))
    while not all(worker.first_unfinished == worker.end for worker in workers):
        packet, number = waiting.popleft()
        to = packet.destination if 0 <= packet.destination < world else world
        assert packet.destination != WORKERS
        rounds[to] = max(rounds[to], number)
        answers = node.receive(packet, 0.0) if to == world else workers[to].receive(packet, 0.0)
        waiting.extend((answer, rounds[to] + 1) for answer in answers)
    return max(rounds[:world])


# The table


def count(world: int, *, domain: int = DOMAIN, job: str = "") -> dict[str, Counted]:
    """Count all ways in one world, by their names. ``job``: begins the names of its jobs; empty: as of this process."""
    job, found = job or f"communication-{os.getpid()}", {}
    for number, way in enumerate(WAYS):
        members = asyncio.run(_traffic_of(way, world, f"{job}-{world}-{number}", domain))
        sent, received = [one.sent for one in members], [one.received for one in members]
        size = 4 * NUMEL
        found[way.name] = Counted(_rounds_of(way, world), max(sent) / size, max(received) / size, sum(received) / size)
    return found


def cells_of(way: CommunicationWay, counted: Sequence[Counted]) -> list[str]:
    """Return the cells of a row. ``counted``: in the worlds of :data:`WORLDS`."""
    amounts = ("sent", "received", "all_received")
    return [
        way.name,
        way.latency,
        way.bandwidth,
        ", ".join(str(one.rounds) for one in counted),
        *(", ".join(f"{getattr(one, amount):.1f}" for one in counted) for amount in amounts),
    ]


def table(counted: dict[int, dict[str, Counted]]) -> str:
    """Return the table in Markdown. ``counted``: by number of ranks."""
    head = ["way", "latency", "busiest member sends", "rounds", "it sent, K", "it received, K", "all received, K"]
    rows = [cells_of(way, [counted[world][way.name] for world in WORLDS]) for way in WAYS]
    lines = "".join(f"| {' | '.join(line)} |\n" for line in (head, *rows))
    return f"Counted for N = {', '.join(map(str, WORLDS))}:\n\n" + lines.replace(
        "\n", "\n" + "|---" * len(head) + "|\n", 1
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, and print the table or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page whose table is replaced")
    chosen = parser.parse_args(arguments)
    logs.configure(level="warning")
    text = table({world: count(world) for world in WORLDS})
    if chosen.write is None:
        print(text)
        return
    page = chosen.write.read_text(encoding="utf-8")
    new, places = re.subn(r"^Counted for N = .*\n\n(?:\|.*\n)+", lambda _: text, page, flags=re.MULTILINE)
    if places != 1:
        raise SystemExit(f"{chosen.write}: expected one table behind 'Counted for N = ', found {places}")
    chosen.write.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
