"""A rank's way to the arbiter of a store, with a bus that is none: what it says how often, and what it lets in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError

from gradbus.runtime.bus.transport_factory import reach_of
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import Frame
from gradbus.torch.store import client as store_client
from gradbus.torch.store.address import Address
from gradbus.torch.store.client import StoreClient
from gradbus.torch.store.link import patience_s
from gradbus.torch.store.messages import Message, StoreJoin, StoreStatus, decode, frame_of

ARBITER = 7
ADDRESS = Address(0, "job", 1, 2)
DEPARTED = StoreStatus("departed", "rank 1 took part already, as there")


def parsed(message: Message, *, sender: int, incarnation: int, to: int) -> Frame:
    head, body = frame_of(message, sender=sender, incarnation=incarnation, to=to)
    return frames.parse(head + bytes(body))


class Bus:
    """All there is of a bus for a client: each of its messages is answered at once, on the same thread.

    Attributes:
        said: by the client. answer: what the arbiter says to the so-and-so-manyth message, if anything.
    """

    is_sealed = True
    lease_s = 60.0

    def __init__(self, answer: Callable[[int], Message | None]) -> None:
        self.said: list[Message] = []
        self.answer = answer
        self.access_policy = SimpleNamespace(refusal="", absence="")
        self.misconfiguration = ""
        self.reach = reach_of(0, NetworkConfig())
        self.take: Callable[[Frame], None] = lambda frame: None

    def raw_endpoints(self) -> Any:
        return self

    def open_reader(self, topic: str, take: Callable[[Frame], None]) -> None:
        self.take = take

    def open_writer(self, topic: str) -> Any:
        return SimpleNamespace(matched=1)

    def write(self, writer: Any, frame: tuple[Any, ...]) -> bool:
        head, body = frame
        heard = frames.parse(head + bytes(body))
        self.said.append(decode(heard.data))
        answer = self.answer(len(self.said))
        if answer is not None:
            self.take(parsed(answer, sender=0, incarnation=ARBITER, to=heard.key.incarnation))
        return True

    async def matched(self, condition: Callable[[], bool], timeout_s: float) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


async def joined(bus: Bus, timeout_s: float) -> StoreClient:
    client = StoreClient(bus, ADDRESS, "here", lambda why: None)  # type: ignore[arg-type]
    await client.join(timeout_s, patience_s=60.0)
    return client


def test_a_rank_that_is_told_no_does_not_ask_again_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "JOIN_S", 60.0)
    for timeout_s in (0.1, 5.0):  # the longer one where the machine stands still in the short one
        bus = Bus(lambda number: DEPARTED if number < 5 else None)
        with pytest.raises(DistNetworkError, match=r"could not join within .* s: ") as raised:
            asyncio.run(joined(bus, timeout_s))
        assert [type(message) for message in bus.said] == [StoreJoin]
        if "took part" in str(raised.value):
            break
    assert "s: rank 1 took part already, as there" in str(raised.value)


def test_a_rank_asks_again_until_it_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "JOIN_S", 0.001)
    bus = Bus({2: DEPARTED, 5: StoreStatus("joined", "elsewhere")}.get)

    async def join_and_leave() -> None:
        await (await joined(bus, 60.0)).close()

    asyncio.run(join_and_leave())
    assert len(bus.said) >= 5
    assert {type(message) for message in bus.said} == {StoreJoin}


def test_news_that_the_loop_has_no_time_for_are_bounded() -> None:
    bus = Bus(lambda number: None)
    posted: list[Callable[[], None]] = []

    def post(function: Callable[..., None], *arguments: object) -> None:
        posted.append(lambda: function(*arguments))

    async def make() -> StoreClient:
        asyncio.get_running_loop().call_soon_threadsafe = post  # type: ignore[method-assign, assignment]
        return StoreClient(bus, ADDRESS, "here", lambda why: None)  # type: ignore[arg-type]

    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(make())
    loop.close()
    for _ in range(2):
        for _ in range(3 * store_client.MAX_BACKLOG):
            bus.take(parsed(StoreStatus("joined", "another"), sender=0, incarnation=8, to=client.incarnation))
        assert len(posted) == store_client.MAX_BACKLOG
        while posted:
            posted.pop()()


def test_a_taken_rank_is_asked_for_during_leases_between_machines_and_for_a_moment_where_the_kernel_tells() -> None:
    assert patience_s(None) == 3.0
    assert patience_s(10.0) == 25.0
