"""Who is found on a channel for partners: transports that share another channel; over a simulated relay, in virtual
time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from channel_node import Channel
from joined_endpoints import LEASE_S
from transport_scenes import SteppedZenohScene, take, write

from gradbus.runtime.transport.zenoh import inlet, outlet

SHARED = Channel("shared").opened()
PARTNERS = replace(Channel("partners", retained=True).opened(), for_partners=True)
QUIET_S = 2.0


class Process:
    """A process that announces itself to its partners."""

    def __init__(self, scene: SteppedZenohScene, number: int) -> None:
        remote = scene.join("one", LEASE_S)
        self.session: Any = remote.session
        self.transport = remote.transport
        self.outlet: Any = self.transport.outlet(PARTNERS)
        self.inlet: Any = self.transport.inlet(PARTNERS)
        self.keys: list[str] = []
        self.session.receive = self._noting(self.session.receive)
        assert write(self.outlet, number) == [True]

    def _noting(self, receive: Callable[[str, bytes], None]) -> Callable[[str, bytes], None]:
        def noted(key: str, message: bytes) -> None:
            self.keys.append(key)
            receive(key, message)

        return noted


@pytest.fixture
def scene() -> SteppedZenohScene:
    return SteppedZenohScene()


def test_those_that_share_no_other_channel_receive_nothing_from_each_other(scene: SteppedZenohScene) -> None:
    one, other = (Process(scene, number) for number in range(2))
    scene.pass_time(QUIET_S)
    assert not one.keys
    assert not other.keys
    assert not one.outlet.peers()


@pytest.mark.parametrize("writes", [0, 1])
def test_those_that_share_another_channel_find_each_other(scene: SteppedZenohScene, writes: int) -> None:
    processes = [Process(scene, number) for number in range(2)]
    scene.pass_time(QUIET_S)
    processes[writes].transport.outlet(SHARED)
    processes[1 - writes].transport.inlet(SHARED)
    for number, one in enumerate(processes):
        found: list[int] = []
        scene.until(lambda one=one, found=found: found.extend(take(one.inlet)) or found, "it gets what is retained")
        assert found == [1 - number]


def test_they_find_each_other_again_after_a_break(scene: SteppedZenohScene) -> None:
    one, other = (Process(scene, number) for number in range(2))
    one.transport.outlet(SHARED)
    other.transport.inlet(SHARED)
    scene.until(lambda: one.outlet.peers() and other.outlet.peers(), "they match")
    one.session.is_refused = True
    one.session.break_link()
    scene.until(lambda: not other.outlet.peers(), "the other misses it")
    one.session.is_refused = False
    scene.until(lambda: one.outlet.peers() and other.outlet.peers(), "they match again")
    assert write(one.outlet, 7) == [True]
    found: list[int] = []
    scene.until(lambda: found.extend(take(other.inlet)) or 7 in found, "what is written later arrives")


def test_what_a_client_announces_to_its_controller_reaches_no_other_client(scene: SteppedZenohScene) -> None:
    controller, *clients = (Process(scene, number) for number in range(5))
    controller.transport.inlet(SHARED)
    for one in clients:
        one.transport.outlet(SHARED)
    scene.until(lambda: len(controller.outlet.peers()) == len(clients), "the controller has found all")
    for number, one in enumerate(clients):
        scene.until(lambda one=one: one.outlet.peers() and one.inlet.peers(), "each has found the controller")
        assert write(one.outlet, 10 + number) == [True]
    found: list[int] = []
    scene.until(lambda: found.extend(take(controller.inlet)) or len(found) == 2 * len(clients), "all of it arrives")
    assert sorted(found) == [1, 2, 3, 4, 10, 11, 12, 13]
    assert write(controller.outlet, 20) == [True]
    for one in clients:
        heard: list[int] = []
        scene.until(lambda one=one, heard=heard: heard.extend(take(one.inlet)) or 20 in heard, "so does an answer")
        assert not any(client.outlet.id in key for client in clients if client is not one for key in one.keys)


def test_a_transport_that_there_was_no_room_for_becomes_a_partner_when_there_is(
    scene: SteppedZenohScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (outlet, inlet):
        monkeypatch.setattr(module, "MAX_PEERS", 2)
    one = Process(scene, 0)
    shared = one.transport.outlet(SHARED)
    others = [scene.join("one", LEASE_S) for _ in range(2)]
    inlets = [other.transport.inlet(SHARED) for other in others]
    scene.until(lambda: len(shared.peers()) == 2, "there is no room for a third")
    late = Process(scene, 1)
    late.transport.inlet(SHARED)
    scene.pass_time(QUIET_S)
    assert not one.outlet.peers()
    for left in inlets:
        left.close()
    scene.pass_time(4 * LEASE_S)
    assert len(one.outlet.peers()) == len(late.outlet.peers()) == 1
