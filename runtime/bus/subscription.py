"""Subscriptions of a bus: bounded queues of messages, one for each consumer, that never drop one."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from gradbus.runtime.bus.handover import Handover, InboxWait
from gradbus.runtime.bus.receiver import InboundChannel
from gradbus.runtime.errors import BusClosed
from gradbus.runtime.transport.channels import MessageKind
from gradbus.runtime.wire.messages import ClientUpdate, Message, ModelBlob

_LARGE_BYTES = 64 << 10


@dataclass(slots=True, eq=False)
class Item:
    """A message in the queues of ``left`` subscriptions. Its place in the channel is free when all have taken it."""

    channel: InboundChannel
    message: Message
    left: int


class Subscription:
    """Messages of some topics, in order of arrival, for one consumer.

    The queue is bounded by the topics' ``inbox``: when it is full the inlet is left alone, fills up, and its
    outlets wait. Nothing is dropped.
    """

    def __init__(
        self,
        consumed: Callable[[Item], None],
        closed: Callable[[Subscription], None],
        only: Callable[[Message], bool] | None,
        handover: Handover,
    ) -> None:
        """``consumed``: called when a message was taken. ``closed``: called when this is closed. ``only``: whether a
        message is put here; None: each is."""
        self.only = only
        self._consumed = consumed
        self._on_close = closed
        self._queue: deque[Item] = deque()
        self._wait = InboxWait(handover, lambda: bool(self._queue) or self._closed)
        self._closed = False
        self.fault = ""  # why nothing more comes, if something has gone wrong

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self, *, fault: str = "") -> None:
        """Get nothing more. Whoever waits gets BusClosed. ``fault``: what has gone wrong, where that is the reason."""
        if not self._closed:
            self._closed = True
            self.fault = fault
            self._on_close(self)
            while self._queue:
                self._consumed(self._queue.popleft())
            self._wait.wake()

    def put(self, item: Item) -> None:
        """Queue a message. Called by the bus."""
        self._queue.append(item)
        self._wait.wake()

    def __len__(self) -> int:
        return len(self._queue)

    async def get(self) -> Message:
        """The next message. Raises BusClosed when bus or subscription are closed."""
        while not self._queue:
            if self._closed:
                raise BusClosed(self.fault or "this subscription is closed")
            await self._wait.wait()
        item = self._queue.popleft()
        self._consumed(item)
        message = item.message
        if isinstance(message, ClientUpdate | ModelBlob) and len(message.frame.data) > _LARGE_BYTES:
            self._wait.sleep_next()
        return message

    def __aiter__(self) -> AsyncIterator[Message]:
        """All messages until bus or subscription are closed. Raises BusClosed: by a fault."""
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Message]:
        while True:
            try:
                yield await self.get()
            except BusClosed:
                if self.fault:
                    raise
                return


class Subscriptions:
    """All subscriptions of one bus."""

    def __init__(self, consumed: Callable[[InboundChannel, int], None], handover: Handover) -> None:
        """``consumed``: so many messages of a channel have been taken by all who wanted them."""
        self._consumed = consumed
        self._handover = handover
        self._of: dict[MessageKind, list[Subscription]] = {}  # by kind of message

    def open(
        self,
        kinds: Sequence[MessageKind],
        only: Callable[[Message], bool] | None,
        *,
        on_unused: Callable[[MessageKind], None],
    ) -> Subscription:
        """One more, of these kinds. ``only``: see :class:`Subscription`. ``on_unused``: called with each of the kinds
        when this is closed and no other has it."""
        subscription = Subscription(self._taken, partial(self._drop, on_unused), only, self._handover)
        for kind in kinds:
            self._of.setdefault(kind, []).append(subscription)
        return subscription

    def deliver(self, kind: MessageKind, channel: InboundChannel, messages: Sequence[Message]) -> None:
        """Hand over what has come."""
        self._deliver(self._of.get(kind, ()), channel, messages)

    def deliver_once(self, kinds: Sequence[MessageKind], channel: InboundChannel, messages: Sequence[Message]) -> None:
        """Hand over what is for all that have one of these kinds, once to each. ``channel``: counts it."""
        self._deliver(list(dict.fromkeys(one for kind in kinds for one in self._of.get(kind, ()))), channel, messages)

    def _deliver(
        self, subscriptions: Sequence[Subscription], channel: InboundChannel, messages: Sequence[Message]
    ) -> None:
        for message in messages:
            targets = [one for one in subscriptions if one.only is None or one.only(message)]
            item = Item(channel, message, len(targets))
            for target in targets:
                target.put(item)
            if not targets:
                self._consumed(channel, 1)

    def close(self, *, fault: str = "") -> None:
        """Close all, see :meth:`Subscription.close`."""
        # Not a set: it would close them in another order in each process.
        for subscription in dict.fromkeys(one for several in self._of.values() for one in several):
            subscription.close(fault=fault)

    def _taken(self, item: Item) -> None:
        item.left -= 1
        if item.left == 0:
            self._consumed(item.channel, 1)

    def _drop(self, on_unused: Callable[[MessageKind], None], subscription: Subscription) -> None:
        for kind, subscriptions in list(self._of.items()):
            if subscription in subscriptions:
                subscriptions.remove(subscription)
                if not subscriptions:
                    del self._of[kind]
                    on_unused(kind)
