"""The order of a group's collectives, and the thread that runs the callbacks of their futures.

A collective starts on the thread that calls it and wakes the thread that waits for it: no hop over another thread.
With futures it is not so simple. A callback may call collectives itself, and wait for them (torch's PowerSGD and
quantization hooks do). When it runs depends on the network; were such a collective simply the next one, the ranks would
mix up theirs. So the order is one that all ranks agree on without talking:

- What has a future that is not done yet holds up those called later, until its callbacks have run. (DDP's buckets
  therefore follow one another, as they would on a GPU's stream.)
- What a callback calls starts at once, and the callback goes on when it has ended.

Hence the order is depth first: a call, the calls of its callbacks, the next call. It is the same when the future was
done before the callback was attached: then torch runs the callback on the calling thread, before that can call anything
else.

Callbacks never run on the event loop, which they would stop, and with it what they wait for.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from gradbus.runtime import forks
from gradbus.runtime.collectives.engine import Engine
from gradbus.runtime.logs import get_logger

if TYPE_CHECKING:
    from gradbus.torch.work import DdsWork

RESCUE_S = 1.0
_JOIN_S = 5.0

log = get_logger("torch")


class WorkQueue:
    """The collectives of one process group on one rank.

    Attributes:
        engine: set when the group has formed.
        lock: guards the state of the queue and of its works. Held for some instructions only.
        running: works under way, with futures, whose callbacks have not all run.
        issued: collectives called so far.
        made_in: the generation of the process, see :mod:`gradbus.runtime.forks`.
        also_watch: called by :meth:`watch`.
    """

    engine: Engine

    def __init__(self) -> None:
        self.made_in = forks.generation
        self.lock = threading.Lock()
        self.running = 0
        self.issued = 0
        self.later: Callable[[Callable[[], None]], None] = _at_once
        self.also_watch: Callable[[float], None] | None = None
        self._waiting: deque[DdsWork] = deque()
        self._open: set[DdsWork] = set()
        self._deliveries: SimpleQueue[DdsWork | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    # Calls

    def submit(self, work: DdsWork) -> DdsWork:
        """Start a collective, now or when it is its turn."""
        if threading.current_thread() is self._thread:  # called by a callback
            self.start(work)
            work.wait_until_done()
            return work
        with self.lock:
            self._note(work)
            at_once = not self.running and not self._waiting
            if not at_once:
                self._waiting.append(work)
        if at_once:
            work.begin()
        return work

    def start(self, work: DdsWork) -> DdsWork:
        """Start something out of turn: messages to and from another rank have no place among the collectives."""
        self.note(work)
        work.begin()
        return work

    def note(self, work: DdsWork) -> None:
        """Look after the deadline of something that is started later."""
        with self.lock:
            self._note(work)

    def _note(self, work: DdsWork) -> None:
        self.issued += work.ordered
        self._open.add(work)

    # What works tell

    def need_thread(self) -> None:
        """Something that has not ended has a future now. With the lock held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"gradbus-torch-{self.engine.group}", daemon=True)
            self._thread.start()

    def ended(self, work: DdsWork, has_future: bool) -> None:
        """A work has ended. ``has_future``: it had one by then; whoever asks for one later gets it done."""
        if has_future:
            self._deliveries.put(work)
        else:
            with self.lock:
                self._open.discard(work)

    # The thread

    def _run(self) -> None:
        closing = False
        while not (closing and self._idle()):
            work = self._deliveries.get()
            if work is None:
                closing = True
                continue
            failed: Exception | None = None
            try:
                work.deliver()
            except Exception as error:
                failed = error
            with self.lock:
                self._open.discard(work)
                self.running -= work.counted
            self._start_waiting()
            if failed is not None:  # of a callback: it has nobody else to tell
                with contextlib.suppress(Exception):  # a log that takes no line
                    log.error("callback failed", group=self.engine.group, call=work.task.what, exc_info=failed)

    def _idle(self) -> bool:
        with self.lock:
            return not self.running and not self._waiting and self._deliveries.empty()

    def _start_waiting(self) -> None:
        while True:
            with self.lock:
                if self.running or not self._waiting:
                    return
                work = self._waiting[0]
            work.begin()
            with self.lock:
                self._waiting.popleft()  # not before: who calls now must not overtake it

    # Deadlines and the end

    def watch(self, now_s: float) -> None:
        """End what is overdue and nobody waits for. Called now and then, on a thread that must not wait."""
        with self.lock:
            overdue = [work for work in self._open if work.until_s < now_s]
        for work in overdue:
            if not work.ended:
                work.expire()
            elif work.undelivered and work.until_s + RESCUE_S < now_s:
                # The thread is stuck in a callback that waits for a future of this thread's: end that wait.
                threading.Thread(target=work.deliver, name="gradbus-torch-rescue", daemon=True).start()
        if self.also_watch is not None:
            self.also_watch(now_s)

    def close(self) -> None:
        """End the thread when it has run the callbacks of what has ended. The engine is closed by then."""
        self._deliveries.put(None)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)


def _at_once(function: Callable[[], None]) -> None:
    function()
