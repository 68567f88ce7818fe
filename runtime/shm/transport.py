"""The memory that a rank shares with the others of its machine: a segment with slots for payload and a mailbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from gradbus.runtime.shm import mailbox
from gradbus.runtime.shm.layout import Layout
from gradbus.runtime.shm.mailbox import Mailbox
from gradbus.runtime.shm.segment import Bytes, Segment, SharedMemoryFault, attach
from gradbus.runtime.shm.slots import SlotPool
from gradbus.runtime.wire.frames import Frame

MAX_WORLD = 256  # each rank maps the segments of all others
CLOSE_S = 1.0  # the thread may be adding up some chunks


class SharedMemoryTransport:
    """The shared memory of one rank of a group.

    Attributes:
        slots: chunks of payload.
        mailbox: frames for ranks that wait, or None: not all ranks of the group are on this machine, or it is not of a
            kind that they work on. Known when the group has formed.
    """

    def __init__(self, rank: int, world: int) -> None:
        """Raises SharedMemoryFault: this machine has none for so many ranks."""
        if world > MAX_WORLD:
            raise SharedMemoryFault(f"a world of {world} ranks, at most {MAX_WORLD} share memory")
        self._world = world
        self._rank = rank
        self._layout = Layout(world)
        self._segment = Segment(self._layout.size)
        self._others: dict[int, Bytes] = {}
        self.slots = SlotPool(rank, self._segment.memory, self._layout)
        self.mailbox: Mailbox | None = None

    @property
    def place(self) -> str:
        """Where the others find it."""
        return self._segment.place

    def attach(self, rank: int, place: str) -> None:
        """Map another rank's. Raises SharedMemoryFault."""
        self._others[rank] = memory = attach(place, self._layout.size)
        self.slots.attach(rank, memory)

    def enter_group(self, readers: Sequence[int], take: Callable[[Frame], None]) -> None:
        """The group has formed.

        Args:
            readers: ranks that have mapped this rank's memory, and whose memory this rank has mapped.
            take: gets the frames that arrive in the mailbox, on whatever thread.
        """
        self._segment.hide()
        self.slots.set_readers(readers)
        if mailbox.AVAILABLE and len(readers) == self._world - 1:
            self.mailbox = Mailbox(self._rank, self._segment.memory, self._layout, take)
            self.mailbox.open({rank: self._others[rank] for rank in readers}, f"gradbus-mailbox-{self._rank}")

    async def close(self) -> None:
        """Read no more frames. Waits, within ``CLOSE_S``, until the mailbox's thread has ended."""
        thread = None if self.mailbox is None else self.mailbox.close()
        until_s = time.monotonic() + CLOSE_S
        while thread is not None and thread.is_alive() and time.monotonic() < until_s:  # noqa: ASYNC110 - a thread
            await asyncio.sleep(0.001)

    def lose(self, rank: int) -> None:
        """Send nothing more to a rank that is gone."""
        self.slots.lose(rank)
