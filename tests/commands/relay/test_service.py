"""What a relay makes of the reports of its router, on an event loop of its own."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from patience import eventually, run
from played_router import PlayedConnection, PlayedRouter

import gradbus
from gradbus.commands.relay import service
from gradbus.commands.relay.service import LINES_BURST, Relay
from gradbus.runtime.transport.zenoh.router import JobMember


class Log:
    """The events that are logged meanwhile."""

    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    def events(self, event: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self._stream.getvalue().splitlines()]
        return [one for one in found if one["event"] == event]


@pytest.fixture
def log() -> Iterator[Log]:
    stream = io.StringIO()
    gradbus.log_to(stream, style="json")
    yield Log(stream)
    gradbus.log_to(None)


def test_a_session_whose_end_is_not_reported_is_found_and_closed_once(log: Log) -> None:
    async def main() -> None:
        router = PlayedRouter()
        relay = Relay(router, max_sessions=9, drain_s=0.0)
        serving = asyncio.create_task(relay.serve(lambda: router.open("a", "10.0.0.1:1", "site-1")))
        await eventually(lambda: log.events("session opened"))
        assert relay.is_ready
        router.end("a", "10.0.0.1:1", reported=False)
        await eventually(lambda: log.events("session closed"))
        router.end("a", "10.0.0.1:1")
        relay.stop()
        await serving
        assert not relay.is_ready
        assert router.is_closed

    run(main())
    assert len(log.events("session closed")) == 1


def test_jobs_of_a_session_are_logged_once_each(log: Log) -> None:
    async def main() -> None:
        router = PlayedRouter()
        router.members = [JobMember("a", "cells", "0a"), JobMember("a", "cells", "0b"), JobMember("x", "faces", "0c")]
        relay = Relay(router, max_sessions=9, drain_s=0.0)
        serving = asyncio.create_task(relay.serve(lambda: router.open("a", "10.0.0.1:1")))
        await eventually(lambda: log.events("session joined"))
        router.open("b", "10.0.0.1:2")
        router.members.append(JobMember("b", "cells", "0d"))
        await eventually(lambda: len(log.events("session joined")) == 2)
        relay.stop()
        await serving

    run(main())
    joined = [(line["peer"], line["job"], line["senders"]) for line in log.events("session joined")]
    assert joined == [("a", "cells", ["0a", "0b"]), ("b", "cells", ["0d"])]


def test_many_sessions_at_once_are_counted_and_not_all_logged(log: Log) -> None:
    many = 20 * LINES_BURST

    async def main() -> None:
        router = PlayedRouter()
        relay = Relay(router, max_sessions=10_000, drain_s=0.0)
        serving = asyncio.create_task(relay.serve(lambda: None))
        await asyncio.sleep(0)  # it has begun
        for number in range(many):
            router.open("p", f"10.0.0.1:{number}")
        await eventually(lambda: f'sessions{{node=""}} {float(many)}' in relay.render_metrics())
        relay.stop()
        await serving
        assert f'closed_total{{node=""}} {float(many)}' in relay.render_metrics()

    run(main())
    logged = len(log.events("session opened")) + len(log.events("session closed"))
    assert LINES_BURST <= logged < 2 * many


def test_a_relay_with_sessions_drains_until_the_last_has_gone(log: Log) -> None:
    async def main() -> None:
        router = PlayedRouter()
        relay = Relay(router, max_sessions=9, drain_s=600.0)
        serving = asyncio.create_task(relay.serve(lambda: router.open("a", "10.0.0.1:1")))
        await eventually(lambda: log.events("session opened"))
        relay.stop()
        await eventually(lambda: log.events("relay drains"))
        assert not router.is_closed
        router.open("b", "10.0.0.1:2")
        router.end("a", "10.0.0.1:1")
        await eventually(lambda: log.events("session closed"))
        assert not serving.done()
        router.end("b", "10.0.0.1:2")
        await serving

    run(main())
    assert log.events("relay ends")[0]["sessions"] == 0


def test_a_session_that_its_host_has_closed_is_announced_unless_it_comes_back(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = {f"10.0.0.1:{number}": PlayedConnection(is_closed_by_peer=number != 3) for number in range(1, 6)}
    found = set[str]()

    def find(addresses: Iterable[str]) -> dict[str, PlayedConnection]:
        new = {one: connections[one] for one in addresses}
        found.update(new)
        return new

    monkeypatch.setattr(service, "find_connections", find)

    async def main() -> None:
        router = PlayedRouter()
        relay = Relay(router, max_sessions=9, drain_s=0.0)
        serving = asyncio.create_task(relay.serve(lambda: None))
        await eventually(lambda: relay.is_ready)
        for peer, number in (("killed", 1), ("back", 2), ("cut off", 3), ("last", 4)):
            router.open(peer, f"10.0.0.1:{number}")
        await eventually(lambda: len(found) == 4)
        for peer, number in (("killed", 1), ("back", 2), ("cut off", 3)):
            router.end(peer, f"10.0.0.1:{number}")
        router.open("back", "10.0.0.1:5")
        await eventually(lambda: router.announced)
        router.end("last", "10.0.0.1:4")
        await eventually(lambda: len(router.announced) == 2)
        relay.stop()
        await serving
        assert router.announced == ["killed", "last"]

    run(main())
