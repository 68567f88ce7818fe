"""What comes before a bus: whoever is cancelled while a participant is opened leaves none behind."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from bus_helpers import Run
from patience import eventually
from ports import free_port
from structlog.testing import capture_logs

from gradbus.runtime.bus import transport_factory
from gradbus.runtime.bus.transport_factory import closed_on_error, open_transport, transport_maker
from gradbus.runtime.errors import BusError, ConfigError, NotReachable
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.api import Traits


class SlowParticipant:
    """Takes until it is told so to open and to close."""

    fast_path_fault = None

    def __init__(self) -> None:
        self.began: list[str] = []
        self.ended: list[str] = []
        self.may_open, self.may_close = threading.Event(), threading.Event()

    def open(self) -> Any:
        self._do("open", self.may_open)
        return self

    def close(self) -> None:
        self._do("close", self.may_close)

    def _do(self, what: str, may_end: threading.Event) -> None:
        self.began.append(what)
        assert may_end.wait(30)
        self.ended.append(what)

    async def began_to(self, what: str) -> None:
        await eventually(lambda: what in self.began)


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel it, and let it take note."""
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)


async def is_cancelled(task: asyncio.Task[Any]) -> None:
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_participant_whose_opening_is_cancelled_twice_is_closed(run: Run) -> None:
    async def main() -> None:
        participant = SlowParticipant()
        participant.may_close.set()
        opening = asyncio.create_task(open_transport(lambda: participant.open))
        await participant.began_to("open")
        await cancel(opening)
        await cancel(opening)
        participant.may_open.set()
        await is_cancelled(opening)
        assert participant.ended == ["open", "close"]

    run(main)


def test_an_opening_that_is_cancelled_again_while_it_closes_ends_after_the_close(run: Run) -> None:
    async def main() -> None:
        participant = SlowParticipant()
        opening = asyncio.create_task(open_transport(lambda: participant.open))
        await participant.began_to("open")
        await cancel(opening)
        participant.may_open.set()
        await participant.began_to("close")
        await cancel(opening)
        assert not opening.done()
        participant.may_close.set()
        await is_cancelled(opening)
        assert participant.ended == ["open", "close"]

    run(main)


def test_a_cancelled_opening_that_fails_is_cancelled(run: Run) -> None:
    async def main() -> None:
        participant = SlowParticipant()

        def fail() -> Any:
            participant.open()
            raise ZeroDivisionError

        opening = asyncio.create_task(open_transport(lambda: fail))
        await participant.began_to("open")
        await cancel(opening)
        participant.may_open.set()
        await is_cancelled(opening)
        assert participant.began == ["open"]

    run(main)


def test_a_participant_without_a_bus_is_closed_before_a_cancel_gets_through(run: Run) -> None:
    async def main() -> None:
        participant: Any = SlowParticipant()

        async def fail() -> None:
            async with closed_on_error(participant):
                raise ZeroDivisionError

        failing = asyncio.create_task(fail())
        await participant.began_to("close")
        await cancel(failing)
        assert not failing.done()
        participant.may_close.set()
        await is_cancelled(failing)
        assert participant.ended == ["close"]

    run(main)


class Relay:
    """Nothing answers there until it has started."""

    def __init__(self) -> None:
        self.attempts = 0
        self.has_started = False
        self.error: BusError = NotReachable("tls/relay:443: nothing listens on port 443 there")

    def open(self) -> Any:
        self.attempts += 1
        if self.has_started:
            return SimpleNamespace(traits=Traits())
        raise self.error


def test_a_transport_is_opened_as_soon_as_the_relay_that_it_needs_has_started(run: Run) -> None:
    async def main() -> None:
        relay, found = Relay(), []

        def find() -> Any:
            found.append("keys are read")
            return relay.open

        opening = asyncio.create_task(open_transport(find))
        await eventually(lambda: relay.attempts >= 2)
        relay.has_started = True
        assert (await opening).traits == Traits()
        assert len(found) == 1

    run(main)


def test_a_relay_that_never_starts_is_an_error_that_says_how_long_it_was_tried(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_factory, "FIRST_LINK_S", 0.3)
    relay = Relay()
    with pytest.raises(BusError, match=r"nothing listens on port 443 there. It was tried for 0.3 s"):
        run(lambda: open_transport(lambda: relay.open))
    assert relay.attempts >= 2


def test_what_no_later_attempt_would_change_is_an_error_at_once(run: Run) -> None:
    relay = Relay()
    relay.error = BusError("tls/relay:443: its certificate is signed by another authority")
    with pytest.raises(BusError, match="another authority"):
        run(lambda: open_transport(lambda: relay.open))
    assert relay.attempts == 1


def test_waiting_for_a_relay_can_be_cancelled(run: Run) -> None:
    async def main() -> None:
        relay = Relay()
        opening = asyncio.create_task(open_transport(lambda: relay.open))
        await eventually(lambda: relay.attempts >= 2)
        opening.cancel()
        await is_cancelled(opening)

    run(main)


def test_a_bus_that_nothing_protects_is_not_opened_beyond_loopback() -> None:
    links = LinkConfig(connect=("tls/relay.example.org:443",))
    with pytest.raises(ConfigError, match=r"this bus leaves the machine .*or a relay\) and is not protected"):
        transport_maker("job", domain=0, network=NetworkConfig(links=links), fast=None, security="none")
    local = NetworkConfig(links=LinkConfig(connect=("tcp/127.0.0.1:7447",)))
    assert callable(transport_maker("job", domain=0, network=local, fast=None, security="none"))


def test_the_warning_of_a_bus_that_nothing_protects_names_the_endpoints_of_its_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport_factory, "other_users", lambda: ["eve"])
    links = LinkConfig(listen=tuple(f"tcp/127.0.0.1:{free_port()}" for _ in range(2)))
    with capture_logs() as logs:
        transport_maker("job", domain=0, network=NetworkConfig(links=links), fast=None, security="none")().close()
    (warning,) = [entry for entry in logs if entry["event"] == "not protected"]
    assert warning["interface"] == " or ".join(links.listen)
    assert warning["users"] == ["eve"]
