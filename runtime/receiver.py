"""The receive thread of a bus: waits in DDS with the GIL free, takes samples, checks them, hands them to the loop.

Not a listener: a Python callback on Cyclone's own thread needs the GIL, and together with a writer that waits for
acknowledgements while it holds the GIL this is a deadlock.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from gradbus.runtime.dds import Reader, Waiter, Writer
from gradbus.runtime.errors import FrameError
from gradbus.runtime.idl_types import SampleError
from gradbus.runtime.messages import Control, Message, PeerLost
from gradbus.runtime.topics import TOPICS

_BATCH = 8  # samples taken in one go: up to 8 MiB, so that the loop gets them in slices

_MAX_SENDERS = 65_536  # remembered for one process: it cannot make us grow without end


class Channel:
    """One topic on its way in. The thread counts what it took, the loop what was consumed; nobody needs a lock."""

    def __init__(self, reader: Reader, deliver: Callable[[list[Message]], None]) -> None:
        self.reader = reader
        self.deliver = deliver  # called on the loop
        self.limit = reader.topic.inbox
        self.taken = 0  # written by the thread
        self.consumed = 0  # written by the loop
        self.paused = False  # written by the thread
        self.sources: set[int] = set()

    @property
    def room(self) -> int:
        return self.limit - (self.taken - self.consumed)


class Receiver(threading.Thread):
    """One thread for all topics of a bus."""

    def __init__(self, waiter: Waiter, loop: asyncio.AbstractEventLoop, on_matched: Callable[[], None]) -> None:
        super().__init__(name="gradbus-receive", daemon=True)
        self._waiter = waiter
        self._loop = loop
        self._on_matched = on_matched
        self._stop_flag = False
        self._channels: list[Channel] = []
        self._writers: list[Writer] = []
        self._arrivals: deque[Channel | Writer] = deque()  # made by the loop, attached by the thread
        self._senders: dict[int, set[tuple[int, int]]] = {}  # writer handle -> who has been heard from it
        self.rejected: Counter[str] = Counter()
        self.received_bytes: Counter[str] = Counter()
        self.fault: BaseException | None = None

    # Called on the loop

    def add(self, endpoint: Channel | Writer) -> None:
        """Watch one more reader or writer."""
        self._arrivals.append(endpoint)
        self._waiter.wake()

    def consumed(self, channel: Channel, count: int) -> None:
        """The loop has consumed messages; a reader that was left alone is looked at again when half is free."""
        channel.consumed += count
        if channel.paused and channel.room * 2 >= channel.limit:
            self._waiter.wake()

    def stop(self) -> None:
        """Make the thread end soon."""
        self._stop_flag = True
        self._waiter.wake()

    # The thread

    def run(self) -> None:
        try:
            while not self._stop_flag:
                self._attach_arrivals()
                self._waiter.wait(1.0)
                for channel in self._channels:
                    self._drain(channel)
                self._refresh()  # after: whose last words were among them has to be known when it is missed
        except BaseException as error:
            self.fault = error
            raise

    def _attach_arrivals(self) -> None:
        while self._arrivals:
            endpoint = self._arrivals.popleft()
            if isinstance(endpoint, Channel):
                self._channels.append(endpoint)
                self._waiter.attach(endpoint.reader.condition)
                self._waiter.attach(endpoint.reader.entity)
            else:
                self._writers.append(endpoint)
                self._waiter.attach(endpoint.entity)

    def _refresh(self) -> None:
        changed = False
        for writer in self._writers:
            changed |= writer.refresh()
        for channel in self._channels:
            if channel.reader.refresh():
                changed = True
                self._note_departures(channel)
        if changed:
            self._post(self._on_matched)

    def _note_departures(self, channel: Channel) -> None:
        now = channel.reader.sources()
        gone = channel.sources - now
        if channel.reader.topic.to_message is TOPICS[Control].to_message:
            gone |= self._senders.keys() - now
        for handle in gone:
            lost: list[Message] = [PeerLost(*sender) for sender in sorted(self._senders.pop(handle, ()))]
            if lost:
                channel.taken += len(lost)
                self._post(channel.deliver, lost)
        channel.sources = now

    def _drain(self, channel: Channel) -> None:
        while not self._stop_flag:
            room = channel.room
            if room <= 0 and not channel.reader.topic.may_drop:
                self._pause(channel)
                return
            taken = channel.reader.take(min(_BATCH, room) if room > 0 else _BATCH)
            if room <= 0:
                self.rejected["inbox full"] += len(taken)
                if taken:
                    continue
            if not taken:
                if channel.paused:
                    channel.paused = False
                    self._waiter.attach(channel.reader.condition)
                return
            messages = [message for raw, source in taken if (message := self._check(channel, raw, source)) is not None]
            channel.taken += len(messages)
            if messages:
                self._post(channel.deliver, messages)

    def _pause(self, channel: Channel) -> None:
        """Leave the reader alone: it fills up, and then its writers wait. That is the back-pressure."""
        if not channel.paused:
            channel.paused = True
            self._waiter.detach(channel.reader.condition)
            if channel.room > 0:  # the loop has consumed in between and may not have seen the flag
                self._waiter.wake()

    def _check(self, channel: Channel, raw: Any, source: int) -> Message | None:
        try:
            sample = channel.reader.typed(raw)
            message = channel.reader.topic.to_message(sample)
        except FrameError as error:
            self.rejected[error.reason] += 1
            return None
        except (SampleError, ValueError, TypeError, OverflowError):
            self.rejected["sample"] += 1
            return None
        if isinstance(message, Control):
            known = self._senders.setdefault(source, set())
            if len(known) < _MAX_SENDERS:
                known.add((message.sender, message.incarnation))
        data = getattr(sample, "data", b"")
        self.received_bytes[channel.reader.topic.name] += len(data)
        return message

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to hear it
            self._stop_flag = True
