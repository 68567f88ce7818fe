"""Those who ask the arbiter of a store: requests that wait for something, and processes behind DDS.

A process repeats its requests until they are answered. So what has been executed is remembered, and answered again,
until the process says that it has the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.bus.liveness import Reachability
from gradbus.runtime.dds.participant import Writer
from gradbus.runtime.dds.topics import store_topic
from gradbus.runtime.errors import BusError
from gradbus.torch.store.messages import MAX_OPEN, Message, StoreAnswer, StoreRequest, frame_of
from gradbus.torch.store.table import Reply, StoreTable, StoreWaiter, answer

SILENT_S = 10.0  # a process that says nothing for so long, and that DDS has not matched, is not there
_MAX_REMEMBERED_BYTES = 64 << 20  # of answers to them
_INLINE_BYTES = 64 * 1024  # to write so much takes less time than to wake another thread
_READ_ONLY = ("get", "check", "wait", "num_keys", "list_keys", "queue_len")  # may be executed again


class RequestTable:
    """Somebody whose requests may wait in the table, each until its deadline. Belongs to the event loop."""

    def __init__(self, table: StoreTable) -> None:
        self._table = table
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, tuple[StoreWaiter, asyncio.TimerHandle]] = {}  # by id of the request

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def ask(self, request: StoreRequest, reply: Reply) -> None:
        """``reply`` gets the answer, now or later."""

        def done(result: StoreAnswer) -> None:
            waiting = self._waiting.pop(request.id, None)
            if waiting is not None:
                waiting[1].cancel()
            reply(result)

        waiter = self._table.submit(request, done)
        if waiter is not None:
            timer = self._loop.call_later(request.wait_s, self._table.expire, waiter)
            self._waiting[request.id] = waiter, timer

    def give_up(self, is_over: Callable[[int], bool]) -> None:
        """Nobody waits any more for the requests of these ids."""
        for number in list(filter(is_over, self._waiting)):
            waiter, timer = self._waiting.pop(number)
            timer.cancel()
            self._table.cancel(waiter)


class StorePeer:
    """A process that wants to join, or has. Belongs to the event loop of the bus."""

    def __init__(
        self, bus: Bus, table: StoreTable, me: int, rank: int, incarnation: int, host: str, process: str
    ) -> None:
        """Open a way to it.

        Args:
            me: incarnation of the arbiter. rank, incarnation, host: of the process. process: which one that is.
        """
        self.rank = rank
        self.incarnation = incarnation
        self.host = host
        self._me = me
        self._loop = asyncio.get_running_loop()
        self._asker = RequestTable(table)
        self._answers: dict[int, StoreAnswer] = {}  # what it may ask for again, by id
        self._answered_bytes = 0
        self._newest = 0  # id of a request; of those up to it, the process waits for
        self._open: set[int] = set()
        self._sending: set[int] = set()  # ids of answers that the writer thread has
        self._heard_s = time.monotonic()
        self._seen = False  # DDS has matched its inbox
        self._reachable = Reachability(process, bus.lease_s)
        self._port = bus.raw_endpoints()
        self.writer: Writer = self._port.open_writer(store_topic(incarnation))

    # Whether it is there

    def look(self) -> bool:
        """Whether its process is there, as far as the kernel and DDS say."""
        self._seen |= self.writer.matched > 0
        if not self._seen:
            return not self.is_silent
        return not self._reachable.is_gone(self.writer.matched > 0, time.monotonic())

    @property
    def in_doubt(self) -> bool:
        """Whether DDS has lost it, and it may be found again."""
        return self._reachable.in_doubt

    @property
    def is_silent(self) -> bool:
        """Whether it has not said anything for long."""
        return time.monotonic() - self._heard_s > SILENT_S

    def heard(self) -> None:
        """It has said something."""
        self._heard_s = time.monotonic()

    # Requests

    def ask(self, request: StoreRequest, explained: Callable[[StoreRequest, StoreAnswer], StoreAnswer]) -> None:
        """A request of this process, for the first time or again; ``explained`` has the last word on its answer."""
        self.heard()
        number = request.id
        known = self._answers.get(number)
        if known is not None:
            self._answer(known)
        if known is not None or number in self._asker or self._is_over(number) or number not in request.open:
            return
        self._note_open(request)
        if len(self._asker) + len(self._answers) >= MAX_OPEN or self._answered_bytes > _MAX_REMEMBERED_BYTES:
            self._answer(answer(request, "error", text=f"rank {self.rank} has too many requests open at a time"))
            return

        def reply(result: StoreAnswer) -> None:
            result = explained(request, result)
            if request.op not in _READ_ONLY:
                self._answers[number] = result
                self._answered_bytes += _size(result)
            self._answer(result)

        self._asker.ask(request, reply)

    def _is_over(self, number: int) -> bool:
        """Whether the process waits no more for the answer to this request, which may come late or again."""
        return number <= self._newest and number not in self._open

    def _note_open(self, request: StoreRequest) -> None:
        """Forget all that is over. What one request says is over stays so, whatever older ones come later."""
        stated = set(request.open)
        newer = {number for number in stated if self._newest < number <= request.id}
        self._open = {number for number in self._open if number in stated or number > request.id} | newer
        self._newest = max(self._newest, request.id)
        self._asker.give_up(self._is_over)
        for number in list(filter(self._is_over, self._answers)):
            self._answered_bytes -= _size(self._answers.pop(number))

    # What goes out

    def _answer(self, result: StoreAnswer) -> None:
        if result.id not in self._sending:
            self.tell(result)

    def tell(self, message: Message) -> None:
        """Small messages leave at once, large ones by the writer thread. What does not leave is asked for again."""
        frame = frame_of(message, sender=0, incarnation=self._me, to=self.incarnation)
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
        """Forget what it asked, and take the way to it out of DDS."""
        self._asker.give_up(lambda _: True)
        self._answers.clear()
        await self._port.close()


def _size(result: StoreAnswer) -> int:
    return sum(len(value) for value in result.values)
