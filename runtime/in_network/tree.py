"""A node of a tree or chain of aggregators: adds what its children send, passes the sum on, and the result back.

Slots are given by a fixed plan, as on switches that do not search: group ``g`` has lane ``g mod lanes``, which holds
one block of each of the N that a group has. Fixed lanes cannot deadlock: where lanes are handed out as groups come, one
leaf may hold them for one group and a second leaf for another, and the root gets neither complete.

What is connected with what is :mod:`~.topology`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_

import numpy as np
import numpy.typing as npt

from gradbus.runtime.in_network.packets import (
    Packet,
    PacketKind,
    RetransmissionTimes,
    Unacknowledged,
    add_checked,
)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Place of a node.

    Attributes:
        node: its number; nodes are numbered after the ranks, from ``world`` on.
        world: ranks of the job. covers: bits of the ranks whose blocks it adds.
        parent: the node that gets its sums; None: it is a root, and makes results. Of several trees: group g goes to
            the node ``parent`` + g mod ``trees``.
        result_to: ranks and nodes that get the results from it.
        lanes: groups that it holds at once. group_blocks: blocks of a group; None: one for each rank.
        children: ranks and nodes that send it their sums, and bits of the ranks whose blocks are in these; what does
            not fit that is refused, as are results of other nodes. None: it is not checked.
        results_from: the node that sends it results; None: its parents do.
        trees: how many share the groups. tree: of a root, which of them it is; None: this node is in all.
    """

    node: int
    world: int
    covers: int
    parent: int | None
    result_to: tuple[int, ...]
    lanes: int
    job: int = 0
    epoch: int = 0
    block_elems: int = 64
    group_blocks: int | None = None
    times: RetransmissionTimes = field(default_factory=RetransmissionTimes)
    children: Mapping[int, int] | None = None
    results_from: int | None = None
    trees: int = 1
    tree: int | None = None

    @property
    def parents(self) -> range:
        """Nodes that get its sums."""
        return range(0) if self.parent is None else range(self.parent, self.parent + self.trees)

    @property
    def above(self) -> set[int]:
        """Nodes that get its sums, or send it results."""
        return {*self.parents, *(() if self.results_from is None else (self.results_from,))}


@dataclass(slots=True, eq=False)
class _Lane:
    """Holds what a lane holds.

    Attributes:
        group: which one; None: the lane is free. finished: the newest group that was here.
        sums: int32, shape (N, E). contributors: by block, bits of ranks. results: bits of blocks whose sum is of all.
        overflowed: bits of blocks. known: by receiver, bits of the blocks that it has acknowledged.
        unknowing: number of receivers that have not acknowledged all. progress_s: when something came that was new.
    """

    sums: npt.NDArray[np.int32]
    group: int | None = None
    finished: int = -1
    contributors: list[int] = field(default_factory=list)
    results: int = 0
    overflowed: int = 0
    known: dict[int, int] = field(default_factory=dict)
    unknowing: int = 0
    due_s: float = 0.0
    wait_s: float = 0.0
    progress_s: float = 0.0


class TreeNode:
    """The protocol of a node, without I/O. Workers are :class:`~.worker.RingWorker` with ``uses_ring=False``.

    Attributes:
        violations: packets that contradict what is there. dropped: those that could not be of this job.
        lanes: for the groups that are in the window.
    """

    def __init__(self, config: NodeConfig, memory: npt.NDArray[np.int32] | None = None) -> None:
        """``memory``: int32, shape (lanes, N, E); None: its own."""
        self._config = config
        self._blocks = config.group_blocks or config.world
        self._all_blocks = (1 << self._blocks) - 1
        self._all_ranks = (1 << config.world) - 1
        if memory is None:
            memory = np.zeros((config.lanes, self._blocks, config.block_elems), dtype=np.int32)
        self.lanes = [_Lane(sums) for sums in memory]
        self._unacknowledged = Unacknowledged(config.times)  # by the parents
        self._probes: dict[int, Packet] = {}  # of children, by child, until all parents have answered
        self._asked: set[int] = set()  # parents that have not
        self.violations = 0
        self.dropped = 0

    @property
    def is_idle(self) -> bool:
        """Whether no lane is taken."""
        return not self.lanes_taken

    @property
    def lanes_taken(self) -> int:
        """Number of lanes that hold a group."""
        return sum(lane.group is not None for lane in self.lanes)

    @property
    def deadline_s(self) -> float | None:
        """When :meth:`advance` has something to do."""
        due = [lane.due_s for lane in self.lanes if lane.results]
        above_s = self._unacknowledged.deadline_s
        return min(due if above_s is None else [*due, above_s], default=None)

    def receive(self, packet: Packet, now_s: float) -> list[Packet]:
        """Take a packet for this node."""
        config = self._config
        values = None if packet.values is None else packet.values.shape
        needs_values = packet.kind in (PacketKind.CONTRIBUTION, PacketKind.RESULT)
        if (
            (packet.job, packet.epoch) != (config.job, config.epoch)
            or not 0 <= packet.block < self._blocks
            or not 0 <= packet.bitmap <= (self._all_blocks if packet.kind is PacketKind.RESULT_ACK else self._all_ranks)
            or packet.group < 0
            or (config.tree not in (None, packet.group % config.trees) and packet.kind is not PacketKind.PROBE)
            or values != ((config.block_elems,) if needs_values else None)
        ):
            self.dropped += 1
            return []
        lane = self.lanes[(packet.group if config.tree is None else packet.group // config.trees) % config.lanes]
        match packet.kind:
            case PacketKind.CONTRIBUTION:
                return list(self._contribution(packet, lane, now_s))
            case PacketKind.RESULT:
                return list(self._result(packet, lane, now_s))
            case PacketKind.PROBE:
                return self._probe(packet)
            case PacketKind.RESULT_ACK:
                self._acknowledged(packet, lane, now_s)
            case PacketKind.AGGREGATOR_ACK if packet.acked is PacketKind.PROBE:
                return self._probe_answered(packet.source)
            case PacketKind.AGGREGATOR_ACK:
                self._unacknowledged.acknowledge(packet.carrier)
            case _:
                self.dropped += 1
        return []

    def advance(self, now_s: float) -> list[Packet]:
        """Send again what is not acknowledged. A parent that stays silent is for workers to notice, by their probes."""
        times = self._config.times
        packets = [one.again(now_s, times) for one in self._unacknowledged.due(now_s)]
        for lane in self.lanes:
            if lane.results and lane.due_s <= now_s:
                lane.wait_s = min(2 * lane.wait_s, times.max_s)
                lane.due_s = now_s + lane.wait_s
                for block in _bits(lane.results):
                    missing = [to for to, known in lane.known.items() if not known >> block & 1]
                    packets += (replace(one, is_repeated=True) for one in self._results(lane, block, missing))
        return packets

    def stalled_groups(self, now_s: float, lease_s: float) -> dict[int, list[int]]:
        """Groups that hold a lane and got nothing new for this long, and the ranks and nodes that they wait for. Those
        that wait for a parent are the parent's to give up."""
        return {
            lane.group: waits_for
            for lane in self.lanes
            if lane.group is not None and now_s - lane.progress_s >= lease_s and (waits_for := self._waits_for(lane))
        }

    def _waits_for(self, lane: _Lane) -> list[int]:
        covers = self._config.covers
        missing = reduce(or_, (covers & ~bits for bits in lane.contributors))
        if missing:
            below = self._config.children or {rank: 1 << rank for rank in range(self._config.world)}
            return sorted(child for child, ranks in below.items() if ranks & missing)
        return [to for to, known in lane.known.items() if lane.results & ~known]

    # Whether the way up is open

    def _probe(self, packet: Packet) -> list[Packet]:
        """A child asks whether this node and those above are there: its answer comes when theirs have."""
        config = self._config
        if config.children is not None and packet.source not in config.children:
            self.violations += 1
            return []
        if not config.parents:
            return [packet.acknowledgement(PacketKind.AGGREGATOR_ACK, config.node)]
        self._probes[packet.source] = packet
        self._asked = self._asked or set(config.parents)
        return [replace(packet, source=config.node, destination=parent) for parent in self._asked]

    def _probe_answered(self, parent: int) -> list[Packet]:
        self._asked.discard(parent)
        if self._asked:
            return []
        answers = [
            packet.acknowledgement(PacketKind.AGGREGATOR_ACK, self._config.node) for packet in self._probes.values()
        ]
        self._probes.clear()
        return answers

    # On the way up

    def _contribution(self, packet: Packet, lane: _Lane, now_s: float) -> Iterator[Packet]:
        config, block, bitmap = self._config, packet.block, packet.bitmap
        assert packet.values is not None
        if packet.group <= lane.finished:
            yield packet.acknowledgement(
                PacketKind.AGGREGATOR_ACK, config.node
            )  # its result has been acknowledged by all
            return
        if not bitmap or bitmap & ~config.covers:
            self.violations += 1
            return
        if config.children is not None and config.children.get(packet.source) != bitmap:
            self.violations += 1  # nobody adds for others
            return
        if lane.group is None:
            self._take(lane, packet.group, now_s)
        if lane.group != packet.group:
            return  # the lane is not free yet: the sender tries again
        present = lane.contributors[block]
        if bitmap & present not in (0, bitmap):
            self.violations += 1
            return
        if not bitmap & present:
            overflows = False
            if present:
                overflows = add_checked(lane.sums[block], packet.values)
            else:  # what the lane had before is of another group
                lane.sums[block] = packet.values
            lane.overflowed |= (overflows or packet.has_overflowed) << block
            lane.contributors[block] |= bitmap
            self._has_progressed(lane, now_s)
        yield packet.acknowledgement(PacketKind.AGGREGATOR_ACK, config.node)
        if not bitmap & present and lane.contributors[block] == config.covers:
            yield from self._covered(lane, block, now_s)

    def _covered(self, lane: _Lane, block: int, now_s: float) -> Iterator[Packet]:
        """All blocks of this node's ranks are in the sum."""
        config = self._config
        assert lane.group is not None
        if not config.parents:
            lane.results |= 1 << block
            lane.due_s = now_s + lane.wait_s
            yield from self._results(lane, block, config.result_to)
            return
        parent = config.parents[lane.group % config.trees]
        packet = Packet(
            PacketKind.CONTRIBUTION,
            config.job,
            config.epoch,
            lane.group,
            config.node,
            parent,
            block,
            bitmap=config.covers,
            # Not a copy: when the result comes into the same memory, the parent has this, and ignores it from then on.
            values=lane.sums[block],
            has_overflowed=bool(lane.overflowed >> block & 1),
        )
        self._unacknowledged.add(packet, now_s)
        yield packet

    # On the way down

    def _result(self, packet: Packet, lane: _Lane, now_s: float) -> Iterator[Packet]:
        config, block = self._config, packet.block
        from_ = config.parents if config.results_from is None else (config.results_from,)
        if config.children is not None and packet.source not in from_:
            self.violations += 1
            return
        if packet.group <= lane.finished:
            yield self._known(packet, self._all_blocks)
            return
        if lane.group != packet.group or lane.contributors[block] != config.covers:
            self.dropped += 1  # a sum without this node's ranks
            return
        assert packet.values is not None
        if not lane.results >> block & 1:
            lane.results |= 1 << block
            lane.sums[block] = packet.values
            lane.overflowed = lane.overflowed & ~(1 << block) | packet.has_overflowed << block
            self._has_progressed(lane, now_s)
            lane.due_s = now_s + lane.wait_s
            self._unacknowledged.settle(packet.group, block)
            yield from self._results(lane, block, config.result_to)
        yield self._known(packet, lane.results)

    def _acknowledged(self, packet: Packet, lane: _Lane, now_s: float) -> None:
        if lane.group != packet.group or packet.source not in lane.known:
            return
        if packet.bitmap & lane.results & ~lane.known[packet.source]:
            lane.known[packet.source] |= packet.bitmap & lane.results
            self._has_progressed(lane, now_s)
            lane.unknowing -= lane.known[packet.source] == self._all_blocks
        if not lane.unknowing:
            lane.group, lane.finished, lane.results = None, packet.group, 0

    def _take(self, lane: _Lane, group: int, now_s: float) -> None:
        config = self._config
        lane.group, lane.results, lane.overflowed = group, 0, 0
        lane.contributors = [0] * self._blocks
        lane.known, lane.unknowing = dict.fromkeys(config.result_to, 0), len(config.result_to)
        lane.wait_s = config.times.first_s
        lane.due_s, lane.progress_s = now_s + lane.wait_s, now_s

    def _has_progressed(self, lane: _Lane, now_s: float) -> None:
        """Begin the wait anew, as for another lack than the one that has doubled it."""
        lane.progress_s, lane.wait_s = now_s, self._config.times.first_s
        lane.due_s = min(lane.due_s, now_s + lane.wait_s)

    def _results(self, lane: _Lane, block: int, to: Sequence[int]) -> Iterator[Packet]:
        config = self._config
        assert lane.group is not None
        for receiver in to:
            # Its values are not a copy: the lane is free when all receivers have told that they know the result, and
            # ignore one that is sent after that.
            yield Packet(
                PacketKind.RESULT,
                config.job,
                config.epoch,
                lane.group,
                config.node,
                receiver,
                block,
                bitmap=self._all_ranks,
                values=lane.sums[block],
                has_overflowed=bool(lane.overflowed >> block & 1),
            )

    def _known(self, packet: Packet, blocks: int) -> Packet:
        config = self._config
        return Packet(
            PacketKind.RESULT_ACK, config.job, config.epoch, packet.group, config.node, packet.source, bitmap=blocks
        )


def _bits(number: int) -> list[int]:
    return [at for at in range(number.bit_length()) if number >> at & 1]
