"""Workers and an aggregator of in-network aggregation in one process, on a network that a seed makes worse.

Packets between two nodes are delivered in an order, or at a time, that a random number decides; they are lost and
repeated. Time passes only when a timer is due. What must hold is checked after every step.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gradbus.runtime.in_network.aggregator import Aggregator
from gradbus.runtime.in_network.packets import AGGREGATOR, CARRIERS, WORKERS, Packet, RetransmissionTimes
from gradbus.runtime.in_network.slots import Allocation, Slots
from gradbus.runtime.in_network.topology import AggregatorTopology, aggregators_of
from gradbus.runtime.in_network.tree import TreeNode
from gradbus.runtime.in_network.worker import PeerSilent, RingWorker, WorkerConfig

TIMES = RetransmissionTimes(first_s=1.0, max_s=8.0, max_tries=500)
Node = tuple[int, int]  # job, rank or AGGREGATOR

FIRST_SEED, RUNS = int(os.environ.get("PROTOCOL_SEED", "0")), int(os.environ.get("PROTOCOL_RUNS", "160"))
"""Runs that tests make, of each kind. For other seeds than those of every day::

    PROTOCOL_SEED=$(date +%s) PROTOCOL_RUNS=6000 pytest tests/runtime/in_network -k "exact_sum and all_"
"""
SEEDS = range(FIRST_SEED, FIRST_SEED + RUNS)

MAX_STEPS = 60_000  # those that end take 900 on average, and at most 8,000


@dataclass(frozen=True)
class Conditions:
    """What a run is made of.

    Attributes:
        worlds: workers of each job. groups: of each job. window: groups in flight.
        is_inline: packets of the ring pass through the aggregator; else workers reserve slots.
        loss, repetition: probability of each, of a packet. eager_timers: probability that a timer comes before packets.
        reorders: packets overtake each other.
        group_blocks: blocks of a group, on a tree; None: as many as workers.
        crashes: so often the aggregator loses all it has, and the run begins another epoch where a worker has got to.
    """

    worlds: Sequence[int] = (3,)
    groups: int = 4
    window: int = 2
    slots: int = 6
    allocation: Allocation = "scan"
    is_inline: bool = True
    loss: float = 0.0
    repetition: float = 0.0
    eager_timers: float = 0.05
    reorders: bool = False
    block_elems: int = 2
    group_blocks: int | None = None
    crashes: int = 0

    @property
    def keeps_order(self) -> bool:
        """Whether packets to the aggregator stay in order and come at most once, as those of one DDS writer do. An
        aggregator in the way of the ring needs that (rule 4); one that the ring goes past does not."""
        return self.is_inline

    @classmethod
    def drawn(cls, seed: int) -> Conditions:
        """Conditions of a seed."""
        draw = random.Random(seed)
        worlds = [draw.choice((2, 3, 4, 5)) for _ in range(draw.choice((1, 1, 2)))]
        return cls(
            worlds=worlds,
            groups=draw.choice((1, 3, 6)),
            window=draw.choice((1, 2, 3)),
            slots=draw.choice((0, 1, max(worlds), max(worlds) + 1, 2 * sum(worlds), 16)),
            allocation=draw.choice(("scan", "hash")),
            is_inline=draw.random() < 0.6,
            loss=draw.choice((0.0, 0.01, 0.1, 0.3, 0.5)),
            repetition=draw.choice((0.0, 0.1, 0.3)),
            eager_timers=draw.choice((0.0, 0.02, 0.2)),
            reorders=draw.random() < 0.5,
            crashes=draw.choice((0, 0, 0, 1, 2)),
        )


class Violation(AssertionError):
    """Something that must always hold does not."""


@dataclass
class PacketNetwork:
    """One run. :meth:`run` returns when all workers of all jobs have all sums and the aggregator has no slot taken.

    Attributes:
        grabs: how often slots were taken. steps: what was delivered, lost, repeated, and timers.
        has_exact_sums: False: the inputs leave int32, so that sums cannot be those of int64, and are not compared.
    """

    conditions: Conditions
    seed: int
    epoch: int = 0
    now_s: float = 0.0
    steps: int = 0
    has_exact_sums: bool = True
    channels: dict[tuple[Node, Node], deque[Packet]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        conditions, self.random = self.conditions, random.Random(self.seed)
        self.slots = Slots(conditions.slots, conditions.block_elems, conditions.allocation)
        self.aggregator = Aggregator(self.slots, block_elems=conditions.block_elems, times=TIMES)
        self.workers: dict[Node, RingWorker] = {}
        self.inputs: list[np.ndarray[Any, Any]] = []
        self.sums: dict[Node, np.ndarray[Any, Any]] = {}
        numbers = np.random.default_rng(self.seed)
        for job, world in enumerate(conditions.worlds):
            self.aggregator.open_job(job, world)
            shape = (world, conditions.groups, conditions.group_blocks or world, conditions.block_elems)
            self.inputs.append(numbers.integers(-(1 << 24), 1 << 24, shape, dtype=np.int32))
            for rank in range(world):
                self.workers[job, rank] = RingWorker(self._config(job, rank))
                self.sums[job, rank] = np.zeros(shape[1:], dtype=np.int32)

    def _config(self, job: int, rank: int, epoch: int = 0) -> WorkerConfig:
        conditions = self.conditions
        return WorkerConfig(
            rank,
            conditions.worlds[job],
            job,
            epoch,
            block_elems=conditions.block_elems,
            window_groups=conditions.window,
            reserves=not conditions.is_inline,
            times=TIMES,
        )

    def run(self) -> None:
        """Raises Violation: something that must hold does not, or the run does not end."""
        try:
            self._run()
        except PeerSilent as error:
            raise Violation(f"seed {self.seed}: {error}") from None

    def _run(self) -> None:
        waiting = list(self.workers)
        self.random.shuffle(waiting)
        crashes_at = {self.random.randrange(20, 600) for _ in range(self.conditions.crashes)}
        while True:
            self.steps += 1
            if self.steps in crashes_at and not waiting:
                self._crash()
            if self.steps > MAX_STEPS:
                raise Violation(f"seed {self.seed}: no end after {MAX_STEPS} steps: {self.state()}")
            if waiting and (self.random.random() < 0.2 or not self.channels):
                self._submit(waiting.pop())
            elif self.channels and (self._is_busy() or self.random.random() >= self.conditions.eager_timers):
                self._move()
            elif not self._fire():
                if self.channels:
                    self._move()
                elif not waiting:
                    break
        self._check_end()

    def state(self) -> str:
        """Where the run stands."""
        return str({node: (worker.first_unfinished, worker.end) for node, worker in self.workers.items()})

    # What happens

    def _crash(self) -> None:
        """The aggregator forgets everything. Packets of before stay under way. All workers of a job agree on the first
        group that one of them does not have, and begin there: the sums of the others are the same bits again."""
        self.epoch += 1
        conditions = self.conditions
        self.slots = Slots(conditions.slots, conditions.block_elems, conditions.allocation)
        self.aggregator = Aggregator(self.slots, block_elems=conditions.block_elems, times=TIMES)
        for job, world in enumerate(conditions.worlds):
            self.aggregator.open_job(job, world, epoch=self.epoch)
            ranks = [(job, rank) for rank in range(world)]
            first = min(self.workers[node].first_unfinished for node in ranks)
            for node in ranks:
                self.workers[node] = RingWorker(self._config(*node, self.epoch), first_group=first)
            for node in ranks:
                rest = self.inputs[job][node[1], first:], self.sums[node][first:]
                self.post(node, self.workers[node].submit(*rest, self.now_s))

    def _submit(self, node: Node) -> None:
        """In two parts, as in two steps of a training."""
        job, rank = node
        blocks, sums, half = self.inputs[job][rank], self.sums[node], self.conditions.groups // 2
        for part in (slice(0, half), slice(half, None)):
            self.post(node, self.workers[node].submit(blocks[part], sums[part], self.now_s))

    def _is_busy(self) -> bool:
        """Whether more packets are under way than a network holds for the time of a timer."""
        return sum(map(len, self.channels.values())) > 8 * len(self.workers)

    def _move(self) -> None:
        """Deliver, lose or repeat a packet."""
        source, to = self.random.choice(list(self.channels))
        queue = self.channels[source, to]
        is_exact = to[1] == AGGREGATOR and self.conditions.keeps_order
        in_order = is_exact or not self.conditions.reorders
        at = 0 if in_order else self.random.randrange(len(queue))
        packet, fate = queue[at], self.random.random()
        if is_exact or fate >= self.conditions.repetition:
            del queue[at]
            if not queue:
                del self.channels[source, to]
        if self.random.random() < self.conditions.loss:
            return
        self.post(to, self._node(to).receive(packet, self.now_s))
        if to not in self.workers:
            self._check_node(to, packet)

    def _fire(self) -> bool:
        """The next timer. Returns whether there is one."""
        due = {node: one.deadline_s for node, one in self._nodes().items() if one.deadline_s is not None}
        if not due:
            return False
        # A timer is not long before others: they tick at one pace.
        node = min(due, key=lambda one: (due[one], self.random.random()))
        self.now_s = max(self.now_s, due[node])
        self.post(node, self._node(node).advance(self.now_s))
        return True

    def post(self, source: Node, packets: Sequence[Packet]) -> None:
        """Put what a node sends on its way."""
        for packet in packets:
            self._check_sent(source, packet)
            for node in self._route(source, packet):
                self.channels.setdefault((source, node), deque()).append(packet)

    # Where packets go

    def _nodes(self) -> dict[Node, Any]:
        return {**self.workers, (0, AGGREGATOR): self.aggregator}

    def _node(self, node: Node) -> Any:
        return self.workers.get(node, self.aggregator)

    def _route(self, source: Node, packet: Packet) -> list[Node]:
        if packet.destination == WORKERS:
            return [node for node in self.workers if node[0] == packet.job]
        passes_through = self.conditions.is_inline and source[1] != AGGREGATOR
        return [(packet.job, AGGREGATOR) if passes_through else (packet.job, packet.destination)]

    # What must hold

    def _is_wrong(self, found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
        """Whether a sum is another one than that of int64, where it can be that one."""
        return self.has_exact_sums and bool((found != expected).any())

    def _check_sent(self, source: Node, packet: Packet) -> None:
        """A sum that is sent is that of its contributors, each one once."""
        if packet.values is None or packet.kind not in CARRIERS:
            return
        blocks = self.inputs[packet.job][:, packet.group, packet.block]
        who = [rank for rank in range(len(blocks)) if packet.bitmap >> rank & 1]
        if self._is_wrong(packet.values, blocks[who].sum(axis=0, dtype=np.int64)):
            raise Violation(f"seed {self.seed}: a carrier of {source} is not the sum of {who}")

    def _check_node(self, node: Node, packet: Packet) -> None:
        """Slots are either held or free; their sums are those of the contributors that are noted beside them."""
        job, group = packet.job, packet.group
        held = sum(len(one.contributors) for one in self.aggregator.held.values())
        if held + self.slots.free != self.conditions.slots:
            raise Violation(f"seed {self.seed}: {held} slots held, {self.slots.free} free of {self.conditions.slots}")
        if self.aggregator.violations:
            raise Violation(f"seed {self.seed}: contributors overlap")
        one = self.aggregator.held.get((job, group))
        for block, contributors in enumerate([] if one is None else one.contributors):
            who = [rank for rank in range(len(one.contributors)) if contributors >> rank & 1]
            expected = self.inputs[job][who, group, block].sum(axis=0, dtype=np.int64)
            if who and self._is_wrong(self.slots[one.base + block], expected):
                raise Violation(f"seed {self.seed}: the slot of group {group}, block {block} is not {who}'s sum")

    def _check_end(self) -> None:
        for (job, rank), worker in self.workers.items():
            if worker.first_unfinished != self.conditions.groups:
                raise Violation(f"seed {self.seed}: rank {rank} of job {job} stopped: {self.state()}")
            expected = self.inputs[job].sum(axis=0, dtype=np.int64)
            if self._is_wrong(self.sums[job, rank], expected):
                raise Violation(f"seed {self.seed}: rank {rank} of job {job} has another sum")
        self._check_free()

    def _check_free(self) -> None:
        if self.slots.free != self.conditions.slots:
            raise Violation(f"seed {self.seed}: {self.conditions.slots - self.slots.free} slots are not given back")


class TreeNetwork(PacketNetwork):
    """The same with several aggregators: the seed draws a topology, and puts ranks below its leaves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        (world,) = self.conditions.worlds
        ranks = list(range(world))
        self.random.shuffle(ranks)
        cuts = sorted(self.random.sample(range(1, world), self.random.randrange(0, world)))
        leaves = [ranks[a:b] for a, b in zip([0, *cuts], [*cuts, world], strict=True)]
        kind = self.random.choice(("single", "tree", "chain"))
        roots = 1 if kind == "chain" else self.random.choice((1, 2, 3))
        self.topology = AggregatorTopology(kind=kind, leaves=1 if kind == "single" else leaves, roots=roots)
        self._connect()

    def _connect(self) -> None:
        """All nodes, with nothing in their lanes."""
        conditions, (world,) = self.conditions, self.conditions.worlds
        configs = self.topology.nodes(
            ["host"] * world,
            window_groups=conditions.window,
            block_elems=conditions.block_elems,
            times=TIMES,
            epoch=self.epoch,
            group_blocks=conditions.group_blocks,
        )
        self.tree = {(0, number): TreeNode(config) for number, config in configs.items()}
        self.aggregators_of = {rank: aggregators_of(configs, rank) for rank in range(world)}

    def _config(self, job: int, rank: int, epoch: int = 0) -> WorkerConfig:
        return replace(super()._config(job, rank, epoch), uses_ring=False, group_blocks=self.conditions.group_blocks)

    def _nodes(self) -> dict[Node, Any]:
        return {**self.workers, **self.tree}

    def _node(self, node: Node) -> Any:
        return self._nodes()[node]

    def _crash(self) -> None:
        """All nodes forget everything, as a job leaves all of them when one is lost."""
        super()._crash()
        self._connect()

    def _route(self, source: Node, packet: Packet) -> list[Node]:
        to = packet.destination
        if to == AGGREGATOR:
            choice = self.aggregators_of[source[1]]
            to = choice[packet.group % len(choice)]
        return [(0, to)]

    def _check_node(self, node: Node, packet: Packet) -> None:
        one = self.tree[node]
        if one.violations:
            raise Violation(f"seed {self.seed}: contributors overlap")
        for lane in one.lanes:
            for block, contributors in enumerate([] if lane.group is None else lane.contributors):
                is_result = lane.results >> block & 1
                who = [rank for rank in self.aggregators_of if is_result or contributors >> rank & 1]
                expected = self.inputs[0][who, lane.group, block].sum(axis=0, dtype=np.int64)
                if who and self._is_wrong(lane.sums[block], expected):
                    raise Violation(f"seed {self.seed}: the lane of group {lane.group}, block {block} is not {who}'s")

    def _check_free(self) -> None:
        if not all(node.is_idle for node in self.tree.values()):
            raise Violation(f"seed {self.seed}: lanes are not given back")
