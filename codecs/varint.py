"""Gaps as LEB128 varints: 7 bits per byte, lowest first, the top bit set on all bytes of a number but its last.

The loops run over the bytes of the widest number (at most 6), never over the numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradbus.codecs.errors import CodecError

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
