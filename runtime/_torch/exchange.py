"""A collective that moves tensors straight from memory of the sender's into memory of the receiver's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.collectives.stream import IntoMemory
from gradbus.runtime.collectives.tensors import Bytes, as_bytes, is_plain


class Exchange(Operation):
    """What goes to whom and what comes from whom, all of it known at the call: no new memory, no copies.

    ``gradbus.runtime.collectives.exchanges`` let the sender decide what a payload is; torch gives the tensors that are
    to be filled.
    """

    def __init__(
        self, signature: str, rank: int, world: int, *, to_all: Tensor | None = None,
        to: Mapping[int, Tensor] | None = None, into: Mapping[int, Tensor] | None = None, receipts: bool = False,
        peers: list[int] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            to_all: sent to all others. to: sent to each of these ranks. into: filled by each of these ranks. All plain
                memory; what is filled overlaps nothing else.
            receipts: what is sent has been taken when this ends. For collectives in which some ranks only send: else
                they could run ahead of the others without end.
            peers: ranks that it cannot do without; None: all.
        """
        super().__init__(signature, rank, world, peers=peers)
        self._to_all = None if to_all is None or world == 1 else as_bytes(to_all)
        self._to = _memory(to, rank)
        self._into = _memory(into, rank)
        self._receipts = receipts

    def set_up(self) -> None:
        for sender, memory in self._into.items():
            self.expect(sender, 0, IntoMemory(memory))
        if self._receipts:
            self.await_receipts(list(self._to) if self._to_all is None else self.others)
        if self._to_all is not None:
            self.send(None, 0, self._to_all)
        for other in self.others:
            if other in self._to:
                self.send(other, 0, self._to[other])

    def stream_done(self, sender: int, part: int) -> None:
        if part == 0 and self._receipts:
            self.acknowledge(sender)


def _memory(tensors: Mapping[int, Tensor] | None, rank: int) -> dict[int, Bytes]:
    return {} if tensors is None else {other: as_bytes(t) for other, t in tensors.items() if other != rank}


def landing(tensor: Tensor) -> Tensor:
    """Plain memory for what is to come into a tensor: its own, or, if that is strided, new memory to be copied."""
    tensor = tensor.detach()
    return tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors share memory."""
    first, second = as_bytes(one), as_bytes(other)
    a, b = first.ctypes.data, second.ctypes.data
    return a < b + second.size and b < a + first.size


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors are the very same bytes."""
    return one.data_ptr() == other.data_ptr() and one.nbytes == other.nbytes
