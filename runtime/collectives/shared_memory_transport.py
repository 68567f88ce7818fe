"""The memory that a rank shares with the others of its machine: a segment with slots for payload and a mailbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from gradbus.runtime.bus.raw_endpoints import FramePort
from gradbus.runtime.shm import mailbox
from gradbus.runtime.shm.layout import Layout
from gradbus.runtime.shm.mailbox import Mailbox, Work
from gradbus.runtime.shm.segment import Bytes, Segment, SharedMemoryFault, attach
from gradbus.runtime.shm.slots import SlotPool
from gradbus.runtime.wire.frames import Frame

MAX_WORLD = 256  # each rank maps the segments of all others
LOOK_S = 200e-6  # how long the thread of an event loop looks for the end of a small collective
CLOSE_S = 1.0  # the thread may be adding up some chunks


class SharedMemoryTransport:
    """The shared memory of one rank of a group.

    Attributes:
        slots: chunks of payload.
        mailbox: frames for ranks that wait, or None: not all ranks of the group are on this machine, or it is not of a
            kind that they work on. Known when the group has formed.
    """

    def __init__(self, rank: int, world: int, take: Callable[[Frame], None]) -> None:
        """
        Args:
            take: gets the frames that arrive in the mailbox, on whatever thread.

        Raises:
            SharedMemoryFault: there is none.
        """
        if world > MAX_WORLD:
            raise SharedMemoryFault(f"a world of {world} ranks, at most {MAX_WORLD} share memory")
        self._world = world
        self._rank = rank
        self._take = take
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

    def admit(self, readers: Sequence[int]) -> None:
        """The group has formed; these ranks have mapped this rank's memory, and this rank theirs."""
        self._segment.hide()
        self.slots.admit(readers)
        if mailbox.AVAILABLE and len(readers) == self._world - 1:
            self.mailbox = Mailbox(self._rank, self._segment.memory, self._layout, self._take)
            self.mailbox.open({rank: self._others[rank] for rank in readers}, f"gradbus-mailbox-{self._rank}")

    def poll_mailbox(self, *, all_of_them: bool = False) -> None:
        """Take the frames that are in the mailbox.

        Args:
            all_of_them: also wait for those that another thread is taking just now.
        """
        if self.mailbox is not None:
            (self.mailbox.finish if all_of_them else self.mailbox.poll)()

    async def close(self) -> None:
        """Read no more frames. Waits, not for long, until the thread that does has ended."""
        thread = None if self.mailbox is None else self.mailbox.close()
        until_s = time.monotonic() + CLOSE_S
        while thread is not None and thread.is_alive() and time.monotonic() < until_s:  # noqa: ASYNC110 - a thread
            await asyncio.sleep(0.001)

    def lose(self, rank: int) -> None:
        """A rank is gone."""
        self.slots.lose(rank)


class MailboxProgress:
    """A thread that waits polls the mailbox meanwhile. Implements :class:`.engine.ProgressEngine`."""

    def __init__(self, box: Mailbox, port: FramePort, work: Work) -> None:
        """``work``: sends what waits for slots."""
        self._mailbox = box
        self._work = work
        self._port = port

    def pump(self, done: Callable[[], bool], until_s: float) -> None:
        """See :class:`.engine.ProgressEngine`."""
        try:
            self._mailbox.poll_until(done, until_s, self._work)
        finally:
            if not self._work.idle:  # the writer thread has left it to this one
                self._port.wake_sender()

    def spin(self, done: Callable[[], bool]) -> None:
        """See :class:`.engine.ProgressEngine`."""
        self._mailbox.poll_until(done, time.monotonic() + LOOK_S, None, may_sleep=False)

    def nudge(self) -> None:
        """See :class:`.engine.ProgressEngine`."""
        self._mailbox.nudge()

    def resume(self) -> None:
        """See :class:`.engine.ProgressEngine`."""
        self._mailbox.resume()
        self._port.resume()
