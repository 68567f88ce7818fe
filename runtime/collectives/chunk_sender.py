"""A payload on its way out, chunk by chunk: in shared memory where that is possible, else over DDS."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from gradbus.runtime.bus.raw_endpoints import Parts
from gradbus.runtime.bus.sender import Job, Pause, Sample, Sender
from gradbus.runtime.collectives.operation import Finished
from gradbus.runtime.collectives.tensors import NOTHING, Bytes
from gradbus.runtime.shm.slots import SlotPool
from gradbus.runtime.transport.api import Outlet
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import CHUNK_BYTES, FrameKey

SLOT_WAIT_S = 0.02  # how long the writer thread waits while no slot comes back, before it sends a chunk over DDS
NEXT_WAIT_S = 0.002  # and before each one after that
STARVED = 10  # times as long where slots come back, but only others get them
ANNOUNCED_AT_ONCE = 3  # chunks in slots, in one frame over DDS: it costs more than to wait for the next chunk
LOOK_S = 50e-6  # when it looks first whether there is one
LONG_LOOK_S = 10 * LOOK_S  # how often it looks then: it takes a core from those who are to give slots back
# How often it looks whether a thread that polls still sends; that wakes it when it stops. With 0.5 ms a call takes a
# tenth longer.
POLLED_S = 2e-3
_SHARED = int(frames.Flags.SHARED)


class FrameRoute(Protocol):
    """The way to some ranks."""

    readers: tuple[int, ...]

    def put(self, frame: Parts) -> bool:
        """Send a frame through the mailbox. False: that is not possible now."""

    def write(self, frame: Parts) -> bool:
        """Send a frame through the mailbox, or else over DDS. False: neither takes it now."""


class FrameTemplate(NamedTuple):
    """The fields that all frames of a payload share.

    Attributes:
        flags: of frames that carry their data themselves.
    """

    key: FrameKey
    flags: int
    world: int


class ChunkSender:
    """Some chunks of a payload. Several threads may send them, each chunk once.

    Attributes:
        bytes: of all its chunks.
    """

    def __init__(
        self,
        template: FrameTemplate,
        payload: Bytes,
        numbers: Sequence[int],
        route: FrameRoute,
        *,
        slots: SlotPool | None,
        written: Callable[[int], None] | None,
        finished: Finished,
    ) -> None:
        """
        Args:
            numbers: of the chunks that are sent.
            slots: where the data goes; None: it travels in the frames.
            written: as :class:`.operation.OutgoingPart` has it.
            finished: as :meth:`.operation.PayloadTransport.send` has it.
        """
        self._template = template
        self._payload = payload
        self._numbers = numbers
        self._slots = slots
        self._route = route
        self._on_written = written
        self._finished: Finished | None = finished
        self._next = 0
        self._written = self._written_bytes = 0
        self._in_slots = 0  # chunks that got one
        self._total = len(payload)
        self.bytes = self._size(numbers)
        self._deferred: tuple[Sequence[int], Parts] | None = None
        self._may_be_known = False  # to the readers, what is put off or was
        self._lock = threading.RLock()
        self._job: Job | None = None  # of the writer thread

    @property
    def done(self) -> bool:
        """Whether there is nothing more to do: all is written, or it has failed, or it was called off."""
        return self._finished is None

    def advance(self) -> bool:
        """Write the next chunk here. False: nothing is left, or it cannot be done now."""
        with self._lock:
            taken = self._take(waits=self._slots is not None)
            if taken is None:
                return False
            numbers, frame = taken
            try:
                written = self._route.write(frame)
            except BaseException:  # a signal, for one. To write it once more does no harm
                self._deferred, self._may_be_known = taken, True
                raise
            if not written:
                self._deferred = taken
                return False
        self._note_written(numbers)
        return True

    def hand_over(self, sender: Sender, writer: Outlet, stall_timeout_s: float, wait: Callable[[], bool]) -> None:
        """Have the writer thread send what is left, as :meth:`samples` gives it. Raises BusClosed."""
        self._job = Job(writer, self.samples(wait), self.note_outcome, stall_timeout_s)
        try:
            sender.submit(self._job)
        except BaseException:
            self._job = None  # it holds this sender, and with it the payload
            raise

    def samples(self, wait: Callable[[], bool]) -> Iterator[Sample | Pause]:
        """What is left, for the writer thread, which asks for a frame when it has written the one before. ``wait``:
        whether a thread that polls sends the chunks just now."""
        backoff, look_s = None if self._slots is None else _Backoff(self._slots), LOOK_S
        while self._is_left():
            waits = backoff is not None and not backoff.is_over(self._written, self._in_slots)
            if wait() and waits:
                yield POLLED_S
                continue
            with self._lock:
                # One at first: the readers can begin soon.
                taken = self._take(waits=waits, most=ANNOUNCED_AT_ONCE if self._next else 1)
            if taken is None:  # no slot is free
                yield look_s
                look_s = min(2 * look_s, LONG_LOOK_S)
                continue
            look_s = LOOK_S
            numbers, frame = taken
            if self._route.put(frame):
                self._note_written(numbers)
                yield 0.0  # it is others' turn
                continue
            yield (), frame
            self._note_written(numbers)

    def note_outcome(self, outcome: int | Exception) -> None:
        """The writer thread has ended its job, or another thread has failed."""
        if isinstance(outcome, Exception):
            finished = self._cancel()
            if finished is not None:
                finished(outcome)
        self._job = None  # it has this as well

    def cancel(self) -> int:
        """Write no more. When this returns, the payload is no longer read. Returns the bytes that were written."""
        self._cancel()
        return self._written_bytes

    def _cancel(self) -> Finished | None:
        with self._lock:
            slots, deferred = None if self._may_be_known else self._slots, self._deferred
            finished = self._finish()
        if deferred is not None:
            _reclaim(slots, deferred[1])
        job = self._job
        if job is not None:
            job.cancel()  # waits for the write in progress
            if job.pending is not None:  # DDS has not taken it
                _reclaim(slots, job.pending[1])
        return finished

    def _is_left(self) -> bool:
        """Whether there is more to write. Waits for the write in progress, of which something may be left over."""
        with self._lock:
            return not self.done and (self._deferred is not None or self._next < len(self._numbers))

    def _take(self, *, waits: bool, most: int = 1) -> tuple[Sequence[int], Parts] | None:
        """The next chunk as a frame, or some that follow one another, as far as there are slots. With the lock held.

        Args:
            waits: it does not go over DDS if there is no slot.
        """
        if self._deferred is not None:
            taken, self._deferred = self._deferred, None
            return taken
        if self._next >= len(self._numbers) or self.done:
            return None
        number, total = self._numbers[self._next], len(self._payload)
        key, flags, world = self._template
        data = self._chunk(number)
        descriptors = self._put(most)
        if descriptors:
            head = frames.head(key, data.data, number, total, flags=_SHARED, world=world, descriptor=descriptors)
            frame: Parts = (head, descriptors)
        elif waits:
            return None
        else:
            head = frames.head(key, data.data, number, total, flags=flags, world=world)
            frame = (head, data.data)
        first, self._next = self._next, self._next + max(1, len(descriptors) // frames.DESCRIPTOR_BYTES)
        return self._numbers[first : self._next], frame

    def _put(self, most: int) -> bytes:
        """Put the next chunks into slots. Returns where they are."""
        descriptors: list[bytes] = []
        if self._slots is not None:
            first = self._numbers[self._next]
            for number in self._numbers[self._next : self._next + most]:
                if number != first + len(descriptors):
                    break
                try:
                    descriptor = self._slots.put(self._route.readers, self._chunk(number))
                except BaseException:
                    self._slots.reclaim(b"".join(descriptors))
                    raise
                if descriptor is None:
                    break
                descriptors.append(descriptor)
            self._in_slots += len(descriptors)
        return b"".join(descriptors)

    def _size(self, numbers: Sequence[int]) -> int:
        return frames.bytes_in(self._total, numbers)

    def _chunk(self, number: int) -> Bytes:
        return self._payload[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]

    def _note_written(self, numbers: Sequence[int]) -> None:
        """DDS or shared memory has the chunks. Without the lock: a callback may cancel the rest, and wait for
        other threads to let go of it."""
        on_written = self._on_written
        if on_written is not None:
            for number in numbers:
                on_written(number)
        with self._lock:
            self._written += len(numbers)
            self._written_bytes += self._size(numbers)
            finished = self._finish() if self._written == len(self._numbers) else None
        if finished is not None:
            finished(self.bytes)

    def _finish(self) -> Finished | None:
        """Let go of the caller's memory, with the lock held. Returns the callback that is to be called."""
        finished, self._finished = self._finished, None
        self._payload, self._on_written, self._deferred, self._slots = NOTHING, None, None, None
        return finished


class _Backoff:
    """How long a payload waits for slots. Readers may hold all of them because they wait for something else, perhaps
    for this very payload. So it goes on over DDS when no slot comes back, or when only others get those that do."""

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots
        self._wait_s = SLOT_WAIT_S
        self._written = self._sent_bytes = self._in_slots = -1
        self._until_s = self._at_last_s = 0.0

    def is_over(self, written: int, in_slots: int) -> bool:
        """``written``: chunks of the payload so far. ``in_slots``: those that got one."""
        now_s = time.monotonic()
        if in_slots != self._in_slots:
            self._in_slots, self._wait_s = in_slots, SLOT_WAIT_S
        sent_bytes = self._slots.sent_bytes
        if written != self._written:
            self._at_last_s = now_s + STARVED * self._wait_s
        if (written, sent_bytes) != (self._written, self._sent_bytes):
            self._written, self._sent_bytes = written, sent_bytes
            self._until_s = now_s + self._wait_s
        over = now_s > min(self._until_s, self._at_last_s)
        if over:
            self._wait_s = NEXT_WAIT_S
        return over


def _reclaim(slots: SlotPool | None, frame: Parts) -> None:
    """Free the slots of a frame with descriptors that no reader has received."""
    if slots is not None and _is_shared(frame):
        slots.reclaim(bytes(frame[1]))


def _is_shared(frame: Parts) -> bool:
    """Whether a frame has descriptors: data comes as a view on the payload."""
    return isinstance(frame[1], bytes)
