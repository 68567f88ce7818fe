"""What all codecs share: ``encode`` a vector, and what comes out of the bytes again; bytes as tensors without a copy,
and the header that all version 2 messages begin with."""

from __future__ import annotations

import math
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from gradbus.codecs.errors import CodecError, DimMismatchError, NonFiniteError

if sys.byteorder != "little":
    # Values travel little-endian and are used in place; swapping them is code that nobody could test today.
    raise ImportError("gradbus.codecs needs a little-endian machine")

VERSIONS = (1, 2)
_BLOCK_ELEMS = 30 * 1024  # stays in the cache


@dataclass(frozen=True, slots=True, eq=False)
class DenseBlock:
    """``values`` float32, shape (n,), for the elements ``start .. start + n``. May share memory with the payload."""

    start: int
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SparseBlock:
    """``values`` float32, shape (n,), for the elements ``indices`` int64, shape (n,), strictly ascending."""

    indices: Tensor
    values: Tensor


Block: TypeAlias = DenseBlock | SparseBlock


@dataclass(frozen=True, slots=True, eq=False)
class Parsed:
    """A message of which every byte has been checked: reading its blocks cannot fail.

    Attributes:
        is_delta: the vector is a difference to a base model, else the weights themselves.
        is_sparse: which kind of block comes; elements that no sparse block names are 0.
        max_abs: the largest absolute value, where the check has found it; finite.
    """

    codec: str
    version: int
    is_delta: bool
    dim: int
    is_sparse: bool
    make_blocks: Callable[[int], Iterator[Block]]
    max_abs: float | None = None

    def blocks(self, block_elems: int = 65536) -> Iterator[Block]:
        """The content in ascending order, at most ``block_elems`` values at a time, each element at most once.

        The tensors are on the CPU, may share memory with the payload, and are not to be written.
        """
        if block_elems < 1:
            raise ValueError(f"block_elems must be >= 1, got {block_elems}")
        return self.make_blocks(block_elems)

    def replaced(self, make_blocks: Callable[[int], Iterator[Block]], *, is_sparse: bool) -> Parsed:
        """Return the message with other content, made of this one's: a difference."""
        return replace(self, is_delta=True, is_sparse=is_sparse, make_blocks=make_blocks, max_abs=None)


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """A whole message as a dense vector: ``vector`` float32, shape (D,); ``codec`` is the name of its format."""

    vector: Tensor
    is_delta: bool
    codec: str


Parser: TypeAlias = Callable[[memoryview, int], Parsed]
"""Checks a message that begins with the parser's magic; the second argument is the expected number of elements."""


class CodecOptions(BaseModel):
    """Options of every codec, as a configuration has them. A codec with more of them inherits this, and adds fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    version: Literal[2] = 2
    """Version of the codec's format."""


class BothVersions(CodecOptions):
    """Options of fp32."""

    version: Literal[1, 2] = 2  # type: ignore[assignment]  # wider than a codec without the original bytes has it
    """Version of the codec's format. 1: the original bytes."""


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """A wire format with its options fixed, without state. :func:`gradbus.codecs.get` makes one.

    A built-in codec is a class with a ``choice``, in any module of this package: the table finds it by looking. For a
    codec of your own :class:`gradbus.codecs.CustomCodec` is the shorter way.

    Attributes:
        choice: its name in a configuration. Classes without one are not in the table.
        name: the codec's name in messages that have been parsed, in logs and reports.
        lossless: whether a receiver gets the bits of the vector, so that there is no residual.
        versions: of the format, that :meth:`encode` writes.
        v1_is_delta: what version 1 always carries, as it has no flag: a difference, else weights.
        formats: the magic of each kind of message, its first four bytes, and the function that parses it.
        Options: what a configuration may set; the constructor takes them as keywords.

    Bytes of any codec are read by :func:`gradbus.codecs.decode`, which needs no options: a message describes itself.
    """

    version: int = 2

    Options: ClassVar[type[BaseModel]] = CodecOptions
    choice: ClassVar[str]
    name: ClassVar[str]
    lossless: ClassVar[bool] = False
    versions: ClassVar[tuple[int, ...]] = (2,)
    v1_is_delta: ClassVar[bool]
    formats: ClassVar[tuple[tuple[bytes, Parser], ...]] = ()

    def __post_init__(self) -> None:
        self._check_version(self.version)

    def encode(self, vector: Tensor, *, is_delta: bool | None = None, version: int | None = None) -> bytes:
        """The message for ``vector``, always a copy: the tensor may change the moment this returns.

        Args:
            vector: any float dtype, shape (D,), any device; taken as float32.
            is_delta: whether it is a difference to a base model; by default yes in version 2, and in version 1
                what the format has always meant (fp32 and q8: weights, s4 and sq8: difference).
            version: wire version, by default the codec's own.

        Raises:
            NonFiniteError: NaN or infinity in ``vector``.
            ValueError: not a float vector, or version 1 cannot say ``is_delta``.
        """
        version = self.version if version is None else version
        self._check_version(version)
        vector = _as_float32(vector)
        if version == 1 and is_delta not in (None, self.v1_is_delta):
            meaning = "a difference" if self.v1_is_delta else "weights"
            raise ValueError(f"{self.name} version 1 always carries {meaning}; use version=2 for is_delta={is_delta}")
        return self._encode(vector, version, is_delta is None or is_delta)

    def _check_version(self, version: int) -> None:
        if version not in self.versions:
            known = " or ".join(map(str, self.versions))
            raise ValueError(f"{self.name}: version must be {known}, got {version!r}")

    @abstractmethod
    def max_bytes(self, dim: int) -> int:
        """The size of the longest message of ``dim`` elements with these options: a limit for receivers."""

    @abstractmethod
    def _encode(self, vector: Tensor, version: int, is_delta: bool) -> bytes:
        """The message for a float32 ``vector``, contiguous; version 1 has no place for ``is_delta``."""


def check_finite(values: Tensor, what: str) -> float:
    """Raise :class:`NonFiniteError` if any of ``values`` is NaN or infinite. Returns the largest absolute value; 0: of
    none.

    ``aminmax`` hands NaN through and is one pass without a temporary, ten times as fast as ``isfinite().all()``.
    """
    if not values.numel():
        return 0.0
    low, high = map(float, torch.aminmax(values))
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = int((~values.isfinite()).nonzero()[0, 0])
        raise NonFiniteError(f"non-finite {what}: element {bad} of {values.numel()} is {float(values[bad])}")
    return max(-low, high)


def l2_norm(vector: Tensor) -> float:
    """Return the L2 norm of a float32 vector on the CPU; infinite or NaN where it is too large or not finite."""
    values = vector.detach().numpy()
    blocks = (values[start : start + _BLOCK_ELEMS] for start in range(0, len(values), _BLOCK_ELEMS))
    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(sum(float(np.dot(block, block)) for block in blocks))


def _as_float32(vector: Tensor) -> Tensor:
    if vector.dim() != 1 or not vector.is_floating_point():
        raise ValueError(f"vector must be float of shape (D,), got {vector.dtype} of shape {tuple(vector.shape)}")
    return vector.detach().to(torch.float32).contiguous()


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all entries of all tensors are finite. The answer is exact, so equal bits give equal answers everywhere.

    A finite sum proves it, at one read per entry and one wait for the device. Only where a sum is not finite, which
    finite entries may have, is every entry checked.

    Args:
        tensors: of floating point, any shapes, dtypes and devices; there may be none. Of sparse ones the values count.
    """
    tensors = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return True
    device = tensors[0].device
    sums = torch.stack([tensor.sum().to(device, torch.float32) for tensor in tensors])
    return bool(sums.isfinite().all()) or all(bool(tensor.isfinite().all()) for tensor in tensors)


# Bytes

Payload: TypeAlias = bytes | bytearray | memoryview

V2_HEADER = struct.Struct("<4sBBHQ")  # magic, flags, index coding, reserved (0), dim
FLAG_DELTA = 0x01

_NUMPY_DTYPE: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.int32: np.dtype("<i4"),
    torch.int8: np.dtype("i1"),
}


class HeaderV2(NamedTuple):
    """The first 16 bytes of a version 2 message, checked."""

    is_delta: bool
    coding: int
    dim: int


def pack_header(magic: bytes, *, is_delta: bool, dim: int, coding: int = 0) -> bytes:
    """The 16 bytes described in ``docs/codecs.md``."""
    return V2_HEADER.pack(magic, FLAG_DELTA if is_delta else 0, coding, 0, dim)


def unpack_header(view: memoryview, name: str, expected_dim: int, *, is_sparse: bool = False) -> HeaderV2:
    """Read and check the first 16 bytes; the index coding of a sparse message is left to its decoder.

    Raises:
        DimMismatchError: another number of elements than ``expected_dim``.
        CodecError: too short, unknown flag or reserved bits, or a dense message with an index coding.
    """
    if len(view) < V2_HEADER.size:
        raise CodecError(f"{name} payload cut short: the header needs {V2_HEADER.size} bytes, got {len(view)}")
    _, flags, coding, reserved, dim = V2_HEADER.unpack_from(view)
    check_dim(name, dim, expected_dim)
    if flags & ~FLAG_DELTA or reserved:
        raise CodecError(f"{name} header: unknown bits in flags {flags:#04x} or reserved {reserved:#06x}; newer peer?")
    if coding and not is_sparse:
        raise CodecError(f"{name} header: index coding {coding}, expected 0 in a dense message")
    return HeaderV2(bool(flags & FLAG_DELTA), coding, dim)


def unpack_fields(fields: struct.Struct, view: memoryview, offset: int, name: str) -> tuple[Any, ...]:
    """``fields.unpack_from``. Raises CodecError: the payload ends too early."""
    if len(view) < offset + fields.size:
        raise CodecError(f"{name} payload cut short: the header needs {offset + fields.size} bytes, got {len(view)}")
    return fields.unpack_from(view, offset)


def check_dim(name: str, dim: int, expected_dim: int) -> None:
    """The number of elements comes from our own model, never from a peer: nothing is allocated before this."""
    if dim != expected_dim:
        raise DimMismatchError(
            f"{name} header: message of {dim} elements, expected {expected_dim}; same model on both ends?"
        )


def check_count(name: str, k: int, dim: int) -> None:
    """A sparse message has between 0 and ``dim`` entries."""
    if not 0 <= k <= dim:
        raise CodecError(f"{name} header: k={k} entries, expected 0 .. {dim}")


def count_chunks(name: str, chunk_elems: int, num_elems: int, claimed: int | None = None) -> int:
    """The number of chunks of ``num_elems`` values. Raises CodecError: not the one that version 1 ``claimed``."""
    if chunk_elems < 1:
        raise CodecError(f"{name} header: chunk of {chunk_elems} elements, expected >= 1")
    chunks = -(-num_elems // chunk_elems)
    if claimed is not None and claimed != chunks:
        raise CodecError(
            f"{name} header: {num_elems} elements in chunks of {chunk_elems} are {chunks} chunks, header says {claimed}"
        )
    return chunks


def check_length(name: str, view: memoryview, need: int, why: str) -> None:
    """The payload must be exactly ``need`` bytes long; ``why`` names the header fields that ask for it."""
    if len(view) != need:
        state = "cut short" if len(view) < need else "too long"
        raise CodecError(f"{name} payload {state}: header says {why} (needs {need} bytes), got {len(view)}")


def as_view(payload: Payload) -> memoryview:
    """Flat ``memoryview`` of unsigned bytes over ``payload``, no copy.

    Raises:
        CodecError: the buffer is not contiguous.
    """
    view = memoryview(payload)
    if not view.c_contiguous:
        raise CodecError("payload: expected contiguous bytes, got a strided memoryview")
    return view.cast("B") if view.nbytes else memoryview(b"")  # cast() refuses shapes with a zero in them


class _Borrowed:
    """Memory of a payload, shown to numpy as writable: torch has no read-only tensors, and warns about such buffers."""

    def __init__(self, owner: np.ndarray[Any, Any]) -> None:
        self._owner = owner  # keeps the payload alive for as long as a tensor looks at it
        interface = dict(owner.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def tensor_view(view: memoryview, dtype: torch.dtype, offset: int, count: int) -> Tensor:
    """``count`` values of ``view`` from byte ``offset`` on, as a tensor that shares memory; **not to be written**.

    Values that do not lie at a multiple of their size (a message inside a larger buffer) are copied.
    The caller has checked that the bytes are there.
    """
    if count == 0:
        return torch.empty(0, dtype=dtype)
    numpy_dtype = _NUMPY_DTYPE[dtype]
    array = np.frombuffer(view, dtype=numpy_dtype, count=count, offset=offset)
    if not array.flags.aligned:
        return torch.from_numpy(array.copy())
    return torch.from_numpy(np.asarray(_Borrowed(array)))


def tensor_bytes(values: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of any device; shares memory with it on the CPU."""
    array = values.detach().cpu().contiguous().numpy()
    return array.data.cast("B") if array.size else memoryview(b"")
