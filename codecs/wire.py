"""Bytes as tensors without a copy, and the header that all version 2 messages begin with."""

from __future__ import annotations

import struct
import sys
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gradbus.codecs.errors import CodecError, DimMismatchError

if sys.byteorder != "little":
    # Values travel little-endian and are used in place; swapping them is code that nobody could test today.
    raise ImportError("gradbus.codecs needs a little-endian machine")

Payload: TypeAlias = bytes | bytearray | memoryview

V2_HEADER = struct.Struct("<4sBBHQ")  # magic, flags, index coding, reserved (0), dim
FLAG_DELTA = 0x01

_NUMPY_DTYPE: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.int32: np.dtype("<i4"),
    torch.int8: np.dtype("i1"),
}


class HeaderV2(NamedTuple):
    """The first 16 bytes of a version 2 message, checked."""

    is_delta: bool
    coding: int
    dim: int


def pack_header(magic: bytes, *, is_delta: bool, dim: int, coding: int = 0) -> bytes:
    """The 16 bytes described in ``docs/codecs.md``."""
    return V2_HEADER.pack(magic, FLAG_DELTA if is_delta else 0, coding, 0, dim)


def unpack_header(view: memoryview, name: str, expected_dim: int, *, is_sparse: bool = False) -> HeaderV2:
    """Read and check the first 16 bytes; the index coding of a sparse message is left to its decoder.

    Raises:
        DimMismatchError: another number of elements than ``expected_dim``.
        CodecError: too short, unknown flag or reserved bits, or a dense message with an index coding.
    """
    if len(view) < V2_HEADER.size:
        raise CodecError(f"{name} payload cut short: the header needs {V2_HEADER.size} bytes, got {len(view)}")
    _, flags, coding, reserved, dim = V2_HEADER.unpack_from(view)
    check_dim(name, dim, expected_dim)
    if flags & ~FLAG_DELTA or reserved:
        raise CodecError(f"{name} header: unknown bits in flags {flags:#04x} or reserved {reserved:#06x}; newer peer?")
    if coding and not is_sparse:
        raise CodecError(f"{name} header: index coding {coding}, expected 0 in a dense message")
    return HeaderV2(bool(flags & FLAG_DELTA), coding, dim)


def unpack_fields(fields: struct.Struct, view: memoryview, offset: int, name: str) -> tuple[Any, ...]:
    """``fields.unpack_from``. Raises CodecError: the payload ends too early."""
    if len(view) < offset + fields.size:
        raise CodecError(f"{name} payload cut short: the header needs {offset + fields.size} bytes, got {len(view)}")
    return fields.unpack_from(view, offset)


def check_dim(name: str, dim: int, expected_dim: int) -> None:
    """The number of elements comes from our own model, never from a peer: nothing is allocated before this."""
    if dim != expected_dim:
        raise DimMismatchError(
            f"{name} header: message of {dim} elements, expected {expected_dim}; same model on both ends?"
        )


def check_count(name: str, k: int, dim: int) -> None:
    """A sparse message has between 0 and ``dim`` entries."""
    if not 0 <= k <= dim:
        raise CodecError(f"{name} header: k={k} entries, expected 0 .. {dim}")


def count_chunks(name: str, chunk_elems: int, num_elems: int, claimed: int | None = None) -> int:
    """The number of chunks of ``num_elems`` values. Raises CodecError: not the one that version 1 ``claimed``."""
    if chunk_elems < 1:
        raise CodecError(f"{name} header: chunk of {chunk_elems} elements, expected >= 1")
    chunks = -(-num_elems // chunk_elems)
    if claimed is not None and claimed != chunks:
        raise CodecError(
            f"{name} header: {num_elems} elements in chunks of {chunk_elems} are {chunks} chunks, header says {claimed}"
        )
    return chunks


def check_length(name: str, view: memoryview, need: int, why: str) -> None:
    """The payload must be exactly ``need`` bytes long; ``why`` names the header fields that ask for it."""
    if len(view) != need:
        state = "cut short" if len(view) < need else "too long"
        raise CodecError(f"{name} payload {state}: header says {why} (needs {need} bytes), got {len(view)}")


def as_view(payload: Payload) -> memoryview:
    """Flat ``memoryview`` of unsigned bytes over ``payload``, no copy.

    Raises:
        CodecError: the buffer is not contiguous.
    """
    view = memoryview(payload)
    if not view.c_contiguous:
        raise CodecError("payload: expected contiguous bytes, got a strided memoryview")
    return view.cast("B") if view.nbytes else memoryview(b"")  # cast() refuses shapes with a zero in them


class _Borrowed:
    """Memory of a payload, shown to numpy as writable: torch has no read-only tensors, and warns about such buffers."""

    def __init__(self, owner: np.ndarray[Any, Any]) -> None:
        self._owner = owner  # keeps the payload alive for as long as a tensor looks at it
        interface = dict(owner.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def tensor_view(view: memoryview, dtype: torch.dtype, offset: int, count: int) -> Tensor:
    """``count`` values of ``view`` from byte ``offset`` on, as a tensor that shares memory; **not to be written**.

    Values that do not lie at a multiple of their size (a message inside a larger buffer) are copied.
    The caller has checked that the bytes are there.
    """
    if count == 0:
        return torch.empty(0, dtype=dtype)
    numpy_dtype = _NUMPY_DTYPE[dtype]
    array = np.frombuffer(view, dtype=numpy_dtype, count=count, offset=offset)
    if not array.flags.aligned:
        return torch.from_numpy(array.copy())
    return torch.from_numpy(np.asarray(_Borrowed(array)))


def tensor_bytes(values: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of any device; shares memory with it on the CPU."""
    array = values.detach().cpu().contiguous().numpy()
    return array.data.cast("B") if array.size else memoryview(b"")
