"""A collective that moves tensors straight from memory of the sender's into memory of the receiver's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from gradbus.runtime.collectives.operation import ACK, IntoMemory, Operation, channel_of
from gradbus.runtime.collectives.tensors import NOTHING, as_bytes, dtype_name
from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.wire.frames import Frame
from gradbus.torch.shapes import described, readable, same_memory

_REFUSED = "refused "  # how the meta of an ACK begins that refuses the payload
_OWN, _INTO = "own ", " into "  # how it goes on where the sender's own block does not fit, and between the two
_MAX_MISFIT = 56  # characters of that, if it can be: they share a frame's name field
_OWN_LATER_BYTES = 256 << 10


class RefusingOperation(Operation):
    """A collective in which some ranks only send, and wait for ACKs. A rank whose call does not fit gets a refusal."""

    def feed(self, frame: Frame, part: int, signature: str, meta: str) -> None:
        if signature != self.signature and part != ACK:
            self.refuse(frame.key.sender)
        super().feed(frame, part, signature, meta)

    def refuse(self, sender: int, room: str = "") -> None:
        """Refuse the payload of a rank, which would otherwise wait until its deadline.

        Args:
            room: what would be taken, as :func:`described`; empty: it finds out from the signature of this call.
        """
        self.send(sender, ACK, NOTHING, meta=f"{_REFUSED}{room}" if room else "")


class TensorExchange(RefusingOperation):
    """Each rank knows at the call what goes to which rank and what comes from which: no new memory, no copies.

    ``runtime/collectives/data_movement.py`` lets the sender decide what a payload is; torch gives the tensors that are
    to be filled. A payload comes with its dtype and shape. One that does not fit, in dtype or number of elements, is
    refused: then both sides fail, and both errors describe both tensors. Where what a rank has for itself does not fit,
    it refuses the payloads of all others, which would wait for its own until their deadlines.
    """

    def __init__(
        self,
        signature: str,
        rank: int,
        world: int,
        *,
        to: Tensor | Mapping[int, Tensor] | None = None,
        into: Mapping[int, Tensor] | None = None,
        receipts: bool = False,
    ) -> None:
        """
        Args:
            signature: where it names two ranks (:func:`channel_of`), the others do not take part.
            to: one tensor for all others, or one by rank. into: tensors to be filled, by rank. All plain memory; what
                is filled overlaps nothing else. What a rank has for itself is copied.
            receipts: what is sent has been taken when this ends. For collectives in which some ranks only send: else
                they could run ahead of the others without end.
        """
        self._to_all = to if isinstance(to, Tensor) else None
        self._to: Mapping[int, Tensor] = {} if to is None or isinstance(to, Tensor) else to
        self._into = {} if into is None else into
        super().__init__(signature, rank, world, peers=[*self._to, *self._into] if channel_of(signature) else None)
        self._receipts = receipts
        self._copy_own: Callable[[], object] | None = None
        self._own_misfit = ""
        source = self._to.get(rank) if self._to_all is None else self._to_all
        if source is not None and rank in self._into:
            self._place_own(self._into[rank], source)

    def _place_own(self, land: Tensor, source: Tensor) -> None:
        """Copy what does not travel: at once if it is large, as nothing can be taken in during a copy; else when the
        payloads are on their way, so that the other ranks need not wait for it."""
        if same_memory(land, source):
            return
        if source.numel() != land.numel():
            self._own_misfit = _misfit(source, land)
            return
        copy = partial(land.copy_, source if source.shape == land.shape else source.view(land.shape))
        if source.nbytes > _OWN_LATER_BYTES:
            copy()
        else:
            self._copy_own = copy

    def post(self) -> None:
        if self._own_misfit:
            for other in self.others:
                self.refuse(other, f"{_OWN}{self._own_misfit}")
            raise CollectiveError(f"collective {self.key.name!r}: {_own_misfit_text(self.rank, self._own_misfit)}")
        for sender, tensor in self._into.items():
            if sender != self.rank:
                self.expect(sender, 0, _Filling(tensor, self.refuse, sender))
        to_all = self._to_all
        if self._receipts:
            self.await_acks(self.others if to_all is not None else [rank for rank in self._to if rank != self.rank])
        if to_all is not None and self.world > 1:
            self.send(None, 0, as_bytes(to_all), meta=_meta(to_all))
        for other in self.others if self._to else ():
            if other in self._to:
                self.send(other, 0, as_bytes(self._to[other]), meta=_meta(self._to[other]))
        if self._copy_own is not None:
            self._copy_own()

    def feed(self, frame: Frame, part: int, signature: str, meta: str) -> None:
        if signature == self.signature and part == ACK and meta.startswith(_REFUSED):
            sender = frame.key.sender
            sent = self._to.get(sender) if self._to_all is None else self._to_all
            room = meta.removeprefix(_REFUSED)
            text = f"rank {sender} has room for {readable(room)} where this rank sends {readable(_meta(sent))}"
            if room.startswith(_OWN):
                text = f"{_own_misfit_text(sender, room[len(_OWN) :])}; this rank sends it {readable(_meta(sent))}"
            self.fail(CollectiveError(f"collective {self.key.name!r}: {text}"))
        else:
            super().feed(frame, part, signature, meta)

    def stream_done(self, sender: int, part: int) -> None:
        if part == 0 and self._receipts:
            self.acknowledge(sender)

    def release(self) -> None:
        self._to_all, self._to, self._into, self._copy_own = None, {}, {}, None


def _misfit(source: Tensor, land: Tensor) -> str:
    """Describe both; by their numbers of elements where their shapes would have no room in a frame."""
    text = f"{_meta(source)}{_INTO}{_meta(land)}"
    if len(text) <= _MAX_MISFIT:
        return text
    return _INTO.join(described(one.dtype, torch.Size([one.numel()])) for one in (source, land))


def _own_misfit_text(rank: int, misfit: str) -> str:
    source, _, land = misfit.partition(_INTO)
    return f"rank {rank} has room for {readable(land)} where it has {readable(source)} for itself"


class _Filling(IntoMemory):
    """Fills a tensor with a payload that fits."""

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
                f"sends {readable(meta)}, {frame.total_bytes} bytes, where this rank has room for {readable(room)}, "
                f"{len(self._memory)} bytes"
            )
        return super().feed(frame, meta)


def _meta(tensor: Tensor | None) -> str:
    return "" if tensor is None else described(tensor.dtype, tensor.shape)
