"""The message of one step: dense tensors, selected entries of all others in one index space, and a header.

One message instead of two per tensor saves their headers and round trips, and small tensors share an index coding whose
fixed cost would otherwise outweigh them. ``docs/dgc.md`` has the table of the bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.codecs.base import (
    Payload,
    as_view,
    check_count,
    check_finite,
    check_length,
    tensor_bytes,
    tensor_view,
    unpack_fields,
)
from gradbus.codecs.dgc.config import DgcLayout
from gradbus.codecs.errors import CodecError, DimMismatchError
from gradbus.codecs.index_coding import Coding, decode_indices, encode_indices, max_index_bytes

MAGIC = b"DG\x00\x01"

# magic, flags, index coding, exponent, layout digest, k, bytes of the coded indices
HEADER = struct.Struct("<4sBBhQII")
_FLAG_NON_FINITE, _FLAG_FP16, _FLAG_DENSE_FP16 = 0x01, 0x02, 0x04
_DENSE_EXPONENT = struct.Struct("<h")  # before dense tensors in fp16

# fp16 values are scaled by a power of two, which rounds nothing, so that the largest lies in [2**14, 2**15). So none
# overflows, and only values 2**-39 times as small as the largest are rounded to 0.
_FP16_TOP_EXPONENT = 15
_FP16_TOP = 32752.0  # the float16 next to 2**15: rounding up to 2**15 could overflow float32 after scaling back
_MIN_EXPONENT, _MAX_EXPONENT = -148 - _FP16_TOP_EXPONENT, 128 - _FP16_TOP_EXPONENT  # all that frexp of a float32 gives


@dataclass(frozen=True, slots=True, eq=False)
class DgcMessage:
    """The message of one rank. The tensors may share memory with the payload and are not to be written.

    dense: float32, shape (dense_elems,). indices: int64, shape (k,), strictly ascending, below sparse_elems; None: all.
    values: float32, shape (k,). If not ``is_finite`` the rank had NaN or infinity: ``dense`` is zero, and k is 0.
    """

    is_finite: bool
    dense: Tensor
    indices: Tensor | None
    values: Tensor


def encode_dgc(
    layout: DgcLayout, dense: Tensor, indices: Tensor, values: Tensor, *, value_dtype: str, dense_dtype: str = "fp32"
) -> tuple[bytes, Tensor]:
    """Return the message, and ``values`` as every receiver will read them.

    Args:
        dense: float32, shape (dense_elems,), finite.
        indices: int64, shape (k,), strictly ascending, below sparse_elems.
        values: float32, shape (k,), finite.
        value_dtype: "fp32", or "fp16" for ``values``.
        dense_dtype: the same for ``dense``. No residual keeps what fp16 rounds away there.
    """
    k = indices.numel()
    if k >= 1 << 32:
        raise ValueError(f"DGC message: k={k} entries, at most 2**32 - 1 fit; use a lower density")
    # A full set needs no indices: density 1 and no zeros.
    coding, coded = (
        (Coding.DENSE, b"") if k == layout.sparse_elems > 0 else encode_indices(indices, layout.sparse_elems)
    )
    flags, exponent, content, decoded = 0, 0, tensor_bytes(values), values
    if value_dtype == "fp16":
        halves, exponent = _to_fp16(values.detach().cpu().numpy())
        flags, content = _FLAG_FP16, halves.data.cast("B") if k else memoryview(b"")
        decoded = torch.from_numpy(_from_fp16(halves, exponent)).to(values.device)
    parts: list[bytes | memoryview] = [tensor_bytes(dense)]
    if dense_dtype == "fp16" and dense.numel():
        dense_halves, dense_exponent = _to_fp16(dense.detach().cpu().numpy())
        flags, parts = flags | _FLAG_DENSE_FP16, [_DENSE_EXPONENT.pack(dense_exponent), dense_halves.data.cast("B")]
    header = HEADER.pack(MAGIC, flags, coding, exponent, layout.digest, k, len(coded))
    return b"".join((header, *parts, content, coded)), decoded


def encode_non_finite(layout: DgcLayout) -> bytes:
    """The message of a rank whose gradients hold NaN or infinity: a header that makes all ranks skip the step."""
    return HEADER.pack(MAGIC, _FLAG_NON_FINITE, Coding.RAW, 0, layout.digest, 0, 0)


def max_dgc_bytes(layout: DgcLayout) -> int:
    """No message for ``layout`` is longer, whatever the density: a limit for receivers."""
    return HEADER.size + 4 * layout.dim + max_index_bytes(layout.sparse_elems, layout.sparse_elems)


def decode_dgc(payload: Payload, layout: DgcLayout) -> DgcMessage:
    """Read a message of any rank. All bytes are checked; nothing is allocated for what a header merely claims.

    Raises:
        NonFiniteError: a value is NaN or infinite, in a message without that mark.
        DimMismatchError: a message for another layout.
        CodecError: anything else that is wrong.
    """
    view = as_view(payload)
    magic, flags, coding, exponent, digest, k, index_bytes = unpack_fields(HEADER, view, 0, "DGC")
    if magic != MAGIC:
        raise CodecError(f"DGC payload starts with {magic!r}, expected {MAGIC!r}; a message of another codec?")
    if digest != layout.digest:
        raise DimMismatchError(
            f"DGC header: layout {digest:016x}, expected {layout.digest:016x}; same model and min_numel on all ranks?"
        )
    if flags == _FLAG_NON_FINITE:
        check_length("DGC", view, HEADER.size, "non-finite, so nothing follows")
        if (coding, exponent, k, index_bytes) != (Coding.RAW, 0, 0, 0):
            raise CodecError(f"DGC header: non-finite, expected no entries, got k={k}, {index_bytes} index bytes")
        none = torch.empty(0, dtype=torch.float32)
        return DgcMessage(False, none.new_zeros(layout.dense_elems), torch.empty(0, dtype=torch.int64), none)
    if flags & ~(_FLAG_FP16 | _FLAG_DENSE_FP16) or (flags & _FLAG_DENSE_FP16 and not layout.dense_elems):
        raise CodecError(f"DGC header: unknown bits in flags {flags:#04x}; newer peer?")
    is_fp16, is_dense_fp16 = bool(flags & _FLAG_FP16), bool(flags & _FLAG_DENSE_FP16)
    if is_fp16 or exponent:
        _check_exponent("exponent", exponent, is_fp16)
    check_count("DGC", k, layout.sparse_elems)
    dense_bytes = _DENSE_EXPONENT.size + 2 * layout.dense_elems if is_dense_fp16 else 4 * layout.dense_elems
    values_start = HEADER.size + dense_bytes
    indices_start = values_start + (2 if is_fp16 else 4) * k
    check_length("DGC", view, indices_start + index_bytes, f"k={k}, {index_bytes} index bytes")
    dense = _read_dense(view, layout, is_fp16=is_dense_fp16)
    if is_fp16:
        halves = np.frombuffer(view, dtype="<f2", count=k, offset=values_start)
        values = torch.from_numpy(_from_fp16(halves, exponent))
    else:
        values = tensor_view(view, torch.float32, values_start, k)
    check_finite(values, "DGC values")
    return DgcMessage(True, dense, _read_indices(coding, view[indices_start:], layout.sparse_elems, k), values)


def _read_dense(view: memoryview, layout: DgcLayout, *, is_fp16: bool) -> Tensor:
    """Read the dense tensors behind the header, whose length has been checked: float32, shape (dense_elems,)."""
    if is_fp16:
        (exponent,) = _DENSE_EXPONENT.unpack_from(view, HEADER.size)
        _check_exponent("exponent of the dense tensors", exponent, True)
        start = HEADER.size + _DENSE_EXPONENT.size
        halves = np.frombuffer(view, dtype="<f2", count=layout.dense_elems, offset=start)
        dense = torch.from_numpy(_from_fp16(halves, exponent))
    else:
        dense = tensor_view(view, torch.float32, HEADER.size, layout.dense_elems)
    check_finite(dense, "DGC dense values")
    return dense


def _check_exponent(name: str, exponent: int, is_fp16: bool) -> None:
    if not (is_fp16 and _MIN_EXPONENT <= exponent <= _MAX_EXPONENT):
        wanted = f"{_MIN_EXPONENT} .. {_MAX_EXPONENT}" if is_fp16 else "0 in a message of fp32 values"
        raise CodecError(f"DGC header: {name} {exponent}, expected {wanted}")


def _read_indices(coding: int, coded: memoryview, dim: int, k: int) -> Tensor | None:
    if coding != Coding.DENSE:
        return decode_indices(coding, coded, dim, k)
    if k != dim or not k or len(coded):
        raise CodecError(f"DGC header: coding 0 means all {dim} entries without indices, got k={k}, {len(coded)} bytes")
    return None


@dataclass(frozen=True, slots=True, eq=False)
class DgcMean:
    """The mean over all ranks, bit-equal on each of them.

    flat: float32, shape (dim,); zero if the step is to be skipped. skipped_by: the ranks that had NaN or infinity; if
    there are any, no rank may use the step, and each calls :func:`gradbus.codecs.undo_step`.
    """

    layout: DgcLayout
    flat: Tensor
    skipped_by: tuple[int, ...]

    def gradients(self) -> Iterator[Tensor]:
        """One view into ``flat`` per tensor, shaped, in the order of the parameters."""
        return self.layout.views(self.flat)

    @torch.no_grad()
    def write_to(self, parameters: Iterable[Tensor]) -> None:
        """Make this the ``.grad`` of each parameter. A ``.grad`` that is there keeps its storage: it may be part of a
        larger buffer."""
        for parameter, gradient in zip(parameters, self.gradients(), strict=True):
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.device, parameter.dtype, copy=True)
            else:
                parameter.grad.copy_(gradient)


@torch.no_grad()
def combine_dgc(payloads: Sequence[Payload], layout: DgcLayout, *, out: Tensor | None = None) -> DgcMean:
    """The mean of the messages of all ranks, the own one included *as it was sent*.

    Summed in float32 in the order given, then multiplied by 1 / N once. Float addition is not associative, so every
    rank passes the same messages in rank order; then all hold the same bits.

    Args:
        payloads: one per rank, in rank order.
        out: float32, shape (dim,), any device: overwritten and returned as ``flat``; saves its allocation. Untouched if
            a message is bad.

    Raises:
        CodecError: a bad message (of the kinds that :func:`decode_dgc` raises); the text names its rank.
        ValueError: no messages, or ``out`` does not fit.
    """
    if not payloads:
        raise ValueError("combine_dgc: expected one payload per rank, got none")
    if out is not None and (out.shape != (layout.dim,) or out.dtype != torch.float32):
        raise ValueError(f"out must be float32 of shape ({layout.dim},), got {out.dtype} of {tuple(out.shape)}")
    messages = []
    for rank, payload in enumerate(payloads):
        try:
            messages.append(decode_dgc(payload, layout))
        except CodecError as error:
            raise type(error)(f"rank {rank} of {len(payloads)}: {error}") from None
    flat = torch.empty(layout.dim, dtype=torch.float32) if out is None else out
    flat.zero_()
    skipped_by = tuple(rank for rank, message in enumerate(messages) if not message.is_finite)
    if skipped_by:
        return DgcMean(layout, flat, skipped_by)
    sparse, dense = flat[: layout.sparse_elems], flat[layout.sparse_elems :]
    for message in messages:
        dense += message.dense.to(flat.device)
        add_entries(sparse, message)
    return DgcMean(layout, flat.mul_(1.0 / len(payloads)), ())


def add_entries(sparse: Tensor, message: DgcMessage) -> None:
    """Add the selected entries of a message to ``sparse``, float32, shape (sparse_elems,)."""
    if message.indices is None:
        sparse += message.values.to(sparse.device)
    else:
        # Each index occurs once, so there is no order of additions to agree on.
        sparse.index_add_(0, message.indices.to(sparse.device), message.values.to(sparse.device))


def _to_fp16(values: NDArray[Any]) -> tuple[NDArray[np.float16], int]:
    """Halves h and an exponent with values ≈ h * 2**exponent."""
    peak = float(np.abs(values).max(initial=0.0))
    exponent = math.frexp(peak)[1] - _FP16_TOP_EXPONENT if peak else 0
    with np.errstate(under="ignore"):
        scaled = np.clip(np.ldexp(values, -exponent), -_FP16_TOP, _FP16_TOP)
        return scaled.astype("<f2"), exponent


def _from_fp16(halves: NDArray[np.float16], exponent: int) -> NDArray[np.float32]:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # infinity and NaN are the caller's to refuse
        return np.ldexp(halves.astype(np.float32), exponent)
