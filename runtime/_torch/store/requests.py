"""What waits at an end of a store: requests of this process for their answers, each in a thread of its own, and what
has come in for the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from gradbus.torch.store.messages import StoreAnswer


@dataclass(slots=True, eq=False)
class PendingRequest:
    """Where one thread waits.

    Attributes:
        number: of its request. answer: set before ``event``; None: there will be none.
    """

    number: int
    event: threading.Event = field(default_factory=threading.Event)
    answer: StoreAnswer | None = None


class PendingRequests:
    """All that wait. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._slots: dict[int, PendingRequest] = {}  # in the order of their numbers
        self.ended = False

    def add(self) -> PendingRequest:
        """A new request."""
        with self._lock:
            slot = PendingRequest(next(self._numbers))
            self._slots[slot.number] = slot
            if self.ended:
                slot.event.set()
            return slot

    def remove(self, slot: PendingRequest) -> None:
        """Its answer has come or is not waited for any more."""
        with self._lock:
            self._slots.pop(slot.number, None)

    def up_to(self, slot: PendingRequest) -> list[int]:
        """The numbers that wait, from the oldest to this one."""
        with self._lock:
            return [number for number in self._slots if number <= slot.number]

    def give(self, answer: StoreAnswer) -> None:
        """Wake who waits for it, if anybody does."""
        with self._lock:
            slot = self._slots.get(answer.id)
        if slot is not None and not slot.event.is_set():
            slot.answer = answer
            slot.event.set()

    def end(self) -> None:
        """Let nobody wait any more."""
        with self._lock:
            self.ended = True
            slots = list(self._slots.values())
        for slot in slots:
            slot.event.set()


class Backlog:
    """Calls that wait for the event loop, so many at most. They are posted on one thread at a time."""

    def __init__(self, limit: int) -> None:
        """Only from inside the loop."""
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._posted = 0
        self._done = 0  # by the loop: each of the two threads has a counter of its own

    def post(self, function: Callable[..., None], *arguments: object) -> None:
        """Call it on the loop. Nothing is done when too much waits already: whoever is not answered asks again."""
        if self._posted - self._done >= self._limit:
            return
        self._posted += 1
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._call, function, arguments)

    def _call(self, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
        self._done += 1
        function(*arguments)
