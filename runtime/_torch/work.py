"""The handles that torch gets: one for each call."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import DistBackendError, Work
from torch.futures import Future

from gradbus.runtime import forks
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.errors import CollectiveTimeout, ForkedProcess
from gradbus.torch.call import CollectiveCall
from gradbus.torch.untraced import untraced

if TYPE_CHECKING:
    from gradbus.torch.work_queue import WorkQueue

_NO_LIMIT = timedelta(0)


@untraced
class DdsWork(Work):
    """A call under way. It has ended when all its operations have.

    Who waits is woken by the thread that ends the last operation. Only what has a future that is not done yet needs the
    communication thread, which runs the future's callbacks.

    ``source`` is the rank a message came from, -1 where that makes no sense or is not known yet.
    """

    def __init__(
        self, queue: WorkQueue, task: CollectiveCall, name: str, timeout_s: float, *, ordered: bool, source: int = -1
    ) -> None:
        """
        Args:
            name: of the operations, on all ranks.
            ordered: it takes its turn in the order of the group's collectives.
        """
        super().__init__()
        self._made_in = queue.made_in
        self._check_process(task.what)
        self.task = task
        self.name = name
        self.ordered = ordered
        self.source = source
        self.until_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._queue = queue
        self._left = max(1, len(task.operations))
        self._error: BaseException | None = None
        self._started = False
        self._trigger: Future[Any] | None = None
        self._future: Future[Any] | None = None
        self._delivered = False
        self.counted = False  # among the running ones of the queue
        self._settling = threading.Lock()
        self._gate = threading.Lock()  # open when all has ended
        self._gate.acquire()

    def _check_process(self, what: str) -> None:
        """Raises DistBackendError: this process is a child, by fork, of the one that is in the group."""
        try:
            forks.check(self._made_in, "the process group")
        except ForkedProcess as error:
            raise DistBackendError(f"{what}: {error}") from error

    # For the queue

    @property
    def ended(self) -> bool:
        """Whether no operation of it is under way any more."""
        return self._left == 0

    def begin(self) -> None:
        """Start the operations. Called once, in the order of the calls; also when it was given up meanwhile, so that
        those that come next keep their numbers."""
        queue = self._queue
        with queue.lock:
            self._started = True
            given_up = self.ended
            if self._future is not None and not given_up:
                self._count()
        for operation in self.task.operations:
            if not given_up:
                operation.on_end.append(self._one_ended)
            queue.engine.start(operation, self.name, 0)
            if given_up and self._error is not None:
                operation.fail(self._error)

    def _count(self) -> None:
        """It is under way and has a future: from now on it holds up those that come later. With the lock held."""
        self.counted = self.ordered
        self._queue.running += self.counted

    def end(self, error: BaseException | None = None) -> bool:
        """End one whose operations were not started. False: they were."""
        with self._queue.lock:
            if self._started:
                return False
            if self.ended:
                return True
            self._error = error
            self._left = 0
            has_future = self._future is not None
        self._announce(has_future)
        return True

    def _one_ended(self, operation: Operation) -> None:
        """On whatever thread, and perhaps with the operation's lock held: nothing here may wait."""
        queue = self._queue
        with queue.lock:
            self._left -= 1
            first = operation.error is not None and self._error is None
            if first:
                self._error = operation.error
            ended, has_future = self.ended, self._future is not None
        if ended:
            self._announce(has_future)
        elif first:
            queue.later(self._fail_others)

    def _announce(self, has_future: bool) -> None:
        self._gate.release()
        self._queue.engine.progress.nudge()
        self._queue.ended(self, has_future)

    def _fail_others(self) -> None:
        if self._error is not None:
            for operation in self.task.operations:
                operation.fail(self._error)

    def expire(self) -> None:
        """Its time is over. When this returns, it has ended and its buffers are free."""
        operations = self.task.operations
        missing = sorted({rank for operation in operations if not operation.done for rank in operation.missing})
        error = CollectiveTimeout(self.task.what, missing, self._timeout_s)
        if not self.end(error):
            for operation in operations:
                operation.fail(error)

    def wait_until_done(self) -> None:
        """Wait until it has ended, well or not."""
        self._queue.engine.progress.pump(self._is_over, self.until_s)
        if not self._gate.acquire(timeout=max(0.0, self.until_s - time.monotonic())):
            self.expire()
            self._gate.acquire()
        self._gate.release()

    def _is_over(self) -> bool:
        return not self._gate.locked()

    def deliver(self) -> None:
        """Complete the future, and with that run its callbacks."""
        with self._queue.lock:
            trigger, done = self._trigger, self._delivered
            self._delivered = True
        if trigger is not None and not done:
            trigger.set_result(None)

    @property
    def undelivered(self) -> bool:
        """Whether it has a future that is not done."""
        return self._future is not None and not self._delivered

    def _outcome(self, trigger: Future[Any]) -> list[Tensor]:
        """The value of the future; raises its error.

        The future is one that torch makes of this function's outcome. One that is given an exception tells C++ of it,
        but not those who get the future back from there: to them the exception would be a value.
        """
        error = self._settle()
        if error is not None:
            raise error
        return self.task.value

    def _settle(self) -> Exception | None:
        """Put the results in their places, once. Returns what went wrong."""
        if self.task.finish is not None:
            with self._settling, torch.no_grad():
                finish, self.task.finish = self.task.finish, None
                if finish is not None and self._error is None:
                    try:
                        finish()
                    except Exception as error:
                        self._error = error
        return None if self._error is None else self._told(self._error)

    def _told(self, error: BaseException) -> Exception:
        """The error as torch's users know them: a RuntimeError. Its cause is ours."""
        how = f"Timed out after {self._timeout_s:g} s" if isinstance(error, CollectiveTimeout) else "failed"
        text = str(error).removeprefix(f"collective {self.name!r}: ")  # the name says nothing: all have the same
        if " where this rank " in text:
            order = " in the same order" if self.ordered else ""
            text += f". All ranks must make the same calls{order}, with tensors of one shape and dtype"
        told = DistBackendError(f"[Rank {self._queue.engine.rank}] {self.task.what} {how}: {text}")
        told.__cause__ = error
        return told

    # For torch

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait until it has ended. ``timeout``: give up waiting earlier than it itself does.

        Raises:
            DistBackendError: it failed, or it is not done in time.
        """
        self._check_process(self.task.what)
        limit_s = timeout.total_seconds()
        if 0 < limit_s < self.until_s - time.monotonic():
            if not self._gate.acquire(timeout=limit_s):
                raise DistBackendError(
                    f"[Rank {self._queue.engine.rank}] wait for {self.task.what} Timed out after {limit_s:g} s; it "
                    f"goes on until {self._timeout_s:g} s have passed"
                )
            self._gate.release()
        else:
            self.wait_until_done()
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
            self._trigger = Future()
            future = self._future = self._trigger.then(self._outcome)
            ended = self.ended
            if not ended:
                queue.need_thread()
                if self._started:
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
        """What went wrong, as far as is known."""
        return self._settle() if self.ended else None

    def result(self) -> list[Tensor]:
        """The tensors."""
        return self.task.value

    def source_rank(self) -> int:
        """The rank a message came from."""
        return self.source

    def _source_rank(self) -> int:
        return self.source


@untraced
class CoalescedWork(Work):
    """Calls that are waited for as one."""

    def __init__(self, works: Sequence[DdsWork]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait for all of them. Raises the first error there is."""
        return all(work.wait(timeout) for work in self._works)

    def get_future(self) -> Future[Any]:
        """A future of all their tensors."""
        parts = torch.futures.collect_all([work.get_future() for work in self._works])
        return parts.then(lambda done: [tensor for part in done.value() for tensor in part.value()])

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)
