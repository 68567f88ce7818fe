"""What tests of the bus do again and again."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.bus.inbox_outlets import InboxOutlets
from gradbus.runtime.bus.receiver import Receiver
from gradbus.runtime.bus.subscription import Subscription
from gradbus.runtime.security.peers import CHALLENGE_TOPIC
from gradbus.runtime.security.sealed import Sealed
from gradbus.runtime.transport.channels import Inbox, ToClients, ToController
from gradbus.runtime.wire.assembler import Assembler, Verdict
from gradbus.runtime.wire.control import Hello, Leave, RetransmitRequest, RunEnded, Status, Welcome
from gradbus.runtime.wire.frames import CONTROLLER, FrameKey, Kind
from gradbus.runtime.wire.messages import ClientUpdate, Identity, ModelBlob

MIB = 1 << 20
CLIENT, CHIEF = Identity(7, 1 << 60), Identity(CONTROLLER, 5)
UPDATE = FrameKey(Kind.UPDATE, 1, 3, CLIENT.sender, CLIENT.incarnation, 1)
MODEL = FrameKey(Kind.MODEL, 1, 3, CONTROLLER, CHIEF.incarnation, 1)
BODIES = [
    Hello(3, 10, 20, True, 0, "idle", -1, -1, "here:1", -1),
    Welcome(7, 1 << 60, 5, 1, "q8", '{"chunk_elems": 8192}', 3, 0.5),
    Status(5, 0, "waiting", 0, 3),
    RetransmitRequest(7, 1 << 60, 3, 1, [1, 2, 3]),
    Leave("done"),
    RunEnded(5, True, "all rounds are done"),
]
CONTROLS = (ToController, ToClients, Inbox(CLIENT.incarnation))  # where these are sent
Run = Callable[[Callable[[], Any]], Any]


async def reads(bus: Bus, kind: type[Any], count: int = 1) -> None:
    """Wait until so many readers match the bus's writer of the topic."""
    bus.open_writer(kind)
    await bus.matched(lambda: bus.matched_readers(kind) >= count, timeout_s=20)


def readers_in_dds(bus: Bus, kind: type[Any]) -> int:
    """The readers that DDS matches with the bus's writer of the topic: also those that are no members'."""
    # An outlet that encrypts shows the number of members' readers alone.
    return int(lowest(writer_of(bus, kind)).matched)


def topics_of(bus: Bus) -> list[str]:
    """Names of the topics that are open, but for the one on which processes prove that they are alive."""
    return [name for name in participant_of(bus).topics.names if name != CHALLENGE_TOPIC]


def lowest(wrapped: Any) -> Any:
    """What is below all wrappers of a transport, an outlet or an inlet."""
    while hasattr(wrapped, "below"):
        wrapped = wrapped.below
    return wrapped


def participant_of(bus: Bus) -> Any:
    """The participant of the bus, for what DDS and the other processes of its job see."""
    return lowest(bus._transport)  # noqa: SLF001 - a user's bus does not show what it has in DDS


def membership_of(bus: Bus) -> Any:
    """The membership of the bus in its job."""
    wrapped: Any = bus._transport  # noqa: SLF001 - as above
    while not isinstance(wrapped, Sealed):
        wrapped = wrapped.below
    return wrapped.membership


def receiver_of(bus: Bus) -> Receiver:
    """The receive side of the bus, with its thread."""
    return bus._receiver  # noqa: SLF001 - as above


def writer_of(bus: Bus, kind: type[Any]) -> Any:
    """The bus's writer of the topic."""
    return bus._writers[kind]  # noqa: SLF001 - as above


def bound_inboxes(bus: Bus, most: int) -> None:
    """Have the bus address so many processes of clients at the same time at most, before it addresses any."""
    assert bus.open_inboxes == 0
    bus._inboxes = InboxOutlets(bus._open_inbox, bus._close_outlets, most=most)  # noqa: SLF001 - no user sets the bound


def inboxes_in_transport(bus: Bus) -> set[str]:
    """Names of the channels to single processes that the transport of the bus holds open, in whatever way."""
    transport = participant_of(bus)
    names = transport.topics.names if hasattr(transport, "topics") else [one.channel.name for one in transport.outlets]
    return {name for name in names if re.fullmatch(r"train/control/[0-9a-f]{16}", name)}


async def payload_from(inbox: Subscription, key: FrameKey, max_bytes: int) -> memoryview:
    """The payload of the transfer, from its frames."""
    assembler = Assembler()
    assembler.expect(key, max_bytes=max_bytes)
    async for message in inbox:
        assert isinstance(message, ClientUpdate | ModelBlob)
        if assembler.feed(message.frame) is Verdict.COMPLETE:
            return assembler.take(key)
    raise AssertionError("the bus closed first")


async def delays_of_the_loop(stop: asyncio.Event) -> list[float]:
    """Seconds by which the loop was late, a sample a millisecond and one at least, ascending."""
    late = []
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        late.append(time.perf_counter() - before - 0.001)
        if stop.is_set():
            return sorted(late)
