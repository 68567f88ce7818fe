"""Stores over DDS for tests: several ranks in one process, with one bus."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

from dds_domains import new_domain
from patience import until

from gradbus.runtime.bus.background import BusThread, release
from gradbus.runtime.bus.raw_endpoints import RawEndpoints
from gradbus.runtime.transport.channels import store_channel
from gradbus.runtime.wire.frames import MAX_CHUNK_BYTES, Frame, FrameKey, Kind, split
from gradbus.runtime.wire.messages import new_incarnation
from gradbus.torch.store.address import Address
from gradbus.torch.store.link import StoreLink, acquire_bus
from gradbus.torch.store.messages import (
    VERSION,
    Message,
    StoreAnswer,
    StoreJoin,
    StoreLeave,
    StoreRequest,
    StoreStatus,
    decode,
    frame_of,
)
from gradbus.torch.store.store import DdsStore

TIMEOUT = timedelta(seconds=20)
_numbers = itertools.count()


def new_job() -> tuple[int, str]:
    """A domain, and a name that no store had before."""
    return new_domain(), f"store-{os.getpid()}-{next(_numbers)}"


def open_rank(job: tuple[int, str], rank: int, world: int, timeout: timedelta = TIMEOUT) -> DdsStore:
    """A connection of its own, as another process would have it."""
    link = StoreLink(Address(*job, rank, world))
    link.open(timeout.total_seconds())
    return DdsStore(link, timeout)


def begin(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call it in a thread."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(function(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


class RawRank(AbstractContextManager["RawRank"]):
    """A process that sends to the arbiter what it likes."""

    def __init__(self, job: tuple[int, str], rank: int = 1) -> None:
        self.rank = rank
        self.incarnation = new_incarnation()
        self.arbiter = 0
        self._received: queue.Queue[Message] = queue.Queue()
        self._status: StoreStatus | None = None  # the answer to its request to be let in
        self._asked_in = 0  # how often it asked without an answer yet
        self.thread = acquire_bus(Address(*job, rank, 2))
        self.port = self.thread.start(_port_of(self.thread)).result(10.0)
        self.port.open_reader(store_channel(self.incarnation), self._take)
        self.writer = self.port.open_writer(store_channel())
        until(lambda: self.writer.matched > 0)

    def _take(self, frame: Frame) -> None:
        self.arbiter = frame.key.incarnation
        self._received.put(decode(frame.data))

    def say(self, message: Message) -> None:
        """A well-formed message."""
        self.write(frame_of(message, sender=self.rank, incarnation=self.incarnation, to=self.arbiter))

    def write(self, frame: tuple[Any, ...]) -> None:
        """Any frame."""
        assert self.port.write(self.writer, frame)

    def body(self, body: bytes, kind: Kind = Kind.CONTROL) -> None:
        """A frame with any body."""
        key = FrameKey(kind, self.arbiter, 0, self.rank, self.incarnation)
        (frame,) = split(key, body, chunk_bytes=MAX_CHUNK_BYTES)
        self.write(frame)

    def ask(self, request_id: int, op: Any, *keys: str, **more: Any) -> None:
        """A request."""
        facts = {"values": [], "number": 0, "wait_s": 0.0, **more}
        self.say(StoreRequest(id=request_id, op=op, keys=list(keys), **facts))

    def join(self, world: int = 2, version: int = VERSION, host: str = "a test") -> StoreStatus:
        """Ask to be let in until there is an answer."""
        while True:
            self.say(StoreJoin(version, world, host))
            self._asked_in += 1
            with contextlib.suppress(queue.Empty):
                status = self._received.get(timeout=0.1)
                assert isinstance(status, StoreStatus), status
                self._status = status
                self._asked_in -= 1
                return status

    def next(self, timeout_s: float = 10.0) -> Message:
        """The message it receives next. Asked more than once to be let in, the arbiter answers as often: that counts as
        one, and an answer more does not."""
        until_s = time.monotonic() + timeout_s
        while True:
            message = self._received.get(timeout=max(0.0, until_s - time.monotonic()))
            if message != self._status or not self._asked_in:
                return message
            self._asked_in -= 1

    def answer(self) -> StoreAnswer:
        """The next one."""
        message = self.next()
        assert isinstance(message, StoreAnswer), message
        return message

    def __exit__(self, *_: object) -> None:
        if self._status is not None and self._status.state == "joined":
            self.say(StoreLeave())  # else it would be waited for as long as its process, which is this one, lives
        self.thread.start(self.port.close()).result(10.0)
        release(self.thread)


async def _port_of(thread: BusThread) -> RawEndpoints:
    return thread.bus.raw_endpoints()


@contextmanager
def opened(world: int) -> Iterator[list[DdsStore]]:
    """All ranks of a store; the last one comes first."""
    job = new_job()
    coming = [begin(open_rank, job, rank, world) for rank in reversed(range(1, world))]
    stores = [open_rank(job, 0, world), *(future.result(30.0) for future in reversed(coming))]
    try:
        yield stores
    finally:
        for store in reversed(stores):
            store.close()
        finished(*stores)


def link_of(store: DdsStore) -> StoreLink:
    """What all handles of its address in this process share."""
    return store._link  # noqa: SLF001 - a store is a user's, and shows what those of torch do


def vanish(store: DdsStore) -> None:
    """Take its end out of DDS without a word."""
    link = link_of(store)
    assert link.thread is not None
    assert link.end is not None
    link.thread.start(link.end.close()).result(10.0)


def finished(*stores: DdsStore) -> None:
    """Wait until they have left."""
    for store in stores:
        assert link_of(store).finished.wait(15.0)
