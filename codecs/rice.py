"""Gaps in Golomb-Rice code, its two parts in separate streams so that numpy can handle each as a whole.

A gap g with parameter l is q = g >> l in unary (q zeros and a one) and the l low bits as they are. Random index sets
have geometric gaps, for which Golomb codes are the best prefix codes (Golomb, "Run-length encodings", 1966); Rice's are
those whose divisor is a power of two.

Stream of k gaps: l (1 byte), ``l // 8`` planes of k bytes (the low bytes), ``l % 8`` planes of ``ceil(k / 8)`` bytes
(the bits above them, one plane per bit, lowest first), then the unary bits; all bits lowest first within a byte.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gradbus.codecs.errors import CodecError

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
