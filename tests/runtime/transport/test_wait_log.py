"""Who waits for others says who is missing, and what to do."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from dds_domains import new_domain

import gradbus
from gradbus.actors.federated.client import client_run
from gradbus.actors.federated.controller import selection
from gradbus.models import NoopTask
from gradbus.runtime.bus.transport_factory import reach_of
from gradbus.runtime.collectives import membership
from gradbus.runtime.errors import BarrierTimeout
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport import wait_log
from gradbus.runtime.transport.wait_log import WaitLog


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def warning(self, event: str, **facts: Any) -> None:
        self.lines.append({"event": event, **facts})

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_log, "EVERY_S", 0.2)
    monkeypatch.setattr(client_run, "EVERY_S", 0.1)
    monkeypatch.delenv("CYCLONEDDS_URI", raising=False)


def test_a_line_comes_every_so_often_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(wait_log.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(wait_log, "EVERY_S", 10.0)
    log = Log()
    waiting = WaitLog(log, reach_of(0, NetworkConfig()), group="g", rank=1)
    for _ in range(250):
        now_s[0] += 0.1
        waiting.look([0], reason="it is late", misconfiguration="it has another key")
    assert [(line["event"], line["group"], line["missing"], line["waited_s"]) for line in log.lines] == [
        ("still waiting", "g", [0], 10),
        ("still waiting", "g", [0], 20),
    ]
    assert log.lines[0]["hint"].startswith("it is late. Likely reason: it has another key. Start it. ")


def test_a_group_says_whom_it_waits_for_and_its_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    monkeypatch.setattr(membership, "log", log)

    async def main() -> str:
        async with gradbus.connect(job=f"alone-{os.getpid()}", domain=new_domain()) as bus:
            with pytest.raises(BarrierTimeout) as caught:
                async with gradbus.join_group(bus, rank=0, world=3, timeout_s=0.7):
                    pass
        return str(caught.value)

    text = asyncio.run(main())
    assert "missing [1, 2]" in text
    assert "GRADBUS_BUS__INTERFACE" in text
    assert len(log.lines) >= 2
    assert all(line["missing"] == [1, 2] and line["rank"] == 0 for line in log.lines)


def test_a_controller_says_which_clients_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    monkeypatch.setattr(selection, "log", log)

    async def main() -> str:
        config = gradbus.FederatedConfig(
            rounds=1, clients={"num": 2, "min": 2, "start_timeout_s": 3.0, "heartbeat_s": 0.1}
        )
        async with gradbus.connect(job=f"waits-{os.getpid()}", domain=new_domain()) as bus:
            one = asyncio.create_task(gradbus.Client(bus, NoopTask(10), client_id=1).run())
            try:
                with pytest.raises(BarrierTimeout) as caught:
                    await gradbus.Controller(bus, NoopTask(10), config).run()
            finally:
                one.cancel()
                await asyncio.wait([one])
        return str(caught.value)

    assert "missing [0]" in asyncio.run(main())
    assert log.lines[-1]["event"] == "still waiting"
    assert log.lines[-1]["missing"] == ["client 0"]


def test_a_client_says_that_no_controller_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    monkeypatch.setattr(client_run, "log", log)

    async def main() -> str:
        async with gradbus.connect(job="orphan", domain=new_domain()) as bus:
            config = gradbus.ClientConfig(controller_timeout_s=0.8)
            with pytest.raises(BarrierTimeout) as caught:
                await gradbus.Client(bus, NoopTask(10), client_id=3, config=config).run()
        return str(caught.value)

    text = asyncio.run(main())
    assert "Start it. If it is on another machine" in text
    assert "GRADBUS_BUS__INTERFACE" in text
    line = log.lines[0]
    assert (line["client"], line["missing"]) == (3, "the controller of job 'orphan'")
    assert line["hint"].startswith("Start it. ")
