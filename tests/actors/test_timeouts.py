"""Actors log their timeouts at the start, and name those that are not in the order that they need."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from ddp_scene import make_task, new_place, succeeded, train
from server_scene import serve
from structlog.testing import capture_logs

import gradbus
from gradbus.actors import ElasticPlace, ElasticWorker
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import BarrierTimeout

Lines = list[Any]


@pytest.fixture
def lines() -> Iterator[Lines]:
    with capture_logs() as found:
        yield found


def orders(lines: Lines) -> list[str]:
    return [line["order"] for line in lines if line["event"] == "timeouts"]


def faults(lines: Lines) -> list[str]:
    return [line["fault"] for line in lines if line["event"] == "timeouts out of order"]


def test_a_worker_names_a_pair_that_is_the_wrong_way_round_once(lines: Lines) -> None:
    succeeded(train(make_task(), world=1, max_steps=2, timeouts__collective_s=30.0, checkpoint__timeout_s=5.0))
    assert orders(lines) == ["join 60 s, collective 30 s, commit 5 s"]
    assert faults(lines) == [
        "parallel.timeouts.collective_s (30 s) is longer than parallel.checkpoint.timeout_s (5 s): a rank would give "
        "up a checkpoint that the others still prepare"
    ]


def test_an_elastic_worker_has_its_wait_among_them(lines: Lines) -> None:
    config = DataParallelConfig.model_validate({"max_steps": 1, "elastic": {"min_world": 1, "wait_s": 40.0}})

    async def main() -> None:
        async with asyncio.timeout(20), gradbus.connect(**new_place()) as bus:
            await ElasticWorker(ElasticPlace(bus=bus, number=0, founders=1), make_task(), config).run()

    asyncio.run(main())
    assert orders(lines) == ["join 60 s, collective 60 s, commit 600 s, wait 40 s"]
    (fault,) = faults(lines)
    assert "collective_s (60 s) is longer than parallel.elastic.wait_s (40 s)" in fault


@pytest.mark.parametrize(
    ("lease_s", "leaves_machine", "warned"), [(None, True, [60.0]), (5.0, True, []), (None, False, [])]
)
def test_an_elastic_worker_on_a_bus_of_its_users_own_says_which_lease_it_should_have(
    lease_s: float | None, leaves_machine: bool, warned: list[float], lines: Lines
) -> None:
    config = DataParallelConfig.model_validate({"max_steps": 1, "elastic": {"min_world": 1}})

    async def main() -> None:
        async with asyncio.timeout(20), gradbus.connect(**new_place(), lease_s=lease_s) as bus:
            bus.reach = replace(bus.reach, leaves_machine=leaves_machine)
            await ElasticWorker(ElasticPlace(bus=bus, number=0, founders=1), make_task(), config).run()

    asyncio.run(main())
    found = [line for line in lines if line["event"] == "lease is that of a fixed world"]
    assert [line["lease_s"] for line in found] == warned
    assert all("open the bus with lease_s=4" in line["do"] for line in found)


def test_workers_and_parameter_servers_log_theirs(lines: Lines) -> None:
    serve(make_task(), workers=1, parallel={"max_steps": 1}).succeeded()
    assert orders(lines) == ["join 60 s, collective 60 s, commit 600 s"] * 2
    assert not faults(lines)


def test_a_controller_goes_by_the_lease_of_its_bus(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bus, "remote_lease_s", 0.2)
    config = FederatedConfig.model_validate({"clients": {"start_timeout_s": 0.1}})

    async def main() -> None:
        async with asyncio.timeout(20), gradbus.connect(**new_place()) as bus:
            await gradbus.Controller(bus, make_task(), config).run()

    with pytest.raises(BarrierTimeout):
        asyncio.run(main())
    assert orders(lines) == ["heartbeat 0.5 s, lease 0.2 s, round 300 s"]
    (fault,) = faults(lines)
    assert fault.startswith("federated.clients.heartbeat_s (0.5 s) is longer than bus.lease_s (0.2 s)")


def test_the_lease_counts_where_a_bus_reaches_other_machines_alone() -> None:
    async def main() -> None:
        async with gradbus.connect(**new_place(), lease_s=7.0) as bus:
            assert bus.remote_lease_s is None  # the kernel tells who is dead
            bus.reach = replace(bus.reach, leaves_machine=True)
            assert bus.remote_lease_s == 7.0

    asyncio.run(main())
