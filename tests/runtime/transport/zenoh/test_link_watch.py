"""Which ends of links a member that listens announces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from patience import until
from played_router import PlayedConnection, PlayedRouter

from gradbus.runtime.transport.zenoh.link_watch import LinkWatch


class Scene:
    """A router that is watched, and the connections of its links by address."""

    def __init__(self, most: int = 100) -> None:
        self.router = PlayedRouter()
        self.connections: dict[str, PlayedConnection] = {}
        self.found = set[str]()
        self.watch = LinkWatch(self.router, 60.0, self._find, most)

    def _find(self, addresses: Iterable[str]) -> dict[str, PlayedConnection]:
        known = {one: self.connections[one] for one in addresses if one in self.connections}
        self.found.update(known)
        return known

    def open(self, peer: str, address: str, *, is_closed_by_peer: bool = True) -> None:
        """Open a link of a session, whose connection its host closes later, or not."""
        self.connections[address] = PlayedConnection(is_closed_by_peer=is_closed_by_peer)
        self.router.open(peer, address)
        until(lambda: address in self.found)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.watch.close()


def test_a_link_that_its_host_has_closed_is_announced_unless_the_session_is_back(scene: Scene) -> None:
    for peer, number in (("killed", 1), ("back", 2), ("last", 4)):
        scene.open(peer, f"10.0.0.1:{number}")
    scene.open("cut off", "10.0.0.1:3", is_closed_by_peer=False)
    for peer, number in (("killed", 1), ("back", 2), ("cut off", 3)):
        scene.router.end(peer, f"10.0.0.1:{number}")
    scene.open("back", "10.0.0.1:5")
    until(lambda: scene.router.announced)
    scene.router.end("last", "10.0.0.1:4")
    until(lambda: len(scene.router.announced) == 2)
    assert scene.router.announced == ["killed", "last"]


def test_a_session_that_has_dialled_again_before_its_old_link_ended_is_not_announced(scene: Scene) -> None:
    scene.open("moved", "10.0.0.1:1")
    scene.open("moved", "10.0.0.1:2")
    scene.open("last", "10.0.0.1:3")
    scene.router.end("moved", "10.0.0.1:1")
    scene.router.end("last", "10.0.0.1:3")
    until(lambda: scene.router.announced)
    assert scene.router.announced == ["last"]


def test_the_end_of_a_link_that_is_not_reported_is_found_by_looking(scene: Scene) -> None:
    scene.open("a", "10.0.0.1:1")
    scene.open("b", "10.0.0.1:2")
    scene.router.end("a", "10.0.0.1:1", reported=False)
    until(lambda: scene.router.announced == ["a"])
    assert scene.connections["10.0.0.1:1"].is_closed
    assert not scene.connections["10.0.0.1:2"].is_closed


def test_all_descriptors_are_given_back_when_the_watch_ends() -> None:
    scene = Scene()
    scene.open("a", "10.0.0.1:1")
    scene.watch.close()
    assert scene.connections["10.0.0.1:1"].is_closed


def test_connections_are_held_only_as_far_as_there_are_descriptors_and_the_others_are_left_to_the_lease() -> None:
    scene = Scene(most=1)
    scene.open("first", "10.0.0.1:1")
    scene.connections["10.0.0.1:2"] = PlayedConnection()
    scene.router.open("second", "10.0.0.1:2")
    scene.router.end("second", "10.0.0.1:2")
    scene.router.end("first", "10.0.0.1:1")
    until(lambda: scene.router.announced)
    scene.watch.close()
    assert scene.router.announced == ["first"]
    assert scene.found == {"10.0.0.1:1"}
