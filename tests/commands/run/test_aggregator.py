"""The command ``aggregator`` with several jobs, in this process over DDS: what one does is not the others' end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from dds_domains import new_domain
from in_network_job import ELEMS, options, total_of, values, work
from patience import eventually
from structlog.testing import capture_logs

import gradbus
from gradbus.actors.in_network.aggregator import GROUP, AggregatorActor
from gradbus.commands.files import AggregatorFile
from gradbus.commands.run import aggregator
from gradbus.runtime.collectives.in_network import InNetworkSum
from gradbus.runtime.errors import ConfigError


def shared(domain: int) -> AggregatorFile:
    """Of two jobs with two workers each."""
    settings = {"jobs": {"a": 2, "b": 2}, "slots": 64, "block_elems": ELEMS, "retransmit_s": 0.05}
    return AggregatorFile(bus={"domain": domain}, aggregator=settings)  # type: ignore[arg-type]


async def sums(rank: int, group: InNetworkSum) -> Any:
    found, _ = await group.all_reduce(values(rank))
    assert group.uses_aggregator
    return found


def test_workers_that_do_not_fit_do_not_end_their_job_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregator, "PAUSE_S", 0.05)
    place: dict[str, Any] = {"job": "a", "domain": new_domain()}

    async def main() -> list[Any]:
        serving = asyncio.create_task(aggregator.run_aggregator(shared(place["domain"])))
        with pytest.raises(ConfigError, match="world"):
            async with gradbus.connect(**place) as bus, gradbus.join_group(bus, rank=0, world=5, name=GROUP):
                pass
        await eventually(lambda: any(line["event"] == "job failed" for line in lines))
        try:
            return list(await asyncio.gather(*(work(place, rank, 2, options(), sums) for rank in range(2))))
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    with capture_logs() as lines:
        found = asyncio.run(main())
    assert all(one.equal(total_of(2)) for one in found)
    (failed, *_) = (line for line in lines if line["event"] == "job failed")
    assert failed["job"] == "a"
    assert "compare aggregator.world" in failed["reason"]


def test_what_ends_a_job_is_told_while_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(self: AggregatorActor, bus: gradbus.Bus, world: int, **_: Any) -> None:
        if bus.job == "a":
            raise OSError("no memory")
        await asyncio.Event().wait()

    monkeypatch.setattr(AggregatorActor, "serve", serve)

    async def main() -> None:
        serving = asyncio.create_task(aggregator.run_aggregator(shared(new_domain())))
        await eventually(lambda: any(line["event"] == "job is served no more" for line in lines))
        assert not serving.done()
        serving.cancel()
        await asyncio.wait([serving])

    with capture_logs() as lines:
        asyncio.run(main())
    (told,) = (line for line in lines if line["event"] == "job is served no more")
    assert (told["job"], told["reason"], type(told["exc_info"])) == ("a", "no memory", OSError)
