"""A codec of your own: two functions between a vector and bytes. Header, limits and checks are done here.

    class Coarse(CustomCodec):
        name = "coarse"
        magic = b"COA1"

        class Options(CodecOptions):
            step: Annotated[float, Field(gt=0)] = 0.01

        def max_body_bytes(self, dim): ...
        def encode_body(self, vector): ...
        @classmethod
        def decode_body(cls, body, dim): ...

A message is the 16 bytes that all messages of version 2 begin with (``docs/codecs.md``), with the codec's own magic,
and the body. A body describes itself: who decodes it does not know the options.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import BaseModel
from torch import Tensor

from gradbus.codecs.base import (
    V2_HEADER,
    Codec,
    CodecOptions,
    DenseBlock,
    Parsed,
    SparseBlock,
    as_view,
    check_finite,
    pack_header,
    unpack_header,
)
from gradbus.codecs.errors import CodecError
from gradbus.codecs.index_coding import check_ascending
from gradbus.codecs.sparse import SparseVector


@dataclass(frozen=True, init=False)
class CustomCodec(Codec):
    """A codec whose body a subclass writes and reads.

    A subclass sets ``name`` and ``magic``, may set ``lossless``, has its ``Options``, and three methods. It keeps no
    state: what a lossy codec leaves out of a message is the caller's residual.

    Attributes:
        magic: four bytes that messages of this codec begin with, and of no other one.
        options: an object of ``Options``, checked.
    """

    magic: ClassVar[bytes]
    Options: ClassVar[type[BaseModel]] = CodecOptions

    options: Any

    def __init__(self, **options: Any) -> None:
        """``options``: fields of ``Options``. Raises ValueError: there is no such option, or its value is wrong."""
        checked = type(self).Options(**options)
        object.__setattr__(self, "options", checked)  # instances are frozen, as those of all codecs
        object.__setattr__(self, "version", 2)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(cls, "magic"):  # also an inherited one: this class may have another decode_body
            cls.formats = ((cls.magic, cls._parse),)

    @abstractmethod
    def max_body_bytes(self, dim: int) -> int:
        """The size of the longest body of ``dim`` elements with these options. Receivers refuse longer messages."""

    @abstractmethod
    def encode_body(self, vector: Tensor) -> bytes | bytearray | memoryview:
        """The bytes of a vector.

        Args:
            vector: float32, shape (D,), contiguous, finite, on any device; not to be changed. D may be 0.
        """

    @classmethod
    @abstractmethod
    def decode_body(cls, body: memoryview, dim: int) -> Tensor | SparseVector:
        """The inverse: what a receiver sees of the vector.

        The bytes are a peer's, and may be any: check lengths before memory is allocated. What fails here costs that
        message, and nothing else.

        Args:
            body: read-only where the message is. dim: D, from the receiver's own model.

        Returns:
            float32, shape (D,), or the entries of a sparse vector, indices int64 and ascending; finite. They may be
            views of ``body``, but not of memory that another call writes to: they are read later.

        Raises:
            CodecError: they are no body of this codec, with what was expected and what is there.
        """

    def max_bytes(self, dim: int) -> int:
        return V2_HEADER.size + self._most_body_bytes(dim)

    def _most_body_bytes(self, dim: int) -> int:
        found: object = self.max_body_bytes(dim)
        try:
            most = operator.index(found)  # type: ignore[arg-type]  # a subclass may return anything
        except TypeError:
            most = -1
        if most < 0:
            raise TypeError(
                f"{self.name}: max_body_bytes({dim}) returned {found!r:.80}, expected a whole number of bytes"
            )
        return most

    def _encode(self, vector: Tensor, version: int, is_delta: bool) -> bytes:
        check_finite(vector, "vector")
        found, most = self.encode_body(vector), self._most_body_bytes(vector.numel())
        try:
            body = as_view(found)  # in bytes: that of an array counts its items
        except (TypeError, CodecError):
            raise TypeError(
                f"{self.name}: encode_body returned {_shown(found)}, expected bytes, or a contiguous buffer of them, "
                f"as of array.tobytes()"
            ) from None
        if len(body) > most:
            raise ValueError(
                f"{self.name}: encode_body of {vector.numel()} elements has {len(body)} bytes, and max_body_bytes "
                f"allows {most}: receivers would refuse it"
            )
        return b"".join((pack_header(self.magic, is_delta=is_delta, dim=vector.numel()), body))

    @classmethod
    def _parse(cls, view: memoryview, expected_dim: int) -> Parsed:
        header = unpack_header(view, cls.name, expected_dim)
        with torch.no_grad():
            found = cls.decode_body(view[V2_HEADER.size :].toreadonly(), header.dim)
            if isinstance(found, SparseVector):
                return _sparse(cls.name, found, header.dim, is_delta=header.is_delta)
            return _dense(cls.name, found, header.dim, is_delta=header.is_delta)


def _dense(name: str, values: Tensor, dim: int, *, is_delta: bool) -> Parsed:
    if not isinstance(values, Tensor) or values.dtype != torch.float32 or values.shape != (dim,):
        raise CodecError(f"{name}: decode_body gave {_shown(values)}, expected float32 of shape ({dim},)")
    values = values.detach().cpu()
    max_abs = check_finite(values, f"{name} values")

    def blocks(block_elems: int) -> Iterator[DenseBlock]:
        for start in range(0, dim, block_elems):
            yield DenseBlock(start, values[start : start + block_elems])

    return Parsed(name, 2, is_delta, dim, False, blocks, max_abs)


def _sparse(name: str, found: SparseVector, dim: int, *, is_delta: bool) -> Parsed:
    indices, values = found.indices.detach().cpu(), found.values.detach().cpu()
    count = values.numel()
    if found.dim != dim or indices.dtype != torch.int64 or indices.shape != (count,):
        raise CodecError(
            f"{name}: decode_body gave indices {_shown(indices)} for {found.dim} elements, expected int64 of shape "
            f"({count},) for {dim}"
        )
    if values.dtype != torch.float32 or values.dim() != 1:
        raise CodecError(f"{name}: decode_body gave values {_shown(values)}, expected float32 of shape ({count},)")
    check_ascending(indices.numpy(), dim)
    max_abs = check_finite(values, f"{name} values")

    def blocks(block_elems: int) -> Iterator[SparseBlock]:
        for start in range(0, count, block_elems):
            yield SparseBlock(indices[start : start + block_elems], values[start : start + block_elems])

    return Parsed(name, 2, is_delta, dim, True, blocks, max_abs)


def _shown(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
