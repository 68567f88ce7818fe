"""``q8``: the whole vector in int8, one float32 scale per chunk; about ``D + 4 * D / chunk_elems`` bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import Field
from torch import Tensor

from gradbus.codecs.base import (
    V2_HEADER,
    VERSIONS,
    BothVersions,
    Codec,
    DenseBlock,
    Parsed,
    check_dim,
    check_length,
    count_chunks,
    pack_header,
    tensor_bytes,
    unpack_fields,
    unpack_header,
)
from gradbus.codecs.quantize import check_chunk_elems, dequantized_blocks, num_chunks, quantize, quantized_views

MAGIC_V1 = b"Q8\x00\x01"
MAGIC_V2 = b"Q8\x00\x02"

_V1_HEADER = struct.Struct("<4sIQI")  # magic, chunk_elems, dim, number of chunks
_V2_EXTRA = struct.Struct("<I")  # chunk_elems


ChunkElems: TypeAlias = Annotated[int, Field(ge=1, le=1 << 30)]


class ChunkOptions(BothVersions):
    """Options of q8."""

    chunk_elems: ChunkElems = 8192
    """Number of values that share a scale."""


def parse_q8_v1(view: memoryview, expected_dim: int) -> Parsed:
    """20 bytes of header, scales, q."""
    _, chunk_elems, dim, chunks = unpack_fields(_V1_HEADER, view, 0, "Q8 v1")
    check_dim("Q8 v1", dim, expected_dim)
    count_chunks("Q8 v1", chunk_elems, dim, chunks)
    return _parsed(view, _V1_HEADER.size, chunk_elems, version=1, is_delta=False, dim=dim)


def parse_q8_v2(view: memoryview, expected_dim: int) -> Parsed:
    """20 bytes of header, scales, q."""
    header = unpack_header(view, "Q8", expected_dim)
    (chunk_elems,) = unpack_fields(_V2_EXTRA, view, V2_HEADER.size, "Q8")
    offset = V2_HEADER.size + _V2_EXTRA.size
    return _parsed(view, offset, chunk_elems, version=2, is_delta=header.is_delta, dim=header.dim)


def _parsed(view: memoryview, offset: int, chunk_elems: int, *, version: int, is_delta: bool, dim: int) -> Parsed:
    chunks = count_chunks("Q8", chunk_elems, dim)
    check_length("Q8", view, offset + 4 * chunks + dim, f"{dim} elements in {chunks} chunks")
    q, scales = quantized_views(view, offset, dim, chunk_elems, "Q8")

    def blocks(block_elems: int) -> Iterator[DenseBlock]:
        return dequantized_blocks(q, scales, chunk_elems, block_elems)

    return Parsed("q8", version, is_delta, dim, False, blocks)


@dataclass(frozen=True, kw_only=True)
class Q8(Codec):
    """Each element within half a scale of the original, where a scale is ``max|x| / 127`` of its chunk."""

    chunk_elems: int = 8192

    Options = ChunkOptions

    name = choice = "q8"
    versions = VERSIONS
    formats = ((MAGIC_V1, parse_q8_v1), (MAGIC_V2, parse_q8_v2))
    v1_is_delta = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk_elems(self.chunk_elems)

    def max_bytes(self, dim: int) -> int:
        return V2_HEADER.size + _V2_EXTRA.size + dim + 4 * num_chunks(dim, self.chunk_elems)

    def _encode(self, vector: Tensor, version: int, is_delta: bool) -> bytes:
        q, scales = quantize(vector, self.chunk_elems)
        if version == 1:
            header = _V1_HEADER.pack(MAGIC_V1, self.chunk_elems, vector.numel(), scales.numel())
        else:
            header = pack_header(MAGIC_V2, is_delta=is_delta, dim=vector.numel()) + _V2_EXTRA.pack(self.chunk_elems)
        return b"".join((header, tensor_bytes(scales), tensor_bytes(q)))
