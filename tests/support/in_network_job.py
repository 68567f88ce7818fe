"""Workers and their aggregators over DDS, each on a bus of its own in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch

import gradbus
from gradbus.actors.in_network.aggregator import AggregatorActor, AggregatorConfig
from gradbus.runtime.collectives.in_network import InNetworkSum, join_aggregator
from gradbus.runtime.in_network.options import InNetworkOptions
from gradbus.runtime.in_network.packets import Packet
from gradbus.runtime.in_network.topology import AggregatorTopology
from gradbus.runtime.in_network.tree import TreeNode

Run = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]
Program = Callable[[int, InNetworkSum], Coroutine[Any, Any, Any]]
ELEMS = 256


def values(rank: int, step: int = 0, numel: int = 10_000) -> torch.Tensor:
    """What a rank gives to the sum of a step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(-(1 << 28), 1 << 28, (numel,), dtype=torch.int32, generator=generator)


def total_of(world: int, step: int = 0, numel: int = 10_000) -> torch.Tensor:
    """The sum of a step."""
    return torch.stack([values(rank, step, numel).long() for rank in range(world)]).sum(0).int()


def options(route: str = "ina", *, topology: dict[str, Any] | None = None, **others: Any) -> InNetworkOptions:
    """Of small blocks."""
    settings = {"block_elems": ELEMS, "window_groups": 2, "retransmit_s": 0.05} | others
    return InNetworkOptions(route=route, topology=AggregatorTopology(**topology or {}), **settings)  # type: ignore[arg-type]


def aggregators(count: int = 1, **settings: Any) -> list[AggregatorActor]:
    """So many of 64 slots."""
    settings = {"slots": 64, "block_elems": ELEMS, "retransmit_s": 0.05} | settings
    return [AggregatorActor(AggregatorConfig(**settings)) for _ in range(count)]


async def serve(place: dict[str, Any], actor: AggregatorActor, world: int, node: int = 0, nodes: int = 1) -> None:
    """Serve the job of this place once."""
    async with gradbus.connect(**place) as bus:
        await actor.serve(bus, world, node=node, nodes=nodes)


async def work(
    place: dict[str, Any],
    rank: int,
    world: int,
    options: InNetworkOptions,
    program: Program,
    *,
    timeout_s: float = 60.0,
) -> Any:
    """A worker: what the program returns."""
    async with (
        gradbus.connect(**place) as bus,
        gradbus.join_group(bus, rank=rank, world=world) as group,
        join_aggregator(group, options, timeout_s=timeout_s) as sums,
    ):
        return await program(rank, sums)


async def job(
    place: dict[str, Any], world: int, actors: list[AggregatorActor], options: InNetworkOptions, program: Program
) -> list[Any]:
    """A bus for each aggregator and each worker; what the program returns on each worker."""
    serving = [asyncio.create_task(serve(place, actor, world, node, len(actors))) for node, actor in enumerate(actors)]
    try:
        return list(await asyncio.gather(*(work(place, rank, world, options, program) for rank in range(world))))
    finally:
        async with asyncio.timeout(20):
            await asyncio.gather(*serving)


async def sums_while_a_node_dies(
    place: dict[str, Any], world: int, options: InNetworkOptions, nodes: int, dies: int
) -> list[list[torch.Tensor]]:
    """The sums of each rank, step by step, until no aggregator is used. One node ends once all ranks have a sum."""
    all_have_one = asyncio.Event()
    finished: set[int] = set()

    async def program(rank: int, sums: InNetworkSum) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        while sums.uses_aggregator or len(found) < 3:
            found.append((await sums.all_reduce(values(rank, len(found))))[0])
            finished.add(rank)
            if len(finished) == world:
                all_have_one.set()
        return found

    serving = [
        asyncio.create_task(serve(place, actor, world, at, nodes)) for at, actor in enumerate(aggregators(nodes))
    ]
    workers = [asyncio.create_task(work(place, rank, world, options, program)) for rank in range(world)]
    having_one = asyncio.create_task(all_have_one.wait())
    await asyncio.wait([having_one, *workers], return_when=asyncio.FIRST_COMPLETED)
    assert having_one.done(), [worker.exception() for worker in workers if worker.done()]
    serving[dies].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving[dies]
    found = await asyncio.gather(*workers)
    async with asyncio.timeout(20):
        await asyncio.gather(*(one for at, one in enumerate(serving) if at != dies))
    return found


def are_totals(found: list[torch.Tensor], world: int) -> bool:
    """Whether these are the sums of the first steps."""
    return all(total.equal(total_of(world, step)) for step, total in enumerate(found))


def let_hang(monkeypatch: pytest.MonkeyPatch, node: int) -> None:
    """Have a node answer nothing."""
    receive = TreeNode.receive

    def hanging(self: TreeNode, packet: Packet, now_s: float) -> list[Packet]:
        return [] if self._config.node == node else receive(self, packet, now_s)

    monkeypatch.setattr(TreeNode, "receive", hanging)


def let_lie(monkeypatch: pytest.MonkeyPatch, lies: Callable[[int, Packet], bool]) -> None:
    """Have nodes add one to the values of packets that they answer with. ``lies``: of the number of a node, and a
    packet: whether it does so."""
    receive = TreeNode.receive

    def lying(self: TreeNode, packet: Packet, now_s: float) -> list[Packet]:
        return [
            replace(answer, values=answer.values + 1)
            if answer.values is not None and lies(self._config.node, answer)
            else answer
            for answer in receive(self, packet, now_s)
        ]

    monkeypatch.setattr(TreeNode, "receive", lying)


async def final_sum(rank: int, sums: InNetworkSum) -> torch.Tensor:
    """A sum after which no aggregator is used any more."""
    total, _ = await sums.all_reduce(values(rank))
    assert not sums.uses_aggregator
    return total
