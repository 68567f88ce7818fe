"""The handles that torch gets, one for each call; their order, and the thread that runs the callbacks of their futures.

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
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum, auto
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistBackendError, Work
from torch.futures import Future

from gradbus.runtime import forks
from gradbus.runtime.closing_thread import ClosingThread
from gradbus.runtime.collectives.engine import Engine
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.collectives.status import StallLog
from gradbus.runtime.errors import CollectiveTimeout, ForkedProcess
from gradbus.runtime.logs import get_logger
from gradbus.torch.calls import CollectiveCall
from gradbus.torch.observed import observed
from gradbus.torch.untraced import untraced

_NO_LIMIT = timedelta(0)
RESCUE_S = 1.0
_JOIN_S = 5.0

log = get_logger("torch")


class State(Enum):
    """Is the state of a work."""

    WAITING = auto()  # its operations have not been started
    RUNNING = auto()
    ENDED = auto()  # none of its operations is under way, and none ever will be


class _Latch:
    """An event that is set once. ``threading.Event`` takes 4 us more a call, a tenth of what a small one takes."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held until it is set
        self._lock.acquire()

    def set(self) -> None:
        self._lock.release()

    def is_set(self) -> bool:
        return not self._lock.locked()

    def wait(self, timeout_s: float = -1) -> bool:
        is_set = self._lock.acquire(timeout=timeout_s)
        if is_set:
            self._lock.release()
        return is_set


@untraced
class DdsWork(Work):
    """A call under way. It has ended when all its operations have.

    The thread that ends the last operation wakes those that wait. Only a future that is not done yet needs the
    communication thread, which runs its callbacks.

    Attributes:
        source: the rank a message came from, -1 where that makes no sense or is not known yet.
        counted: among the running ones of the queue.
    """

    def __init__(
        self, queue: WorkQueue, call: CollectiveCall, name: str, timeout_s: float, *, ordered: bool, source: int = -1
    ) -> None:
        """
        Args:
            name: of the operations, on all ranks.
            ordered: it takes its turn in the order of the group's collectives.

        Raises:
            DistBackendError: this process is a child, by fork, of the one that is in the group.
        """
        super().__init__()
        self._made_in = queue.made_in
        self.call = call
        self._check_process()
        self.name = name
        self.ordered = ordered
        self.source = source
        self.until_s = time.monotonic() + timeout_s
        self.counted = False
        self._timeout_s = timeout_s
        self._queue = queue
        self._state = State.WAITING  # guarded by the lock of the queue, as are the next four
        self._left = 0  # operations that have not ended
        self._error: BaseException | None = None
        self._began_s = 0.0  # while somebody measures
        self._future: Future[Any] | None = None
        self._trigger: Future[Any] | None = None  # completes the future; taken away when it has
        self._settling = threading.Lock()
        self._over = _Latch()

    def _check_process(self) -> None:
        try:
            forks.check(self._made_in, "the process group")
        except ForkedProcess as error:
            raise DistBackendError(f"{self.call.what}: {error}") from error

    # For the queue

    @property
    def ended(self) -> bool:
        """Whether no operation of it is under way any more."""
        return self._state is State.ENDED

    def begin(self) -> None:
        """Start the operations. Called once, in the order of the calls; also when it was given up meanwhile, so that
        those that come next keep their numbers."""
        queue, operations = self._queue, self.call.operations
        if observed.observer is not None:
            self._began_s = time.perf_counter()
        with queue.lock:
            given_up = self.ended
            if not given_up:
                self._state, self._left = State.RUNNING if operations else State.ENDED, len(operations)
                if self._future is not None:
                    self._count()
            has_future = self._future is not None
        if not operations and not given_up:
            self._announce(has_future)
        for operation in operations:
            if given_up and self._error is not None:
                operation.fail(self._error)  # its buffers are the caller's again: it must not be sent, or filled
            queue.engine.start(operation, self.name, 0)
            if not given_up:
                # Not before: it may have failed with another one of them, and when the work ends all have their number.
                operation.when_settled(self._one_ended)

    def _count(self) -> None:
        """It is under way and has a future: from now on it holds up those that come later. With the lock held."""
        self.counted = self.ordered
        self._queue.running += self.counted

    def end(self, error: BaseException | None = None) -> bool:
        """End one whose operations were not started. False: they were, and are under way."""
        with self._queue.lock:
            if self._state is not State.WAITING:
                return self.ended
            self._error = error
            self._state = State.ENDED
            has_future = self._future is not None
        self._announce(has_future)
        return True

    def _one_ended(self, operation: Operation) -> None:
        """On whatever thread, and perhaps with the operation's lock held: nothing here may wait."""
        with self._queue.lock:
            self._left -= 1
            is_first_error = operation.error is not None and self._error is None
            if is_first_error:
                self._error = operation.error
                self._queue.first_error = self._queue.first_error or operation.error
            if self._left == 0:
                self._state = State.ENDED
            ended, has_future = self.ended, self._future is not None
        if ended:
            self._announce(has_future)
        elif is_first_error:
            self._queue.later(self._fail_others)

    def _announce(self, has_future: bool) -> None:
        if (observer := observed.observer) is not None and self._began_s:
            observer.exchanged(self.call.what, self._began_s, time.perf_counter())
        self._over.set()
        self._queue.engine.progress.wake_inline()
        self._queue.ended(self, has_future)

    def _fail_others(self) -> None:
        if self._error is not None:
            for operation in self.call.operations:
                operation.fail(self._error)

    def expire(self) -> None:
        """End it as overdue. When this returns, its buffers are free."""
        operations = self.call.operations
        missing = sorted({rank for operation in operations if not operation.done for rank in operation.missing})
        error = CollectiveTimeout(self.call.what, missing, self._timeout_s)
        self._queue.first_error = self._queue.first_error or error
        if not self.end(error):
            for operation in operations:
                operation.fail(error)

    def wait_until_done(self) -> None:
        """Wait until it has ended, well or not."""
        observed.while_waiting(self._wait_until_done)

    def _wait_until_done(self) -> None:
        progress = self._queue.engine.progress
        progress.poll_inline(self._over.is_set, self.until_s)
        if not self._over.is_set():  # another thread polls, for a work that may end sooner
            progress.wake_io_thread()
        if not self._over.wait(max(0.0, self.until_s - time.monotonic())):
            self.expire()
            self._over.wait()

    def deliver(self) -> None:
        """Complete the future, and with that run its callbacks."""
        with self._queue.lock:
            trigger, self._trigger = self._trigger, None
        if trigger is not None:
            trigger.set_result(None)

    @property
    def undelivered(self) -> bool:
        """Whether it has a future that is not done."""
        return self._trigger is not None

    def _outcome(self, trigger: Future[Any]) -> Sequence[Tensor]:
        """The value of the future; raises its error.

        The future is one that torch makes of this function's outcome. One that is given an exception passes it on to
        C++, but not to those who get the future back from there: to them the exception would be a value.
        """
        error = self._settle()
        if error is not None:
            raise error
        return self.call.value

    def _settle(self) -> Exception | None:
        """Put the results in their places, once. Returns what went wrong, as an error of torch's."""
        if self.call.finish:
            with self._settling, torch.no_grad():
                try:
                    for function in self.call.finish if self._error is None else ():
                        function()
                except Exception as error:
                    self._error = error
                self.call.finish = []
        return None if self._error is None else self._as_torch_error(self._error)

    def _as_torch_error(self, error: BaseException) -> Exception:
        """A RuntimeError, which torch's users expect, with our error as its cause."""
        how = f"Timed out after {self._timeout_s:g} s" if isinstance(error, CollectiveTimeout) else "failed"
        text = str(error).removeprefix(f"collective {self.name!r}: ")  # all collectives have the same name
        if " where this rank " in text:
            order = " in the same order" if self.ordered else ""
            text += f". All ranks must make the same calls{order}, with tensors of one shape and dtype"
        result = DistBackendError(f"[Rank {self._queue.engine.rank}] {self.call.what} {how}: {text}")
        result.__cause__ = error
        return result

    # For torch

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait until it has ended. ``timeout``: give up waiting earlier than it itself does.

        Raises:
            DistBackendError: it failed, or it is not done in time.
        """
        limit_s = timeout.total_seconds()
        return self.wait_within(limit_s, limit_s)

    def wait_within(self, left_s: float, limit_s: float) -> bool:
        """Wait as :meth:`wait` does. ``left_s``: so much is left of ``limit_s``; 0: no limit but its own."""
        self._check_process()
        if not 0 < left_s < self.until_s - time.monotonic():
            self.wait_until_done()
        elif not observed.while_waiting(self._over.wait, left_s):
            raise DistBackendError(
                f"[Rank {self._queue.engine.rank}] wait for {self.call.what} Timed out after {limit_s:g} s; it "
                f"goes on until {self._timeout_s:g} s have passed"
            )
        error = self._settle()
        if error is not None:
            raise error
        return True

    def synchronize(self) -> None:
        """The same as :meth:`wait`."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """A future of the tensors. Its callbacks run on the communication thread, or here if it is done already."""
        queue = self._queue
        with queue.lock:
            if self._future is not None:
                return self._future
            self._trigger = Future(devices=[tensor.device for tensor in self.call.value if not tensor.is_cpu])
            future = self._future = self._trigger.then(self._outcome)
            ended = self.ended
            if not ended:
                queue.need_thread()
                if self._state is State.RUNNING:
                    self._count()
        if ended:
            self.deliver()
        return future

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        if self.ended:
            self._settle()
        return self.ended

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.ended and self._settle() is None

    def exception(self) -> Exception | None:
        """Return what went wrong, as far as is known."""
        return self._settle() if self.ended else None

    def result(self) -> list[Tensor]:
        """The tensors."""
        return self.call.value

    def source_rank(self) -> int:
        """The rank a message came from."""
        return self.source

    _source_rank = source_rank


@untraced
class CoalescedWork(Work):
    """Calls that are waited for as one."""

    def __init__(self, works: Sequence[DdsWork]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait for all of them. ``timeout``: for all together. Raises the first error there is."""
        limit_s, began_s = timeout.total_seconds(), time.monotonic()
        for work in self._works:
            # What has ended by now is done, however late it is.
            left_s = max(began_s + limit_s - time.monotonic(), 1e-6) if limit_s > 0 else 0.0
            work.wait_within(left_s, limit_s)
        return True

    def get_future(self) -> Future[Any]:
        """A future of all their tensors."""
        parts = torch.futures.collect_all([work.get_future() for work in self._works])
        return parts.then(lambda done: [tensor for part in done.value() for tensor in part.value()])

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)


class WorkQueue:
    """The collectives of one process group on one rank.

    Attributes:
        engine: of the group. later: calls a function on the event loop.
        lock: guards the state of the queue and of its works. Held for some instructions only.
        running: works under way, with futures, whose callbacks have not all run.
        issued: collectives called so far.
        made_in: the generation of the process, see :mod:`gradbus.runtime.forks`.
        first_error: in which the first of them has ended that failed. torch's C++ code, that of DistributedDataParallel
            for one, hands on no more than its text.
    """

    def __init__(
        self,
        engine: Engine,
        later: Callable[[Callable[[], None]], None] | None = None,
        stalls: StallLog | None = None,
    ) -> None:
        """
        Args:
            later: None: there is no event loop, and functions are called at once.
            stalls: logs collectives that wait too long; None: nothing does.
        """
        self.engine = engine
        self.later = later or _at_once
        self.made_in = forks.generation
        self.lock = threading.Lock()
        self.running = 0
        self.issued = 0
        self._stalls = stalls
        self.first_error: BaseException | None = None
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
        """Watch the deadline of something that is started later."""
        with self.lock:
            self._note(work)

    def _note(self, work: DdsWork) -> None:
        self.issued += work.ordered
        self._open.add(work)

    # For works

    def need_thread(self) -> None:
        """Something that has not ended has a future now. With the lock held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"gradbus-torch-{self.engine.group}", daemon=True)
            self._thread.start()

    def ended(self, work: DdsWork, has_future: bool) -> None:
        """A work has ended. ``has_future``: it had one by then; one that is made later is done."""
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
            if failed is not None:  # of a callback: it has no other way out
                with contextlib.suppress(Exception):  # a log that takes no line
                    log.error("callback failed", group=self.engine.group, call=work.call.what, exc_info=failed)

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
                self._waiting.popleft()  # not before: a call on another thread must not overtake it

    # Deadlines and the end

    def watch(self, now_s: float) -> None:
        """End what is overdue while no thread waits for it. Called now and then, on a thread that must not wait."""
        with self.lock:
            overdue = [work for work in self._open if work.until_s < now_s]
        for work in overdue:
            if not work.ended:
                work.expire()
            elif work.undelivered and work.until_s + RESCUE_S < now_s:
                # The thread is stuck in a callback that waits for a future of this thread's: end that wait.
                ClosingThread(work.deliver, name="gradbus-torch-rescue").start()
        if self._stalls is not None:
            self._stalls.look(self.engine.waiting)

    def close(self) -> None:
        """End the thread when it has run the callbacks of what has ended. The engine is closed by then."""
        self._deliveries.put(None)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)


def _at_once(function: Callable[[], None]) -> None:
    function()
