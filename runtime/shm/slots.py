"""Chunks of payload in memory that the ranks of one machine share; over DDS goes only where they lie.

Each rank has a segment of its own, which it alone writes: a number of slots for what it sends, and a table in which it
notes what it has consumed of the others' slots. A sender fills a slot, with a new generation number, and sends the
number of the slot and the generation; each reader, when it has let go of the data, writes the generation into its own
table. When all readers of a slot have, it is free again. No process waits for another one under a lock, and none can
write into memory of others. What a dead reader has not given back stays in use: it may only seem dead, and still read.

On order: what is written before a DDS call (system calls on both sides) or a message of the mailbox is seen after it. A
reader's note is written after its last look at the data, with a fence in between; the sender that has read the note
writes only then, which no processor does earlier.
"""

from __future__ import annotations

import ctypes as ct
import struct
import threading
from collections.abc import Sequence
from typing import Any

from gradbus.runtime import fast_paths, forks
from gradbus.runtime.shm.layout import SLOTS, Layout
from gradbus.runtime.shm.segment import Bytes
from gradbus.runtime.wire.frames import CHUNK_BYTES, DESCRIPTOR_BYTES, Frame

_DESCRIPTOR = struct.Struct("<II")
assert _DESCRIPTOR.size == DESCRIPTOR_BYTES
_MASK = 0xFFFF_FFFF
_fence = fast_paths.memory_fence() or fast_paths.no_fence
_NEWER = 1 << 31  # generations wrap: one is newer than another if it is less than so many ahead of it


class _Slot:
    __slots__ = ("generation", "readers")

    def __init__(self) -> None:
        self.generation = 0
        self.readers: tuple[int, ...] = ()  # ranks


class _Lease:
    """Releases a slot when the last view on its data is gone."""

    __slots__ = ("_generation", "_memory", "_sender", "_slot", "_slots")

    def __init__(self, slots: SlotPool, memory: Bytes, sender: int, slot: int, generation: int) -> None:
        self._slots = slots
        self._memory = memory  # keeps it mapped
        self._sender = sender
        self._slot = slot
        self._generation = generation

    def __del__(self) -> None:
        self._slots.release(self._sender, self._slot, self._generation)


class SlotPool:
    """The shared memory of one rank of a group, and its views on that of the others. From any thread.

    A slot is left for each reader that has none yet. A reduction holds a chunk until it has arrived from all
    ranks: were all slots given to the first reader, ranks that serve each other's readers last would wait in a circle.
    """

    def __init__(self, rank: int, mine: Bytes, layout: Layout) -> None:
        """``mine``: the own segment."""
        self._rank = rank
        self._layout = layout
        self._notes = layout.notes(mine)
        self._data = mine[layout.slots_at :]
        self._slots = [_Slot() for _ in range(SLOTS)]
        self._lock = threading.RLock()  # the last view may go while this thread is in here
        self._others: dict[int, Bytes] = {}  # by rank
        self._their_notes: dict[int, memoryview] = {}
        self._leased: dict[tuple[int, int], int] = {}  # sender, slot -> generation that is held here
        self._readers: frozenset[int] = frozenset()
        self._made_in = forks.generation
        self.sent_bytes = 0

    def attach(self, rank: int, memory: Bytes) -> None:
        """Map the segment of another rank, to read what it sends."""
        with self._lock:
            self._others[rank] = memory
            self._their_notes[rank] = self._layout.notes(memory)

    def set_readers(self, readers: Sequence[int]) -> None:
        """Set the ranks that read this rank's segment."""
        with self._lock:
            self._readers = frozenset(readers)

    def lose(self, rank: int) -> None:
        """Send nothing more to a rank that is gone. The slots it holds are not used again."""
        with self._lock:
            self._readers -= {rank}

    def reaches(self, ranks: Sequence[int]) -> bool:
        """Whether all of these ranks read the segment."""
        return self._readers.issuperset(ranks)

    # Out

    def put(self, readers: tuple[int, ...], data: Bytes) -> bytes | None:
        """Copy a chunk into a free slot.

        Args:
            readers: ranks that it is for. data: at most CHUNK_BYTES.

        Returns:
            What the readers need to find it, or None: no slot is free, or not for them.
        """
        with self._lock:
            number = self._free(readers)
            if number is None:
                return None
            slot = self._slots[number]
            generation = slot.generation = (slot.generation + 1) & _MASK
            slot.readers = readers
            self.sent_bytes += len(data)
        descriptor = _DESCRIPTOR.pack(number, generation)
        start = number * CHUNK_BYTES
        try:
            self._data[start : start + len(data)] = data
        except BaseException:  # a signal, for one
            self.reclaim(descriptor)
            raise
        return descriptor

    def reclaim(self, descriptors: bytes) -> None:
        """Free slots that :meth:`put` has filled, but that were announced to no reader."""
        with self._lock:
            for number, generation in _DESCRIPTOR.iter_unpack(descriptors):
                slot = self._slots[number]
                if slot.generation == generation:
                    slot.readers = ()

    def _free(self, readers: tuple[int, ...]) -> int | None:
        """A slot that all its readers are through with. Always the first: as few as possible are in use, so that they
        stay in the processors' caches."""
        only_these = len(readers) >= len(self._readers)
        found, free, has_some, others = None, 0, False, set()
        for number, slot in enumerate(self._slots):
            at = self._rank * SLOTS + number
            if all(self._their_notes[reader][at] == slot.generation for reader in slot.readers):
                found = number if found is None else found
                free += 1
                if only_these:
                    return found
            elif slot.readers == readers:
                has_some = True
            elif len(slot.readers) == 1 and slot.readers[0] in self._readers:
                others.add(slot.readers)
        with_none = len(self._readers) - 1 - len(others)
        return found if not has_some or free > with_none else None

    # In

    def get(self, frame: Frame) -> list[Frame]:
        """A frame for each descriptor in this one, with its data where the sender has put it. None for those of which
        there is none, or it was here already. What is in the slot now is newer than what was there when this rank gave
        it back last; DDS may repeat older frames.

        A slot is given back when the data, and all that was made of it, is gone.
        """
        found, chunk_bytes = [], frame.chunk_bytes
        for seq, (number, generation) in enumerate(_DESCRIPTOR.iter_unpack(frame.data), start=frame.seq):
            offset = seq * chunk_bytes
            size = min(chunk_bytes, frame.total_bytes - offset)
            data = self._get(frame.key.sender, number, generation, size)
            if data is not None:
                found.append(frame._replace(seq=seq, offset=offset, size=size, data=data))
        return found

    def _get(self, sender: int, number: int, generation: int, size: int) -> memoryview | None:
        if number >= SLOTS or not 0 < size <= CHUNK_BYTES:
            return None
        with self._lock:
            memory = self._others.get(sender)
            held = self._leased.get((sender, number))
            done = self._notes[sender * SLOTS + number] if memory is not None else 0
            if memory is None or held is not None or not 0 < ((generation - done) & _MASK) < _NEWER:
                return None
            self._leased[sender, number] = generation
        start = self._layout.slots_at + number * CHUNK_BYTES
        array: Any = (ct.c_uint8 * size).from_address(memory.ctypes.data + start)
        array.lease = _Lease(self, memory, sender, number, generation)
        return memoryview(array).cast("B").toreadonly()

    def release(self, sender: int, slot: int, generation: int) -> None:
        """Write into the own table that this rank no longer reads a slot of the sender."""
        if self._made_in != forks.generation:
            return  # the parent of this process holds it still
        with self._lock:
            self._leased.pop((sender, slot), None)
            _fence()
            self._notes[sender * SLOTS + slot] = generation
