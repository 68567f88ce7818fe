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

from gradbus.runtime.transport.zenoh.messages import PROBE, SAMPLE, START

LARGE = replace(VOLATILE.opened(), side_links=SIDE_LINKS)
SMALL = VOLATILE.opened()
SAMPLES = 5


def link_of(key: str) -> int:
    """Return for which link of an inlet a message is."""
    parts = key.split("/")
    return int(parts[-2]) if parts[-4] == "to" else 0


class Gathering:
    """An inlet, outlets of several processes, and the links over which samples come to it.

    Attributes:
        links: counts of samples by outlet and link, which is 0 for what is for all inlets. closed: links that bring
            nothing; 0: those of the outlets.
        left: messages of outlets: their kind, the link that they are for, and whether they left over a side link.
    """

    def __init__(self, scene: SteppedZenohScene, outlets: int, *, inlets: int = 1, has_side_links: bool = True) -> None:
        self.scene = scene
        self.links: Counter[tuple[str, int]] = Counter()
        self.closed: set[int] = set()
        self.left: list[tuple[int, int, bool]] = []
        targets = [scene.join("one", LEASE_S) for _ in range(inlets)]
        for target in targets:
            target.session.receive = self._noting(target.session.receive)
        self.inlets: list[Any] = [target.transport.inlet(LARGE if has_side_links else SMALL) for target in targets]
        sources = [scene.join("one", LEASE_S) for _ in range(outlets)]
        for source in sources:
            source.session.publish = self._leaving(source.session.publish)
        self.outlets: list[Any] = [source.transport.outlet(LARGE) for source in sources]
        scene.until(lambda: all(len(one.peers()) == outlets for one in self.inlets), "the inlets match")
        scene.until(lambda: all(len(one.peers()) == inlets for one in self.outlets), "the outlets match")

    def _leaving(self, publish: Callable[..., bool]) -> Callable[..., bool]:
        def left(key: str, message: bytes, *, urgent: bool, apart: bool) -> bool:
            self.left.append((message[0], link_of(key), apart))
            return (apart and 0 in self.closed) or publish(key, message, urgent=urgent, apart=apart)

        return left

    def _noting(self, receive: Callable[[str, bytes], None]) -> Callable[[str, bytes], None]:
        def noted(key: str, message: bytes) -> None:
            is_for_all = "/all/" in key
            if (link := 1 if is_for_all else link_of(key)) in self.closed and link:
                return
            if message[0] == SAMPLE:
                self.links[key.rpartition("/")[2], 0 if is_for_all else link] += 1
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


def test_what_an_inlet_without_side_links_is_to_have_keeps_its_order(scene: SteppedZenohScene) -> None:
    gathering = Gathering(scene, 1, has_side_links=False)
    gathering.closed = {0}
    write(gathering.outlets[0], 0)
    scene.until(lambda: any(kind == PROBE for kind, *_ in gathering.left), "what has no answer is asked for")
    assert {(link, apart) for kind, link, apart in gathering.left if kind in (SAMPLE, PROBE)} == {(0, True)}
    assert {(link, apart) for kind, link, apart in gathering.left if kind == START} == {(0, False)}
