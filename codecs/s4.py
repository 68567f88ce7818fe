"""``s4``: the largest entries of the vector, values in float32; and what all sparse formats share.

A sparse message is a header, indices and values. Formats differ in their values alone: see :class:`ValueFormat`.
"""

from __future__ import annotations

import math
import struct
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradbus.codecs.base import (
    V2_HEADER,
    VERSIONS,
    BothVersions,
    Codec,
    Parsed,
    SparseBlock,
    check_count,
    check_dim,
    check_finite,
    check_length,
    pack_header,
    tensor_bytes,
    tensor_view,
    unpack_fields,
    unpack_header,
)
from gradbus.codecs.index_coding import check_ascending, decode_indices, encode_indices, max_index_bytes
from gradbus.codecs.sparse import top_k

MAGIC_V1 = b"S4\x00\x01"
MAGIC_V2 = b"S4\x00\x02"

_V1_HEADER = struct.Struct("<4sii")  # magic, dim, k; then the fields of the values
_V2_EXTRA = struct.Struct("<II")  # k, bytes of the coded indices; then the fields of the values


Density: TypeAlias = Annotated[float, Field(gt=0, le=1)]


class TopKOptions(BothVersions):
    """Options of s4."""

    density: Density = 0.1
    """Share of the values that is sent."""


@dataclass(frozen=True, kw_only=True)
class TopKCodec(Codec):
    """A codec that sends the largest ``density`` of all entries."""

    density: float = 0.1

    Options = TopKOptions
    magics: ClassVar[tuple[bytes, bytes]]  # of version 1 and of version 2
    versions = VERSIONS
    v1_is_delta = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.density <= 1.0:
            raise ValueError(f"density must be in (0, 1], got {self.density} (0.1 keeps 10 %)")

    def count_v1(self, dim: int) -> int:
        """Entries sent in version 1: rounded down, as the first writers of this format do, but at least one."""
        return min(dim, max(1, int(dim * self.density)))

    def count_v2(self, dim: int) -> int:
        """Entries sent in version 2, before zeros are left out: rounded up, as by the reference implementation of deep
        gradient compression, so that all sparse formats here agree on k."""
        return min(dim, math.ceil(dim * self.density))

    def max_bytes(self, dim: int) -> int:
        k_v1, k = self.count_v1(dim), self.count_v2(dim)
        v1 = _V1_HEADER.size + 4 * k_v1 + self._value_bytes(k_v1, 1)
        return max(v1, V2_HEADER.size + _V2_EXTRA.size + self._value_bytes(k, 2) + max_index_bytes(dim, k))

    def _encode(self, vector: Tensor, version: int, is_delta: bool) -> bytes:
        dim = vector.numel()
        if version == 1:
            if dim >= 2**31:
                raise ValueError(
                    f"version 1 of a sparse codec holds less than 2**31 elements, got {dim}; use version=2"
                )
            sent = top_k(vector, self.count_v1(dim))
            fields, values = self._pack(sent.values, version)
            header = _V1_HEADER.pack(self.magics[0], dim, sent.indices.numel())
            return b"".join((header, fields, tensor_bytes(sent.indices.to(torch.int32)), *values))
        # Zeros are left out: the receiver has them anyway. A gradient with more than 90 % zeros shrinks its message.
        sent = top_k(vector, self.count_v2(dim)).without_zeros()
        fields, values = self._pack(sent.values, version)
        coding, coded = encode_indices(sent.indices, dim)
        header = pack_header(self.magics[1], is_delta=is_delta, dim=dim, coding=coding)
        return b"".join((header, _V2_EXTRA.pack(sent.indices.numel(), len(coded)), fields, *values, coded))

    @abstractmethod
    def _value_bytes(self, k: int, version: int) -> int:
        """Bytes of the fields and of the section of ``k`` values."""

    @abstractmethod
    def _pack(self, values: Tensor, version: int) -> tuple[bytes, Sequence[memoryview]]:
        """The fields of the header that belong to the values, and the section of the values."""


class ValueFormat(NamedTuple):
    """How a sparse message carries its values.

    Attributes:
        fields: of the header, behind those that all formats have.
        num_bytes: from the name of the format, k and the fields to the size of the section of the values.
        read: from name, message, offset of the section, k and the fields to float32, shape (k,), checked.
    """

    fields: struct.Struct
    num_bytes: Callable[..., int]
    read: Callable[..., Tensor]


def _read_float32(name: str, view: memoryview, start: int, k: int) -> Tensor:
    values = tensor_view(view, torch.float32, start, k)
    check_finite(values, f"{name} values")
    return values


FLOAT32_VALUES = ValueFormat(struct.Struct(""), lambda name, k: 4 * k, _read_float32)


def parse_sparse_v1(codec: str, values_in: ValueFormat, view: memoryview, expected_dim: int) -> Parsed:
    """Header, int32 indices, values."""
    name = f"{codec.upper()} v1"
    _, dim, k = unpack_fields(_V1_HEADER, view, 0, name)
    check_dim(name, dim, expected_dim)
    check_count(name, k, dim)
    fields = unpack_fields(values_in.fields, view, _V1_HEADER.size, name)
    num_bytes = values_in.num_bytes(name, k, *fields)
    start = _V1_HEADER.size + values_in.fields.size
    check_length(name, view, start + 4 * k + num_bytes, f"k={k}, {num_bytes} bytes of values")
    indices = np.frombuffer(view, dtype="<i4", count=k, offset=start).astype(np.int64)
    check_ascending(indices, dim)
    values = values_in.read(name, view, start + 4 * k, k, *fields)
    return _parsed(codec, torch.from_numpy(indices), values, version=1, is_delta=True, dim=dim)


def parse_sparse_v2(codec: str, values_in: ValueFormat, view: memoryview, expected_dim: int) -> Parsed:
    """Header, values, coded indices."""
    name = codec.upper()
    header = unpack_header(view, name, expected_dim, is_sparse=True)
    k, index_bytes = unpack_fields(_V2_EXTRA, view, V2_HEADER.size, name)
    check_count(name, k, header.dim)
    fields = unpack_fields(values_in.fields, view, V2_HEADER.size + _V2_EXTRA.size, name)
    start = V2_HEADER.size + _V2_EXTRA.size + values_in.fields.size
    end = start + values_in.num_bytes(name, k, *fields)
    check_length(name, view, end + index_bytes, f"k={k}, {end - start} bytes of values, {index_bytes} of indices")
    values = values_in.read(name, view, start, k, *fields)
    indices = decode_indices(header.coding, view[end:], header.dim, k)
    return _parsed(codec, indices, values, version=2, is_delta=header.is_delta, dim=header.dim)


def _parsed(codec: str, indices: Tensor, values: Tensor, *, version: int, is_delta: bool, dim: int) -> Parsed:
    def blocks(block_elems: int) -> Iterator[SparseBlock]:
        for start in range(0, indices.numel(), block_elems):
            yield SparseBlock(indices[start : start + block_elems], values[start : start + block_elems])

    return Parsed(codec, version, is_delta, dim, True, blocks)


@dataclass(frozen=True, kw_only=True)
class S4(TopKCodec):
    """Exact values for the entries that are sent; the rest is for the caller's residual."""

    name = choice = "s4"
    magics = (MAGIC_V1, MAGIC_V2)
    formats = (
        (MAGIC_V1, partial(parse_sparse_v1, "s4", FLOAT32_VALUES)),
        (MAGIC_V2, partial(parse_sparse_v2, "s4", FLOAT32_VALUES)),
    )

    def _value_bytes(self, k: int, version: int) -> int:
        return 4 * k

    def _pack(self, values: Tensor, version: int) -> tuple[bytes, Sequence[memoryview]]:
        return b"", [tensor_bytes(values)]
