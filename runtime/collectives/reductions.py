"""all_reduce, reduce and reduce_scatter, by three algorithms that give the same bits.

- ``direct``: everybody sends everything to everybody and adds up for itself. One step: best for two ranks, and for what
  is small.
- ``shards``: a rank adds up one shard of the vector, for which it gets that shard from all others, and sends the sum to
  all (reduce-scatter, then allgather). Two steps, 2 (N-1)/N of the vector in and out for each rank.
- ``ring``: partial sums go from rank 0 up to the last one, the results from there once around. Each rank talks to its
  two neighbours only.

The textbook's ring (each chunk starts at another rank) would add each chunk in another order. This one adds in rank
order as the others do, at the price that a link carries 2 instead of 2 (N-1)/N vectors; chunks follow one another
through it, so the links are busy all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gradbus.runtime.collectives.arithmetic import Arithmetic
from gradbus.runtime.collectives.operation import IntoMemory, Operation, Stream
from gradbus.runtime.collectives.staging import copier, host_tensor
from gradbus.runtime.collectives.tensors import NOTHING, Bytes, as_bytes, is_plain, plain
from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.wire.frames import CHUNK_BYTES

Algorithm = Literal["auto", "direct", "ring", "shards"]
ALGORITHMS = ("auto", "direct", "ring", "shards")

SMALL_BYTES = 64 * 1024  # up to here one message each costs less than two steps


def choose(algorithm: Algorithm, world: int, size_bytes: int) -> Algorithm:
    """The algorithm for a vector of this size. Raises ValueError for an unknown name."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r}: expected one of {', '.join(ALGORITHMS)}")
    if algorithm != "auto":
        return algorithm
    return "direct" if world <= 2 or size_bytes <= SMALL_BYTES else "shards"


def shard_bounds(numel: int, world: int) -> list[int]:
    """Where the shards of ``torch.tensor_split`` begin, and the end: world + 1 numbers."""
    base, more = divmod(numel, world)
    return [rank * base + min(rank, more) for rank in range(world + 1)]


class ChunkwiseReduction:
    """Adds up a region that all ranks contribute to, chunk by chunk, each as soon as all contributions are there.

    A chunk waits for its last contribution in the memory of DDS, where it lies anyway. To add up earlier would gain
    nothing: in rank order everything waits for the lowest rank that is late.
    """

    def __init__(self, operation: Reduction, region: slice, out: Bytes, done: Callable[[int], None]) -> None:
        """
        Args:
            region: bytes of the operation's vector; its own part of it is there. out: memory for their result.
            done: called with the number of each chunk when it is reduced.
        """
        self._arithmetic, self._rank = operation.arithmetic, operation.rank
        self._own = operation.own[region]
        self._out = out
        self._done = done
        self.chunks = -(-len(self._own) // CHUNK_BYTES)
        self._parts = [[NOTHING] * operation.world for _ in range(self.chunks)]  # by rank
        self._awaited = [operation.world - 1] * self.chunks

    def offer(self, rank: int, seq: int, data: Bytes) -> None:
        """Take the contribution of another rank to a chunk."""
        self._parts[seq][rank] = data
        self.one_less(seq)

    def hold(self, seq: int) -> None:
        """Let a chunk wait for one thing more: a call of :meth:`one_less`."""
        self._awaited[seq] += 1

    def one_less(self, seq: int) -> None:
        """Count one thing as here that the chunk waits for, and reduce it after the last one."""
        self._awaited[seq] -= 1
        if self._awaited[seq]:
            return
        here = slice(seq * CHUNK_BYTES, (seq + 1) * CHUNK_BYTES)
        operands, self._parts[seq] = self._parts[seq], []
        operands[self._rank] = self._own[here]
        self._arithmetic.reduce(operands, self._out[here])
        self._done(seq)


class Contribution(Stream):
    """The contribution of one rank to a reduction."""

    def __init__(self, reduction: ChunkwiseReduction, rank: int, region_bytes: int) -> None:
        super().__init__(region_bytes)
        self._reduction = reduction
        self._rank = rank

    def chunk(self, seq: int, offset: int, data: Bytes) -> None:
        self._reduction.offer(self._rank, seq, data)


class Reduction(Operation):
    """Base: one vector in, one out, which may be the same memory."""

    def __init__(
        self,
        what: str,
        tensor: Tensor,
        out: Tensor,
        arithmetic: Arithmetic,
        rank: int,
        world: int,
        *,
        wanted: Tensor | None = None,
    ) -> None:
        """
        Args:
            tensor, out: plain memory; the same or not overlapping.
            wanted: what the caller gets: the result is copied there at the end. By default ``out`` itself.
        """
        super().__init__(f"{what} {arithmetic.signature} {tensor.numel()}", rank, world)
        self.arithmetic = arithmetic
        self.tensor = out
        self.wanted = out if wanted is None else wanted
        self._copy = None if self.wanted is out else copier(self.wanted, out)
        self.itemsize = arithmetic.itemsize
        self.out = as_bytes(out)
        self.in_place = tensor.data_ptr() == out.data_ptr() and len(self.out) > 0
        self.own = self.out if self.in_place and tensor.nbytes == len(self.out) else as_bytes(tensor)

    def collect(self, region: slice, out: Bytes, done: Callable[[int], None]) -> ChunkwiseReduction:
        """Expect the parts of a region of all others, and reduce it into ``out``."""
        reduction = ChunkwiseReduction(self, region, out, done)
        if reduction.chunks:
            for sender in self.others:
                self.expect(sender, 0, Contribution(reduction, sender, region.stop - region.start))
        return reduction

    def release(self) -> None:
        self.own = self.out = NOTHING
        self.tensor = self.wanted = _NO_TENSOR
        self._copy = None

    def result(self) -> Tensor | None:
        if self._copy is not None:
            self._copy()
        return self.wanted

    @property
    def whole(self) -> slice:
        """The bytes of the vector."""
        return slice(0, len(self.own))


class DirectAllReduce(Reduction):
    """Everybody sends everything to everybody."""

    def post(self) -> None:
        if self.world == 1:
            self.arithmetic.reduce([self.own], self.out)
            return
        reduction = self.collect(self.whole, self.out, _nothing)
        if not self.in_place:
            if len(self.own):
                self.send(None, 0, self.own)
            return
        for seq in range(reduction.chunks):
            reduction.hold(seq)  # a chunk that is not sent yet must not be written over
        if len(self.own):
            self.send(None, 0, self.own, written=reduction.one_less)


class ShardedAllReduce(Reduction):
    """Reduce-scatter straight to the owner of each shard, then everybody sends its sum to all."""

    def post(self) -> None:
        bounds = [edge * self.itemsize for edge in shard_bounds(len(self.own) // self.itemsize, self.world)]
        mine = slice(bounds[self.rank], bounds[self.rank + 1])
        result = self.out[mine]
        if self.world == 1:
            self.arithmetic.reduce([self.own], self.out)
            return

        def pass_on(seq: int) -> None:
            self.send(None, 1, result, only=[seq], is_ready=True)  # all have sent their part

        for other in self.others:
            region = self.out[bounds[other] : bounds[other + 1]]
            if len(region):
                self.expect(other, 1, IntoMemory(region))
        self.collect(mine, result, pass_on)
        for other in self.others:
            region = self.own[bounds[other] : bounds[other + 1]]
            if len(region):
                self.send(other, 0, region)


class RingAllReduce(Reduction):
    """Partial sums up the ranks, results once around. Part 0 are partial sums, part 1 results."""

    def post(self) -> None:
        if self.world == 1:
            self.arithmetic.reduce([self.own], self.out)
            return
        if not len(self.own):
            return
        link: _Link | None = None
        before, after, last = (self.rank - 1) % self.world, (self.rank + 1) % self.world, self.world - 1
        partial = self.arithmetic.partial
        numel = len(self.own) // self.itemsize
        if self.rank == 0:
            start = self.own
            if partial.dtype != self.arithmetic.dtype:  # half precision travels as float32 until it is complete
                start = np.empty(numel * partial.itemsize, np.uint8)
                _widen(self.arithmetic, self.own, start)
            self.send(after, 0, start)
        else:
            total = self.out
            if self.rank != last and partial.dtype != self.arithmetic.dtype:
                total = np.empty(numel * partial.itemsize, np.uint8)
            link = _Link(self, partial, total, after)
            self.expect(before, 0, link)
        if self.rank != last:
            # The last chunk comes when its own part has been used by all, so it may be written over by then.
            passes_on = after != last
            forward = self._forward(after) if passes_on else None
            self.expect(before, 1, _Results(self.out, forward, link, partial.itemsize // self.itemsize))

    def _forward(self, after: int) -> Callable[[int], None]:
        return lambda seq: self.send(after, 1, self.out, only=[seq], is_ready=True)


class _Link(Stream):
    """Partial sums of the rank before: the own part is added, and they go on."""

    def __init__(self, operation: RingAllReduce, partial: Arithmetic, total: Bytes, after: int) -> None:
        """``total``: memory for what goes on."""
        numel = len(operation.own) // operation.itemsize
        super().__init__(numel * partial.itemsize)
        self._operation = operation
        self._arithmetic = operation.arithmetic
        self._partial = partial
        self._total = total
        self._after = after
        self._last = operation.rank == operation.world - 1
        self._fresh = _Freshness(len(total)) if self._last else None

    def chunk(self, seq: int, offset: int, data: Bytes) -> None:
        first, last = offset // self._partial.itemsize, (offset + len(data)) // self._partial.itemsize
        size = self._operation.itemsize
        out_size = size if self._last else self._partial.itemsize
        own = self._operation.own[first * size : last * size]
        here = slice(first * out_size, last * out_size)
        self._arithmetic.extend(data, own, self._total[here], last=self._last)
        if self._fresh is None:
            self._operation.send(self._after, 0, self._total, only=[seq])
            return
        for number in self._fresh.add(here):
            self._operation.send(self._after, 1, self._total, only=[number], is_ready=True)


class _Results(IntoMemory):
    """Results, which lie where the own part and the partial sums lay: none before those have been used.

    No order of arrival brings that about, as a result comes of the sums that this rank has passed on. Only a rank that
    sends what is none does, and then this rank would pass that on as its own.
    """

    def __init__(
        self, memory: Bytes, arrived: Callable[[int], None] | None, sums: _Link | None, sums_per_result: int
    ) -> None:
        """``sums``: partial sums that this rank gets, None on the first one; so many chunks of them for one result."""
        super().__init__(memory, arrived)
        self._sums = sums
        self._sums_per_result = sums_per_result

    def chunk(self, seq: int, offset: int, data: Bytes) -> None:
        if self._sums is not None and not self._sums.has(seq * self._sums_per_result, self._sums_per_result):
            raise CollectiveError(f"sent chunk {seq} of the result before the partial sums that it is made of")
        super().chunk(seq, offset, data)


class _Freshness:
    """Which chunks of the result are whole: with partial sums in float32, two chunks come in for one of half size."""

    def __init__(self, size_bytes: int) -> None:
        self._left = [
            min(CHUNK_BYTES, size_bytes - start) for start in range(0, size_bytes, CHUNK_BYTES)
        ]  # bytes to come, by chunk

    def add(self, here: slice) -> list[int]:
        """New bytes, all within one chunk. Returns the chunks that are whole now."""
        number = here.start // CHUNK_BYTES
        self._left[number] -= here.stop - here.start
        return [number] if self._left[number] == 0 else []


class ReduceScatterOperation(Reduction):
    """Everybody gets one shard of the result."""

    def __init__(
        self,
        tensor: Tensor,
        out: Tensor,
        bounds: list[int],
        arithmetic: Arithmetic,
        rank: int,
        world: int,
        *,
        wanted: Tensor | None = None,
    ) -> None:
        """``bounds``: in elements, of the shards of the flat vector. ``out``: the own shard."""
        super().__init__("reduce_scatter", tensor, out, arithmetic, rank, world, wanted=wanted)
        self.bounds = [edge * self.itemsize for edge in bounds]

    def post(self) -> None:
        mine = slice(self.bounds[self.rank], self.bounds[self.rank + 1])
        if self.world == 1:
            self.arithmetic.reduce([self.own], self.out)
            return
        self.collect(mine, self.out, _nothing)
        for other in self.others:
            region = self.own[self.bounds[other] : self.bounds[other + 1]]
            if len(region):
                self.send(other, 0, region)


class ReduceToRoot(Reduction):
    """Everybody sends to one rank, which adds up."""

    def __init__(
        self,
        tensor: Tensor,
        out: Tensor,
        root: int,
        arithmetic: Arithmetic,
        rank: int,
        world: int,
        *,
        wanted: Tensor | None = None,
    ) -> None:
        super().__init__(f"reduce->{root}", tensor, out, arithmetic, rank, world, wanted=wanted)
        self.root = root

    def post(self) -> None:
        if self.world == 1:
            self.arithmetic.reduce([self.own], self.out)
        elif self.rank == self.root:
            self.collect(self.whole, self.out, _nothing)
            if not len(self.own):
                self._reduced()
        else:
            self.await_acks([self.root])
            if len(self.own):
                self.send(self.root, 0, self.own)

    def stream_done(self, sender: int, part: int) -> None:
        if part == 0 and all(stream.complete for stream in self._streams.values()):
            self._reduced()

    def _reduced(self) -> None:
        for other in self.others:
            self.acknowledge(other)

    def result(self) -> Tensor | None:
        return super().result() if self.rank == self.root else None


def _widen(arithmetic: Arithmetic, half: Bytes, out: Bytes) -> None:
    kind = np.float16 if arithmetic.dtype == torch.float16 else np.uint16
    out.view(np.float32)[:] = arithmetic.widen(half.view(kind))


def _nothing(seq: int) -> None:
    pass


_NO_TENSOR = torch.empty(0)

_KINDS: dict[str, type[Reduction]] = {"direct": DirectAllReduce, "shards": ShardedAllReduce, "ring": RingAllReduce}


def all_reduce(
    tensor: Tensor, out: Tensor | None, arithmetic: Arithmetic, algorithm: Algorithm, rank: int, world: int
) -> Operation:
    """The operation, and with it memory for the result where ``out`` is none that can be used as it is."""
    source = plain(tensor)
    if out is None:
        wanted, target = new_result(source.shape, tensor)
    else:
        wanted = out.detach() if out.requires_grad else out
        if is_plain(wanted):
            target = wanted
            if _overlap_in_part(source, target):
                source = source.clone()
        else:
            target = host_tensor(source.shape, source.dtype, wanted.device)
    chosen = choose(algorithm, world, source.nbytes)
    return _KINDS[chosen](f"all_reduce {chosen}", source, target, arithmetic, rank, world, wanted=wanted)


def new_result(shape: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
    """New memory for a result: with a tensor's dtype and on its device, and memory of the CPU; one if that is it."""
    host = host_tensor(shape, like.dtype, like.device)
    return (host if like.is_cpu else torch.empty(shape, dtype=like.dtype, device=like.device)), host


def _overlap_in_part(one: Tensor, other: Tensor) -> bool:
    a, b = one.data_ptr(), other.data_ptr()
    return a != b and a < b + other.nbytes and b < a + one.nbytes
