"""The join protocol on a transport whose writes may be refused: what finds no room is sent later, in its order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from joining_hall import JOB, LIST, ONE, SERVER
from transport_scenes import MemoryScene, in_steps

from gradbus.runtime.security.identity import join_transport
from gradbus.runtime.security.identity.admission import Admission
from gradbus.runtime.security.identity.join_client import JoinClient
from gradbus.runtime.security.identity.join_messages import JoinHello, parse
from gradbus.runtime.security.identity.join_transport import BEACON, BEACON_TOPIC, JOIN, TICK_S, JoinTransport
from gradbus.runtime.transport.api import Inlet, Peer, Periodic
from gradbus.runtime.transport.memory.pairs import MemoryNode
from gradbus.runtime.transport.memory.transport import MemoryTransport


class SteppedThread:
    """The thread of a bus, which calls functions as the test lets time pass."""

    def __init__(self, scene: MemoryScene) -> None:
        self.rejected: Counter[str] = Counter()
        self._scene = scene
        self._periodic: list[Periodic] = []
        self.writers: list[Any] = []

    def add_writer(self, writer: Any) -> None:
        self.writers.append(writer)

    def add_reader(self, reader: Any) -> None:
        pass

    def take_again(self) -> None:
        pass

    def rematched(self) -> None:
        pass

    def block_writers(self, sources: Collection[Peer], why: str) -> None:
        pass

    def add_periodic(self, periodic: Periodic) -> None:
        self._periodic.append(periodic)

    def call_within(self, periodic: Periodic, seconds: float) -> None:
        pass

    def pass_time(self, seconds: float) -> None:
        until_s = self._scene.now_s() + seconds
        while self._scene.now_s() < until_s:
            self._scene.pass_time(TICK_S / 5)
            for writer in self.writers:
                writer.refresh()
            now_s = self._scene.now_s()
            for periodic in [one for one in self._periodic if one.due_s <= now_s]:
                periodic.due_s = now_s + periodic.every_s
                if not periodic.function():
                    self._periodic.remove(periodic)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryScene]:
    made = in_steps()
    monkeypatch.setattr(join_transport, "time", SimpleNamespace(monotonic=made.now_s))
    yield made
    made.close()


def transport_on(scene: MemoryScene, machine: int) -> MemoryTransport:
    return MemoryTransport(scene.network, MemoryNode(f"node-{machine}", machine), JOB)


def received(inlet: Inlet) -> list[bytes]:
    return [bytes(inlet.octets(raw)) for raw, _ in inlet.take(16)]


def test_a_hello_that_finds_no_room_is_sent_at_the_next_tick(scene: MemoryScene) -> None:
    """Not after the interval for a Hello that was not answered, which doubles each time: the run may be over then."""
    thread, inlet = SteppedThread(scene), transport_on(scene, 0).inlet(JOIN)
    node = JoinTransport(JoinClient(JOB, ONE, SERVER.public, "client"), transport_on(scene, 1), thread)
    scene.until(inlet.peers, "they find each other")
    thread.pass_time(0.2)
    scene.network.refused = 1.0
    beacon = Admission(JOB, SERVER, LIST, now_s=scene.now_s()).beacon
    node.receive(BEACON_TOPIC, memoryview(beacon), 1)
    thread.pass_time(3 * TICK_S)
    assert received(inlet) == []
    scene.network.refused = 0.0
    thread.pass_time(2 * TICK_S)
    messages = [parse(memoryview(data)).message for data in received(inlet)]
    assert [(type(one), one.attempt) for one in messages if isinstance(one, JoinHello)] == [(JoinHello, 1)]


def test_messages_that_find_no_room_are_sent_in_their_order(scene: MemoryScene) -> None:
    thread, inlet = SteppedThread(scene), transport_on(scene, 0).inlet(JOIN)
    controller = Admission(JOB, SERVER, LIST, now_s=scene.now_s())
    transport = JoinTransport(controller, transport_on(scene, 1), thread)
    scene.until(inlet.peers, "they find each other")
    scene.network.refused = 1.0
    transport._send([b"first", b"second"])  # noqa: SLF001 - two answers at once take a crowd of nodes
    transport._send([b"third"])  # noqa: SLF001 - as above
    scene.network.refused = 0.0
    thread.pass_time(2 * TICK_S)
    assert received(inlet) == [b"first", b"second", b"third"]


def test_a_beacon_that_finds_no_room_is_sent_at_the_next_tick(scene: MemoryScene) -> None:
    thread, inlet = SteppedThread(scene), transport_on(scene, 0).inlet(BEACON)
    scene.network.refused = 1.0
    controller = Admission(JOB, SERVER, LIST, now_s=scene.now_s())
    JoinTransport(controller, transport_on(scene, 1), thread)
    scene.until(inlet.peers, "they find each other")
    scene.network.refused = 0.0
    thread.pass_time(join_transport.IDLE_TICK_S + TICK_S)
    assert received(inlet) == [controller.beacon]
