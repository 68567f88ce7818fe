"""How samples of the network in memory arrive: in order, once, and some day, over links that lose packets.

**Theory of operation.** An outlet numbers its samples. Each packet goes its own way: it may be late, overtake others,
or get lost. An inlet hands samples over in the order of their numbers, and keeps those behind a gap until the gap is
filled. It acknowledges with the first number that it lacks, once for all that has arrived meanwhile. The outlet keeps
what is not acknowledged, and sends that again, at longer intervals at first, until some of it is. After a reconnect
the inlet names the first number that it lacks, and the outlet sends all from there.

An inlet of a channel that keeps the last sample, and one that is not reliable, waits for no gap: it skips it. So does
one whose outlet keeps the last sample: what is missing may be replaced there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from gradbus.runtime.transport.kept_samples import NumberedSample
from gradbus.runtime.transport.memory.pairs import EndpointPair, Node
from gradbus.runtime.transport.schedule import NetworkSchedule

LAST_WORDS_S = 0.005  # samples of a dead process are on their way for so long at most: no process sends them again
RESEND_MAX_S = 0.2  # from a round trip without an answer until the next attempt


class Links(Protocol):
    """What packets go over: see :class:`~.network.MemoryNetwork`."""

    schedule: NetworkSchedule
    resend_s: float
    base_s: float
    jitter_s: float
    on_delivered: Callable[[EndpointPair, Any], None]
    delivered: int

    def at(self, delay_s: float, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function after a delay."""

    def is_up(self, one: Node, other: Node) -> bool:
        """Return whether packets pass between two processes now."""

    def loses_packet(self, one: Node, other: Node) -> bool:
        """Return whether a packet that is sent now is lost."""

    def delay_s(self, one: Node, other: Node) -> float:
        """Return how long a packet takes."""

    def wait_s(self, typical_s: float) -> float:
        """Return a time between a half and one and a half of this one."""


class SampleDelivery:
    """Takes samples from outlets to inlets. The lock of the schedule is held by whoever calls it."""

    def __init__(self, links: Links) -> None:
        self._links = links

    # On the side of the outlet

    def send(self, pair: EndpointPair, one: NumberedSample) -> None:
        """Send a sample, and again until it is acknowledged."""
        links, (source, target) = self._links, (pair.source, pair.target)
        if not links.loses_packet(source, target):
            links.at(links.delay_s(source, target), self._arrive, pair, one.number, one.sample, pair.epoch)
        if pair.is_reliable and source.machine != target.machine:  # within a machine none is lost
            self._resend_later(pair)

    def _resend_later(self, pair: EndpointPair) -> None:
        if not pair.resends:
            pair.resends = True
            round_trip_s = 2 * self._links.base_s + self._links.jitter_s  # on average
            wait_s = min(RESEND_MAX_S, self._links.resend_s * 2.0 ** min(pair.attempts, 10))
            self._links.at(round_trip_s + self._links.wait_s(wait_s), self._resend, pair, pair.epoch, pair.acknowledged)

    def _resend(self, pair: EndpointPair, epoch: int, acknowledged: int) -> None:
        """Send what the inlet lacks again, or later, if it has acknowledged something meanwhile."""
        pair.resends = False
        if not (pair.is_sending and pair.lacks_samples):
            return
        if epoch != pair.epoch or acknowledged < pair.acknowledged:
            self._resend_later(pair)
            return
        pair.attempts += 1
        self._send_lacking(pair)

    def _send_lacking(self, pair: EndpointPair) -> None:
        for one in pair.writer.kept.since(pair.acknowledged + 1):
            self.send(pair, one)

    def _hear(self, pair: EndpointPair, wanted: int, epoch: int, *, sends_all: bool) -> None:
        """Have the outlet receive what its inlet lacks. ``sends_all``: it sends everything from there."""
        if epoch != pair.epoch or not pair.is_sending or not self._links.is_up(pair.source, pair.target):
            return
        pair.writer.note_acknowledged(pair, wanted - 1)
        if sends_all and pair.lacks_samples:
            self._send_lacking(pair)

    # On the side of the inlet

    def _arrive(self, pair: EndpointPair, number: int, sample: Any, epoch: int) -> None:
        source, target = pair.source, pair.target
        if epoch != pair.epoch or target.dead or pair.reader.is_closed:
            return
        if not pair.is_sending and self._links.schedule.now_s() > source.ended_s + LAST_WORDS_S:
            return
        if not self._links.is_up(source, target):
            return  # it is lost with the link
        if number < pair.wanted:
            self._tell(pair)  # what the inlet has told before was lost
            return
        if pair.skips_gaps:
            pair.wanted = number
            pair.early.clear()
        pair.early[number] = sample
        self.hand_over(pair)
        if not pair.is_reliable:
            pair.early.clear()

    def hand_over(self, pair: EndpointPair) -> None:
        """Hand over the samples that are next, as far as there is room for them, and acknowledge them."""
        first, links = pair.wanted, self._links
        while pair.wanted in pair.early and pair.reader_knows and pair.reader.has_room and not pair.target.dead:
            sample = pair.early.pop(pair.wanted)
            pair.wanted += 1
            links.delivered += 1
            links.on_delivered(pair, sample)
            pair.reader.put(sample, pair.handle)
        if pair.wanted > first:
            self._tell(pair)

    def _tell(self, pair: EndpointPair) -> None:
        """Acknowledge. One such message is on its way at a time; the next one is for all that has come since."""
        if not pair.is_reliable or pair.is_telling:
            return
        if pair.source is pair.target:
            self._hear(pair, pair.wanted, pair.epoch, sends_all=False)
        elif not self._links.loses_packet(pair.target, pair.source):  # else the sample comes again, and so does this
            pair.is_telling = True
            delay_s = self._links.delay_s(pair.target, pair.source)
            self._links.at(delay_s, self._end_telling, pair, pair.wanted, pair.epoch)

    def _end_telling(self, pair: EndpointPair, wanted: int, epoch: int) -> None:
        pair.is_telling = False
        self._hear(pair, wanted, epoch, sends_all=False)
        if (epoch != pair.epoch or pair.wanted > wanted) and not pair.target.dead:  # nothing was told meanwhile
            self._tell(pair)

    def ask(self, pair: EndpointPair) -> None:
        """Have the inlet name the first number that it lacks, so that the outlet sends all from there."""
        links = self._links
        if not pair.is_reliable or pair.target.dead:
            return
        if not links.loses_packet(pair.target, pair.source):
            delay_s = links.delay_s(pair.target, pair.source)
            links.at(delay_s, self._hear_request, pair, pair.wanted, pair.epoch)
        if pair.lacks_samples:  # where this is lost, or what comes of it
            self._resend_later(pair)

    def _hear_request(self, pair: EndpointPair, wanted: int, epoch: int) -> None:
        self._hear(pair, wanted, epoch, sends_all=True)
