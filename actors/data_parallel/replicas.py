"""Keeping the models of all ranks equal, and the proof that they are; or the mean of models that are not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradbus.runtime.algorithms.replicas import fingerprint
from gradbus.runtime.collectives import Group
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.errors import CollectiveError, ConfigError, ReplicasDiverged
from gradbus.runtime.testing.journal import Probe, no_probe

K = TypeVar("K")

_MAX_DIMENSIONS = 64  # as many as torch takes

PIECE_BYTES = (
    64 << 20
)  # tensors are sent in messages of about this size: few, and none needs a second copy of the model


def describe_layout(model: nn.Module) -> list[str]:
    """One line per parameter and buffer: what must be equal on all ranks before anything is sent."""
    parameters = [(name, p, "trained" if p.requires_grad else "frozen") for name, p in model.named_parameters()]
    buffers = [(name, buffer, "buffer") for name, buffer in model.named_buffers()]
    return [f"{name} {tensor.dtype} {tuple(tensor.shape)} {kind}" for name, tensor, kind in parameters + buffers]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, not copied."""
    parameters = {f"parameter/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return parameters | {f"buffer/{name}": buffer for name, buffer in model.named_buffers()}


def check_equal(what: str, of_ranks: Sequence[Mapping[str, Any]], hint: str = "") -> None:
    """Raises ConfigError: a rank's values differ from those of most ranks; the text names ranks, keys and values, and
    ends with what to do (``hint``)."""
    for key in dict.fromkeys(key for values in of_ranks for key in values):
        found = [repr(values.get(key, "missing")) for values in of_ranks]
        usual = max(Counter(found).items(), key=lambda item: (item[1], item[0] == found[0]))[0]
        odd = [rank for rank, value in enumerate(found) if value != usual]
        if odd:
            differing = ", ".join(f"rank {rank} has {found[rank]}" for rank in odd)
            raise ConfigError(
                f"{what} must be equal on all ranks: {key} is {usual}, but {differing}{hint and f'. {hint}'}"
            )


def check_equal_layouts(of_ranks: Sequence[Sequence[str]]) -> None:
    """Raises ConfigError: the models differ; the text names the ranks, and the first line that differs."""
    usual = Counter(map(tuple, of_ranks)).most_common(1)[0]
    reference = tuple(of_ranks[0]) if usual[1] == 1 else usual[0]
    for rank, layout in enumerate(of_ranks):
        if tuple(layout) == reference:
            continue
        length = max(len(layout), len(reference))
        both = zip(_padded(layout, length), _padded(reference, length), strict=True)
        here, there = next((here, there) for here, there in both if here != there)
        raise ConfigError(
            f"the model of rank {rank} differs from that of the others: {here!r} where they have {there!r}"
        )


def _padded(layout: Sequence[str], length: int) -> list[str]:
    return [*layout, *["nothing"] * (length - len(layout))]


@dataclass(frozen=True, slots=True, eq=False)
class MeanModel:
    """The mean of models that differ.

    Attributes:
        tensors: as in :func:`model_tensors`: means over the ranks of what is floating point, in float32 and rounded
            once; the rest is rank 0's.
        distance: of the ranks' parameters x_i from their mean x: the root of the mean of |x_i - x|^2, over |x|.
    """

    tensors: Mapping[str, Tensor]
    distance: float


class Replicas:
    """One rank's copy of the model among those of the group."""

    def __init__(
        self, group: Group, compute: ComputeThread, model: nn.Module, probe: Probe | None = None, *, timeout_s: float
    ) -> None:
        """``timeout_s``: of each exchange. ``probe``: records the hashes that are compared."""
        self._probe = probe or no_probe()
        self._group = group
        self._compute = compute
        self._model = model
        self._timeout_s = timeout_s

    async def broadcast(self, name: str, tensors: Sequence[Tensor], *, round_id: int = 0, root: int = 0) -> None:
        """Overwrite the tensors, equal in number, shape and dtype on all ranks, by those of rank ``root``."""
        named = dict(enumerate(tensors))
        for number, keys in enumerate(_pieces(named)):
            piece = [named[key] for key in keys]
            packed = await self._compute.run(_pack, piece)
            handle = self._group.broadcast(
                f"{name}/{number}", packed, root=root, round_id=round_id, timeout_s=self._timeout_s
            )
            await handle
            if self._group.rank != root:
                await self._compute.run(_unpack, packed, piece)

    async def broadcast_model(self) -> None:
        """Parameters, frozen ones as well, and buffers."""
        await self.broadcast("worker/model", [*self._model.parameters(), *self._model.buffers()])

    async def broadcast_buffers(self, step: int) -> None:
        """Buffers only. Each rank updates its own while it trains (running means of batch norm, for example)."""
        await self.broadcast("worker/buffers", list(self._model.buffers()), round_id=step)

    async def broadcast_named(self, name: str, tensors: Mapping[str, Tensor], *, root: int = 0) -> dict[str, Tensor]:
        """The tensors of rank ``root``, whatever their names, shapes and dtypes are, in new memory elsewhere; what the
        others pass does not matter."""
        described = await self._group.broadcast_object(
            f"{name}/names",
            described_tensors(tensors) if self._group.rank == root else None,
            root=root,
            timeout_s=self._timeout_s,
        )
        if self._group.rank != root:
            tensors = empty_tensors(described, max_bytes=max_state_bytes(self._model))
        await self.broadcast(name, list(tensors.values()), root=root)
        return dict(tensors)

    async def mean(self, step: int) -> MeanModel:
        """The mean of all ranks' models, bit-equal on all ranks. No rank's own is changed."""
        live = model_tensors(self._model)
        mean: dict[str, Tensor] = {}
        squares = [0.0, 0.0]  # of the distance, of the mean
        floating = {name: tensor for name, tensor in live.items() if tensor.is_floating_point()}
        for number, names in enumerate(_pieces(floating)):
            flat = await self._compute.run(_flat, [floating[name] for name in names])
            handle = self._group.all_reduce(
                f"worker/mean/{number}", flat, op="mean", out=flat, round_id=step, timeout_s=self._timeout_s
            )
            await handle
            more = await self._compute.run(_unflatten, flat, {name: floating[name] for name in names}, mean)
            squares = [total + part for total, part in zip(squares, more, strict=True)]
        rest = {name: tensor.clone() for name, tensor in live.items() if name not in floating}
        await self.broadcast("worker/mean/rest", list(rest.values()), round_id=step)
        of_ranks = await self._group.all_gather_object(
            "worker/distance", squares[0], round_id=step, timeout_s=self._timeout_s
        )
        distance = math.sqrt(sum(of_ranks) / len(of_ranks) / squares[1]) if squares[1] else 0.0
        mean |= rest
        return MeanModel({name: mean[name] for name in live}, distance)

    @torch.no_grad()
    def exchange_with(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make these tensors the model. Returns copies of what it was. For the compute thread."""
        before = {name: tensor.clone() for name, tensor in model_tensors(self._model).items()}
        for name, tensor in model_tensors(self._model).items():
            tensor.copy_(tensors[name])
        return before

    async def hash(self) -> int:
        """Return the hash of this rank's parameters."""
        return await self._compute.run(self._hash)

    async def check(self, step: int) -> int:
        """The hash of the parameters, which is that of all ranks.

        Raises:
            ReplicasDiverged: it is not; the error names the ranks.
        """
        own = await self._compute.run(self._hash, step)
        payloads = await self._group.all_gather(
            "worker/hash", own.to_bytes(8, "little"), round_id=step, timeout_s=self._timeout_s
        )
        hashes = [int.from_bytes(payload, "little") for payload in payloads]
        if len(set(hashes)) > 1:
            raise ReplicasDiverged(step, hashes)
        return own

    def _hash(self, step: int | None = None) -> int:
        """``step``: for which it is noted, if it is."""
        own = fingerprint(self._model.parameters())
        if step is not None:
            self._probe.note("hash", step=step, hash=f"{own:016x}")
        return own


def max_state_bytes(model: nn.Module) -> int:
    """The most that a run's state may take, of which another rank describes the tensors: far more than optimizers keep,
    of which some have a matrix for each side of a small layer."""
    return max(1 << 30, 64 * sum(tensor.numel() * tensor.element_size() for tensor in model_tensors(model).values()))


def described_tensors(tensors: Mapping[str, Tensor]) -> list[Any]:
    """Name, type and shape of each, as plain data."""
    return [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]


def empty_tensors(described: Any, *, max_bytes: int) -> dict[str, Tensor]:
    """Memory for tensors that another rank has described, by name.

    Args:
        described: from that rank, as :func:`described_tensors`.
        max_bytes: of all together.

    Raises:
        CollectiveError: it is no such description, or they take more. No memory is taken then.
    """
    found: dict[str, tuple[torch.dtype, list[int]]] = {}
    size = 0
    for one in described if isinstance(described, list) else [described]:
        match one:
            case [str(name), str(dtype_name), list(shape)] if all(type(n) is int and n >= 0 for n in shape):
                dtype = getattr(torch, dtype_name, None)
            case _:
                raise CollectiveError(f"a rank described a tensor as {one!r:.100}, expected its name, type and shape")
        if not isinstance(dtype, torch.dtype):
            raise CollectiveError(f"a rank announced a tensor of an unknown type {dtype_name[:40]!r}")
        size += math.prod(shape) * dtype.itemsize
        if size > max_bytes or len(shape) > _MAX_DIMENSIONS or max(shape, default=0) > max_bytes:
            raise CollectiveError(
                f"a rank announced {size} bytes of tensors up to {name[:100]!r}, of shape {shape!r:.100}; at most "
                f"{max_bytes} are accepted"
            )
        found[name] = dtype, shape
    return {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in found.items()}


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor on the CPU: uint8, shape (bytes,); shared with it where that is possible."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _pieces(tensors: Mapping[K, Tensor]) -> Iterator[list[K]]:
    """Their keys, so many at a time as make a message."""
    piece: list[K] = []
    held = 0
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if piece and held + size > PIECE_BYTES:
            yield piece
            piece, held = [], 0
        piece.append(key)
        held += size
    if held:
        yield piece


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all of them: float32, shape (n,), on the CPU."""
    return torch.cat([tensor.detach().reshape(-1).float().cpu() for tensor in tensors])


def _unflatten(flat: Tensor, like: Mapping[str, Tensor], into: dict[str, Tensor]) -> tuple[float, float]:
    """The inverse, in shape, dtype and device. Returns the sums of (x - mean)^2 and mean^2, of parameters alone."""
    distance = length = 0.0
    for part, (name, own) in zip(torch.split(flat, [t.numel() for t in like.values()]), like.items(), strict=True):
        into[name] = part.view(own.shape).to(own.device, own.dtype, copy=True)
        if name.startswith("parameter/"):
            distance += float((own.reshape(-1).cpu().double() - part).square().sum())
            length += float(part.double().square().sum())
    return distance, length


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """All of them, one after the other: uint8, shape (bytes,)."""
    return torch.cat([raw_bytes(tensor) for tensor in tensors])


@torch.no_grad()
def _unpack(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    for part, tensor in zip(torch.split(packed, sizes), tensors, strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # cloned: views need an aligned start
