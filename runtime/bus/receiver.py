"""What a bus takes from its transport: samples are checked and handed to the loop. So are reports of departed peers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

from gradbus.runtime import drive
from gradbus.runtime.bus.liveness import Liveness
from gradbus.runtime.bus.wait_loop import IDLE_S, Handover, WaitLoop
from gradbus.runtime.errors import FrameError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.transport import peer_processes
from gradbus.runtime.transport.api import WOKEN, Inlet, Outlet, Peer, PeerId, Periodic, Transport, Waiter
from gradbus.runtime.transport.channels import INBOX_RETAINED, is_control, traffic_name
from gradbus.runtime.wire.control import Closing
from gradbus.runtime.wire.frames import Frame
from gradbus.runtime.wire.messages import Control, Message, PeerDisconnected, PeerGone

LIVENESS_S = 0.25  # between two looks at peers that the transport has lost
DELETION_S = 10.0  # longer than readers and writers take to be deleted, also where a write does not end
_BATCH = 8  # samples taken in one go: up to 8 MiB, so that the loop gets them in slices
_BATCH_IN_TIME = 2  # where the time is limited, as on the thread of the loop


class _Endpoints:
    """The inlets and outlets that the waiter watches, by number. For the thread."""

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter
        self._by_number: dict[int, _Watched] = {}
        self._next = WOKEN + 1
        self.channels: list[InboundChannel] = []
        self.writers: list[Outlet] = []

    def attach(self, endpoint: _Watched) -> None:
        """Wait for data, and for changes of what is matched."""
        number, self._next = self._next, self._next + 2
        self._by_number[number] = endpoint
        if isinstance(endpoint, InboundChannel):
            self.channels.append(endpoint)
            endpoint.number = number
            self._by_number[number + 1] = endpoint
            self._waiter.attach(endpoint.inlet.arrivals, number)
            self._waiter.attach(endpoint.inlet.changes, number + 1)
        else:
            self.writers.append(endpoint)
            self._waiter.attach(endpoint.changes, number)

    def detach(self, endpoints: Sequence[_Watched]) -> tuple[list[Inlet], list[Outlet]]:
        """Wait for them no more. Returns those that there were."""
        channels = [one for one in endpoints if isinstance(one, InboundChannel) and one in self.channels]
        writers = [one for one in endpoints if not isinstance(one, InboundChannel) and one in self.writers]
        for channel in channels:
            self.channels.remove(channel)
            if not channel.paused:
                self._waiter.detach(channel.inlet.arrivals)
            self._waiter.detach(channel.inlet.changes)
        for writer in writers:
            self.writers.remove(writer)
            self._waiter.detach(writer.changes)
        self._by_number = {number: one for number, one in self._by_number.items() if one not in endpoints}
        return [channel.inlet for channel in channels], writers

    def with_news(self, numbers: Iterable[int]) -> tuple[Collection[InboundChannel], Collection[_Watched]]:
        """Channels to take from, and endpoints whose matched ones have changed, the first attached first: a new key of
        the job is known before what is sealed with it."""
        found = [(self._by_number[number], number) for number in sorted(numbers) if number in self._by_number]
        channels = dict.fromkeys(one for one, _ in found if isinstance(one, InboundChannel))
        return channels, [one for one, number in found if not isinstance(one, InboundChannel) or number != one.number]


class Receiver:
    """All topics of a bus on their way in. ``thread`` waits for them; what has no other note runs on it, or on a thread
    that does its work while it waits."""

    def __init__(
        self,
        transport: Transport,
        loop: asyncio.AbstractEventLoop,
        on_matched: Callable[[], None],
        on_gone: Callable[[InboundChannel, list[Message]], None],
        on_fault: Callable[[], None],
    ) -> None:
        """Args:
        on_matched: called on the loop when matched endpoints have changed. on_gone: called there with peers that are
            gone, and the channel that counts these messages. on_fault: called there when the thread cannot go on, see
            its ``fault``.
        """
        self._transport = transport
        self._waiter = waiter = transport.waiter()
        self.thread = WaitLoop(waiter, self._handle, failed=lambda: self._post(on_fault), ended=self._ended)
        self.handover = Handover(loop, self.thread)
        self._on_matched = on_matched
        self._on_gone = on_gone
        self._endpoints = _Endpoints(waiter)
        self._arrivals: deque[_Watched] = deque()
        self._removals: deque[tuple[Sequence[_Watched], Callable[[], None]]] = deque()
        self._deletions: list[drive.Deferred] = []
        self._after_drain: deque[Callable[[], None]] = deque()
        self._endings: deque[str | tuple[int, int]] = deque()  # processes that have ended, senders that close their bus
        self._liveness = Liveness(
            transport.lease_s,
            lambda claim: peer_processes.watched.watch(claim, self._on_ended),
            lambda claim: peer_processes.watched.unwatch(claim, self._on_ended),
            peer_processes.is_stopped,
        )
        self._changes: list[_Change | None] = []  # of matched endpoints, not reported yet
        self._liveness_call = Periodic(self._look_at_liveness, IDLE_S)
        self.thread.add_periodic(self._liveness_call)
        self.rejections = DroppedSamples()
        self.rejected = self.rejections.counts
        self.received_bytes: Counter[str] = Counter()

    # From any thread

    def add(self, endpoint: _Watched) -> None:
        """Wait for one more reader or writer."""
        self._arrivals.append(endpoint)
        self.thread.wake()

    add_writer = add

    def add_reader(self, reader: Inlet) -> None:
        """See :class:`~gradbus.runtime.transport.api.IoThread`."""
        self.add(InboundChannel(reader, _not_handed_over, take=_not_handed_over))

    def remove(self, endpoints: Sequence[_Watched], then: Callable[[], None]) -> None:
        """Delete readers and writers; ``then`` is called after that, on a thread that does nothing else."""
        self._removals.append((endpoints, then))
        self.thread.wake()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, for so long, and then for deletions that are under way."""
        self.thread.join(timeout_s)
        until_s = time.monotonic() + DELETION_S
        for deletion in self._deletions:
            deletion.join(max(0.0, until_s - time.monotonic()))

    def after_drain(self, then: Callable[[], None]) -> None:
        """Call ``then`` on the thread when all that the transport holds now has been taken."""
        self._after_drain.append(then)
        self.thread.wake()

    def take_again(self) -> None:
        """See :class:`~gradbus.runtime.transport.api.IoThread`."""
        self.thread.wake()

    def add_periodic(self, periodic: Periodic) -> None:
        """See :class:`~gradbus.runtime.transport.api.IoThread`."""
        self.thread.add_periodic(periodic)

    def consumed(self, channel: InboundChannel, count: int) -> None:
        """The loop has consumed messages; a reader that was left alone is looked at again when half is free."""
        channel.consumed += count
        if channel.paused and channel.room * 2 >= channel.limit:
            self.thread.wake()

    def _on_ended(self, claim: str) -> None:
        """The kernel reports the end of a process, whose last samples are taken before it counts as gone."""
        self._endings.append(claim)
        if not self.thread.stopping:
            self.thread.wake()

    # On the thread

    def call_within(self, periodic: Periodic, seconds: float) -> None:
        """See :class:`~gradbus.runtime.transport.api.IoThread`."""
        self.thread.call_within(periodic, seconds)

    def rematched(self) -> None:
        """See :class:`~gradbus.runtime.transport.api.IoThread`."""
        self._post(self._on_matched)

    def receivers(self) -> Collection[PeerId] | None:
        """See :class:`~gradbus.runtime.transport.api.IoThread`."""
        found: set[PeerId] = set()
        for outlet in self._endpoints.writers:
            owners = outlet.receivers()
            if owners is None:
                return None
            found.update(owners)
        return found

    def block_writers(self, sources: Collection[Peer], why: str) -> None:
        """See :class:`~gradbus.runtime.transport.api.IoThread`."""
        self._report_gone(self._liveness.block_writers(sources, why))

    def _handle(self, numbers: list[int], until_s: float) -> bool:
        if not numbers:
            return False
        is_woken = WOKEN in numbers
        channels: Collection[InboundChannel]
        changed: Collection[_Watched]
        after_drain = endings = 0
        if is_woken:  # seldom
            self._attach_and_delete()
            after_drain, endings = len(self._after_drain), len(self._endings)  # later ones wake it again
            channels = list(self._endpoints.channels)
            changed = [*channels, *self._endpoints.writers]
        else:
            channels, changed = self._endpoints.with_news(numbers)
        # Changes are asked for before the data is taken, and reported after it: when a peer is reported as gone, all
        # that it has sent was handed over.
        if changed:
            self._changes.extend(self._refresh(changed))
        drained = [self._drain(channel, until_s) for channel in channels]
        if not all(drained):
            if is_woken or self._changes:
                self._waiter.wake()  # the next turn goes on here
            return True
        if self._changes:
            self._report_changes()
        for _ in range(endings):  # all topics were drained
            one = self._endings.popleft()
            self._report_gone(self._liveness.ended(one) if isinstance(one, str) else self._liveness.closed(one))
        for _ in range(after_drain):
            self._after_drain.popleft()()
        return True

    def _attach_and_delete(self) -> None:
        removals = [self._removals.popleft() for _ in range(len(self._removals))]  # first: each has been added before
        while self._arrivals:
            self._endpoints.attach(self._arrivals.popleft())
        if not removals:
            return
        endpoints = [endpoint for some, _ in removals for endpoint in some]
        readers, writers = self._endpoints.detach(endpoints)
        here = {one.inlet.channel.name for one in self._endpoints.channels}
        for one in endpoints:
            if isinstance(one, InboundChannel) and one.inlet.channel.name not in here:
                self._liveness.forget(one.inlet.channel.name)

        def delete() -> None:
            try:
                self._transport.close_endpoints(readers, writers)
            except Exception as error:  # of the transport; who waits for the others must not wait for ever
                log.error("readers or writers not deleted", reason=repr(error))
            finally:
                for _, then in removals:
                    then()

        # Not here: it takes up to some seconds, and this may be the thread of an event loop that waits inline.
        under_way = [one for one in self._deletions if one.is_running()]
        self._deletions = [*under_way, drive.later(delete, name="gradbus-delete")]

    def _refresh(self, endpoints: Collection[_Watched]) -> Iterator[_Change | None]:
        """Ask which matched peers have changed. Yields each channel whose have, and those it has now; None for an
        outlet."""
        for one in endpoints:
            if not isinstance(one, InboundChannel):
                if one.refresh():
                    yield None
            elif one.inlet.refresh():
                yield one, one.inlet.peers()

    def _report_changes(self) -> None:
        changes, self._changes = self._changes, []
        for channel, sources in filter(None, changes):
            # One that came while data was taken is not gone; one that went meanwhile will be reported again.
            now = sources | channel.inlet.peers()
            gone = channel.sources - now
            if is_control(channel.inlet.channel):  # also one that has come and gone between two looks
                gone |= self._liveness.writers_on(channel.inlet.channel.name) - now
            channel.sources = now
            if gone:
                self._liveness.advance(time.monotonic())
                self._liveness.departed(gone, channel.inlet.channel.name)
                self.thread.call_within(self._liveness_call, LIVENESS_S)
            if disconnected := channel.inlet.take_disconnected():
                self._report_gone(self._liveness.disconnected(disconnected))
        self._post(self._on_matched)

    def _look_at_liveness(self) -> bool:
        self._report_gone(self._liveness.look(time.monotonic()))
        self._liveness_call.every_s = LIVENESS_S if self._liveness.is_in_doubt else IDLE_S
        return True

    def _report_gone(self, gone: Sequence[PeerGone | PeerDisconnected]) -> None:
        channel = next((one for one in self._endpoints.channels if is_control(one.inlet.channel)), None)
        if gone and channel is not None:
            channel.taken += len(gone)
            self._post(self._on_gone, channel, list(gone))

    def _drain(self, channel: InboundChannel, until_s: float) -> bool:
        """Take what the reader has, as far as there is room for it. Returns False where the time was over before."""
        batch = _BATCH if until_s == math.inf else _BATCH_IN_TIME
        if channel.take is not None:
            return self._drain_here(channel, channel.take, batch, until_s)
        while not self.thread.stopping:
            room = channel.room
            if room <= 0 and not channel.inlet.channel.may_drop:
                self._pause(channel)
                return True
            taken = channel.inlet.take(min(batch, room) if room > 0 else batch)
            if room <= 0:
                self.rejected["inbox full"] += len(taken)
                if taken:
                    continue
            if not taken:
                if channel.paused:
                    channel.paused = False
                    self._waiter.attach(channel.inlet.arrivals, channel.number)
                return True
            checked = [self._check(channel, raw, source) for raw, source in taken]
            messages = [message for message in checked if message is not None and not isinstance(message, Frame)]
            channel.taken += len(messages)
            if messages:
                self._post(channel.deliver, messages)
            if time.monotonic() >= until_s:
                return False
        return True

    def _drain_here(self, channel: InboundChannel, take: Callable[[Frame], None], batch: int, until_s: float) -> bool:
        while not self.thread.stopping:
            taken = channel.inlet.take(batch)
            for raw, source in taken:
                frame = self._check(channel, raw, source)
                if isinstance(frame, Frame):
                    try:
                        take(frame)
                    except Exception:
                        self.rejections.failed(channel.inlet.channel.name)
            if len(taken) < batch:
                return True  # what has come meanwhile says so
            if time.monotonic() >= until_s:
                return False
        return True

    def _pause(self, channel: InboundChannel) -> None:
        """Leave the reader alone: it fills up, and then its writers wait. That is the back-pressure."""
        if not channel.paused:
            channel.paused = True
            self._waiter.detach(channel.inlet.arrivals)
            if channel.room > 0:  # the loop has consumed in between and may not have seen the flag
                self._waiter.wake()

    def _check(self, channel: InboundChannel, raw: Any, source: Peer) -> Message | Frame | None:
        try:
            sample = channel.inlet.decode(raw)
            if sample is None:
                return None
            message = channel.inlet.channel.to_message(sample)
        except FrameError as error:
            self.rejections.refused(error)
            return None
        except (ValueError, TypeError, OverflowError):
            self.rejected["sample"] += 1
            return None
        if isinstance(message, Control):
            if isinstance(message.body, Closing):
                self._endings.append((message.sender, message.incarnation))
                self.thread.wake()
                return None
            self._liveness.advance(time.monotonic())
            self._liveness.received(source, message, channel.inlet.channel.name)
            if channel.received is not None and not channel.received.is_first(message):
                self.rejected["repeated"] += 1
                return None
        data = getattr(sample, "data", b"")
        self.received_bytes[traffic_name(channel.inlet.channel)] += len(data)
        return message

    def _ended(self) -> None:
        self._liveness.close()

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self.handover.post(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to take it
            self.thread.stopping = True


def _not_handed_over(sample: object) -> None:
    raise AssertionError("a reader that uses its samples itself has handed one over")


class ReceivedMessages:
    """Knows which control messages have been received, the newest ones, by sender and number."""

    def __init__(self, most: int = 4 * INBOX_RETAINED) -> None:
        self._most = most
        self._known: dict[tuple[int, int, int], None] = {}

    def is_first(self, message: Control) -> bool:
        """Note a message. Returns whether it has not been received before."""
        about = message.sender, message.incarnation, message.number
        if about in self._known:
            return False
        self._known[about] = None
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]
        return True


class InboundChannel:
    """One channel on its way in. The thread counts what it took, the loop what was consumed; nobody needs a lock."""

    def __init__(
        self,
        inlet: Inlet,
        deliver: Callable[[list[Message]], None],
        *,
        take: Callable[[Frame], None] | None = None,
        is_retained: bool = False,
    ) -> None:
        """``deliver`` gets messages on the loop; ``take``, where given, frames one by one on the receive thread.
        ``is_retained``: these are control messages that come again after a lost match, and count once."""
        self.inlet = inlet
        self.deliver = deliver
        self.take = take
        self.limit = inlet.channel.inbox
        self.taken = 0  # written by the thread
        self.consumed = 0  # written by the loop
        self.paused = False  # written by the thread
        self.number = 0  # at the waiter: this one for data, the next one for status
        self.sources: AbstractSet[Peer] = set()
        self.received = ReceivedMessages() if is_retained else None  # for the thread

    @property
    def room(self) -> int:
        return self.limit - (self.taken - self.consumed)


_Watched: TypeAlias = InboundChannel | Outlet
_Change: TypeAlias = tuple[InboundChannel, AbstractSet[Peer]]  # a channel and its senders now

WARNING_S = 10.0  # between two warnings about samples that cannot be decoded

_OTHER_SETTINGS = frozenset({"sealed", "not sealed", "other key", "other level"})  # reasons that tell of those

log = get_logger("bus")


class DroppedSamples:
    """Samples that came in and were not used, by reason, with a warning where they tell of a wrong configuration.

    Attributes:
        counts: by reason.
        misconfiguration: what was wrong with samples of processes that are set up in another way.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.misconfiguration = ""
        self._warned_s = -WARNING_S

    def refused(self, error: FrameError) -> None:
        """A sample is no message. Where it tells of other settings, a warning says so if that is news: anybody can send
        such samples, as many as he likes."""
        self.counts[error.reason] += 1
        if error.reason not in _OTHER_SETTINGS or str(error) == self.misconfiguration:
            return
        self.misconfiguration = str(error)
        if time.monotonic() > self._warned_s + WARNING_S:
            self._warned_s = time.monotonic()
            with contextlib.suppress(Exception):  # its stream is the host's
                log.warning("samples are not understood", reason=error.reason, why=self.misconfiguration)

    def failed(self, topic: str) -> None:
        """The handler of a topic's frames has raised: one frame must not end the whole bus. Called while the exception
        is handled; only the first one is logged, as others will be many of the same."""
        self.counts["handler failed"] += 1
        if self.counts["handler failed"] == 1:
            with contextlib.suppress(Exception):  # the log itself may be what failed
                log.exception("frame not handled", topic=topic)
