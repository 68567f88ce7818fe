"""Over which links of an inlet its samples come: over a simulated relay, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fault_simulation.simulated_relay import SIDE_LINKS
from joined_endpoints import LEASE_S, VOLATILE
from transport_scenes import SteppedZenohScene, take, write

from gradbus.runtime.transport.zenoh.messages import SAMPLE

LARGE = replace(VOLATILE.opened(), side_links=SIDE_LINKS)
SAMPLES = 5


class Gathering:
    """An inlet, outlets of several processes, and the links over which samples come to it.

    Attributes:
        links: counts of samples by outlet and link. closed: links that bring nothing.
    """

    def __init__(self, scene: SteppedZenohScene, outlets: int, *, inlets: int = 1) -> None:
        self.scene = scene
        self.links: Counter[tuple[str, int]] = Counter()
        self.closed: set[int] = set()
        targets = [scene.join("one", LEASE_S) for _ in range(inlets)]
        for target in targets:
            target.session.receive = self._noting(target.session.receive)
        self.inlets: list[Any] = [target.transport.inlet(LARGE) for target in targets]
        self.outlets: list[Any] = [scene.join("one", LEASE_S).transport.outlet(LARGE) for _ in range(outlets)]
        scene.until(lambda: all(len(one.peers()) == outlets for one in self.inlets), "the inlets match")
        scene.until(lambda: all(len(one.peers()) == inlets for one in self.outlets), "the outlets match")

    def _noting(self, receive: Callable[[str, bytes], None]) -> Callable[[str, bytes], None]:
        def noted(key: str, message: bytes) -> None:
            parts = key.split("/")
            link = int(parts[-2]) if parts[-4] == "to" else 0
            if link in self.closed:
                return
            if message[0] == SAMPLE:
                self.links[parts[-1], link] += 1
            receive(key, message)

        return noted

    def send(self) -> None:
        for outlet in self.outlets:
            assert all(write(outlet, *range(SAMPLES)))
        for inlet in self.inlets:
            found: list[int] = []
            self.scene.until(lambda inlet=inlet, found=found: self._all_are_here(inlet, found), "all samples arrive")
            assert Counter(found) == {number: len(self.outlets) for number in range(SAMPLES)}

    def _all_are_here(self, inlet: Any, found: list[int]) -> bool:
        found += take(inlet)
        return len(found) >= SAMPLES * len(self.outlets)


@pytest.fixture
def scene() -> SteppedZenohScene:
    return SteppedZenohScene()


def test_an_inlet_divides_its_outlets_among_its_side_links(scene: SteppedZenohScene) -> None:
    gathering = Gathering(scene, 2 * SIDE_LINKS)
    gathering.send()
    assert set(gathering.links.values()) == {SAMPLES}, "all samples of an outlet come the same way, each once"
    assert Counter(link for _, link in gathering.links) == dict.fromkeys(range(1, 1 + SIDE_LINKS), 2)


def test_what_several_inlets_are_to_have_is_sent_once(scene: SteppedZenohScene) -> None:
    gathering = Gathering(scene, 1, inlets=2)
    gathering.send()
    assert {link for _, link in gathering.links} == {0}


def test_samples_arrive_although_a_side_link_brings_nothing(scene: SteppedZenohScene) -> None:
    gathering = Gathering(scene, 1)
    gathering.closed = {1}
    began_s = scene.now_s()
    gathering.send()
    assert scene.now_s() - began_s < LEASE_S
    began_s = scene.now_s()
    gathering.send()
    assert scene.now_s() - began_s < 1.0, "it is not used any more"
