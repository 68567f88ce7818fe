"""The processes that use a store, as its arbiter sees them.

A process repeats its requests until they are answered. Those that only read may be executed again. Those that write it
sends one after the other, so the answer to the newest one is remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.bus.liveness import Reachability
from gradbus.runtime.bus.sender import Job
from gradbus.runtime.errors import BusError
from gradbus.runtime.transport.channels import store_channel
from gradbus.runtime.wire.frames import FrameKey
from gradbus.torch.store.messages import MAX_WAITING, READ_ONLY, Message, StoreAnswer, StoreRequest, frame_of
from gradbus.torch.store.table import StoreTable, StoreWaiter, answer

SILENT_S = 10.0  # a process that sends nothing for so long, and that DDS has not matched, is not there
_INLINE_BYTES = 64 * 1024  # to write so much takes less time than to wake another thread


class Session:
    """The requests of one process. Belongs to the event loop."""

    def __init__(self, table: StoreTable, rank: int, reply: Callable[[StoreAnswer], None]) -> None:
        """``reply``: takes each answer to the process, perhaps several times."""
        self.rank = rank
        self._table = table
        self._reply = reply
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, tuple[StoreWaiter, asyncio.TimerHandle]] = {}  # by id of the request
        self._written: StoreAnswer | None = None  # the answer to the newest request that writes

    def submit(self, request: StoreRequest) -> None:
        """Execute a request, unless it has come before, and answer it."""
        number, written = request.id, self._written
        if number in self._waiting:
            return
        if request.op not in READ_ONLY:
            if written is None or number > written.id:
                self._table.submit(request, self._note_written)
            elif number == written.id:
                self._reply(written)
            return  # a process writes one after the other, so it does not wait for older ones any more
        if len(self._waiting) >= MAX_WAITING:
            self._reply(answer(request, "error", text=f"rank {self.rank} has too many requests open at a time"))
            return

        def done(result: StoreAnswer) -> None:
            waiting = self._waiting.pop(number, None)
            if waiting is not None:
                waiting[1].cancel()
            self._reply(result)

        waiter = self._table.submit(request, done)
        if waiter is not None:
            self._waiting[number] = waiter, self._loop.call_later(request.wait_s, self._table.expire, waiter)

    def _note_written(self, result: StoreAnswer) -> None:
        self._written = result
        self._reply(result)

    def end(self) -> None:
        """Forget all its requests."""
        while self._waiting:
            _, (waiter, timer) = self._waiting.popitem()
            timer.cancel()
            self._table.cancel(waiter)


class StorePeer:
    """A process that wants to join, or has. Belongs to the event loop of the bus."""

    def __init__(self, bus: Bus, table: StoreTable, arbiter: int, key: FrameKey, host: str) -> None:
        """Open a way to it.

        Args:
            arbiter: incarnation of the arbiter. key: of a frame from the process. host: of the process.
        """
        self.rank = key.sender
        self.incarnation = key.incarnation
        self.host = host
        self.session = Session(table, key.sender, self._answer)
        self._arbiter = arbiter
        self._loop = asyncio.get_running_loop()
        self._sending: set[int] = set()  # ids of answers that the writer thread has
        self._received_s = time.monotonic()
        self._seen = False  # DDS has matched its inbox
        self._reachable = Reachability(key.name, bus.lease_s)
        self._port = bus.raw_endpoints()
        self.writer = self._port.open_writer(store_channel(key.incarnation))

    # Whether it is there

    def is_there(self) -> bool:
        """Whether its process is there, as far as the kernel and DDS know."""
        matched = self.writer.matched > 0
        self._seen |= matched
        return not self._reachable.is_gone(matched, time.monotonic()) if self._seen else not self.is_silent

    @property
    def in_doubt(self) -> bool:
        """Whether DDS has lost it, and it may be found again."""
        return self._reachable.in_doubt

    @property
    def is_silent(self) -> bool:
        """Whether nothing has come from it for long."""
        return time.monotonic() - self._received_s > SILENT_S

    def note_received(self) -> None:
        """Something has come from it."""
        self._received_s = time.monotonic()

    # What goes out

    def _answer(self, result: StoreAnswer) -> None:
        if result.id not in self._sending:
            self.send(result)

    def send(self, message: Message) -> None:
        """Small messages leave at once, large ones by the writer thread. What does not leave is requested again."""
        frame = frame_of(message, sender=0, incarnation=self._arbiter, to=self.incarnation)
        with contextlib.suppress(BusError):
            if len(frame[1]) <= _INLINE_BYTES:
                self._port.write(self.writer, frame)
                return
            number = message.id if isinstance(message, StoreAnswer) else 0

            def finished(_: int | Exception) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._sending.discard, number)

            self._sending.add(number)
            self._port.sender.submit(Job(self.writer, iter([((), frame)]), finished, self._port.stall_timeout_s))

    async def close(self) -> None:
        """Forget its requests, and take the way to it out of DDS."""
        self.session.end()
        await self._port.close()
