"""A transport on links that listens is a relay for its clients, with the same limits."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import session_process
from patience import PATIENT_S, until
from ports import free_port
from tls_scene import HOST
from zenoh import CongestionControl

from gradbus.runtime.network.disconnections import DISCONNECTED
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.api import PeerId
from gradbus.runtime.transport.zenoh.keys import session_tokens
from gradbus.runtime.transport.zenoh.opening import open_on_links
from gradbus.runtime.transport.zenoh.place import ZenohPlace
from gradbus.runtime.transport.zenoh.session import open_session

pytestmark = pytest.mark.slow

KEY = "gradbus/1/cells/model/all/0"


@pytest.fixture
def clients() -> Iterator[tuple[Any, Any]]:
    """Two sessions at a transport that listens."""
    endpoint = f"tcp/{HOST}:{free_port()}"
    with contextlib.ExitStack() as opened:
        listening = open_on_links("cells", 0, NetworkConfig(links=LinkConfig(listen=(endpoint,))))
        opened.callback(listening.close)
        one, two = (opened.enter_context(open_session(LinkConfig(connect=(endpoint,)))) for _ in range(2))
        yield one, two


def subscribed(session: Any, keys: str) -> queue.SimpleQueue[bytes]:
    arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    session.declare_subscriber(keys, lambda one: arrived.put(one.payload.to_bytes()))
    return arrived


def put_until(session: Any, content: bytes, arrived: queue.SimpleQueue[bytes]) -> list[int]:
    """Send until it arrives. All that was sent before has passed then, or was dropped. Returns the sizes of what has
    arrived before it."""
    until_s, sizes = time.monotonic() + PATIENT_S, []
    while time.monotonic() < until_s:
        session.put(KEY, content)
        with contextlib.suppress(queue.Empty):
            while (found := arrived.get(timeout=0.2)) != content:
                sizes.append(len(found))
            return sizes
    raise AssertionError(f"{content!r} has not arrived")


def test_who_listens_forwards_no_keys_of_others(clients: tuple[Any, Any]) -> None:
    sender, receiver = clients
    others, own = subscribed(receiver, "other/**"), subscribed(receiver, "gradbus/**")
    put_until(sender, b"first", own)
    sender.put("other/key", b"of nobody")
    put_until(sender, b"last", own)
    assert others.empty()


def test_who_listens_drops_a_message_that_is_larger_than_any_of_gradbus(clients: tuple[Any, Any]) -> None:
    sender, receiver = clients
    own = subscribed(receiver, "gradbus/**")
    put_until(sender, b"first", own)
    sender.put("gradbus/1/cells/large", bytes(17 << 20), congestion_control=CongestionControl.BLOCK)
    assert max(put_until(sender, b"last", own), default=0) < 1 << 20


def watched_connections() -> int:
    """Return how many sockets of this process have a second descriptor: a watch has one of each connection."""
    sockets = list[str]()
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.append(os.readlink(one))
    return sum(number > 1 for name, number in Counter(sockets).items() if name.startswith("socket:"))


def test_who_listens_tells_itself_and_its_clients_when_the_process_of_one_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a relay does. All would know of it after their lease, of ten minutes."""
    endpoint, lease_s = f"tcp/{HOST}:{free_port()}", 600.0
    told: queue.SimpleQueue[PeerId] = queue.SimpleQueue()
    before = watched_connections()
    monkeypatch.setattr(ZenohPlace, "note_disconnected", lambda place, owner: told.put(owner))
    with contextlib.ExitStack() as opened:
        links = LinkConfig(listen=(endpoint,), lease_s=lease_s)
        opened.callback(open_on_links("cells", 0, NetworkConfig(links=links)).close)
        other = opened.enter_context(open_session(LinkConfig(connect=(endpoint,), lease_s=lease_s)))
        arrived = subscribed(other, session_tokens("cells"))
        for _ in range(2):
            spec = {"job": "cells", "lease_s": lease_s, "connect": [endpoint]}
            with session_process.started(spec) as process:
                until(lambda: watched_connections() == before + 2)
                process.kill()
                assert arrived.get(timeout=PATIENT_S) == DISCONNECTED
                assert told.get(timeout=PATIENT_S) == session_process.OWNER
        assert arrived.empty()
