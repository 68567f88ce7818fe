"""``sq8``: the largest entries of the vector, values in int8 with one scale per chunk **of the values sent**.

Also reads ``s8``, an older form of version 1 with a single scale; nothing writes it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradbus.codecs.base import count_chunks, tensor_bytes, tensor_view
from gradbus.codecs.q8 import ChunkOptions
from gradbus.codecs.quantize import (
    check_chunk_elems,
    check_quantized,
    dequantized_blocks,
    num_chunks,
    quantize,
    quantized_views,
)
from gradbus.codecs.s4 import TopKCodec, TopKOptions, ValueFormat, parse_sparse_v1, parse_sparse_v2

MAGIC_V1 = b"SQ\x00\x01"
MAGIC_V2 = b"SQ\x00\x02"
MAGIC_S8 = b"S8\x00\x01"

_V1_FIELDS = struct.Struct("<ii")  # chunk_elems, number of chunks
_V2_FIELDS = struct.Struct("<I")  # chunk_elems


class ChunkedTopKOptions(TopKOptions, ChunkOptions):
    """Options of sq8."""


def _int8_bytes(name: str, k: int, chunk_elems: int, claimed: int | None = None) -> int:
    return k + 4 * count_chunks(name, chunk_elems, k, claimed)


def _read_int8(name: str, view: memoryview, start: int, k: int, chunk_elems: int, _: int | None = None) -> Tensor:
    """All at once and not per block: next to the indices, 8 bytes each, there is nothing to save."""
    q, scales = quantized_views(view, start, k, chunk_elems, name)
    values = torch.empty(k, dtype=torch.float32)
    for block in dequantized_blocks(q, scales, chunk_elems, max(1, k)):
        values[block.start : block.start + block.values.numel()] = block.values
    return values


def _read_one_scale(name: str, view: memoryview, start: int, k: int, scale: float) -> Tensor:
    q, scales = tensor_view(view, torch.int8, start, k), torch.tensor([scale], dtype=torch.float32)
    check_quantized(q, scales, name)
    return q.to(torch.float32).mul_(scales)


INT8_VALUES_V1 = ValueFormat(_V1_FIELDS, _int8_bytes, _read_int8)
INT8_VALUES = ValueFormat(_V2_FIELDS, _int8_bytes, _read_int8)
S8_VALUES = ValueFormat(struct.Struct("<f"), lambda name, k, scale: k, _read_one_scale)


@dataclass(frozen=True, kw_only=True)
class SQ8(TopKCodec):
    """Sent entries within half a scale of the original; the rest is for the caller's residual."""

    chunk_elems: int = 8192

    Options = ChunkedTopKOptions
    name = choice = "sq8"
    magics = (MAGIC_V1, MAGIC_V2)
    formats = (
        (MAGIC_S8, partial(parse_sparse_v1, "s8", S8_VALUES)),
        (MAGIC_V1, partial(parse_sparse_v1, "sq8", INT8_VALUES_V1)),
        (MAGIC_V2, partial(parse_sparse_v2, "sq8", INT8_VALUES)),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk_elems(self.chunk_elems)

    def _value_bytes(self, k: int, version: int) -> int:
        fields = _V1_FIELDS if version == 1 else _V2_FIELDS
        return fields.size + k + 4 * num_chunks(k, self.chunk_elems)

    def _pack(self, values: Tensor, version: int) -> tuple[bytes, Sequence[memoryview]]:
        q, scales = quantize(values, self.chunk_elems)
        v1 = version == 1
        fields = _V1_FIELDS.pack(self.chunk_elems, scales.numel()) if v1 else _V2_FIELDS.pack(self.chunk_elems)
        return fields, [tensor_bytes(scales), tensor_bytes(q)]
