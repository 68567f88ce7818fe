"""The receive thread of a bus: waits in DDS with the GIL free, takes samples, checks them, hands them to the loop.

Not a listener: a Python callback on Cyclone's own thread needs the GIL, and together with a writer that waits for
acknowledgements while it holds the GIL this is a deadlock.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gradbus.runtime.dds import Reader, Waiter, Writer
from gradbus.runtime.errors import FrameError
from gradbus.runtime.frames import Frame
from gradbus.runtime.idl_types import SampleError
from gradbus.runtime.messages import Control, Message, PeerGone
from gradbus.runtime.topics import TOPICS

_BATCH = 8  # samples taken in one go: up to 8 MiB, so that the loop gets them in slices

_MAX_SENDERS = 65_536  # remembered for one process: it cannot make us grow without end


class Channel:
    """One topic on its way in. The thread counts what it took, the loop what was consumed; nobody needs a lock."""

    def __init__(
        self, reader: Reader, deliver: Callable[[list[Message]], None], *, take: Callable[[Frame], None] | None = None
    ) -> None:
        """``deliver`` gets messages on the loop; ``take``, where given, frames one by one on the receive thread."""
        self.reader = reader
        self.deliver = deliver
        self.take = take
        self.limit = reader.topic.inbox
        self.taken = 0  # written by the thread
        self.consumed = 0  # written by the loop
        self.paused = False  # written by the thread
        self.sources: set[int] = set()

    @property
    def room(self) -> int:
        return self.limit - (self.taken - self.consumed)


@dataclass(slots=True)
class _Changes:
    """Of matched endpoints: whether there are any, and the writers of each topic that has some."""

    any: bool = False
    sources: list[tuple[Channel, set[int]]] = field(default_factory=list)


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
        self._removals: deque[tuple[Channel | Writer, Callable[[], None]]] = deque()
        self._after_drain: deque[Callable[[], None]] = deque()
        self._senders: dict[int, set[tuple[int, int]]] = {}  # writer handle -> who has been heard from it
        self.rejected: Counter[str] = Counter()
        self.received_bytes: Counter[str] = Counter()
        self.fault: BaseException | None = None

    # Called on the loop

    def add(self, endpoint: Channel | Writer) -> None:
        """Watch one more reader or writer."""
        self._arrivals.append(endpoint)
        self._waiter.wake()

    def remove(self, endpoint: Channel | Writer, then: Callable[[], None]) -> None:
        """Watch it no more, and delete it; ``then`` is called on the thread."""
        self._removals.append((endpoint, then))
        self._waiter.wake()

    def after_drain(self, then: Callable[[], None]) -> None:
        """Call ``then`` on the thread when all that DDS holds now has been taken."""
        self._after_drain.append(then)
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
                self._delete_removals()
                self._waiter.wait(1.0)
                waiting = len(self._after_drain)  # those that came before this turn
                changes = self._look()
                for channel in self._channels:
                    self._drain(channel)
                self._tell(changes)
                for _ in range(waiting):
                    self._after_drain.popleft()()
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

    def _delete_removals(self) -> None:
        while self._removals:
            endpoint, then = self._removals.popleft()
            if isinstance(endpoint, Channel) and endpoint in self._channels:
                self._channels.remove(endpoint)
                if not endpoint.paused:
                    self._waiter.detach(endpoint.reader.condition)
                self._waiter.detach(endpoint.reader.entity)
                endpoint.reader.delete()
            elif isinstance(endpoint, Writer) and endpoint in self._writers:
                self._writers.remove(endpoint)
                self._waiter.detach(endpoint.entity)
                endpoint.delete()
            then()

    def _look(self) -> _Changes:
        """What DDS says has changed. Looked at before the data is taken, and told after: whoever is told that a process
        is gone has had all it ever sent, its last words among them."""
        changes = _Changes()
        for writer in self._writers:
            changes.any |= writer.refresh()
        for channel in self._channels:
            if channel.reader.refresh():
                changes.any = True
                changes.sources.append((channel, channel.reader.sources()))
        return changes

    def _tell(self, changes: _Changes) -> None:
        for channel, sources in changes.sources:
            # One that came while data was taken is not gone; of one that went meanwhile DDS will say so again.
            self._note_departures(channel, sources | channel.reader.sources())
        if changes.any:
            self._post(self._on_matched)

    def _note_departures(self, channel: Channel, now: set[int]) -> None:
        gone = channel.sources - now
        if channel.reader.topic.to_message is TOPICS[Control].to_message:
            gone |= self._senders.keys() - now
        for handle in gone:
            lost: list[Message] = [PeerGone(*sender) for sender in sorted(self._senders.pop(handle, ()))]
            if lost:
                channel.taken += len(lost)
                self._post(channel.deliver, lost)
        channel.sources = now

    def _drain(self, channel: Channel) -> None:
        if channel.take is not None:
            self._drain_here(channel, channel.take)
            return
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
            checked = [self._check(channel, raw, source) for raw, source in taken]
            messages = [message for message in checked if message is not None and not isinstance(message, Frame)]
            channel.taken += len(messages)
            if messages:
                self._post(channel.deliver, messages)

    def _drain_here(self, channel: Channel, take: Callable[[Frame], None]) -> None:
        while not self._stop_flag:
            taken = channel.reader.take(_BATCH)
            if not taken:
                return
            for raw, source in taken:
                frame = self._check(channel, raw, source)
                if isinstance(frame, Frame):
                    take(frame)

    def _pause(self, channel: Channel) -> None:
        """Leave the reader alone: it fills up, and then its writers wait. That is the back-pressure."""
        if not channel.paused:
            channel.paused = True
            self._waiter.detach(channel.reader.condition)
            if channel.room > 0:  # the loop has consumed in between and may not have seen the flag
                self._waiter.wake()

    def _check(self, channel: Channel, raw: Any, source: int) -> Message | Frame | None:
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
