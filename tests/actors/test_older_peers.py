"""Peers of protocol 3, whose control messages all went over one topic: each side refuses the other with a sentence.

The frames of the other side were recorded from its own encoder: ``tests/golden/protocol_3.json``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from dds_domains import new_domain
from patience import PATIENT_S

import gradbus
from gradbus.actors.federated.client import older_controllers
from gradbus.models import NoopTask
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.errors import JobInUse, JoinRefused
from gradbus.runtime.transport.channels import ToClients, ToController, channel_of
from gradbus.runtime.wire import control, frames
from gradbus.runtime.wire.control import Hello, Refused
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import ClientUpdate, Control, TrainCmd

DIM = 100
OF_A_CLIENT = r"it speaks protocol 3, as gradbus 0\.1 does, this controller 4: use one version of gradbus on all nodes"
OF_A_CONTROLLER = "it speaks protocol 4, this controller 3: use one version of gradbus on all nodes"
_jobs = itertools.count()


@pytest.fixture
def recorded(root: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "tests" / "golden" / "protocol_3.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture
def place() -> dict[str, Any]:
    return {"job": f"older-{os.getpid()}-{next(_jobs)}", "domain": new_domain()}


class OldPeer:
    """Writes recorded frames on the topic of all, and reads what comes there."""

    def __init__(self, bus: Bus, recorded: dict[str, Any]) -> None:
        transport = bus._transport  # noqa: SLF001 - no bus writes frames that it has not made
        self.outlet = transport.outlet(channel_of(Control))
        self._frames = {name: bytes.fromhex(text) for name, text in recorded["frames"].items()}

    def say(self, name: str) -> None:
        assert self.outlet.write((), (self._frames[name],))


@asynccontextmanager
async def repeated(peer: OldPeer, *names: str) -> AsyncIterator[None]:
    async def say() -> None:
        while True:
            for name in names:
                peer.say(name)
            await asyncio.sleep(0.05)

    saying = asyncio.create_task(say())
    try:
        yield
    finally:
        saying.cancel()
        await asyncio.wait([saying])
        peer.outlet.close()


def test_the_recorded_frames_are_what_they_say(recorded: dict[str, Any]) -> None:
    for name, text in recorded["frames"].items():
        frame = frames.parse(memoryview(bytes.fromhex(text)))
        assert repr(control.decode(frame.data)) == recorded["bodies"][name]


def test_a_controller_refuses_a_client_of_protocol_3_with_a_sentence_and_opens_no_inbox_for_it(
    recorded: dict[str, Any], place: dict[str, Any]
) -> None:
    client = tuple(recorded["client"])

    async def main() -> tuple[str, int]:
        async with asyncio.timeout(PATIENT_S), gradbus.connect(**place) as bus, gradbus.connect(**place) as other:
            config = gradbus.FederatedConfig(rounds=1, clients={"num": 1, "start_timeout_s": PATIENT_S})
            running = asyncio.create_task(gradbus.Controller(bus, NoopTask(DIM), config).run())
            with other.subscribe(Control) as inbox:
                async with repeated(OldPeer(other, recorded), "hello"):
                    async for message in inbox:
                        body = message.body if isinstance(message, Control) else None
                        if isinstance(body, Refused) and (body.to, body.incarnation) == client:
                            break
                inboxes = bus.open_inboxes
            running.cancel()
            await asyncio.wait([running])
            assert isinstance(body, Refused)
            return body.why, inboxes

    why, inboxes = asyncio.run(main())
    assert re.fullmatch(OF_A_CLIENT, why), why
    assert inboxes == 0


def test_a_client_that_finds_only_a_controller_of_protocol_3_is_refused_with_its_sentence(
    recorded: dict[str, Any], place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    client_id, incarnation = recorded["client"]
    monkeypatch.setattr(older_controllers, "OLDER_AFTER_S", 0.2)
    monkeypatch.setattr("gradbus.actors.federated.client.client.new_incarnation", lambda: incarnation)

    async def controller(bus: Bus, peer: OldPeer) -> None:
        """Do what an old one does: answer a Hello of another protocol, on the topic on which it comes."""
        bus.open_writer(TrainCmd)
        with bus.subscribe(Control, ClientUpdate) as inbox:
            async with repeated(peer, "status"):
                async for message in inbox:
                    if isinstance(message, Control) and isinstance(message.body, Hello):
                        assert message.sender != CONTROLLER
                        peer.say("refused")

    async def main() -> None:
        async with asyncio.timeout(PATIENT_S), gradbus.connect(**place) as bus, gradbus.connect(**place) as other:
            serving = asyncio.create_task(controller(bus, OldPeer(bus, recorded)))
            client = gradbus.Client(other, NoopTask(DIM), client_id=client_id)
            with pytest.raises(JoinRefused, match=OF_A_CONTROLLER):
                await client.run()
            serving.cancel()
            await asyncio.wait([serving])

    asyncio.run(main())


def test_a_client_sends_nothing_on_the_topic_of_all_where_its_controller_is_not_older(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(older_controllers, "OLDER_AFTER_S", 0.1)

    async def main() -> None:
        async with (
            asyncio.timeout(PATIENT_S),
            gradbus.connect(**place) as bus,
            gradbus.connect(**place) as other,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(gradbus.Client(other, NoopTask(DIM), client_id=0).run())
            controller = gradbus.Controller(bus, NoopTask(DIM), gradbus.FederatedConfig(rounds=2, clients={"num": 1}))
            async for _ in controller.rounds():
                await asyncio.sleep(1.0)  # ten times as long as a client looks for an older one
            assert not other.writes(Control)
            assert other.writes(ToController)
            assert bus.writes(ToClients)

    asyncio.run(main())


def test_a_controller_does_not_start_where_one_of_protocol_3_has_the_job(
    recorded: dict[str, Any], place: dict[str, Any]
) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENT_S), gradbus.connect(**place) as bus, gradbus.connect(**place) as other:
            other.open_writer(TrainCmd)
            controller = gradbus.Controller(bus, NoopTask(DIM), gradbus.FederatedConfig(rounds=1, clients={"num": 1}))
            async with repeated(OldPeer(other, recorded), "status"):
                with pytest.raises(JobInUse, match="has a controller already: centre:1"):
                    await controller.run()

    asyncio.run(main())
