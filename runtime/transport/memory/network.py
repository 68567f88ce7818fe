"""The network in memory: who reaches whom, and who knows whom.

Each side of a pair of an outlet (its writer) and an inlet (its reader) matches, and loses the other, by itself. A
sample that is written while the writer does not know the reader is lost on a volatile channel, and comes at the next
match on a retained one; a sample that arrives while the reader does not know the writer may be lost on a volatile
channel. Only there are loss and repetition allowed. How samples arrive otherwise: see :mod:`.delivery`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from gradbus.runtime.transport.api import PEER_ID_BYTES, PeerId
from gradbus.runtime.transport.channels import WINDOW_BYTES
from gradbus.runtime.transport.memory.delivery import SampleDelivery
from gradbus.runtime.transport.memory.pairs import EndpointPair, InletEnd, Node, OutletEnd, PairEnd
from gradbus.runtime.transport.schedule import NetworkSchedule, ThreadSchedule

FOUND_S = 0.15  # the longest discovery of a new endpoint; of one after a partition:
FOUND_AGAIN_S = 2.0
GOODBYE_S = (0.02, 0.2)  # from the end of a process until the others of its machine have removed it
HEARD_S = 2.0  # a lease begins with the last heartbeat, which is so old at most
SAME_MACHINE = 0.2  # of the delay between machines
LINGER_S = 1.0  # an outlet that is closed stays so long at most, until its samples are acknowledged


class NetworkMember(Protocol):
    """A transport, as the network sees it."""

    node: Node
    outlets: list[Any]
    inlets: list[Any]


def _nothing(pair: EndpointPair, sample: Any) -> None:
    pass


class MemoryNetwork:
    """All machines, and who reaches whom. Methods that have no lock of their own are called with that of the schedule.

    Attributes:
        lease_s: after so long a silence one side loses the other. base_s, jitter_s: delay between machines.
        loss: share of packets between machines that are lost. resend_s: from a round trip without an answer until the
            first attempt to send again, more or less.
        window_bytes: see :data:`~gradbus.runtime.transport.channels.WINDOW_BYTES`.
        refused: share of writes that find a reader full. on_delivered: called with each sample that arrives.
        delivery: takes the samples from outlets to inlets.
    """

    def __init__(self, seed: int | str = 0, schedule: NetworkSchedule | None = None) -> None:
        """``schedule``: when things happen; None: in real time, on a thread that :meth:`close` ends."""
        in_real_time = partial(ThreadSchedule, "the network in memory", thread_name="gradbus-memory")
        self.schedule: NetworkSchedule = in_real_time() if schedule is None else schedule
        self._rng = random.Random(seed)
        self.on_delivered: Callable[[EndpointPair, Any], None] = _nothing
        self.lease_s = 10.0
        self.base_s = self.jitter_s = 1e-4
        self.loss = self.refused = 0.0
        self.resend_s = 0.05
        self.window_bytes = WINDOW_BYTES
        self.participants: list[NetworkMember] = []
        self.pairs: list[EndpointPair] = []
        self.delivered = 0
        self.delivery = SampleDelivery(self)
        self._cuts: dict[frozenset[int], int] = {}
        self._numbers = itertools.count(1)
        self._peer_ids = itertools.count(1)

    def close(self) -> None:
        """End its schedule: nothing arrives any more."""
        self.schedule.close()

    def new_peer_id(self) -> PeerId:
        """Return what one more transport is to call itself."""
        return next(self._peer_ids).to_bytes(PEER_ID_BYTES, "big")

    def at(self, delay_s: float, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function of the network after a delay."""
        self.schedule.at(self.schedule.now_s() + delay_s, function, *arguments)

    def chance(self, share: float) -> bool:
        """Return whether something happens that happens in this share of all cases."""
        return share > 0.0 and self._rng.random() < share

    def wait_s(self, typical_s: float) -> float:
        """Return a time between a half and one and a half of this one."""
        return typical_s * (0.5 + self._rng.random())

    # Who reaches whom

    def is_up(self, one: Node, other: Node) -> bool:
        """Return whether packets pass between two processes now."""
        if one is other:
            return True
        if one.paused or other.paused:
            return False
        return one.machine == other.machine or frozenset((one.machine, other.machine)) not in self._cuts

    def cut(self, one: int, other: int, seconds: float) -> None:
        """Let nothing pass between two machines for so long. Each side of a pair loses the other after a lease."""
        key = frozenset((one, other))
        with self.schedule.lock:
            number = self._cuts[key] = next(self._numbers)
            for pair in self.pairs:
                if {pair.source.machine, pair.target.machine} == key:
                    self.begin_silence(pair, lambda: self._cuts.get(key) == number)
            self.at(seconds, self._heal, key, number)

    def mend(self, one: int, other: int) -> None:
        """Let packets pass between two machines that are cut off from each other."""
        key = frozenset((one, other))
        with self.schedule.lock:
            self._heal(key, self._cuts.get(key, 0))

    def _heal(self, key: frozenset[int], number: int) -> None:
        if self._cuts.get(key) == number:
            del self._cuts[key]
            self.reconnect()

    def begin_silence(self, pair: EndpointPair, lasts: Callable[[], bool]) -> None:
        """Have each side lose the other when its lease is over, if the silence still ``lasts()`` then."""
        heard_s = self._rng.uniform(0, min(HEARD_S, self.lease_s / 5))
        for lose in (self.writer_loses, self.reader_loses):

            def end_of_lease(lose: Callable[[EndpointPair], None] = lose) -> None:
                if lasts():
                    lose(pair)

            self.at(self.lease_s - heard_s + self._rng.uniform(0, 0.2), end_of_lease)

    def lose_one_side(self, side: Node, other: Node, seconds: float) -> None:
        """Have one process lose all endpoints of another one, which notices nothing, and find them again."""
        for pair in list(self.pairs):
            is_writer, is_reader = pair.side_of(side)
            if is_writer and pair.target is other:
                self.writer_loses(pair)
                self.at(seconds + self._rng.uniform(0, FOUND_S), self.writer_finds, pair)
            elif is_reader and pair.source is other:
                self.reader_loses(pair)
                self.at(seconds + self._rng.uniform(0, FOUND_S), self.reader_finds, pair)

    def pause(self, node: Node) -> None:
        """Let a process stand still. It sends no sign of life, and other machines lose it after a lease."""
        with self.schedule.lock:
            node.paused = True
            for pair in self.pairs:
                if any(pair.side_of(node)) and pair.source.machine != pair.target.machine:
                    self.begin_silence(pair, lambda: node.paused)

    def resume(self, node: Node) -> None:
        """Let a process go on."""
        with self.schedule.lock:
            node.paused = False
            self.reconnect()

    def kill(self, node: Node) -> None:
        """End a process without a goodbye."""
        with self.schedule.lock:
            node.dead = node.killed = True
            node.ended_s = self.schedule.now_s()
            self.ended(node)

    def reconnect(self) -> None:
        """Have those that reach each other again find each other, and send what is lacking."""
        for pair in self.pairs:
            if pair.is_gone or not self.is_up(pair.source, pair.target):
                continue
            if not (pair.writer_knows and pair.reader_knows):
                self._find(pair, FOUND_AGAIN_S)
            if pair.lacks_samples:
                self.at(self._rng.uniform(1e-3, self.resend_s), self.delivery.ask, pair)

    # Discovery

    def announce_writer(self, writer: OutletEnd) -> None:
        """Have the readers of its channel find a new writer."""
        for participant in self._others():
            for reader in participant.inlets:
                self._introduce(writer, reader)

    def announce_reader(self, reader: InletEnd) -> None:
        """Have the writers of its channel find a new reader."""
        for participant in self._others():
            for writer in participant.outlets:
                self._introduce(writer, reader)

    def _others(self) -> list[NetworkMember]:
        return [one for one in self.participants if not one.node.dead]

    def _introduce(self, writer: OutletEnd, reader: InletEnd) -> None:
        if writer.channel.name != reader.channel.name or writer.is_closed or reader.is_closed:
            return
        if writer.job != reader.job:
            return
        is_local = writer.owner is reader.owner
        if is_local and writer.channel.ignore_local:
            return
        pair = EndpointPair(writer, reader)
        for pairs in (self.pairs, writer.pairs, reader.pairs):
            pairs.append(pair)
        self._find(pair, 1e-4 if is_local else FOUND_S)

    def _find(self, pair: EndpointPair, within_s: float) -> None:
        if self.is_up(pair.source, pair.target):  # else when they reach each other again
            self.at(self._rng.uniform(0, within_s), self.writer_finds, pair)
            self.at(self._rng.uniform(0, within_s), self.reader_finds, pair)

    def writer_finds(self, pair: EndpointPair) -> None:
        """Match on the side of the writer, which sends what it has retained."""
        if pair.is_gone or pair.writer_knows or not self.is_up(pair.source, pair.target):
            return
        pair.writer_knows = True
        pair.reader_handle = next(self._numbers)
        pair.begin_at(pair.writer.kept.first_retained)
        pair.writer.note_peers_changed()
        for one in pair.writer.kept.since(pair.wanted):
            self.delivery.send(pair, one)

    def reader_finds(self, pair: EndpointPair) -> None:
        """Match on the side of the reader."""
        if pair.is_gone or pair.reader_knows or not self.is_up(pair.source, pair.target):
            return
        if pair.was_known and pair.writer_knows:
            kept = pair.writer.kept
            if pair.writer.channel.retained:  # it asks for what the writer retains, though it has had it before
                pair.epoch += 1  # an acknowledgement of that is on its way, and says nothing of what is wanted now
                pair.begin_at(min(pair.wanted, kept.first_retained))
                self.delivery.ask(pair)
            elif self.chance(0.5):
                pair.begin_at(kept.last + 1)
        pair.reader_knows = pair.was_known = True
        pair.handle = next(self._numbers)
        pair.reader.note_peers_changed()
        self.delivery.hand_over(pair)

    def writer_loses(self, pair: EndpointPair) -> None:
        """End the match on the side of the writer, which sends nothing again."""
        if pair.writer_knows:
            pair.writer_knows = False
            pair.epoch += 1
            pair.early.clear()
            pair.writer.forget_acknowledged()
            pair.writer.note_peers_changed()

    def reader_loses(self, pair: EndpointPair) -> None:
        """End the match on the side of the reader."""
        if pair.reader_knows:
            pair.reader_knows = False
            pair.early.clear()
            pair.reader.note_peers_changed()

    def removed(self, endpoint: PairEnd) -> None:
        """Have the other sides of a deleted endpoint know, as far as they can be reached."""
        node = endpoint.node
        for pair in list(endpoint.pairs):
            is_writer = pair.writer is endpoint
            other, lose = (pair.reader, self.reader_loses) if is_writer else (pair.writer, self.writer_loses)
            if other.owner is endpoint.owner:
                self._part(lose, pair)
            elif not self.is_up(node, other.node):
                self.at(self.lease_s, self._part, lose, pair)
            elif is_writer:
                self._say_goodbye(pair, self.schedule.now_s() + LINGER_S)
            else:
                self.at(self.delay_s(node, other.node), self._part, lose, pair)

    def _say_goodbye(self, pair: EndpointPair, until_s: float) -> None:
        """Have the reader of an outlet that is closed lose it, after it has received the samples, or in time."""
        if pair.lacks_samples and self.schedule.now_s() < until_s:
            self.at(self.resend_s / 2, self._say_goodbye, pair, until_s)
        elif self.is_up(pair.source, pair.target):
            self.at(self.base_s + self.jitter_s, self._part, self.reader_loses, pair)
        else:
            self.at(self.lease_s, self._part, self.reader_loses, pair)

    def _part(self, lose: Callable[[EndpointPair], None], pair: EndpointPair) -> None:
        lose(pair)
        pair.reader_knows = pair.writer_knows = False  # the other side is closed: nobody asks it
        pair.epoch += 1
        for pairs in (self.pairs, pair.writer.pairs, pair.reader.pairs):
            if pair in pairs:
                pairs.remove(pair)

    def ended(self, node: Node) -> None:
        """Have all lose a dead process: those of its machine soon, as the kernel reports it, others after a lease."""
        for pair in [one for one in self.pairs if any(one.side_of(node))]:
            is_writer, is_reader = pair.side_of(node)
            if is_writer and is_reader:
                continue
            lose = self.reader_loses if is_writer else self.writer_loses
            if pair.source.machine == pair.target.machine:
                self.at(self._rng.uniform(*GOODBYE_S), lose, pair)
            else:
                self.at(self.lease_s - self._rng.uniform(0, min(HEARD_S, self.lease_s / 5)), lose, pair)
        self.participants = [one for one in self.participants if one.node is not node]

    # Packets

    def loses_packet(self, one: Node, other: Node) -> bool:
        """Return whether a packet that is sent now is lost."""
        return not self.is_up(one, other) or (one.machine != other.machine and self.chance(self.loss))

    def delay_s(self, one: Node, other: Node) -> float:
        """Return how long a packet takes."""
        delay_s = self.base_s + self._rng.random() * self.jitter_s
        return delay_s * SAME_MACHINE if one.machine == other.machine else delay_s
