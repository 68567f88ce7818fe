"""Frames over topics of one's own, handed over on the receive thread: the way in and out for collectives.

Messages for actors go through the event loop and a bounded queue (``Bus.subscribe``). A collective knows beforehand
where every byte belongs, so its frames need neither: the receive thread puts them in their place at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from gradbus.runtime.bus.receiver import InboundChannel, Receiver
from gradbus.runtime.bus.sender import Sender
from gradbus.runtime.errors import BusClosed
from gradbus.runtime.transport.api import Outlet, Transport
from gradbus.runtime.transport.channels import Channel
from gradbus.runtime.wire.frames import Frame
from gradbus.runtime.wire.messages import Message

REMOVAL_S = 5.0

Parts = tuple[Any, ...]


class RawEndpoints:
    """Readers and writers that belong together and are closed together. Made by ``Bus.raw_endpoints``.

    Attributes:
        sender: the writer thread of the bus, for what is large: its jobs have ``stall_timeout_s``.
        wait_loop: takes what comes in. A thread that waits for frames may do its work.
        inline_bytes: written by :meth:`write`, by topic.
    """

    def __init__(
        self,
        transport: Transport,
        receiver: Receiver,
        sender: Sender,
        stall_timeout_s: float,
        closed: Callable[[RawEndpoints], None],
    ) -> None:
        """``closed``: called once, when nothing goes through it any more."""
        self._transport = transport
        self._receiver = receiver
        self.sender = sender
        self.stall_timeout_s = stall_timeout_s
        self.wait_loop = receiver.thread
        self._closed: Callable[[RawEndpoints], None] | None = closed
        # On one machine the bytes pass through its memory alone, as those of any other program do. To check them would
        # take a quarter of the time of a collective of some MB.
        traits = transport.traits
        self.needs_crc = traits.leaves_machine and traits.needs_crc
        self.is_sealed = not traits.needs_crc  # what it writes
        self.shared_memory = traits.shared_memory
        self._channels: list[InboundChannel] = []
        self._writers: list[Outlet] = []
        self._counting = threading.RLock()
        self.inline_bytes: Counter[str] = Counter()

    def open_reader(self, channel: Channel, take: Callable[[Frame], None]) -> InboundChannel:
        """Read a channel. ``take`` gets every well-formed frame, on the receive thread or on one that does its work
        while it waits (see ``wait_loop``); it must not wait. If it raises, that is counted, and the frame is
        lost."""
        inbound = InboundChannel(self._transport.inlet(channel), _nobody, take=take)
        self._channels.append(inbound)
        self._receiver.add(inbound)
        return inbound

    def open_writer(self, channel: Channel, *, retained_samples: int = 1) -> Outlet:
        """Write a channel. ``retained_samples``: the newest that a retained channel keeps."""
        writer = self._transport.outlet(channel, retained_samples=retained_samples)
        self._writers.append(writer)
        self._receiver.add(writer)
        return writer

    def write(self, writer: Outlet, frame: Parts) -> bool:
        """Write one frame on this thread. False: it was not accepted within the channel's ``block_s``.

        Raises:
            BusError, BusClosed.
        """
        if self._closed is None:
            raise BusClosed("the group or its bus is closed")
        written = writer.write((), frame)
        if written:
            with self._counting:
                self.inline_bytes[writer.channel.name] += sum(map(len, frame))
        return written

    def refuse_writes(self) -> None:
        """Refuse further writes. Writers are deleted when those that are under way have ended."""
        with self._counting:
            closed, self._closed = self._closed, None
        if closed is not None:
            closed(self)

    def after_drain(self, then: Callable[[], None]) -> None:
        """Call ``then`` on the receive thread when all that has come so far has been taken."""
        self._receiver.after_drain(then)

    async def drain(self, timeout_s: float) -> bool:
        """Whether all readers have taken over all that was written, within so long."""
        try:
            async with asyncio.timeout(timeout_s + 1.0):  # the pool of threads may be busy with others' work
                return await asyncio.to_thread(_drained, list(self._writers), timeout_s)
        except TimeoutError:
            return False

    def abandon(self) -> None:
        """Have readers and writers closed, and do not wait for that. On the loop; nobody writes any more."""
        self.refuse_writes()
        self._hand_over()

    async def close(self) -> None:
        """Close readers and writers. Returns when it is done, when the receive thread has ended, or after
        some seconds. They go also if whoever waits for that is cancelled."""
        self.refuse_writes()
        removed = self._hand_over()
        if removed is None:
            return
        try:
            async with asyncio.timeout(REMOVAL_S):
                await removed.wait()
        except TimeoutError:
            return  # the receive thread has ended, and the bus takes all with it; or a write does not end

    def _hand_over(self) -> asyncio.Event | None:
        """Have the receiver delete all. Returns what tells of it; None: it does not, or there is nothing."""
        endpoints: list[InboundChannel | Outlet] = [*self._channels, *self._writers]
        self._channels, self._writers = [], []
        if not endpoints or not self._receiver.thread.is_alive() or self._receiver.thread.fault is not None:
            return None
        loop, removed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(removed.set)

        self._receiver.remove(endpoints, tell)
        return removed


def _drained(writers: list[Outlet], timeout_s: float) -> bool:
    until_s = time.monotonic() + timeout_s
    return all(writer.wait_for_acks(max(0.0, until_s - time.monotonic())) for writer in writers)


def _nobody(messages: list[Message]) -> None:
    raise AssertionError("frames of a port do not go to the loop")
