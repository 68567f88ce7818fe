"""Who waits for news of the transport: a thread of its own, or a thread that waits for what the news bring. What it has
for the event loop gets there by a :class:`Handover`: the loop is woken, or polls the transport for a moment.

:meth:`WaitLoop.step` is one turn of that work. In production the thread that :meth:`WaitLoop.start` starts calls it;
any other driver may call it in place of the thread, and :meth:`WaitLoop.drop_rest` after the last step.

Not a listener: a Python callback on Cyclone's own thread needs the GIL, and together with a writer that waits for
acknowledgements while it holds the GIL this is a deadlock.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gradbus.runtime.drive import OwnThread
from gradbus.runtime.spinning import SPINNING
from gradbus.runtime.transport.api import Periodic, Waiter

# How long the thread leaves the wait to others before it asks whether they are done; the latter when threads have
# waited inline again and again: each time it asks takes their core, and the GIL.
BACKOFF_S, LONG_BACKOFF_S = 0.003, 0.012
# A thread that waits inline looks again and again for so long before it sleeps. To sleep and be woken takes 50 us, and
# on a virtual machine as much of the waker's time; 64 KiB are on their way for up to 250 us. So all_reduce of 64 KiB
# takes a tenth less time than with 100 us here; without any of it, a sixth more.
SPIN_S = 500e-6
INLINE_SLEEP_S = 0.2  # the longest sleep inline: signals are handled in between
IDLE_S = 1.0  # the longest sleep of the thread
TURN_S = 1e-3  # for how long polling may keep an event loop from timers and sockets


class WaitLoop(OwnThread):
    """Waits for what the transport reports and handles it, one turn after the other, on one thread at a time.

    Attributes:
        is_relieved: whether threads that wait inline do the work of its own thread, or did since that has last begun a
            turn. While it is False, :meth:`wake_io_thread` has nothing to wake.
        is_asked: something goes on that no thread waits for inline, since the last turn of this one. Who looks at
            ``is_relieved`` in place of a call of :meth:`wake_io_thread` sets it before: then a thread that begins to
            wait inline only now hands the work back at its end.
    """

    def __init__(
        self,
        waiter: Waiter,
        handle: Callable[[list[int], float], bool],
        *,
        failed: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        """Args:
        handle: gets the numbers of the endpoints that have news, and until when to handle them, by ``time.monotonic``;
            what is left is reported again. Returns whether there was anything to do.
        failed: called when the loop cannot go on, see ``fault``. ended: called once at the end, on the thread.
        """
        super().__init__(self._run, name="gradbus-receive")
        self.waiter = waiter
        self._handle = handle
        self._failed = failed
        self._ended = ended
        # A signal may come right after a thread has taken one of these. They know their owner, so they are given back.
        self._polling = threading.RLock()  # held by the thread whose turn it is
        self._inline_lock = threading.RLock()  # held by the thread that waits inline
        self._inline_thread = 0
        self.is_relieved = False
        self._was_inline = False  # a thread has waited inline since this one has asked
        self._backs_off = False  # this one leaves the wait to such threads for a while
        self._wanted = threading.Event()
        self.is_asked = False
        self._calls: list[Periodic] = []
        self._new_calls: deque[Periodic] = deque()
        self._due_s = math.inf
        self.stopping = False
        self.fault: BaseException | None = None

    # From any thread

    def wake(self) -> None:
        """End the wait that is in progress: there is something to attach, to remove or to take again."""
        self.waiter.wake()

    def wake_inline(self) -> None:
        """End the wait of a thread that waits inline: what it waits for may have happened, on this thread."""
        if self._inline_thread and self._inline_thread != threading.get_ident():
            self.waiter.wake()

    def wake_io_thread(self) -> None:
        """Have the thread wait again now, or when the wait of another thread inline has ended: something goes on that
        no thread waits for inline."""
        self.is_asked = True  # before the look: the end of a wait looks in the other order
        if self._was_inline or (self._backs_off and not self._inline_thread):
            self._wanted.set()

    def stop(self) -> None:
        """End the thread soon."""
        self.stopping = True
        self._wanted.set()
        self.waiter.wake()

    def add_periodic(self, periodic: Periodic) -> None:
        """See :meth:`.transport.api.IoThread.add_periodic`."""
        if not self.stopping:
            self._new_calls.append(periodic)
            self.waiter.wake()

    def poll_inline(self, done: Callable[[], bool], until_s: float, *, may_sleep: bool = True) -> None:
        """Do the thread's work here while waiting for what comes of it: that saves two changes of threads.

        Returns when ``done()`` is true, when ``time.monotonic`` has reached ``until_s``, or when another thread waits
        inline already; so the caller still has to wait for what it waits for.

        Args:
            done: asked after each turn. Whoever makes it true on another thread calls :meth:`wake_inline` after that.
            may_sleep: False on the thread of an event loop, which must not be held: return where another would sleep,
                and leave to others what would go on beyond ``until_s``.
        """
        thread = threading.get_ident()
        if self.stopping or self._inline_thread == thread:
            return
        self.is_relieved = True  # before it is: who asks then asks in vain at most
        try:
            if self._inline_lock.acquire(blocking=False):
                self._inline_thread = thread
                self._poll_in_turn(done, until_s, may_sleep)
        finally:
            if self._inline_thread == thread:
                self._inline_thread = 0
            try:  # noqa: SIM105 - in a call of suppress() the signal would come before the release
                self._inline_lock.release()
            except RuntimeError:  # it was not taken
                pass
            if self.is_asked and not self._inline_thread:
                self._wanted.set()

    def _poll_in_turn(self, done: Callable[[], bool], until_s: float, may_sleep: bool) -> None:
        try:
            if not self._polling.acquire(blocking=False):
                self.waiter.wake()
                if not self._polling.acquire(timeout=max(0.0, min(until_s - time.monotonic(), INLINE_SLEEP_S))):
                    return
            self._poll(done, until_s, may_sleep)
        except Exception as error:  # of the transport: it is the bus that cannot go on, not the caller
            self.fail(error)
        finally:
            self._was_inline = True
            try:  # noqa: SIM105 - as above
                self._polling.release()
            except RuntimeError:  # it was not taken
                pass

    def _poll(self, done: Callable[[], bool], until_s: float, may_sleep: bool) -> None:
        now_s = time.monotonic()
        spin_until_s = now_s + SPINNING.budget_s(now_s, SPIN_S)
        turn_until_s = math.inf if may_sleep else until_s
        has_looked = False
        while not self.stopping and not done() and (left_s := until_s - now_s) > 0:
            if now_s >= spin_until_s and (may_sleep or has_looked):
                if not may_sleep:
                    break
                self._turn(min(left_s, INLINE_SLEEP_S))
                now_s = time.monotonic()
                continue
            found, has_looked = self._turn(0.0, turn_until_s), True
            now_s = time.monotonic()
            # To the transport's own threads, which bring what is waited for. Not when it is here.
            if not found and not SPINNING.yield_core():
                spin_until_s = now_s

    # On the thread, or on one that waits inline

    def call_within(self, periodic: Periodic, seconds: float) -> None:
        """See :meth:`.transport.api.IoThread.call_within`."""
        periodic.due_s = min(periodic.due_s, time.monotonic() + seconds)
        self._due_s = min(self._due_s, periodic.due_s)

    def step(self, timeout_s: float = 0.0) -> float:
        """Wait for news, handle them, and make the periodic calls that are due.

        One thread at a time may call it: a driver calls it in place of :meth:`start`.

        Args:
            timeout_s: the longest wait for news, which ends sooner when a periodic call is due.

        Returns:
            Seconds until something is due: 0 if there were news, as there may be more, else until the next periodic
            call, ``IDLE_S`` at most. News and :meth:`wake` make a step due at once.
        """
        if self._turn(timeout_s) or self._new_calls:
            return 0.0
        return min(IDLE_S, max(0.0, self._due_s - time.monotonic()))

    def drop_rest(self) -> None:
        """Let go of the periodic calls and report the end: after the last step, on the thread that has called it."""
        self._calls, self._new_calls, self._due_s = [], deque(), math.inf  # they hold what they are methods of
        self._ended()

    def _run(self) -> None:
        backoff_s = BACKOFF_S
        try:
            while not self.stopping:
                if self._inline_thread or self._was_inline:
                    # In the midst of calls that wait for what they start, the next thread comes soon.
                    self._backs_off = self.is_relieved = True  # first: who asks for this one looks at both
                    self._was_inline = False
                    if self._wanted.wait(backoff_s):
                        self._wanted.clear()
                        self._was_inline = False
                        backoff_s = BACKOFF_S
                    else:
                        backoff_s = min(2 * backoff_s, LONG_BACKOFF_S)
                    continue
                backoff_s, self._backs_off, self.is_relieved = BACKOFF_S, False, False
                with self._polling:
                    self.is_asked = False
                    self.step(IDLE_S)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._polling.acquire(timeout=2 * INLINE_SLEEP_S)  # for good: the transport may be closed after this
            self.drop_rest()

    def _turn(self, timeout_s: float, until_s: float = math.inf) -> bool:
        """Wait for news and handle them, until then at most. Returns whether there were any."""
        if timeout_s > 0.0:
            timeout_s = min(timeout_s, max(0.0, self._due_s - time.monotonic()))
        numbers = self.waiter.wait(timeout_s)
        if self._new_calls or time.monotonic() >= self._due_s:
            self._call_periodics()
        return self._handle(numbers, until_s)

    def _call_periodics(self) -> None:
        while self._new_calls:  # one that is added again while it returns False is called again
            call = self._new_calls.popleft()
            if all(call.function != one.function for one in self._calls):
                self._calls.append(call)
        for call in list(self._calls):
            if time.monotonic() >= call.due_s:
                call.due_s = math.inf  # it may set an earlier time itself
                if not call.function():
                    self._calls.remove(call)
                call.due_s = min(call.due_s, time.monotonic() + call.every_s)
        self._due_s = min((call.due_s for call in self._calls), default=math.inf)

    def fail(self, error: BaseException) -> None:
        """Stop, and report that the loop cannot go on, see ``fault``."""
        self.fault = error
        self.stopping = True
        self._wanted.set()
        self._failed()


class Handover:
    """The calls that the receive thread has for the event loop of a bus, run there in their order.

    To wake the receive thread, hand it the GIL and wake the loop takes 100 to 200 us, several times what the message
    has taken from process to process. A consumer whose last waits were short polls instead, while nothing else is ready
    to run on the loop.
    """

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
