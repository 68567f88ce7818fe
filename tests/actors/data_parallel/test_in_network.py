"""Workers whose gradients an aggregator adds: the same bits as without it, also when it has left."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from ddp_scene import make_task, new_place, succeeded, train

import gradbus
from gradbus.actors import Worker
from gradbus.actors.in_network.aggregator import AggregatorActor, AggregatorConfig
from gradbus.runtime.collectives import Group
from gradbus.runtime.errors import BarrierTimeout

ELEMS = 512


def options(route: str) -> dict[str, object]:
    return {"name": "fixed-point", "route": route, "block_elems": ELEMS, "chunk_elems": 64}


@pytest.mark.parametrize("route", ["ina", "ra-ina"])
@pytest.mark.parametrize("leaves_at", [None, 5])
def test_the_model_has_the_bits_of_a_run_without_an_aggregator(route: str, leaves_at: int | None) -> None:
    used: list[bool] = []
    place = new_place()

    async def play(group: Group, worker: Worker) -> None:
        async def serve() -> None:
            async with gradbus.connect(**place) as bus:
                await AggregatorActor(AggregatorConfig(slots=64, block_elems=ELEMS)).serve(bus, group.world)

        serving = asyncio.create_task(serve()) if group.rank == 0 else None
        async for report in worker.epochs():
            used.append(group.in_network.uses_aggregator)
            if serving is not None and leaves_at is not None and report.step >= leaves_at:
                serving.cancel()
        if serving is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    settings = {"epochs": 3, "hash_every": 1}
    plain = succeeded(train(make_task(), algorithm=options("direct"), **settings))
    outcomes = succeeded(train(make_task(), algorithm=options(route), play=play, place=place, **settings))
    assert {one.worker.summary.params_hash for one in outcomes} == {plain[0].worker.summary.params_hash}
    assert used == [True] * 6 if leaves_at is None else used.count(False) >= 2


def test_a_run_whose_aggregator_does_not_come_says_so() -> None:
    outcomes = train(make_task(), algorithm=options("ina"), timeouts__join_s=1.5)
    for outcome in outcomes:
        assert isinstance(outcome.error, BarrierTimeout)
        assert 2 in outcome.error.missing
        assert "gradbus aggregator CONFIG" in str(outcome.error)
