"""``q4``: the whole vector in 4 bits a value, one float32 scale per chunk; about ``D / 2 + 4 * D / chunk_elems`` bytes.

As ``q8``, with ``scale = max|x| / 7``. It exists in version 2 alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from gradbus.codecs.base import Codec, CodecOptions, DenseBlock, Parsed
from gradbus.codecs.errors import CodecError
from gradbus.codecs.quantize import check_chunk_elems, check_quantized, dequantized_blocks, num_chunks, quantize
from gradbus.codecs.wire import (
    V2_HEADER,
    check_length,
    count_chunks,
    pack_header,
    tensor_bytes,
    tensor_view,
    unpack_fields,
    unpack_header,
)

MAGIC = b"Q4\x00\x02"
Q_MAX = 7

_EXTRA = struct.Struct("<I")  # chunk_elems
_ZERO = 8  # code of the value 0; the code 0 is not used


class SmallChunkOptions(CodecOptions):
    """Options of q4 and q2."""

    version: Literal[2] = 2
    """Version of the codec's format."""
    chunk_elems: Annotated[int, Field(ge=1, le=1 << 30)] = 1024
    """Number of values that share a scale."""


@dataclass(frozen=True, kw_only=True)
class Q4(Codec):
    """Each element within half a scale of the original, where a scale is ``max|x| / 7`` of its chunk."""

    chunk_elems: int = 1024

    Options = SmallChunkOptions

    name = choice = "q4"
    lossless = False
    versions = (2,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk_elems(self.chunk_elems)

    def max_bytes(self, dim: int) -> int:
        return V2_HEADER.size + _EXTRA.size + 4 * num_chunks(dim, self.chunk_elems) + -(-dim // 2)

    def _encode(self, vector: Tensor, version: int, is_delta: bool) -> bytes:
        q, scales = quantize(vector, self.chunk_elems, Q_MAX)
        codes: NDArray[np.uint8] = np.zeros(-(-q.numel() // 2) * 2, np.uint8)
        codes[: q.numel()] = (q + _ZERO).cpu().numpy()
        packed = (codes[0::2] | codes[1::2] << 4).astype(np.uint8)
        header = pack_header(MAGIC, is_delta=is_delta, dim=vector.numel()) + _EXTRA.pack(self.chunk_elems)
        return b"".join((header, tensor_bytes(scales), packed.tobytes()))


def parse_q4(view: memoryview, expected_dim: int) -> Parsed:
    """20 bytes of header, scales, two values to a byte."""
    header = unpack_header(view, "Q4", expected_dim)
    (chunk_elems,) = unpack_fields(_EXTRA, view, V2_HEADER.size, "Q4")
    dim, offset = header.dim, V2_HEADER.size + _EXTRA.size
    chunks = count_chunks("Q4", chunk_elems, dim)
    check_length("Q4", view, offset + 4 * chunks + -(-dim // 2), f"{dim} elements in {chunks} chunks")
    packed = np.frombuffer(view, dtype=np.uint8, count=-(-dim // 2), offset=offset + 4 * chunks)
    codes: NDArray[np.int8] = np.empty(2 * packed.size, np.int8)
    codes[0::2], codes[1::2] = packed & 15, packed >> 4
    if codes[dim:].any():
        raise CodecError("Q4 values: bits after the last value are not 0")
    q, scales = torch.from_numpy(codes[:dim]) - _ZERO, tensor_view(view, torch.float32, offset, chunks)
    check_quantized(q, scales, "Q4", Q_MAX)

    def blocks(block_elems: int) -> Iterator[DenseBlock]:
        return dequantized_blocks(q, scales, chunk_elems, block_elems)

    return Parsed("q4", 2, header.is_delta, dim, False, blocks)
