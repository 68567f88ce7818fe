"""One process's connection to a store over DDS: opens the bus, asks, turns what goes wrong into torch's errors, and
ends in order.

Rank 0 is the arbiter. Its process stays, for a bounded time, until the others have had their last answers.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, QueueEmptyError

from gradbus.runtime.bus import background
from gradbus.runtime.dds.participant import Writer
from gradbus.runtime.fast_paths import LOOPBACK
from gradbus.torch.store.client import StoreClient
from gradbus.torch.store.messages import Op, StoreAnswer, StoreRequest
from gradbus.torch.store.server import StoreServer

_GRACE_S = 1.0  # the arbiter knows more than "no answer" about a wait that has timed out: let it tell
_ACKS_S = 1.0  # how long the others get to take over the last words
_CLOSE_S = 5.0
_STAY_S = 60.0  # how long rank 0 keeps the store for others when its own process group is destroyed
_EXIT_S = 5.0  # and when its process ends
_PATIENCE_S = 3.0
_PATIENCE_LEASES = 2.5  # after that a process which is still there is not a dead one


@dataclass(frozen=True, slots=True)
class Address:
    """Which store, and who this process is in it."""

    domain: int
    job: str
    rank: int
    world: int

    @property
    def name(self) -> str:
        """For people."""
        return f"dds://{self.domain}/{self.job}"

    @property
    def number(self) -> str:
        """Of the bus that its processes share: see :func:`~gradbus.runtime.bus.background.numbered_job`."""
        return hashlib.blake2b(self.name.encode(), digest_size=8).hexdigest()


def _acquire(address: Address) -> background.BusThread:
    """The bus of all that has to do with an address: this store, the process groups that are made with it, and what is
    left of a former store. Participants of one process that come and go while others discover them may never be found
    (see :mod:`gradbus.runtime.dds.domains`), so there is one.

    Raises:
        ConfigError: a setting is wrong. BusError: DDS cannot be started.
    """
    settings = background.settings_from_environment().model_copy(update={"domain": address.domain})
    return background.acquire(background.numbered_job(address.number, settings), settings, address.rank)


class StoreLink:
    """Shared by all handles of one address in this process."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.fault = ""  # why it cannot be used any more
        self.handles: set[Any] = set()  # who closes the last one closes the link
        self.clones: list[Any] = []  # C++ has them, which does not keep the Python part of an object alive
        self.finished = threading.Event()
        self._process = os.getpid()
        self._opening = threading.Lock()
        self._thread: background.BusThread | None = None
        self._end: StoreServer | StoreClient | None = None
        self._leaving: StoreServer | StoreClient | None = None

    def open(self, timeout_s: float) -> None:
        """Begin, or wait for another thread that does; of rank 0 nobody else is needed.

        Raises:
            DistNetworkError: there is no rank 0 within ``timeout_s``, or it refuses this rank.
            ConfigError, BusError: DDS cannot be used as it is set.
        """
        with self._opening:
            if self._end is None and not self.fault:
                try:
                    self._open(timeout_s)
                except BaseException as error:
                    self.fault = str(error) or type(error).__name__
                    raise
            try:
                self._check()
            except DistNetworkError:
                self.close()  # nobody gets a handle
                raise

    def _open(self, timeout_s: float) -> None:
        self._thread = thread = _acquire(self.address)
        end: StoreServer | StoreClient | None = None
        joining: Future[None] | None = None
        try:
            end = thread.start(self._make()).result()
            if isinstance(end, StoreClient):
                settings = background.settings_from_environment()
                # Of a process of this machine the kernel has told, if it was dead.
                patience_s = _PATIENCE_S if settings.interface == LOOPBACK else _PATIENCE_LEASES * thread.bus.lease_s
                joining = thread.start(end.join(timeout_s, patience_s))
                joining.result()
            self._end = end
        except BaseException:
            if joining is not None:
                joining.cancel()  # it goes on when this thread was interrupted
            if end is not None:
                with contextlib.suppress(TimeoutError):
                    thread.start(end.close()).result(_CLOSE_S)
            background.release(thread)
            raise
        _open.add(self)

    async def _make(self) -> StoreServer | StoreClient:
        assert self._thread is not None
        bus, address = self._thread.bus, self.address
        host = f"{socket.gethostname()} (process {os.getpid()})"
        if address.rank == 0:
            return StoreServer(bus, address.name, address.world, host, self._fail)
        return StoreClient(bus, address.name, address.rank, address.world, host, self._fail)

    def _fail(self, why: str) -> None:
        self.fault = self.fault or why

    def _check(self) -> None:
        if self.fault:
            raise DistNetworkError(f"store {self.address.name}, rank {self.address.rank}: {self.fault}")
        if self._process != os.getpid():
            raise DistNetworkError(
                f"store {self.address.name} was opened by the process that this one was forked from, and cannot be "
                f"used here. Start processes that use it by spawn, as multiprocessing.get_context('spawn') does"
            )

    def call(
        self, op: Op, keys: Sequence[str], values: Sequence[bytes] = (), number: int = 0, *, waits: bool = False,
        timeout_s: float,
    ) -> StoreAnswer:  # fmt: skip
        """Ask the arbiter, and wait. ``waits``: the arbiter may wait for ``timeout_s`` as well.

        Raises:
            DistStoreError: what it waits for is not there in time, or it cannot be done.
            DistNetworkError: the arbiter is gone. QueueEmptyError.
        """
        end = self._end
        self._check()
        assert end is not None  # it is taken away after the fault is set
        request = StoreRequest(0, [], op, list(keys), list(values), number, timeout_s if waits else 0.0)
        answer = end.call(request, timeout_s + _GRACE_S)
        if answer is None:
            self._check()
            raise DistStoreError(
                f"store {self.address.name}: wait timeout after {_ms(timeout_s)}, keys: {_some(keys)}: no answer from "
                f"rank 0, whose process is there"
            )
        if answer.outcome == "timeout":
            told = f"; {answer.text}" if answer.text else ""
            raise DistStoreError(
                f"store {self.address.name}: wait timeout after {_ms(timeout_s)}, keys: {_some(answer.keys)}{told}"
            )
        if answer.outcome == "empty":
            raise QueueEmptyError(f"store {self.address.name}: queue {keys[0]!r} is empty")
        if answer.outcome == "error":
            raise DistStoreError(f"store {self.address.name}: {answer.text}")
        return answer

    # The end

    def close(self) -> None:
        """Begin to leave. Does not wait and takes no lock: it may be called while garbage is collected, anywhere."""
        thread, end = self._thread, self._end
        if thread is None or end is None or self.finished.is_set():
            return
        self.fault = self.fault or "it is closed here, by close() or with its process group"
        if isinstance(end, StoreServer):
            end.closing = True
            end.until_s = time.monotonic() + _STAY_S
        self._end, self._leaving = None, end
        if self._process == os.getpid():  # a forked child has none of the threads
            try:
                thread.call(self._start_leaving, thread, end)
            except RuntimeError:  # the loop is closed
                self.finished.set()

    def hurry(self) -> None:
        """The process ends."""
        leaving = self._leaving
        if isinstance(leaving, StoreServer):
            leaving.until_s = min(leaving.until_s, time.monotonic() + _EXIT_S)

    def _start_leaving(self, thread: background.BusThread, end: StoreServer | StoreClient) -> None:
        end.pending.end()
        try:
            threading.Thread(target=self._leave, args=(thread, end), name="gradbus-store-close").start()
        except RuntimeError:  # the interpreter is ending
            self.finished.set()

    def _leave(self, thread: background.BusThread, end: StoreServer | StoreClient) -> None:
        try:
            if isinstance(end, StoreServer):
                thread.start(end.linger()).result(_STAY_S + _CLOSE_S)
            writers = thread.start(_say_goodbye(end)).result(_CLOSE_S)
            until_s = time.monotonic() + _ACKS_S
            for writer in writers:
                writer.wait_for_acks(max(0.0, until_s - time.monotonic()))
            thread.start(end.close()).result(_CLOSE_S)
        except (TimeoutError, RuntimeError):
            pass  # the bus takes with it what is left
        finally:
            background.release(thread)
            _open.discard(self)
            self._leaving = None  # with the table; a handle or a list of links may keep this object
            self.finished.set()


async def _say_goodbye(end: StoreServer | StoreClient) -> list[Writer]:
    end.say_goodbye()
    return end.writers()


def _ms(timeout_s: float) -> str:
    return f"{timeout_s * 1000:.0f}ms"


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


_open: set[StoreLink] = set()


def _close_all() -> None:
    """Who ends without destroy_process_group leaves in order all the same."""
    links = [link for link in list(_open) if link._process == os.getpid()]
    for link in links:
        link.close()
        link.hurry()
    for link in links:
        link.finished.wait(_EXIT_S + _CLOSE_S)


# Before atexit's functions, see backend.py. What is registered later is called before: groups are left first.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
