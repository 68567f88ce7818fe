"""``s4``: the largest entries of the vector, values in float32; and what all sparse formats share."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradbus.codecs.base import Codec, Parsed, SparseBlock, check_finite
from gradbus.codecs.index_coding import check_ascending, decode_indices, encode_indices, max_index_bytes
from gradbus.codecs.sparse import top_k
from gradbus.codecs.wire import (
    V2_HEADER,
    check_count,
    check_dim,
    check_length,
    pack_header,
    tensor_bytes,
    tensor_view,
    unpack_fields,
    unpack_header,
)

MAGIC_V1 = b"S4\x00\x01"
MAGIC_V2 = b"S4\x00\x02"

_V1_HEADER = struct.Struct("<4sii")  # magic, dim, k
_V2_EXTRA = struct.Struct("<II")  # k, bytes of the coded indices


@dataclass(frozen=True, kw_only=True)
class TopKCodec(Codec):
    """Options of the codecs that send the largest ``density`` of all entries."""

    density: float = 0.1

    v1_is_delta = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.density <= 1.0:
            raise ValueError(f"density must be in (0, 1], got {self.density} (0.1 keeps 10 %)")

    def count_v1(self, dim: int) -> int:
        """Entries sent in version 1: rounded down, as the first writers of this format do, but at least one."""
        return min(dim, max(1, int(dim * self.density)))

    def count_v2(self, dim: int) -> int:
        """Entries sent in version 2, before zeros are left out: rounded up.

        Never less than the density asked for, and what the reference implementation of deep gradient compression
        does, so that all sparse formats here agree on k.
        """
        return min(dim, math.ceil(dim * self.density))


@dataclass(frozen=True, kw_only=True)
class S4(TopKCodec):
    """Exact values for the entries that are sent; the rest is for the caller's residual."""

    name = "s4"
    lossless = False

    def max_bytes(self, dim: int) -> int:
        k = self.count_v2(dim)
        v2 = V2_HEADER.size + _V2_EXTRA.size + 4 * k + max_index_bytes(dim, k)
        return max(_V1_HEADER.size + 8 * self.count_v1(dim), v2)

    def _encode_v1(self, vector: Tensor) -> bytes:
        sent = top_k(vector, self.count_v1(check_v1_dim(vector.numel())))
        header = _V1_HEADER.pack(MAGIC_V1, sent.dim, sent.indices.numel())
        return b"".join((header, tensor_bytes(sent.indices.to(torch.int32)), tensor_bytes(sent.values)))

    def _encode_v2(self, vector: Tensor, is_delta: bool) -> bytes:
        # Zeros are left out: the receiver has them anyway. A gradient with more than 90 % zeros shrinks its message.
        sent = top_k(vector, self.count_v2(vector.numel())).without_zeros()
        coding, coded = encode_indices(sent.indices, sent.dim)
        header = pack_header(MAGIC_V2, is_delta=is_delta, dim=sent.dim, coding=coding)
        return b"".join((header, _V2_EXTRA.pack(sent.indices.numel(), len(coded)), tensor_bytes(sent.values), coded))


def parse_s4_v1(view: memoryview, expected_dim: int) -> Parsed:
    """12 bytes of header, int32 indices, values."""
    _, dim, k = unpack_fields(_V1_HEADER, view, 0, "S4 v1")
    check_dim("S4 v1", dim, expected_dim)
    check_count("S4 v1", k, dim)
    check_length("S4 v1", view, _V1_HEADER.size + 8 * k, f"k={k}")
    indices = read_v1_indices(view, _V1_HEADER.size, k, dim)
    values = tensor_view(view, torch.float32, _V1_HEADER.size + 4 * k, k)
    check_finite(values, "S4 v1 values")
    return sparse_parsed("s4", indices, values, version=1, is_delta=True, dim=dim)


def parse_s4_v2(view: memoryview, expected_dim: int) -> Parsed:
    """24 bytes of header, values, coded indices."""
    header = unpack_header(view, "S4", expected_dim, is_sparse=True)
    k, index_bytes = unpack_fields(_V2_EXTRA, view, V2_HEADER.size, "S4")
    check_count("S4", k, header.dim)
    values_start = V2_HEADER.size + _V2_EXTRA.size
    indices_start = values_start + 4 * k
    check_length("S4", view, indices_start + index_bytes, f"k={k}, {index_bytes} index bytes")
    values = tensor_view(view, torch.float32, values_start, k)
    check_finite(values, "S4 values")
    indices = decode_indices(header.coding, view[indices_start:], header.dim, k)
    return sparse_parsed("s4", indices, values, version=2, is_delta=header.is_delta, dim=header.dim)


def check_v1_dim(dim: int) -> int:
    """``dim`` if version 1, whose fields are int32, can say it."""
    if dim >= 2**31:
        raise ValueError(f"version 1 of a sparse codec holds less than 2**31 elements, got {dim}; use version=2")
    return dim


def read_v1_indices(view: memoryview, offset: int, k: int, dim: int) -> Tensor:
    """int64, shape (k,), from the int32 of version 1, checked."""
    indices = np.frombuffer(view, dtype="<i4", count=k, offset=offset).astype(np.int64)
    check_ascending(indices, dim)
    return torch.from_numpy(indices)


def sparse_parsed(codec: str, indices: Tensor, values: Tensor, *, version: int, is_delta: bool, dim: int) -> Parsed:
    """A checked message of ``values`` at ``indices``."""

    def blocks(block_elems: int) -> Iterator[SparseBlock]:
        for start in range(0, indices.numel(), block_elems):
            yield SparseBlock(indices[start : start + block_elems], values[start : start + block_elems])

    return Parsed(codec, version, is_delta, dim, True, blocks)
