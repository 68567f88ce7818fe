"""Outlets on Zenoh: samples are numbered, sent to all who keep up, and again to those who say what they lack.

**Theory of operation.** An outlet that sees the token of an inlet sends it START, and counts it as matched once it has
answered. The answers (ACK) say what has arrived, and up to which sample the inlet has room. A sample goes to all inlets
in one message, once all have room: in their queues, and on the way to them (``flight.py``). One that makes no progress
is not waited for. It gets what it lacks in messages of its own, as one does that was cut off, or came later. Each
sample is kept until all matched inlets have acknowledged it.

A message that was lost in the middle is asked for by the inlet, which sees the gap. One that was the last is found by a
PROBE, which says what the inlet should have: after :data:`PROBE_S` in which nothing was acknowledged although something
could be. It travels behind the samples, so what is still on its way is not taken for lost. START takes the link of the
session, as nothing else is on its way then.

An inlet whose token has gone holds up no write. What it lacks is kept for the lease, as far as the window goes: its
process may live, and come back. One of a transport that is not known to belong to the job holds up writes for
:data:`FOREIGN_S` in all, and no sample for others.

Anybody on the relay can show a token, and send answers, in the name of an inlet. So one that has answered no PROBE for
the lease while our link stands is lost, and found again with its next answer. Answers that contradict each other begin
the match again (``repeats.py`` limits how often).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from gradbus.runtime.transport.api import Envelope, PeerId
from gradbus.runtime.transport.channels import WINDOW_BYTES, Channel, is_control
from gradbus.runtime.transport.flight import FlightWindow
from gradbus.runtime.transport.kept_samples import KeptSamples, NumberedSample
from gradbus.runtime.transport.repeats import RepeatLimit
from gradbus.runtime.transport.sample_layout import LAYOUTS
from gradbus.runtime.transport.zenoh.messages import (
    HEADER_BYTES,
    MAX_NUMBER,
    Ack,
    BadMessage,
    LossProbe,
    MatchStart,
    pack_probe,
    pack_start,
    parse_ack,
    sample_message,
    set_number,
)
from gradbus.runtime.transport.zenoh.place import MAX_PEERS, ZenohEndpoint, ZenohPlace

PROBE_S, PROBE_MAX_S = 0.2, 4.0  # from the last progress of an inlet until the first PROBE, and between later ones
PACE_S = 0.5  # in which an inlet without progress is waited for with what others are to get in the same message
FOREIGN_S = 1.5  # a member says that it is one within milliseconds of being found, or later where its machine is busy
# Of samples that such an inlet is sent again at a time: the handshake that makes it a member's needs small messages,
# however long it was cut off. Models are not sent on the word of anybody.
FOREIGN_BYTES = 64 << 10
_RESTART_S = 0.05  # an answer to an old START may be on its way


@dataclass(slots=True, eq=False)
class InletState:
    """Holds what an outlet knows of one inlet.

    Attributes:
        link: over which it wants to have what is for it alone.
        handle: by which others know it while the match lasts.
        epoch, first: of its match. started_s: when it was sent the last START.
        acknowledged: it has all samples up to this one. sent: those that were sent. granted: those it has room for.
        is_there: its token is, or our own link is down. is_matched: it has answered the START.
        is_heard: it has answered since its token has come; else it may have forgotten the match.
        is_reliable: it is sent again what it lacks. has_missed: something that it lacks is not there any more.
        progressed_s: when it has last acknowledged something new, or came to lack something. interval_s: between two
            such times, on average. probe_s: when the next PROBE is due, ``patience_s`` after the last one.
            longest_patience_s: for deliveries that take long.
        delivery_s: what a sample has taken lately until it was acknowledged, with what was queued before it. timed: a
            sample that is on its way, and when it was sent, from which that is measured.
        delayed_s: how long it was waited for. flight: what is on its way to it. repeats: what it has had again.
        silent_s: how long it has answered no PROBE. is_silent: for so long that it counts as lost.
    """

    id: str
    owner: PeerId
    link: int = 0
    handle: int = 0
    epoch: int = 0
    first: int = 1
    started_s: float = 0.0
    acknowledged: int = 0
    sent: int = 0
    granted: int = 0
    is_there: bool = True
    is_matched: bool = False
    is_heard: bool = False
    is_reliable: bool = True
    has_missed: bool = False
    lost_s: float = 0.0
    progressed_s: float = 0.0
    interval_s: float = 0.0
    probe_s: float = 0.0
    patience_s: float = PROBE_S
    longest_patience_s: float = PROBE_MAX_S
    round_trip_s: float = 0.0
    delivery_s: float = 0.0
    timed: tuple[int, float] | None = None
    delayed_s: float = 0.0
    silent_s: float = 0.0
    is_silent: bool = False
    flight: FlightWindow = field(default_factory=FlightWindow)
    repeats: RepeatLimit = field(default_factory=RepeatLimit)

    @property
    def is_peer(self) -> bool:
        """Return whether it is matched now."""
        return self.is_matched and self.is_there

    def note_progress(self, now_s: float) -> None:
        """Begin to wait for an answer afresh."""
        self.progressed_s = now_s
        self.patience_s = self.least_patience_s
        self.probe_s = now_s + self.patience_s

    def note_arrival(self, number: int, now_s: float) -> None:
        """Take note that all samples up to this one have arrived."""
        self.acknowledged, self.sent = number, max(self.sent, number)
        if self.timed is not None and number >= self.timed[0]:
            self.delivery_s, self.timed = now_s - self.timed[1], None
        self.flight.note_acknowledged(number, now_s)
        self.interval_s += (now_s - self.progressed_s - self.interval_s) / 4
        self.note_progress(now_s)

    def keeps_pace(self, now_s: float) -> bool:
        """Return whether it is not much later than usual: others wait for it, so that one message serves all."""
        return now_s < self.progressed_s + max(PACE_S, 4 * self.round_trip_s, 3 * self.interval_s)

    def has_room_for(self, sample: NumberedSample) -> bool:
        """Return whether it has room for a sample, and the way to it has."""
        return not self.is_reliable or (sample.number <= self.granted and self.flight.has_room(sample.num_bytes))

    def note_sent(self, sample: NumberedSample, now_s: float) -> None:
        """Take note that it was sent a sample."""
        self.sent = sample.number
        if self.is_reliable:
            self.timed = self.timed or (sample.number, now_s)
            self.flight.note_sent(sample.number, sample.num_bytes, now_s)

    @property
    def least_patience_s(self) -> float:
        """Return the time after which an answer is overdue. Where many share a busy link or machine, answers take
        longer than the first one has; to ask all of them again and again would make them take longer still."""
        return max(PROBE_S, 2 * self.round_trip_s, min(2 * self.delivery_s, self.longest_patience_s))

    @property
    def repeat_interval_s(self) -> float:
        """Return the time for which a sample that was sent again is on its way: requests until then are older."""
        return min(max(self.least_patience_s / 2, self.delivery_s), PROBE_MAX_S)


class ZenohOutlet(ZenohEndpoint):
    """Sends the samples of one channel."""

    def __init__(self, place: ZenohPlace, channel: Channel, retained_samples: int) -> None:
        super().__init__(place, channel, side="out", other_side="in")
        self._layout = LAYOUTS[channel.sample_type]
        retained = 1 if channel.keep_last else retained_samples
        self._kept = KeptSamples(retained if channel.retained else 0, keeps_last=channel.keep_last)
        self._inlets: dict[str, InletState] = {}
        self._receivers: Sequence[PeerId] = ()
        self._urgent = is_control(channel)
        self._to_all = self.keys.to_all(self.id)
        self._epoch = 0
        self._sent = 0  # the last sample that was sent to all that keep pace
        self._looks: list[float] = []  # when to look at progress, the earliest last
        self._acknowledged = 0
        self._refused_since_s = 0.0
        self._writes = 0  # in progress
        self._reserved_bytes = 0  # of samples that are being made
        if channel.side_links:
            place.session.request_side_links(1)

    def subscriptions(self) -> list[tuple[str, int, Callable[[str, bytes], None]]]:
        """Answers of inlets."""
        return [(self.keys.ack(self.id), 0, self._hear)]

    # Who is there

    def count_peers(self) -> int:
        """See :meth:`.ZenohEndpoint.count_peers`. Takes note whose they are."""
        self._receivers = [one.owner for one in self._inlets.values() if one.is_peer]
        return len(self._receivers)

    def receivers(self) -> Sequence[PeerId]:
        """See :meth:`.api.Outlet.receivers`."""
        return self._receivers

    def peers(self) -> set[int]:
        """See :meth:`.api.Endpoint.peers`."""
        with self.schedule.lock:
            return {one.handle for one in self._inlets.values() if one.is_peer}

    def find_peer(self, peer: str, owner: PeerId) -> None:
        """Begin a match, or go on with one: the PROBE has the inlet say what it lacks."""
        inlet = self._inlets.get(peer)
        if inlet is None:
            if len(self._inlets) >= MAX_PEERS:
                raise BadMessage("too many tokens")
            patience_s = min(PROBE_MAX_S, self.place.lease_s / 4)  # an inlet is asked several times in a lease
            inlet = self._inlets[peer] = InletState(peer, owner, longest_patience_s=patience_s)
            self._begin(inlet, self._kept.first_retained)
            return
        if not inlet.is_there:
            inlet.is_there = True
            if inlet.has_missed:
                self._begin(inlet, self._kept.first_retained)
                return
            if inlet.is_matched:
                inlet.handle = self.place.next_number()
                self.note_peers_changed()
        inlet.is_heard = inlet.is_silent = False
        inlet.silent_s = inlet.delivery_s = 0.0  # the link may be a new one
        inlet.timed = None
        inlet.note_progress(self.schedule.now_s())
        self._probe(inlet)
        self._probe_later()

    def lose_peer(self, peer: str) -> None:
        """Wait for this inlet no more."""
        inlet = self._inlets.get(peer)
        if inlet is not None:
            inlet.is_silent = False  # its token is not there to answer for
            if inlet.is_there:
                self._lose_inlet(inlet)

    def _lose_inlet(self, inlet: InletState) -> None:
        inlet.is_there, inlet.lost_s = False, self.schedule.now_s()
        inlet.timed = None
        if inlet.is_matched:
            self.note_peers_changed()
        self.schedule.notify()  # writes that wait for it

    def forget_peer(self, peer: str) -> None:
        """Keep nothing for an inlet that has not come back."""
        inlet = self._inlets.get(peer)
        if inlet is not None and not inlet.is_there and self.lease_is_over(inlet.lost_s):
            del self._inlets[peer]
            self._forget_acknowledged()

    def _begin(self, inlet: InletState, first: int) -> None:
        """Begin a match with the sample of this number."""
        self._epoch += 1
        if inlet.is_peer:
            self.note_peers_changed()
        inlet.epoch, inlet.first = self._epoch, first
        inlet.is_matched = inlet.has_missed = False
        inlet.link = 0
        inlet.acknowledged = inlet.sent = first - 1
        inlet.granted = 0
        inlet.flight.clear()
        inlet.timed = None
        self._kept.keep_since(first)
        inlet.note_progress(self.schedule.now_s())
        self._probe(inlet)
        self._probe_later()

    # Answers of inlets, with the lock

    def _hear(self, peer: str, message: bytes) -> None:
        inlet, ack = self._inlets.get(peer), parse_ack(message)
        if inlet is None:
            raise BadMessage("answer of an unknown inlet")
        inlet.silent_s = 0.0
        if inlet.is_silent:
            self.find_peer(peer, inlet.owner)
        if ack.epoch == inlet.epoch:
            self._take_answer(inlet, ack)
        elif ack.epoch == 0 and inlet.is_there:
            self._restart(inlet)
        else:
            raise BadMessage("answer of another match")

    def _restart(self, inlet: InletState) -> None:
        """Begin again with an inlet that knows of no match: where it has stopped, and with what is retained."""
        now_s = self.schedule.now_s()
        if now_s < inlet.started_s + _RESTART_S:
            return
        if inlet.is_matched:
            if not inlet.repeats.begins_again(now_s):
                inlet.is_heard = False  # so it is asked again
                self._probe_later(inlet)
                return
            lacks = min(inlet.acknowledged, self._kept.last) + 1
            self._begin(inlet, min(lacks, self._kept.first_retained) if not inlet.has_missed else lacks)
        else:
            self._probe(inlet)

    def _contradict(self, inlet: InletState, lacks: int) -> None:
        """Begin again with an inlet after answers that cannot both be its own, as answers keep their order."""
        if inlet.repeats.begins_again(self.schedule.now_s()):
            kept = self._kept.since(lacks)
            self._begin(inlet, kept[0].number if kept else self._kept.last + 1)

    def _take_answer(self, inlet: InletState, ack: Ack) -> None:
        kept, now_s = self._kept, self.schedule.now_s()
        arrived = ack.wanted - 1
        least = inlet.acknowledged if inlet.is_matched and inlet.is_reliable else inlet.first - 1
        if arrived > kept.last:
            self._contradict(inlet, inlet.acknowledged + 1)
            raise BadMessage("answer to what was not sent")
        if ack.is_reliable and arrived < least:
            self._contradict(inlet, ack.wanted)
            raise BadMessage("answer that takes back another")
        inlet.is_heard, inlet.link = True, ack.link if ack.link <= self.channel.side_links else 0
        if not inlet.is_matched:
            inlet.is_matched, inlet.is_reliable, inlet.has_missed = True, ack.is_reliable, False
            inlet.handle = self.place.next_number()
            inlet.round_trip_s = min(now_s - inlet.started_s, PROBE_MAX_S / 2)
            inlet.sent = arrived  # of a match before this one it may have more
            inlet.note_progress(now_s)
            self.note_peers_changed()
        if not inlet.is_reliable:
            inlet.acknowledged, inlet.granted = MAX_NUMBER, MAX_NUMBER
        else:
            inlet.granted = max(inlet.granted, ack.granted)
            if arrived > inlet.acknowledged:
                if self.place.is_foreign(inlet.owner):
                    inlet.delayed_s += now_s - inlet.progressed_s
                self._acknowledged += arrived - inlet.acknowledged
                inlet.note_arrival(arrived, now_s)
            if ack.ask_last:
                inlet.flight.note_lost(ack.ask_first, inlet.round_trip_s)
                inlet.timed = None  # what ends the wait for it may be either of two samples
                inlet.patience_s = inlet.least_patience_s  # it answers; what is lost again is to be found soon
                inlet.probe_s = min(inlet.probe_s, now_s + inlet.patience_s)
                self._send_again(inlet, ack)
        if self._sent < self._kept.last:
            self._send_due()
        else:  # an answer makes room for this inlet alone; a look at all others for each would take too long
            self._send_due_to(inlet)
            self._probe_later(inlet)
        self._forget_acknowledged()
        self.schedule.notify()

    def _forget_acknowledged(self) -> None:
        """Forget the samples that no inlet lacks."""
        if not self._kept.num_bytes:
            return
        lacking = [one.acknowledged for one in self._inlets.values() if one.is_reliable and not one.has_missed]
        self._kept.acknowledge(min(lacking, default=self._kept.last))

    # Sending, with the lock

    def _publish(self, key: str, message: bytes | bytearray, *, apart: bool) -> bool:
        return self.place.session.publish(key, message, urgent=self._urgent, apart=apart)

    def _publish_to(self, inlet: InletState, message: bytes | bytearray) -> bool:
        key = self.keys.to_one(inlet.id, self.id, inlet.link)
        return self._publish(key, message, apart=self.channel.side_links > 0)

    def _publish_to_all(self, message: bytes | bytearray) -> bool:
        return self._publish(self._to_all, message, apart=self.channel.side_links > 0)

    def use_room(self) -> None:
        """Send what waits because the link was congested."""
        self._send_due()

    def _send(self, message: bytearray) -> None:
        """Number a sample and keep it, and send what is due."""
        now_s = self.schedule.now_s()
        for inlet in self._inlets.values():
            if inlet.acknowledged >= self._kept.last:
                inlet.note_progress(now_s)  # it has lacked nothing until now
        set_number(message, self._kept.last + 1)
        self._kept.append(message, len(message))
        self._send_due()
        self._forget_acknowledged()  # where no inlet is reliable, all is

    def _send_due(self) -> None:
        """Send what was written to all that keep pace, together, and to others what they lack."""
        peers = [one for one in self._inlets.values() if one.is_peer]
        for inlet in peers:
            self._send_due_to(inlet)
        awaited = {one for one in self._awaited() if not self.place.is_foreign(one.owner)}  # others get theirs alone
        for one in self._kept.since(self._sent + 1) if peers else ():
            if not self._send_together(peers, awaited, one):
                break
        if not peers:
            self._sent = self._kept.last
        self._probe_later()

    def _send_due_to(self, inlet: InletState) -> None:
        """Send what others were sent to one that lacks it."""
        if inlet.is_peer and (inlet.sent < self._sent or self._has_replaced_next(inlet)):
            self._send_lacking(inlet)

    def _send_together(self, peers: Sequence[InletState], awaited: Set[InletState], one: NumberedSample) -> bool:
        """Send a sample to those that have had all before it. Returns False: later, as they have no room yet."""
        now_s = self.schedule.now_s()
        lacking = [inlet for inlet in peers if inlet.sent < one.number]
        in_step = [inlet for inlet in lacking if inlet.sent >= self._sent]
        ready = [inlet for inlet in in_step if inlet.has_room_for(one)]
        if any(inlet in awaited and inlet not in ready and inlet.keeps_pace(now_s) for inlet in in_step):
            return False
        if not ready and all(inlet.sent < one.number for inlet in peers):
            return False
        is_only = len(self._inlets) == len(ready) == 1 and not self._strangers and not ready[0].link
        to_all = len(ready) > 1 or is_only
        if ready and not (self._publish_to_all(one.sample) if to_all else self._publish_to(ready[0], one.sample)):
            ready = [inlet for inlet in ready if not inlet.is_reliable]  # for them it is lost
            if len(ready) < len(lacking):
                return False
        for inlet in ready:
            inlet.note_sent(one, now_s)
        self._sent = one.number
        return True

    def _send_lacking(self, inlet: InletState) -> None:
        """Send what an inlet lacks of what others were sent, as far as it has room, and the link: what waits there for
        one inlet holds up what is for all."""
        for one in self._in_reach(inlet, inlet.sent + 1):
            is_due = one.number <= self._sent or self.channel.keep_last
            if not is_due or not inlet.has_room_for(one) or self.place.session.is_congested(urgent=self._urgent):
                break
            if not self._publish_to(inlet, one.sample):
                break
            inlet.note_sent(one, self.schedule.now_s())
        if not inlet.is_reliable:  # what was sent while it was away, and is not there any more, is lost for it
            inlet.sent = max(inlet.sent, self._sent)

    def _send_again(self, inlet: InletState, ack: Ack) -> None:
        first, room = max(ack.ask_first, inlet.acknowledged + 1), math.inf
        if self._has_had_its_time(inlet):
            if not self.channel.keep_last and first < self._kept.first:
                return  # what is retained is not sent anew on its word
            room = FOREIGN_BYTES
        now_s, interval_s = self.schedule.now_s(), inlet.repeat_interval_s
        for one in self._in_reach(inlet, first):
            room -= one.num_bytes
            if room < 0 or one.number > inlet.sent or (one.number > ack.ask_last and not self.channel.keep_last):
                break
            is_asked_for = ack.asks_for(one.number) or self.channel.keep_last
            if is_asked_for and inlet.repeats.allows(one.number, now_s, interval_s):
                if not self._publish_to(inlet, one.sample):
                    break
                inlet.repeats.note_sent(one.number, now_s, interval_s)

    def _in_reach(self, inlet: InletState, first: int) -> Iterable[NumberedSample]:
        """Return the samples from this number on. Where the first is not there any more, begin a new match instead."""
        found = self._kept.since(first)
        if found and found[0].number == first:
            return found
        if (self.channel.keep_last and not self.channel.lasts_to_all) or not inlet.is_reliable:
            return found
        if first <= self._kept.last:
            self._begin(inlet, self._kept.first_retained)
        return ()

    def _has_replaced_next(self, inlet: InletState) -> bool:
        """Return whether an inlet that keeps all waits for a sample that is gone. Room for later ones is counted from
        what it has, so without a new match it may never have any."""
        return self.channel.lasts_to_all and inlet.is_reliable and inlet.sent + 1 < self._kept.last

    def _awaited(self) -> set[InletState]:
        """Return the inlets that writes wait for."""
        return {
            one for one in self._inlets.values() if one.is_peer and one.is_reliable and not self._has_had_its_time(one)
        }

    def _has_had_its_time(self, inlet: InletState) -> bool:
        """Return whether an inlet of no member was waited for as long as it may be."""
        return inlet.delayed_s >= FOREIGN_S and self.place.is_foreign(inlet.owner)

    def _lacks(self, inlet: InletState) -> bool:
        knows_all = inlet.is_matched and inlet.is_heard and inlet.acknowledged >= self._kept.last
        return inlet.is_silent or (inlet.is_there and not knows_all)

    def _probe_later(self, *only: InletState) -> None:
        """Look again when the first of those that lack something runs out of patience. ``only``: among these."""
        due_s = min((one.probe_s for one in only or self._inlets.values() if self._lacks(one)), default=math.inf)
        if due_s < (self._looks[-1] if self._looks else math.inf):
            self._looks.append(due_s)
            self.schedule.at(max(due_s, self.schedule.now_s()), self._look_at_progress)

    def _look_at_progress(self) -> None:
        self._looks.pop()
        now_s = self.schedule.now_s()
        if self.id not in self.place.endpoints:
            return
        for inlet in list(self._inlets.values()):
            if self._lacks(inlet) and now_s >= inlet.probe_s:
                self._note_silence(inlet, now_s)
                self._probe(inlet)
                inlet.delayed_s += inlet.patience_s
                longest_s = PROBE_MAX_S if inlet.is_peer else self.place.lease_s  # anybody can show tokens
                inlet.patience_s = max(min(1.5 * inlet.patience_s, longest_s), inlet.least_patience_s)
                inlet.probe_s = now_s + inlet.patience_s
        self._send_due()  # what waited for those that are overdue

    def _note_silence(self, inlet: InletState, now_s: float) -> None:
        """Lose an inlet that has answered no PROBE for the lease: its token may be shown by another."""
        is_cut_off = self.place.link_broke_since(now_s - inlet.patience_s)
        if is_cut_off or self.place.session.is_congested(urgent=self._urgent) or not inlet.is_peer:
            inlet.silent_s = 0.0
            return
        inlet.silent_s += inlet.patience_s
        if inlet.silent_s >= self.place.lease_s:
            inlet.is_silent = True
            self._lose_inlet(inlet)

    def _probe(self, inlet: InletState) -> None:
        """Have an inlet say what it lacks, or answer the START that it has not answered yet."""
        if inlet.is_matched:
            self._publish_to(inlet, pack_probe(LossProbe(inlet.epoch, min(inlet.sent, self._kept.last))))
        else:
            inlet.started_s = self.schedule.now_s()
            start = pack_start(MatchStart(inlet.epoch, inlet.first))
            self._publish(self.keys.to_one(inlet.id, self.id), start, apart=False)

    # Writing

    def write(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        """See :meth:`.api.Outlet.write`."""
        laid_out = self._layout.parts(fields, parts)
        num_bytes = sum(map(len, laid_out))
        return self._write(num_bytes, lambda: sample_message(num_bytes, laid_out))

    def write_made(self, fields: tuple[Any, ...], envelope: Envelope) -> bool:
        """See :meth:`.api.Outlet.write_made`. The octets are made where they are kept."""
        head = self._layout.prefix(*fields, envelope.size) + envelope.header
        num_bytes = len(head) + envelope.size - len(envelope.header)

        def made() -> bytearray:
            message = sample_message(num_bytes, (head,))
            with memoryview(message) as view, view[HEADER_BYTES + len(head) :] as room:
                envelope.seal_into(room)
            return message

        return self._write(num_bytes, made)

    def _write(self, num_bytes: int, make: Callable[[], bytearray]) -> bool:
        self.place.check_process()
        with self.schedule.lock:
            if not self._waits_for_room():
                self._refused_since_s = self._refused_since_s or self.schedule.now_s()
                return False
            self._reserved_bytes += num_bytes
            self._writes += 1
        try:
            message = make()  # not with the lock: encryption of a large sample takes a while
            with self.schedule.lock:
                self.check_open()
                self._refused_since_s = 0.0
                self._send(message)
        finally:
            with self.schedule.lock:
                self._reserved_bytes -= num_bytes
                self._writes -= 1
        return True

    def _waits_for_room(self) -> bool:
        self.check_open()
        self.schedule.check()
        if self._has_room():
            return True
        self._writes += 1
        began_s = self.schedule.now_s()
        self.schedule.notify()
        try:
            self.schedule.wait(self.place.node, lambda: self.is_closed or self._has_room(), self.channel.block_s)
        finally:
            self._writes -= 1
        waited_s = self.schedule.now_s() - began_s
        for inlet in self._inlets.values():
            if self._lacks(inlet):
                inlet.delayed_s += waited_s
        self.check_open()
        return self._has_room()

    def _has_room(self) -> bool:
        if self.channel.keep_last:
            return True
        if self.place.session.is_congested(urgent=self._urgent) and self._awaited():
            return False
        if self._kept.num_bytes + self._reserved_bytes >= WINDOW_BYTES:
            self._give_up_on_absent()
        return self._kept.num_bytes + self._reserved_bytes < WINDOW_BYTES

    def _give_up_on_absent(self) -> None:
        """Keep nothing for inlets that are not waited for: those that are not there, or have not answered yet. A new
        match is theirs."""
        awaited = self._awaited()
        needed = min((one.acknowledged for one in awaited), default=self._kept.last)
        for one in self._inlets.values():
            if one.acknowledged < needed and one not in awaited:
                one.has_missed = True
        self._kept.acknowledge(needed)

    # Acknowledgements

    def _has_acks(self) -> bool:
        return all(one.acknowledged >= self._kept.last for one in self._awaited())

    @property
    def is_settled(self) -> bool:
        """See :attr:`.ZenohEndpoint.is_settled`."""
        return self._has_acks()

    @property
    def is_acknowledged(self) -> bool:
        """See :attr:`.api.Outlet.is_acknowledged`."""
        with self.schedule.lock:
            return self._has_acks()

    @property
    def acknowledged_samples(self) -> int:
        """See :attr:`.api.Outlet.acknowledged_samples`."""
        return self._acknowledged

    def wait_for_acks(self, timeout_s: float) -> bool:
        """See :meth:`.api.Outlet.wait_for_acks`."""
        with self.schedule.lock:
            return self._has_acks() or self.schedule.wait(self.place.node, self._has_acks, timeout_s)

    @property
    def is_writing(self) -> bool:
        """See :attr:`.api.Outlet.is_writing`."""
        return self._writes > 0

    @property
    def refused_since_s(self) -> float:
        """See :attr:`.api.Outlet.refused_since_s`."""
        return self._refused_since_s
