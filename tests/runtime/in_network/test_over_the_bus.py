"""An aggregator and its workers over DDS: exact sums by every route, with and without loss, and when it dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

import gradbus
from gradbus.actors.in_network.aggregator import AggregatorActor, AggregatorConfig
from gradbus.runtime.collectives.in_network import InNetworkOptions, InNetworkSum, join_aggregator
from gradbus.runtime.errors import ConfigError

Run = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]
Program = Callable[[int, InNetworkSum], Coroutine[Any, Any, Any]]
ELEMS = 256


def values(rank: int, step: int = 0, numel: int = 10_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(-(1 << 28), 1 << 28, (numel,), dtype=torch.int32, generator=generator)


async def job(place: dict[str, Any], world: int, actor: AggregatorActor, options: InNetworkOptions,
              program: Program) -> list[Any]:  # fmt: skip
    """A bus for the aggregator and one for each worker; what the program returns on each worker."""

    async def aggregator() -> None:
        async with gradbus.connect(**place) as bus:
            await actor.serve(bus, world)

    async def worker(rank: int) -> Any:
        async with (
            gradbus.connect(**place) as bus,
            gradbus.join_group(bus, rank=rank, world=world) as group,
            join_aggregator(group, options) as sums,
        ):
            return await program(rank, sums)

    serving = asyncio.create_task(aggregator())
    try:
        return list(await asyncio.gather(*map(worker, range(world))))
    finally:
        async with asyncio.timeout(20):
            await serving


def options(route: str, **others: Any) -> InNetworkOptions:
    return InNetworkOptions(route=route, block_elems=ELEMS, window_groups=2, retransmit_s=0.1, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("route", ["ina", "ra-ina", "ra-ina-inline"])
@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_sums_are_exact_by_every_route(place: dict[str, Any], run: Run, route: str, loss: float) -> None:
    world, actor = 3, AggregatorActor(AggregatorConfig(slots=64, block_elems=ELEMS, retransmit_s=0.1))

    async def program(rank: int, sums: InNetworkSum) -> list[Any]:
        found = [await sums.all_reduce(values(rank, step)) for step in range(3)]
        assert sums.uses_aggregator
        assert sums.streams.lost_packets or not loss
        return found

    async def main() -> list[Any]:
        return await job(place, world, actor, options(route, loss=loss, timeout_s=20.0), program)

    for found in run(main):
        for step, (total, overflowed) in enumerate(found):
            expected = sum(values(rank, step).long() for rank in range(world))
            assert total.long().equal(torch.as_tensor(expected))
            assert not overflowed
    assert actor.free_slots == 64


@pytest.mark.parametrize("route", ["ina", "ra-ina"])
def test_a_sum_goes_on_without_an_aggregator_that_leaves(place: dict[str, Any], run: Run, route: str) -> None:
    world, actor = 2, AggregatorActor(AggregatorConfig(slots=64, block_elems=ELEMS))
    both_have_one = asyncio.Event()

    async def main() -> list[Any]:
        async def serve() -> None:
            async with gradbus.connect(**place) as bus:
                await actor.serve(bus, world)

        async def worker(rank: int) -> Any:
            async with (
                gradbus.connect(**place) as bus,
                gradbus.join_group(bus, rank=rank, world=world) as group,
                join_aggregator(group, options(route)) as sums,
            ):
                first = await sums.all_reduce(values(rank))
                await group.barrier("one")
                both_have_one.set()
                found = [first, *[await sums.all_reduce(values(rank, step)) for step in range(1, 60)]]
                return found, sums.uses_aggregator

        serving = asyncio.create_task(serve())
        workers = [asyncio.create_task(worker(rank)) for rank in range(world)]
        await both_have_one.wait()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        return list(await asyncio.gather(*workers))

    for found, uses_aggregator in run(main):
        assert not uses_aggregator
        for step, (total, _) in enumerate(found):
            assert total.equal(values(0, step) + values(1, step))


def test_an_aggregator_that_changes_a_sum_is_noticed(
    place: dict[str, Any], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradbus.runtime.in_network.tree import TreeNode

    receive = TreeNode.receive

    def lying(self: TreeNode, packet: Any, now_s: float) -> Any:
        answers = receive(self, packet, now_s)
        for answer in answers:
            if answer.kind.value == "result" and answer.group == 1:
                answer.values[7] += 1
        return answers

    monkeypatch.setattr(TreeNode, "receive", lying)

    async def program(rank: int, sums: InNetworkSum) -> Any:
        total, _ = await sums.all_reduce(values(rank))
        return total, sums.uses_aggregator

    async def main() -> list[Any]:
        actor = AggregatorActor(AggregatorConfig(slots=64, block_elems=ELEMS))
        return await job(place, 2, actor, options("ina"), program)

    for total, uses_aggregator in run(main):
        assert total.equal(values(0) + values(1))
        assert not uses_aggregator


def test_a_sum_that_leaves_int32_is_told_to_all(place: dict[str, Any], run: Run) -> None:
    async def program(rank: int, sums: InNetworkSum) -> Any:
        own = values(rank)
        own[5] = 2**31 - 1
        return (await sums.all_reduce(own))[1], (await sums.all_reduce(values(rank)))[1]

    async def main() -> list[Any]:
        actor = AggregatorActor(AggregatorConfig(slots=64, block_elems=ELEMS))
        return await job(place, 2, actor, options("ra-ina"), program)

    assert run(main) == [(True, False)] * 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AggregatorConfig(slots=7, block_elems=ELEMS), "needs 8 slots in a row, 7 of 7 are free"),
        (AggregatorConfig(block_elems=8), "block_elems is 8 here, the workers have 256"),
        (AggregatorConfig(block_elems=ELEMS, max_jobs=0), "max_jobs is 0"),
    ],
)
def test_a_job_that_cannot_be_served_is_refused_on_all_workers(
    place: dict[str, Any], run: Run, config: AggregatorConfig, message: str
) -> None:
    async def program(rank: int, sums: InNetworkSum) -> None:
        raise AssertionError("joined")

    async def main() -> None:
        with pytest.raises(ConfigError, match=message):
            await job(place, 2, AggregatorActor(config), options("ina"), program)

    run(main)
