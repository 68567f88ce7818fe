"""An aggregator of jobs on the bus.

    actor = AggregatorActor(AggregatorConfig(slots=4096))
    async with gradbus.connect(job="mnist") as bus:
        await actor.serve(bus, world=4)                   # until its workers have left; several jobs at once

It has a number of slots, each of one block of int32 entries, which the jobs that it serves share. What it does with
packets is :mod:`gradbus.runtime.in_network`; this is the actor around it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.collectives import Group, join_group
from gradbus.runtime.collectives.in_network import GROUP
from gradbus.runtime.collectives.packet_streams import PacketStreams
from gradbus.runtime.in_network.aggregator import Aggregator
from gradbus.runtime.in_network.options import InNetworkPlan
from gradbus.runtime.in_network.packets import WORKERS, Packet, RetransmissionTimes
from gradbus.runtime.in_network.slots import Allocation, Slots
from gradbus.runtime.in_network.tree import TreeNode, tree
from gradbus.runtime.logs import get_logger

log = get_logger("aggregator")


@dataclass(frozen=True, slots=True)
class AggregatorConfig:
    """Settings of an aggregator.

    Attributes:
        slots: how many blocks it holds, of all jobs together. block_elems: int32 entries of a block.
        allocation: ``scan`` takes the first free slots in a row, ``hash`` one place or none, as a switch does.
        max_jobs: that are served at once. max_groups_per_job: groups of one job that hold slots.
        retransmit_s: after which workers are reminded.
    """

    slots: int = 1024
    block_elems: int = 1 << 16
    allocation: Allocation = "scan"
    max_jobs: int = 16
    max_groups_per_job: int = 1 << 20
    retransmit_s: float = 0.5


class AggregatorActor:
    """Serves jobs. All methods are for one event loop."""

    def __init__(self, config: AggregatorConfig | None = None) -> None:
        """An aggregator that serves no job yet."""
        self._config = config = config or AggregatorConfig()
        self._times = RetransmissionTimes(config.retransmit_s, max(2.0, config.retransmit_s))
        self._slots = Slots(config.slots, config.block_elems, config.allocation)
        self._numbers = itertools.count(1)
        self._jobs = 0

    @property
    def free_slots(self) -> int:
        """Slots that hold nothing."""
        return self._slots.free

    async def serve(self, bus: Bus, world: int, *, timeout_s: float = 60.0) -> None:
        """Serve the job of this bus until all of its workers have left.

        Args:
            world: its workers, which are ranks 0 to ``world`` - 1 of the group that they and this actor form.
            timeout_s: how long to wait for them.

        Raises:
            BarrierTimeout: a worker has not come. BusError: as of the bus.
        """
        async with join_group(
            bus, rank=world, world=world + 1, name=GROUP, timeout_s=timeout_s, stall_warning_s=0.0
        ) as network:
            plans = await network.all_gather_object("plans", {})
            number = next(self._numbers)
            try:
                protocol, release = self._open(number, world, InNetworkPlan.model_validate(plans[0]))
            except ValueError as error:
                reason = str(error)
                log.warning("job refused", job=bus.job, world=world, reason=reason)
                await network.broadcast_object("answer", {"refused": reason[:300]}, root=world)
                return
            server = _JobServer(network, number, protocol, self._config.block_elems)
            try:
                log.info("job", job=bus.job, world=world, plan=plans[0])
                await network.broadcast_object("answer", {"job": number}, root=world)
                await server.run()
            finally:
                release()
                log.info(
                    "job ended", job=bus.job, free_slots=self._slots.free, dropped=server.dropped + protocol.dropped,
                    violations=protocol.violations,
                )  # fmt: skip

    def _open(self, number: int, world: int, plan: InNetworkPlan) -> tuple[Aggregator | TreeNode, Callable[[], None]]:
        """What serves a job, and what ends that. Raises ValueError: it cannot be served; with the numbers."""
        config = self._config
        if plan.block_elems != config.block_elems:
            raise ValueError(f"block_elems is {config.block_elems} here, the workers have {plan.block_elems}")
        if self._jobs >= config.max_jobs:
            raise ValueError(f"{self._jobs} jobs are served already, max_jobs is {config.max_jobs}")
        protocol: Aggregator | TreeNode
        if plan.route == "ina":
            protocol, end = self._reserve_lanes(number, world, plan.window_groups)
        else:
            protocol = Aggregator(
                self._slots, block_elems=config.block_elems, max_groups_per_job=config.max_groups_per_job,
                times=self._times,
            )  # fmt: skip
            protocol.open_job(number, world)
            end = partial(protocol.close_job, number)
        self._jobs += 1

        def release() -> None:
            self._jobs -= 1
            end()

        return protocol, release

    def _reserve_lanes(self, number: int, world: int, window: int) -> tuple[TreeNode, partial[None]]:
        lanes, count = 2 * window, 2 * window * world
        if (base := self._slots.allocate((number,), count)) is None:
            raise ValueError(
                f"a window of {window} groups of {world} workers needs {count} slots in a row, {self._slots.free} of "
                f"{self._config.slots} are free. Make window_groups smaller, or give the aggregator more slots"
            )
        (node,) = tree([range(world)], lanes=lanes, window_groups=window).values()
        node = replace(node, job=number, block_elems=self._config.block_elems, times=self._times)
        memory = self._slots.memory[base : base + count].reshape(lanes, world, -1)
        return TreeNode(node, memory), partial(self._slots.release, base, count)


class _JobServer:
    """One job on the bus: packets come, the protocol answers, and time-outs.

    Attributes:
        dropped: packets of another job or worker than that of their stream.
    """

    def __init__(self, network: Group, number: int, protocol: Aggregator | TreeNode, block_elems: int) -> None:
        self._number = number
        self.dropped = 0
        self._world = network.rank
        self._protocol = protocol
        self._streams = PacketStreams(
            network, range(network.rank), block_elems=block_elems, receive=self._receive, lost=self._lost
        )
        self._left: set[int] = set()
        self._ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Until all workers have left."""
        async with self._streams:
            try:
                await self._ended.wait()
            finally:
                if self._timer is not None:
                    self._timer.cancel()

    def _receive(self, rank: int, packets: list[Packet]) -> None:
        now_s = asyncio.get_running_loop().time()
        for packet in packets:
            if (packet.job, packet.source) == (self._number, rank):  # a worker speaks for itself alone
                self._post(self._protocol.receive(packet, now_s))
            else:
                self.dropped += 1
        self._set_timer()

    def _lost(self, rank: int, error: Exception) -> None:
        self._left.add(rank)
        if len(self._left) == self._world:
            self._ended.set()

    def _post(self, packets: Sequence[Packet]) -> None:
        for packet in packets:
            for rank in range(self._world) if packet.destination == WORKERS else (packet.destination,):
                if 0 <= rank < self._world:
                    self._streams.post(rank, packet)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_s = self._protocol.deadline_s
        self._timer = None if due_s is None else asyncio.get_running_loop().call_at(due_s, self._repeat)

    def _repeat(self) -> None:
        self._post(self._protocol.advance(asyncio.get_running_loop().time()))
        self._set_timer()
