"""What the doctor and its peer process agree on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gradbus.runtime.bus import Bus, Subscription
from gradbus.runtime.control import Leave
from gradbus.runtime.messages import Control, Identity, Message, new_incarnation

DOCTOR, PEER = 0, 1
HERE, GOT, END = "here", "got", "end"
PING = "ping".ljust(64, ".")
_AGAIN_S = 0.05


class Link:
    """One end: says words to the other end, and hears its words. The words travel as the reason of a ``Leave``, the
    only control message that is free text."""

    def __init__(self, bus: Bus, me: int, inbox: Subscription) -> None:
        self._bus = bus
        self._identity = Identity(me, new_incarnation())
        self._inbox = inbox

    async def say(self, word: str) -> None:
        await self._bus.publish(self._identity, Leave(word))

    async def hear(self, other: Callable[[Message], None] = lambda message: None) -> str:
        """The next word from the other end; whatever else comes goes to ``other``."""
        while True:
            match await self._inbox.get():
                case Control(sender=sender, body=Leave(reason=word)) if sender != self._identity.sender:
                    return word
                case message:
                    other(message)

    async def meet(self, word: str) -> str:
        """Say the word until the other end is heard. Returns what it said."""

        async def repeat() -> None:
            while True:
                await self.say(word)
                await asyncio.sleep(_AGAIN_S)

        repeating = asyncio.create_task(repeat(), name="meet")
        try:
            return await self.hear()
        finally:
            repeating.cancel()
            await asyncio.wait([repeating])
