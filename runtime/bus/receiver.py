"""The receive thread of a bus: waits in DDS with the GIL free, takes samples, checks them, hands them to the loop.

Not a listener: a Python callback on Cyclone's own thread needs the GIL, and together with a writer that waits for
acknowledgements while it holds the GIL this is a deadlock.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradbus.runtime.bus.channel import Channel
from gradbus.runtime.bus.dropped_samples import Rejections
from gradbus.runtime.bus.liveness import Liveness
from gradbus.runtime.dds import peer_processes
from gradbus.runtime.dds.idl_types import SampleError
from gradbus.runtime.dds.participant import Reader, Waiter, Writer
from gradbus.runtime.dds.topics import TOPICS
from gradbus.runtime.errors import FrameError
from gradbus.runtime.spinning import SPINNING
from gradbus.runtime.wire.control import Closing
from gradbus.runtime.wire.frames import Frame
from gradbus.runtime.wire.messages import Control, Message, PeerGone

PARKED_S = 0.003  # how often the thread looks whether its turn was given back
LONG_PARKED_S = 0.012  # the same when visitors have come again and again: each look takes their core, and the GIL
NEW_READERS_S = 0.05  # after so long somebody looks at whose they are
CARE_S = 0.002  # how often functions are called that look after something
# A visitor looks again and again for so long before it sleeps. To sleep and be woken takes 50 us, and on a virtual
# machine as much of the waker's time; 64 KiB are on their way for up to 250 us. So all_reduce of 64 KiB takes a tenth
# less time than with 100 us here; without any of it, a sixth more.
SPIN_S = 500e-6
VISIT_S = 0.2  # the longest sleep of a visitor: signals are handled in between
IDLE_S = 1.0  # the longest sleep of the thread
_BATCH = 8  # samples taken in one go: up to 8 MiB, so that the loop gets them in slices


@dataclass(slots=True)
class _Changes:
    """Of matched endpoints: whether there are any, and the writers of each topic that has some."""

    any: bool = False
    sources: list[tuple[Channel, set[int]]] = field(default_factory=list)


_NO_CHANGES = _Changes()


class Receiver(threading.Thread):
    """One thread for all topics of a bus."""

    def __init__(
        self, waiter: Waiter, loop: asyncio.AbstractEventLoop, on_matched: Callable[[], None],
        on_fault: Callable[[], None], look_around: Callable[[], None], *, lease_s: float,
    ) -> None:  # fmt: skip
        """Both are called on the loop. ``on_fault``: the thread cannot go on, see ``fault``.
        ``look_around``: called once a second; in a crowd there is news every millisecond. ``lease_s``: after so long a
        silence those that DDS has lost are gone, unless the kernel knows better."""
        super().__init__(name="gradbus-receive", daemon=True)
        self._waiter = waiter
        self._loop = loop
        self._on_matched = on_matched
        self._on_fault = on_fault
        self._look_around = look_around
        self._looked_s = time.monotonic()
        self._stop_flag = False
        self._channels: list[Channel] = []
        self._writers: list[Writer] = []
        self._arrivals: deque[Channel | Writer] = deque()  # made by the loop, attached by the thread
        self._removals: deque[tuple[Channel | Writer, Callable[[], None]]] = deque()
        self._after_drain: deque[Callable[[], None]] = deque()
        self._watched: dict[int, Channel | Writer] = {}  # by number in the wait set
        self._numbers = 1
        self._turn = (
            threading.Lock()
        )  # held by whoever waits in DDS and deals with what comes: this thread or a visitor
        self._door = threading.Lock()  # held by the visitor
        self._visitor = 0  # its thread
        self._visited = False  # since the thread looked last
        self._wanted = threading.Event()
        self._cares: list[Callable[[], bool]] = []
        self._new_cares: deque[Callable[[], bool]] = deque()
        self.each_turn: Callable[[], None] | None = None  # called on the thread, at least once a second
        # Called on the thread as well; returns the seconds after which it wants to be called again at the latest.
        self.watch: Callable[[], float] | None = None
        self.before_deletion: Callable[[Sequence[Writer]], None] | None = None  # which waits for readers; on the thread
        self.has_new_readers = False  # some writer has, or has lost some, or is gone; for ``watch``
        self._watch_s = IDLE_S
        self._liveness = Liveness(
            lease_s,
            lambda claim: peer_processes.watched.watch(claim, self._on_ended),
            lambda claim: peer_processes.watched.unwatch(claim, self._on_ended),
            peer_processes.is_stopped,
        )
        self._endings: deque[str | tuple[int, int]] = deque()  # processes that have, and senders who say that they go
        self.rejections = Rejections()
        self.rejected = self.rejections.counts
        self.received_bytes: Counter[str] = Counter()
        self.fault: BaseException | None = None

    @property
    def writers(self) -> Sequence[Writer]:
        """Those that are watched. For the thread."""
        return self._writers

    # Called on the loop

    def add(self, endpoint: Channel | Writer) -> None:
        """Watch one more reader or writer."""
        self._arrivals.append(endpoint)
        self._waiter.wake()

    def add_writer(self, writer: Writer) -> None:
        """See :class:`.dds.participant.IoThread`."""
        self.add(writer)

    def add_reader(self, reader: Reader) -> None:
        """See :class:`.dds.participant.IoThread`."""
        self.add(Channel(reader, _not_handed_over, take=_not_handed_over))

    def remove(self, endpoint: Channel | Writer, then: Callable[[], None]) -> None:
        """Watch it no more, and delete it; ``then`` is called on the thread."""
        self._removals.append((endpoint, then))
        self._waiter.wake()

    def after_drain(self, then: Callable[[], None]) -> None:
        """Call ``then`` on the thread when all that DDS holds now has been taken."""
        self._after_drain.append(then)
        self._waiter.wake()

    def look(self) -> None:
        """Look at all topics again: some of their readers have more than DDS knows of."""
        self._waiter.wake()

    def rematched(self) -> None:
        """Matched endpoints count from now on, or do not any more, for another reason than DDS's. On the thread."""
        self._post(self._on_matched)

    def shut_out(self, sources: Collection[int], why: str) -> None:
        """Tell of those who speak through these DDS writers that they are gone: nothing of theirs is taken any more. On
        the thread."""
        self._tell_gone(self._liveness.shut_out(sources, why))

    def _tell_gone(self, gone: list[PeerGone]) -> None:
        for channel in self._channels:
            if gone and channel.reader.topic.to_message is TOPICS[Control].to_message:
                channel.taken += len(gone)
                self._post(channel.deliver, list(gone))

    def _on_ended(self, claim: str) -> None:
        """On a thread of the kernel's news: what the process has sent is taken before it is told of."""
        self._endings.append(claim)
        if not self._stop_flag:
            self._waiter.wake()

    def consumed(self, channel: Channel, count: int) -> None:
        """The loop has consumed messages; a reader that was left alone is looked at again when half is free."""
        channel.consumed += count
        if channel.paused and channel.room * 2 >= channel.limit:
            self._waiter.wake()

    def stop(self) -> None:
        """Make the thread end soon."""
        self._stop_flag = True
        self._wanted.set()
        self._waiter.wake()

    # Turns

    def pump(self, done: Callable[[], bool], until_s: float, *, may_sleep: bool = True) -> None:
        """Do the thread's work here while waiting for what comes of it: that saves two changes of threads.

        Returns when ``done()`` is true, when ``time.monotonic`` has reached ``until_s``, or when somebody else is at
        work already; so whoever calls this still waits for what it waits for.

        Args:
            done: asked after each turn. Whoever makes it true from another thread calls :meth:`nudge` after that.
            may_sleep: False, on a thread that must not: return where it would.
        """
        if self._stop_flag or not self._door.acquire(blocking=False):
            return
        try:
            self._visitor = threading.get_ident()
            if not self._turn.acquire(blocking=False):
                self._waiter.wake()
                if not self._turn.acquire(timeout=max(0.0, min(until_s - time.monotonic(), VISIT_S))):
                    return
            try:
                now_s = time.monotonic()
                spin_until_s = now_s + (SPIN_S if SPINNING.pays(now_s) else 0.0)
                while not self._stop_flag and not done() and (left_s := until_s - now_s) > 0:
                    looked_s = now_s
                    if now_s >= spin_until_s:
                        if not may_sleep:
                            break
                        self._take_turn(min(left_s, VISIT_S))
                        now_s = time.monotonic()
                        continue
                    found = self._take_turn(0.0)
                    now_s = time.monotonic()
                    if not found:
                        if SPINNING.was_stalled(now_s - looked_s, now_s):
                            spin_until_s = now_s
                        os.sched_yield()  # to DDS's own threads, which bring what is waited for. Not when it is here
            except Exception as error:  # of DDS: it is the bus that cannot go on, not whoever waits here
                self._fail(error)
            finally:
                self._visited = True
                self._turn.release()
        finally:
            self._visitor = 0
            self._door.release()

    def nudge(self) -> None:
        """Something that a visitor may wait for has happened on this thread."""
        if self._visitor and self._visitor != threading.get_ident():
            self._waiter.wake()

    def look_after(self, function: Callable[[], bool]) -> None:
        """Call a function on the thread every few milliseconds, until it returns False. It must not wait."""
        if not self._stop_flag:
            self._new_cares.append(function)
            self._waiter.wake()

    def resume(self) -> None:
        """Somebody has begun what goes on by itself: the thread is needed now."""
        if self._visited:
            self._wanted.set()

    # The thread

    def run(self) -> None:
        parked_s = PARKED_S
        try:
            while not self._stop_flag:
                if self._visitor or self._visited:
                    # In the midst of calls that wait for what they start, the next visitor comes soon.
                    self._visited = False
                    if self._wanted.wait(parked_s):
                        self._wanted.clear()
                        self._visited = False
                        parked_s = PARKED_S
                    else:
                        parked_s = min(2 * parked_s, LONG_PARKED_S)
                    continue
                parked_s = PARKED_S
                with self._turn:
                    self._take_turn(min(IDLE_S, self._watch_s))
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._turn.acquire(timeout=2 * VISIT_S)  # for good: DDS may be closed when this thread has ended
            if self.before_deletion is not None and self.fault is None:
                self.before_deletion(self._writers)
            self._liveness.close()
            self._cares, self._new_cares = [], deque()  # they hold what they look after

    def _fail(self, error: BaseException) -> None:
        self.fault = error
        self._stop_flag = True
        self._wanted.set()
        self._post(self._on_fault)

    def _take_turn(self, timeout_s: float) -> bool:  # noqa: C901, PLR0912 - one turn of the loop, step by step
        """Wait for news and deal with them. By whoever holds the turn. False: there were none."""
        if self._arrivals or self._removals:
            self._attach_arrivals()
            self._delete_removals()
        while self._new_cares:  # one that is asked for again while it says that it need not be called is called again
            function = self._new_cares.popleft()
            if function not in self._cares:
                self._cares.append(function)
        # Who was first to be watched is first in turn: a new key of the job is known before what is sealed with it.
        numbers = sorted(self._waiter.wait(min(timeout_s, CARE_S) if self._cares else timeout_s))
        if self.each_turn is not None:
            self.each_turn()
        if self.watch is not None:
            self._watch_s = self.watch()
        if self._cares:
            self._cares = [function for function in self._cares if function()]
        now_s = time.monotonic()
        if gone := self._liveness.look(now_s):
            self._tell_gone(gone)
        if now_s > self._looked_s + IDLE_S:
            self._looked_s = now_s
            self._look_around()
        if not numbers and not self._after_drain:
            return False
        waiting, endings = len(self._after_drain), len(self._endings)  # those that came before this turn
        if Waiter.WOKEN in numbers:  # seldom: something is to be attached, removed, resumed or told
            channels: Collection[Channel] = self._channels
            changes = self._look([*channels, *self._writers])
        else:
            found = [(self._watched[number], number) for number in numbers if number in self._watched]
            channels = dict.fromkeys(one for one, _ in found if isinstance(one, Channel))
            changed = [one for one, number in found if isinstance(one, Writer) or number != one.number]
            changes = self._look(changed) if changed else _NO_CHANGES
        for channel in channels:
            self._drain(channel)
        if changes is not _NO_CHANGES:
            self._tell(changes)
        for _ in range(endings if Waiter.WOKEN in numbers else 0):  # all topics were drained
            one = self._endings.popleft()
            self._tell_gone(self._liveness.ended(one) if isinstance(one, str) else self._liveness.closed(one))
        for _ in range(waiting):
            self._after_drain.popleft()()
        return True

    def _attach_arrivals(self) -> None:
        while self._arrivals:
            endpoint = self._arrivals.popleft()
            number, self._numbers = self._numbers, self._numbers + 2
            if isinstance(endpoint, Channel):
                self._channels.append(endpoint)
                endpoint.number = number
                self._watch(endpoint, endpoint.reader.condition, number)
                self._watch(endpoint, endpoint.reader.entity, number + 1)
            else:
                self._writers.append(endpoint)
                self._watch(endpoint, endpoint.entity, number)

    def _watch(self, endpoint: Channel | Writer, entity: Any, number: int) -> None:
        self._watched[number] = endpoint
        self._waiter.attach(entity, number)

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
                if self.before_deletion is not None:
                    self.before_deletion([endpoint])
                self._writers.remove(endpoint)
                self.has_new_readers = True
                self._waiter.detach(endpoint.entity)
                endpoint.delete()
            self._watched = {number: one for number, one in self._watched.items() if one is not endpoint}
            then()

    def _look(self, endpoints: Sequence[Channel | Writer]) -> _Changes:
        """What DDS says has changed. Looked at before the data is taken, and told after: whoever is told that a process
        is gone has had all it ever sent, its last words among them."""
        changes = _Changes()
        for one in endpoints:
            if isinstance(one, Writer):
                if one.refresh():
                    changes.any = self.has_new_readers = True
                    self._watch_s = min(self._watch_s, NEW_READERS_S)
            elif one.reader.refresh():
                changes.any = True
                changes.sources.append((one, one.reader.sources()))
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
            gone |= set(self._liveness.writers) - now
        self._liveness.departed(gone)
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
                    self._waiter.attach(channel.reader.condition, channel.number)
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
                    try:
                        take(frame)
                    except Exception:
                        self.rejections.failed(channel.reader.topic.name)
            if len(taken) < _BATCH:
                return  # what has come meanwhile says so

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
            if sample is None:
                return None
            message = channel.reader.topic.to_message(sample)
        except FrameError as error:
            self.rejections.refused(error)
            return None
        except (SampleError, ValueError, TypeError, OverflowError):
            self.rejected["sample"] += 1
            return None
        if isinstance(message, Control):
            if isinstance(message.body, Closing):
                self._endings.append((message.sender, message.incarnation))
                self._waiter.wake()
                return None
            self._liveness.heard(source, message)
        data = getattr(sample, "data", b"")
        self.received_bytes[channel.reader.topic.name] += len(data)
        return message

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to hear it
            self._stop_flag = True


def _not_handed_over(sample: object) -> None:
    raise AssertionError("a reader that uses its samples itself has handed one over")
