"""``q4``: the whole vector in 15 steps, one float32 scale per chunk; about ``63 / 128 D + 4 D / chunk_elems`` bytes.

As ``q8``, with ``scale = max|x| / 7``. Sixteen values are the digits of a number in base 15, of 63 bits where a half
byte for each would take 64: with the scales it is less than 4 bits a value. It exists in version 2 alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from gradbus.codecs.base import (
    V2_HEADER,
    Codec,
    CodecOptions,
    DenseBlock,
    Parsed,
    check_length,
    count_chunks,
    pack_header,
    tensor_bytes,
    tensor_view,
    unpack_fields,
    unpack_header,
)
from gradbus.codecs.errors import CodecError
from gradbus.codecs.quantize import check_chunk_elems, check_quantized, dequantized_blocks, num_chunks, quantize

MAGIC = b"Q4\x00\x02"
Q_MAX = 7

_EXTRA = struct.Struct("<I")  # chunk_elems
_BASE = 2 * Q_MAX + 1
_DIGITS, _BITS = 16, 63  # 15**16 is below 2**63
_MASK = np.uint64((1 << _BITS) - 1)


class SmallChunkOptions(CodecOptions):
    """Options of q4 and q2."""

    chunk_elems: Annotated[int, Field(ge=1, le=1 << 30)] = 1024
    """Number of values that share a scale."""


def _packed_bytes(count: int) -> int:
    return -(-_BITS * -(-count // _DIGITS) // 8)


def _pack(digits: NDArray[np.int8]) -> bytes:
    """Sixteen to a number, the first one the lowest; the numbers one after the other, from the lowest bits on.

    Eight numbers are 63 bytes: number j begins at bit 63 j, which is bit 64 - j of word j - 1.
    """
    rows = -(-digits.size // (8 * _DIGITS))
    padded: NDArray[np.int8] = np.zeros((rows, 8, _DIGITS), np.int8)
    padded.reshape(-1)[: digits.size] = digits
    numbers: NDArray[np.uint64] = np.zeros((rows, 8), np.uint64)
    for at in reversed(range(_DIGITS)):
        numbers *= np.uint64(_BASE)
        numbers += padded[:, :, at].astype(np.uint64)
    words = numbers >> np.arange(8, dtype=np.uint64)
    words[:, :-1] |= numbers[:, 1:] << np.arange(_BITS, _BITS - 7, -1, dtype=np.uint64)
    packed = words.astype("<u8").view(np.uint8).reshape(rows, 64)[:, :_BITS]
    return packed.tobytes()[: _packed_bytes(digits.size)]


def _unpack(view: memoryview, offset: int, count: int) -> NDArray[np.int8]:
    """The inverse. The caller has checked that the bytes are there.

    Raises:
        CodecError: a number that has no sixteen digits, or spare digits or bits that are not 0.
    """
    rows = -(-count // (8 * _DIGITS))
    flat: NDArray[np.uint8] = np.zeros(rows * _BITS, np.uint8)
    flat[: _packed_bytes(count)] = np.frombuffer(view, np.uint8, _packed_bytes(count), offset)
    padded: NDArray[np.uint8] = np.zeros((rows, 64), np.uint8)
    padded[:, :_BITS] = flat.reshape(rows, _BITS)
    words = padded.view("<u8").astype(np.uint64, copy=False)
    numbers = words << np.arange(8, dtype=np.uint64)
    numbers[:, 1:] |= words[:, :-1] >> np.arange(_BITS, _BITS - 7, -1, dtype=np.uint64)
    numbers &= _MASK
    digits: NDArray[np.int8] = np.empty((rows, 8, _DIGITS), np.int8)
    for at in range(_DIGITS):
        rest = numbers // np.uint64(_BASE)
        digits[:, :, at] = numbers - rest * np.uint64(_BASE)
        numbers = rest
    if numbers.any():
        raise CodecError(f"Q4 values: a number of {_DIGITS} digits is {_BASE}**{_DIGITS} or larger")
    found = digits.reshape(-1)
    if found[count:].any():
        raise CodecError("Q4 values: digits or bits after the last value are not 0")
    return found[:count]


def parse_q4(view: memoryview, expected_dim: int) -> Parsed:
    """20 bytes of header, scales, sixteen values to 63 bits."""
    header = unpack_header(view, "Q4", expected_dim)
    (chunk_elems,) = unpack_fields(_EXTRA, view, V2_HEADER.size, "Q4")
    dim, offset = header.dim, V2_HEADER.size + _EXTRA.size
    chunks = count_chunks("Q4", chunk_elems, dim)
    check_length("Q4", view, offset + 4 * chunks + _packed_bytes(dim), f"{dim} elements in {chunks} chunks")
    scales = tensor_view(view, torch.float32, offset, chunks)
    q = torch.from_numpy(_unpack(view, offset + 4 * chunks, dim)).sub_(Q_MAX)
    check_quantized(q, scales, "Q4", Q_MAX)

    def blocks(block_elems: int) -> Iterator[DenseBlock]:
        return dequantized_blocks(q, scales, chunk_elems, block_elems)

    return Parsed("q4", 2, header.is_delta, dim, False, blocks)


@dataclass(frozen=True, kw_only=True)
class Q4(Codec):
    """Each element within half a scale of the original, where a scale is ``max|x| / 7`` of its chunk."""

    chunk_elems: int = 1024

    Options = SmallChunkOptions

    name = choice = "q4"
    formats = ((MAGIC, parse_q4),)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk_elems(self.chunk_elems)

    def max_bytes(self, dim: int) -> int:
        return V2_HEADER.size + _EXTRA.size + 4 * num_chunks(dim, self.chunk_elems) + _packed_bytes(dim)

    def _encode(self, vector: Tensor, version: int, is_delta: bool) -> bytes:
        q, scales = quantize(vector, self.chunk_elems, Q_MAX)
        header = pack_header(MAGIC, is_delta=is_delta, dim=vector.numel()) + _EXTRA.pack(self.chunk_elems)
        return b"".join((header, tensor_bytes(scales), _pack((q + Q_MAX).cpu().numpy())))
