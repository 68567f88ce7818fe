"""Simulate in-network aggregation: the protocols that run on the bus, and its baselines, on a model of a network.

The cores of :mod:`gradbus.runtime.in_network` get their packets and their time from SimPy. A block is one int32, whose
sum is checked at every rank, and has as many bytes on the links as the scenario says. A switch is a node that has all
of a packet before it adds it; it then sends a result once, and the link of each receiver carries it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gradbus.commands.simulate.aggregation_plan import (
    AggregationPlan,
    BlockStream,
    SimulatedNode,
    block_bytes,
    plan_of,
    retransmission_times,
)
from gradbus.commands.simulate.network import NetworkModel
from gradbus.commands.simulate.rank_programs import Deadlock
from gradbus.commands.simulate.scenario import AggregationOutcome, Scenario, SlotUse
from gradbus.commands.simulate.topology import Node
from gradbus.runtime.in_network.packets import AGGREGATOR, WORKERS, Packet, PacketKind


class WrongSum(AssertionError):
    """A rank got a sum that is not the sum, or a switch kept slots that nobody needs: an error of a protocol."""


def simulate_aggregation(scenario: Scenario) -> AggregationOutcome:
    """Run a scenario to its end.

    Raises:
        ValueError: the slots are too few for any window. Deadlock: jobs did not end within ``limit_s``. WrongSum: a
            protocol has an error.
    """
    return _Simulation(scenario).run()


class _Job:
    """One job: what its ranks sum, and when they had it.

    Attributes:
        inputs: int32, shape (N, blocks, 1). sums: of each rank, the same shape.
        iteration: of each rank, that it is in. ended_s: of the last one that each rank has ended.
    """

    def __init__(self, number: int, scenario: Scenario) -> None:
        world, blocks = scenario.fabric.world, scenario.total_blocks
        random = np.random.default_rng((scenario.seed, number))
        self.number = number
        self.starts_s = scenario.starts_s[number] if scenario.starts_s else 0.0
        self.inputs = random.integers(-(1 << 20), 1 << 20, (world, blocks, 1), dtype=np.int32)
        self.sum = self.inputs.sum(axis=0, dtype=np.int32)
        self.sums = np.zeros_like(self.inputs)
        self.iteration = [0] * world
        self.unfinished = [0] * world  # streams, of each rank
        self.ended_s = [0.0] * world


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._plan: AggregationPlan = plan_of(scenario)
        self._network = NetworkModel(self._plan.topology, seed=scenario.seed)
        self._env = self._network.env
        self._jobs = [_Job(number, scenario) for number in range(scenario.jobs)]
        self._running = scenario.jobs * scenario.fabric.world
        self._full = (1 << scenario.fabric.world) - 1
        self._value_bytes = block_bytes(scenario) + scenario.header_bytes
        self._first_wait_s = retransmission_times(scenario).first_s
        self._ways: dict[tuple[SimulatedNode, int, tuple[int, ...]], _Way] = {}
        self._packets: Counter[PacketKind] = Counter()
        self._retransmissions = 0
        self._in_network: set[tuple[int, int, int]] = set()  # stream, group, block
        self._slots: list[SlotUse] = []
        per_gradient_s = scenario.gradient_bytes / scenario.fabric.network.rate_bytes_s
        self._sample_every_s = scenario.iterations * per_gradient_s / scenario.samples

    def run(self) -> AggregationOutcome:
        scenario = self._scenario
        began_s = time.perf_counter()
        for job in self._jobs:
            for rank in range(scenario.fabric.world):
                self._compute(job, rank, after_s=job.starts_s)
        self._sample()
        self._network.run_until(scenario.limit_s)
        if self._running:
            at = {job.number: min(job.iteration) for job in self._jobs}
            raise Deadlock(f"{self._running} ranks have not ended after {scenario.limit_s:g} s; iterations: {at}")
        if left := (self._plan.left or self._plan.taken)():
            raise WrongSum(f"{left} slots are not given back after {scenario.limit_s:g} s")
        return self._outcome(time.perf_counter() - began_s)

    # Ranks

    def _compute(self, job: _Job, rank: int, *, after_s: float = 0.0) -> None:
        scenario = self._scenario
        wait_s = after_s + scenario.compute_s + scenario.late_s.get(rank, 0.0)
        self._network.call_at(self._env.now + wait_s, lambda: self._submit(job, rank))

    def _submit(self, job: _Job, rank: int) -> None:
        streams = [stream for stream in self._plan.streams if stream.job == job.number]
        blocks, sums = job.inputs[rank] + np.int32(job.iteration[rank]), job.sums[rank]
        sums[:] = 0
        job.unfinished[rank] = len(streams)
        if len(streams) == 1:
            self._submit_part(streams[0], rank, blocks, sums)
            return
        for at in range(len(blocks)):  # one after the other, so that all trees are busy from the beginning on
            self._submit_part(streams[at % len(streams)], rank, blocks[at : at + 1], sums[at : at + 1])

    def _submit_part(
        self, stream: BlockStream, rank: int, blocks: npt.NDArray[np.int32], sums: npt.NDArray[np.int32]
    ) -> None:
        shape, member = (-1, stream.group_blocks, 1), stream.members[rank]
        member.is_summing = True
        self._post(member, stream.workers[rank].submit(blocks.reshape(shape), sums.reshape(shape), self._env.now))

    def _look_at(self, stream: BlockStream, rank: int) -> None:
        """Whether a rank that has received something has all sums now."""
        worker, member, job = stream.workers[rank], stream.members[rank], self._jobs[stream.job]
        if not member.is_summing or worker.first_unfinished != worker.end:
            return
        member.is_summing = False
        job.unfinished[rank] -= 1
        if job.unfinished[rank]:
            return
        if (job.sums[rank] != job.sum + np.int32(job.iteration[rank] * stream.world)).any():
            raise WrongSum(f"job {job.number}, rank {rank}, iteration {job.iteration[rank]}: a sum is wrong")
        job.iteration[rank] += 1
        job.ended_s[rank] = self._env.now
        if job.iteration[rank] == self._scenario.iterations:
            self._running -= 1
        else:
            self._compute(job, rank)

    # Packets

    def _post(self, sender: SimulatedNode, packets: Sequence[Packet]) -> None:
        at, count = 0, len(packets)
        while at < count:
            first = packets[at]
            to = [first.destination]
            at += 1
            if sender.multicasts and first.kind is PacketKind.RESULT:
                while at < count and _is_copy(packets[at], first):
                    to.append(packets[at].destination)
                    at += 1
            self._send(sender, first, tuple(to))
        if not sender.wakes:
            self._wake_later(sender)

    def _send(self, sender: SimulatedNode, packet: Packet, to: tuple[int, ...]) -> None:
        self._packets[packet.kind] += 1
        stream = self._plan.streams[packet.job]
        key = (sender, packet.job, to)
        way = self._ways.get(key)
        if way is None:
            way = self._ways[key] = _way(stream, sender, to)
        nodes, receivers = way
        if nodes[0] == sender.node:  # both are in one place
            self._network.call_at(self._env.now, lambda: self._deliver(stream, receivers, packet, nodes))
            return
        size_bytes = self._scenario.ack_bytes
        if packet.values is not None:
            size_bytes = self._value_bytes
            if sender.is_switch and packet.bitmap == self._full and stream.members[packet.source] is sender:
                self._in_network.add((packet.job, packet.group, packet.block))
        self._network.multicast(
            sender.node, nodes, size_bytes, lambda there: self._deliver(stream, receivers, packet, there)
        )

    def _deliver(
        self,
        stream: BlockStream,
        receivers: dict[Node, tuple[int, SimulatedNode]],
        packet: Packet,
        nodes: Sequence[Node],
    ) -> None:
        for node in nodes:
            number, member = receivers[node]
            self._post(member, member.core.receive(packet, self._env.now))
            if 0 <= number < stream.world:
                self._look_at(stream, number)

    # Timers

    def _wake_later(self, member: SimulatedNode) -> None:
        """A timer for each member, not for each packet: it is never later than the first time that a packet waits, so
        that no packet that is sent in the meantime is due before it."""
        deadline_s, now_s = member.core.deadline_s, self._env.now
        if deadline_s is not None:
            member.wakes = True
            at_s = max(now_s, min(deadline_s, now_s + self._first_wait_s))
            self._network.call_at(at_s, lambda: self._wake(member))

    def _wake(self, member: SimulatedNode) -> None:
        member.wakes = False
        deadline_s = member.core.deadline_s
        packets: list[Packet] = []
        if deadline_s is not None and deadline_s <= self._env.now:
            packets = member.core.advance(self._env.now)
            self._retransmissions += len(packets)
        self._post(member, packets)

    # What is found

    def _sample(self) -> None:
        if not self._running:
            return
        self._slots.append(SlotUse(self._env.now, self._plan.taken(), self._plan.slots))
        if len(self._slots) > 2 * self._scenario.samples:  # it takes longer than was expected
            del self._slots[1::2]
            self._sample_every_s *= 2
        self._network.call_at(self._env.now + self._sample_every_s, self._sample)

    def _outcome(self, wall_s: float) -> AggregationOutcome:
        scenario, links = self._scenario, self._plan.topology.links
        job_s = tuple(max(job.ended_s) - job.starts_s for job in self._jobs)
        blocks = scenario.total_blocks * scenario.iterations * scenario.jobs
        taken = [use.taken / use.total for use in self._slots if use.total]
        return AggregationOutcome(
            scenario=scenario,
            job_s=job_s,
            exchange_s=tuple(one / scenario.iterations - scenario.compute_s for one in job_s),
            bytes_by_link={name: link.bytes_carried for name, link in links.items()},
            busy_by_link={name: link.busy_s for name, link in links.items()},
            packets={kind.value: count for kind, count in self._packets.items()},
            retransmissions=self._retransmissions,
            lost=self._network.lost,
            slots=tuple(self._slots),
            slot_share=sum(taken) / len(taken) if taken else 0.0,
            in_network_share=len(self._in_network) / blocks,
            wall_s=wall_s,
        )


_Way: TypeAlias = tuple[tuple[Node, ...], dict[Node, tuple[int, SimulatedNode]]]


def _is_copy(packet: Packet, first: Packet) -> bool:
    """Whether it is the same result, for another receiver."""
    return (
        packet.kind is first.kind
        and (packet.job, packet.group, packet.block) == (first.job, first.group, first.block)
        and first.destination != WORKERS
    )


def _way(stream: BlockStream, sender: SimulatedNode, to: tuple[int, ...]) -> _Way:
    """The nodes that a packet for these numbers goes to, and who is there."""
    if sender.relays:
        to = (AGGREGATOR,)
    elif to == (WORKERS,):
        to = tuple(range(stream.world))
    numbers = [sender.leaf if number == AGGREGATOR else number for number in to]
    receivers = {stream.members[number].node: (number, stream.members[number]) for number in numbers}
    return tuple(receivers), receivers
