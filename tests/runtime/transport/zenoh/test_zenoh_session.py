"""What a session of Zenoh does with what is published, over a true relay."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import zenoh
from patience import until
from tcp_proxy import TcpProxy
from zenoh_node import Relay, session_config

from gradbus.runtime.transport.zenoh import zenoh_session
from gradbus.runtime.transport.zenoh.zenoh_session import ZenohSession

BURST = 2000
KEY = "gradbus/1/a-job/a-channel"
WITHIN_S = 50.0

pytestmark = pytest.mark.slow


@pytest.fixture
def relay() -> Iterator[Relay]:
    with Relay() as relay:
        yield relay


@pytest.fixture
def session(relay: Relay) -> Iterator[ZenohSession]:
    session = ZenohSession(zenoh.open(session_config("client", relay.port)))
    session.start(lambda _: None, lambda: None)
    yield session
    session.close()


@pytest.mark.parametrize("urgent", [True, False])
def test_a_burst_of_small_messages_arrives_whole(relay: Relay, session: ZenohSession, urgent: bool) -> None:
    found: list[bytes] = []
    all_are_here, is_subscribed = threading.Event(), threading.Event()

    def note(_: str, message: bytes) -> None:
        if message == b"first":
            is_subscribed.set()
        else:
            found.append(message)
            if len(found) == BURST:
                all_are_here.set()

    receiver = ZenohSession(zenoh.open(session_config("client", relay.port)))
    try:
        receiver.subscribe(KEY, note)
        until(lambda: session.publish(KEY, b"first", urgent=urgent) and is_subscribed.wait(0.05))
        for number in range(BURST):
            assert session.publish(KEY, number.to_bytes(64, "big"), urgent=urgent)
        assert all_are_here.wait(WITHIN_S), f"{len(found)} of {BURST}"
    finally:
        receiver.close()
    assert [int.from_bytes(one, "big") for one in found] == list(range(BURST))


@pytest.mark.parametrize("size", [64, 1 << 20])
def test_what_is_published_without_a_link_is_refused(relay: Relay, session: ZenohSession, size: int) -> None:
    assert session.publish(KEY, bytes(size), urgent=False)
    relay.kill()
    until(lambda: not session.is_linked)
    assert not session.publish(KEY, bytes(size), urgent=False)


def test_a_link_that_ends_while_what_is_published_waits_for_room_is_closed_and_comes_back(relay: Relay) -> None:
    """Zenoh closes no link before whoever puts a message on it has stopped to wait, nor any other one meanwhile."""
    links: list[bool] = []
    is_subscribed = threading.Event()
    receiver = ZenohSession(zenoh.open(session_config("client", relay.port)))
    with TcpProxy(relay.port) as proxy:
        sender = ZenohSession(zenoh.open(session_config("client", proxy.port)))
        try:
            sender.start(links.append, lambda: None)
            receiver.subscribe(KEY, lambda *_: is_subscribed.set())
            until(lambda: sender.publish(KEY, b"first", urgent=False) and is_subscribed.wait(0.05))
            proxy.hold()
            while sender.publish(KEY, bytes(1 << 20), urgent=False):
                pass
            proxy.end_answers()
            until(lambda: False in links)
            proxy.let_pass()
            until(lambda: links[-1])
        finally:
            sender.close()
            receiver.close()


def test_only_keys_that_are_used_often_are_declared_and_a_bounded_number_in_the_life_of_a_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is declared is never freed at the relay, and a number of a key that comes again would stand for two keys."""
    monkeypatch.setattr(zenoh_session, "MAX_DECLARED", 3)
    monkeypatch.setattr(zenoh_session, "MAX_COUNTED", 5)
    keys = zenoh_session.DeclaredKeys()
    for round_id in range(100):  # each has a key of its own, as for a model
        for _ in range(zenoh_session.DECLARED_AT - 1):
            assert not keys.is_due(f"round {round_id}")
    for key in ("a", "b", "c", "d"):
        uses = [keys.is_due(key) for _ in range(zenoh_session.DECLARED_AT)]
        assert uses == [False] * (zenoh_session.DECLARED_AT - 1) + [key != "d"]
        if uses[-1]:
            keys.declared[key] = object()
        assert not keys.is_due(key)


def test_a_session_that_has_declared_much_uses_no_declared_keys(
    relay: Relay, session: ZenohSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zenoh_session, "DECLARED_AT", 2)
    monkeypatch.setattr(zenoh_session, "MAX_NUMBERED", 3)
    receiver = ZenohSession(zenoh.open(session_config("client", relay.port)))
    found: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    try:
        receiver.subscribe(f"{KEY}/*", lambda _, message: found.put(message))
        for number in range(6):
            until(lambda: session.publish(f"{KEY}/1", b"unseen", urgent=True) and not found.empty())
            while found.get(timeout=WITHIN_S) != bytes([number]):
                assert session.publish(f"{KEY}/1", bytes([number]), urgent=True)
            session.declare_token(f"{KEY}/token/{number}")
    finally:
        receiver.close()


@pytest.mark.parametrize("most", [2, 1_000])
def test_messages_of_keys_that_are_used_again_arrive_in_order(
    relay: Relay, session: ZenohSession, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such keys are declared to the relay, as many as a session may declare."""
    monkeypatch.setattr(zenoh_session, "MAX_DECLARED", most)
    monkeypatch.setattr(zenoh_session, "DECLARED_AT", 4)
    found: list[tuple[str, bytes]] = []
    all_are_here = threading.Event()
    keys = [f"{KEY}/{number}" for number in range(5)]
    order = [keys[number] for number in (0, 0, 0, 1, 1, 1, 0, 2, 2, 3, 3, 4, 4, 0, 0)]

    def note(key: str, message: bytes) -> None:
        if message != b"unseen":
            found.append((key, message))
            if len(found) == len(order):
                all_are_here.set()

    for key in keys:  # nobody has subscribed yet
        for _ in range(3):
            assert session.publish(key, b"unseen", urgent=True)
    receiver = ZenohSession(zenoh.open(session_config("client", relay.port)))
    try:
        is_subscribed = threading.Event()
        receiver.subscribe(f"{KEY}/*", note)
        receiver.subscribe("gradbus/1/a-job/ready", lambda *_: is_subscribed.set())
        until(lambda: session.publish("gradbus/1/a-job/ready", b"", urgent=True) and is_subscribed.wait(0.05))
        for number, key in enumerate(order):
            assert session.publish(key, bytes([number]), urgent=True)
        assert all_are_here.wait(WITHIN_S), f"{len(found)} of {len(order)}"
    finally:
        receiver.close()
    assert found == [(key, bytes([number])) for number, key in enumerate(order)]
