"""A payload on its way out, chunk by chunk: in shared memory where that is possible, else over DDS."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from gradbus.runtime import frames
from gradbus.runtime.collectives.operation import Finished
from gradbus.runtime.collectives.slots import Slots
from gradbus.runtime.collectives.tensors import NOTHING, Bytes
from gradbus.runtime.frame_port import Parts
from gradbus.runtime.frames import CHUNK_BYTES, FrameKey
from gradbus.runtime.sender import Job

SLOT_WAIT_S = 0.02  # how long the writer thread waits for a free slot, before it sends over DDS
LOOK_S = 50e-6  # how often it looks whether there is one
_SHARED = int(frames.Flags.SHARED)


class Outgoing:
    """Some chunks of a payload. Several threads may send them, each chunk once.

    Attributes:
        bytes: of all its chunks. job: of the writer thread, if that has one for it.
    """

    def __init__(
        self, key: FrameKey, payload: Bytes, numbers: Sequence[int], flags: int, world: int, *,
        slots: Slots | None, readers: Sequence[int], written: Callable[[int], None] | None, finished: Finished,
    ) -> None:  # fmt: skip
        """
        Args:
            numbers: of the chunks. flags: of frames that carry their data themselves.
            slots: where the data goes; None: it travels in the frames. readers: ranks that it is for.
            written, finished: as :meth:`.operation.Link.send` has them.
        """
        self.bytes = sum(min(CHUNK_BYTES, len(payload) - number * CHUNK_BYTES) for number in numbers)
        self._key = key
        self._payload = payload
        self._numbers = numbers
        self._flags = flags
        self._world = world
        self._slots = slots
        self._readers = readers
        self._on_written = written
        self._finished: Finished | None = finished
        self._next = 0
        self._written = 0
        self._put_off: tuple[int, Parts] | None = None
        self._lock = threading.RLock()
        self.job: Job | None = None

    @property
    def done(self) -> bool:
        """Whether there is nothing more to do: all is written, or it has failed, or it was called off."""
        return self._finished is None

    def advance(self, write: Callable[[Parts], bool]) -> bool:
        """Write the next chunk here. False: nothing is left, or it cannot be done now."""
        with self._lock:
            taken = self._take()
            if taken is None:
                return False
            number, frame = taken
            if not write(frame):
                self._put_off = taken
                return False
            ended = self._note(number)
        if ended is not None:
            ended(self.bytes)
        return True

    def samples(self, wait: Callable[[], bool]) -> Iterator[Parts]:
        """What is left, for the writer thread, which asks for a frame when it has written the one before.

        Args:
            wait: whether somebody else is at it just now.
        """
        written, until_s = -1, 0.0
        while not self.done and self._left:
            if self._written != written:
                written, until_s = self._written, time.monotonic() + SLOT_WAIT_S
            elif time.monotonic() > until_s:
                self._slots = None  # somebody holds on to them: the rest travels over DDS
            elif wait():
                time.sleep(10 * LOOK_S)
                continue
            with self._lock:
                taken = self._take()
            if taken is None:  # no slot is free
                time.sleep(LOOK_S)
                continue
            number, frame = taken
            yield frame
            with self._lock:
                ended = self._note(number)
            if ended is not None:
                ended(self.bytes)

    def outcome(self, outcome: int | Exception) -> None:
        """The writer thread has done what it could."""
        if isinstance(outcome, Exception):
            with self._lock:
                finished = self._let_go()
            if finished is not None:
                finished(outcome)

    def cancel(self) -> None:
        """Write no more. When this returns, the payload is no longer read."""
        with self._lock:
            self._let_go()
        if self.job is not None:
            self.job.cancel()  # waits for the write in progress

    @property
    def _left(self) -> bool:
        return self._put_off is not None or self._next < len(self._numbers)

    def _take(self) -> tuple[int, Parts] | None:
        """The next chunk as a frame. With the lock held."""
        if self._put_off is not None:
            taken, self._put_off = self._put_off, None
            return taken
        if self._next >= len(self._numbers) or self.done:
            return None
        number = self._numbers[self._next]
        data = self._payload[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        total = len(self._payload)
        if self._slots is None:
            head = frames.head(self._key, data.data, number, total, flags=self._flags, world=self._world)
            frame: Parts = (head, data.data)
        else:
            descriptor = self._slots.put(self._readers, data)
            if descriptor is None:
                return None
            head = frames.head(
                self._key, data.data, number, total, flags=_SHARED, world=self._world, descriptor=descriptor
            )
            frame = (head, descriptor)
        self._next += 1
        return number, frame

    def _note(self, number: int) -> Finished | None:
        """DDS or shared memory has the chunk. With the lock held. Returns whom to tell that it was the last one."""
        self._written += 1
        if self._on_written is not None and not self.done:
            self._on_written(number)
        if self._written < len(self._numbers):
            return None
        return self._let_go()

    def _let_go(self) -> Finished | None:
        """Nothing more is to be done: keep nothing of the caller's. Returns whom to tell."""
        finished, self._finished = self._finished, None
        self._payload, self._on_written, self._put_off = NOTHING, None, None
        return finished
