"""What a relay knows of a process that has ended, and what the others make of it, over a simulated relay."""

from __future__ import annotations

from typing import Any

import pytest
from joined_endpoints import LEASE_S, VOLATILE, Joined, Stranger
from played_router import PlayedConnection
from transport_scenes import SteppedZenohScene, write

from gradbus.runtime.network.disconnections import (
    DISCONNECTED,
    REDIAL_S,
    TURN_S,
    Disconnections,
    redial_s,
)
from gradbus.runtime.transport.zenoh.keys import owner_in, session_token, session_tokens
from gradbus.runtime.transport.zenoh.place import GRACE_S


@pytest.fixture
def scene() -> SteppedZenohScene:
    return SteppedZenohScene()


def test_a_session_that_does_not_dial_again_in_the_time_of_its_link_is_due_once() -> None:
    found = Disconnections(LEASE_S, 10.0)
    found.note_closed("near", 0.0, 10.0)
    found.note_closed("far", 0.05, 10.0)
    assert found.take_due(10.0 + REDIAL_S - 0.001) == []
    assert found.due_in_s(10.0 + REDIAL_S - 0.001) == pytest.approx(0.001)
    assert found.take_due(10.0 + REDIAL_S) == ["near"]
    assert found.take_due(10.0 + redial_s(0.05)) == ["far"]
    assert found.take_due(100.0) == []
    assert found.due_in_s(100.0) is None


def test_a_session_that_has_dialled_again_is_not_due() -> None:
    found = Disconnections(LEASE_S, 10.0)
    found.note_closed("a", 0.0, 10.0)
    found.note_open("a")
    found.note_open("b")
    assert found.take_due(100.0) == []


def test_a_live_process_has_time_for_four_round_trips_and_a_killed_one_nearby_is_known_within_a_tenth_of_a_second() -> (
    None
):
    assert redial_s(0.05) > 4 * 0.05
    assert redial_s(0.001) + GRACE_S < 0.1


def test_who_has_stood_still_takes_no_link_that_was_closed_meanwhile_for_the_end_of_a_process() -> None:
    found, now_s = Disconnections(LEASE_S, 10.0), 10.0 + LEASE_S / 2 + TURN_S
    closed = PlayedConnection()
    assert found.note_ended("a", closed, now_s - 0.1)
    assert not found.note_ended("b", closed, now_s + 0.1), "others may have given it up"
    found.note_turn(now_s + 0.1)
    assert not found.note_ended("c", closed, now_s + 0.2), "what they have done may come only now"
    found.note_turn(now_s + 1.1)
    assert found.note_ended("d", closed, now_s + 1.2)
    assert not found.note_ended("e", PlayedConnection(is_closed_by_peer=False), now_s + 1.2)
    assert found.take_due(now_s + 9.0) == ["a", "d"]


def test_a_token_names_the_transport_of_its_session() -> None:
    owner = bytes(range(12))
    token = session_token("my job/1", "c1a", owner)
    assert owner_in(token) == owner
    assert owner_in(token + "0") is None
    assert owner_in(f"gradbus/1/job/session/c1a/{owner.hex().upper()}") is None
    assert session_tokens("my job/1") == token.replace(owner.hex(), "*").replace("c1a", "*")


def announce(joined: Joined, content: bytes = DISCONNECTED, *, by: Any = None) -> None:
    """Publish what the relay does under the token of the session whose outlet it is."""
    token = session_token("one", "c1", joined.source.transport.own)
    joined.scene.relay.pass_on(by, token, content, 2)


def disconnected(joined: Joined) -> set[int]:
    """Return what the inlet reports."""
    found = set[int]()
    joined.scene.pass_time(0.5)
    if joined.inlet.refresh():
        found = joined.inlet.take_disconnected()
    return found


def test_a_process_that_was_killed_is_reported_as_disconnected_once(scene: SteppedZenohScene) -> None:
    joined = Joined(scene)
    joined.inlet.refresh()
    (handle,) = joined.inlet.peers()
    joined.source.kill()
    scene.until(lambda: not joined.inlet.peers(), "its token has gone")
    assert joined.inlet.refresh()
    assert joined.inlet.take_disconnected() == set(), "which says nothing about its process"
    announce(joined)
    assert disconnected(joined) == {handle}
    announce(joined)
    assert disconnected(joined) == {handle}, "the bus knows which it has reported"
    assert disconnected(joined) == set()


def test_the_report_is_believed_before_the_grace_of_a_missed_token_is_over(scene: SteppedZenohScene) -> None:
    joined = Joined(scene)
    joined.source.kill()
    scene.pass_time(GRACE_S / 5)  # the token goes
    assert joined.inlet.peers()
    announce(joined)
    scene.pass_time(GRACE_S / 5)
    assert not joined.inlet.peers()


@pytest.mark.parametrize("content", [DISCONNECTED, b"", b"something else"])
def test_no_report_takes_away_a_process_whose_tokens_are_there(scene: SteppedZenohScene, content: bytes) -> None:
    joined, stranger = Joined(scene), Stranger(scene)
    announce(joined, content, by=stranger.session)
    assert disconnected(joined) == set()
    assert joined.inlet.peers()
    assert write(joined.outlet, 0) == [True]
    assert joined.arrive(1) == [0]


def test_a_process_that_is_back_before_the_bus_looks_is_not_reported(scene: SteppedZenohScene) -> None:
    joined = Joined(scene, VOLATILE)
    joined.source.session.is_refused = True  # its attempts to dial fail
    joined.source.session.break_link()
    scene.until(lambda: not joined.inlet.peers(), "its token has gone")
    announce(joined)
    scene.pass_time(0.1)
    joined.source.session.is_refused = False
    scene.until(lambda: joined.inlet.peers(), "it is back")
    assert disconnected(joined) == set()


def test_while_our_own_link_is_down_nobody_is_lost_and_nothing_is_reported(scene: SteppedZenohScene) -> None:
    joined = Joined(scene)
    joined.target.session.break_link()
    scene.pass_time(LEASE_S / 2)
    assert disconnected(joined) == set()
    assert joined.inlet.peers()
