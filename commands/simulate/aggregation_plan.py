"""Who takes part in a simulated aggregation, and where in the network: ranks, switches that add, parameter servers.

Blocks of a job that go by one tree of switches, or to one server, are a stream: its number stands in packets as their
``job``. A job has one stream, or one for each tree. Ranks are numbered over all jobs; in packets, within their job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gradbus.commands.simulate.baselines.shared_slots import FallbackServer, SharedSwitch, WindowWorker
from gradbus.commands.simulate.baselines.switchml import PoolSwitch, PoolWorker
from gradbus.commands.simulate.scenario import BASELINES, RING_KINDS, Scenario
from gradbus.commands.simulate.topology import LinkSpec, NetworkTopology, Node, Uplink
from gradbus.runtime.in_network.aggregator import Aggregator
from gradbus.runtime.in_network.packets import AGGREGATOR, Packet, RetransmissionTimes
from gradbus.runtime.in_network.slots import Slots
from gradbus.runtime.in_network.tree import NodeConfig, TreeNode
from gradbus.runtime.in_network.worker import RingWorker, WorkerConfig


class ProtocolCore(Protocol):
    """A protocol without I/O. Methods return the packets that are to be sent."""

    @property
    def deadline_s(self) -> float | None:
        """When :meth:`advance` has something to do."""

    def receive(self, packet: Packet, now_s: float) -> list[Packet]:
        """Take a packet."""

    def advance(self, now_s: float) -> list[Packet]:
        """Send again what is due."""


class WorkerCore(ProtocolCore, Protocol):
    """Is the core of a rank. ``first_unfinished``: all groups before it are known. ``end``: groups that were
    submitted."""

    first_unfinished: int
    end: int

    def submit(self, blocks: npt.NDArray[np.int32], out: npt.NDArray[np.int32], now_s: float) -> list[Packet]:
        """Have the next groups summed: int32, shape (groups, blocks of a group, 1)."""


@dataclass(slots=True, eq=False)
class SimulatedNode:
    """One who sends and receives packets.

    Attributes:
        node: where it is in the topology. is_switch: whether it adds in the network. multicasts: whether the network
            copies what it sends to several.
        leaf: number of the node that gets what is for :data:`AGGREGATOR`. relays: whether that gets all it sends.
        is_summing: of a rank: whether it waits for sums. wakes: whether a timer is running.
    """

    core: ProtocolCore
    node: Node
    is_switch: bool = False
    multicasts: bool = False
    leaf: int = AGGREGATOR
    relays: bool = False
    is_summing: bool = False
    wakes: bool = False


@dataclass(slots=True, eq=False)
class BlockStream:
    """Blocks of a job that take one way.

    Attributes:
        blocks: of a rank, for one gradient. group_blocks: of a group; blocks are a multiple of it.
        members: by number: ranks, nodes after them, :data:`AGGREGATOR`.
    """

    number: int
    job: int
    world: int
    blocks: int
    group_blocks: int
    members: dict[int, SimulatedNode] = field(default_factory=dict)
    workers: list[WorkerCore] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class AggregationPlan:
    """All that take part.

    Attributes:
        slots: that switches have. taken: counts those that hold something. left: at the end, those that should not.
    """

    topology: NetworkTopology
    streams: list[BlockStream]
    slots: int
    taken: Callable[[], int]
    left: Callable[[], int] | None = None


def block_bytes(scenario: Scenario) -> int:
    """Return the bytes of a block, rounded up."""
    return -(-scenario.gradient_bytes // scenario.total_blocks)


def retransmission_times(scenario: Scenario) -> RetransmissionTimes:
    """Return those of all protocols of a scenario."""
    fabric = scenario.fabric
    first_s = scenario.retransmit_s
    if first_s is None:
        links = [*fabric.within_host, fabric.network, *([fabric.to_spine] * 2 if fabric.leaves > 1 else [])]
        if scenario.kind == "cina":
            links += [fabric.to_spine] * fabric.leaves
        window = min(scenario.window_blocks or scenario.total_blocks, scenario.total_blocks)
        # So often the bytes of a rank's window may have to pass one link, before an acknowledgement does.
        times = {"ps": fabric.world / scenario.trees, "atp": fabric.world, "esa": fabric.world}.get(scenario.kind, 2)
        slowest = max(1 / link.rate_bytes_s for link in links)
        on_links_s = sum(block_bytes(scenario) / link.rate_bytes_s + link.overhead_s for link in links)
        overhead_s = window * max(link.overhead_s for link in links)
        window_s = times * (window * block_bytes(scenario) * slowest + overhead_s)
        first_s = 3 * (window_s + 2 * (on_links_s + sum(link.latency_s for link in links)))
    return RetransmissionTimes(first_s=first_s, max_s=8 * first_s, max_tries=1_000_000)


def plan_of(scenario: Scenario) -> AggregationPlan:
    """Build all of it. Raises ValueError: slots that are too few for any window."""
    if scenario.kind in RING_KINDS:
        return _ring(scenario)
    return _baseline(scenario) if scenario.kind in BASELINES else _trees(scenario)


# The network


def _topology(
    scenario: Scenario, *, leaves: int, spines: int = 1, servers: int = 0, chained: bool = False
) -> NetworkTopology:
    """Ranks in hosts, hosts at leaves, leaves at spines, servers at the top switch.

    The last rank of a host has the host's link, and those of a host are wired one to the next.
    """
    fabric, count = scenario.fabric, scenario.fabric.ranks_per_host
    uplinks: dict[Node, Uplink] = {}
    wires: dict[tuple[Node, Node], LinkSpec] = {}
    for rank in range(scenario.jobs * fabric.world):
        host = rank % fabric.world // count
        if rank % count == count - 1:
            leaf = leaf_name(host // fabric.hosts_per_leaf if leaves > 1 and fabric.hosts_per_leaf else 0)
            uplinks[rank] = Uplink(leaf, fabric.network, fabric.network)
        else:
            wires[rank, rank + 1] = wires[rank + 1, rank] = fabric.within_host[0]
    for number in range(leaves if leaves > 1 else 0):
        leaf = leaf_name(number)
        uplinks[leaf] = Uplink(spine_name(0), fabric.to_spine, fabric.to_spine)
        for spine in range(1, spines):
            wires[leaf, spine_name(spine)] = wires[spine_name(spine), leaf] = fabric.to_spine
        if chained and number + 1 < leaves:
            wires[leaf, leaf_name(number + 1)] = cina_hop(fabric.to_spine)
    for server in range(servers):
        uplinks[server_name(server)] = Uplink(
            spine_name(0) if leaves > 1 else leaf_name(0), fabric.network, fabric.network
        )
    hosts = tuple(f"host {rank // count}" for rank in range(scenario.jobs * fabric.world))
    return NetworkTopology(uplinks, hosts, wires)


def cina_hop(uplink: LinkSpec) -> LinkSpec:
    """From one leaf to the next one, through the spine, by ports that nothing else uses: a port of a leaf that took
    both the partial sums and the results would carry each gradient twice."""
    return LinkSpec(
        rate_bytes_s=uplink.rate_bytes_s, latency_s=2 * uplink.latency_s, overhead_s=uplink.overhead_s, loss=uplink.loss
    )


def leaf_name(number: int) -> str:
    """Return the name of a leaf switch; the first one is the only one where there is one switch."""
    return f"leaf {number}"


def spine_name(number: int) -> str:
    """Return the name of a spine switch."""
    return f"spine {number}"


def server_name(number: int) -> str:
    """Return the name of a parameter server's host, over all jobs."""
    return f"server {number}"


# Rings


def _ring(scenario: Scenario) -> AggregationPlan:
    fabric, world = scenario.fabric, scenario.fabric.world
    leaves = fabric.leaves if scenario.kind == "ring" else 1
    groups = scenario.total_blocks // world
    window = groups if scenario.window_blocks is None else min(groups, -(-scenario.window_blocks // world))
    count = scenario.slots
    if count is None:
        count = 2 * window * world * scenario.jobs
    slots = Slots(count if scenario.kind != "ring" else 0, 1, scenario.allocation)
    times = retransmission_times(scenario)
    aggregator = Aggregator(slots, block_elems=1, times=times, grabs_late=scenario.grabs_late)
    switch = SimulatedNode(aggregator, leaf_name(0), is_switch=True, multicasts=True)
    streams = []
    for job in range(scenario.jobs):
        aggregator.open_job(job, world)
        stream = BlockStream(job, job, world, scenario.total_blocks, world)
        if scenario.kind != "ring":
            stream.members[AGGREGATOR] = switch
        for rank in range(world):
            core = RingWorker(
                WorkerConfig(
                    rank,
                    world,
                    job,
                    block_elems=1,
                    window_groups=window,
                    times=times,
                    reserves=scenario.kind == "ra-ina-reserve",
                )
            )
            stream.workers.append(core)
            stream.members[rank] = SimulatedNode(core, job * world + rank, relays=scenario.kind == "ra-ina")
        streams.append(stream)
    topology = _topology(scenario, leaves=leaves)
    return AggregationPlan(topology, streams, len(slots.memory), lambda: len(slots.memory) - slots.free)


# Trees, chains and servers


def _trees(scenario: Scenario) -> AggregationPlan:
    fabric, is_ps, trees = scenario.fabric, scenario.kind == "ps", scenario.trees
    leaves = 1 if scenario.kind == "ina" else fabric.leaves
    topology = _topology(
        scenario,
        leaves=leaves,
        spines=1 if is_ps else trees,
        servers=scenario.jobs * trees if is_ps else 0,
        chained=scenario.kind == "cina",
    )
    plan = AggregationPlan(topology, [], 0, lambda: 0)
    nodes: list[TreeNode] = []
    for number in range(scenario.jobs * trees):
        tree = number % trees
        blocks = len(range(tree, scenario.total_blocks, trees))
        stream = BlockStream(number, number // trees, fabric.world, blocks, 1)
        window, lanes = _window(scenario, blocks)
        if is_ps:
            numbers = tuple(range(fabric.world))
            places: _Places = {fabric.world: (None, numbers, (1 << fabric.world) - 1, server_name(number))}
            leaf_of = dict.fromkeys(numbers, fabric.world)
        else:
            places, leaf_of = _places(scenario, leaves, stream.job, tree)
        for at, (parent, result_to, covers, name) in places.items():
            core = TreeNode(
                NodeConfig(
                    at,
                    fabric.world,
                    covers,
                    parent,
                    result_to,
                    lanes,
                    number,
                    block_elems=1,
                    group_blocks=1,
                    times=retransmission_times(scenario),
                )
            )
            is_switch = isinstance(name, str) and not is_ps  # and not a rank that adds in its host
            if is_switch:
                nodes.append(core)
                plan.slots += lanes
            stream.members[at] = SimulatedNode(core, name, is_switch=is_switch, multicasts=is_switch)
        for rank in range(fabric.world):
            worker = RingWorker(
                WorkerConfig(
                    rank,
                    fabric.world,
                    number,
                    block_elems=1,
                    window_groups=window,
                    uses_ring=False,
                    group_blocks=1,
                    times=retransmission_times(scenario),
                )
            )
            stream.workers.append(worker)
            stream.members[rank] = SimulatedNode(worker, stream.job * fabric.world + rank, leaf=leaf_of[rank])
        plan.streams.append(stream)
    plan.taken = lambda: sum(node.lanes_taken for node in nodes)
    return plan


def _window(scenario: Scenario, blocks: int) -> tuple[int, int]:
    """Blocks of a stream that may be under way, and the lanes that a node needs for them: twice as many, as the last
    receiver's acknowledgement of a block may come after the first one's next block."""
    window = min(blocks, -(-(scenario.window_blocks or blocks) // scenario.trees))
    if scenario.slots is not None and scenario.kind != "ps":
        lanes = scenario.slots // (scenario.jobs * scenario.trees)
        window = min(window, lanes // 2)
        if window < 1:
            raise ValueError(
                f"slots: {scenario.jobs} jobs by {scenario.trees} trees need at least 2 each, got {scenario.slots}"
            )
        return window, lanes
    return window, min(2 * window, scenario.iterations * blocks)


# Baselines


def _baseline(scenario: Scenario) -> AggregationPlan:
    world, jobs, blocks = scenario.fabric.world, scenario.jobs, scenario.total_blocks
    window = min(scenario.window_blocks or blocks, blocks)
    slots = 2 * window * jobs if scenario.slots is None else scenario.slots
    worlds = dict.fromkeys(range(jobs), world)
    has_servers = scenario.kind != "switchml"
    switch: PoolSwitch | SharedSwitch
    if has_servers:
        switch = SharedSwitch(worlds, slots, preempts=scenario.kind == "esa")
    else:
        window = min(window, slots // (2 * jobs))
        if window < 1:
            raise ValueError(f"slots: {jobs} jobs need at least 2 each, got {scenario.slots}")
        switch = PoolSwitch(worlds, window)
    times = retransmission_times(scenario)
    topology = _topology(scenario, leaves=1, servers=jobs if has_servers else 0)
    plan = AggregationPlan(topology, [], slots, lambda: switch.taken)
    if isinstance(switch, PoolSwitch):
        plan.left = lambda: switch.unfinished  # the last sums stay where they are
    for job in range(jobs):
        stream = BlockStream(job, job, world, blocks, 1)
        stream.members[AGGREGATOR] = SimulatedNode(switch, leaf_name(0), is_switch=True, multicasts=True)
        if has_servers:
            stream.members[world] = SimulatedNode(FallbackServer(world), server_name(job), relays=True)
        for rank in range(world):
            worker = (WindowWorker if has_servers else PoolWorker)(rank, job, window, times)
            stream.workers.append(worker)
            stream.members[rank] = SimulatedNode(worker, job * world + rank)
        plan.streams.append(stream)
    return plan


_Places = dict[int, tuple[int | None, tuple[int, ...], int, Node]]
"""By number: the parent, who gets the results, the ranks below as bits, and the place in the topology."""


def _places(scenario: Scenario, leaves: int, job: int, tree: int) -> tuple[_Places, dict[int, int]]:
    """The nodes of one tree or chain, and to which one each rank sends."""
    fabric, world, count = scenario.fabric, scenario.fabric.world, scenario.fabric.ranks_per_host
    spine = world + leaves
    per_leaf = count * fabric.hosts_per_leaf if leaves > 1 and fabric.hosts_per_leaf else world
    below = [range(at, min(at + per_leaf, world)) for at in range(0, world, per_leaf)]
    places: _Places = {}
    leaf_of: dict[int, int] = {}
    covered = 0
    for leaf, ranks in enumerate(below):
        number = world + leaf
        tops = [
            _chain_in_host(range(first, first + count), number, spine + 1, job * world, places, leaf_of)
            for first in ranks[::count]
        ]
        covers, covered = _mask(ranks), covered | _mask(ranks)
        parent: int | None = None
        others: Iterable[int] = ()
        if leaves > 1 and scenario.kind == "cina":
            covers, parent = covered, None if leaf == leaves - 1 else number + 1
            others = range(world, number) if parent is None else ()
        elif leaves > 1:
            parent = spine
        places[number] = (parent, (*tops, *others), covers, leaf_name(leaf))
    if leaves > 1 and scenario.kind != "cina":
        places[spine] = (None, tuple(range(world, spine)), _mask(range(world)), spine_name(tree))
    return places, leaf_of


def _chain_in_host(
    ranks: Sequence[int], leaf: int, numbers: int, first_node: int, places: _Places, leaf_of: dict[int, int]
) -> int:
    """Each rank of a host adds to the sum of the one before it. Returns the number of the one above all."""
    before = ranks[0]
    leaf_of[before] = leaf
    for rank in ranks[1:]:
        node = numbers + rank
        if before == ranks[0]:
            leaf_of[before] = node
        else:
            places[before] = (node, *places[before][1:])
        leaf_of[rank] = node
        places[node] = (leaf, (rank, before), _mask(range(ranks[0], rank + 1)), first_node + rank)
        before = node
    return before


def _mask(ranks: Iterable[int]) -> int:
    return sum(1 << rank for rank in ranks)
