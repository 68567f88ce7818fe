"""A payload on its way out through shared memory or DDS, without either a bus or its threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from shared_pair import key

from gradbus.runtime.bus.raw_endpoints import Parts
from gradbus.runtime.bus.sender import Job, Pause
from gradbus.runtime.collectives.link import ChunkSender, FrameTemplate
from gradbus.runtime.shm.slots import SlotPool
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import CHUNK_BYTES, Flags


class Payload:
    """One that is being sent from rank 0 to rank ``to``: what was written, and what came of it."""

    def __init__(
        self,
        slots: SlotPool | None,
        chunks: int = 3,
        written: Callable[[int], None] | None = None,
        to: int = 1,
        only: tuple[int, ...] | None = None,
    ) -> None:
        self.readers = (to,)
        self.data = np.arange(chunks * CHUNK_BYTES, dtype=np.uint32).astype(np.uint8)
        self.sent: list[Parts] = []
        self.outcomes: list[int | Exception] = []
        self.sender = ChunkSender(
            FrameTemplate(key(), int(Flags.HEAD_CRC), 2),
            self.data,
            only or range(chunks),
            self,
            slots=slots,
            written=written,
            finished=self.outcomes.append,
        )

    def put(self, frame: Parts) -> bool:
        return False

    def write(self, frame: Parts) -> bool:
        self.sent.append(frame)
        return True

    def hand_over(self) -> Job:
        """Have the writer thread send what is left. Returns the job that it has got."""
        jobs: list[Job] = []
        thread: Any = SimpleNamespace(submit=jobs.append)
        writer: Any = None
        self.sender.hand_over(thread, writer, 1.0, lambda: False)
        return jobs[0]

    def write_rest(self, wait: Callable[[], bool] = lambda: False) -> int:
        """What the writer thread does. Returns how many chunks there were for it."""
        count = 0
        for sample in self.sender.samples(wait):
            if isinstance(sample, Pause):
                time.sleep(sample)
            else:
                count += self.write(sample[1])
        return count

    def numbers(self) -> list[int]:
        """Of all chunks that were sent."""
        found = []
        for parts in self.sent:
            frame = frames.parse(b"".join(parts))
            count = len(frame.data) // frames.DESCRIPTOR_BYTES if frame.flags & Flags.SHARED else 1
            found += range(frame.seq, frame.seq + count)
        return sorted(found)


def fill(slots: SlotPool) -> list[bytes]:
    """Take all slots that are free. Returns their descriptors."""
    return list(iter(lambda: slots.put((1,), np.zeros(1, np.uint8)) or b"", b""))


def free_slots(slots: SlotPool) -> int:
    """How many are free; they are not afterwards."""
    return len(fill(slots))
