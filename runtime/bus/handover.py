"""How calls get from the receive thread to the event loop: the loop is woken, or polls the transport for a moment.

To wake the receive thread, hand it the GIL and wake the loop takes 100 to 200 us, several times what the message has
taken from process to process. A consumer whose last waits were short polls instead, while nothing else is ready to run
on the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gradbus.runtime.bus.wait_loop import SPIN_S, WaitLoop

SHORT_S = 2 * SPIN_S  # what ends a sleep no longer than this would have come while polling
SHORT_SLEEPS = 2  # after so many in a row, the next wait polls
TURN_S = 1e-3  # for how long polling may keep the loop from timers and sockets


class Handover:
    """The calls that the receive thread has for the event loop of a bus, run there in their order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: WaitLoop) -> None:
        self._loop = loop
        self._thread = thread
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()  # the topics' inboxes bound it
        self._is_scheduled = False
        self._is_polling = False  # the loop looks at the calls itself
        # What is ready to run. Not public; where a loop has no such attribute, as uvloop, nobody polls.
        self._ready: deque[Any] | None = getattr(loop, "_ready", None)

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have the loop call a function. From any thread; calls of one thread keep their order.

        Raises:
            RuntimeError: the loop is closed.
        """
        if self._loop.is_closed():
            raise RuntimeError("the event loop is closed")
        self._calls.append((function, arguments))
        if not self._is_polling and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._run)

    def poll(self, done: Callable[[], bool]) -> None:
        """Do the work of the receive thread on the loop until ``done()``, until something else is ready to run on the
        loop, or for ``SPIN_S``."""
        ready = self._ready
        if ready is None or ready:
            return

        def is_over() -> bool:
            if self._calls:
                self._run()
            return done() or bool(ready)

        self._is_polling = True
        try:
            self._thread.poll_inline(is_over, time.monotonic() + SPIN_S, may_sleep=False)
        finally:
            self._is_polling = False
            self._run()  # also what another thread has posted meanwhile, counting on this one

    def leave_to_thread(self) -> None:
        """Have the receive thread do its work again: the loop may sleep now."""
        self._thread.wake_io_thread()

    def _run(self) -> None:
        self._is_scheduled = False
        for _ in range(len(self._calls)):
            function, arguments = self._calls.popleft()
            try:
                function(*arguments)
            except Exception as error:
                self._loop.call_exception_handler({"message": f"{function} failed", "exception": error})


class InboxWait:
    """Wait of one consumer on the loop: it sleeps, or polls where its last waits were short."""

    def __init__(self, handover: Handover, has_news: Callable[[], bool]) -> None:
        """``has_news``: whether the wait is over; :meth:`wake` is called when that has changed."""
        self._handover = handover
        self._has_news = has_news
        self._waiter: asyncio.Future[None] | None = None
        self._short_sleeps = 0  # in a row
        self._turn_s = 0.0  # when the loop ran other tasks, by time.monotonic

    def sleep_next(self) -> None:
        """Sleep in the next waits: what comes is large, and takes time that the receive thread should spend."""
        self._short_sleeps = 0

    def wake(self) -> None:
        """There is news. On the loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return when there is news, or for no reason."""
        if self._short_sleeps >= SHORT_SLEEPS:
            self._handover.poll(self._has_news)
            if self._has_news():
                if time.monotonic() > self._turn_s + TURN_S:
                    await asyncio.sleep(0)
                    self._turn_s = time.monotonic()
                return
            self._short_sleeps = 0
        self._handover.leave_to_thread()
        began_s = time.monotonic()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        self._turn_s = time.monotonic()
        self._short_sleeps = self._short_sleeps + 1 if self._turn_s < began_s + SHORT_S else 0
