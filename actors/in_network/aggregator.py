"""An aggregator of jobs on the bus, alone or one of several.

    actor = AggregatorActor(AggregatorConfig(slots=4096))
    async with gradbus.connect(job="mnist") as bus:
        await actor.serve(bus, world=4)                   # until its workers have left; several jobs at once

It has a number of slots, each of one block of int32 entries, which the jobs that it serves share. Which aggregators a
job has, and which of its workers send to which, comes from the workers. What it does with packets is
:mod:`gradbus.runtime.in_network`; this is the actor around it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.collectives import Group, join_group
from gradbus.runtime.collectives.aggregators import GROUP, describe_missing
from gradbus.runtime.collectives.membership import DONE
from gradbus.runtime.collectives.packet_streams import PacketStreams, payload_limit
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.in_network.aggregator import Aggregator
from gradbus.runtime.in_network.options import InNetworkPlan
from gradbus.runtime.in_network.packets import WORKERS, Packet, RetransmissionTimes
from gradbus.runtime.in_network.slots import Allocation, Slots
from gradbus.runtime.in_network.topology import neighbours
from gradbus.runtime.in_network.tree import NodeConfig, TreeNode
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import GroupHello
from gradbus.runtime.wire.messages import Control

CHECK_S = 5.0  # how often leases and dropped packets are looked at, at least

log = get_logger("aggregator")


@dataclass(frozen=True, slots=True)
class AggregatorConfig:
    """Settings of an aggregator.

    Attributes:
        slots: how many blocks it holds, of all jobs together. block_elems: int32 entries of a block.
        allocation: ``scan`` takes the first free slots in a row, ``hash`` one place or none, as a switch does.
        max_jobs: that are served at once.
        max_groups_per_job: groups of one job that hold slots by route ra-ina, at most; never more than the two windows
            that its workers have under way. Of these a worker may ask for its part, rounded up.
        retransmit_s: after which workers are reminded.
        lease_s: a job is given up when a slot of it got nothing new for so long. Its workers go on without aggregators.
        report_s: how often the log has a line on each job.
    """

    slots: int = 1024
    block_elems: int = 1 << 16
    allocation: Allocation = "scan"
    max_jobs: int = 16
    max_groups_per_job: int = 1 << 20
    retransmit_s: float = 0.5
    lease_s: float = 60.0
    report_s: float = 60.0


class AggregatorActor:
    """Serves jobs. All methods are for one event loop.

    Attributes:
        expired: jobs that were given up, as a slot of theirs was never finished.
    """

    def __init__(self, config: AggregatorConfig | None = None) -> None:
        """An aggregator that serves no job yet. Raises ConfigError: there is no memory for its slots."""
        self._config = config = config or AggregatorConfig()
        self._times = RetransmissionTimes(config.retransmit_s, max(1.0, config.retransmit_s))
        try:
            self._slots = Slots(config.slots, config.block_elems, config.allocation)
        except (MemoryError, ValueError):  # the latter of what no address reaches
            size = config.slots * config.block_elems * 4 / (1 << 30)
            raise ConfigError(
                f"aggregator.slots is {config.slots}, of aggregator.block_elems {config.block_elems} each: {size:,.1f} "
                f"GiB, for which this machine has no memory. Take fewer slots, or smaller blocks, also at the workers"
            ) from None
        self._numbers = itertools.count(1)
        self._jobs = 0
        self.expired = 0

    @property
    def free_slots(self) -> int:
        """Slots that hold nothing."""
        return self._slots.free

    async def serve(
        self, bus: Bus, world: int, *, node: int = 0, nodes: int = 1, timeout_s: float = 60.0, is_idle: bool = False
    ) -> None:
        """Serve the job of this bus until all of its workers have left.

        Args:
            world: its workers, which are ranks 0 to ``world`` - 1 of the group that they and the aggregators form.
            node: number of this aggregator. nodes: how many the job has.
            timeout_s: how long to wait for all of them.
            is_idle: there may be no worker for long: ``timeout_s`` begins when the first one comes.

        Raises:
            BarrierTimeout: a worker or another aggregator has not come. BusError: as of the bus.
            ConfigError: another member has another number of workers or aggregators.
        """
        if is_idle:
            await _until_a_worker_comes(bus, world)
        try:
            joining = join_group(
                bus,
                rank=world + node,
                world=world + nodes,
                name=GROUP,
                timeout_s=timeout_s,
                stall_warning_s=0.0,
                max_payload_bytes=payload_limit(self._config.block_elems),
                describe_missing=describe_missing(world, nodes),
            )
            async with joining as network:
                await self._serve(bus.job, network, world, node)
        except ConfigError as error:
            raise ConfigError(
                f"job {bus.job}: {error}. This group has the workers and their aggregators, {world} + {nodes} here: "
                f"compare aggregator.world and aggregator.nodes with the workers' world and topology"
            ) from None

    async def _serve(self, job: str, network: Group, world: int, node: int) -> None:
        plans = await network.all_gather_object("plans", None)
        with ExitStack() as reserved:
            offer: dict[str, Any] = {"job": next(self._numbers)}
            try:
                plan = InNetworkPlan.model_validate(plans[0])
                config = self._place(plan, network, world, node)
                base = self._reserve(config, plan.route, offer["job"], reserved)
            except ValueError as error:
                offer = {"refused": str(error)[:400]}
            offers: list[Any] = await network.all_gather_object("answers", offer)
            refused = {
                at: one for at, one in enumerate(offers[world:]) if not isinstance(one, dict) or "job" not in one
            }
            if refused:
                log.warning("job refused", job=job, world=world, node=node, reasons=refused)
                return
            number = offers[world]["job"]  # the first aggregator's: packets have it on all of them
            config = replace(config, job=number)
            protocol = self._protocol(config, plan, base, reserved)
            server = _JobServer(network, config, protocol, self._config, loss=plan.loss)
            log.info("job", job=job, world=world, node=node, neighbours=neighbours(config), plan=plans[0])
            try:
                network.farewell = await server.run(job)
                self.expired += server.is_expired
            finally:
                reserved.close()
                log.info("job ended", job=job, node=node, free_slots=self._slots.free, **server.totals())

    def _place(self, plan: InNetworkPlan, network: Group, world: int, node: int) -> NodeConfig:
        """This aggregator's place in the job's topology. Raises ValueError: it has none."""
        config, count = self._config, network.world - world
        if plan.topology.num_nodes != count:
            raise ValueError(
                f"{count} aggregators are configured here, the workers' topology has {plan.topology.num_nodes}: "
                f"{plan.topology.model_dump()}"
            )
        if plan.block_elems != config.block_elems:
            raise ValueError(f"block_elems is {config.block_elems} here, the workers have {plan.block_elems}")
        if plan.route != "ina" and count > 1:
            raise ValueError(f"route {plan.route} has one aggregator, not {count}")
        hosts = [member.node for member in network.members[:world]]
        nodes = plan.topology.nodes(
            hosts, window_groups=plan.window_groups, block_elems=config.block_elems, times=self._times
        )
        return nodes[world + node]

    def _reserve(self, node: NodeConfig, route: str, number: int, reserved: ExitStack) -> int:
        """Give a job what it has as long as it lasts. Returns its first slot. Raises ValueError: there is no room."""
        config, count = self._config, node.lanes * node.world
        if self._jobs >= config.max_jobs:
            raise ValueError(f"{self._jobs} jobs are served already, max_jobs is {config.max_jobs}")
        base = 0
        if route == "ina":
            found = self._slots.allocate((number,), count)  # its own: jobs of one size hash to several places
            if found is None:
                raise ValueError(
                    f"{node.lanes} groups of {node.world} workers need {count} slots in a row, {self._slots.free} of "
                    f"{config.slots} are free. Make window_groups smaller, or give the aggregator more slots"
                )
            base = found
            reserved.callback(self._slots.release, base, count)
        self._jobs += 1
        reserved.callback(self._job_has_ended)
        return base

    def _job_has_ended(self) -> None:
        self._jobs -= 1

    def _protocol(self, node: NodeConfig, plan: InNetworkPlan, base: int, reserved: ExitStack) -> Aggregator | TreeNode:
        if plan.route == "ina":
            lanes = self._slots.memory[base : base + node.lanes * node.world].reshape(node.lanes, node.world, -1)
            return TreeNode(node, lanes)
        config = self._config
        protocol = Aggregator(
            self._slots,
            block_elems=config.block_elems,
            times=self._times,
            max_groups_per_job=min(config.max_groups_per_job, 2 * plan.window_groups),
        )
        protocol.open_job(node.job, node.world)
        reserved.callback(protocol.close_job, node.job)
        return protocol


async def _until_a_worker_comes(bus: Bus, world: int) -> None:
    with bus.subscribe(Control) as inbox:
        bus.open_writer(Control)  # so that workers find this process, and name what it has configured otherwise
        while True:
            message = await inbox.get()
            if isinstance(message, Control) and message.sender < world:
                body = message.body
                if isinstance(body, GroupHello) and body.group == GROUP:  # repeated, until its group is complete
                    return


class _JobServer:
    """One job on the bus: packets come, the protocol answers, and time-outs.

    Attributes:
        dropped: packets of another job or member than that of their stream. is_expired: its lease has ended.
    """

    def __init__(
        self,
        network: Group,
        node: NodeConfig,
        protocol: Aggregator | TreeNode,
        config: AggregatorConfig,
        *,
        loss: float,
    ) -> None:
        self._node = node
        self._config = config
        self._protocol = protocol
        self._streams = PacketStreams(
            network, neighbours(node), block_elems=config.block_elems, receive=self._receive, lost=self._lost, loss=loss
        )
        self._left: set[int] = set()
        self._ended = asyncio.Event()
        self._farewell = DONE
        self._timer: asyncio.TimerHandle | None = None
        self._packets = 0
        self.dropped = 0
        self.is_expired = False

    def totals(self) -> dict[str, int]:
        """Return what the log says of the job."""
        streams, protocol, traffic = self._streams, self._protocol, self._streams.traffic
        return {
            "packets": self._packets,
            "bytes_in": traffic.received_bytes,
            "bytes_out": traffic.sent_bytes,
            "dropped": self.dropped + protocol.dropped,
            "violations": protocol.violations,
            "dropped_on_purpose": streams.lost_packets,
        }

    async def run(self, job: str) -> str:
        """Until all members below this one have left, or one above it, or its lease has ended. Returns the reason that
        the others get."""
        async with self._streams:
            watching = asyncio.create_task(self._watch(job), name="gradbus-aggregator-watch")
            try:
                await self._ended.wait()
            finally:
                watching.cancel()
                await asyncio.wait([watching])
                if self._timer is not None:
                    self._timer.cancel()
        return self._farewell

    async def _watch(self, job: str) -> None:
        """Lines of the log while the job goes on, and the lease of its slots."""
        config, loop = self._config, asyncio.get_running_loop()
        reported_s, reported = loop.time(), 0
        while True:
            await asyncio.sleep(min(CHECK_S, config.lease_s / 4, config.report_s))
            now_s, totals = loop.time(), self.totals()
            wrong = totals["dropped"] + totals["violations"]
            if wrong > reported:
                log.warning("packets dropped", job=job, count=wrong - reported, **totals)
                reported = wrong
            if now_s >= reported_s + config.report_s:
                log.info("job goes on", job=job, **totals)
                reported_s = now_s
            stalled = self._protocol.stalled_groups(now_s, config.lease_s)
            if stalled:
                self.is_expired = True
                group, waits_for = next(iter(stalled.items()))
                log.warning(
                    "slots freed",
                    job=job,
                    groups=len(stalled),
                    first=group,
                    waits_for=waits_for,
                    reason=f"nothing new for {config.lease_s:g} s",
                    effect="the workers go on without aggregators",
                )
                self._end(f"gave up group {group}, which got nothing new of {waits_for} for {config.lease_s:g} s")
                return

    def _receive(self, member: int, packets: list[Packet]) -> None:
        now_s = asyncio.get_running_loop().time()
        self._packets += len(packets)
        for packet in packets:
            if (packet.job, packet.source) == (self._node.job, member):  # a member speaks for itself alone
                self._post(self._protocol.receive(packet, now_s))
            else:
                self.dropped += 1
        self._set_timer()

    def _lost(self, member: int, error: Exception) -> None:
        self._left.add(member)
        if member in self._node.above:
            self._end(f"lost aggregator node {member - self._node.world} above it: {error}"[:300])
        elif self._left.issuperset(self._node.children or ()):
            self._end(DONE)

    def _end(self, farewell: str) -> None:
        if not self._ended.is_set():
            self._farewell = farewell
            self._ended.set()

    def _post(self, packets: Sequence[Packet]) -> None:
        for packet in packets:
            for to in range(self._node.world) if packet.destination == WORKERS else (packet.destination,):
                self._streams.post(to, packet)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_s = self._protocol.deadline_s
        self._timer = None if due_s is None else asyncio.get_running_loop().call_at(due_s, self._repeat)

    def _repeat(self) -> None:
        self._post(self._protocol.advance(asyncio.get_running_loop().time()))
        self._set_timer()
