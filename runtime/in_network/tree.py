"""A node of a tree or chain of aggregators: adds what its children send, passes the sum on, and the result back.

Slots are given by a fixed plan, as on switches that do not search: group ``g`` has lane ``g mod lanes``, which holds
one block of each of the N that a group has. Fixed lanes cannot deadlock: where lanes are handed out as groups come, one
leaf may hold them for one group and a second leaf for another, and the root gets neither complete.

One node with all workers as children is static in-network aggregation. A tree of leaves and a spine is hierarchical
(HINA). Several trees, each for some of the groups, use several spines (MTINA). A chain is a tree in which each leaf
passes its sum on to the next, and the last one sends the result to its workers and all other leaves (CINA).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gradbus.runtime.in_network.packets import (
    CarrierId,
    Outstanding,
    Packet,
    PacketKind,
    RetransmissionTimes,
    add_checked,
)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Place of a node.

    Attributes:
        node: its number; nodes are numbered after the ranks, from ``world`` on.
        world: ranks of the job. covers: bits of the ranks whose blocks it adds.
        parent: the node that gets its sums; None: it is the root, and makes results.
        result_to: ranks and nodes that get the results from it.
        lanes: groups that it holds at once. group_blocks: blocks of a group; None: one for each rank.
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


@dataclass(slots=True, eq=False)
class _Lane:
    """What a lane holds.

    Attributes:
        group: which one; None: the lane is free. finished: the newest group that was here.
        sums: int32, shape (N, E). contributors: by block, bits of ranks. results: bits of blocks whose sum is of all.
        overflowed: bits of blocks. known: by receiver, bits of the blocks that it has acknowledged.
    """

    sums: npt.NDArray[np.int32]
    group: int | None = None
    finished: int = -1
    contributors: list[int] = field(default_factory=list)
    results: int = 0
    overflowed: int = 0
    known: dict[int, int] = field(default_factory=dict)
    due_s: float = 0.0
    wait_s: float = 0.0


class TreeNode:
    """The protocol of a node, without I/O. Workers are :class:`~.worker.RingWorker` with ``uses_ring=False``.

    Attributes:
        violations: packets that contradict what is there. dropped: those that could not be of this job.
    """

    def __init__(self, config: NodeConfig, memory: npt.NDArray[np.int32] | None = None) -> None:
        """``memory``: int32, shape (lanes, N, E); None: its own."""
        self._config = config
        self._blocks = config.group_blocks or config.world
        self._all_blocks = (1 << self._blocks) - 1
        self._all_ranks = (1 << config.world) - 1
        if memory is None:
            memory = np.zeros((config.lanes, self._blocks, config.block_elems), dtype=np.int32)
        self._lanes = [_Lane(sums) for sums in memory]
        self._outstanding: dict[CarrierId, Outstanding] = {}  # to the parent
        self.violations = 0
        self.dropped = 0

    @property
    def is_idle(self) -> bool:
        """Whether no lane is taken."""
        return not self.lanes_taken

    @property
    def lanes_taken(self) -> int:
        """Number of lanes that hold a group."""
        return sum(lane.group is not None for lane in self._lanes)

    @property
    def deadline_s(self) -> float | None:
        """When :meth:`advance` has something to do."""
        due = [lane.due_s for lane in self._lanes if lane.results]
        return min([*due, *(one.due_s for one in self._outstanding.values())], default=None)

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
            or values != ((config.block_elems,) if needs_values else None)
        ):
            self.dropped += 1
            return []
        lane = self._lanes[packet.group % config.lanes]
        match packet.kind:
            case PacketKind.CONTRIBUTION:
                return list(self._contribution(packet, lane, now_s))
            case PacketKind.RESULT:
                return list(self._result(packet, lane, now_s))
            case PacketKind.PROBE:
                return [_acknowledgement(packet, config.node)]
            case PacketKind.RESULT_ACK:
                self._acknowledged(packet, lane)
            case PacketKind.AGGREGATOR_ACK:
                self._outstanding.pop(packet.carrier, None)
            case _:
                self.dropped += 1
        return []

    def advance(self, now_s: float) -> list[Packet]:
        """Send again what is not acknowledged. A parent that stays silent is for the membership to notice."""
        times = self._config.times
        packets = [one.again(now_s, times) for one in self._outstanding.values() if one.due_s <= now_s]
        for lane in self._lanes:
            if lane.results and lane.due_s <= now_s:
                lane.wait_s = min(2 * lane.wait_s, times.max_s)
                lane.due_s = now_s + lane.wait_s
                for block in _bits(lane.results):
                    missing = [to for to, known in lane.known.items() if not known >> block & 1]
                    packets += self._results(lane, block, missing)
        return packets

    # On the way up

    def _contribution(self, packet: Packet, lane: _Lane, now_s: float) -> Iterator[Packet]:
        config, block, bitmap = self._config, packet.block, packet.bitmap
        assert packet.values is not None
        if packet.group <= lane.finished:
            yield _acknowledgement(packet, config.node)  # its result has been acknowledged by all
            return
        if not bitmap or bitmap & ~config.covers:
            self.violations += 1
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
            overflows = add_checked(lane.sums[block], packet.values)
            lane.overflowed |= (overflows or packet.has_overflowed) << block
            lane.contributors[block] |= bitmap
        yield _acknowledgement(packet, config.node)
        if not bitmap & present and lane.contributors[block] == config.covers:
            yield from self._covered(lane, block, now_s)

    def _covered(self, lane: _Lane, block: int, now_s: float) -> Iterator[Packet]:
        """All blocks of this node's ranks are in the sum."""
        config = self._config
        assert lane.group is not None
        if config.parent is None:
            lane.results |= 1 << block
            lane.due_s = now_s + lane.wait_s
            yield from self._results(lane, block, config.result_to)
            return
        packet = Packet(
            PacketKind.CONTRIBUTION, config.job, config.epoch, lane.group, config.node, config.parent, block,
            bitmap=config.covers,
            values=lane.sums[block].copy(),  # the result comes into the same memory, and this may be sent again
            has_overflowed=bool(lane.overflowed >> block & 1),
        )  # fmt: skip
        self._outstanding[packet.carrier] = Outstanding(packet, now_s + config.times.first_s, config.times.first_s)
        yield packet

    # On the way down

    def _result(self, packet: Packet, lane: _Lane, now_s: float) -> Iterator[Packet]:
        config, block = self._config, packet.block
        if packet.group <= lane.finished:
            yield self._known(packet, self._all_blocks)
            return
        if lane.group != packet.group or lane.contributors[block] != config.covers or config.parent is None:
            self.dropped += 1  # a sum without this node's ranks
            return
        assert packet.values is not None
        if not lane.results >> block & 1:
            lane.results |= 1 << block
            lane.sums[block] = packet.values
            lane.overflowed = lane.overflowed & ~(1 << block) | packet.has_overflowed << block
            lane.due_s = now_s + lane.wait_s
            for carrier in [key for key in self._outstanding if key[1:3] == (packet.group, block)]:
                del self._outstanding[carrier]
            yield from self._results(lane, block, config.result_to)
        yield self._known(packet, lane.results)

    def _acknowledged(self, packet: Packet, lane: _Lane) -> None:
        if lane.group != packet.group or packet.source not in lane.known:
            return
        lane.known[packet.source] |= packet.bitmap & lane.results
        if all(known == self._all_blocks for known in lane.known.values()):
            lane.group, lane.finished, lane.results = None, packet.group, 0

    def _take(self, lane: _Lane, group: int, now_s: float) -> None:
        config = self._config
        lane.group, lane.results, lane.overflowed = group, 0, 0
        lane.sums[:] = 0
        lane.contributors = [0] * self._blocks
        lane.known = dict.fromkeys(config.result_to, 0)
        lane.wait_s = config.times.first_s
        lane.due_s = now_s + lane.wait_s

    def _results(self, lane: _Lane, block: int, to: Sequence[int]) -> Iterator[Packet]:
        config = self._config
        assert lane.group is not None
        for receiver in to:
            # Its values are not a copy: the lane is free when all receivers have told that they know the result, and
            # ignore one that is sent after that.
            yield Packet(
                PacketKind.RESULT, config.job, config.epoch, lane.group, config.node, receiver, block,
                bitmap=self._all_ranks, values=lane.sums[block], has_overflowed=bool(lane.overflowed >> block & 1),
            )  # fmt: skip

    def _known(self, packet: Packet, blocks: int) -> Packet:
        config = self._config
        return Packet(
            PacketKind.RESULT_ACK, config.job, config.epoch, packet.group, config.node, packet.source, bitmap=blocks
        )


def _acknowledgement(packet: Packet, node: int) -> Packet:
    return replace(
        packet, kind=PacketKind.AGGREGATOR_ACK, source=node, destination=packet.source, values=None,
        acked=packet.kind, is_repeated=False, has_overflowed=False,
    )  # fmt: skip


def _bits(number: int) -> list[int]:
    return [at for at in range(number.bit_length()) if number >> at & 1]


# Topologies


def tree(leaves: Sequence[Sequence[int]], *, lanes: int, window_groups: int, **options: Any) -> dict[int, NodeConfig]:
    """Nodes of a tree of two levels, by number: a leaf for each list of ranks, and a root; one leaf is the root itself.

    Raises:
        ValueError: there are too few lanes for the window, or ranks are missing or named twice.
    """
    world = _check_plan(leaves, lanes, window_groups)
    if len(leaves) == 1:
        everyone = tuple(range(world))
        return {world: NodeConfig(world, world, (1 << world) - 1, None, everyone, lanes, **options)}
    root = world + len(leaves)
    nodes = {
        world + at: NodeConfig(world + at, world, _mask(ranks), root, tuple(ranks), lanes, **options)
        for at, ranks in enumerate(leaves)
    }
    return nodes | {root: NodeConfig(root, world, (1 << world) - 1, None, tuple(nodes), lanes, **options)}


def chain(leaves: Sequence[Sequence[int]], *, lanes: int, window_groups: int, **options: Any) -> dict[int, NodeConfig]:
    """Nodes of a chain: each adds its ranks' blocks to the sum of the one before, the last one sends results to its
    own ranks and to all other nodes. Raises ValueError: as :func:`tree` does."""
    world = _check_plan(leaves, lanes, window_groups)
    last, nodes = world + len(leaves) - 1, {}
    covers = 0
    for at, ranks in enumerate(leaves):
        covers |= _mask(ranks)
        node = world + at
        others = tuple(range(world, last)) if node == last else ()
        parent = None if node == last else node + 1
        nodes[node] = NodeConfig(node, world, covers, parent, (*ranks, *others), lanes, **options)
    return nodes


def leaf_of(nodes: Mapping[int, NodeConfig], rank: int) -> int:
    """The node that a rank sends its blocks to."""
    return next(number for number, node in nodes.items() if rank in node.result_to)


def _mask(ranks: Sequence[int]) -> int:
    return sum(1 << rank for rank in ranks)


def _check_plan(leaves: Sequence[Sequence[int]], lanes: int, window_groups: int) -> int:
    ranks = sorted(rank for leaf in leaves for rank in leaf)
    if not ranks or ranks != list(range(len(ranks))) or not all(leaves):
        raise ValueError(f"leaves: expected each rank from 0 on in one of them, and none empty, got {list(leaves)}")
    # A window of groups is being summed, and the results of one more may not be acknowledged by all.
    if window_groups < 1 or lanes < 2 * window_groups:
        raise ValueError(
            f"lanes: a window of {window_groups} groups needs {2 * window_groups} lanes, {len(ranks)} slots each, on "
            f"every node; there are {lanes}. Give the nodes more memory, or make the window or the blocks smaller"
        )
    return len(ranks)
