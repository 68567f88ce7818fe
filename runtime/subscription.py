"""What one consumer gets from the bus: a bounded queue that never drops."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from gradbus.runtime.channel import Channel
from gradbus.runtime.errors import BusClosed
from gradbus.runtime.messages import Message


@dataclass(slots=True, eq=False)
class Item:
    """A message in the queues of ``left`` subscriptions. Its place in the channel is free when all have taken it."""

    channel: Channel
    message: Message
    left: int


class Subscription:
    """Messages of some topics, in order of arrival, for one consumer.

    The queue is bounded by the topics' ``inbox``: when it is full the DDS reader is left alone, fills up, and its
    writers wait. Nothing is dropped.
    """

    def __init__(
        self, consumed: Callable[[Item], None], closed: Callable[[Subscription], None],
        only: Callable[[Message], bool] | None = None,
    ) -> None:  # fmt: skip
        """``consumed``: a message was taken. ``closed``: nothing more is wanted. Both are the bus's. ``only``: what is
        put here; None: all."""
        self.only = only
        self._consumed = consumed
        self._on_close = closed
        self._queue: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Get nothing more. Whoever waits gets BusClosed."""
        if not self._closed:
            self._closed = True
            self._on_close(self)
            while self._queue:
                self._consumed(self._queue.popleft())
            self._wake()

    def put(self, item: Item) -> None:
        """Queue a message. Called by the bus."""
        self._queue.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __len__(self) -> int:
        return len(self._queue)

    async def get(self) -> Message:
        """The next message. Raises BusClosed when bus or subscription are closed."""
        while not self._queue:
            if self._closed:
                raise BusClosed("this subscription is closed")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._queue.popleft()
        self._consumed(item)
        return item.message

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Message]:
        while True:
            try:
                yield await self.get()
            except BusClosed:
                return
