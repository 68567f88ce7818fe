"""A worker of RA-INA: sums blocks around a ring, and through an aggregator where that has room for them.

Each group of blocks starts on the ring. Where the aggregator gets slots for it, it announces that (START), and every
worker sends to it what it has not put into a partial sum yet. The sums are of int32, so the results are the same bits
whichever way was taken.

Rules that keep a block from being added twice:

1. A worker puts its block into one carrier, and never again: carriers of one block have disjoint contributors.
2. A carrier that was sent before is not added by the aggregator, unless it waits for just this one.
3. Acknowledgements name the carrier with its contributors.
4. Packets from a worker to the aggregator stay in order.
5. Acknowledgements of results are cumulative, and waits double.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gradbus.runtime.in_network.packets import (
    AGGREGATOR,
    CARRIERS,
    RING_KINDS,
    Packet,
    PacketKind,
    RetransmissionTimes,
    Sum,
    Unacknowledged,
    add_checked,
)


class PeerSilent(Exception):
    """A packet was sent ``max_tries`` times without an acknowledgement. ``node``: that it was for."""

    def __init__(self, node: int, packet: Packet) -> None:
        self.node = node
        name = "the aggregator" if node == AGGREGATOR else f"rank {node}"
        super().__init__(f"{name} does not acknowledge {packet.kind.value}, group {packet.group}, block {packet.block}")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of a worker, equal on all ranks but for ``rank``.

    Attributes:
        block_elems: entries of a block.
        window_groups: groups that are in flight at once.
        reserves: whether workers ask the aggregator for slots. False: packets of the ring pass through the aggregator,
            which takes what it has room for.
        uses_ring: False: all blocks go to the aggregator, or the leaf of a tree of them, from the start.
        group_blocks: blocks of a group; None: one for each rank, which a ring needs.
        covers: bits of the ranks whose blocks this worker's blocks are the sum of; None: of its own rank. A ring needs
            its own.
    """

    rank: int
    world: int
    job: int = 0
    epoch: int = 0
    block_elems: int = 64
    window_groups: int = 4
    reserves: bool = False
    uses_ring: bool = True
    group_blocks: int | None = None
    covers: int | None = None
    times: RetransmissionTimes = field(default_factory=RetransmissionTimes)


@dataclass(slots=True, eq=False)
class _Group:
    """A group on this worker.

    Attributes:
        own: this rank's blocks, and out: where the sums go, int32, shape (N, E); None before it starts.
        placed: bits of the blocks that this rank has put into a carrier.
        seen: bits of the blocks whose partial sum has come around the ring. early: those that came before the start.
        sums: what is known, by block. known: bits of these blocks.
    """

    own: npt.NDArray[np.int32] | None = None
    out: npt.NDArray[np.int32] | None = None
    is_started: bool = False
    is_at_aggregator: bool = False
    placed: int = 0
    seen: int = 0
    early: list[Packet] = field(default_factory=list)
    sums: dict[int, Sum] = field(default_factory=dict)
    known: int = 0

    def add_known(self, block: int, sum_: Sum) -> None:
        """The sum of a block is known."""
        assert self.out is not None
        self.out[block] = sum_.values  # the packet's stay as they are: it may have to be sent on
        self.sums[block] = sum_
        self.known |= 1 << block


class RingWorker:
    """The protocol of one worker, without I/O: every method returns the packets that are to be sent.

        packets = worker.submit(blocks, sums, now_s)      # int32, shape (groups, N, E)
        packets = worker.receive(packet, now_s)
        packets = worker.advance(now_s)                   # at ``deadline_s``
        if worker.first_unfinished == worker.end: ...     # ``sums`` is complete

    Ranks submit the same number of groups, one after the other. A rank that has finished goes on receiving, as others
    may still need it: until :attr:`is_idle`, and for as long as others have not finished.

    Attributes:
        first_unfinished: all groups before it are known. end: groups that were submitted.
        overflowed: groups with a sum that has left the range of int32, the same on all ranks.
        dropped: packets that could not be of this run.
    """

    def __init__(self, config: WorkerConfig, *, first_group: int = 0) -> None:
        """``first_group``: where all ranks begin."""
        if not 0 <= config.rank < config.world or config.window_groups < 1 or config.block_elems < 1:
            raise ValueError(f"a worker needs 0 <= rank < world, a window and a block of at least 1, got {config}")
        self._blocks = config.group_blocks or config.world
        if config.uses_ring and self._blocks != config.world:
            raise ValueError(f"a group of a ring has a block for each of {config.world} ranks, not {self._blocks}")
        self._covers = config.covers or 1 << config.rank
        if config.uses_ring and self._covers != 1 << config.rank:
            raise ValueError(f"a rank of a ring adds its own blocks, got those of ranks {config.covers:#b}")
        self._config = config
        self._groups: dict[int, _Group] = {}
        self._unacknowledged = Unacknowledged(config.times)
        self._all = (1 << config.world) - 1
        self._all_blocks = (1 << self._blocks) - 1
        self._next_to_start = first_group
        self._batches: deque[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int32]]] = deque()  # first group, arrays
        self.first_unfinished = first_group
        self.end = first_group
        self.overflowed: set[int] = set()
        self.dropped = 0

    @property
    def is_idle(self) -> bool:
        """Whether it waits for no acknowledgement."""
        return not self._unacknowledged

    @property
    def deadline_s(self) -> float | None:
        """When :meth:`advance` has something to do; None: when something has been received."""
        return self._unacknowledged.deadline_s

    def submit(self, blocks: npt.NDArray[np.int32], out: npt.NDArray[np.int32], now_s: float) -> list[Packet]:
        """Have the next groups summed.

        Args:
            blocks: int32, shape (groups, N, E), not to be changed before they are done. N: blocks of a group.
            out: memory of the same shape for the sums.

        Raises:
            ValueError: another shape or dtype.
        """
        shape = (len(blocks), self._blocks, self._config.block_elems)
        for name, array in (("blocks", blocks), ("out", out)):
            if array.dtype != np.int32 or array.shape != shape:
                raise ValueError(f"{name}: expected int32 of shape {shape}, got {array.dtype} {array.shape}")
        if len(blocks):
            self._batches.append((self.end, blocks, out))
            self.end += len(blocks)
        return list(self._start_groups(now_s))

    def receive(self, packet: Packet, now_s: float) -> list[Packet]:
        """Take a packet that was for this worker."""
        if not self._is_possible(packet):
            self.dropped += 1
            return []
        if packet.group < self.first_unfinished and packet.group not in self._groups:
            return list(self._answer_for_finished(packet))
        answers = list(self._dispatch(packet, self._group(packet.group), now_s))
        return [*answers, *self._start_groups(now_s)]

    def _is_possible(self, packet: Packet) -> bool:
        config = self._config
        values = None if packet.values is None else packet.values.shape
        needs_values = packet.kind in CARRIERS or packet.kind is PacketKind.RESULT
        return (
            (packet.job, packet.epoch) == (config.job, config.epoch)
            and 0 <= packet.block < self._blocks
            and 0 <= packet.step < config.world
            and 0 <= packet.bitmap <= self._all
            and packet.source >= AGGREGATOR  # nodes of a tree are numbered after the ranks
            # The others are at most one window ahead of this rank, and so start groups of up to two.
            and 0 <= packet.group < self.first_unfinished + 2 * config.window_groups
            and values == ((config.block_elems,) if needs_values else None)
        )

    def advance(self, now_s: float) -> list[Packet]:
        """Send again what is due. Raises PeerSilent: a packet was sent too often."""
        times, packets = self._config.times, []
        for one in self._unacknowledged.due(now_s):
            if one.tries >= times.max_tries:
                raise PeerSilent(one.packet.destination, one.packet)
            packets.append(one.again(now_s, times))
        return packets

    # Groups

    def _group(self, number: int) -> _Group:
        if number not in self._groups:
            self._groups[number] = _Group(is_at_aggregator=not self._config.uses_ring)
        return self._groups[number]

    def _start_groups(self, now_s: float) -> Iterator[Packet]:
        """Begin what the window allows, and end what is known."""
        config = self._config
        while True:
            while self.first_unfinished < self._next_to_start and self._is_finished(self.first_unfinished):
                if any(sum_.has_overflowed for sum_ in self._groups[self.first_unfinished].sums.values()):
                    self.overflowed.add(self.first_unfinished)
                # Who is a window behind may still need what this rank knows. Nobody is further behind.
                self._groups.pop(self.first_unfinished - config.window_groups, None)
                self.first_unfinished += 1
            number = self._next_to_start
            if number >= self.end or number >= self.first_unfinished + config.window_groups:
                return
            self._next_to_start += 1
            yield from self._start(number, now_s)

    def _is_finished(self, number: int) -> bool:
        return self._groups[number].known == self._all_blocks

    def _start(self, number: int, now_s: float) -> Iterator[Packet]:
        config, group = self._config, self._group(number)
        group.is_started = True
        group.own, group.out = self._arrays(number)
        if config.world == 1:
            for block in range(self._blocks):
                group.add_known(block, Sum(group.own[block]))
            return
        if group.is_at_aggregator:
            yield from self._contribute(number, group, now_s)
        else:
            group.placed |= 1 << config.rank
            own = Sum(group.own[config.rank])
            yield self._send(PacketKind.REDUCE, number, config.rank, 1 << config.rank, own, now_s)
            if config.reserves and number % config.world == config.rank:
                yield self._plain(PacketKind.RESERVE, number, AGGREGATOR)
        early, group.early = group.early, []
        for packet in early:
            yield from self._pass_on(packet, group, now_s)

    def _arrays(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """This rank's blocks of the next group to start, and where its sums go."""
        first, blocks, out = self._batches[0]
        if number - first + 1 == len(blocks):
            self._batches.popleft()
        return blocks[number - first], out[number - first]

    def _contribute(self, number: int, group: _Group, now_s: float) -> Iterator[Packet]:
        """The aggregator has slots for the group: it gets what is in no carrier yet, and the sums that are known."""
        config = self._config
        assert group.own is not None
        for block in range(self._blocks):
            if block in group.sums:
                if config.rank == (block - 1) % config.world:  # where the block's way around the ring has ended
                    yield self._send(PacketKind.CONTRIBUTION, number, block, self._all, group.sums[block], now_s)
            elif not group.placed >> block & 1:
                group.placed |= 1 << block
                own = Sum(group.own[block])
                yield self._send(PacketKind.CONTRIBUTION, number, block, self._covers, own, now_s)
        if group.sums:
            yield self._result_ack(number, group)

    # What comes

    def _dispatch(self, packet: Packet, group: _Group, now_s: float) -> Iterator[Packet]:
        match packet.kind:
            case PacketKind.REDUCE:
                yield packet.acknowledgement(PacketKind.RING_ACK, self._config.rank)
                if not group.seen >> packet.block & 1 and packet.block not in group.sums:
                    group.seen |= 1 << packet.block
                    if group.is_started:
                        yield from self._pass_on(packet, group, now_s)
                    else:
                        group.early.append(packet)
            case PacketKind.GATHER:
                yield packet.acknowledgement(PacketKind.RING_ACK, self._config.rank)
                if packet.block not in group.sums and group.is_started:
                    yield from self._gathered(packet, group, now_s)
            case PacketKind.START:
                yield from self._at_aggregator(packet.group, group, now_s)
            case PacketKind.RESULT:
                yield from self._result(packet, group, now_s)
            case PacketKind.RING_ACK:
                self._unacknowledged.acknowledge(packet.carrier)
            case PacketKind.AGGREGATOR_ACK:
                self._unacknowledged.acknowledge(packet.carrier)
                if not group.is_at_aggregator and packet.acked is not PacketKind.PROBE:
                    yield from self._at_aggregator(packet.group, group, now_s)
            case _:
                self.dropped += 1

    def _pass_on(self, packet: Packet, group: _Group, now_s: float) -> Iterator[Packet]:
        """A partial sum has come around the ring: add this rank's block, unless it is in another carrier already."""
        config, number, block = self._config, packet.group, packet.block
        assert packet.values is not None
        assert group.own is not None
        values, bitmap, overflowed = packet.values, packet.bitmap, packet.has_overflowed
        if not group.placed >> block & 1:
            group.placed |= 1 << block
            values = values.copy()  # that of the packet is the sender's
            overflowed |= add_checked(values, group.own[block])
            bitmap |= 1 << config.rank
        sum_ = Sum(values, overflowed)
        if bitmap == self._all:
            group.add_known(block, sum_)
        if group.is_at_aggregator:
            yield self._send(PacketKind.CONTRIBUTION, number, block, bitmap, sum_, now_s)
            if bitmap == self._all:
                yield self._result_ack(number, group)
        elif bitmap == self._all:
            yield self._send(PacketKind.GATHER, number, block, bitmap, sum_, now_s)
        else:
            yield self._send(PacketKind.REDUCE, number, block, bitmap, sum_, now_s, step=packet.step + 1)

    def _gathered(self, packet: Packet, group: _Group, now_s: float) -> Iterator[Packet]:
        assert packet.values is not None
        number, block, sum_ = packet.group, packet.block, Sum(packet.values, packet.has_overflowed)
        group.add_known(block, sum_)
        if group.is_at_aggregator:
            yield self._result_ack(number, group)
        elif packet.step < self._config.world - 2:
            yield self._send(PacketKind.GATHER, number, block, self._all, sum_, now_s, step=packet.step + 1)

    def _at_aggregator(self, number: int, group: _Group, now_s: float) -> Iterator[Packet]:
        if group.is_at_aggregator:
            yield self._result_ack(number, group)
            return
        group.is_at_aggregator = True
        if group.is_started:
            yield from self._contribute(number, group, now_s)

    def _result(self, packet: Packet, group: _Group, now_s: float) -> Iterator[Packet]:
        """The aggregator has a full sum. It has slots for the group then, even where that announcement was lost."""
        if packet.values is None or not group.is_started:
            self.dropped += 1  # a sum without this rank's block
            return
        if packet.block not in group.sums:
            group.add_known(packet.block, Sum(packet.values, packet.has_overflowed))
        self._unacknowledged.settle(packet.group, packet.block)
        if group.is_at_aggregator:
            yield self._result_ack(packet.group, group)
        else:
            yield from self._at_aggregator(packet.group, group, now_s)

    def _answer_for_finished(self, packet: Packet) -> Iterator[Packet]:
        """All sums of the group have been known here for long, and so everywhere."""
        if packet.kind in RING_KINDS:
            yield packet.acknowledgement(PacketKind.RING_ACK, self._config.rank)
        elif packet.kind in (PacketKind.START, PacketKind.RESULT):
            yield self._plain(PacketKind.RESULT_ACK, packet.group, AGGREGATOR, bitmap=self._all_blocks)
        elif packet.kind in (PacketKind.RING_ACK, PacketKind.AGGREGATOR_ACK):
            self._unacknowledged.acknowledge(packet.carrier)

    # What goes

    def _send(
        self, kind: PacketKind, group: int, block: int, bitmap: int, sum_: Sum, now_s: float, *, step: int = 0
    ) -> Packet:
        """A carrier, which is sent until it is acknowledged."""
        config = self._config
        to = AGGREGATOR if kind is PacketKind.CONTRIBUTION else (config.rank + 1) % config.world
        packet = Packet(
            kind,
            config.job,
            config.epoch,
            group,
            config.rank,
            to,
            block,
            step,
            bitmap,
            sum_.values,
            has_overflowed=sum_.has_overflowed,
        )
        self._unacknowledged.add(packet, now_s)
        return packet

    def _plain(self, kind: PacketKind, group: int, to: int, *, bitmap: int = 0) -> Packet:
        config = self._config
        return Packet(kind, config.job, config.epoch, group, config.rank, to, bitmap=bitmap)

    def _result_ack(self, number: int, group: _Group) -> Packet:
        return self._plain(PacketKind.RESULT_ACK, number, AGGREGATOR, bitmap=group.known)
