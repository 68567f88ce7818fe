"""What the benchmark of the bus and its peer processes say to each other, and the event-loop side of both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gradbus.experiments.peer_link import HERE, Link
from gradbus.runtime.dds.network import NetworkConfig
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import ClientUpdate

DOMAINS = {"unicast": 23, "multicast": 24}  # a domain has one network configuration in a process
WATCH, LATE = "watch", "late"
ECHO = "echo"  # name of a transfer that is to come back
ANSWER_S = 20.0
MEET_S = 120.0  # eight processes start, and the machine may be busy


def network(name: str) -> NetworkConfig:
    """Of one of ``DOMAINS``."""
    return NetworkConfig(multicast=name == "multicast", lease_s=10.0)  # a busy machine must not look like a death


class Words(Link):
    """One end of many: waits for all whom a word was said to."""

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

    async def meet_all(self, peers: Sequence[int]) -> None:
        """Say HERE until all of these have said it, too."""
        async with self.saying(HERE):
            await self.hear_all(HERE, peers, timeout_s=MEET_S)

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
