"""Aggregators that are lost and come back, that are not there at the start, and that free what is never finished."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import numpy as np
import pytest
from in_network_job import ELEMS, Run, aggregators, job, options, serve, total_of, values, work
from patience import eventually
from structlog.testing import capture_logs

from gradbus.actors.in_network import aggregator
from gradbus.runtime.collectives.in_network import InNetworkSum
from gradbus.runtime.errors import BarrierTimeout
from gradbus.runtime.in_network.packets import AGGREGATOR, Packet, PacketKind
from gradbus.runtime.in_network.topology import AggregatorTopology

WORLD = 2


async def until_returned(rank: int, sums: InNetworkSum) -> list[bool]:
    """Sums until one went through an aggregator that has returned: for each, whether it began with one."""
    began_with = []
    while sums.returns == 0 or began_with[-3:] != [True] * 3:
        step = len(began_with)
        began_with.append(sums.uses_aggregator)
        total, _ = await sums.all_reduce(values(rank, step))
        assert total.equal(total_of(WORLD, step))
    return began_with


@pytest.mark.parametrize("topology", [{}, {"kind": "tree", "leaves": 2}])
def test_an_aggregator_that_comes_back_is_used_again_by_all_workers_at_one_sum(
    place: dict[str, Any], run: Run, topology: dict[str, Any]
) -> None:
    nodes, retry_s = AggregatorTopology(**topology).num_nodes, 0.4
    asked = options(topology=topology, retry_s=retry_s)

    async def serve_again(actor: Any, node: int) -> None:
        while True:
            await serve(place, actor, WORLD, node, nodes)

    begun: set[int] = set()

    async def program(rank: int, sums: InNetworkSum) -> list[bool]:
        begun.add(rank)
        return await until_returned(rank, sums)

    async def main() -> tuple[list[list[bool]], float]:
        actors = aggregators(nodes)
        serving = [asyncio.create_task(serve_again(actor, node)) for node, actor in enumerate(actors)]
        workers = [asyncio.create_task(work(place, rank, WORLD, asked, program)) for rank in range(WORLD)]
        await eventually(lambda: len(begun) == WORLD)  # one that is lost while they join fails that
        serving[-1].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving[-1]
        lost_s = time.monotonic()
        serving[-1] = asyncio.create_task(serve_again(actors[-1], nodes - 1))
        found = await asyncio.gather(*workers)
        for one in serving:
            one.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        return found, time.monotonic() - lost_s

    with capture_logs() as lines:
        (first, second), seconds = run(main)
    assert first == second
    assert False in first
    assert seconds > retry_s
    returned = [line for line in lines if line["event"] == "aggregator used again"]
    assert [line["from_sum"] for line in returned] == [first.index(True, first.index(False)) + 1] * WORLD


def test_a_run_that_finds_no_aggregator_may_go_on_without_it_until_it_is_there(place: dict[str, Any], run: Run) -> None:
    have_added: set[int] = set()

    async def program(rank: int, sums: InNetworkSum) -> list[bool]:
        assert not sums.uses_aggregator
        await sums.all_reduce(values(rank))
        have_added.add(rank)
        return await until_returned(rank, sums)

    async def main() -> list[list[bool]]:
        asked = options(without="direct")
        workers = [
            asyncio.create_task(work(place, rank, WORLD, asked, program, timeout_s=0.5)) for rank in range(WORLD)
        ]
        await eventually(lambda: len(have_added) == WORLD)
        serving = asyncio.create_task(serve(place, aggregators()[0], WORLD))
        found = await asyncio.gather(*workers)
        await serving
        return found

    first, second = run(main)
    assert first == second


def test_a_run_that_finds_no_aggregator_fails_otherwise(place: dict[str, Any], run: Run) -> None:
    async def program(rank: int, sums: InNetworkSum) -> None:
        raise AssertionError("joined")

    async def main() -> None:
        ends = await asyncio.gather(
            *(
                work(place, rank, WORLD, options(topology={"kind": "chain", "leaves": 2}), program, timeout_s=0.5)
                for rank in range(WORLD)
            ),
            return_exceptions=True,
        )
        for end in ends:
            assert isinstance(end, BarrierTimeout)
            assert "one of 2 aggregators, missing are nodes [0, 1]" in str(end)

    run(main)


@pytest.mark.parametrize("topology", [{}, {"kind": "chain", "leaves": 2}])
def test_slots_of_a_worker_that_sends_nothing_are_freed_after_the_lease(
    place: dict[str, Any], run: Run, topology: dict[str, Any]
) -> None:
    actors = aggregators(AggregatorTopology(**topology).num_nodes, lease_s=0.4)

    async def program(rank: int, sums: InNetworkSum) -> Any:
        if rank == 1:
            await eventually(lambda: any(actor.expired for actor in actors))
        return (await sums.all_reduce(values(rank)))[0], sums.uses_aggregator

    with capture_logs() as lines:
        found = run(lambda: job(place, WORLD, actors, options(topology=topology, retry_s=0.0), program))
    for total, uses_aggregator in found:
        assert total.equal(total_of(WORLD))
        assert not uses_aggregator
    assert all(actor.free_slots == 64 for actor in actors)
    assert any(line["event"] == "slots freed" and 1 in line["waits_for"] for line in lines)


def test_slots_that_a_worker_takes_and_never_uses_are_freed_after_the_lease(place: dict[str, Any], run: Run) -> None:
    actors = aggregators(lease_s=0.4)

    async def program(rank: int, sums: InNetworkSum) -> Any:
        session = sums.session
        assert session is not None
        if rank == 0:
            for group in range(1000, 1040, 2):
                session.streams.post(WORLD, Packet(PacketKind.RESERVE, 1, 0, group, 0, AGGREGATOR))
            # Of two windows of two groups this worker gets the half, and the rest is for the other.
            await eventually(lambda: actors[0].free_slots <= 64 - 2 * WORLD)
            assert actors[0].free_slots >= 64 - 4 * WORLD
        await sums.all_reduce(values(rank))
        await session.failed.wait()
        return (await sums.all_reduce(values(rank, 1)))[0]

    for total in run(lambda: job(place, WORLD, actors, options("ra-ina", retry_s=0.0), program)):
        assert total.equal(total_of(WORLD, 1))
    assert (actors[0].expired, actors[0].free_slots) == (1, 64)


def test_what_is_dropped_is_logged_while_the_job_goes_on(
    place: dict[str, Any], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregator, "CHECK_S", 0.05)
    lines: list[Any] = []

    async def program(rank: int, sums: InNetworkSum) -> None:
        assert sums.session is not None
        foreign = Packet(PacketKind.CONTRIBUTION, 99, 0, 0, rank, AGGREGATOR, values=np.zeros(ELEMS, dtype=np.int32))
        sums.session.streams.post(WORLD, foreign)
        await sums.all_reduce(values(rank))
        await eventually(lambda: {"packets dropped", "job goes on"} <= {line["event"] for line in lines})

    with capture_logs() as captured:
        lines = captured
        run(lambda: job(place, WORLD, aggregators(report_s=0.2), options(), program))
    dropped = [line for line in lines if line["event"] == "packets dropped"]
    assert sum(line["count"] for line in dropped) == WORLD
    assert all(line["job"] == place["job"] for line in dropped)
