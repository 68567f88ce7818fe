"""Ranks of one process that share memory as ranks of one machine do, without a bus."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from gradbus.runtime.shm.layout import Layout
from gradbus.runtime.shm.mailbox import Mailbox
from gradbus.runtime.shm.segment import Bytes
from gradbus.runtime.shm.transport import SharedMemoryTransport
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import Flags, Frame, FrameKey, Kind

GROUP_ID = 0xABC


class Ranks:
    """All ranks of a group.

    Attributes:
        taken: the frames that came to each rank as letters.
        take: what each rank does with a letter; a test may put another function there.
    """

    def __init__(self, world: int = 2) -> None:
        self.taken: list[list[Frame]] = [[] for _ in range(world)]
        self.take: list[Callable[[Frame], None]] = [taken.append for taken in self.taken]
        self.layout = Layout(world)
        self.shared = [SharedMemoryTransport(rank, world) for rank in range(world)]
        for one in self.shared:
            for rank, other in enumerate(self.shared):
                if other is not one:
                    one.attach(rank, other.place)
        for rank, one in enumerate(self.shared):
            one.enter_group([other for other in range(world) if other != rank], _taker(self.take, rank))
        weakref.finalize(self, _close, [one.mailbox for one in self.shared])

    def mailbox(self, rank: int) -> Mailbox:
        """The mailbox of a rank."""
        mailbox = self.shared[rank].mailbox
        assert mailbox is not None
        return mailbox

    def memory(self, rank: int) -> Bytes:
        """The segment of a rank, as its owner maps it: no other mapping can be written."""
        return self.shared[rank]._segment.memory  # noqa: SLF001 - what broken and malicious ranks may have in it

    def attention(self, rank: int) -> int:
        """The attention word of a rank, as senders see it."""
        return int(self.layout.attention(self.memory(rank))[0])

    def set_attention(self, rank: int, word: int) -> None:
        """Have senders find a rank in this state."""
        self.layout.attention(self.memory(rank))[0] = word


def _close(mailboxes: Sequence[Mailbox | None]) -> None:
    """End their threads, which would read letters until the process ends."""
    threads = [mailbox.close() for mailbox in mailboxes if mailbox is not None]
    for thread in threads:
        if thread is not None and thread is not threading.current_thread():  # which may have dropped the ranks last
            thread.join(10.0)


def _taker(take: list[Callable[[Frame], None]], rank: int) -> Callable[[Frame], None]:
    return lambda frame: take[rank](frame)


def key(sender: int = 0, transfer: int = 0) -> FrameKey:
    """Of a frame of a collective."""
    return FrameKey(Kind.COLLECTIVE, GROUP_ID, 0, sender, 1, transfer, "x")


def letter(transfer: int = 0, data: bytes = b"", *, sender: int = 0) -> tuple[bytes, memoryview]:
    """A frame that is small, in its parts."""
    (parts,) = frames.split(key(sender, transfer), data, world=2)
    return parts


def told(descriptor: bytes, size: int, *, sender: int = 0, total: int | None = None, seq: int = 0) -> Frame:
    """The frame that says where slice ``seq``, of ``size`` bytes, lies, and perhaps those after it."""
    total = size if total is None else total
    head = frames.head(
        key(sender),
        memoryview(bytes(size)),
        seq,
        total,
        flags=Flags.SHARED,
        world=2,
        descriptor=descriptor,
        chunk_bytes=frames.MAX_CHUNK_BYTES if total == size else size,
    )
    return frames.parse(head + descriptor)


def chunk(value: int, size: int = 100) -> Bytes:
    """Bytes of this value."""
    return np.full(size, value, np.uint8)
