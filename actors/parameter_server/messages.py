"""Requests of workers and replies of servers as bytes: one tensor of uint8 each, of which nothing is trusted.

| bytes | what |
|---|---|
| 64 | header: magic, version, kind, flags, epoch, clock, updates, learning rate, sizes of the three parts behind it |
| ``packed`` | gradients, or weights, of the server's pieces, one behind the other |
| ``meta`` | an object in msgpack, at most 4 MiB |
| ``state`` | named tensors as safetensors has them |
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any, cast, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gradbus.actors.parameter_server.assignment import TensorPart
from gradbus.actors.parameter_server.clocks import Kind
from gradbus.runtime.collectives.objects import MAX_OBJECT_BYTES, pack, unpack
from gradbus.runtime.errors import CollectiveError

REQUEST, REPLY = "parameter_server/request", "parameter_server/reply"  # names of their collectives
HEADER_BYTES = 64
PROTOCOL = 1
_HEADER = struct.Struct("<4sBBHIQQdIQQ")  # 56 bytes; the rest is zero
_MAGIC = b"GBps"
_KINDS: tuple[Kind, ...] = get_args(Kind)
_TENSOR_NAMES_BYTES = 1 << 20  # of the state, beside its tensors


class Flag(IntFlag):
    """Names what a worker says of a push, and a server of a version."""

    NONE = 0
    HAS_GRADIENT = 1
    REFUSED = 2  # it is left out, for it is not finite
    MEETS = 4
    WANTS_END = 8
    DROPPED = 16  # the server goes on without this worker, and ``why`` of the reply says the reason


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A request, or the reply to one.

    Attributes:
        clock: pushes of the worker before. epoch: that it is in. updates: of the weights, of a server. lr: the same.
        packed: uint8, shape (bytes,). meta: plain data. state: tensors by name.
    """

    kind: Kind
    clock: int = 0
    flags: Flag = Flag.NONE
    epoch: int = 0
    updates: int = 0
    lr: float = 0.0
    packed: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    meta: Any = None
    state: Mapping[str, Tensor] = field(default_factory=dict)


def largest(packed_bytes: int, state_bytes: int) -> int:
    """Bytes of the largest message with so many of weights and of named tensors."""
    return HEADER_BYTES + packed_bytes + MAX_OBJECT_BYTES + state_bytes + _TENSOR_NAMES_BYTES


def encode(message: Message, tensors: Sequence[Tensor] = ()) -> Tensor:
    """The bytes of a message: uint8, shape (n,), new memory.

    Args:
        tensors: take the place of ``message.packed``; they are copied, one behind the other.

    Raises:
        ValueError: ``meta`` has something that msgpack has no place for, or is too large.
    """
    meta = b"" if message.meta is None else pack(message.meta)
    state = save(_apart(message.state)) if message.state else b""
    parts = [part.reshape(-1).view(torch.uint8) for part in _on_cpu(tensors)] if tensors else [message.packed]
    packed_bytes = sum(part.numel() for part in parts)
    whole = torch.empty(HEADER_BYTES + packed_bytes + len(meta) + len(state), dtype=torch.uint8)
    header = _HEADER.pack(
        _MAGIC,
        PROTOCOL,
        _KINDS.index(message.kind),
        int(message.flags),
        message.epoch,
        message.clock,
        message.updates,
        message.lr,
        len(meta),
        len(state),
        packed_bytes,
    )
    at = 0
    for one in (_bytes(header.ljust(HEADER_BYTES, b"\0")), *parts, _bytes(meta), _bytes(state)):
        whole[at : at + one.numel()] = one
        at += one.numel()
    return whole


def decode(data: Any) -> Message:
    """The inverse; ``packed`` shares memory with ``data``.

    Raises:
        CollectiveError: it is no message of this version, or its sizes do not add up; with both values.
    """
    if not isinstance(data, Tensor) or data.dtype != torch.uint8 or data.ndim != 1 or data.numel() < HEADER_BYTES:
        what = f"{data.dtype} {tuple(data.shape)}" if isinstance(data, Tensor) else type(data).__name__
        raise CollectiveError(f"expected a message of at least {HEADER_BYTES} bytes as uint8, got {what}")
    fields = _HEADER.unpack(data[: _HEADER.size].numpy().tobytes())
    magic, version, kind, flags, epoch, clock, updates, lr, *sizes = fields
    if magic != _MAGIC or version != PROTOCOL:
        raise CollectiveError(f"expected a message of version {PROTOCOL}, got {magic!r} of version {version}")
    meta_bytes, state_bytes, packed_bytes = sizes
    if HEADER_BYTES + sum(sizes) != data.numel() or meta_bytes > MAX_OBJECT_BYTES:
        raise CollectiveError(f"a message of {data.numel()} bytes announces parts of {sizes} behind {HEADER_BYTES}")
    if kind >= len(_KINDS) or flags >= 2 * max(Flag) or math.isnan(lr):
        raise CollectiveError(f"a message has kind {kind}, flags {flags} and learning rate {lr}")
    packed = data[HEADER_BYTES : HEADER_BYTES + packed_bytes]
    rest = data[HEADER_BYTES + packed_bytes :].numpy().tobytes()
    try:
        state = load(rest[meta_bytes:]) if state_bytes else {}
    except (SafetensorError, ValueError, KeyError) as error:
        raise CollectiveError(f"the named tensors of a message cannot be read: {error}") from None
    meta = unpack(rest[:meta_bytes]) if meta_bytes else None
    return Message(_KINDS[kind], clock, Flag(flags), epoch, updates, lr, packed, meta, state)


def split(packed: Tensor, pieces: Sequence[TensorPart]) -> list[Tensor]:
    """Views of the pieces in what came packed, flat. Raises CollectiveError: it has another size, with both."""
    expected = sum(piece.nbytes for piece in pieces)
    if packed.numel() != expected:
        raise CollectiveError(f"expected {expected} bytes of {len(pieces)} tensors, got {packed.numel()}")
    parts = torch.split(packed, [piece.nbytes for piece in pieces])
    return [part.view(piece.dtype) for part, piece in zip(parts, pieces, strict=True)]


def _on_cpu(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().cpu().contiguous() for tensor in tensors]


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, each in memory of its own: safetensors refuses shared memory."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def meta_of(message: Message, key: str, kind: type) -> Any:
    """An entry of the object in a message. Raises CollectiveError: it is missing, or of another type."""
    found = message.meta.get(key) if isinstance(message.meta, dict) else None
    if not isinstance(found, kind):
        raise CollectiveError(f"a message of kind {message.kind} has {key}={found!r:.100}, expected {kind.__name__}")
    return cast("Any", found)
