"""Collectives that reduce, as tasks; and what torch's ReduceOp means here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradbus.runtime.collectives import reductions
from gradbus.runtime.collectives.arithmetic import Arithmetic
from gradbus.runtime.collectives.arithmetic import ReduceOp as EngineOp
from gradbus.runtime.collectives.exchanges import AllGather
from gradbus.runtime.collectives.tensors import check_sendable, dtype_name, plain
from gradbus.torch.exchange import landing, overlap, same_memory
from gradbus.torch.moves import Moves
from gradbus.torch.task import Task, copies, together

_Kind: Any = ReduceOp.RedOpType  # its members are unknown to type checkers
_MAX_SPARSE_BYTES = 4 << 30

# What the engine adds up while the data comes in.
_ENGINE: dict[Any, EngineOp] = {_Kind.SUM: "sum", _Kind.AVG: "mean", _Kind.MIN: "min", _Kind.MAX: "max"}
# What is gathered first, and then combined here in rank order. Each takes two tensors.
_GATHERED: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    _Kind.SUM: torch.add, _Kind.AVG: torch.add, _Kind.PRODUCT: torch.mul, _Kind.BAND: torch.bitwise_and,
    _Kind.BOR: torch.bitwise_or, _Kind.BXOR: torch.bitwise_xor,
}  # fmt: skip


@lru_cache(maxsize=256)
def arithmetic(dtype: torch.dtype, kind: Any, world: int) -> Arithmetic | None:
    """The engine's arithmetic for an operation, or None if it has none: then it is gathered and combined here."""
    op = _ENGINE.get(kind)
    try:
        return None if op is None else Arithmetic(dtype, op, world if op == "mean" else 1)
    except ValueError:
        if kind in _GATHERED:
            return None
        raise


def _weighted(tensor: Tensor, op: Any) -> tuple[Tensor, Any]:
    """The tensor and the kind of operation; PREMUL_SUM becomes a sum of what is multiplied before."""
    check_sendable(tensor)
    if op.op == _Kind.PREMUL_SUM:
        return tensor.detach() * op.factor, _Kind.SUM
    return tensor, op.op


def _combine(parts: Sequence[Tensor], kind: Any) -> Tensor:
    """Combine in order. Raises ValueError: the operation is not known."""
    if kind not in _GATHERED:
        raise ValueError(f"ReduceOp {kind} is not known here")
    total = reduce(_GATHERED[kind], parts)
    if kind == _Kind.AVG:
        total = torch.div(total, len(parts), rounding_mode=None if total.is_floating_point() else "trunc")
    return total


class Reductions(Moves):
    """Adds the reductions to the moves of one rank of one group."""

    def all_reduce(self, tensor: Tensor, op: Any) -> Task:
        """All get the combination of all tensors, in place."""
        if tensor.is_sparse:
            return self._all_reduce_sparse(tensor, op)
        source, kind = _weighted(tensor, op)
        exact = arithmetic(tensor.dtype, kind, self.world)
        if exact is None:
            return self._gathered("all_reduce", source, tensor, kind, root=None)
        operation = reductions.all_reduce(source, tensor.detach(), exact, "auto", self.rank, self.world)
        return Task("all_reduce", [operation], [tensor])

    def all_reduce_coalesced(self, tensors: Sequence[Tensor], op: Any) -> Task:
        """The same for many tensors, which travel together: one collective for each dtype."""
        if len(tensors) == 1:
            return self.all_reduce(tensors[0], op)
        tasks = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            those = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in those])
            task = self.all_reduce(flat, op)
            pieces = flat.split_with_sizes([tensor.numel() for tensor in those])
            tasks += [task, Task("", [], [], copies(list(zip(those, pieces, strict=True))))]
        return together("all_reduce_coalesced", tasks, tensors)

    def reduce(self, tensor: Tensor, op: Any, root: int) -> Task:
        """The root's tensor becomes the combination of all."""
        source, kind = _weighted(tensor, op)
        exact = arithmetic(tensor.dtype, kind, self.world)
        if exact is None:
            return self._gathered("reduce", source, tensor, kind, root=root)
        source = plain(source)
        land = landing(tensor) if self.rank == root else source
        operation = reductions.ReduceToRoot(source, land, root, exact, self.rank, self.world)
        return Task("reduce", [operation], [tensor], copies([(tensor, land)]) if self.rank == root else None)

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], op: Any) -> Task:
        """The output of rank r gets the combination of all ``tensors[r]``."""
        self._check_count("tensors", tensors)
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return self._reduce_scatter(output, flat, [tensor.numel() for tensor in tensors], op)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, op: Any) -> Task:
        """The same for the equal parts of one tensor."""
        if tensor.numel() != output.numel() * self.world:
            raise ValueError("input tensor must be the same size as output size times world size")
        return self._reduce_scatter(output, plain(tensor).view(-1), [output.numel()] * self.world, op)

    def _reduce_scatter(self, output: Tensor, flat: Tensor, sizes: list[int], op: Any) -> Task:
        if output.numel() != sizes[self.rank] or output.dtype != flat.dtype:
            raise ValueError(
                f"reduce_scatter: the output must hold {sizes[self.rank]} elements of {flat.dtype}, got "
                f"{output.numel()} of {output.dtype}"
            )
        flat, kind = _weighted(flat, op)
        exact = arithmetic(flat.dtype, kind, self.world)
        if exact is None:
            return self._gathered_parts(output, flat.split_with_sizes(sizes), kind)
        land = landing(output)
        if overlap(land, flat) and not same_memory(land, flat.split_with_sizes(sizes)[self.rank]):
            flat = flat.clone()
        bounds = [sum(sizes[:rank]) for rank in range(self.world + 1)]
        operation = reductions.ReduceScatter(flat, land, bounds, exact, self.rank, self.world)
        return Task("reduce_scatter", [operation], [output], copies([(output, land)]))

    # What the engine has no arithmetic for

    def _gathered(self, what: str, source: Tensor, into: Tensor, kind: Any, *, root: int | None) -> Task:
        source = plain(source)
        wanted = root is None or self.rank == root
        parts = [torch.empty_like(source) for _ in range(self.world)] if wanted else []
        task = self.all_gather(parts, source) if root is None else self.gather(parts, source, root)

        def finish() -> None:
            into.detach().copy_(_combine(parts, kind).view(into.shape))

        return Task(what, task.operations, [into], finish if wanted else None)

    def _gathered_parts(self, output: Tensor, tensors: Sequence[Tensor], kind: Any) -> Task:
        parts = [torch.empty_like(tensors[self.rank]) for _ in range(self.world)]
        task = self.all_to_all(parts, tensors)

        def finish() -> None:
            output.detach().copy_(_combine(parts, kind).view(output.shape))

        return Task("reduce_scatter", task.operations, [output], finish)

    def _all_reduce_sparse(self, tensor: Tensor, op: Any) -> Task:
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

        return Task("all_reduce", list(gathers), [tensor], finish)
