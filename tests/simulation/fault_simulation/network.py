"""The network in memory: what a bus uses of DDS, with the contract of DDS and nothing beyond it.

Contract of a matched pair of a writer and a reader: in order, once, and some day. A lost packet shows as delay, a
partition as waiting. There is no order between writers, nor between topics. Each side matches, and loses the other, by
itself. A sample that is written while the writer does not know the reader is lost on a volatile topic, and comes at the
next match on a retained one; a sample that arrives while the reader does not know the writer may be lost on a volatile
topic. Only there are loss and repetition allowed.
"""

from __future__ import annotations

import contextvars
import itertools
import random
import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fault_simulation.kernel import VirtualProcess, now_s
from fault_simulation.trace import Trace
from fault_simulation.virtual_loop import VirtualLoop

if TYPE_CHECKING:
    from fault_simulation.endpoints import MemoryParticipant, MemoryReader, MemoryWriter

OUTSIDE = contextvars.Context()  # in which the network itself acts
LAST_WORDS_S = 0.005  # samples of a dead process are on their way for so long at most: no process sends them again
FOUND_S = 0.15  # the longest discovery of a new endpoint; of one after a partition:
FOUND_AGAIN_S = 2.0
GOODBYE_S = (0.02, 0.2)  # from the end of a process until DDS of its machine has removed it
HEARD_S = 2.0  # a lease begins with the last heartbeat, which is so old at most
SAME_MACHINE = 0.2  # of the delay between machines
CONTROL = "train/control"
WINDOW = 64  # samples that a writer keeps for a reader that takes none, before it refuses to write


class Pair:
    """A writer and a reader of one topic.

    Attributes:
        writer_knows, reader_knows: whether that side has matched the other one.
        epoch: raised when the writer loses the reader: what is on its way then is lost.
        last_s: arrival of the newest sample, which no later one overtakes. held: samples that cannot arrive yet.
        handle: by which the reader knows the writer; a new one at each match.
    """

    __slots__ = ("epoch", "handle", "held", "last_s", "reader", "reader_knows", "was_known", "writer", "writer_knows")

    def __init__(self, writer: MemoryWriter, reader: MemoryReader) -> None:
        self.writer, self.reader = writer, reader
        self.writer_knows = self.reader_knows = self.was_known = False
        self.epoch = self.handle = 0
        self.last_s = 0.0
        self.held: deque[Any] = deque()

    @property
    def source(self) -> VirtualProcess:
        """Return the process of the writer."""
        return self.writer.participant.process

    @property
    def target(self) -> VirtualProcess:
        """Return the process of the reader."""
        return self.reader.participant.process

    @property
    def is_gone(self) -> bool:
        """Return whether one side does not exist any more."""
        return self.source.dead or self.target.dead or self.writer.deleted or self.reader.deleted

    def side_of(self, process: VirtualProcess) -> tuple[bool, bool]:
        """Return whether the writer, and the reader, is of this process."""
        return self.source is process, self.target is process


class MemoryNetwork:
    """All machines, and who reaches whom.

    Attributes:
        lease_s: after so long a silence one side loses the other. base_s, jitter_s: delay between machines.
        loss: share of packets that are lost; each costs ``resend_s``, more or less.
        refused: share of writes that find a reader full.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random, trace: Trace) -> None:
        self._loop = loop
        self._rng = rng
        self._trace = trace
        self.lease_s = 10.0
        self.base_s = self.jitter_s = 1e-4
        self.loss = self.refused = 0.0
        self.resend_s = 0.05
        self.participants: list[MemoryParticipant] = []
        self.pairs: list[Pair] = []
        self.delivered = 0
        self._cuts: dict[frozenset[int], int] = {}
        self._numbers = itertools.count(1)

    def at(self, delay_s: float, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function of the network after a delay."""
        self._loop.call_later(delay_s, function, *arguments, context=OUTSIDE)

    def chance(self, share: float) -> bool:
        """Return whether something happens that happens in this share of all cases."""
        return share > 0.0 and self._rng.random() < share

    # Who reaches whom

    def is_up(self, one: VirtualProcess, other: VirtualProcess) -> bool:
        """Return whether packets pass between two processes now."""
        if one is other:
            return True
        if one.paused or other.paused:
            return False
        return one.machine == other.machine or frozenset((one.machine, other.machine)) not in self._cuts

    def cut(self, one: int, other: int, seconds: float) -> None:
        """Let nothing pass between two machines for so long. Each side of a pair loses the other after a lease."""
        key, number = frozenset((one, other)), next(self._numbers)
        self._cuts[key] = number
        for pair in self.pairs:
            if {pair.source.machine, pair.target.machine} == key:
                self.begin_silence(pair, lambda: self._cuts.get(key) == number)
        self.at(seconds, self._heal, key, number)

    def _heal(self, key: frozenset[int], number: int) -> None:
        if self._cuts.get(key) == number:
            del self._cuts[key]
            self.reconnect()

    def begin_silence(self, pair: Pair, lasts: Callable[[], bool]) -> None:
        """Have each side lose the other when its lease is over, if the silence still ``lasts()`` then."""
        heard_s = self._rng.uniform(0, min(HEARD_S, self.lease_s / 5))
        for lose in (self.writer_loses, self.reader_loses):

            def end_of_lease(lose: Callable[[Pair], None] = lose) -> None:
                if lasts():
                    lose(pair)

            self.at(self.lease_s - heard_s + self._rng.uniform(0, 0.2), end_of_lease)

    def lose_one_side(self, side: VirtualProcess, other: VirtualProcess, seconds: float) -> None:
        """Have one process lose all endpoints of another one, which notices nothing, and find them again."""
        for pair in list(self.pairs):
            is_writer, is_reader = pair.side_of(side)
            if is_writer and pair.target is other:
                self.writer_loses(pair)
                self.at(seconds + self._rng.uniform(0, FOUND_S), self.writer_finds, pair)
            elif is_reader and pair.source is other:
                self.reader_loses(pair)
                self.at(seconds + self._rng.uniform(0, FOUND_S), self.reader_finds, pair)

    def reconnect(self) -> None:
        """Have those that reach each other again find each other, and send what waits."""
        for pair in self.pairs:
            if pair.is_gone or not self.is_up(pair.source, pair.target):
                continue
            if not (pair.writer_knows and pair.reader_knows):
                self._find(pair, FOUND_AGAIN_S)
            if pair.held:
                self.at(self._rng.uniform(1e-3, self.resend_s), self.flush, pair)

    # Discovery

    def announce_writer(self, writer: MemoryWriter) -> None:
        """Have the readers of its topic find a new writer."""
        for participant in self._others():
            for reader in participant.readers:
                self._introduce(writer, reader)

    def announce_reader(self, reader: MemoryReader) -> None:
        """Have the writers of its topic find a new reader."""
        for participant in self._others():
            for writer in participant.writers:
                self._introduce(writer, reader)

    def _others(self) -> list[MemoryParticipant]:
        return [one for one in self.participants if one.is_open and not one.process.dead]

    def _introduce(self, writer: MemoryWriter, reader: MemoryReader) -> None:
        if writer.channel.name != reader.channel.name or writer.deleted or reader.deleted:
            return
        if writer.participant.partition != reader.participant.partition:  # of another job
            return
        is_local = writer.participant is reader.participant
        if is_local and writer.channel.ignore_local:
            return
        pair = Pair(writer, reader)
        for pairs in (self.pairs, writer.pairs, reader.pairs):
            pairs.append(pair)
        self._find(pair, 1e-4 if is_local else FOUND_S)

    def _find(self, pair: Pair, within_s: float) -> None:
        if self.is_up(pair.source, pair.target):  # else when they reach each other again
            self.at(self._rng.uniform(0, within_s), self.writer_finds, pair)
            self.at(self._rng.uniform(0, within_s), self.reader_finds, pair)

    def writer_finds(self, pair: Pair) -> None:
        """Match on the side of the writer, which sends what it has retained."""
        if pair.is_gone or pair.writer_knows or not self.is_up(pair.source, pair.target):
            return
        pair.writer_knows = True
        pair.writer.note_match()
        for sample in list(pair.writer.retained):
            self.send(pair, sample)

    def reader_finds(self, pair: Pair) -> None:
        """Match on the side of the reader."""
        if pair.is_gone or pair.reader_knows or not self.is_up(pair.source, pair.target):
            return
        if pair.was_known and pair.writer_knows:
            if pair.writer.channel.retained:  # it asks for what the writer retains, though it has had it before
                retained = pair.writer.retained
                pair.held = deque([one for one in pair.held if all(one is not other for other in retained)])
                pair.held.extend(retained)
            elif self.chance(0.5):
                pair.held.clear()
        pair.reader_knows = pair.was_known = True
        pair.handle = next(self._numbers)
        pair.reader.note_match()
        self.flush(pair)

    def writer_loses(self, pair: Pair) -> None:
        """End the match on the side of the writer, which sends nothing again."""
        if pair.writer_knows:
            pair.writer_knows = False
            pair.epoch += 1
            pair.held.clear()
            pair.writer.note_match()

    def reader_loses(self, pair: Pair) -> None:
        """End the match on the side of the reader."""
        if pair.reader_knows:
            pair.reader_knows = False
            pair.held.clear()
            pair.reader.note_match()

    def removed(self, endpoint: MemoryWriter | MemoryReader) -> None:
        """Have the other sides of a deleted endpoint know, as far as they can be reached."""
        process = endpoint.participant.process
        for pair in list(endpoint.pairs):
            is_writer = pair.writer is endpoint
            other, lose = (pair.reader, self.reader_loses) if is_writer else (pair.writer, self.writer_loses)
            if other.participant is endpoint.participant:
                lose(pair)
            elif self.is_up(process, other.participant.process):
                sent_s = max(0.0, pair.last_s - now_s())
                self.at(sent_s + self.delay_s(process, other.participant.process), lose, pair)
            else:
                self.at(self.lease_s, lose, pair)
            if other.deleted:
                self._drop(pair)

    def _drop(self, pair: Pair) -> None:
        for pairs in (self.pairs, pair.writer.pairs, pair.reader.pairs):
            if pair in pairs:
                pairs.remove(pair)

    def ended(self, process: VirtualProcess) -> None:
        """Have all lose a dead process: those of its machine soon, as the kernel reports it, others after a lease."""
        for pair in [one for one in self.pairs if any(one.side_of(process))]:
            is_writer, is_reader = pair.side_of(process)
            if is_writer and is_reader:
                continue
            lose = self.reader_loses if is_writer else self.writer_loses
            if pair.source.machine == pair.target.machine:
                self.at(self._rng.uniform(*GOODBYE_S), lose, pair)
            else:
                self.at(self.lease_s - self._rng.uniform(0, min(HEARD_S, self.lease_s / 5)), lose, pair)
        self.participants = [one for one in self.participants if one.process is not process]

    # Samples

    def delay_s(self, one: VirtualProcess, other: VirtualProcess) -> float:
        """Return how long a packet takes now, with those that are lost."""
        delay_s = self.base_s + self._rng.random() * self.jitter_s
        if one.machine == other.machine:
            return delay_s * SAME_MACHINE
        while self.chance(self.loss):
            delay_s += self.resend_s * (0.5 + self._rng.random())
        return delay_s

    def send(self, pair: Pair, sample: Any) -> None:
        """Have a sample arrive some time later, and after those before it."""
        pair.last_s = max(pair.last_s + 1e-9, now_s() + self.delay_s(pair.source, pair.target))
        self._loop.call_at(pair.last_s, self._arrive, pair, sample, pair.epoch, context=OUTSIDE)

    def _arrive(self, pair: Pair, sample: Any, epoch: int) -> None:
        if epoch != pair.epoch or pair.target.dead or pair.reader.deleted:
            return
        if pair.source.dead and now_s() > pair.source.ended_s + LAST_WORDS_S:
            return
        if pair.held or not self._can_take(pair):
            if pair.reader.channel.keep_last:
                pair.held.clear()
            pair.held.append(sample)
        else:
            self._deliver(pair, sample)

    def _can_take(self, pair: Pair) -> bool:
        return pair.reader_knows and self.is_up(pair.source, pair.target) and pair.reader.has_room

    def flush(self, pair: Pair) -> None:
        """Deliver the samples that wait, as far as there is room for them."""
        while pair.held and not pair.source.dead and not pair.target.dead and self._can_take(pair):
            self._deliver(pair, pair.held.popleft())

    def _deliver(self, pair: Pair, sample: Any) -> None:
        self.delivered += 1
        data = getattr(sample, "data", b"")
        about = f"crc32 {zlib.crc32(data):08x}" if data else f"round {sample.round_id}"
        name = pair.reader.channel.name
        text = f"{pair.target.name} receives {name} of {pair.source.name}, {about}"
        self._trace.add(text, is_shown=name != CONTROL)  # these are many, and all are repeated
        pair.reader.put(sample, pair.handle)
