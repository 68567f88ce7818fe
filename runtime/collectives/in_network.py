"""Exact sums over workers through an aggregator: the worker's side of in-network aggregation on the bus.

The workers have a group of their own, and are ranks 0 to N - 1 of a second one, in which the aggregator is rank N.
Every sum ends with a small exchange in the workers' group: all know then that all have it, or that they have to add the
rest without the aggregator. As sums are of integers, the bits are the same either way.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gradbus.codecs.fixed_point import CHECKSUM_MODULUS, linear_checksum
from gradbus.runtime.collectives.group import Group, join_group
from gradbus.runtime.collectives.packet_streams import PacketStreams
from gradbus.runtime.errors import BarrierTimeout, BusClosed, CollectiveError, ConfigError
from gradbus.runtime.in_network.encoding import MAX_WORLD
from gradbus.runtime.in_network.options import InNetworkOptions
from gradbus.runtime.in_network.packets import AGGREGATOR, Packet, PacketKind, RetransmissionTimes
from gradbus.runtime.in_network.worker import PeerSilent, RingWorker, WorkerConfig
from gradbus.runtime.logs import get_logger

GROUP = "in_network"

_FROM_NEIGHBOURS = frozenset({PacketKind.REDUCE, PacketKind.GATHER, PacketKind.RING_ACK})

log = get_logger("in_network")


class AggregatorLost(CollectiveError):
    """The aggregator is gone, silent, or has told a wrong sum. Sums are made without it from now on."""


class InNetworkHandle:
    """The awaitable handle of a sum, with what :class:`~.handle.CollectiveHandle` has. It may be started by any thread,
    and is awaited on the loop.

    Attributes:
        name: it was started with. started_s, finished_s: by ``time.perf_counter``. sent_bytes: in packets, about, where
            several sums are under way.
    """

    received_bytes = 0
    missing: tuple[int, ...] = ()

    def __init__(self, sums: InNetworkSum, name: str, values: Tensor, out: Tensor | None) -> None:
        self.name = name
        self.started_s = time.perf_counter()
        self.finished_s: float | None = None
        self.sent_bytes = 0
        self._sums = sums
        self._future = asyncio.run_coroutine_threadsafe(self._run(values, out), sums.loop)

    async def _run(self, values: Tensor, out: Tensor | None) -> Tensor:
        before = self._sums.streams.sent_bytes
        try:
            total, overflowed = await self._sums.all_reduce(values.view(-1), self.name)
        finally:
            self.finished_s = time.perf_counter()
            self.sent_bytes = self._sums.streams.sent_bytes - before
        if overflowed:
            raise CollectiveError(
                f"{self.name}: a sum has left int32, which none of the integers of codecs.fixed_point does: some rank "
                f"sends others. All ranks know of it"
            )
        return total.view(values.shape) if out is None else out.copy_(total.view(out.shape))

    def __await__(self) -> Generator[Any, None, Tensor]:
        return asyncio.wrap_future(self._future).__await__()

    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._future.done()

    def cancel(self) -> None:
        """End it on this rank."""
        self._future.cancel()


class InNetworkSum:
    """Sums of int32 vectors over the workers: one after the other, in the order of the calls, which is the same on all.

    Attributes:
        loop: that it runs on. streams: what is sent to whom.
        uses_aggregator: whether it is still there. fallback_sums: sums that were made, or ended, without it.
        dropped: packets that a node sent which has none of that kind to send.
    """

    streams: PacketStreams

    def __init__(self, workers: Group, options: InNetworkOptions, *, job: int, seed: int) -> None:
        """``job``: its number on the aggregator. ``seed``: of checksums."""
        self._workers = workers
        self._options = options
        self._seed = seed
        times = RetransmissionTimes(options.retransmit_s, max(options.retransmit_s, options.timeout_s), max_tries=50)
        self._job = job
        self._protocol = RingWorker(
            WorkerConfig(
                workers.rank,
                workers.world,
                job,
                block_elems=options.block_elems,
                window_groups=options.window_groups,
                reserves=options.route == "ra-ina",
                uses_ring=options.route != "ina",
                times=times,
            )
        )
        self.loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[tuple[Tensor, bool]]] = set()
        self._network: AsyncExitStack | None = None
        self._is_closed = False
        self._count = 0
        self._heard_s = self._now_s()
        self.uses_aggregator = True
        self.fallback_sums = 0
        self.dropped = 0

    def start(self, name: str, values: Tensor, out: Tensor | None = None) -> InNetworkHandle:
        """Begin a sum, from any thread. Raises as :meth:`all_reduce`, on await; CollectiveError: it left int32."""
        return InNetworkHandle(self, name, values, out)

    async def all_reduce(self, values: Tensor, name: str = "sum") -> tuple[Tensor, bool]:
        """The sum of all workers' vectors.

        A caller that is cancelled leaves the sum to go on: the others wait for it.

        Args:
            values: int32, shape (n,), on the CPU. Not to be changed before this ends.
            name: the same on all workers.

        Returns:
            The sum, the same bits on all workers; and whether an entry is outside of int32, where it means nothing, on
            any worker. Sums without an aggregator are not checked for that.

        Raises:
            PeerLost, CollectiveTimeout: as of a collective of the workers. The loss of the aggregator is no error.
            CollectiveError: the workers do not make the same call.
            BusClosed: it has been left.
            ValueError: another dtype or shape.
        """
        if values.dtype != torch.int32 or values.dim() != 1 or not values.is_cpu:
            raise ValueError(f"expected int32 of shape (n,) on the CPU, got {values.dtype} {tuple(values.shape)}")
        if self._is_closed:
            raise BusClosed(f"{name}: the aggregator of group {self._workers.name!r} has been left")
        self._count += 1
        task = asyncio.create_task(self._in_turn(values, {"number": self._count, "name": name}))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[tuple[Tensor, bool]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: its caller may have been cancelled

    async def _in_turn(self, values: Tensor, call: dict[str, Any]) -> tuple[Tensor, bool]:
        async with self._turn:
            if not self.uses_aggregator:
                self.fallback_sums += 1
                return await self._workers.all_reduce(f"in_network/{call['name']}", values, op="sum"), False
            world, elems = self._workers.world, self._options.block_elems
            groups = -(-values.numel() // (world * elems))
            padding = groups * world * elems - values.numel()
            padded = await asyncio.to_thread(torch.nn.functional.pad, values, (0, padding)) if padding else values
            blocks = padded.contiguous().view(groups, world, elems)
            total, overflowed = await self._sum(blocks, {**call, "numel": values.numel()})
            return total.view(-1)[: values.numel()], overflowed

    async def _sum(self, blocks: Tensor, call: dict[str, Any]) -> tuple[Tensor, bool]:
        total, protocol = torch.empty_like(blocks), self._protocol
        first = protocol.end
        protocol.overflowed.clear()
        self._send(protocol.submit(blocks.numpy(), total.numpy(), self._now_s()))
        await self._finish()
        known = protocol.first_unfinished - first
        report = {
            "call": {**call, "first": first}, "known": known, "overflowed": bool(protocol.overflowed),
            "lost": None if self._failure is None else str(self._failure)[:300],
            "own": await self._checksum(blocks),
            "total": await self._checksum(total) if known == len(blocks) else -1,
        }  # fmt: skip
        reports: list[dict[str, Any]] = await self._workers.all_gather_object("in_network/commit", report)
        calls = [one["call"] for one in reports]
        if calls != [calls[0]] * len(calls):
            await self._leave()
            raise CollectiveError(f"in-network sums: ranks make different calls: {dict(enumerate(calls))}")
        known = self._check(reports, len(blocks))
        if known == len(blocks):
            return total, False
        self.fallback_sums += 1
        if not self.uses_aggregator:
            await self._leave()  # no packet that comes late changes a sum that a caller has
        wide = await asyncio.to_thread(lambda: blocks[known:].long())
        rest = await self._workers.all_reduce("in_network/rest", wide, op="sum")
        return total, await asyncio.to_thread(_narrow, rest, total[known:])

    def _check(self, reports: list[dict[str, Any]], groups: int) -> int:
        """How many groups all workers have, by what all of them reported: the answer is the same on all."""
        known: int = min(one["known"] for one in reports)
        lost = {rank: one["lost"] for rank, one in enumerate(reports) if one["lost"]}
        if any(one["overflowed"] for one in reports):
            known = 0  # of a part of the ranks, or it is not so: added in 64 bits it is found out
        elif self._options.verify:
            expected = sum(one["own"] for one in reports) % CHECKSUM_MODULUS
            wrong = [rank for rank, one in enumerate(reports) if one["total"] != expected]
            if wrong:
                known = 0  # a part of a sum has no checksum
                lost = lost or dict.fromkeys(wrong, "the sum is not that of the workers' blocks")
        if lost:
            self.uses_aggregator = False
            log.warning(
                "aggregator lost", group=self._workers.name, reasons=lost, effect="sums go on without it, bit-equal",
            )  # fmt: skip
        return known

    async def _checksum(self, blocks: Tensor) -> int:
        return await asyncio.to_thread(linear_checksum, blocks, self._seed) if self._options.verify else 0

    async def _finish(self) -> None:
        """Until all groups are known here, or the aggregator is lost. A worker that is late is waited for as in any
        collective: what counts is whether the aggregator answers."""
        protocol, timeout_s = self._protocol, self._options.timeout_s
        ends_s = self._now_s() + self._workers.timeout_s
        self._heard_s = self._now_s()
        while protocol.first_unfinished < protocol.end and self._failure is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout_s / 4):
                    await self._changed.wait()
            except TimeoutError:
                if self._now_s() - self._heard_s > timeout_s:
                    self._fail(AggregatorLost(f"no answer within {timeout_s:g} s"))
                elif self._now_s() > ends_s:  # who is missing the workers' own exchange tells
                    self._fail(AggregatorLost(f"no sum within {self._workers.timeout_s:g} s"))
                self._send([Packet(PacketKind.PROBE, self._job, 0, 0, self._workers.rank, AGGREGATOR)])

    # Packets

    def receive(self, source: int, packets: list[Packet]) -> None:
        """Packets of a rank of the network's group."""
        is_aggregator = source == self._workers.world
        if is_aggregator:
            self._heard_s = self._now_s()
        before = self._protocol.first_unfinished
        for packet in packets:
            if is_aggregator or (packet.source == source and packet.kind in _FROM_NEIGHBOURS):
                self._send(self._protocol.receive(packet, self._now_s()))
            else:
                self.dropped += 1
        if self._protocol.first_unfinished != before:
            self._changed.set()

    def lost(self, peer: int, error: Exception) -> None:
        """A rank of the network's group is gone."""
        name = "the aggregator" if peer == self._workers.world else f"rank {peer}"
        self._fail(AggregatorLost(f"{name}: {error}"))

    async def close(self) -> None:
        """No more sums; those under way are cancelled."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._leave()

    async def enter(self, network: AsyncExitStack, streams: PacketStreams) -> None:
        """Begin to exchange packets. ``network``: what is left with the aggregator."""
        self._network = network
        self.streams = await network.enter_async_context(streams)

    async def _leave(self) -> None:
        """The aggregator's group: its slots are free then."""
        self.uses_aggregator = False
        if self._timer is not None:
            self._timer.cancel()
        network, self._network = self._network, None
        if network is not None:
            await network.aclose()

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._changed.set()

    def _send(self, packets: list[Packet]) -> None:
        is_inline = self._options.route == "ra-ina-inline"
        for packet in packets:
            to_aggregator = is_inline or packet.destination == AGGREGATOR
            self.streams.post(self._workers.world if to_aggregator else packet.destination, packet)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_s = self._protocol.deadline_s
        if due_s is not None and self._failure is None and self._network is not None:
            self._timer = self.loop.call_at(due_s, self._repeat)

    def _repeat(self) -> None:
        try:
            self._send(self._protocol.advance(self._now_s()))
        except PeerSilent as error:
            self._fail(AggregatorLost(str(error)))

    def _now_s(self) -> float:
        return self.loop.time()


def _narrow(wide: Tensor, out: Tensor) -> bool:
    """Copy int64 to int32. Returns whether an entry does not fit."""
    out.copy_(wide)
    return bool((out != wide).any())


@asynccontextmanager
async def join_aggregator(
    workers: Group, options: InNetworkOptions | None = None, *, timeout_s: float = 60.0
) -> AsyncIterator[InNetworkSum]:
    """Join the aggregator of this job with all workers of a group; ``workers.in_network`` is it meanwhile.

    Raises:
        ConfigError: workers have different options, or the aggregator refuses them, with its numbers.
        BarrierTimeout: some worker or the aggregator, the last rank, has not come.
    """
    options = options or InNetworkOptions()
    if workers.world > MAX_WORLD:
        raise ConfigError(f"in-network aggregation is for up to {MAX_WORLD} workers, this group has {workers.world}")
    seed = await workers.broadcast_object("in_network/seed", secrets.randbits(62), root=0)
    rank, world = workers.rank, workers.world
    async with AsyncExitStack() as stack:
        network = await _join(stack, workers, timeout_s)
        plans: list[dict[str, Any]] = await network.all_gather_object("plans", asdict(options))
        answer = await network.broadcast_object("answer", None, root=world)
        for other, plan in enumerate(plans[:world]):
            if plan != plans[0]:
                raise ConfigError(f"in-network aggregation: rank 0 has {plans[0]}, rank {other} {plan}")
        if not isinstance(answer, dict) or not isinstance(answer.get("job"), int):
            refused = answer.get("refused") if isinstance(answer, dict) else answer
            raise ConfigError(f"the aggregator refuses: {str(refused)[:300]}")
        ring = {(rank - 1) % world, (rank + 1) % world} - {rank} if options.route == "ra-ina" else set()
        sums = InNetworkSum(workers, options, job=answer["job"], seed=seed)
        streams = PacketStreams(
            network, [*sorted(ring), world], block_elems=options.block_elems, receive=sums.receive, lost=sums.lost,
            loss=options.loss,
        )  # fmt: skip
        await sums.enter(stack.pop_all(), streams)
        workers.in_network = sums
        try:
            yield sums
        finally:
            workers.in_network = None
            await sums.close()


async def _join(stack: AsyncExitStack, workers: Group, timeout_s: float) -> Group:
    world = workers.world
    joining = join_group(
        workers.bus, rank=workers.rank, world=world + 1, name=GROUP, timeout_s=timeout_s, stall_warning_s=0.0
    )
    try:
        return await stack.enter_async_context(joining)
    except BarrierTimeout as error:
        if world not in error.missing:
            raise
        raise BarrierTimeout(
            "in-network aggregation", missing=error.missing, ready=error.ready, needed=error.needed,
            timeout_s=timeout_s,
            hint=f"Rank {world} is the aggregator: start it with 'gradbus aggregator CONFIG', for the same job and "
            f"{world} workers. Or set parallel.algorithm.route to 'direct'",
        ) from None  # fmt: skip
