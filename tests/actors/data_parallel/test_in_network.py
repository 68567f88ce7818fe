"""Workers whose gradients an aggregator adds: the same bits as without it, also when it has left."""

from __future__ import annotations

import asyncio
import contextlib
import functools

import pytest
from ddp_scene import make_task, new_place, succeeded, train
from structlog.testing import capture_logs

import gradbus
from gradbus.actors import Worker
from gradbus.actors.in_network.aggregator import AggregatorActor, AggregatorConfig
from gradbus.runtime.collectives import Group
from gradbus.runtime.collectives.aggregators import GROUP
from gradbus.runtime.errors import BarrierTimeout
from gradbus.runtime.transport import wait_log

ELEMS = 2048  # ten blocks of the model
SETTINGS = {"epochs": 3, "hash_every": 1}


def options(route: str, **others: object) -> dict[str, object]:
    return {"name": "fixed-point", "route": route, "block_elems": ELEMS, "chunk_elems": 64, **others}


@functools.cache
def hash_without_aggregator() -> str:
    """Of the parameters after the same run by the ranks alone."""
    (hash_of_all,) = {
        one.worker.summary.params_hash for one in succeeded(train(make_task(), algorithm=options("direct"), **SETTINGS))
    }
    return hash_of_all


@pytest.mark.parametrize(
    ("algorithm", "nodes"),
    [
        (options("ina"), 1),
        (options("ra-ina"), 1),
        (options("ina", topology="tree", leaves=2, roots=2), 4),
        (options("ina", topology="chain", leaves=[[1], [0]]), 2),
        (options("ina", within_host="ring-reduce"), 1),
    ],
)
@pytest.mark.parametrize("leaves_at", [None, 5])
def test_the_model_has_the_bits_of_a_run_without_an_aggregator(
    algorithm: dict[str, object], nodes: int, leaves_at: int | None
) -> None:
    used: list[bool] = []
    place = new_place()

    async def play(group: Group, worker: Worker) -> None:
        async def serve(node: int) -> None:
            async with gradbus.connect(**place) as bus:
                actor = AggregatorActor(AggregatorConfig(slots=64, block_elems=ELEMS))
                await actor.serve(bus, group.world, node=node, nodes=nodes)

        serving = [asyncio.create_task(serve(node)) for node in range(nodes if group.rank == 0 else 0)]
        async for report in worker.epochs():
            used.append(group.in_network.uses_aggregator)
            if serving and leaves_at is not None and report.step >= leaves_at:
                serving[-1].cancel()
        for one in serving:
            with contextlib.suppress(asyncio.CancelledError):
                await one

    outcomes = succeeded(train(make_task(), algorithm=algorithm, play=play, place=place, **SETTINGS))
    assert {one.worker.summary.params_hash for one in outcomes} == {hash_without_aggregator()}
    assert used == [True] * 6 if leaves_at is None else used.count(False) >= 2


def test_a_run_whose_aggregator_does_not_come_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_log, "EVERY_S", 0.3)
    with capture_logs() as logs:
        outcomes = train(make_task(), algorithm=options("ina"), timeouts__join_s=3.0)
    waits = [one for one in logs if one["event"] == "still waiting" and one["group"] == GROUP]
    assert waits[-1]["missing"] == ["the aggregator"]
    assert waits[-1]["hint"].endswith("Start it: 'gradbus aggregator CONFIG', for the same job and 2 workers")
    for outcome in outcomes:
        assert isinstance(outcome.error, BarrierTimeout)
        assert 2 in outcome.error.missing
        assert "gradbus aggregator CONFIG" in str(outcome.error)
