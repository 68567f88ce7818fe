"""A worker at the aggregators of its job: it joins them, sends its blocks, and takes the sums.

Workers and aggregators are one group, in which the aggregators are ranks N, N + 1, ... It ends for a worker when one
member is lost; what is done then is for :mod:`~.in_network`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from torch import Tensor

from gradbus.runtime.collectives.group import Group, join_group
from gradbus.runtime.collectives.membership import DescribeMissing
from gradbus.runtime.collectives.packet_streams import PacketStreams, payload_limit
from gradbus.runtime.errors import BarrierTimeout, CollectiveError, ConfigError
from gradbus.runtime.in_network.options import InNetworkOptions
from gradbus.runtime.in_network.packets import AGGREGATOR, Packet, PacketKind, RetransmissionTimes
from gradbus.runtime.in_network.topology import aggregators_of
from gradbus.runtime.in_network.worker import RingWorker, WorkerConfig

GROUP = "in_network"

_FROM_NEIGHBOURS = frozenset({PacketKind.REDUCE, PacketKind.GATHER, PacketKind.RING_ACK})


class AggregatorLost(CollectiveError):
    """An aggregator is gone, silent, or has told a wrong sum. Sums are made without any from now on."""


class AggregatorSession:
    """From joining the aggregators to leaving them. Made by :meth:`join`.

    Attributes:
        streams: what is sent to whom. protocol: this worker's.
        chain: ranks of this worker's host that add up before the last of them sends, this one among them, in the order
            of the sum. groups_begun: of blocks, of all sums so far; the same on all workers.
        failure: why it is over; None: it is not. failed: is set with it.
        dropped: packets that a member sent which has none of that kind to send.
    """

    streams: PacketStreams

    def __init__(self, workers: Group, network: Group, options: InNetworkOptions, *, job: int) -> None:
        """``job``: its number on the aggregators. Raises ValueError: the topology does not fit the workers."""
        self._network = network
        self._options = options
        self._job = job
        self._rank, self._world = workers.rank, workers.world
        self._give_up_s = workers.timeout_s
        hosts = [member.node for member in network.members[: self._world]]
        nodes = options.topology.nodes(hosts, window_groups=options.window_groups)
        self._aggregators = aggregators_of(nodes, self._rank)  # none, where another rank of the host sends
        self.chain = next(ranks for ranks in options.topology.host_chains(hosts) if self._rank in ranks)
        self.groups_begun = 0
        self.protocol = RingWorker(
            WorkerConfig(
                self._rank,
                self._world,
                job,
                block_elems=options.block_elems,
                window_groups=options.window_groups,
                reserves=options.route == "ra-ina",
                uses_ring=options.route != "ina",
                covers=sum(1 << rank for rank in self.chain),
                # How long to go on is for the probes to say: an aggregator that waits for a late worker takes no more.
                times=RetransmissionTimes(options.retransmit_s, max(1.0, options.retransmit_s), max_tries=1 << 30),
            )
        )
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._started_s = self._now_s()
        self._answered_s = dict.fromkeys(self._aggregators, self._started_s)
        self._joined = AsyncExitStack()
        self.failure: Exception | None = None
        self.failed = asyncio.Event()
        self.dropped = 0

    @classmethod
    async def join(cls, workers: Group, options: InNetworkOptions, *, timeout_s: float) -> AggregatorSession:
        """Join, with all workers.

        Raises:
            ConfigError: workers have different options, or an aggregator refuses them, with its numbers.
            BarrierTimeout: some worker or aggregator has not come. CollectiveError: one was lost meanwhile.
        """
        rank, world = workers.rank, workers.world
        if options.route != "ina" and options.topology.within_host != "none":
            raise ConfigError(
                f"in-network aggregation: within_host is for route ina, got route {options.route}, in which each rank "
                f"sends its own blocks"
            )
        try:
            options.topology.nodes(["unknown"] * world, window_groups=options.window_groups)
        except ValueError as error:
            if options.topology.leaves_by == "rank":  # else it depends on the hosts
                raise ConfigError(f"in-network aggregation of {world} workers: {error}") from None
        async with AsyncExitStack() as stack:
            network = await _form(stack, workers, options, timeout_s)
            plans: list[dict[str, Any]] = await network.all_gather_object("plans", options.plan())
            answers: list[Any] = await network.all_gather_object("answers", None)
            for other, plan in enumerate(plans[:world]):
                if plan != plans[0]:
                    raise ConfigError(f"in-network aggregation: rank 0 has {plans[0]}, rank {other} {plan}")
            for at, answer in enumerate(answers[world:]):
                if not isinstance(answer, dict) or not isinstance(answer.get("job"), int):
                    refused = answer.get("refused") if isinstance(answer, dict) else answer
                    raise ConfigError(f"the aggregator refuses (node {at}): {str(refused)[:400]}")
            session = cls(workers, network, options, job=answers[world]["job"])
            ring = {(rank - 1) % world, (rank + 1) % world} - {rank} if options.route == "ra-ina" else set()
            session.streams = PacketStreams(
                # Of all aggregators, also those that it sends nothing to: so it learns at once when one dies.
                network,
                [*sorted(ring), *range(world, network.world)],
                block_elems=options.block_elems,
                receive=session.receive,
                lost=session.lost,
                loss=options.loss,
            )
            await stack.enter_async_context(session.streams)
            session._joined = stack.pop_all()
        return session

    def begin(self, groups: int) -> None:
        """Begin a sum of so many groups of blocks. Every worker calls it, whether it sends blocks or not."""
        self.groups_begun += groups
        self.protocol.overflowed.clear()
        self._started_s = self._now_s()
        self._answered_s = dict.fromkeys(self._aggregators, self._started_s)

    def submit(self, blocks: Tensor, total: Tensor) -> None:
        """Send blocks, int32, shape (groups, N, E); the sums of all workers' will be in ``total``. Not to be changed
        before :meth:`finish`. Blocks of one sum may come in several calls, cut at other places on other workers."""
        if self.failure is None:
            self._send(self.protocol.submit(blocks.numpy(), total.numpy(), self._now_s()))

    async def finish(self) -> None:
        """Wait until the sums of all blocks submitted are there, or :attr:`failure` says why they will not be.

        A worker that is late is waited for as in any collective: what counts is whether the aggregators answer.
        """
        protocol, timeout_s = self.protocol, self._options.timeout_s
        while protocol.first_unfinished < protocol.end and self.failure is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout_s / 4):
                    await self._changed.wait()
            except TimeoutError:
                self._check_members(self._started_s)

    def _check_members(self, started_s: float) -> None:
        """Whether to go on waiting; and ask the aggregators whether they are there, and those above them."""
        now_s, lost = self._now_s(), self._network.lost
        silent = [node for node, answered_s in self._answered_s.items() if now_s - answered_s > self._options.timeout_s]
        if lost:  # a worker that does without aggregators leaves this group
            self.lost(*next((rank, CollectiveError(why)) for rank, why in lost.items()))
        elif silent:
            names = ", ".join(map(self._name, silent))
            self._fail(f"no answer of {names} or of those above within {self._options.timeout_s:g} s")
        elif now_s - started_s > self._give_up_s:  # who is missing the workers' own exchange tells
            self._fail(f"no sum within {self._give_up_s:g} s")
        else:
            for node in self._aggregators:
                self.streams.post(node, Packet(PacketKind.PROBE, self._job, 0, 0, self._rank, AGGREGATOR))

    def receive(self, source: int, packets: list[Packet]) -> None:
        """Take packets of a member of the group."""
        is_aggregator = source in self._answered_s
        now_s = self._now_s()
        if is_aggregator:
            self._answered_s[source] = now_s
        before = self.protocol.first_unfinished
        for packet in packets:
            if is_aggregator or (packet.source == source < self._world and packet.kind in _FROM_NEIGHBOURS):
                self._send(self.protocol.receive(packet, now_s))
            else:
                self.dropped += 1
        if self.protocol.first_unfinished != before:
            self._changed.set()

    def lost(self, peer: int, error: Exception) -> None:
        """A member of the group is gone."""
        self._fail(f"{self._name(peer)}: {self._network.lost.get(peer, error)}")

    async def leave(self) -> None:
        """Leave the aggregators: their slots are free then, and no packet that comes late changes anything."""
        self._fail("left")
        joined, self._joined = self._joined, AsyncExitStack()
        await joined.aclose()

    def _name(self, member: int) -> str:
        return f"rank {member}" if member < self._world else f"aggregator node {member - self._world}"

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or AggregatorLost(reason)
        self.failed.set()
        self._changed.set()
        if self._timer is not None:
            self._timer.cancel()

    def _send(self, packets: list[Packet]) -> None:
        is_inline = self._options.route == "ra-ina-inline"
        for packet in packets:
            to = packet.destination
            if is_inline or to == AGGREGATOR:
                to = self._aggregators[packet.group % len(self._aggregators)]
            self.streams.post(to, packet)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_s = self.protocol.deadline_s
        if due_s is not None and self.failure is None:
            self._timer = self._loop.call_at(due_s, self._repeat)

    def _repeat(self) -> None:
        self._send(self.protocol.advance(self._now_s()))

    def _now_s(self) -> float:
        return self._loop.time()


def describe_missing(world: int, nodes: int) -> DescribeMissing:
    """Return what names members of the group of ``world`` workers and ``nodes`` aggregators that have not come."""

    def name(member: int) -> str:
        if member < world:
            return f"rank {member}"
        return "the aggregator" if nodes == 1 else f"aggregator node {member - world}"

    def describe(missing: Sequence[int]) -> tuple[list[str], str]:
        is_start = bool(missing) and min(missing) >= world
        own = "" if nodes == 1 else f", nodes {nodes} and each with its node"
        start = f"Start it: 'gradbus aggregator CONFIG', for the same job and {world} workers{own}"
        return [name(member) for member in missing], start if is_start else ""

    return describe


async def _form(stack: AsyncExitStack, workers: Group, options: InNetworkOptions, timeout_s: float) -> Group:
    world, nodes = workers.world, options.topology.num_nodes
    joining = join_group(
        workers.bus,
        rank=workers.rank,
        world=world + nodes,
        name=GROUP,
        timeout_s=timeout_s,
        collective_timeout_s=workers.timeout_s,
        max_payload_bytes=payload_limit(options.block_elems),
        stall_warning_s=0.0,
        describe_missing=describe_missing(world, nodes),
    )
    try:
        return await stack.enter_async_context(joining)
    except BarrierTimeout as error:
        absent = [rank - world for rank in error.missing if rank >= world]
        if not absent:
            raise
        which = "the aggregator" if nodes == 1 else f"one of {nodes} aggregators, missing are nodes {absent}"
        raise BarrierTimeout(
            "in-network aggregation",
            missing=error.missing,
            ready=error.ready,
            needed=error.needed,
            timeout_s=timeout_s,
            hint=f"Rank {world + absent[0]} is {which}: start it with 'gradbus aggregator CONFIG', for the same job "
            f"and {world} workers. Or set parallel.algorithm.route to 'direct'",
        ) from None
    except ConfigError as error:
        raise ConfigError(
            f"{error}. This group has the workers and their aggregators, {world} + {nodes} here: compare world and "
            f"topology of the workers with aggregator.world and aggregator.nodes"
        ) from None
