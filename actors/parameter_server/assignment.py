"""Which server holds which tensor: the largest first, each to the server that has least so far."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradbus.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor, or a part of one.

    Attributes:
        tensor: its name. start, stop: entries of the flattened tensor. shape: of the whole one. dtype: of torch.
    """

    tensor: str
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return (self.stop - self.start) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its tensor."""
        return self.stop - self.start == torch.Size(self.shape).numel()

    @property
    def name(self) -> str:
        """A name that no other piece of the model has."""
        return self.tensor if self.is_whole else f"{self.tensor}[{self.start}:{self.stop}]"

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor, flat: a view where the tensor is contiguous."""
        return tensor.reshape(-1)[self.start : self.stop]


def assign(
    parameters: Mapping[str, Tensor], servers: int, cut_bytes: int | None = None
) -> list[tuple[TensorPart, ...]]:
    """The pieces of each server. Equal on all processes that have the same model.

    The heaviest server has at most 4/3 of the smallest possible maximum (Graham, "Bounds on multiprocessing timing
    anomalies", 1969). The pieces of a server are sorted by the size of their entries, the largest first, so that one
    behind the other in a message each lies at a multiple of that size.

    Args:
        parameters: by name, in the order of the model.
        cut_bytes: tensors above this size are cut into as many equal parts as keeps each within it.

    Raises:
        ConfigError: there are more servers than pieces; the text has both numbers.
    """
    pieces = [piece for name, tensor in parameters.items() for piece in _cut(name, tensor, cut_bytes)]
    if servers > len(pieces):
        raise ConfigError(
            f"parameter_server.servers is {servers}, but the model has {len(pieces)} "
            f"{'tensors' if cut_bytes is None else f'pieces of at most {cut_bytes} bytes'} to deal out: take fewer "
            f"servers, or a smaller parameter_server.cut_bytes"
        )
    held = [0] * servers
    dealt: list[list[int]] = [[] for _ in range(servers)]
    for number in sorted(range(len(pieces)), key=lambda number: (-pieces[number].nbytes, number)):
        server = min(range(servers), key=lambda server: (held[server], len(dealt[server]), server))
        held[server] += pieces[number].nbytes
        dealt[server].append(number)
    return [
        tuple(pieces[number] for number in sorted(own, key=lambda number: (-pieces[number].dtype.itemsize, number)))
        for own in dealt
    ]


@torch.no_grad()
def put(tensors: Mapping[str, Tensor], parts: Iterable[tuple[TensorPart, Tensor]]) -> None:
    """Copy parts to where they belong, in time that grows as their size.

    Args:
        tensors: by name. Of one that is not contiguous a whole copy is made, once for all of its parts.
        parts: each with its entries, of any shape.
    """
    wholes: dict[str, Tensor] = {}
    for piece, part in parts:
        live = tensors[piece.tensor].detach()
        if piece.is_whole:
            live.copy_(part.reshape(piece.shape))
            continue
        if not live.is_contiguous():
            if piece.tensor not in wholes:
                wholes[piece.tensor] = live.contiguous()
            live = wholes[piece.tensor]
        piece.of(live).copy_(part.reshape(-1))
    for name, whole in wholes.items():
        tensors[name].detach().copy_(whole)


def _cut(name: str, tensor: Tensor, cut_bytes: int | None) -> list[TensorPart]:
    elems, shape = tensor.numel(), tuple(tensor.shape)
    parts = 1 if cut_bytes is None else max(1, min(elems, -(-tensor.nbytes // cut_bytes)))
    bounds = [elems * part // parts for part in range(parts + 1)]
    return [TensorPart(name, start, stop, shape, tensor.dtype) for start, stop in itertools.pairwise(bounds)]
