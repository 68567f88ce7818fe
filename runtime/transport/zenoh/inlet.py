"""Inlets on Zenoh: samples are handed over in order, each once, and acknowledged with the first number that is lacking.

**Theory of operation.** A match begins with the START of an outlet whose token is there. What arrives in order is
queued; what is behind a gap waits, and the gap is asked for at once. An inlet that is reliable and bounded says in its
answers up to which sample it has room for an outlet (its credit): the bound of the channel is shared by its outlets.
What arrives beyond the credit is not for now, and comes again.

Answers are combined: several samples have one, at the latest after :data:`ACK_DELAY_S`. An inlet that keeps the last
sample, and one that is not reliable, waits for no gap.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gradbus.runtime.transport.api import PeerId
from gradbus.runtime.transport.channels import WINDOW_BYTES, Channel
from gradbus.runtime.transport.flags import ChangeFlag
from gradbus.runtime.transport.sample_layout import LAYOUTS
from gradbus.runtime.transport.zenoh.keys import owner_of
from gradbus.runtime.transport.zenoh.messages import (
    HEADER_BYTES,
    HERE_BITS,
    MAX_NUMBER,
    PROBE,
    SAMPLE,
    Ack,
    BadMessage,
    kind_of,
    number_of,
    pack_ack,
    parse_probe,
    parse_start,
)
from gradbus.runtime.transport.zenoh.place import MAX_PEERS, ZenohEndpoint, ZenohPlace

ACK_DELAY_S = 0.005  # from a sample until its answer at most
ACK_EVERY = 8  # samples, or half of the credit, are answered at once
LEAST_CREDIT = 2  # samples: with one, an outlet would stand still for each answer
MAX_EARLY = 4096  # samples of one outlet that wait behind a gap
TOKENLESS_SHARE = 16  # of MAX_PEERS, one of so many is for outlets whose token is not there: anybody can make up ids
_UNKNOWN_S = 0.1  # between two answers that we know of no match


@dataclass(slots=True, eq=False)
class OutletState:
    """Holds what an inlet knows of one outlet.

    Attributes:
        link: of the session, by which its samples should come.
        handle: by which others know it while the match lasts.
        epoch: of its last START; 0: there was none. wanted: the first sample that is lacking. began, before: what
            that was after the last START, and before it.
        early: messages behind a gap, by number. queued: samples that were not taken yet.
        told, granted: the last answer. asked: samples up to this one are here or were asked for. answer_is_due: soon.
        is_there: its token is, or our own link is down.
    """

    id: str
    owner: PeerId
    link: int = 0
    handle: int = 0
    epoch: int = 0
    wanted: int = 1
    began: int = 1
    before: int = 1
    early: dict[int, bytes] = field(default_factory=dict)
    early_bytes: int = 0
    queued: int = 0
    told: int = 1
    granted: int = 0
    asked: int = 0
    answer_is_due: bool = False
    is_there: bool = False
    lost_s: float = 0.0
    refused_s: float = -math.inf

    @property
    def is_peer(self) -> bool:
        """Return whether it is matched now."""
        return self.is_there and self.epoch > 0

    def begin(self, epoch: int, first: int) -> None:
        """Begin a match, or go on with it. The START before this one may have been forged: if nothing has arrived since
        then, it has moved nothing."""
        if self.wanted == self.began:
            self.wanted = self.before
        self.before = self.wanted
        self.epoch, self.granted, self.asked = epoch, 0, 0
        if first > self.wanted:  # else it has had those before
            self.wanted = first
            self.drop_early(first)
        self.began = self.wanted

    def drop_early(self, before: int = MAX_NUMBER) -> None:
        """Forget messages behind a gap with lower numbers."""
        self.early = {number: one for number, one in self.early.items() if number >= before}
        self.early_bytes = sum(map(len, self.early.values()))


class ZenohInlet(ZenohEndpoint):
    """Receives the samples of one channel."""

    def __init__(self, place: ZenohPlace, channel: Channel) -> None:
        super().__init__(place, channel, side="in", other_side="out")
        self.arrivals = ChangeFlag()
        self._layout = LAYOUTS[channel.sample_type]
        self._queue: deque[tuple[bytes, int, OutletState]] = deque()
        self._outlets: dict[str, OutletState] = {}
        self._disconnected: list[OutletState] = []  # reported once
        self._peers = 0
        self._side_links = min(channel.side_links, place.session.side_links)
        if self._side_links:
            place.session.request_side_links(1)
        # An inlet knows its own channel only: see lasts_to_all for outlets that keep less.
        self._skips_gaps = channel.keep_last or not channel.reliable
        self._gives_credit = bool(channel.reader_samples) and not (channel.overwrites or self._skips_gaps)

    def subscriptions(self) -> list[tuple[str, int, Callable[[str, bytes], None]]]:
        """Messages of outlets."""
        links = range(1, 1 + self._side_links)
        return [
            (self.keys.to_all(), min(1, self._side_links), self._receive),
            (self.keys.to_one(self.id), 0, self._receive),
            *((self.keys.to_one(self.id, link=link), link, self._receive) for link in links),
        ]

    # Who is there

    def count_peers(self) -> int:
        """See :meth:`.ZenohEndpoint.count_peers`."""
        return sum(one.is_peer for one in self._outlets.values())

    def peers(self) -> set[int]:
        """See :meth:`.api.Endpoint.peers`."""
        with self.schedule.lock:
            return {one.handle for one in self._outlets.values() if one.is_peer}

    def note_disconnected(self, owner: PeerId) -> None:
        """See :meth:`.ZenohEndpoint.note_disconnected`."""
        super().note_disconnected(owner)
        lost = [one for one in self._outlets.values() if one.owner == owner and one.epoch and not one.is_there]
        if lost:
            self._disconnected += [one for one in lost if one not in self._disconnected]
            self.note_peers_changed()

    def take_disconnected(self) -> set[int]:
        """See :meth:`.api.Inlet.take_disconnected`."""
        with self.schedule.lock:
            disconnected, self._disconnected = self._disconnected, []
            return {one.handle for one in disconnected if one.handle and not one.is_there}

    def note_peers_changed(self) -> None:
        """See :meth:`.ZenohEndpoint.note_peers_changed`."""
        self._peers = self.count_peers()
        super().note_peers_changed()

    def _outlet(self, peer: str, owner: PeerId) -> OutletState:
        outlet = self._outlets.get(peer)
        if outlet is None:
            if len(self._outlets) >= MAX_PEERS:
                raise BadMessage("too many tokens")
            outlet = self._outlets[peer] = OutletState(peer, owner)
        return outlet

    def find_peer(self, peer: str, owner: PeerId) -> None:
        """Go on with a match whose outlet has come back; one that is new says START."""
        outlet = self._outlet(peer, owner)
        was_there, outlet.is_there = outlet.is_there, True
        if outlet.epoch:
            if not was_there:
                outlet.handle = self.place.next_number()
                self.note_peers_changed()
            self._answer(outlet)

    def lose_peer(self, peer: str) -> None:
        """End a match. What the outlet knows of it is kept for the lease: it may come back."""
        outlet = self._outlets.get(peer)
        if outlet is not None and outlet.is_there:
            outlet.is_there, outlet.lost_s = False, self.schedule.now_s()
            outlet.drop_early()
            if outlet.epoch:
                self.note_peers_changed()

    def forget_peer(self, peer: str) -> None:
        """See :meth:`.ZenohEndpoint.forget_peer`."""
        outlet = self._outlets.get(peer)
        if outlet is not None and not outlet.is_there and self.lease_is_over(outlet.lost_s):
            del self._outlets[peer]

    def use_room(self) -> None:
        """Do nothing: answers do not wait."""

    # Messages of outlets, with the lock

    def _choose_link(self, outlet: OutletState) -> None:
        """Have an outlet use the link that the fewest others do, if it uses none."""
        if self._side_links and not outlet.link:
            used = Counter(one.link for one in self._outlets.values())
            outlet.link = min(range(1, 1 + self._side_links), key=used.__getitem__)
            self.place.session.request_side_links(outlet.link)

    def _receive(self, peer: str, message: bytes) -> None:
        kind = kind_of(message)
        outlet = self._outlets.get(peer)
        if kind == SAMPLE:
            number = number_of(message)
            if outlet is not None and outlet.is_peer:
                self._take_in(outlet, number, message)
            else:
                self._refuse(outlet)
        elif kind == PROBE:
            epoch, last = parse_probe(message)
            if outlet is not None and outlet.is_peer and outlet.epoch == epoch:
                self._answer(outlet, outlet.wanted, last)
            else:
                self._refuse(outlet)
        else:
            self._start(peer, *parse_start(message))

    def _refuse(self, outlet: OutletState | None) -> None:
        """Answer that we know of no match, where there is anybody to answer."""
        now_s = self.schedule.now_s()
        if outlet is not None and outlet.is_there and now_s >= outlet.refused_s + _UNKNOWN_S:
            outlet.refused_s = now_s
            self._publish_answer(outlet, Ack(0, 0, 0, is_reliable=self.channel.reliable))

    def _start(self, peer: str, epoch: int, first: int) -> None:
        owner = owner_of(peer)
        if owner is None or (owner == self.place.own and self.channel.ignore_local):
            raise BadMessage("START of no outlet")
        is_new = peer not in self._outlets
        if is_new and sum(not one.is_there for one in self._outlets.values()) >= MAX_PEERS // TOKENLESS_SHARE:
            raise BadMessage("too many STARTs without tokens")  # it is repeated once its token is there
        outlet = self._outlet(peer, owner)
        if is_new:  # its token may be on its way, or gone
            outlet.lost_s = self.schedule.now_s()
            self.place.after(self.place.lease_s, self._forget_counted, peer)
        if epoch != outlet.epoch:  # those of one outlet keep their order
            outlet.begin(epoch, first)
            self._choose_link(outlet)
            if outlet.is_there:
                outlet.handle = self.place.next_number()
                self.note_peers_changed()
                self._hand_over(outlet)
        if outlet.is_there:
            self._answer(outlet)

    def _take_in(self, outlet: OutletState, number: int, message: bytes) -> None:
        if number < outlet.wanted:
            self._answer_later(outlet)  # what was answered before was lost
            return
        if number > self._granted_now(outlet):
            return  # for others, who have room; it is sent again
        if self._skips_gaps:
            outlet.wanted = number
        elif number > outlet.wanted:
            self._keep_early(outlet, number, message)
            return
        self._put(outlet, message)
        outlet.wanted += 1
        if outlet.early:
            self._hand_over(outlet)
        self._answer_later(outlet)

    def _granted_now(self, outlet: OutletState) -> int:
        return outlet.granted if self._gives_credit else MAX_NUMBER

    def _keep_early(self, outlet: OutletState, number: int, message: bytes) -> None:
        """Keep what is behind a gap, and ask for what is in it, once: a PROBE has it asked for again."""
        if number not in outlet.early and self._has_room_behind_gap(outlet):
            outlet.early[number] = message
            outlet.early_bytes += len(message)
        if number - 1 > outlet.asked:
            self._answer(outlet, max(outlet.wanted, outlet.asked + 1), number - 1)
        outlet.asked = max(outlet.asked, number)

    def _has_room_behind_gap(self, outlet: OutletState) -> bool:
        """Return whether a message may wait behind a gap: of a member, as far as all that wait take one window."""
        if len(outlet.early) >= MAX_EARLY or self.place.is_foreign(outlet.owner):
            return False
        return sum(one.early_bytes for one in self._outlets.values()) < WINDOW_BYTES

    def _hand_over(self, outlet: OutletState) -> None:
        """Hand over what was behind a gap that is filled."""
        while (message := outlet.early.pop(outlet.wanted, None)) is not None:
            outlet.early_bytes -= len(message)
            self._put(outlet, message)
            outlet.wanted += 1

    def _put(self, outlet: OutletState, message: bytes) -> None:
        channel, queue = self.channel, self._queue
        bound = channel.reader_samples
        if channel.keep_last:
            self._drop_oldest(len(queue))
        elif bound and len(queue) >= bound:
            if channel.overwrites:
                self._drop_oldest(1)
            elif not channel.reliable:
                return
        queue.append((message, outlet.handle, outlet))
        outlet.queued += 1
        if not self.arrivals.is_on:
            self.arrivals.is_on = True
            self.place.wake_waiters()

    def _drop_oldest(self, count: int) -> None:
        for _ in range(count):
            _, _, outlet = self._queue.popleft()
            outlet.queued -= 1

    # Answers

    def _credit(self, outlet: OutletState) -> int:
        """Return the last sample of an outlet that there is room for. It never falls: it was promised."""
        if not self._gives_credit:
            return MAX_NUMBER
        share = self._share
        return max(outlet.granted, outlet.wanted - 1 - outlet.queued + share)

    @property
    def _share(self) -> int:
        return max(LEAST_CREDIT, self.channel.reader_samples // max(1, self._peers))

    def _answer_later(self, outlet: OutletState) -> None:
        """Answer now if much has happened since the last answer, else soon."""
        if not self.channel.reliable:
            return
        room = self._credit(outlet) - outlet.granted
        if outlet.wanted - outlet.told >= ACK_EVERY or (self._gives_credit and 2 * room >= self._share):
            self._answer(outlet)
        elif not outlet.answer_is_due:
            outlet.answer_is_due = True
            self.place.after(ACK_DELAY_S, self._answer_in_time, outlet)

    def _answer_in_time(self, outlet: OutletState) -> None:
        if outlet.answer_is_due and outlet.is_peer and self.id in self.place.endpoints:
            self._answer(outlet)
        outlet.answer_is_due = False

    def _answer(self, outlet: OutletState, ask_first: int = 0, ask_last: int = 0) -> None:
        """Say what has arrived, and what there is room for. Ask for what lacks in a range of samples: it was lost."""
        outlet.told, outlet.granted = outlet.wanted, self._credit(outlet)
        outlet.answer_is_due = False
        here = 0
        if ask_first <= ask_last and self.channel.reliable:
            outlet.asked = max(outlet.asked, ask_last)
            for number in range(ask_first, min(ask_last + 1, ask_first + HERE_BITS)):
                here |= (number in outlet.early) << (number - ask_first)
        else:
            ask_first = ask_last = 0
        wanted, granted, is_reliable = outlet.wanted, outlet.granted, self.channel.reliable
        self._publish_answer(
            outlet, Ack(outlet.epoch, wanted, granted, ask_first, ask_last, here, is_reliable, outlet.link)
        )

    def _publish_answer(self, outlet: OutletState, ack: Ack) -> None:
        self.place.session.publish(self.keys.ack(outlet.id, self.id), pack_ack(ack), urgent=True)

    # Taking

    def take(self, limit: int) -> list[tuple[memoryview, int]]:
        """See :meth:`.api.Inlet.take`."""
        queue = self._queue
        with self.schedule.lock:
            taken = [queue.popleft() for _ in range(min(limit, len(queue)))]
            self.arrivals.is_on = bool(queue)
            for _, _, outlet in taken:
                outlet.queued -= 1
            if self._gives_credit:
                for outlet in {id(one): one for _, _, one in taken}.values():
                    if outlet.is_peer:
                        self._answer_later(outlet)
        return [(memoryview(message)[HEADER_BYTES:], handle) for message, handle, _ in taken]

    def decode(self, raw: Any) -> Any:
        """See :meth:`.api.Inlet.decode`."""
        return self._layout.decode(raw)

    def octets(self, raw: Any) -> memoryview:
        """See :meth:`.api.Inlet.octets`."""
        return self._layout.octets(raw)
