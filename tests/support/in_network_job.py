"""Workers and their aggregators over DDS, each on a bus of its own in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import torch

import gradbus
from gradbus.actors.in_network.aggregator import AggregatorActor, AggregatorConfig
from gradbus.runtime.collectives.in_network import InNetworkSum, join_aggregator
from gradbus.runtime.in_network.options import InNetworkOptions
from gradbus.runtime.in_network.topology import AggregatorTopology

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
    place: dict[str, Any], rank: int, world: int, options: InNetworkOptions, program: Program, *,
    timeout_s: float = 60.0,
) -> Any:  # fmt: skip
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
