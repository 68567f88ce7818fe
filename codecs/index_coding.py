"""Strictly ascending indices as few bytes; ``docs/codecs.md`` describes the codings and the reasons for each.

Random sets of indices have geometric gaps, for which Golomb codes are the best prefix codes (Golomb, "Run-length
encodings", 1966); Rice's are those whose divisor is a power of two. Real gradients are not random sets (whole rows of a
weight matrix move together), and there zstd over varint gaps or a bitmap takes far fewer bytes: so each message names
its coding, and the sender takes the smallest. Loops run over bytes or bits of a number, never over the numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from enum import IntEnum

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from gradbus.codecs.errors import CodecError

MAX_DIM = 1 << 40

_ZSTD_LEVEL = 1  # on the gaps of random sets the higher levels are slower and give up to 7 % more bytes
_TRY_BYTES = 1 << 18  # up to here a candidate for zstd is compressed whole to learn its size, above only samples of it
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 1 << 13
# A bitmap with fewer ones is not worth trying. The decoder relies on it: a tiny frame cannot ask for a huge bitmap.
_MAX_BITMAP_SPREAD = 64


class Coding(IntEnum):
    """The id that travels in a version 2 header. A new coding takes a new number; none is ever reused."""

    DENSE = 0  # no indices: the message is not sparse
    RAW = 1  # uint32 each
    VARINT_ZSTD = 2  # gaps as varints, in one zstd frame
    RICE = 3  # gaps in Rice code
    BITMAP = 4  # one bit per element of the vector
    BITMAP_ZSTD = 5  # the same in one zstd frame


def encode_indices(indices: Tensor, dim: int) -> tuple[Coding, bytes]:
    """``indices`` in the coding that takes the fewest bytes.

    The sizes of RAW, BITMAP and RICE follow from the gaps; zstd is tried, above 256 KiB of input on samples, which may
    miss the smallest by a few percent. The choice depends on the indices (and the zstd library) alone.

    Args:
        indices: int64, shape (k,), strictly ascending, in [0, dim); any device.
        dim: D, at most 2**40.

    Raises:
        ValueError: indices not as described.
    """
    ascending: NDArray[np.int64] = indices.detach().cpu().numpy()
    k = ascending.size
    if ascending.dtype != np.int64 or ascending.ndim != 1 or not 0 <= dim <= MAX_DIM:
        raise ValueError(f"indices must be int64 of shape (k,) below dim <= 2**40, got {indices.dtype}, dim={dim}")
    if k == 0:
        return Coding.RAW, b""
    gaps = np.diff(ascending, prepend=-1) - 1  # the first index is its own gap
    if int(gaps.min()) < 0 or int(ascending[-1]) >= dim:
        raise ValueError(f"indices must be strictly ascending in [0, {dim})")

    parameter = rice_parameter(k, dim)
    exact = {Coding.RAW: 4 * k} if dim <= 1 << 32 else {}
    exact[Coding.RICE] = rice_size(gaps, parameter)
    zstd_input = {Coding.VARINT_ZSTD: encode_varints(gaps)}
    if dim <= _MAX_BITMAP_SPREAD * k:
        zstd_input[Coding.BITMAP_ZSTD] = _bitmap(ascending, dim)
        exact[Coding.BITMAP] = -(-dim // 8)

    best = min(exact, key=exact.__getitem__)
    estimates = {coding: _zstd_size(content) for coding, content in zstd_input.items()}
    best_zstd = min(estimates, key=estimates.__getitem__)
    if estimates[best_zstd] < exact[best]:
        frame = _compress(zstd_input[best_zstd])
        if len(frame) < exact[best]:  # a wrong estimate costs time, but never more bytes than without zstd
            return best_zstd, frame
    match best:
        case Coding.RAW:
            return best, ascending.astype("<u4").tobytes()
        case Coding.BITMAP:
            return best, zstd_input[Coding.BITMAP_ZSTD]
        case _:
            return best, encode_rice(gaps, parameter)


def decode_indices(coding: int, data: bytes | memoryview, dim: int, k: int) -> Tensor:
    """The inverse of :func:`encode_indices`, for bytes that nobody has checked.

    Allocates in proportion to ``k`` and ``len(data)``, so the caller has checked both: ``k`` against the bytes that
    the values take in the same message, ``dim`` against its own model.

    Returns:
        int64, shape (k,), strictly ascending, in [0, dim).

    Raises:
        CodecError: unknown coding, or bytes that are not exactly ``k`` such indices.
    """
    view = memoryview(data)
    if not 0 <= k <= dim <= MAX_DIM:
        raise CodecError(f"indices: expected 0 <= k <= dim <= 2**40, got k={k}, dim={dim}")
    if k == 0:
        if coding != Coding.RAW or len(view):
            raise CodecError(f"indices: an empty set is coding {Coding.RAW:d} with 0 bytes, got {coding}, {len(view)}")
        return torch.empty(0, dtype=torch.int64)
    match coding:
        case Coding.RAW:
            return torch.from_numpy(_decode_raw(view, dim, k))
        case Coding.VARINT_ZSTD:
            return torch.from_numpy(_from_gaps(decode_varints(_decompress(view, k, k * MAX_VARINT_BYTES), k), dim))
        case Coding.RICE:
            return torch.from_numpy(_from_gaps(decode_rice(view, k, dim), dim))
        case Coding.BITMAP:
            return torch.from_numpy(_decode_bitmap(view, dim, k))
        case Coding.BITMAP_ZSTD:
            size = -(-dim // 8)
            if dim > _MAX_BITMAP_SPREAD * k:
                raise CodecError(f"bitmap indices: {k} of {dim} is too thin for a compressed bitmap")
            return torch.from_numpy(_decode_bitmap(memoryview(_decompress(view, size, size)), dim, k))
    raise CodecError(f"indices: unknown coding {coding}, expected one of {[c.value for c in Coding if c]}")


def _from_gaps(gaps: NDArray[np.int64], dim: int) -> NDArray[np.int64]:
    """Running sum of the gaps, at least one, all >= 0. The check in float64 comes first: int64 could wrap around."""
    if float(gaps.sum(dtype=np.float64)) + gaps.size > dim:
        raise CodecError(f"indices: the gaps of {gaps.size} indices add up beyond dim={dim}")
    indices: NDArray[np.int64] = np.cumsum(gaps + 1) - 1
    return indices


def _decode_raw(view: memoryview, dim: int, k: int) -> NDArray[np.int64]:
    if len(view) != 4 * k:
        raise CodecError(f"raw indices: {k} of them need {4 * k} bytes, got {len(view)}")
    indices = np.frombuffer(view, dtype="<u4").astype(np.int64)
    check_ascending(indices, dim)
    return indices


def check_ascending(indices: NDArray[np.int64], dim: int) -> None:
    """Raise :class:`CodecError` unless the indices are strictly ascending and in [0, dim)."""
    if indices.size and (int(indices[0]) < 0 or int(indices[-1]) >= dim or not (indices[1:] > indices[:-1]).all()):
        raise CodecError(f"indices: expected strictly ascending in [0, {dim}), first {indices[0]}, last {indices[-1]}")


def _bitmap(indices: NDArray[np.int64], dim: int) -> bytes:
    bits = np.zeros(dim, dtype=np.bool_)
    bits[indices] = True
    return np.packbits(bits, bitorder="little").tobytes()


def _decode_bitmap(view: memoryview, dim: int, k: int) -> NDArray[np.int64]:
    if len(view) != -(-dim // 8):
        raise CodecError(f"bitmap indices: {dim} elements need {-(-dim // 8)} bytes, got {len(view)}")
    bits = np.unpackbits(np.frombuffer(view, dtype=np.uint8), bitorder="little").view(np.bool_)
    indices: NDArray[np.int64] = np.flatnonzero(bits)
    if indices.size != k or indices[-1] >= dim:
        raise CodecError(f"bitmap indices: expected {k} ones below {dim}, got {indices.size}, last {indices[-1:]}")
    return indices


def _compress(data: bytes) -> bytes:
    # One object per call: they are cheap (microseconds) and not to be shared between threads.
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(data)


def _zstd_size(data: bytes) -> int:
    """Size of ``data`` in zstd: exact for small ones, else from samples spread evenly over it."""
    if len(data) <= _TRY_BYTES:
        return len(_compress(data))
    starts = np.linspace(0, len(data) - _SAMPLE_BYTES, _NUM_SAMPLES).astype(np.int64).tolist()
    sample = b"".join(data[start : start + _SAMPLE_BYTES] for start in starts)
    return len(_compress(sample)) * len(data) // len(sample)


def _decompress(view: memoryview, low: int, high: int) -> bytes:
    """One zstd frame that holds, by its own header, between ``low`` and ``high`` bytes, and nothing after it.

    The header is read first, because the library allocates what it claims.
    """
    try:
        claimed = zstandard.get_frame_parameters(view).content_size
        if not low <= claimed <= high:
            raise CodecError(f"zstd frame in indices: expected {low} to {high} bytes of content, header says {claimed}")
        return zstandard.ZstdDecompressor().decompress(view, max_output_size=high, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"zstd frame in indices: {error}") from None


MAX_PARAMETER = 40


def rice_parameter(k: int, dim: int) -> int:
    """The best l for ``k`` random indices below ``dim``: log2 of the median gap. 0 < k <= dim."""
    if k >= dim:
        return 0
    median_gap = math.log(2) / -math.log1p(-k / dim)
    return min(MAX_PARAMETER, max(0, round(math.log2(median_gap))))


def rice_size(gaps: NDArray[np.int64], parameter: int) -> int:
    """Bytes that :func:`encode_rice` will give, without encoding."""
    return 1 + _planes_size(gaps.size, parameter) + -(-(gaps.size + int((gaps >> parameter).sum())) // 8)


def encode_rice(gaps: NDArray[np.int64], parameter: int) -> bytes:
    """``gaps`` >= 0, shape (k,), k > 0."""
    parts = [bytes([parameter])]
    byte_planes, bit_planes = divmod(parameter, 8)
    parts += [(gaps >> (8 * plane)).astype(np.uint8).tobytes() for plane in range(byte_planes)]
    rest = (gaps >> (8 * byte_planes)).astype(np.uint8)
    parts += [np.packbits(rest & (1 << bit), bitorder="little").tobytes() for bit in range(bit_planes)]
    ones = np.cumsum((gaps >> parameter) + 1) - 1
    unary = np.zeros(int(ones[-1]) + 1, dtype=np.bool_)
    unary[ones] = True
    parts.append(np.packbits(unary, bitorder="little").tobytes())
    return b"".join(parts)


def decode_rice(data: memoryview, k: int, dim: int) -> NDArray[np.int64]:
    """The ``k`` > 0 gaps of indices below ``dim`` that ``data`` must hold exactly; a gap >= ``dim`` is refused.

    Raises:
        CodecError: a parameter above 40, a wrong length, or not ``k`` ones in the unary bits.
    """
    parameter = data[0] if len(data) else 0
    unary_start = 1 + _planes_size(k, parameter)
    # The quotients of k indices below dim add up to at most dim >> l: a longer stream is refused, not unpacked.
    longest = unary_start + -(-(k + (dim >> parameter)) // 8)
    if parameter > MAX_PARAMETER or not unary_start < len(data) <= longest:
        raise CodecError(
            f"Rice indices: parameter {parameter} (at most {MAX_PARAMETER}) with k={k}, dim={dim} needs "
            f"{unary_start + 1} to {longest} bytes, got {len(data)}"
        )
    raw = np.frombuffer(data, dtype=np.uint8)
    unary = np.unpackbits(raw[unary_start:], bitorder="little").view(np.bool_)
    ones: NDArray[np.int64] = np.flatnonzero(unary)
    if ones.size != k or ones[-1] // 8 != raw.size - unary_start - 1:
        raise CodecError(f"Rice indices: expected {k} ones in {raw.size - unary_start} unary bytes, got {ones.size}")
    quotients = np.diff(ones, prepend=-1) - 1
    if int(quotients.max()) << parameter >= dim:
        raise CodecError(f"Rice indices: gap of {int(quotients.max())} << {parameter}, expected below dim={dim}")
    return (quotients << parameter) | _read_planes(raw[1:unary_start], k, parameter)


def _planes_size(k: int, parameter: int) -> int:
    return (parameter // 8) * k + (parameter % 8) * -(-k // 8)


def _read_planes(planes: NDArray[np.uint8], k: int, parameter: int) -> NDArray[np.int64]:
    """The low ``parameter`` bits of each gap."""
    byte_planes, bit_planes = divmod(parameter, 8)
    plane_bytes = -(-k // 8)
    rest = np.zeros(k, dtype=np.uint8)
    for bit in range(bit_planes):
        start = byte_planes * k + bit * plane_bytes
        rest |= np.unpackbits(planes[start : start + plane_bytes], count=k, bitorder="little") << np.uint8(bit)
    low = rest.astype(np.int64) << (8 * byte_planes)
    for plane in range(byte_planes):
        low |= planes[plane * k : (plane + 1) * k].astype(np.int64) << (8 * plane)
    return low


MAX_VARINT_BYTES = 6  # 42 bits hold every gap below 2**40


def encode_varints(gaps: NDArray[np.int64]) -> bytes:
    """``gaps`` >= 0 and < 2**42, shape (k,): between k and 6 k bytes."""
    widest = int(gaps.max(initial=0))
    if widest < 0x80:  # at a density of 10 % nearly always
        return gaps.astype(np.uint8).tobytes()
    width = np.ones(gaps.size, dtype=np.int64)
    for limit_bits in range(7, widest.bit_length(), 7):
        width += gaps >> limit_bits != 0
    end = np.cumsum(width)
    start = end - width
    out = np.zeros(int(end[-1]), dtype=np.uint8)
    for byte in range(int(width.max())):
        has_byte = np.flatnonzero(width > byte)
        digit = (gaps[has_byte] >> (7 * byte)) & 0x7F
        out[start[has_byte] + byte] = digit | np.where(width[has_byte] > byte + 1, 0x80, 0)
    return out.tobytes()


def decode_varints(data: bytes, count: int) -> NDArray[np.int64]:
    """The ``count`` numbers that ``data`` must hold exactly.

    Raises:
        CodecError: more or fewer numbers, one wider than 6 bytes, or the last one cut.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    end: NDArray[np.int64] = np.flatnonzero(raw < 0x80)
    if end.size != count or (count and end[-1] != raw.size - 1) or (not count and raw.size):
        raise CodecError(f"varint indices: expected {count} numbers in {raw.size} bytes, got {end.size}")
    if raw.size == count:
        return raw.astype(np.int64)
    start = np.concatenate((np.zeros(1, dtype=np.int64), end[:-1] + 1))
    width = end - start + 1
    widest = int(width.max())
    if widest > MAX_VARINT_BYTES:
        raise CodecError(f"varint indices: number of {widest} bytes, expected at most {MAX_VARINT_BYTES}")
    numbers = (raw[start] & 0x7F).astype(np.int64)
    for byte in range(1, widest):
        has_byte = np.flatnonzero(width > byte)
        numbers[has_byte] |= (raw[start[has_byte] + byte] & 0x7F).astype(np.int64) << (7 * byte)
    return numbers


def max_index_bytes(dim: int, max_k: int) -> int:
    """:func:`encode_indices` takes no more for any set of up to ``max_k`` indices below ``dim``.

    Rice code is always a candidate there, and its unary part cannot exceed ``k + (dim >> l)`` bits. Up to 2**32
    elements RAW is a candidate, too, and BITMAP wherever it is smaller than RAW.
    """
    most, k = 0, max_k
    while k:
        # Of the numbers of indices that are coded with one parameter l, the largest takes the most.
        l = rice_parameter(k, dim)  # noqa: E741 (Rice's letter)
        rice = 1 + (l // 8) * k + (l % 8) * -(-k // 8) + -(-(k + (dim >> l)) // 8)
        most = max(most, rice)
        k = bisect_left(range(1, k), True, key=lambda fewer: rice_parameter(fewer, dim) <= l)
    return min(most, 4 * max_k, -(-dim // 8)) if dim <= 1 << 32 else most
