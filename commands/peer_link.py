"""Two processes or more that measure the bus between them: their short texts to each other, and transfers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gradbus.runtime.bus.bus import Bus, Subscription
from gradbus.runtime.wire.control import Leave
from gradbus.runtime.wire.frames import CONTROLLER, FrameKey, Kind
from gradbus.runtime.wire.messages import Control, Identity, Message, new_incarnation

ROOT, PEER = 0, 1  # who measures, and the first that answers
HERE, PING, GOT, END = "here", "ping", "got", "end"
_AGAIN_S = 0.05


class Link:
    """One end: sends short texts to all other ends, and receives theirs. They travel as the reason of a ``Leave``, the
    only control message that is free text."""

    def __init__(self, bus: Bus, me: int, inbox: Subscription) -> None:
        self._bus = bus
        self._inbox = inbox
        self.identity = Identity(me, new_incarnation())
        self._transfers = 0

    async def say(self, word: str) -> None:
        await self._bus.publish(self.identity, Leave(word), on=Control)  # among equals, as ranks are

    async def hear(self, other: Callable[[Message], None] = lambda message: None) -> tuple[int, str]:
        """Sender and text of the next one of another end; all other messages go to ``other``."""
        while True:
            match await self._inbox.get():
                case Control(sender=sender, body=Leave(reason=word)) if sender != self.identity.sender:
                    return sender, word
                case message:
                    other(message)

    @asynccontextmanager
    async def saying(self, word: str) -> AsyncIterator[None]:
        """Repeat the text while the block runs: its receivers may not be there yet."""

        async def repeat() -> None:
            while True:
                await self.say(word)
                await asyncio.sleep(_AGAIN_S)

        repeating = asyncio.create_task(repeat(), name="meet")
        try:
            yield
        finally:
            repeating.cancel()
            await asyncio.wait([repeating])

    async def meet(self, word: str) -> str:
        """Repeat the text until another end has sent one, and return that."""
        async with self.saying(word):
            return (await self.hear())[1]

    async def send_model(self, payload: bytes | bytearray, name: str = "") -> int:
        """Send to all readers. Returns the number of the transfer."""
        self._transfers += 1
        key = FrameKey(Kind.MODEL, 1, 0, CONTROLLER, self.identity.incarnation, self._transfers, name)
        await self._bus.send_model(key, payload)
        return self._transfers
