"""``sq8``: the largest entries of the vector, values in int8 with one scale per chunk **of the values sent**.

Also reads ``s8``, an older form of version 1 with a single scale; nothing writes it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from gradbus.codecs.base import Parsed
from gradbus.codecs.index_coding import decode_indices, encode_indices, max_index_bytes
from gradbus.codecs.quantize import check_chunk_elems, check_quantized, dequantized_blocks, num_chunks, quantize
from gradbus.codecs.s4 import TopKCodec, check_v1_dim, read_v1_indices, sparse_parsed
from gradbus.codecs.sparse import top_k
from gradbus.codecs.wire import (
    V2_HEADER,
    check_count,
    check_dim,
    check_length,
    count_chunks,
    pack_header,
    tensor_bytes,
    tensor_view,
    unpack_fields,
    unpack_header,
)

MAGIC_V1 = b"SQ\x00\x01"
MAGIC_V2 = b"SQ\x00\x02"
MAGIC_S8 = b"S8\x00\x01"

_V1_HEADER = struct.Struct("<4siiii")  # magic, dim, k, chunk_elems, number of chunks
_S8_HEADER = struct.Struct("<4siif")  # magic, dim, k, scale
_V2_EXTRA = struct.Struct("<III")  # k, bytes of the coded indices, chunk_elems


@dataclass(frozen=True, kw_only=True)
class SQ8(TopKCodec):
    """Sent entries within half a scale of the original; the rest is for the caller's residual."""

    chunk_elems: int = 8192

    name = "sq8"
    lossless = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk_elems(self.chunk_elems)

    def max_bytes(self, dim: int) -> int:
        k_v1, k = self.count_v1(dim), self.count_v2(dim)
        v1 = _V1_HEADER.size + 5 * k_v1 + 4 * num_chunks(k_v1, self.chunk_elems)
        v2 = V2_HEADER.size + _V2_EXTRA.size + k + 4 * num_chunks(k, self.chunk_elems) + max_index_bytes(dim, k)
        return max(v1, v2)

    def _encode_v1(self, vector: Tensor) -> bytes:
        sent = top_k(vector, self.count_v1(check_v1_dim(vector.numel())))
        q, scales = quantize(sent.values, self.chunk_elems)
        header = _V1_HEADER.pack(MAGIC_V1, sent.dim, q.numel(), self.chunk_elems, scales.numel())
        indices = tensor_bytes(sent.indices.to(torch.int32))
        return b"".join((header, indices, tensor_bytes(scales), tensor_bytes(q)))

    def _encode_v2(self, vector: Tensor, is_delta: bool) -> bytes:
        sent = top_k(vector, self.count_v2(vector.numel())).without_zeros()
        q, scales = quantize(sent.values, self.chunk_elems)
        coding, coded = encode_indices(sent.indices, sent.dim)
        header = pack_header(MAGIC_V2, is_delta=is_delta, dim=sent.dim, coding=coding)
        extra = _V2_EXTRA.pack(q.numel(), len(coded), self.chunk_elems)
        return b"".join((header, extra, tensor_bytes(scales), tensor_bytes(q), coded))


def parse_sq8_v1(view: memoryview, expected_dim: int) -> Parsed:
    """20 bytes of header, int32 indices, scales, q."""
    _, dim, k, chunk_elems, claimed = unpack_fields(_V1_HEADER, view, 0, "SQ8 v1")
    check_dim("SQ8 v1", dim, expected_dim)
    check_count("SQ8 v1", k, dim)
    chunks = count_chunks("SQ8 v1", chunk_elems, k, claimed)
    check_length("SQ8 v1", view, _V1_HEADER.size + 5 * k + 4 * chunks, f"k={k} in {chunks} chunks")
    indices = read_v1_indices(view, _V1_HEADER.size, k, dim)
    values = _read_values(view, _V1_HEADER.size + 4 * k, k, chunk_elems, "SQ8 v1")
    return sparse_parsed("sq8", indices, values, version=1, is_delta=True, dim=dim)


def parse_s8_v1(view: memoryview, expected_dim: int) -> Parsed:
    """16 bytes of header with the one scale, int32 indices, q."""
    _, dim, k, scale = unpack_fields(_S8_HEADER, view, 0, "S8 v1")
    check_dim("S8 v1", dim, expected_dim)
    check_count("S8 v1", k, dim)
    check_length("S8 v1", view, _S8_HEADER.size + 5 * k, f"k={k}")
    indices = read_v1_indices(view, _S8_HEADER.size, k, dim)
    q = tensor_view(view, torch.int8, _S8_HEADER.size + 4 * k, k)
    scales = torch.tensor([scale], dtype=torch.float32)
    check_quantized(q, scales, "S8 v1")
    return sparse_parsed("s8", indices, q.to(torch.float32).mul_(scales), version=1, is_delta=True, dim=dim)


def parse_sq8_v2(view: memoryview, expected_dim: int) -> Parsed:
    """28 bytes of header, scales, q, coded indices."""
    header = unpack_header(view, "SQ8", expected_dim, is_sparse=True)
    k, index_bytes, chunk_elems = unpack_fields(_V2_EXTRA, view, V2_HEADER.size, "SQ8")
    check_count("SQ8", k, header.dim)
    chunks = count_chunks("SQ8", chunk_elems, k)
    scales_start = V2_HEADER.size + _V2_EXTRA.size
    indices_start = scales_start + 4 * chunks + k
    check_length("SQ8", view, indices_start + index_bytes, f"k={k} in {chunks} chunks, {index_bytes} index bytes")
    values = _read_values(view, scales_start, k, chunk_elems, "SQ8")
    indices = decode_indices(header.coding, view[indices_start:], header.dim, k)
    return sparse_parsed("sq8", indices, values, version=2, is_delta=header.is_delta, dim=header.dim)


def _read_values(view: memoryview, offset: int, k: int, chunk_elems: int, name: str) -> Tensor:
    """float32, shape (k,), from the scales and q that begin at ``offset``.

    All at once and not per block: next to the indices, 8 bytes each, there is nothing to save.
    """
    chunks = num_chunks(k, chunk_elems)
    scales = tensor_view(view, torch.float32, offset, chunks)
    q = tensor_view(view, torch.int8, offset + 4 * chunks, k)
    check_quantized(q, scales, name)
    values = torch.empty(k, dtype=torch.float32)
    for block in dequantized_blocks(q, scales, chunk_elems, max(1, k)):
        values[block.start : block.start + block.values.numel()] = block.values
    return values
