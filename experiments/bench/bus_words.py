"""What the benchmark of the bus and its peer processes say to each other, and the event-loop side of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gradbus.runtime.bus import Bus, Subscription
from gradbus.runtime.control import Leave
from gradbus.runtime.frames import CONTROLLER, FrameKey, Kind
from gradbus.runtime.messages import ClientUpdate, Control, Identity, Message, ModelBlob, new_incarnation
from gradbus.runtime.network import NetworkConfig

DOMAINS = {"unicast": 23, "multicast": 24}  # a domain has one network configuration in a process
HERE, PING, GOT, WATCH, LATE, END = "here", "ping", "got", "watch", "late", "end"
ECHO = "echo"  # name of a transfer that is to come back
ROOT = 0
ANSWER_S = 20.0
MEET_S = 120.0  # eight processes start, and the machine may be busy
_AGAIN_S = 0.05


def network(name: str) -> NetworkConfig:
    """Of one of ``DOMAINS``."""
    return NetworkConfig(multicast=name == "multicast", lease_s=10.0)  # a busy machine must not look like a death


class Words:
    """One end: says words and hears them. They travel as the reason of a ``Leave``, the only control message that is
    free text."""

    def __init__(self, bus: Bus, me: int, inbox: Subscription) -> None:
        self._bus = bus
        self._inbox = inbox
        self.identity = Identity(me, new_incarnation())
        self._transfers = 0

    async def say(self, word: str) -> None:
        await self._bus.publish(self.identity, Leave(word))

    async def hear(self, *, other: Callable[[Message], None] = lambda message: None) -> tuple[int, str]:
        """The next word of another end and who said it; whatever else comes goes to ``other``."""
        while True:
            match await self._inbox.get():
                case Control(sender=sender, body=Leave(reason=word)) if sender != self.identity.sender:
                    return sender, word
                case message:
                    other(message)

    async def hear_all(self, start: str, peers: Sequence[int], *, timeout_s: float = ANSWER_S) -> list[str]:
        """What each of these says that starts so.

        Raises:
            TimeoutError: some of them do not in time; the text names them.
        """
        words: dict[int, str] = {}
        try:
            await self._hear_all(words, start, peers, timeout_s)
        except TimeoutError:
            silent = sorted(set(peers) - words.keys())
            raise TimeoutError(f"readers {silent} have not said {start!r} after {timeout_s:g} s") from None
        return [words[peer] for peer in peers]

    async def _hear_all(self, words: dict[int, str], start: str, peers: Sequence[int], timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while len(words) < len(peers):
                sender, word = await self.hear()
                if sender in peers and word.startswith(start):
                    words[sender] = word

    async def meet(self, peers: Sequence[int]) -> None:
        """Say HERE until all of these have said it, too."""

        async def repeat() -> None:
            while True:
                await self.say(HERE)
                await asyncio.sleep(_AGAIN_S)

        repeating = asyncio.create_task(repeat(), name="meet")
        try:
            await self.hear_all(HERE, peers, timeout_s=MEET_S)
        finally:
            repeating.cancel()
            await asyncio.wait([repeating])

    async def send_model(self, payload: bytes | bytearray, name: str = "") -> int:
        """Send to all readers. Returns the number of the transfer."""
        self._transfers += 1
        key = FrameKey(Kind.MODEL, 1, 0, CONTROLLER, self.identity.incarnation, self._transfers, name)
        await self._bus.send_model(key, payload)
        return self._transfers

    async def send_update(self, payload: bytes | bytearray) -> None:
        """Send to the root."""
        self._transfers += 1
        me = self.identity
        await self._bus.send_update(FrameKey(Kind.UPDATE, 1, 0, me.sender, me.incarnation, self._transfers), 1, payload)

    async def receive_update(self) -> None:
        """Until one update is here in full."""
        received = 0
        async with asyncio.timeout(ANSWER_S):
            while True:
                message = await self._inbox.get()
                if isinstance(message, ClientUpdate):
                    received += len(message.frame.data)
                    if received == message.frame.total_bytes:
                        return


class Arrivals:
    """Counts the bytes of each transfer; ``done`` is called with the last frame of one."""

    def __init__(self, done: Callable[[ModelBlob], None]) -> None:
        self._done = done
        self._received: dict[int, int] = {}

    def __call__(self, message: Message) -> None:
        if isinstance(message, ModelBlob):
            frame = message.frame
            transfer = frame.key.transfer
            self._received[transfer] = self._received.get(transfer, 0) + len(frame.data)
            if self._received[transfer] == frame.total_bytes:
                del self._received[transfer]
                self._done(message)
