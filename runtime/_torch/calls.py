"""The collective calls of one rank of one group: for each, the operations that do it, what this rank sends, where what
comes in has its place, and what torch's ReduceOp means here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradbus.runtime.collectives import reductions
from gradbus.runtime.collectives.arithmetic import Arithmetic
from gradbus.runtime.collectives.arithmetic import ReduceOp as EngineOp
from gradbus.runtime.collectives.data_movement import AllGatherOperation, Barrier
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.collectives.staging import copier
from gradbus.runtime.collectives.tensors import dtype_name, plain
from gradbus.torch.shapes import (
    are_ready,
    check,
    check_dtypes,
    overlap,
    same_memory,
    shape_signature,
    staging_tensor,
)
from gradbus.torch.tensor_exchange import RefusingOperation, TensorExchange

_Kind: Any = ReduceOp.RedOpType  # its members are unknown to type checkers
_MAX_SPARSE_BYTES = 4 << 30
_DIVIDED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)  # whole numbers that torch can divide
_ENGINE: dict[Any, EngineOp] = {
    _Kind.SUM: "sum", _Kind.AVG: "mean", _Kind.MIN: "min", _Kind.MAX: "max", _Kind.PRODUCT: "product",
    _Kind.BAND: "band", _Kind.BOR: "bor", _Kind.BXOR: "bxor",
}  # fmt: skip


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """One call on one rank: collectives to start, and what is to be done when they have ended.

    Attributes:
        what: the call, for errors.
        operations: to be started, in this order.
        value: what its future holds; tensors only, and at least one: DDP reads the first without looking.
        finish: put results in their places where the operations could not do so themselves. Each runs once, after all
            operations have ended well, on whatever thread first asks for the result.
    """

    what: str
    operations: Sequence[Operation]
    value: list[Tensor] = field(default_factory=list)
    finish: list[Callable[[], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.value:
            self.value = [torch.empty(0)]

    def sign(self, text: str) -> Self:
        """Add to the signature of all operations: it must be equal on all ranks, and stands in the error if not."""
        for operation in self.operations:
            operation.signature = f"{operation.signature} {text}"
        return self


def together(calls: Sequence[CollectiveCall], value: Sequence[Tensor] = ()) -> CollectiveCall:
    """Several calls of one kind as one."""
    if len(calls) == 1 and not value:
        return calls[0]
    return CollectiveCall(
        f"{calls[0].what}_coalesced" if calls else "empty call",
        [operation for call in calls for operation in call.operations],
        list(value) or [tensor for call in calls for tensor in call.value],
        [finish for call in calls for finish in call.finish],
    )


def copies(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Callable[[], object]]:
    """Functions that copy each second tensor into the first, where they are not the same memory."""
    return [
        copier(into, source)
        for into, source in pairs
        if into is not source and not (into.is_cpu and into.data_ptr() == source.data_ptr())
    ]


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
    """The root refuses what a rank sends for another reduction."""


class CollectiveCalls:
    """Make the calls of one rank of one group. All raise ValueError or RuntimeError for arguments that do not fit."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    # Tensors from rank to rank

    def _exchange(
        self,
        what: str,
        value: Sequence[Tensor],
        *,
        signature: str = "",
        to: Tensor | Mapping[int, Tensor] | None = None,
        into: Mapping[int, Tensor] | None = None,
        receipts: bool = False,
        is_ready: bool = False,
    ) -> CollectiveCall:
        """See :class:`TensorExchange`; tensors to be filled may be strided, unless all are known to be ready."""
        into = into or {}
        lands = into if is_ready else {rank: staging_tensor(tensor) for rank, tensor in into.items()}
        operation = TensorExchange(signature or what, self.rank, self.world, to=to, into=lands, receipts=receipts)
        finish = [] if is_ready else copies((into[rank], lands[rank]) for rank in into)
        return CollectiveCall(what, [operation], list(value), finish)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> CollectiveCall:
        """``outputs[r]`` gets the tensor of rank r; their sizes may differ."""
        self._check_count("outputs", outputs)
        is_ready = are_ready(tensor, outputs)
        if not is_ready:  # all others wait for what is done before the payload leaves
            check(tensor, *outputs)
            check_dtypes(outputs, tensor)
            tensor = plain(tensor)
        if any(rank != self.rank and overlap(tensor, output) for rank, output in enumerate(outputs)):
            tensor = tensor.clone()
        return self._exchange("all_gather", outputs, to=tensor, into=dict(enumerate(outputs)), is_ready=is_ready)

    def all_gather_single(self, output: Tensor, tensor: Tensor) -> CollectiveCall:
        """Part r of the output gets the tensor of rank r."""
        check(output)
        if output.numel() != tensor.numel() * self.world:
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        land = staging_tensor(output)
        call = self.all_gather(land.view(-1).tensor_split(self.world), tensor)
        return CollectiveCall("all_gather_single", call.operations, [output], copies([(output, land)]))

    def all_gather_lists(self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> CollectiveCall:
        """``outputs[r][i]`` gets ``tensors[i]`` of rank r."""
        self._check_count("outputs", outputs)
        calls = [self.all_gather([of_rank[i] for of_rank in outputs], tensor) for i, tensor in enumerate(tensors)]
        return together(calls, [tensor for of_rank in outputs for tensor in of_rank])

    def broadcast(self, tensor: Tensor, root: int) -> CollectiveCall:
        """All get the root's tensor."""
        check(tensor)
        to = plain(tensor) if self.rank == root else None
        into = None if self.rank == root else {root: tensor}
        return self._exchange("broadcast", [tensor], signature=f"broadcast {root}", to=to, into=into, receipts=True)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> CollectiveCall:
        """The root's ``outputs[r]`` gets the tensor of rank r; the others give no outputs."""
        check(tensor, *outputs)
        if self.rank == root:
            self._check_count("outputs", outputs)
            check_dtypes(outputs, tensor)
        return self._exchange(
            "gather",
            outputs or [tensor],
            signature=f"gather {root}",
            to={root: plain(tensor)},
            into=dict(enumerate(outputs)) if self.rank == root else None,
            receipts=True,
        )

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> CollectiveCall:
        """The output of rank r gets the root's ``tensors[r]``; the others give no tensors."""
        check(output, *tensors)
        if self.rank == root:
            self._check_count("tensors", tensors)
            check_dtypes(tensors, output)
        to = {rank: plain(tensor) for rank, tensor in enumerate(tensors)} if self.rank == root else None
        into = {root: output}
        return self._exchange("scatter", [output], signature=f"scatter {root}", to=to, into=into, receipts=True)

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> CollectiveCall:
        """``outputs[r]`` gets what rank r has in the place of this rank in its ``tensors``. Sizes may differ."""
        self._check_count("outputs", outputs)
        self._check_count("tensors", tensors)
        check(*outputs, *tensors)
        check_dtypes(outputs, tensors[0])
        sources = [plain(tensor) for tensor in tensors]
        sources = [s.clone() if any(overlap(s, output) for output in outputs) else s for s in sources]
        return self._exchange("all_to_all", outputs, to=dict(enumerate(sources)), into=dict(enumerate(outputs)))

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> CollectiveCall:
        """The same with the parts of one tensor, cut along its first dimension; without sizes into equal ones."""
        check(output, tensor)
        land, source = staging_tensor(output), plain(tensor)
        call = self.all_to_all(self._cut(land, output_sizes), self._cut(source, sizes))
        return CollectiveCall("all_to_all_single", call.operations, [output], copies([(output, land)]))

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
        return CollectiveCall("barrier", [Barrier(self.rank, self.world)])

    def send(self, tensor: Tensor, to: int) -> CollectiveCall:
        """Ends when the other rank has it."""
        signature = f"send {self.rank} {to}"
        return self._exchange(
            f"send to rank {to}", [tensor], signature=signature, to={to: plain(tensor)}, receipts=True
        )

    def receive(self, tensor: Tensor, source: int) -> CollectiveCall:
        """Fill a tensor with what the other rank sends."""
        signature = f"send {source} {self.rank}"
        return self._exchange(
            f"receive from rank {source}", [tensor], signature=signature, into={source: tensor}, receipts=True
        )

    # Reductions. Their signatures have the shapes of the tensors, which must be equal on all ranks.

    def all_reduce(self, tensor: Tensor, op: Any) -> CollectiveCall:
        """All get the combination of all tensors, in place."""
        if tensor.is_sparse:
            return self._all_reduce_sparse(tensor, op)
        source, kind = _weighted(tensor, op)
        exact = arithmetic(tensor.dtype, kind, self.world)
        operation = reductions.all_reduce(source, tensor, exact, "auto", self.rank, self.world)
        return self._reduction("all_reduce", operation, tensor, kind, [tensor])

    def all_reduce_coalesced(self, tensors: Sequence[Tensor], op: Any) -> CollectiveCall:
        """Return the same for many tensors, which travel together: one collective for each dtype."""
        if len(tensors) == 1:
            return self.all_reduce(tensors[0], op)
        check(*tensors)
        calls = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            those = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in those])
            call = self.all_reduce(flat, op)
            pieces = flat.split_with_sizes([tensor.numel() for tensor in those])
            call.finish += copies(zip(those, pieces, strict=True))
            calls.append(call)
        shapes = shape_signature(*(tensor.shape for tensor in tensors))
        return together(calls, tensors).sign(shapes)

    def reduce(self, tensor: Tensor, op: Any, root: int) -> CollectiveCall:
        """The root's tensor becomes the combination of all."""
        source, kind = _weighted(tensor, op)
        exact = arithmetic(tensor.dtype, kind, self.world)
        source = plain(source)
        land = staging_tensor(tensor) if self.rank == root else source
        operation = _ReduceToRoot(source, land, root, exact, self.rank, self.world)
        if self.rank != root:
            return CollectiveCall("reduce", [operation], [tensor]).sign(shape_signature(tensor.shape))
        return self._reduction("reduce", operation, tensor, kind, [tensor], land)

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], op: Any) -> CollectiveCall:
        """The output of rank r gets the combination of all ``tensors[r]``."""
        self._check_count("tensors", tensors)
        check(*tensors)
        flat = plain(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))
        return self._reduce_scatter(output, flat, tensors, [tensor.numel() for tensor in tensors], op)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, op: Any) -> CollectiveCall:
        """Return the same for the equal parts of one tensor."""
        check(tensor)
        if tensor.numel() != output.numel() * self.world:
            raise ValueError("input tensor must be the same size as output size times world size")
        return self._reduce_scatter(output, plain(tensor).view(-1), [tensor], [output.numel()] * self.world, op)

    def _reduce_scatter(
        self, output: Tensor, flat: Tensor, given: Sequence[Tensor], sizes: list[int], op: Any
    ) -> CollectiveCall:
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
        operation = reductions.ReduceScatterOperation(flat, land, bounds, exact, self.rank, self.world)
        return self._reduction("reduce_scatter", operation, output, kind, given, land)

    def _reduction(
        self,
        what: str,
        operation: Operation,
        result: Tensor,
        kind: Any,
        given: Sequence[Tensor],
        land: Tensor | None = None,
    ) -> CollectiveCall:
        """The call of an operation whose result goes to ``land``, and from there to ``result``.

        A mean of whole numbers is divided at the end.
        """
        finish = [] if land is None else copies([(result, land)])
        if kind == _Kind.AVG and result.dtype in _DIVIDED:
            finish.append(lambda: result.detach().div_(self.world, rounding_mode="trunc"))
        shapes = shape_signature(*[tensor.shape for tensor in given])
        return CollectiveCall(what, [operation], [result], finish).sign(shapes)

    def _all_reduce_sparse(self, tensor: Tensor, op: Any) -> CollectiveCall:
        """Coordinates and values of all ranks, one after the other; what is there twice is added up in rank order."""
        if op.op not in (_Kind.SUM, _Kind.AVG):
            raise ValueError(f"all_reduce of a sparse tensor: only SUM and AVG are defined, got {op.op}")
        own = tensor.detach().coalesce()
        dtype_name(own.dtype)
        gathers = [
            AllGatherOperation(part.contiguous(), self.rank, self.world, _MAX_SPARSE_BYTES)
            for part in (own.indices(), own.values())
        ]

        def finish() -> None:
            indices, values = (torch.cat(gather.value, dim) for gather, dim in zip(gathers, (1, 0), strict=True))
            total = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=True).coalesce()
            tensor.copy_(total / self.world if op.op == _Kind.AVG else total)  # what detach() gives gets a copy alone

        return CollectiveCall("all_reduce", gathers, [tensor], [finish]).sign(shape_signature(tensor.shape))

    def _check_count(self, what: str, given: Sequence[object]) -> None:
        if len(given) != self.world:
            raise ValueError(f"{what}: expected {self.world} tensors, one for each rank, got {len(given)}")
