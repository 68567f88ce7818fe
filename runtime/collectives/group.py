"""A group of equal ranks and its collectives.

async with gradbus.join_group(bus, rank=0, world=2) as group:
    handle = group.all_gather("grads/17", payload)              # starts now
    frames = await handle                                       # list[bytes], rank order
    mean = await group.all_reduce("loss/17", tensor, op="mean")
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from torch import Tensor

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.collectives import data_movement
from gradbus.runtime.collectives.arithmetic import Arithmetic, ReduceOp
from gradbus.runtime.collectives.formation import Member
from gradbus.runtime.collectives.handle import (
    CollectiveHandle,
    CollectiveWait,
    DeadlineTimer,
    TimedOut,
    collective_timeout,
)
from gradbus.runtime.collectives.membership import DONE, DescribeMissing, Membership
from gradbus.runtime.collectives.objects import MAX_OBJECT_BYTES, pack, unpack, unpack_all
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.collectives.reductions import (
    Algorithm,
    ReduceScatterOperation,
    ReduceToRoot,
    all_reduce,
    new_result,
    shard_bounds,
)
from gradbus.runtime.collectives.tensors import check_sendable, plain
from gradbus.runtime.errors import BarrierTimeout, ConfigError, GradbusError
from gradbus.runtime.misuse import check_instance, opening
from gradbus.runtime.traffic import Traffic
from gradbus.runtime.user_errors import summary_of

MAX_WORLD = 1024
GROUP_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Traffic of a group so far.

    Attributes:
        bytes_out, bytes_in: payload of all its collectives, as :mod:`gradbus.runtime.traffic` counts; what goes to all
            ranks counts once going out.
        dropped: frames that were not used, by reason: repeat, stale, early, foreign group, foreign sender, shared
            memory, closed.
        pending: collectives that have not ended. early_bytes: payload that waits for a call here.
    """

    bytes_out: int
    bytes_in: int
    dropped: Counter[str]
    pending: int
    early_bytes: int


class Group:
    """One rank of a group. Made by :func:`join_group`.

    A collective starts at the call, from whatever thread, and returns a :class:`CollectiveHandle` to await. It is
    matched with those of the other ranks by ``name`` and ``round_id``, and by how often that pair was used before:
    ranks may call in any order, and use a name again. Buffers belong to the collective until its handle has ended.

    Every collective takes ``round_id`` (0 .. 2**32 - 1, part of the name) and ``timeout_s`` (by default the group's).

    Attributes:
        farewell: the reason that the others get when this rank leaves without an error.
    """

    def __init__(self, bus: Bus, membership: Membership, name: str, timeout_s: float, max_bytes: int) -> None:
        self.bus = bus
        self._membership = membership
        self._engine = membership.engine
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._deadlines = DeadlineTimer(self._loop, lambda: self._engine.progress.wake_io_thread())
        self._wait = CollectiveWait(self._engine, self._loop)
        self.timeout_s = timeout_s
        self._max_bytes = max_bytes
        self.name = name
        self.in_network: Any = None  # the InNetworkSum of its ranks, while they have joined an aggregator
        self.farewell = DONE
        self.rank = membership.identity.sender
        self.world = membership.formation.world

    def calls_may_block(self) -> None:
        """Declare that calls come from threads that run no event loop: then they do more themselves before they return,
        which is faster. By default nothing that takes more than a millisecond is done there."""
        self._membership.calls_may_block()

    def at_step(self, step: int, epoch: int, *, mean_ranks: float = 0.0) -> None:
        """Note where this rank's training is, for ``gradbus status``. ``mean_ranks``: as in RankStatus."""
        position = self._membership.reporter.position
        position.step, position.epoch, position.mean_ranks = step, epoch, mean_ranks

    @property
    def is_closed(self) -> bool:
        """Whether this rank has left: the block of its ``async with``, or that of its bus, has ended."""
        return self._membership.has_left or self.bus.is_closed

    @property
    def members(self) -> tuple[Member, ...]:
        """The ranks, in order."""
        return self._membership.formation.members

    @property
    def lost(self) -> dict[int, str]:
        """Ranks that have died or left, and the reason."""
        return self._engine.gone

    @property
    def traffic(self) -> Traffic:
        """Return the count of its payload, which goes on."""
        return self._engine.traffic

    @property
    def stats(self) -> GroupStats:
        """Traffic so far."""
        engine = self._engine
        traffic = engine.traffic
        return GroupStats(
            traffic.sent_bytes, traffic.received_bytes, Counter(engine.dropped), engine.pending, engine.early_bytes
        )

    # Reductions

    def all_reduce(  # noqa: PLR0913 - of a user's call, each an option by name
        self,
        name: str,
        tensor: Tensor,
        *,
        op: ReduceOp = "sum",
        out: Tensor | None = None,
        divisor: int | None = None,
        algorithm: Algorithm = "auto",
        round_id: int = 0,
        timeout_s: float | None = None,
    ) -> CollectiveHandle[Tensor]:
        """Combine the tensors of all ranks elementwise; all get the result, bit-equal.

        Sums are taken in rank order, whatever the algorithm. float16 and bfloat16 are added in float32.

        Args:
            tensor: of equal shape and dtype on all ranks; any layout.
            op: sum, mean, min, max, product; of whole numbers and bool also band, bor, bxor.
            out: memory for the result, of the same shape and dtype; may be ``tensor``. None: new memory.
            divisor: of the mean, by default the number of ranks.
            algorithm: direct, shards, ring, or auto (direct for two ranks and for what is small, else shards). All give
                the same bits. The same on all ranks.

        Raises:
            ValueError: arguments that do not fit.
        """
        check_sendable(tensor)
        arithmetic = self._arithmetic(tensor, op, divisor)
        if out is not None and (out.shape != tensor.shape or out.dtype != tensor.dtype):
            raise ValueError(
                f"out must be {tensor.dtype} of shape {tuple(tensor.shape)} as the tensor is, got {out.dtype} of "
                f"{tuple(out.shape)}"
            )
        operation = all_reduce(tensor, out, arithmetic, algorithm, self.rank, self.world)
        return self._start(operation, name, round_id, timeout_s)

    def reduce(
        self,
        name: str,
        tensor: Tensor,
        *,
        op: ReduceOp = "sum",
        root: int = 0,
        round_id: int = 0,
        timeout_s: float | None = None,
    ) -> CollectiveHandle[Tensor | None]:
        """As :meth:`all_reduce`, but only rank ``root`` gets the result, in new memory; the others get None."""
        check_sendable(tensor)
        self._check_rank("root", root)
        source = plain(tensor)
        wanted, out = new_result(tensor.shape, tensor) if self.rank == root else (source, source)
        arithmetic = self._arithmetic(tensor, op, None)
        operation = ReduceToRoot(source, out, root, arithmetic, self.rank, self.world, wanted=wanted)
        return self._start(operation, name, round_id, timeout_s)

    def reduce_scatter(
        self, name: str, tensor: Tensor, *, op: ReduceOp = "sum", round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[Tensor]:
        """As :meth:`all_reduce`, but rank r gets part r of ``tensor.tensor_split(world)``, in new memory."""
        check_sendable(tensor)
        if tensor.dim() == 0:
            raise ValueError("reduce_scatter: a scalar cannot be split; use all_reduce")
        rows = shard_bounds(tensor.shape[0], self.world)
        row_elems = tensor[0].numel() if tensor.shape[0] else 0
        mine = (rows[self.rank + 1] - rows[self.rank], *tensor.shape[1:])
        wanted, out = new_result(mine, tensor)
        operation = ReduceScatterOperation(
            plain(tensor),
            out,
            [row * row_elems for row in rows],
            self._arithmetic(tensor, op, None),
            self.rank,
            self.world,
            wanted=wanted,
        )
        return self._start(operation, name, round_id, timeout_s)

    # Moving data

    @overload
    def all_gather(
        self, name: str, payload: Tensor, *, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[list[Tensor]]: ...
    @overload
    def all_gather(
        self, name: str, payload: bytes | bytearray | memoryview, *, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[list[bytes]]: ...
    def all_gather(
        self, name: str, payload: Any, *, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[list[Any]]:
        """All payloads on all ranks, in rank order. Bytes or tensors; sizes, shapes and dtypes may differ."""
        operation = data_movement.AllGatherOperation(payload, self.rank, self.world, self._max_bytes)
        return self._start(operation, name, round_id, timeout_s)

    def broadcast(
        self, name: str, payload: Any = None, *, root: int = 0, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[Any]:
        """One payload on all ranks.

        Args:
            payload: at the root bytes or a tensor. Elsewhere, for bytes: None; for a tensor: one of equal shape and
                dtype, which is filled and returned.

        The root's handle ends when all ranks have it.
        """
        self._check_rank("root", root)
        operation = data_movement.BroadcastOperation(payload, root, self.rank, self.world, self._max_bytes)
        return self._start(operation, name, round_id, timeout_s)

    def gather(
        self, name: str, payload: Any, *, root: int = 0, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[list[Any] | None]:
        """All payloads at rank ``root``, in rank order; the others get None, once the root has their payload."""
        self._check_rank("root", root)
        operation = data_movement.Gather(payload, root, self.rank, self.world, self._max_bytes)
        return self._start(operation, name, round_id, timeout_s)

    def scatter(
        self,
        name: str,
        payloads: Sequence[Any] | None = None,
        *,
        root: int = 0,
        round_id: int = 0,
        timeout_s: float | None = None,
    ) -> CollectiveHandle[Any]:
        """Rank r gets ``payloads[r]`` of the root, whose handle ends when all have theirs. The others give None."""
        self._check_rank("root", root)
        operation = data_movement.Scatter(payloads, root, self.rank, self.world, self._max_bytes)
        return self._start(operation, name, round_id, timeout_s)

    def all_to_all(
        self, name: str, payloads: Sequence[Any], *, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[list[Any]]:
        """``payloads[r]`` goes to rank r; the value is the payloads of all ranks for this one. Sizes may differ."""
        operation = data_movement.AllToAll(payloads, self.rank, self.world, self._max_bytes)
        return self._start(operation, name, round_id, timeout_s)

    def send(
        self, name: str, payload: Any, *, to: int, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[None]:
        """A payload for one rank, which receives it by the same name. Ends when that rank has it."""
        self._check_other("to", to)
        return self._start(data_movement.Send(payload, to, self.rank, self.world), name, round_id, timeout_s)

    def recv(
        self, name: str, *, source: int, round_id: int = 0, timeout_s: float | None = None, max_bytes: int | None = None
    ) -> CollectiveHandle[Any]:
        """The payload that rank ``source`` sends by this name: bytes or a tensor, as it was sent.

        Args:
            max_bytes: of the payload; a larger one is refused before memory is taken. None: as the group has it.
        """
        self._check_other("source", source)
        operation = data_movement.Receive(
            source, self.rank, self.world, self._max_bytes if max_bytes is None else max_bytes
        )
        return self._start(operation, name, round_id, timeout_s)

    def barrier(
        self, name: str = "barrier", *, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[tuple[int, ...]]:
        """Wait until all ranks have called it. The value: the ranks that have.

        Raises (on await):
            BarrierTimeout: ``.missing`` have not.
        """
        operation = data_movement.Barrier(self.rank, self.world)
        return self._start(operation, name, round_id, timeout_s, _barrier_timeout)

    # Plain objects: numbers, text, bytes, lists, maps, None. All raise ValueError: an object cannot be sent.

    def all_gather_object(
        self, name: str, value: Any, *, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[list[Any]]:
        """All objects on all ranks, in rank order."""
        operation = data_movement.AllGatherOperation(pack(value), self.rank, self.world, MAX_OBJECT_BYTES)
        return self._start(operation, name, round_id, timeout_s, convert=unpack_all)

    def broadcast_object(
        self, name: str, value: Any = None, *, root: int = 0, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[Any]:
        """The object of rank ``root`` on all ranks; those of the others are not used."""
        self._check_rank("root", root)
        payload = pack(value) if self.rank == root else None
        operation = data_movement.BroadcastOperation(payload, root, self.rank, self.world, MAX_OBJECT_BYTES)
        return self._start(operation, name, round_id, timeout_s, convert=unpack)

    def gather_object(
        self, name: str, value: Any, *, root: int = 0, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[list[Any] | None]:
        """All objects at rank ``root``, in rank order; None elsewhere."""
        self._check_rank("root", root)
        operation = data_movement.Gather(pack(value), root, self.rank, self.world, MAX_OBJECT_BYTES)
        return self._start(operation, name, round_id, timeout_s, convert=unpack_all)

    def scatter_object(
        self,
        name: str,
        values: Sequence[Any] | None = None,
        *,
        root: int = 0,
        round_id: int = 0,
        timeout_s: float | None = None,
    ) -> CollectiveHandle[Any]:
        """Rank r gets ``values[r]`` of the root; all others give None."""
        self._check_rank("root", root)
        payloads = None if values is None else [pack(value) for value in values]
        operation = data_movement.Scatter(payloads, root, self.rank, self.world, MAX_OBJECT_BYTES)
        return self._start(operation, name, round_id, timeout_s, convert=unpack)

    def send_object(
        self, name: str, value: Any, *, to: int, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[None]:
        """An object for one rank, which receives it by the same name."""
        return self.send(name, pack(value), to=to, round_id=round_id, timeout_s=timeout_s)

    def recv_object(
        self, name: str, *, source: int, round_id: int = 0, timeout_s: float | None = None
    ) -> CollectiveHandle[Any]:
        """The object that rank ``source`` sends by this name."""
        self._check_other("source", source)
        operation = data_movement.Receive(source, self.rank, self.world, MAX_OBJECT_BYTES)
        return self._start(operation, name, round_id, timeout_s, convert=unpack)

    # Subgroups

    def subgroup(
        self, ranks: Sequence[int], *, name: str | None = None, timeout_s: float = 60.0
    ) -> AbstractAsyncContextManager[Group]:
        """A group of some of these ranks, in the order given: ``ranks[i]`` is rank i there. All of them call this.

        Args:
            name: of the new group, the same on all its ranks; by default made from this one's and the ranks.

        Raises:
            ValueError: this rank is not among them, or they are no different ranks of this group.
        """
        for rank in ranks:
            self._check_rank("ranks", rank)
        if len(set(ranks)) != len(ranks) or self.rank not in ranks:
            raise ValueError(f"ranks must be different and include this one, {self.rank}, got {list(ranks)}")
        text = f"{self.name}_{'_'.join(map(str, ranks))}"
        if not GROUP_NAME.fullmatch(text):
            text = f"{self.name[:31]}_{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
        return join_group(
            self.bus,
            rank=list(ranks).index(self.rank),
            world=len(ranks),
            name=name or text,
            timeout_s=timeout_s,
            collective_timeout_s=self.timeout_s,
            max_payload_bytes=self._max_bytes,
        )

    # Inside

    def _start(
        self,
        operation: Operation,
        name: str,
        round_id: int,
        timeout_s: float | None,
        timed_out: TimedOut = collective_timeout,
        *,
        convert: Callable[[Any], Any] | None = None,
    ) -> CollectiveHandle[Any]:
        operation.convert = convert
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        if not limit_s > 0:
            raise ValueError(f"timeout_s must be > 0, got {limit_s}")
        engine = self._engine
        engine.start(operation, name, round_id)
        if not operation.done:
            on_loop = threading.get_ident() == self._loop_thread
            if not on_loop or not operation.is_sent:
                engine.progress.wake_io_thread()
            self._deadlines.watch(operation, limit_s, timed_out, on_loop=on_loop)
        return CollectiveHandle(operation, self._loop, self._wait)

    def _arithmetic(self, tensor: Tensor, op: ReduceOp, divisor: int | None) -> Arithmetic:
        if divisor is not None and op != "mean":
            raise ValueError(f"a divisor belongs to op='mean', not to {op!r}")
        if op == "mean" and divisor is None:
            divisor = self.world
        return _arithmetic(tensor.dtype, op, 1 if divisor is None else divisor)

    def _check_rank(self, what: str, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise ValueError(f"{what}: expected a rank of 0 .. {self.world - 1}, got {rank}")

    def _check_other(self, what: str, rank: int) -> None:
        self._check_rank(what, rank)
        if rank == self.rank:
            raise ValueError(f"{what}: rank {rank} is this one")


# Few different ones, and each makes the text that ranks compare.
_arithmetic = functools.lru_cache(maxsize=256)(Arithmetic)


def _barrier_timeout(operation: Operation, timeout_s: float) -> Exception:
    missing = operation.missing
    return BarrierTimeout(
        f"barrier {operation.key.name!r}",
        missing=missing,
        ready=operation.world - len(missing),
        needed=operation.world,
        timeout_s=timeout_s,
    )


def _reason(error: BaseException) -> str:
    """The text that the others get of an error that ends this rank's part."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "was stopped"
    return str(error) if type(error) is GradbusError else f"failed with {summary_of(error)}"


def check_group(call: str, argument: str, given: object) -> None:
    """Check what an actor is given as its group.

    ``call``, ``argument``: as of :func:`~gradbus.runtime.misuse.check_instance`.

    Raises:
        ConfigError: it is no group, or this rank has left it.
    """
    advice = (
        "Give the group of 'async with gradbus.join_group(bus, rank=..., world=...) as group:', and keep the order of "
        "the arguments"
    )
    check_instance(call, argument, given, Group, advice)
    if isinstance(given, Group) and given.is_closed:
        raise ConfigError(
            f"{call}: {argument}: expected a group that this rank is in, got group {given.name!r}, which it has left: "
            f"its 'async with gradbus.join_group(...)' block, or that of its bus, has ended. Construct it within"
        )


@opening("gradbus.join_group", "group")
async def join_group(  # noqa: PLR0913 - of a user's call, each an option by name
    bus: Bus,
    *,
    rank: int,
    world: int,
    name: str = "world",
    timeout_s: float = 60.0,
    collective_timeout_s: float = 60.0,
    early_bytes: int = 256 << 20,
    max_payload_bytes: int = 4 << 30,
    stall_warning_s: float = 10.0,
    describe_missing: DescribeMissing | None = None,
) -> AsyncIterator[Group]:
    """Form a group with the other ranks of the same job, and leave it at the end of the block.

    A bus holds one rank of a group. When the block ends with an exception, the others' collectives fail at once.

    Args:
        bus: from :func:`gradbus.connect`.
        rank: 0 .. world - 1, of this process. world: number of ranks.
        name: of the group, within the job: letters, digits and underscores.
        timeout_s: how long to wait for the others.
        collective_timeout_s: deadline of a collective, from its call, unless it says another.
        early_bytes: payload that is kept at most for collectives not called here yet, the same on all ranks: when half
            of it is in use, the others ask before they send more.
        max_payload_bytes: of one payload of another rank, where its size is not known beforehand.
        stall_warning_s: a collective that waits for so long gets a line in the log that names the ranks it waits for,
            again after twice the time, and so on. 0: none does.
        describe_missing: names ranks that have not come, for the log, and says what to do about them; None: they are
            named by their numbers.

    Raises:
        ConfigError: rank, world or name are wrong, or the ranks do not fit together.
        BarrierTimeout: some ranks have not come; ``.missing``.
        JoinRefused, JobInUse: with security 'identity', this process may not take part.
        BusClosed: the bus was closed. BusError: DDS refused something.
    """
    if not isinstance(world, int) or not 1 <= world <= MAX_WORLD:
        raise ConfigError(f"world {world!r}: expected a number of ranks within 1 .. {MAX_WORLD}")
    if not isinstance(rank, int) or not 0 <= rank < world:
        raise ConfigError(f"rank {rank!r}: expected 0 .. {world - 1} in a world of {world}")
    if not GROUP_NAME.fullmatch(name):
        raise ConfigError(f"group name {name!r}: expected 1 to 64 letters, digits and underscores")
    for what, value in (("timeout_s", timeout_s), ("collective_timeout_s", collective_timeout_s)):
        if not value > 0:
            raise ConfigError(f"{what} must be > 0, got {value}")
    membership = Membership(
        bus,
        name,
        rank,
        world,
        early_bytes=early_bytes,
        early_age_s=max(60.0, 2 * collective_timeout_s),
        stall_warning_s=stall_warning_s,
    )
    ok, reason = False, "could not form the group"
    try:
        await membership.form(timeout_s, describe_missing)
        group = Group(bus, membership, name, collective_timeout_s, max_payload_bytes)
        yield group
        ok, reason = True, group.farewell
    except BaseException as error:
        reason = membership.gave_up or _reason(error)
        raise
    finally:
        await membership.close(ok=ok, reason=reason)
