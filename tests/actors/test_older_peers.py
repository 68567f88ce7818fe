"""Peers of protocol 3, whose control messages all went over one topic: each side refuses the other with a sentence.

The frames of the other side were recorded from its own encoder: ``tests/golden/protocol_3.json``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from dds_domains import new_domain
from patience import PATIENT_S

import gradbus
from gradbus.actors.federated.client import older_controllers
from gradbus.actors.federated.client.session import NO_START
from gradbus.actors.federated.site import site
from gradbus.actors.federated.site.site import Site
from gradbus.actors.flower.hub import MessageHub
from gradbus.actors.flower.node import MessageNode
from gradbus.actors.flower.protocol import NodePlace
from gradbus.models import NoopTask
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.config.federated import UpstreamConfig
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


def controller_of(bus: Bus) -> Coroutine[Any, Any, object]:
    config = gradbus.FederatedConfig(rounds=1, clients={"num": 1, "start_timeout_s": PATIENT_S})
    return gradbus.Controller(bus, NoopTask(DIM), config).run()


def hub_of(bus: Bus) -> Coroutine[Any, Any, object]:
    return MessageHub(bus, run_id=1).run()


@pytest.mark.parametrize(
    ("job_of", "name", "why"),
    [
        (controller_of, "hello", OF_A_CLIENT),
        (controller_of, "node", OF_A_CLIENT),
        (hub_of, "node", OF_A_CLIENT),
        (hub_of, "hello", "this job runs a Flower app: start 'gradbus flower node', or choose another job .*"),
    ],
    ids=["controller", "controller of a node", "hub", "hub of a client"],
)
def test_who_has_the_job_refuses_a_peer_of_protocol_3_with_a_sentence_and_opens_no_inbox_for_it(
    job_of: Callable[[Bus], Coroutine[Any, Any, object]],
    name: str,
    why: str,
    recorded: dict[str, Any],
    place: dict[str, Any],
) -> None:
    client = tuple(recorded["client"])

    async def main() -> tuple[str, int]:
        async with asyncio.timeout(PATIENT_S), gradbus.connect(**place) as bus, gradbus.connect(**place) as other:
            running = asyncio.create_task(job_of(bus))
            with other.subscribe(Control) as inbox:
                async with repeated(OldPeer(other, recorded), name):
                    async for message in inbox:
                        body = message.body if isinstance(message, Control) else None
                        if isinstance(body, Refused) and (body.to, body.incarnation) == client:
                            break
                inboxes = bus.open_inboxes
            running.cancel()
            await asyncio.wait([running])
            assert isinstance(body, Refused)
            return body.why, inboxes

    found, inboxes = asyncio.run(main())
    assert re.fullmatch(why, found), found
    assert inboxes == 0


def client_of(bus: Bus, client_id: int) -> Coroutine[Any, Any, object]:
    return gradbus.Client(bus, NoopTask(DIM), client_id=client_id).run()


def named_client_of(bus: Bus, client_id: int) -> Coroutine[Any, Any, object]:
    return gradbus.Client(bus, NoopTask(DIM), name="robot-7").run()


def node_of(bus: Bus, client_id: int) -> Coroutine[Any, Any, object]:
    return MessageNode(bus, NoAnswers(), place=NodePlace(client_id, 8)).run()


def site_of(bus: Bus, client_id: int) -> Coroutine[Any, Any, object]:
    config = gradbus.FederatedConfig(clients={"num": 1})
    return Site(bus, bus, NoopTask(DIM), config, UpstreamConfig(site=client_id, alone=False)).run()


class NoAnswers:
    """Answers no instruction: none comes."""

    def begin(self, run_id: int, options: Mapping[str, Any]) -> None:
        raise AssertionError("no run begins")

    def answer(self, payload: memoryview, number: int) -> list[bytes | memoryview]:
        raise AssertionError("no instruction comes")

    def release(self) -> None:
        raise AssertionError("no reply was sent")

    def refuse(self, reason: str) -> list[bytes | memoryview]:
        raise AssertionError("no instruction comes")


@pytest.mark.parametrize(
    ("peer_of", "refusal"),
    [
        (client_of, "refused"),
        (named_client_of, "refused_without_id"),
        (node_of, "refused"),
        (site_of, "refused"),
    ],
    ids=["client", "named client", "node", "site"],
)
def test_who_finds_only_a_controller_of_protocol_3_is_refused_with_its_sentence(
    peer_of: Callable[[Bus, int], Coroutine[Any, Any, object]],
    refusal: str,
    recorded: dict[str, Any],
    place: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client_id, incarnation = recorded["client"]
    monkeypatch.setattr(older_controllers, "OLDER_AFTER_S", 0.2)
    for module in ("federated.client.client", "flower.node"):
        monkeypatch.setattr(f"gradbus.actors.{module}.new_incarnation", lambda: incarnation)

    async def controller(bus: Bus, peer: OldPeer) -> None:
        """Do what an old one does: answer a Hello of another protocol, on the topic on which it comes."""
        bus.open_writer(TrainCmd)
        with bus.subscribe(Control, ClientUpdate) as inbox:
            async with repeated(peer, "status"):
                async for message in inbox:
                    if isinstance(message, Control) and isinstance(message.body, Hello):
                        assert message.sender != CONTROLLER
                        peer.say(refusal)

    async def main() -> None:
        async with asyncio.timeout(PATIENT_S), gradbus.connect(**place) as bus, gradbus.connect(**place) as other:
            serving = asyncio.create_task(controller(bus, OldPeer(bus, recorded)))
            with pytest.raises(JoinRefused, match=OF_A_CONTROLLER):
                await peer_of(other, client_id)
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


def test_a_site_that_goes_on_alone_hears_a_level_above_of_protocol_3_which_then_refuses_it(
    recorded: dict[str, Any], place: dict[str, Any]
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(PATIENT_S),
            gradbus.connect(**place) as bus,
            gradbus.connect(**place) as other,
            repeated(OldPeer(other, recorded), "status"),
        ):
            await site._until_heard(bus, NO_START)  # noqa: SLF001 - to be cut off before takes a run of two levels

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
