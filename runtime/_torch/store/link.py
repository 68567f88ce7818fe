"""One process's connection to a store over DDS: opens the bus, sends requests, turns what goes wrong into torch's
errors, and ends gracefully.

Rank 0 is the arbiter. Its process stays, for a bounded time, until the others have had their last answers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, QueueEmptyError

from gradbus.runtime.bus import background
from gradbus.runtime.closing_thread import ClosingThread
from gradbus.torch.store.address import Address
from gradbus.torch.store.client import StoreClient
from gradbus.torch.store.endpoint import StoreEnd
from gradbus.torch.store.messages import Op, StoreAnswer, StoreRequest
from gradbus.torch.store.server import StoreServer

GRACE_S = 1.0  # the arbiter knows more than "no answer" about a wait that has timed out: wait for its answer
_ACKS_S = 1.0  # how long the others get to take over the last messages
_CLOSE_S = 5.0
STAY_S = 60.0  # how long rank 0 keeps the store for others when its own process group is destroyed
_EXIT_S = 5.0  # and when its process ends
_PATIENCE_S = 3.0
_PATIENCE_LEASES = 2.5  # after that a process which is still there is not a dead one


def acquire_bus(address: Address) -> background.BusThread:
    """The bus of all that has to do with an address: this store, the process groups that are made with it, and what is
    left of a former store. Buses of one process that come and go while others discover them may never be found, so
    there is one.

    Raises:
        ConfigError: a setting is wrong. BusError: the transport cannot be started.
    """
    settings = background.settings_from_environment().model_copy(update={"domain": address.domain})
    return background.acquire(background.numbered_job(address.number, settings), settings, address.rank)


def patience_s(remote_lease_s: float | None) -> float:
    """Return how long a process asks again while another one with its rank is there, which may be a dead one.

    Args:
        remote_lease_s: of its bus; None: all are on this machine, where the kernel reports deaths.
    """
    return _PATIENCE_S if remote_lease_s is None else _PATIENCE_LEASES * remote_lease_s


class StoreLink:
    """Shared by all handles of one address in this process.

    Attributes:
        fault: why it cannot be used any more. finished: it has left.
        process: number of the process that has opened it; a child by fork is another one.
        handles: the one that is closed last closes the link.
        clones: C++ has them, which does not keep the Python part of an object alive.
        thread: the thread of its bus.
        end: its endpoint in DDS, while the link is open. leaving: the same endpoint from then on, until it has left.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.fault = ""
        self.handles: set[Any] = set()
        self.clones: list[Any] = []
        self.finished = threading.Event()
        self.process = os.getpid()
        self._opening = threading.Lock()
        self.thread: background.BusThread | None = None
        self.end: StoreEnd | None = None
        self.leaving: StoreEnd | None = None

    def open(self, timeout_s: float) -> None:
        """Begin, or wait for another thread that does; rank 0 needs no other rank for it.

        Raises:
            DistNetworkError: there is no rank 0 within ``timeout_s``, or it refuses this rank.
            ConfigError, BusError: DDS cannot be used as it is set.
        """
        with self._opening:
            if self.end is None and not self.fault:
                try:
                    self._open(timeout_s)
                except BaseException as error:
                    self.fault = str(error) or type(error).__name__
                    raise
            try:
                self._check()
            except DistNetworkError:
                self.close()  # no handle will
                raise

    def _open(self, timeout_s: float) -> None:
        self.thread = thread = acquire_bus(self.address)
        end: StoreEnd | None = None
        joining: Future[None] | None = None
        try:
            end = thread.start(self._make(thread)).result()
            if isinstance(end, StoreClient):
                joining = thread.start(end.join(timeout_s, patience_s(thread.bus.remote_lease_s)))
                joining.result()
            self.end = end
        except BaseException:
            if joining is not None:
                joining.cancel()  # it goes on when this thread was interrupted
            if end is not None:
                with contextlib.suppress(TimeoutError):
                    thread.start(end.close()).result(_CLOSE_S)
            background.release(thread)
            raise
        _open.add(self)

    async def _make(self, thread: background.BusThread) -> StoreEnd:
        kind = StoreClient if self.address.rank else StoreServer
        return kind(thread.bus, self.address, f"{socket.gethostname()} (process {os.getpid()})", self._fail)

    def _fail(self, why: str) -> None:
        self.fault = self.fault or why

    def _check(self) -> None:
        if self.fault:
            raise DistNetworkError(f"store {self.address.name}, rank {self.address.rank}: {self.fault}")
        if self.process != os.getpid():
            raise DistNetworkError(
                f"store {self.address.name} was opened by the process that this one was forked from, and cannot be "
                f"used here. Start processes that use it by spawn, as multiprocessing.get_context('spawn') does"
            )

    def call(
        self,
        op: Op,
        keys: Sequence[str],
        values: Sequence[bytes] = (),
        number: int = 0,
        *,
        waits: bool = False,
        timeout_s: float,
    ) -> StoreAnswer:
        """Send a request to the arbiter, and wait for the answer.

        Args:
            waits: the arbiter may wait for ``timeout_s`` as well.

        Raises:
            DistStoreError: what it waits for is not there in time, or it cannot be done.
            DistNetworkError: the arbiter is gone. QueueEmptyError.
        """
        end = self.end
        self._check()
        assert end is not None  # it is taken away after the fault is set
        request = StoreRequest(0, op, list(keys), list(values), number, timeout_s if waits else 0.0)
        answer = end.call(request, timeout_s + GRACE_S)
        name, timeout = f"store {self.address.name}", f"wait timeout after {timeout_s * 1000:.0f}ms, keys"
        if answer is None:
            self._check()
            raise DistStoreError(f"{name}: {timeout}: {_some(keys)}: no answer from rank 0, whose process is there")
        match answer.outcome:
            case "timeout":
                raise DistStoreError(f"{name}: {timeout}: {_some(answer.keys)}{answer.text and '; '}{answer.text}")
            case "empty":
                raise QueueEmptyError(f"{name}: queue {keys[0]!r} is empty")
            case "error":
                raise DistStoreError(f"{name}: {answer.text}")
            case "done":
                return answer

    # The end

    def close(self, stay_s: float | None = None) -> None:
        """Begin to leave. Does not wait and takes no lock: it may be called while garbage is collected, anywhere.

        Args:
            stay_s: how long rank 0 keeps the store for others. May be called again with less.
        """
        end = self.end or self.leaving
        if end is not None:
            end.begin_closing(STAY_S if stay_s is None else stay_s)
        thread, end = self.thread, self.end
        if thread is None or end is None or self.finished.is_set():
            return
        self.fault = self.fault or "it is closed here, by close() or with its process group"
        self.end, self.leaving = None, end
        if self.process == os.getpid():  # a forked child has none of the threads
            try:
                thread.call(self._start_leaving, thread, end)
            except RuntimeError:  # the loop is closed
                self.finished.set()

    def _start_leaving(self, thread: background.BusThread, end: StoreEnd) -> None:
        end.end()
        try:
            ClosingThread(partial(self._leave, thread, end), name="gradbus-store-close", daemon=False).start()
        except RuntimeError:  # no thread can be had
            self.finished.set()

    def _leave(self, thread: background.BusThread, end: StoreEnd) -> None:
        try:
            writers = thread.start(end.leave()).result(STAY_S + _CLOSE_S)
            until_s = time.monotonic() + _ACKS_S
            for writer in writers:
                writer.wait_for_acks(max(0.0, until_s - time.monotonic()))
            thread.start(end.close()).result(_CLOSE_S)
        except (TimeoutError, RuntimeError):
            pass  # the bus takes with it what is left
        finally:
            background.release(thread)
            _open.discard(self)
            self.leaving = None  # with the table; a handle or a list of links may keep this object
            self.finished.set()


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


_open: set[StoreLink] = set()


def _close_all() -> None:
    """A program that ends without destroy_process_group leaves gracefully all the same."""
    links = [link for link in list(_open) if link.process == os.getpid()]
    for link in links:
        link.close(_EXIT_S)
    for link in links:
        link.finished.wait(_EXIT_S + _CLOSE_S)


# Before atexit's functions, see backend.py. What is registered later is called before: groups are left first.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
