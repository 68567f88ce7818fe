"""Exact sums over workers through aggregators: the worker's side of in-network aggregation on the bus.

The workers have a group of their own, and are ranks 0 to N - 1 of a second one, with the aggregators
(:mod:`~.aggregators`). Every sum ends with a small exchange in the workers' group: all know then that all have it, or
that they have to add the rest without aggregators. As sums are of integers, the bits are the same either way. Workers
without aggregators look for them again, and go back to them at the same sum.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradbus.codecs.fixed_point import CHECKSUM_MODULUS, linear_checksum
from gradbus.runtime.collectives.aggregators import AggregatorSession
from gradbus.runtime.collectives.group import Group
from gradbus.runtime.collectives.handle import CollectiveHandle
from gradbus.runtime.collectives.host_chain import HostChain
from gradbus.runtime.errors import BarrierTimeout, BusClosed, CollectiveError, ConfigError, GradbusError
from gradbus.runtime.in_network.encoding import MAX_WORLD
from gradbus.runtime.in_network.options import InNetworkOptions
from gradbus.runtime.logs import get_logger
from gradbus.runtime.tasks import TaskGroup, single_error
from gradbus.runtime.traffic import Traffic

MAX_RETRY_FACTOR = 32  # by which the time until workers look for aggregators again grows at most
JOIN_AGAIN_S = 60.0  # one try
REPORT_DROPPED_S = 10.0

log = get_logger("in_network")


@dataclass(slots=True)
class SumTraffic:
    """Bytes of one sum: the difference of what the groups have counted before and behind it."""

    sent_bytes: int = 0
    received_bytes: int = 0

    def add(self, counted: Traffic | HostChain | CollectiveHandle[Any], sign: int = 1) -> None:
        """Add what these have sent and received so far; with ``sign`` -1 subtract it."""
        self.sent_bytes += sign * counted.sent_bytes
        self.received_bytes += sign * counted.received_bytes


class InNetworkHandle:
    """The awaitable handle of a sum, with what :class:`~.handle.CollectiveHandle` has. It may be started by any thread,
    and is awaited on the loop.

    Attributes:
        name: it was started with. started_s, finished_s: by ``time.perf_counter``.
    """

    missing: tuple[int, ...] = ()

    def __init__(self, sums: InNetworkSum, name: str, values: Tensor, out: Tensor | None) -> None:
        self.name = name
        self.started_s = time.perf_counter()
        self.finished_s: float | None = None
        self._traffic = SumTraffic()
        self._sums = sums
        self._future = asyncio.run_coroutine_threadsafe(self._run(values, out), sums.loop)

    async def _run(self, values: Tensor, out: Tensor | None) -> Tensor:
        try:
            total, overflowed = await self._sums.all_reduce(values.view(-1), self.name, self._traffic)
        finally:
            self.finished_s = time.perf_counter()
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

    @property
    def sent_bytes(self) -> int:
        """In packets, or to the other workers where the sum is made without aggregators; known at the end."""
        return self._traffic.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Return the same of what has come."""
        return self._traffic.received_bytes

    def cancel(self) -> None:
        """End it on this rank."""
        self._future.cancel()


class InNetworkSum:
    """Sums of int32 vectors over the workers: one after the other, in the order of the calls, which is the same on all.

    Attributes:
        loop: that it runs on. session: at the aggregators; None: sums are made without them.
        returns: how often workers went back to aggregators.
    """

    def __init__(self, workers: Group, options: InNetworkOptions, *, seed: int) -> None:
        """``seed``: of checksums."""
        self._workers = workers
        self._options = options
        self._seed = seed
        self.loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[tuple[Tensor, bool]]] = set()
        self._is_closed = False
        self._count = 0
        self._left_bytes = 0  # sent in sessions that are over
        self._losses = 0
        self._dropped = 0
        self._reported_s = -REPORT_DROPPED_S
        self._search: asyncio.Task[None] | None = None
        self._found: AggregatorSession | None = None  # by the search; not used before all workers have one
        self.session: AggregatorSession | None = None
        self.returns = 0

    @property
    def uses_aggregator(self) -> bool:
        """Whether sums go through aggregators."""
        return self.session is not None

    @property
    def sent_bytes(self) -> int:
        """In packets, so far."""
        return self._left_bytes + (0 if self.session is None else self.session.streams.traffic.sent_bytes)

    def start(self, name: str, values: Tensor, out: Tensor | None = None) -> InNetworkHandle:
        """Begin a sum, from any thread. Raises as :meth:`all_reduce`, on await; CollectiveError: it left int32."""
        return InNetworkHandle(self, name, values, out)

    async def all_reduce(
        self, values: Tensor, name: str = "sum", traffic: SumTraffic | None = None
    ) -> tuple[Tensor, bool]:
        """The sum of all workers' vectors.

        A caller that is cancelled leaves the sum to go on: the others wait for it.

        Args:
            values: int32, shape (n,), on the CPU. Not to be changed before this ends.
            name: the same on all workers. traffic: gets the bytes of this sum.

        Returns:
            The sum, the same bits on all workers; and whether an entry is outside of int32, where it means nothing, on
            any worker. Sums without an aggregator are not checked for that.

        Raises:
            PeerLost, CollectiveTimeout: as of a collective of the workers. The loss of an aggregator is no error.
            CollectiveError: the workers do not make the same call.
            BusClosed: it has been left.
            ValueError: another dtype or shape.
        """
        if values.dtype != torch.int32 or values.dim() != 1 or not values.is_cpu:
            raise ValueError(f"expected int32 of shape (n,) on the CPU, got {values.dtype} {tuple(values.shape)}")
        if self._is_closed:
            raise BusClosed(f"{name}: the aggregator of group {self._workers.name!r} has been left")
        self._count += 1
        call = {"number": self._count, "name": name}
        task = asyncio.create_task(self._in_turn(values, call, traffic or SumTraffic()))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[tuple[Tensor, bool]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: its caller may have been cancelled

    async def _in_turn(self, values: Tensor, call: dict[str, Any], traffic: SumTraffic) -> tuple[Tensor, bool]:
        async with self._turn:
            if self.session is None:
                return await self._add_directly(values, call, traffic), False
            world, elems = self._workers.world, self._options.block_elems
            groups = -(-values.numel() // (world * elems))
            padding = groups * world * elems - values.numel()
            padded = await asyncio.to_thread(torch.nn.functional.pad, values, (0, padding)) if padding else values
            blocks = padded.contiguous().view(groups, world, elems)
            total, overflowed = await self._sum(self.session, blocks, {**call, "numel": values.numel()}, traffic)
            self._report_dropped()
            return total.view(-1)[: values.numel()], overflowed

    async def _sum(
        self, session: AggregatorSession, blocks: Tensor, call: dict[str, Any], traffic: SumTraffic
    ) -> tuple[Tensor, bool]:
        total, first = torch.empty_like(blocks), session.groups_begun
        chain = HostChain(self._workers, session.chain)
        traffic.add(session.streams.traffic, -1)
        try:
            async with TaskGroup() as meanwhile:
                own = meanwhile.create_task(self._checksum(blocks))
                known, overflowed = await self._send_sums(session, chain, blocks, total)
        except BaseExceptionGroup as group:
            raise single_error(group) from None
        traffic.add(session.streams.traffic)
        lost = session.failure
        if lost is not None:
            await self._leave()  # so that no worker waits for this one there, and no late packet changes a sum
        report = {
            "call": {**call, "first": first}, "known": known, "overflowed": overflowed,
            "lost": None if lost is None else str(lost)[:300],
            "own": own.result(),
            "total": await self._checksum(total) if chain.is_last and known == len(blocks) else -1,
        }  # fmt: skip
        reports: list[dict[str, Any]] = await self._workers.all_gather_object("in_network/commit", report)
        calls = [one["call"] for one in reports]
        if calls != [calls[0]] * len(calls):
            await self._leave()
            raise CollectiveError(f"in-network sums: ranks make different calls: {dict(enumerate(calls))}")
        known = await self._check(reports, len(blocks))
        await chain.spread(total[:known])
        traffic.add(chain)
        if known == len(blocks):
            return total, False
        wide = await asyncio.to_thread(lambda: blocks[known:].long())
        adding = self._workers.all_reduce("in_network/rest", wide, op="sum")
        rest = await adding
        traffic.add(adding)
        return total, await asyncio.to_thread(_narrow, rest, total[known:])

    async def _send_sums(
        self, session: AggregatorSession, chain: HostChain, blocks: Tensor, total: Tensor
    ) -> tuple[int, bool]:
        """Add up within the host, and have its last rank send the sums to the aggregators, piece by piece.

        The chain goes on to its end whatever happens at the aggregators: no rank of the host waits for one that has
        given up.

        Returns:
            How many groups this rank lacks no sum of: all, where another rank of the host gets them. And whether a sum
            has left int32.
        """
        session.begin(len(blocks))
        first = session.protocol.end
        if len(chain.ranks) == 1:
            session.submit(blocks, total)
            overflowed = False
        else:
            overflowed = await chain.reduce(
                blocks, lambda start, sums: session.submit(sums, total[start:][: len(sums)])
            )
        if not chain.is_last:
            return len(blocks), overflowed
        await session.finish()
        return session.protocol.first_unfinished - first, overflowed or bool(session.protocol.overflowed)

    async def _check(self, reports: list[dict[str, Any]], groups: int) -> int:
        """How many groups all workers have, by what all of them reported: the answer is the same on all. Leaves the
        aggregators where they are of no more use."""
        known: int = min(one["known"] for one in reports)
        lost = {rank: one["lost"] for rank, one in enumerate(reports) if one["lost"]}
        retry_s = self._retry_s
        if any(one["overflowed"] for one in reports):
            known = 0  # of a part of the ranks, or it is not so: added in 64 bits it is found out
        elif self._options.verify:
            expected = sum(one["own"] for one in reports) % CHECKSUM_MODULUS
            wrong = [rank for rank, one in enumerate(reports) if one["total"] not in (-1, expected)]
            known = known if known == groups and not wrong else 0  # a part of a sum has no checksum
            if wrong:
                lost = {**lost, **dict.fromkeys(wrong, "the sum is not that of the workers' blocks")}
                retry_s = 0.0  # what has changed a sum is not asked again
        if lost:
            log.warning(
                "aggregator lost",
                group=self._workers.name,
                sum=self._count,
                reasons=lost,
                effect="sums go on without it, bit-equal",
                next_try=f"in {retry_s:g} s" if retry_s else "none",
            )
            await self._leave()
            self._look_again(retry_s)
        return known

    async def _checksum(self, blocks: Tensor) -> int:
        return await asyncio.to_thread(linear_checksum, blocks, self._seed) if self._options.verify else 0

    def _report_dropped(self) -> None:
        """Log how many packets were dropped since the last time, at most every so often."""
        session, now_s = self.session, self.loop.time()
        dropped = 0 if session is None else session.dropped + session.protocol.dropped
        if dropped > self._dropped and now_s >= self._reported_s + REPORT_DROPPED_S:
            log.warning("packets dropped", group=self._workers.name, sum=self._count, count=dropped - self._dropped)
            self._dropped, self._reported_s = dropped, now_s

    # Without aggregators, and back to them

    async def open(self, timeout_s: float) -> None:
        """Join the aggregators, all workers or none. Raises as :func:`join_aggregator`."""
        failure: GradbusError | None = None
        try:
            self.session = await AggregatorSession.join(self._workers, self._options, timeout_s=timeout_s)
        except (ConfigError, CollectiveError, BarrierTimeout) as error:
            failure = error
        # Those that wait are heard of when this worker's group ends, if a rank of it never comes here.
        reports: list[str | None] = await self._workers.all_gather_object(
            "in_network/start", None if failure is None else str(failure)[:500], timeout_s=timeout_s + JOIN_AGAIN_S
        )
        if not any(reports):
            return
        await self._leave()
        if isinstance(failure, ConfigError):
            raise failure
        if self._options.without == "fail":
            raise failure or CollectiveError(f"in-network aggregation: {_of_ranks(reports)}")
        retry_s = self._retry_s
        log.warning(
            "no aggregator",
            group=self._workers.name,
            reasons=_of_ranks(reports),
            effect="sums are made without it",
            next_try="at once" if retry_s else "none",
        )
        self._look_again(retry_s, at_once=True)

    @property
    def _retry_s(self) -> float:
        """After a loss. Doubles each time: an aggregator that comes and goes is worse than none."""
        return self._options.retry_s * min(1 << self._losses, MAX_RETRY_FACTOR)

    def _look_again(self, retry_s: float, *, at_once: bool = False) -> None:
        """The same on all workers: none of them asks the others about aggregators if it does not look for them."""
        self._losses += 1
        if retry_s and not self._is_closed:
            self._search = asyncio.create_task(
                self._look(retry_s, 0.0 if at_once else retry_s), name="return to aggregators"
            )

    async def _look(self, retry_s: float, wait_s: float) -> None:
        """Join the aggregators when they are there, and again when they are lost before they were used."""
        while True:
            await asyncio.sleep(wait_s)
            wait_s = 0.0
            try:
                self._found = await AggregatorSession.join(self._workers, self._options, timeout_s=JOIN_AGAIN_S)
            except BarrierTimeout:
                continue
            except GradbusError as error:
                log.warning("aggregator not used again", group=self._workers.name, reason=str(error))
                wait_s = retry_s
                continue
            await self._found.failed.wait()
            found, self._found = self._found, None
            await found.leave()

    async def _add_directly(self, values: Tensor, call: dict[str, Any], traffic: SumTraffic) -> Tensor:
        """Add without aggregators, and agree on whether the next sum goes through them."""
        workers, found = self._workers, self._found
        sum_ = workers.all_reduce(f"in_network/{call['name']}", values, op="sum")
        if self._search is None:
            total = await sum_
            traffic.add(sum_)
            return total
        have_joined = workers.all_reduce(
            "in_network/return", torch.tensor([found is not None], dtype=torch.int32), op="min"
        )
        try:
            total = await sum_
            traffic.add(sum_)
            is_back = bool(await have_joined)
        finally:
            have_joined.cancel()
        if is_back and found is not None:
            found = self._found or found  # another one, if it was lost and joined again meanwhile
            await self._end_search()
            self.session, self._dropped = found, 0
            self.returns += 1
            # A warning as its loss is: where losses are shown, so is their end.
            log.warning("aggregator used again", group=workers.name, from_sum=self._count + 1, returns=self.returns)
        return total

    async def _end_search(self) -> None:
        search, self._search, self._found = self._search, None, None
        if search is not None:
            search.cancel()
            await asyncio.wait([search])

    async def close(self) -> None:
        """No more sums; those under way are cancelled."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        found = self._found
        await self._end_search()
        if found is not None:
            await found.leave()
        await self._leave()

    async def _leave(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            self._left_bytes += session.streams.traffic.sent_bytes
            await session.leave()


def _narrow(wide: Tensor, out: Tensor) -> bool:
    """Copy int64 to int32. Returns whether an entry does not fit."""
    out.copy_(wide)
    return bool((out != wide).any())


def _of_ranks(reports: list[str | None]) -> dict[int, str]:
    return {rank: report for rank, report in enumerate(reports) if report is not None}


@asynccontextmanager
async def join_aggregator(
    workers: Group, options: InNetworkOptions | None = None, *, timeout_s: float = 60.0
) -> AsyncIterator[InNetworkSum]:
    """Join the aggregators of this job with all workers of a group; ``workers.in_network`` is it meanwhile.

    Raises:
        ConfigError: workers have different options, or an aggregator refuses them, with its numbers.
        BarrierTimeout: some worker or an aggregator, one of the last ranks, has not come, and ``options.without`` is
            ``fail``. CollectiveError: one was lost meanwhile, likewise.
    """
    options = options or InNetworkOptions()
    if workers.world > MAX_WORLD:
        raise ConfigError(f"in-network aggregation is for up to {MAX_WORLD} workers, this group has {workers.world}")
    seed = await workers.broadcast_object("in_network/seed", secrets.randbits(62), root=0)
    sums = InNetworkSum(workers, options, seed=seed)
    try:
        await sums.open(timeout_s)
        workers.in_network = sums
        yield sums
    finally:
        workers.in_network = None
        await sums.close()
