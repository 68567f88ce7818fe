"""The processes that use a store, as its arbiter sees them.

A process repeats its requests until they are answered. So what has been executed is remembered, and answered again,
until a later request shows that the process has the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.bus.liveness import Reachability
from gradbus.runtime.dds.topics import store_topic
from gradbus.runtime.errors import BusError
from gradbus.runtime.wire.frames import FrameKey
from gradbus.torch.store.messages import MAX_OPEN, Message, StoreAnswer, StoreRequest, frame_of
from gradbus.torch.store.table import StoreTable, StoreWaiter, answer

SILENT_S = 10.0  # a process that sends nothing for so long, and that DDS has not matched, is not there
_MAX_REMEMBERED_BYTES = 64 << 20  # of answers to them
_INLINE_BYTES = 64 * 1024  # to write so much takes less time than to wake another thread
_READ_ONLY = ("get", "check", "wait", "num_keys", "list_keys", "queue_len")  # may be executed again


class Session:
    """The requests of one process. Belongs to the event loop."""

    def __init__(self, table: StoreTable, rank: int, reply: Callable[[StoreAnswer], None]) -> None:
        """``reply``: takes each answer to the process, perhaps several times."""
        self.rank = rank
        self._table = table
        self._reply = reply
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, tuple[StoreWaiter, asyncio.TimerHandle]] = {}  # by id of the request
        self._answers: dict[int, StoreAnswer] = {}  # which may have to be sent again, by id
        self._answered_bytes = 0
        self._newest = 0  # id of a request; of those up to it, the process waits for
        self._open: set[int] = set()

    def submit(self, request: StoreRequest) -> None:
        """Execute a request, unless it has come before, and answer it."""
        number = request.id
        known = self._answers.get(number)
        if known is not None:
            self._reply(known)
        if known is not None or number in self._waiting or self._is_over(number) or number not in request.open:
            return
        self._note_open(request)
        if len(self._waiting) + len(self._answers) >= MAX_OPEN or self._answered_bytes > _MAX_REMEMBERED_BYTES:
            self._reply(answer(request, "error", text=f"rank {self.rank} has too many requests open at a time"))
            return

        def done(result: StoreAnswer) -> None:
            waiting = self._waiting.pop(number, None)
            if waiting is not None:
                waiting[1].cancel()
            if request.op not in _READ_ONLY:
                self._answers[number] = result
                self._answered_bytes += _size(result)
            self._reply(result)

        waiter = self._table.submit(request, done)
        if waiter is not None:
            self._waiting[number] = waiter, self._loop.call_later(request.wait_s, self._table.expire, waiter)

    def _is_over(self, number: int) -> bool:
        """Whether the process waits no more for the answer to this request, which may come late or again."""
        return number <= self._newest and number not in self._open

    def _note_open(self, request: StoreRequest) -> None:
        """Forget all that is over, and stays so, whatever older requests come later."""
        stated = set(request.open)
        newer = {number for number in stated if self._newest < number <= request.id}
        self._open = {number for number in self._open if number in stated or number > request.id} | newer
        self._newest = max(self._newest, request.id)
        self._cancel(self._is_over)
        for number in list(filter(self._is_over, self._answers)):
            self._answered_bytes -= _size(self._answers.pop(number))

    def _cancel(self, is_over: Callable[[int], bool]) -> None:
        for number in list(filter(is_over, self._waiting)):
            waiter, timer = self._waiting.pop(number)
            timer.cancel()
            self._table.cancel(waiter)

    def end(self) -> None:
        """Forget all its requests."""
        self._cancel(lambda _: True)
        self._answers.clear()


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
        self.writer = self._port.open_writer(store_topic(key.incarnation))

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
            self._port.submit(self.writer, iter([frame]), finished)

    async def close(self) -> None:
        """Forget its requests, and take the way to it out of DDS."""
        self.session.end()
        await self._port.close()


def _size(result: StoreAnswer) -> int:
    return sum(len(value) for value in result.values)
