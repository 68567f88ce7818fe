"""``q2``: the whole vector in 2 bits a value, two magnitudes per chunk; about ``D / 4 + 4 * D / chunk_elems`` bytes.

See :mod:`.two_levels`. It is for differences with error feedback: alone it is coarse. It exists in version 2 alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradbus.codecs.base import (
    V2_HEADER,
    Codec,
    DenseBlock,
    Parsed,
    check_finite,
    check_length,
    count_chunks,
    pack_header,
    unpack_fields,
    unpack_header,
)
from gradbus.codecs.q4 import SmallChunkOptions
from gradbus.codecs.quantize import check_chunk_elems, chunk_spans, num_chunks
from gradbus.codecs.two_levels import level_bytes, pack_codes, read_levels, two_levels, unpack_codes, values_of

MAGIC = b"Q2\x00\x02"

_EXTRA = struct.Struct("<I")  # chunk_elems
_BLOCK_ELEMS = 1 << 18  # 1 MiB of float32: the temporaries of a block stay in the cache


def parse_q2(view: memoryview, expected_dim: int) -> Parsed:
    """20 bytes of header, levels, four values to a byte."""
    header = unpack_header(view, "Q2", expected_dim)
    (chunk_elems,) = unpack_fields(_EXTRA, view, V2_HEADER.size, "Q2")
    dim, offset = header.dim, V2_HEADER.size + _EXTRA.size
    chunks = count_chunks("Q2", chunk_elems, dim)
    check_length("Q2", view, offset + 4 * chunks + -(-dim // 4), f"{dim} elements in {chunks} chunks")
    levels = read_levels(view, offset, chunks, "Q2")
    codes = unpack_codes(view, offset + 4 * chunks, dim, "Q2")

    def blocks(block_elems: int) -> Iterator[DenseBlock]:
        for elems, of in chunk_spans(dim, chunk_elems, block_elems):
            rows = of.stop - of.start
            step = block_elems if rows == 1 else elems.stop - elems.start
            for start in range(elems.start, elems.stop, step):
                part = codes[start : min(start + step, elems.stop)].view(rows, -1)
                yield DenseBlock(start, values_of(levels[of], part).view(-1))

    return Parsed("q2", 2, header.is_delta, dim, False, blocks)


@dataclass(frozen=True, kw_only=True)
class Q2(Codec):
    """Sign and one of two magnitudes for each element; what is left out is shorter than the vector."""

    chunk_elems: int = 1024

    Options = SmallChunkOptions

    name = choice = "q2"
    formats = ((MAGIC, parse_q2),)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk_elems(self.chunk_elems)

    def max_bytes(self, dim: int) -> int:
        return V2_HEADER.size + _EXTRA.size + 4 * num_chunks(dim, self.chunk_elems) + -(-dim // 4)

    def _encode(self, vector: Tensor, version: int, is_delta: bool) -> bytes:
        check_finite(vector, "vector")
        dim = vector.numel()
        levels = torch.empty(num_chunks(dim, self.chunk_elems), 2, dtype=torch.bfloat16, device=vector.device)
        codes = torch.empty(dim, dtype=torch.uint8, device=vector.device)
        for elems, chunks in chunk_spans(dim, self.chunk_elems, _BLOCK_ELEMS):
            of_rows, of_values = two_levels(vector[elems].view(chunks.stop - chunks.start, -1))
            levels[chunks], codes[elems] = of_rows, of_values.view(-1)
        header = pack_header(MAGIC, is_delta=is_delta, dim=dim) + _EXTRA.pack(self.chunk_elems)
        return b"".join((header, level_bytes(levels), pack_codes(codes)))
