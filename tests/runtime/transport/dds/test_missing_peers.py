"""Who waits for others says who is missing, and what to do."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from dds_domains import new_domain

import gradbus
from gradbus.actors.federated.client import client
from gradbus.actors.federated.controller import selection
from gradbus.models import NoopTask
from gradbus.runtime.collectives import membership
from gradbus.runtime.errors import BarrierTimeout
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.dds import missing_peers
from gradbus.runtime.transport.dds.missing_peers import Reach
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
    monkeypatch.setattr(missing_peers, "EVERY_S", 0.2)
    monkeypatch.setattr(client, "EVERY_S", 0.1)
    monkeypatch.delenv("CYCLONEDDS_URI", raising=False)


def test_on_lo_the_advice_names_every_variable_that_leads_to_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_peers, "interfaces", lambda: ["lo", "eth0", "down0"])
    monkeypatch.setattr(missing_peers, "address_of", lambda name: {"lo": "127.0.0.1", "eth0": "192.0.2.1"}.get(name))
    advice = Reach.of(0, NetworkConfig()).advice()
    assert advice.startswith("Start them. If they are on other machines: this bus is on lo")
    assert "GRADBUS_BUS__INTERFACE=NAME (here: eth0)" in advice
    for name in ("GRADBUS_BUS__NETWORK=network", "GRADBUS_BUS__PEERS=", "GRADBUS_BUS__KEY_FILE=", "gradbus keys new"):
        assert name in advice
    assert Reach.of(0, NetworkConfig()).advice(elsewhere=True).startswith("They are on other machines: this bus is")
    assert "on this machine" in Reach.of(0, NetworkConfig()).advice(elsewhere=False)


def test_on_a_network_it_names_peers_ports_and_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_peers, "address_of", lambda name: "192.0.2.1")
    reach = Reach(domain=3, interface="eth0", peers=(), multicast=False, leaves_machine=True)
    assert "This bus (192.0.2.1 on eth0) has no peers" in reach.advice()
    reach = Reach(domain=3, interface="eth0", peers=("192.0.2.2",), multicast=False, leaves_machine=True)
    for text in ("192.0.2.1 on eth0", "(192.0.2.2)", "UDP ports 8160-8399", "gradbus doctor"):
        assert text in reach.advice()


@pytest.mark.parametrize("elsewhere", [None, True, False])
@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize(("leaves_machine", "peers"), [(False, ()), (True, ()), (True, ("192.0.2.2",))])
def test_the_hint_of_a_line_that_is_repeated_is_short(
    elsewhere: bool | None, one: bool, leaves_machine: bool, peers: tuple[str, ...]
) -> None:
    reach = Reach(domain=3, interface="eth0", peers=peers, multicast=False, leaves_machine=leaves_machine)
    hint = reach.hint(elsewhere=elsewhere, one=one)
    assert len(hint) < 125
    assert "them" not in hint or not one


def test_a_line_comes_every_so_often_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(missing_peers.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(missing_peers, "EVERY_S", 10.0)
    log = Log()
    waiting = WaitLog(log, Reach.of(0, NetworkConfig()), group="g", rank=1)
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
    monkeypatch.setattr(client, "log", log)

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
