"""What both ends of a store have: requests of the own process, each in a thread that waits for its answer, and messages
that wait for the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.transport.api import Outlet
from gradbus.runtime.wire.messages import new_incarnation
from gradbus.torch.store.address import Address
from gradbus.torch.store.messages import READ_ONLY, StoreAnswer, StoreRequest

REPEAT_S = 0.25  # when to repeat a request first, then after twice as long, up to
MAX_REPEAT_S = 1.0
_BYTES_PER_S = 10e6  # a large request is not repeated while it may still be on its way


@dataclass(slots=True, eq=False)
class _Pending:
    """A request that waits. The answer is set before the event; None: there will be none."""

    event: threading.Event = field(default_factory=threading.Event)
    answer: StoreAnswer | None = None


class StoreEnd:
    """One process's end of a store. Made inside the event loop of the bus."""

    def __init__(self, bus: Bus, address: Address, host: str, failed: Callable[[str], None], backlog: int) -> None:
        """
        Args:
            host: host name and process id, for people.
            failed: called once, with the reason, when the store cannot be used any more.
            backlog: messages that may wait for the loop.
        """
        self.incarnation = new_incarnation()
        self._bus = bus
        self._address = address
        self._host = host
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._port = bus.raw_endpoints()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}  # by id
        self._writing = threading.Lock()  # requests that write go one after the other
        self._ended = False
        self._backlog = backlog
        self._posted = 0
        self._handled = 0  # by the loop: each of the two threads has a counter of its own

    # Requests

    def call(self, request: StoreRequest, timeout_s: float) -> StoreAnswer | None:
        """Send a request to the arbiter from this thread, again and again until there is an answer.

        Args:
            request: its id is set here; ``wait_s`` counts from now.

        Returns:
            None: there is no answer within ``timeout_s``, or there are none any more.
        """
        until_s = time.monotonic() + timeout_s
        if request.op in READ_ONLY:
            return self._repeat(request, until_s)
        if not self._writing.acquire(timeout=timeout_s):
            return None
        try:
            return self._repeat(request, until_s)
        finally:
            self._writing.release()

    def _repeat(self, request: StoreRequest, until_s: float) -> StoreAnswer | None:
        pending, began_s = _Pending(), time.monotonic()
        pause_s = REPEAT_S + sum(map(len, request.values)) / _BYTES_PER_S
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = pending
            if self._ended:
                pending.event.set()
        try:
            while not pending.event.is_set() and (now_s := time.monotonic()) < until_s:
                self._request(replace(request, id=number, wait_s=max(0.0, request.wait_s - (now_s - began_s))))
                pending.event.wait(min(pause_s, until_s - now_s))
                pause_s = max(pause_s, min(2 * pause_s, MAX_REPEAT_S))
        finally:
            with self._lock:
                del self._pending[number]
        return pending.answer

    def _request(self, request: StoreRequest) -> None:
        """Send it once. What is lost is sent again."""
        raise NotImplementedError

    def give(self, answer: StoreAnswer) -> None:
        """Wake the thread that waits for it, if one does."""
        with self._lock:
            pending = self._pending.get(answer.id)
        if pending is not None and not pending.event.is_set():
            pending.answer = answer
            pending.event.set()

    def end(self) -> None:
        """Let no thread wait any more."""
        with self._lock:
            self._ended = True
            waiting = list(self._pending.values())
        for pending in waiting:
            pending.event.set()

    def _fail(self, why: str) -> None:
        if not self._ended:
            self._failed(why)
            self.end()

    # The event loop

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        """Call it on the loop. On one thread at a time. Nothing is done when too much waits already: a request without
        an answer is sent again."""
        if self._posted - self._handled >= self._backlog:
            return
        self._posted += 1
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._handle, function, arguments)

    def _handle(self, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
        self._handled += 1
        function(*arguments)

    # The end

    def begin_closing(self, stay_s: float) -> None:
        """On any thread: the own process needs the store no more. ``stay_s``: how long to keep it for others."""

    async def leave(self) -> list[Outlet]:
        """Say goodbye. Returns writers of which all that was written should be taken over before they are closed."""
        raise NotImplementedError

    async def close(self) -> None:
        """Take everything out of DDS."""
        raise NotImplementedError
