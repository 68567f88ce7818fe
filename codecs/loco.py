"""``loco``: of each block of 4,096 values the 64 largest, in 2 bits each: 116 bytes for 16,384, 141 times fewer.

The message of SparseLoCo: Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", 2025
(arXiv:2508.15706), section 3. An index takes 12 bits within its block.

Differs from the source: its values have four levels from one table for a tensor, within three standard deviations; here
each block has two magnitudes of its own and a sign, as a vector of all tensors has entries of very different sizes
(see :mod:`.two_levels`). That takes 4 bytes for each block. It exists in version 2 alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.codecs.base import (
    V2_HEADER,
    Codec,
    Parsed,
    SparseBlock,
    check_finite,
    check_length,
    pack_header,
    unpack_header,
)
from gradbus.codecs.errors import CodecError
from gradbus.codecs.two_levels import level_bytes, pack_codes, read_levels, two_levels, unpack_codes, values_of

MAGIC = b"LC\x00\x02"
BLOCK, LARGEST = 4096, 64

_INDEX_BITS = 12
_MAGNITUDE_BITS = 0x7FFF_FFFF


def count_sent(dim: int) -> int:
    """Entries in a message of ``dim`` elements; a last block that is shorter sends as large a share, rounded up."""
    return dim // BLOCK * LARGEST + -(-(dim % BLOCK) * LARGEST // BLOCK)


def _sizes(dim: int) -> tuple[int, int, int]:
    """Bytes of levels, values and indices."""
    count = count_sent(dim)
    return 4 * -(-dim // BLOCK), -(-count // 4), -(-count * _INDEX_BITS // 8)


def _in_blocks(vector: Tensor) -> Iterator[Tensor]:
    """Whole blocks as rows, then the rest as one row; no empty ones."""
    whole = vector.numel() // BLOCK * BLOCK
    if whole:
        yield vector[:whole].view(-1, BLOCK)
    if whole < vector.numel():
        yield vector[whole:].view(1, -1)


def _largest(rows: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Indices of the largest magnitudes of each row, ascending; among equal ones the lower index."""
    width = rows.shape[1]
    magnitude = rows.view(np.int32).astype(np.int64) & _MAGNITUDE_BITS
    keys = magnitude * BLOCK + np.arange(width - 1, -1, -1)  # no two are equal
    chosen = np.argpartition(keys, width - count, axis=1)[:, width - count :]
    return np.sort(chosen, axis=1).astype(np.int64, copy=False)


def _pack_indices(indices: NDArray[np.int64]) -> bytes:
    """Two to three bytes, from the lowest bits on."""
    count = indices.size
    pairs = np.zeros(-(-count // 2) * 2, np.uint32)
    pairs[:count] = indices
    both = pairs[0::2] | pairs[1::2] << _INDEX_BITS
    return np.ascontiguousarray(both.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3]).tobytes()[: _bytes(count)]


def _bytes(count: int) -> int:
    return -(-count * _INDEX_BITS // 8)


def _unpack_indices(view: memoryview, offset: int, count: int) -> NDArray[np.int64]:
    """The inverse. Raises CodecError: spare bits that are not 0."""
    packed = np.zeros(-(-count // 2) * 3, np.uint8)
    packed[: _bytes(count)] = np.frombuffer(view, dtype=np.uint8, count=_bytes(count), offset=offset)
    triples = packed.reshape(-1, 3).astype(np.int64)
    both = triples[:, 0] | triples[:, 1] << 8 | triples[:, 2] << 16
    indices = np.stack([both & (BLOCK - 1), both >> _INDEX_BITS], axis=1).reshape(-1)
    if indices[count:].any():
        raise CodecError("LOCO indices: bits after the last one are not 0")
    return indices[:count]


def parse_loco(view: memoryview, expected_dim: int) -> Parsed:
    """16 bytes of header, levels, values, indices."""
    header = unpack_header(view, "LOCO", expected_dim)
    dim, count = header.dim, count_sent(header.dim)
    levels_size, values_size, indices_size = _sizes(dim)
    size = V2_HEADER.size + levels_size + values_size + indices_size
    check_length("LOCO", view, size, f"{dim} elements, of which {count} are sent")
    blocks_sent = levels_size // 4
    levels = read_levels(view, V2_HEADER.size, blocks_sent, "LOCO")
    codes = unpack_codes(view, V2_HEADER.size + levels_size, count, "LOCO")
    block = np.arange(count) // LARGEST
    indices = _unpack_indices(view, V2_HEADER.size + levels_size + values_size, count) + block * BLOCK
    if count and (int(indices[-1]) >= dim or bool((np.diff(indices) <= 0).any())):
        raise CodecError(f"LOCO indices: expected strictly ascending ones of each block, below {dim}")
    places = torch.from_numpy(indices)
    whole = count // LARGEST * LARGEST
    parts = [(levels[: whole // LARGEST], codes[:whole].view(-1, LARGEST)), (levels[whole // LARGEST :], codes[whole:])]
    values = torch.cat(
        [values_of(of, part.view(of.shape[0], -1)).view(-1) for of, part in parts if part.numel()]
        or [torch.empty(0, dtype=torch.float32)]
    )

    def blocks(block_elems: int) -> Iterator[SparseBlock]:
        for start in range(0, count, block_elems):
            yield SparseBlock(places[start : start + block_elems], values[start : start + block_elems])

    return Parsed("loco", 2, header.is_delta, dim, True, blocks)


@dataclass(frozen=True, kw_only=True)
class Loco(Codec):
    """The largest 1/64 of each block, coarsely; for differences with error feedback, at the lowest rates."""

    name = choice = "loco"
    formats = ((MAGIC, parse_loco),)

    def max_bytes(self, dim: int) -> int:
        return V2_HEADER.size + sum(_sizes(dim))

    def _encode(self, vector: Tensor, version: int, is_delta: bool) -> bytes:
        check_finite(vector, "vector")
        vector = vector.cpu()
        levels, codes, places = [], [], []
        for rows in _in_blocks(vector):
            indices = _largest(rows.numpy(), -(-rows.shape[1] * LARGEST // BLOCK))
            of_rows, of_values = two_levels(rows.gather(1, torch.from_numpy(indices)))
            levels.append(of_rows)
            codes.append(of_values.view(-1))
            places.append(indices.reshape(-1))
        header = pack_header(MAGIC, is_delta=is_delta, dim=vector.numel())
        if not levels:
            return header
        indices_sent = _pack_indices(np.concatenate(places))
        return b"".join((header, level_bytes(torch.cat(levels)), pack_codes(torch.cat(codes)), indices_sent))
