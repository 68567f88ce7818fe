"""An aggregator and its workers over DDS: exact sums by every route, with and without loss, and when it dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from in_network_job import ELEMS, Run, aggregators, job, options, serve, total_of, values, work
from patience import eventually

import gradbus
from gradbus.runtime.collectives import packet_streams
from gradbus.runtime.collectives.in_network import InNetworkSum
from gradbus.runtime.collectives.packet_streams import PacketStreams, payload_limit
from gradbus.runtime.errors import CollectiveError, ConfigError
from gradbus.runtime.in_network.encoding import encode_packets
from gradbus.runtime.in_network.options import InNetworkOptions
from gradbus.runtime.in_network.packets import AGGREGATOR, Packet, PacketKind
from gradbus.runtime.in_network.tree import TreeNode


@pytest.mark.parametrize("route", ["ina", "ra-ina", "ra-ina-inline"])
@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_sums_are_exact_by_every_route(place: dict[str, Any], run: Run, route: str, loss: float) -> None:
    # Waits double up to a second: few groups, and a short first wait, so that a loaded machine adds few of these.
    world, numel, actors, lost = 3, 1500, aggregators(retransmit_s=0.01), 0

    async def program(rank: int, sums: InNetworkSum) -> list[Any]:
        nonlocal lost
        found = [await sums.all_reduce(values(rank, step, numel)) for step in range(2)]
        assert sums.uses_aggregator
        lost += sums.session.streams.lost_packets
        if route != "ina":  # whose lanes are the job's as long as it lasts
            await eventually(lambda: actors[0].free_slots == 64)  # its last acknowledgements are under way
        return found

    async def main() -> list[Any]:
        chosen = options(route, loss=loss, timeout_s=20.0, retransmit_s=0.01)
        return await job(place, world, actors, chosen, program)

    for found in run(main):
        for step, (total, overflowed) in enumerate(found):
            assert total.equal(total_of(world, step, numel))
            assert not overflowed
    assert (lost > 0) == (loss > 0)


@pytest.mark.parametrize("route", ["ina", "ra-ina"])
def test_a_sum_goes_on_without_an_aggregator_that_leaves(place: dict[str, Any], run: Run, route: str) -> None:
    world = 2

    async def main() -> list[Any]:
        both_have_one = asyncio.Barrier(world + 1)

        async def program(rank: int, sums: InNetworkSum) -> Any:
            first = await sums.all_reduce(values(rank))
            await both_have_one.wait()
            found = [first, *[await sums.all_reduce(values(rank, step)) for step in range(1, 60)]]
            return found, sums.uses_aggregator

        serving = asyncio.create_task(serve(place, aggregators()[0], world))
        workers = [asyncio.create_task(work(place, rank, world, options(route), program)) for rank in range(world)]
        await both_have_one.wait()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        return list(await asyncio.gather(*workers))

    for found, uses_aggregator in run(main):
        assert not uses_aggregator
        for step, (total, _) in enumerate(found):
            assert total.equal(values(0, step) + values(1, step))


def lies(monkeypatch: pytest.MonkeyPatch, change: Callable[[Packet], Packet]) -> None:
    """An aggregator that changes its results."""
    receive = TreeNode.receive

    def lying(self: TreeNode, packet: Packet, now_s: float) -> list[Packet]:
        answers = receive(self, packet, now_s)
        return [change(answer) if answer.kind is PacketKind.RESULT else answer for answer in answers]

    monkeypatch.setattr(TreeNode, "receive", lying)


def another_sum(result: Packet) -> Packet:
    assert result.values is not None
    return replace(result, values=result.values + 1) if result.group == 1 else result


@pytest.mark.parametrize(
    ("change", "stays"), [(another_sum, False), (lambda result: replace(result, has_overflowed=True), True)]
)
def test_an_aggregator_that_lies_changes_no_sum(
    place: dict[str, Any], run: Run, monkeypatch: pytest.MonkeyPatch, change: Any, stays: bool
) -> None:
    lies(monkeypatch, change)
    actors = aggregators()

    async def program(rank: int, sums: InNetworkSum) -> Any:
        total, overflowed = await sums.all_reduce(values(rank))
        assert sums.uses_aggregator == stays
        again, _ = await sums.all_reduce(values(rank, 1))
        return total, again, overflowed

    for total, again, overflowed in run(lambda: job(place, 2, actors, options("ina"), program)):
        assert total.equal(values(0) + values(1))
        assert again.equal(values(0, 1) + values(1, 1))
        assert not overflowed
    assert actors[0].free_slots == 64


def test_a_worker_that_is_late_costs_nobody_the_aggregator(place: dict[str, Any], run: Run) -> None:
    late = asyncio.Event()

    async def program(rank: int, sums: InNetworkSum) -> Any:
        if rank == 1:
            await late.wait()
        else:
            asyncio.get_running_loop().call_later(1.0, late.set)
        await sums.all_reduce(values(rank))
        return sums.uses_aggregator

    async def main() -> Any:
        actors = aggregators()
        return await job(place, 2, actors, options("ina", timeout_s=0.4), program)

    assert run(main) == [True, True]


def test_a_silent_aggregator_is_left_and_changes_nothing_afterwards(
    place: dict[str, Any], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, held = TreeNode.receive, []

    def silent(self: TreeNode, packet: Packet, now_s: float) -> list[Packet]:
        held.extend(receive(self, packet, now_s))
        return []

    monkeypatch.setattr(TreeNode, "receive", silent)
    actors = aggregators(retransmit_s=0.5)

    async def program(rank: int, sums: InNetworkSum) -> Any:
        own, session = values(rank), sums.session
        assert session is not None
        total, _ = await sums.all_reduce(own)
        assert not sums.uses_aggregator
        expected = total.clone()
        own.zero_()
        session.receive(2, [packet for packet in held if packet.destination in (rank, -2)])
        assert total.equal(expected)
        await eventually(lambda: actors[0].free_slots == 64)
        return total

    for total in run(lambda: job(place, 2, actors, options("ina", timeout_s=0.4), program)):
        assert total.equal(values(0) + values(1))


def test_a_sum_has_its_own_bytes_and_the_aggregator_may_have_been_idle_for_long(
    place: dict[str, Any], run: Run
) -> None:
    numel = 4096

    async def program(rank: int, sums: InNetworkSum) -> Any:
        handles = [sums.start(f"sum {step}", values(rank, step, numel)) for step in range(2)]
        for step, handle in enumerate(handles):
            assert (await handle).equal(total_of(2, step, numel))
        return [(handle.sent_bytes, handle.received_bytes) for handle in handles]

    async def main() -> Any:
        async with gradbus.connect(**place) as bus:
            patience_s = 1.0
            idle = asyncio.create_task(aggregators()[0].serve(bus, 2, timeout_s=patience_s, is_idle=True))
            done, _ = await asyncio.wait([idle], timeout=patience_s + 0.1)
            assert not done
            found = await asyncio.gather(*(work(place, rank, 2, options(), program) for rank in range(2)))
            await idle
            return found

    for one in run(main):
        for sent_bytes, received_bytes in one:  # a gradient and some headers, of this sum alone
            assert 4 * numel < sent_bytes < 6 * numel
            assert 4 * numel < received_bytes < 6 * numel


def test_a_caller_that_is_cancelled_leaves_the_sum_to_the_others(place: dict[str, Any], run: Run) -> None:
    async def program(rank: int, sums: InNetworkSum) -> Any:
        if rank == 0:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await sums.all_reduce(values(0), "one")
        else:
            assert (await sums.all_reduce(values(1), "one"))[0].equal(values(0) + values(1))
        return (await sums.all_reduce(values(rank, 1), "two"))[0]

    async def main() -> Any:
        actors = aggregators()
        return await job(place, 2, actors, options("ra-ina"), program)

    for total in run(main):
        assert total.equal(values(0, 1) + values(1, 1))


def test_workers_that_make_different_calls_are_told(place: dict[str, Any], run: Run) -> None:
    async def program(rank: int, sums: InNetworkSum) -> Any:
        with pytest.raises(CollectiveError, match="different calls"):
            await sums.all_reduce(values(rank), f"of rank {rank}")

    actors = aggregators()
    run(lambda: job(place, 2, actors, options("ra-ina"), program))


def test_workers_with_different_options_are_told(place: dict[str, Any], run: Run) -> None:
    async def program(rank: int, sums: InNetworkSum) -> None:
        raise AssertionError("joined")

    async def main() -> None:
        ends = await asyncio.gather(
            serve(place, aggregators()[0], 2),
            *(work(place, rank, 2, options("ina", verify=rank == 0), program) for rank in range(2)),
            return_exceptions=True,
        )
        assert ends[0] is None
        assert all(isinstance(end, ConfigError) and "'verify': True" in str(end) for end in ends[1:])

    run(main)


@pytest.mark.parametrize("forged", [{"job": 99}, {"source": 1}])
def test_a_worker_speaks_for_itself_alone(place: dict[str, Any], run: Run, forged: dict[str, int]) -> None:
    async def program(rank: int, sums: InNetworkSum) -> Any:
        if rank == 0:
            foreign = Packet(
                PacketKind.CONTRIBUTION, 1, 0, 0, 0, -1, bitmap=3, values=np.full(ELEMS, 666, dtype=np.int32)
            )
            sums.session.streams.post(2, replace(foreign, **forged))
        return (await sums.all_reduce(values(rank)))[0]

    actors = aggregators()
    for total in run(lambda: job(place, 2, actors, options("ina"), program)):
        assert total.equal(values(0) + values(1))


@pytest.mark.parametrize(
    "plan",
    [
        {},
        None,
        {"route": "ina", "block_elems": ELEMS, "window_groups": -1},
        {"route": "ina", "block_elems": ELEMS, "window_groups": 1 << 40},
        {"route": "other", "block_elems": ELEMS, "window_groups": 1},
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_and_takes_no_slots(
    place: dict[str, Any], run: Run, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InNetworkOptions, "plan", lambda self: plan)
    actors = aggregators()

    async def program(rank: int, sums: InNetworkSum) -> None:
        raise AssertionError("joined")

    async def main() -> None:
        with pytest.raises(ConfigError, match="the aggregator refuses"):
            await job(place, 1, actors, options("ina"), program)

    run(main)
    assert actors[0].free_slots == 64


def test_jobs_share_an_aggregator_and_not_their_sums(place: dict[str, Any], run: Run) -> None:
    actors = aggregators(slots=12)

    async def program(rank: int, sums: InNetworkSum) -> Any:
        return [(await sums.all_reduce(values(rank, step)))[0] for step in range(3)]

    async def main() -> Any:
        other = {**place, "job": place["job"] + "-other"}
        of_two = job(place, 2, actors, options("ra-ina"), program)
        of_three = job(other, 3, actors, options("ra-ina"), program)
        return await asyncio.gather(of_two, of_three)

    for world, found in zip((2, 3), run(main), strict=True):
        for totals in found:
            for step, total in enumerate(totals):
                assert total.long().equal(torch.as_tensor(sum(values(rank, step).long() for rank in range(world))))


def test_jobs_of_one_size_find_places_of_their_own_by_a_hash(place: dict[str, Any], run: Run) -> None:
    actors = aggregators(slots=512, allocation="hash")
    both = asyncio.Barrier(4)

    async def program(rank: int, sums: InNetworkSum) -> Any:
        await both.wait()
        return (await sums.all_reduce(values(rank)))[0]

    async def main() -> Any:
        jobs = (place, {**place, "job": place["job"] + "-other"})
        return await asyncio.gather(*(job(one, 2, actors, options("ina"), program) for one in jobs))

    for totals in run(main):
        for total in totals:
            assert total.equal(total_of(2))
    assert actors[0].free_slots == 512


def test_a_sum_that_leaves_int32_is_told_to_all(place: dict[str, Any], run: Run) -> None:
    async def program(rank: int, sums: InNetworkSum) -> Any:
        own = values(rank)
        own[5] = 2**31 - 1 if rank == 0 else 1
        return (await sums.all_reduce(own))[1], (await sums.all_reduce(values(rank)))[1]

    async def main() -> list[Any]:
        actors = aggregators()
        return await job(place, 2, actors, options("ra-ina"), program)

    assert run(main) == [(True, False)] * 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"slots": 7}, "4 groups of 2 workers need 8 slots in a row, 7 of 7 are free"),
        ({"block_elems": 8}, "block_elems is 8 here, the workers have 256"),
        ({"max_jobs": 0}, "max_jobs is 0"),
    ],
)
def test_a_job_that_cannot_be_served_is_refused_on_all_workers(
    place: dict[str, Any], run: Run, config: dict[str, int], message: str
) -> None:
    async def program(rank: int, sums: InNetworkSum) -> None:
        raise AssertionError("joined")

    async def main() -> None:
        with pytest.raises(ConfigError, match=message):
            await job(place, 2, aggregators(**config), options("ina"), program)

    run(main)


def test_a_worker_that_sends_more_than_any_packets_have_is_left_out(place: dict[str, Any], run: Run) -> None:
    """Before memory is found for it; the others go on without aggregators, and get the sum."""

    async def program(rank: int, sums: InNetworkSum) -> Any:
        session = sums.session
        assert session is not None
        if rank == 0:
            large = torch.zeros(2 * payload_limit(ELEMS), dtype=torch.uint8)
            network = session._network  # noqa: SLF001 - a worker that leaves the protocol aside
            handle = network.send("packets", large, to=2)
            try:
                return (await sums.all_reduce(values(rank)))[0]
            finally:
                handle.cancel()
        return (await sums.all_reduce(values(rank)))[0]

    for total in run(lambda: job(place, 2, aggregators(), options("ina", timeout_s=0.4), program)):
        assert total.equal(total_of(2))


def test_a_member_for_which_too_many_answers_wait_is_lost(
    place: dict[str, Any], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packet_streams, "MAX_WAITING", 50)
    asked = torch.from_numpy(encode_packets([Packet(PacketKind.PROBE, 0, 0, 0, 1, AGGREGATOR)] * 60))
    lost: list[tuple[int, str]] = []
    waiting: list[int] = []

    async def answer(group: gradbus.Group) -> int:
        def receive(peer: int, packets: list[Packet]) -> None:
            for packet in packets:
                streams.post(peer, packet)
                waiting.append(len(streams._waiting[peer]))  # noqa: SLF001 - its memory, which shows nowhere else

        streams = PacketStreams(
            group, [1], block_elems=ELEMS, receive=receive, lost=lambda peer, error: lost.append((peer, str(error)))
        )
        async with streams:
            await eventually(lambda: lost)
            return len(waiting)

    async def member(rank: int) -> int:
        async with (
            gradbus.connect(**place) as bus,
            gradbus.join_group(bus, rank=rank, world=2, name="packets") as group,
        ):
            if rank == 0:
                return await answer(group)
            handles = [group.send("packets", asked, to=0) for _ in range(3)]
            await eventually(lambda: lost)
            for handle in handles:
                handle.cancel()
            return 0

    async def main() -> list[int]:
        return list(await asyncio.gather(member(0), member(1)))

    received, _ = run(main)
    assert lost == [(1, "rank 1 takes no packets: 50 wait for it")]
    assert (max(waiting), waiting[-1]) == (50, 0)
    assert received == 60, "of the second message nothing is taken"
