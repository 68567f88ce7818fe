"""Collectives that reduce, as tasks; and what torch's ReduceOp means here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradbus.runtime.collectives import reductions
from gradbus.runtime.collectives.arithmetic import Arithmetic
from gradbus.runtime.collectives.arithmetic import ReduceOp as EngineOp
from gradbus.runtime.collectives.data_movement import AllGather
from gradbus.runtime.collectives.tensors import dtype_name, plain
from gradbus.torch.call import CollectiveCall, copies, together
from gradbus.torch.moves import Moves
from gradbus.torch.shapes import check
from gradbus.torch.tensor_exchange import RefusingOperation, overlap, same_memory, staging_tensor

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


class Reductions(Moves):
    """Adds the reductions to the moves of one rank of one group."""

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
