"""The way out for the frames of a group: the mailbox and slots of ranks on one machine, else DDS.

In DDS there is one topic that all ranks of a group read, and one inbox for each rank. What is small leaves at once, on
the thread that has it; everything else goes to the writer thread of the bus. A dead rank of another machine can hold up
the common topic for as long as its lease; the group has failed by then anyway.

What is not written at once is a :class:`ChunkSender`: it goes chunk by chunk, and whichever thread is free sends the
next one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gradbus.runtime.bus.raw_endpoints import Parts, RawEndpoints
from gradbus.runtime.bus.receiver import InboundChannel
from gradbus.runtime.bus.sender import Job, Pause, Sample, Sender
from gradbus.runtime.bus.wait_loop import SPIN_S
from gradbus.runtime.collectives.engine import ProgressEngine, wire_name
from gradbus.runtime.collectives.operation import Finished, OperationKey, OutgoingPart, Sending
from gradbus.runtime.collectives.tensors import NOTHING, Bytes
from gradbus.runtime.shm.layout import SLOTS
from gradbus.runtime.shm.mailbox import Mailbox
from gradbus.runtime.shm.slots import SlotPool
from gradbus.runtime.shm.transport import SharedMemoryTransport
from gradbus.runtime.transport.api import Outlet
from gradbus.runtime.transport.channels import collective_channel
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import CHUNK_BYTES, Frame, FrameKey, Kind
from gradbus.runtime.wire.messages import Identity

INLINE_BYTES = 64 * 1024  # to write so much takes less time than to wake another thread
INLINE_SHARED_BYTES = 1 << 20
SHARED_BYTES = 16 * 1024  # what is smaller travels in the sample itself
# Frames of each topic that DDS keeps for a reader that it loses for a while; see :func:`collective_channel`.
RETAINED = 16
BRIEF_S = 200e-6  # how long the thread of an event loop polls the mailbox for the end of a small collective
_IN_VAIN = 8  # payloads that are tried, until one can be sent; each takes 10 us, and the next time it is others' turn
PROBE_ALL, PROBE_INBOX = 0, 1  # parts of the frames that prove that a topic works
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


class GroupLink(ProgressEngine):
    """Readers and writers of one rank of one group. Implements :class:`.operation.PayloadTransport`: frames go out
    here, and a thread that waits handles here what comes in.

    Attributes:
        port: what its frames over DDS go through.
        inline_bytes, inline_shared_bytes: what is sent at once, on the thread that has it, over DDS and through shared
            memory. More, where that thread is not the one of an event loop.
    """

    def __init__(
        self,
        port: RawEndpoints,
        group: str,
        identity: Identity,
        world: int,
        shared: SharedMemoryTransport | None = None,
    ) -> None:
        """Open the writers. Frames come in from :meth:`listen` on."""
        self.port = port
        self._group = group
        self._shared = shared
        self.inline_bytes = INLINE_BYTES
        self.inline_shared_bytes = INLINE_SHARED_BYTES
        self._pushing: deque[ChunkSender] = deque()
        self._identity = identity
        self._world = world
        self._group_id = 0
        self._flags = int(frames.Flags.NONE if port.needs_crc else frames.Flags.HEAD_CRC)
        self._readers: list[InboundChannel] = []
        others = tuple(other for other in range(world) if other != identity.sender)
        self._routes: dict[int | None, _Route] = {None: self._route(others, group)}  # by receiver; None: all others
        self._routes |= {other: self._route((other,), f"{group}/{other}") for other in others}

    def _route(self, readers: tuple[int, ...], topic: str) -> _Route:
        writer = self.port.open_writer(collective_channel(topic), retained_samples=RETAINED)
        return _Route(self, readers, writer)

    def listen(self, take: Callable[[Frame], None]) -> None:
        """Open the readers. ``take`` gets frames from now on, on another thread."""
        names = (self._group, f"{self._group}/{self._identity.sender}")
        self._readers = [self.port.open_reader(collective_channel(name), take) for name in names]

    def set_group_id(self, group_id: int) -> None:
        """The group that frames belong to from now on."""
        self._group_id = group_id

    @property
    def matched(self) -> bool:
        """Whether every topic has as many readers and writers as there are other ranks. DDS says so from its own view:
        it may still count one that is dead, and the other side may not have noticed yet. Hence the probes."""
        others = self._world - 1
        return all(channel.inlet.matched >= others for channel in self._readers) and all(
            route.writer.matched >= len(route.readers) for route in self._routes.values()
        )

    def probe(self, ranks: Sequence[int], *, to_all: bool) -> None:
        """Send empty frames over the topics of some ranks, and over that of all. What does not leave now is sent again
        next time."""
        key = OperationKey(0, 0, "")
        for to in [None, *ranks] if to_all else ranks:
            part = PROBE_ALL if to is None else PROBE_INBOX
            (frame,) = frames.split(self._frame_key(key, part, ""), b"", flags=self._flags, world=self._world)
            self.port.write(self._routes[to].writer, frame)

    def send(self, key: OperationKey, outgoing: OutgoingPart, finished: Finished) -> Sending | None:
        """See :class:`.operation.PayloadTransport`."""
        to, part, payload, signature, meta, only, written = outgoing
        route = self._routes[to]
        size = len(payload)
        slots = self._slots if size >= SHARED_BYTES else None
        if slots is not None and not slots.reaches(route.readers):
            slots = None
        frame_key = self._frame_key(key, part, wire_name(key.name, signature, meta))
        if slots is None and only is None and size <= min(self.inline_bytes, CHUNK_BYTES):
            data = payload.data
            head = frames.head(frame_key, data, 0, size, flags=self._flags, world=self._world)
            if route.write((head, data)):
                if written is not None:
                    written(0)
                finished(size)
                return None
        numbers = range(frames.chunk_count(size)) if only is None else only
        template = FrameTemplate(frame_key, self._flags, self._world)
        sender = ChunkSender(template, payload, numbers, route, slots=slots, written=written, finished=finished)
        if sender.bytes <= (self.inline_bytes if slots is None else self.inline_shared_bytes):
            # What has many readers, one by one, is sent to all of them alike, see :meth:`push`.
            at_once = len(numbers) if slots is None else max(1, SLOTS // len(self._routes[None].readers))
            while at_once and sender.advance():
                at_once -= 1
            if sender.done:
                return None
        if slots is not None and self.mailbox is not None:
            self._forget_done()
            self._pushing.append(sender)
        sender.hand_over(self.port.sender, route.writer, self.port.stall_timeout_s, self._is_polled)
        return sender

    def stop_sharing(self) -> None:
        """Let go of the shared memory. A thread that is using it keeps it for so long."""
        self._shared = None
        self._pushing.clear()

    # While a thread waits

    def poll_inline(self, done: Callable[[], bool], until_s: float) -> None:
        """See :class:`.engine.ProgressEngine`. Also sends what waits for slots."""
        mailbox = self.mailbox
        if mailbox is None:
            self.port.wait_loop.poll_inline(done, until_s)
            return
        try:
            mailbox.poll_until(done, until_s, self)
        finally:
            if not self.idle:  # the writer thread has left it to this one
                self.port.sender.wake()

    def poll_briefly(self, done: Callable[[], bool]) -> None:
        """See :class:`.engine.ProgressEngine`."""
        mailbox, now_s = self.mailbox, time.monotonic()
        if mailbox is None:
            self.port.wait_loop.poll_inline(done, now_s + SPIN_S, may_sleep=False)
        else:
            mailbox.poll_until(done, now_s + BRIEF_S, None, may_sleep=False)

    def wake_inline(self) -> None:
        """See :class:`.engine.ProgressEngine`."""
        mailbox = self.mailbox
        if mailbox is None:
            self.port.wait_loop.wake_inline()
        else:
            mailbox.wake_poller()

    def wake_io_thread(self) -> None:
        """See :class:`.engine.ProgressEngine`."""
        mailbox = self.mailbox
        if mailbox is not None:
            mailbox.wake_thread()
        loop = self.port.wait_loop
        loop.is_asked = True  # before the look
        if loop.is_relieved:
            loop.wake_io_thread()

    # Through shared memory

    @property
    def _slots(self) -> SlotPool | None:
        return None if self._shared is None else self._shared.slots

    @property
    def mailbox(self) -> Mailbox | None:
        """The mailbox of ranks on this machine; None: they share no memory."""
        return None if self._shared is None else self._shared.mailbox

    @property
    def idle(self) -> bool:
        """Whether nothing waits for a slot."""
        return not self._pushing

    def push(self) -> bool:
        """On a thread that waits: send what goes through shared memory, as far as slots are free.

        Payloads take turns, chunk by chunk: each has readers that wait for it.
        """
        progress, in_vain = False, 0  # so many payloads, one after the other
        while in_vain < min(len(self._pushing), _IN_VAIN):
            try:
                sender = self._pushing.popleft()
            except IndexError:
                break
            sent = False
            try:
                sent = sender.advance()
            except Exception as error:  # of DDS
                sender.note_outcome(error)
            progress |= sent
            in_vain = 0 if sent or sender.done else in_vain + 1
            if not sender.done:
                self._pushing.append(sender)
        return progress

    def _forget_done(self) -> None:
        """Forget what was sent, or called off, by other threads; others may be at the same here."""
        with contextlib.suppress(IndexError):
            while self._pushing[0].done:
                first = self._pushing.popleft()
                if not first.done:  # another thread has taken the one that was
                    self._pushing.append(first)

    def _is_polled(self) -> bool:
        mailbox = self.mailbox
        return mailbox is not None and mailbox.has_working_poller

    def _frame_key(self, key: OperationKey, part: int, name: str) -> FrameKey:
        return FrameKey(
            Kind.COLLECTIVE,
            self._group_id,
            key.round_id,
            self._identity.sender,
            self._identity.incarnation,
            key.call,
            name,
            part,
        )


class _Route:
    """The way to some ranks.

    Attributes:
        readers: these ranks. writer: of their topic.
    """

    __slots__ = ("_link", "readers", "writer")

    def __init__(self, link: GroupLink, readers: tuple[int, ...], writer: Outlet) -> None:
        self._link = link
        self.readers = readers
        self.writer = writer

    def put(self, frame: Parts) -> bool:
        """Send a frame through the mailbox. False: it is too large, or its readers take none now."""
        mailbox = self._link.mailbox
        if mailbox is None or not mailbox.put(self.readers, frame):
            return False
        mailbox.call(self.readers)
        return True

    def write(self, frame: Parts) -> bool:
        """Send a frame through the mailbox, or else over DDS."""
        return self.put(frame) or self._link.port.write(self.writer, frame)


class FrameTemplate(NamedTuple):
    """The fields that all frames of a payload share.

    Attributes:
        flags: of frames that carry their data themselves.
    """

    key: FrameKey
    flags: int
    world: int


class ChunkSender:
    """A payload on its way out, or some chunks of it: in shared memory where that is possible, else over DDS. Several
    threads may send them, each chunk once.

    Attributes:
        bytes: of all its chunks.
    """

    def __init__(
        self,
        template: FrameTemplate,
        payload: Bytes,
        numbers: Sequence[int],
        route: _Route,
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
