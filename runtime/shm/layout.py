"""What lies where in the memory that a rank shares with the others of its group on the same machine.

Words are 32 bits, in the machine's order. All of a segment is written by its owner alone.

| what | size | meaning |
|---|---|---|
| head | 4,096 bytes | what it is, see :mod:`gradbus.runtime.shm.segment` |
| notes | world x SLOTS words | of each slot of each rank: the last generation that the owner is through with |
| tails | world words | bytes written so far into the ring of messages for each rank |
| heads | world words | bytes read so far from each rank's ring of messages for the owner |
| attention | 1 word | whether the owner polls, see :mod:`.mailbox` |
| rings | world x RING_BYTES | messages for each rank |
| slots | SLOTS x CHUNK_BYTES | chunks of payload |
"""

from __future__ import annotations

from gradbus.runtime.shm.segment import FREE_FROM, Bytes
from gradbus.runtime.wire.frames import CHUNK_BYTES

SLOTS = 16
RING_BYTES = 64 * 1024  # a power of two: counters of bytes wrap at 2**32
_PAGE = 4096
_WORD = 4


class Layout:
    """Of the segments of a group of ``world`` ranks. ``size`` is address space; what is not used takes no memory."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._notes = FREE_FROM
        self._tails = self._notes + world * SLOTS * _WORD
        self._heads = self._tails + world * _WORD
        self.attention_at = self._heads + world * _WORD
        self._rings = -(-(self.attention_at + _WORD) // _PAGE) * _PAGE
        self.slots_at = self._rings + world * RING_BYTES
        self.size = self.slots_at + SLOTS * CHUNK_BYTES

    def notes(self, memory: Bytes) -> memoryview:
        """One word for each slot of each rank, rank by rank."""
        return self._words(memory, self._notes, self.world * SLOTS)

    def tails(self, memory: Bytes) -> memoryview:
        return self._words(memory, self._tails, self.world)

    def tail_at(self, rank: int) -> int:
        """Where in a segment the counter of bytes for a rank is."""
        return self._tails + rank * _WORD

    def heads(self, memory: Bytes) -> memoryview:
        return self._words(memory, self._heads, self.world)

    def attention(self, memory: Bytes) -> memoryview:
        return self._words(memory, self.attention_at, 1)

    def ring(self, memory: Bytes, rank: int) -> Bytes:
        """The ring of messages for a rank."""
        start = self._rings + rank * RING_BYTES
        return memory[start : start + RING_BYTES]

    def _words(self, memory: Bytes, start: int, count: int) -> memoryview:
        return memory.data[start : start + count * _WORD].cast("I")
