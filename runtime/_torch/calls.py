"""The collective calls of one rank of one group: for each, the operations that do it, what this rank sends, where what
comes in has its place, and what torch's ReduceOp means here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradbus.runtime.collectives import reductions
from gradbus.runtime.collectives.arithmetic import Arithmetic
from gradbus.runtime.collectives.arithmetic import ReduceOp as EngineOp
from gradbus.runtime.collectives.data_movement import AllGather, Barrier
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.collectives.tensors import dtype_name, plain
from gradbus.torch.call import CollectiveCall, copies, together
from gradbus.torch.shapes import are_ready, check
from gradbus.torch.tensor_exchange import RefusingOperation, TensorExchange, overlap, same_memory, staging_tensor

_OWN_LATER_BYTES = 256 << 10
_Kind: Any = ReduceOp.RedOpType  # its members are unknown to type checkers
_MAX_SPARSE_BYTES = 4 << 30
_DIVIDED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)  # whole numbers that torch can divide
_ENGINE: dict[Any, EngineOp] = {
    _Kind.SUM: "sum", _Kind.AVG: "mean", _Kind.MIN: "min", _Kind.MAX: "max", _Kind.PRODUCT: "product",
    _Kind.BAND: "band", _Kind.BOR: "bor", _Kind.BXOR: "bxor",
}  # fmt: skip


@lru_cache(maxsize=256)
def arithmetic(dtype: torch.dtype, kind: Any, world: int) -> Arithmetic:
    """The engine's arithmetic for an operation. A mean of whole numbers is a sum there, divided at the end.

    Raises:
        ValueError: the operation is not known, or makes no sense for these numbers.
    """
    if kind not in _ENGINE:
        raise ValueError(f"ReduceOp {kind} is not known here; there are {', '.join(known.name for known in _ENGINE)}")
    if kind == _Kind.AVG and dtype in _DIVIDED:
        return Arithmetic(dtype, "sum")
    return Arithmetic(dtype, _ENGINE[kind], world if kind == _Kind.AVG else 1)


def _weighted(tensor: Tensor, op: Any) -> tuple[Tensor, Any]:
    """The tensor and the kind of operation; PREMUL_SUM becomes a sum of what is multiplied before."""
    check(tensor)
    if op.op == _Kind.PREMUL_SUM:
        return tensor.detach() * op.factor, _Kind.SUM
    return tensor, op.op


class _ReduceToRoot(RefusingOperation, reductions.ReduceToRoot):
    """The root tells who reduces something else."""


class CollectiveCalls:
    """Make the calls of one rank of one group. All raise ValueError or RuntimeError for arguments that do not fit."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> CollectiveCall:
        """``outputs[r]`` gets the tensor of rank r; their sizes may differ."""
        self._check_count("outputs", outputs)
        lands, source = outputs, tensor
        if not are_ready(tensor, outputs):  # all others wait for what is done before the payload leaves
            check(tensor, *outputs)
            _check_dtypes(outputs, tensor)
            lands, source = [staging_tensor(output) for output in outputs], plain(tensor)
        into = dict(enumerate(lands))
        land = into.pop(self.rank)
        if any(overlap(source, other) for other in into.values()):
            source = source.clone()
        own = _own_part(land, source)
        operation = TensorExchange("all_gather", self.rank, self.world, to_all=source, into=into, own=own)
        elsewhere = None
        if lands is not outputs:
            elsewhere = copies([pair for pair in zip(outputs, lands, strict=True) if pair[0] is not pair[1]])
        return CollectiveCall("all_gather", [operation], list(outputs), elsewhere)

    def all_gather_single(self, output: Tensor, tensor: Tensor) -> CollectiveCall:
        """Part r of the output gets the tensor of rank r."""
        check(output)
        if output.numel() != tensor.numel() * self.world:
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        land = staging_tensor(output)
        task = self.all_gather(land.view(-1).tensor_split(self.world), tensor)
        return CollectiveCall("all_gather_single", task.operations, [output], copies([(output, land)]))

    def all_gather_lists(self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> CollectiveCall:
        """``outputs[r][i]`` gets ``tensors[i]`` of rank r."""
        self._check_count("outputs", outputs)
        tasks = [self.all_gather([of_rank[i] for of_rank in outputs], tensor) for i, tensor in enumerate(tensors)]
        return together("all_gather_coalesced", tasks, [t for of_rank in outputs for t in of_rank])

    def broadcast(self, tensor: Tensor, root: int) -> CollectiveCall:
        """All get the root's tensor."""
        check(tensor)
        signature = f"broadcast {root}"
        if self.rank == root:
            operation = TensorExchange(signature, self.rank, self.world, to_all=plain(tensor), receipts=True)
            return CollectiveCall("broadcast", [operation], [tensor])
        land = staging_tensor(tensor)
        operation = TensorExchange(signature, self.rank, self.world, into={root: land}, receipts=True)
        return CollectiveCall("broadcast", [operation], [tensor], copies([(tensor, land)]))

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> CollectiveCall:
        """The root's ``outputs[r]`` gets the tensor of rank r; the others give no outputs."""
        check(tensor, *outputs)
        signature = f"gather {root}"
        if self.rank != root:
            operation = TensorExchange(signature, self.rank, self.world, to={root: plain(tensor)}, receipts=True)
            return CollectiveCall("gather", [operation], [tensor])
        self._check_count("outputs", outputs)
        _check_dtypes(outputs, tensor)
        lands = [staging_tensor(output) for output in outputs]
        _put(lands[root], plain(tensor))
        operation = TensorExchange(signature, self.rank, self.world, into=dict(enumerate(lands)), receipts=True)
        return CollectiveCall("gather", [operation], list(outputs), copies(list(zip(outputs, lands, strict=True))))

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> CollectiveCall:
        """The output of rank r gets the root's ``tensors[r]``; the others give no tensors."""
        check(output, *tensors)
        signature = f"scatter {root}"
        land = staging_tensor(output)
        if self.rank != root:
            operation = TensorExchange(signature, self.rank, self.world, into={root: land}, receipts=True)
            return CollectiveCall("scatter", [operation], [output], copies([(output, land)]))
        self._check_count("tensors", tensors)
        _check_dtypes(tensors, output)
        sources = [plain(tensor) for tensor in tensors]
        output.detach().copy_(sources[root].view(output.shape))
        operation = TensorExchange(signature, self.rank, self.world, to=dict(enumerate(sources)), receipts=True)
        return CollectiveCall("scatter", [operation], [output])

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> CollectiveCall:
        """``outputs[r]`` gets what rank r has in the place of this rank in its ``tensors``. Sizes may differ."""
        self._check_count("outputs", outputs)
        self._check_count("tensors", tensors)
        check(*outputs, *tensors)
        _check_dtypes(outputs, tensors[0])
        lands = [staging_tensor(output) for output in outputs]
        sources = [plain(tensor) for tensor in tensors]
        sources = [s.clone() if any(overlap(s, land) for land in lands) else s for s in sources]
        _put(lands[self.rank], sources[self.rank])
        operation = TensorExchange(
            "all_to_all", self.rank, self.world, to=dict(enumerate(sources)), into=dict(enumerate(lands))
        )
        return CollectiveCall("all_to_all", [operation], list(outputs), copies(list(zip(outputs, lands, strict=True))))

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> CollectiveCall:
        """The same with the parts of one tensor, cut along its first dimension; without sizes into equal ones."""
        check(output, tensor)
        land, source = staging_tensor(output), plain(tensor)
        task = self.all_to_all(self._cut(land, output_sizes), self._cut(source, sizes))
        return CollectiveCall("all_to_all_single", task.operations, [output], copies([(output, land)]))

    def _cut(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        if not sizes:
            if tensor.size(0) % self.world:
                raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
            sizes = [tensor.size(0) // self.world] * self.world
        elif len(sizes) != self.world:
            raise RuntimeError(f"Number of tensor splits not equal to group size: {len(sizes)} for {self.world} ranks")
        if sum(sizes) != tensor.size(0):
            raise RuntimeError("Split sizes doesn't match total dim 0 size")
        return list(tensor.split_with_sizes(list(sizes)))

    def barrier(self) -> CollectiveCall:
        """Ends when all have called it."""
        operation: Operation = Barrier(self.rank, self.world)
        return CollectiveCall("barrier", [operation])

    def send(self, tensor: Tensor, to: int) -> CollectiveCall:
        """Ends when the other rank has it."""
        check(tensor)
        operation = TensorExchange(
            f"send {self.rank} {to}", self.rank, self.world, to={to: plain(tensor)}, receipts=True, peers=[to]
        )
        return CollectiveCall(f"send to rank {to}", [operation], [tensor])

    def receive(self, tensor: Tensor, source: int) -> CollectiveCall:
        """What the other rank sends."""
        check(tensor)
        land = staging_tensor(tensor)
        operation = TensorExchange(
            f"send {source} {self.rank}", self.rank, self.world, into={source: land}, receipts=True, peers=[source]
        )
        return CollectiveCall(f"receive from rank {source}", [operation], [tensor], copies([(tensor, land)]))

    def all_reduce(self, tensor: Tensor, op: Any) -> CollectiveCall:
        """All get the combination of all tensors, in place."""
        if tensor.is_sparse:
            return self._all_reduce_sparse(tensor, op)
        source, kind = _weighted(tensor, op)
        exact = arithmetic(tensor.dtype, kind, self.world)
        operation = reductions.all_reduce(source, tensor, exact, "auto", self.rank, self.world)
        return self._mean(CollectiveCall("all_reduce", [operation], [tensor]), tensor, kind)

    def all_reduce_coalesced(self, tensors: Sequence[Tensor], op: Any) -> CollectiveCall:
        """The same for many tensors, which travel together: one collective for each dtype."""
        if len(tensors) == 1:
            return self.all_reduce(tensors[0], op)
        check(*tensors)
        tasks = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            those = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in those])
            task = self.all_reduce(flat, op)
            pieces = flat.split_with_sizes([tensor.numel() for tensor in those])
            tasks += [task, CollectiveCall("", [], [], copies(list(zip(those, pieces, strict=True))))]
        return together("all_reduce_coalesced", tasks, tensors)

    def reduce(self, tensor: Tensor, op: Any, root: int) -> CollectiveCall:
        """The root's tensor becomes the combination of all."""
        source, kind = _weighted(tensor, op)
        exact = arithmetic(tensor.dtype, kind, self.world)
        source = plain(source)
        land = staging_tensor(tensor) if self.rank == root else source
        operation = _ReduceToRoot(source, land, root, exact, self.rank, self.world)
        if self.rank != root:
            return CollectiveCall("reduce", [operation], [tensor])
        return self._mean(CollectiveCall("reduce", [operation], [tensor], copies([(tensor, land)])), tensor, kind)

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], op: Any) -> CollectiveCall:
        """The output of rank r gets the combination of all ``tensors[r]``."""
        self._check_count("tensors", tensors)
        check(*tensors)
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return self._reduce_scatter(output, flat, [tensor.numel() for tensor in tensors], op)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, op: Any) -> CollectiveCall:
        """The same for the equal parts of one tensor."""
        check(tensor)
        if tensor.numel() != output.numel() * self.world:
            raise ValueError("input tensor must be the same size as output size times world size")
        return self._reduce_scatter(output, plain(tensor).view(-1), [output.numel()] * self.world, op)

    def _reduce_scatter(self, output: Tensor, flat: Tensor, sizes: list[int], op: Any) -> CollectiveCall:
        check(output)
        if output.numel() != sizes[self.rank] or output.dtype != flat.dtype:
            raise ValueError(
                f"reduce_scatter: the output must hold {sizes[self.rank]} elements of {flat.dtype}, got "
                f"{output.numel()} of {output.dtype}"
            )
        flat, kind = _weighted(flat, op)
        exact = arithmetic(flat.dtype, kind, self.world)
        land = staging_tensor(output)
        if overlap(land, flat) and not same_memory(land, flat.split_with_sizes(sizes)[self.rank]):
            flat = flat.clone()
        bounds = [sum(sizes[:rank]) for rank in range(self.world + 1)]
        operation = reductions.ReduceScatter(flat, land, bounds, exact, self.rank, self.world)
        return self._mean(
            CollectiveCall("reduce_scatter", [operation], [output], copies([(output, land)])), output, kind
        )

    def _mean(self, task: CollectiveCall, tensor: Tensor, kind: Any) -> CollectiveCall:
        """Divide what has come into the tensor, if that is a mean of whole numbers."""
        if kind != _Kind.AVG or tensor.dtype not in _DIVIDED:
            return task
        before = task.finish

        def finish() -> None:
            if before is not None:
                before()
            tensor.detach().div_(self.world, rounding_mode="trunc")

        task.finish = finish
        return task

    def _all_reduce_sparse(self, tensor: Tensor, op: Any) -> CollectiveCall:
        """Coordinates and values of all ranks, one after the other; what is there twice is added up in rank order."""
        if op.op not in (_Kind.SUM, _Kind.AVG):
            raise ValueError(f"all_reduce of a sparse tensor: only SUM and AVG are defined, got {op.op}")
        own = tensor.detach().coalesce()
        dtype_name(own.dtype)
        gathers = [
            AllGather(part.contiguous(), self.rank, self.world, _MAX_SPARSE_BYTES)
            for part in (own.indices(), own.values())
        ]

        def finish() -> None:
            indices, values = (torch.cat(gather.value, dim) for gather, dim in zip(gathers, (1, 0), strict=True))
            total = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=True).coalesce()
            tensor.copy_(total / self.world if op.op == _Kind.AVG else total)  # what detach() gives gets a copy alone

        return CollectiveCall("all_reduce", list(gathers), [tensor], finish)

    def _check_count(self, what: str, given: Sequence[object]) -> None:
        if len(given) != self.world:
            raise ValueError(f"{what}: expected {self.world} tensors, one for each rank, got {len(given)}")


def _check_dtypes(tensors: Sequence[Tensor], like: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != like.dtype:
            raise ValueError(f"tensors of one collective have one dtype, got {tensor.dtype} and {like.dtype}")


def _put(land: Tensor, source: Tensor) -> None:
    """The own part, which does not travel."""
    if not same_memory(land, source):
        land.copy_(source.view(land.shape))


def _own_part(land: Tensor, source: Tensor) -> Callable[[], object] | None:
    """What is to be called to put the own part in its place, when the others' is on its way: they need not wait for it.
    A large part is put there at once, as the collective can take nothing in meanwhile."""
    if source.nbytes > _OWN_LATER_BYTES:
        _put(land, source)
        return None
    if same_memory(land, source):
        return None
    return partial(land.copy_, source if source.shape == land.shape else source.view(land.shape))
