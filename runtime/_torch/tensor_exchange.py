"""A collective that moves tensors straight from memory of the sender's into memory of the receiver's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradbus.runtime.collectives.operation import ACK, Operation
from gradbus.runtime.collectives.streams import IntoMemory
from gradbus.runtime.collectives.tensors import Bytes, as_bytes, dtype_name, is_plain
from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.wire.frames import Frame
from gradbus.torch.shapes import described, in_words

_EMPTY: Bytes = as_bytes(torch.empty(0))
_REFUSED = "refused "  # how the meta of a receipt begins that is none


class RefusingOperation(Operation):
    """A collective in which some ranks only send, and wait for receipts. A rank whose call does not fit is told."""

    def feed(self, frame: Frame, part: int, signature: str, meta: str) -> None:
        if signature != self.signature and part != ACK:
            self.refuse(frame.key.sender)
        super().feed(frame, part, signature, meta)

    def refuse(self, sender: int, room: str = "") -> None:
        """Tell a rank that what it sends is not taken: else it would wait until its deadline.

        Args:
            room: what would be taken, as :func:`described`; empty: it finds out from the signature of this call.
        """
        self.send(sender, ACK, _EMPTY, meta=f"{_REFUSED}{room}" if room else "")


class TensorExchange(RefusingOperation):
    """What goes to whom and what comes from whom, all of it known at the call: no new memory, no copies.

    ``runtime/collectives/data_movement.py`` let the sender decide what a payload is; torch gives the tensors that are
    to be filled. A payload says of what dtype and shape it is. One that does not fit, in dtype or number of elements,
    is refused: then both sides fail, and both say how the two tensors are.
    """

    def __init__(
        self, signature: str, rank: int, world: int, *, to_all: Tensor | None = None,
        to: Mapping[int, Tensor] | None = None, into: Mapping[int, Tensor] | None = None, receipts: bool = False,
        peers: list[int] | None = None, own: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            to_all: sent to all others. to: sent to each of these ranks. into: filled by each of these ranks. All plain
                memory; what is filled overlaps nothing else.
            receipts: what is sent has been taken when this ends. For collectives in which some ranks only send: else
                they could run ahead of the others without end.
            peers: ranks that it cannot do without; None: all.
            own: called when the payloads are on their way. For what does not travel.
        """
        super().__init__(signature, rank, world, peers=peers)
        self._own = own
        self._to_all = None if to_all is None or world == 1 else to_all
        self._to = {} if to is None else to
        self._into = {} if into is None else into
        self._receipts = receipts

    def set_up(self) -> None:
        for sender, tensor in self._into.items():
            if sender != self.rank:
                self.expect(sender, 0, _Filling(tensor, self.refuse, sender))
        if self._receipts:
            self.await_acks(self.others if self._to_all is not None else [r for r in self._to if r != self.rank])
        if self._to_all is not None:
            self.send(None, 0, as_bytes(self._to_all), meta=_meta(self._to_all))
        for other in self.others if self._to else ():
            if other in self._to:
                self.send(other, 0, as_bytes(self._to[other]), meta=_meta(self._to[other]))
        if self._own is not None:
            self._own()

    def feed(self, frame: Frame, part: int, signature: str, meta: str) -> None:
        if signature == self.signature and part == ACK and meta.startswith(_REFUSED):
            sender = frame.key.sender
            sent = self._to.get(sender) if self._to_all is None else self._to_all
            room = in_words(meta.removeprefix(_REFUSED))
            text = f"rank {sender} has room for {room} where this rank sends {in_words(_meta(sent))}"
            self.fail(CollectiveError(f"collective {self.key.name!r}: {text}"))
        else:
            super().feed(frame, part, signature, meta)

    def stream_done(self, sender: int, part: int) -> None:
        if part == 0 and self._receipts:
            self.acknowledge(sender)

    def release(self) -> None:
        self._to_all, self._to, self._into, self._own = None, {}, {}, None


class _Filling(IntoMemory):
    """Into a tensor, if it fits."""

    def __init__(self, tensor: Tensor, refuse: Callable[[int, str], None], sender: int) -> None:
        super().__init__(as_bytes(tensor))
        self._tensor = tensor
        self._refuse = refuse
        self._sender = sender

    def feed(self, frame: Frame, meta: str) -> bool:
        same_dtype = not meta or meta.partition(" ")[0] == dtype_name(self._tensor.dtype)
        if frame.total_bytes != len(self._memory) or not same_dtype:
            room = _meta(self._tensor)
            self._refuse(self._sender, room)
            raise CollectiveError(
                f"sends {in_words(meta)}, {frame.total_bytes} bytes, where this rank has room for {in_words(room)}, "
                f"{len(self._memory)} bytes"
            )
        return super().feed(frame, meta)


def _meta(tensor: Tensor | None) -> str:
    return "" if tensor is None else described(tensor.dtype, tensor.shape)


def staging_tensor(tensor: Tensor) -> Tensor:
    """Plain memory for what is to come into a tensor: its own, or, if that is strided, new memory to be copied."""
    if not is_plain(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return tensor.detach() if tensor.requires_grad else tensor


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors share memory."""
    a, b = one.data_ptr(), other.data_ptr()
    return a < b + other.nbytes and b < a + one.nbytes


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors are the very same bytes."""
    return one.data_ptr() == other.data_ptr() and one.nbytes == other.nbytes
