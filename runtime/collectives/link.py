"""The way out for the frames of a group: the mailbox and slots of ranks on one machine, else DDS.

In DDS there is one topic that all ranks of a group read, and one inbox for each rank. What is small leaves at once, on
the thread that has it; everything else goes to the writer thread of the bus. A dead rank of another machine can hold up
the common topic for as long as its lease; the group has failed by then anyway.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence

from gradbus.runtime.bus.raw_endpoints import Parts, RawEndpoints
from gradbus.runtime.bus.receiver import InboundChannel
from gradbus.runtime.bus.wait_loop import SPIN_S
from gradbus.runtime.collectives.chunk_sender import ChunkSender, FrameTemplate
from gradbus.runtime.collectives.engine import ProgressEngine, wire_name
from gradbus.runtime.collectives.operation import Finished, OperationKey, OutgoingPart, Sending
from gradbus.runtime.shm.layout import SLOTS
from gradbus.runtime.shm.mailbox import Mailbox
from gradbus.runtime.shm.slots import SlotPool
from gradbus.runtime.shm.transport import SharedMemoryTransport
from gradbus.runtime.transport.api import Outlet
from gradbus.runtime.transport.channels import collective_channel
from gradbus.runtime.wire import frames
from gradbus.runtime.wire.frames import Frame, FrameKey, Kind
from gradbus.runtime.wire.messages import Identity

INLINE_BYTES = 64 * 1024  # to write so much takes less time than to wake another thread
INLINE_SHARED_BYTES = 1 << 20
SHARED_BYTES = 16 * 1024  # what is smaller travels in the sample itself
# Frames of each topic that DDS keeps for a reader that it loses for a while; see :func:`collective_channel`.
RETAINED = 16
BRIEF_S = 200e-6  # how long the thread of an event loop polls the mailbox for the end of a small collective
_IN_VAIN = 8  # payloads that are tried, until one can be sent; each takes 10 us, and the next time it is others' turn
PROBE_ALL, PROBE_INBOX = 0, 1  # parts of the frames that prove that a topic works


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
        if slots is None and only is None and size <= min(self.inline_bytes, frames.CHUNK_BYTES):
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
    """The way to some ranks: see :class:`.chunk_sender.FrameRoute`.

    Attributes:
        writer: of their topic.
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
