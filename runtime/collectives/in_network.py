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
from typing import Any

import torch
from torch import Tensor

from gradbus.codecs.fixed_point import CHECKSUM_MODULUS, linear_checksum
from gradbus.runtime.collectives.group import Group, join_group
from gradbus.runtime.collectives.packet_streams import PacketStreams
from gradbus.runtime.errors import BarrierTimeout, CollectiveError, ConfigError
from gradbus.runtime.in_network.encoding import MAX_WORLD
from gradbus.runtime.in_network.options import InNetworkOptions
from gradbus.runtime.in_network.packets import AGGREGATOR, Packet, RetransmissionTimes
from gradbus.runtime.in_network.worker import PeerSilent, RingWorker, WorkerConfig
from gradbus.runtime.logs import get_logger

GROUP = "in_network"

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
            total, overflowed = await self._sums.all_reduce(values.view(-1))
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
    """Sums of int32 vectors over the workers. One sum at a time, in the same order on all of them.

    Attributes:
        loop: that it runs on. streams: what is sent to whom.
        uses_aggregator: whether it is still there. sums_without: sums that were made, or ended, without it.
    """

    streams: PacketStreams

    def __init__(self, workers: Group, options: InNetworkOptions, *, job: int, seed: int) -> None:
        """``job``: its number on the aggregator. ``seed``: of checksums."""
        self._workers = workers
        self._options = options
        self._seed = seed
        times = RetransmissionTimes(options.retransmit_s, max(options.retransmit_s, options.timeout_s), max_tries=50)
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
        self.uses_aggregator = True
        self.sums_without = 0

    def start(self, name: str, values: Tensor, out: Tensor | None = None) -> InNetworkHandle:
        """Begin a sum, from any thread. Raises as :meth:`all_reduce`, on await; CollectiveError: it left int32."""
        return InNetworkHandle(self, name, values, out)

    async def all_reduce(self, values: Tensor) -> tuple[Tensor, bool]:
        """The sum of all workers' vectors.

        Args:
            values: int32, shape (n,), on the CPU. Not to be changed before this ends.

        Returns:
            The sum, the same bits on all workers; and whether an entry has left int32 on its way, in which case it
            means nothing, on any worker.

        Raises:
            PeerLost, CollectiveTimeout: as of a collective of the workers. The loss of the aggregator is no error.
            ValueError: another dtype or shape.
        """
        if values.dtype != torch.int32 or values.dim() != 1 or not values.is_cpu:
            raise ValueError(f"expected int32 of shape (n,) on the CPU, got {values.dtype} {tuple(values.shape)}")
        world, elems = self._workers.world, self._options.block_elems
        groups = -(-values.numel() // (world * elems))
        padded = values
        if groups * world * elems != values.numel():
            padded = torch.nn.functional.pad(values, (0, groups * world * elems - values.numel()))
        blocks = padded.contiguous().view(groups, world, elems)
        async with self._turn:
            total, overflowed = await self._sum(blocks)
        return total.view(-1)[: values.numel()], overflowed

    async def _sum(self, blocks: Tensor) -> tuple[Tensor, bool]:
        total, protocol = torch.empty_like(blocks), self._protocol
        first = protocol.end
        if self.uses_aggregator:
            protocol.overflowed.clear()
            self._send(protocol.submit(blocks.numpy(), total.numpy(), self._now_s()))
            await self._finish()
        known = protocol.first_unfinished - first if self.uses_aggregator else 0
        complete = self.uses_aggregator and known == len(blocks)
        report = {
            "known": known, "lost": None if self._failure is None else str(self._failure)[:300],
            "overflowed": bool(protocol.overflowed),
            "own": await self._checksum(blocks), "total": await self._checksum(total) if complete else -1,
        }  # fmt: skip
        reports: list[dict[str, Any]] = await self._workers.all_gather_object("in_network/commit", report)
        known = self._check(reports, len(blocks))
        if known == len(blocks):
            return total, any(one["overflowed"] for one in reports)
        self.uses_aggregator = False
        self.sums_without += 1
        rest = await self._workers.all_reduce("in_network/rest", blocks[known:].long(), op="sum")
        total[known:] = rest.to(torch.int32)
        leaves = bool((rest != total[known:]).any())
        return total, leaves or any(one["overflowed"] for one in reports)

    def _check(self, reports: list[dict[str, Any]], groups: int) -> int:
        """How many groups all workers have, by what all of them reported: the answer is the same on all."""
        lost = {rank: one["lost"] for rank, one in enumerate(reports) if one["lost"]}
        known: int = min(one["known"] for one in reports)
        if self._options.verifies and not any(one["overflowed"] for one in reports):
            expected = sum(one["own"] for one in reports) % CHECKSUM_MODULUS
            wrong = [rank for rank, one in enumerate(reports) if one["total"] != expected]
            if wrong:
                known = 0  # a part of a sum has no checksum
                lost = lost or dict.fromkeys(wrong, "the sum is not that of the workers' blocks")
        if known < groups and self.uses_aggregator:
            log.warning(
                "aggregator lost", group=self._workers.name, reasons=lost, effect="sums go on without it, bit-equal",
            )  # fmt: skip
        return known

    async def _checksum(self, blocks: Tensor) -> int:
        return await asyncio.to_thread(linear_checksum, blocks, self._seed) if self._options.verifies else 0

    async def _finish(self) -> None:
        """Until all groups are known here, or the aggregator is lost."""
        protocol = self._protocol
        while protocol.first_unfinished < protocol.end and self._failure is None:
            self._changed.clear()
            before = protocol.first_unfinished
            try:
                async with asyncio.timeout(self._options.timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                if protocol.first_unfinished == before:
                    self._fail(AggregatorLost(f"no progress within {self._options.timeout_s:g} s"))

    # Packets

    def receive(self, source: int, packets: list[Packet]) -> None:
        """Packets of a rank of the network's group. Progress is a group that is known."""
        before = self._protocol.first_unfinished
        for packet in packets:
            self._send(self._protocol.receive(packet, self._now_s()))
        if self._protocol.first_unfinished != before:
            self._changed.set()
        self._set_timer()

    def lost(self, peer: int, error: Exception) -> None:
        """A rank of the network's group is gone."""
        name = "the aggregator" if peer == self._workers.world else f"rank {peer}"
        self._fail(AggregatorLost(f"{name}: {error}"))

    def close(self) -> None:
        """No more timers."""
        if self._timer is not None:
            self._timer.cancel()

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
        self.close()
        due_s = self._protocol.deadline_s
        if due_s is not None and self._failure is None:
            self._timer = asyncio.get_running_loop().call_at(due_s, self._repeat)

    def _repeat(self) -> None:
        try:
            self._send(self._protocol.advance(self._now_s()))
        except PeerSilent as error:
            self._fail(AggregatorLost(str(error)))

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


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
    network_group = join_group(
        workers.bus, rank=rank, world=world + 1, name=GROUP, timeout_s=timeout_s, stall_warning_s=0.0
    )
    async with AsyncExitStack() as stack:
        try:
            network = await stack.enter_async_context(network_group)
        except BarrierTimeout as error:
            if error.missing != (world,):
                raise
            raise BarrierTimeout(
                "in-network aggregation", missing=error.missing, ready=error.ready, needed=error.needed,
                timeout_s=timeout_s,
                hint=f"Rank {world} is the aggregator: start it with 'gradbus aggregator CONFIG', for the same job and "
                f"{world} workers. Or set parallel.algorithm.route to 'direct'",
            ) from None  # fmt: skip
        plain = {field: getattr(options, field) for field in ("route", "block_elems", "window_groups")}
        plans: list[dict[str, Any]] = await network.all_gather_object("plans", plain)
        answer: dict[str, Any] = await network.broadcast_object("answer", None, root=world)
        for other, plan in enumerate(plans[:world]):
            if plan != plans[0]:
                raise ConfigError(f"in-network aggregation: rank 0 has {plans[0]}, rank {other} {plan}")
        if "refused" in answer:
            raise ConfigError(f"the aggregator refuses: {answer['refused']}")
        ring = {(rank - 1) % world, (rank + 1) % world} - {rank} if options.route == "ra-ina" else set()
        sums = InNetworkSum(workers, options, job=answer["job"], seed=seed)
        streams = PacketStreams(
            network, [*sorted(ring), world], block_elems=options.block_elems, receive=sums.receive, lost=sums.lost,
            loss=options.loss,
        )  # fmt: skip
        async with streams as sums.streams:
            workers.in_network = sums
            try:
                yield sums
            finally:
                workers.in_network = None
                sums.close()
