"""Two bits a value: its sign, and which of two magnitudes; the arithmetic that ``q2`` and ``loco`` share.

Both magnitudes are the means of the values that they stand for, on either side of a threshold, as Lloyd's algorithm
finds it in two turns (Lloyd, "Least squares quantization in PCM", 1982). So rounding never makes a vector longer, and
what it leaves out is shorter than the vector: what error feedback needs. Magnitudes travel as bfloat16, which has the
range of float32.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.codecs.errors import CodecError, NonFiniteError

_MAX_BF16 = torch.finfo(torch.bfloat16).max
_FIRST_THRESHOLD = 1.25  # times the mean magnitude: near the best of a normal distribution, 1.23


def two_levels(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Two bits for each value of each row, which has magnitudes of its own.

    Args:
        rows: float32, shape (r, n), finite; any device.

    Returns:
        levels: bfloat16, shape (r, 2): the lower and the higher magnitude.
        codes: uint8, shape (r, n), 0 to 3: bit 0 for a negative value, bit 1 for the higher magnitude.
    """
    magnitude = rows.abs()
    total = magnitude.sum(dim=1, keepdim=True, dtype=torch.float64)
    threshold = total / max(1, rows.shape[1]) * _FIRST_THRESHOLD
    for _ in range(2):
        is_high = magnitude > threshold
        count = is_high.sum(dim=1, keepdim=True)
        above = (magnitude * is_high).sum(dim=1, keepdim=True, dtype=torch.float64)
        high = above / count.clamp(min=1)
        low = (total - above).clamp_(min=0) / (rows.shape[1] - count).clamp(min=1)
        high = torch.where(count > 0, high, low)
        threshold = (low + high) / 2
    levels = torch.cat([torch.minimum(low, high), high], dim=1).clamp_(max=_MAX_BF16).to(torch.bfloat16)
    return levels, (rows < 0).to(torch.uint8) | (is_high.to(torch.uint8) << 1)


def values_of(levels: Tensor, codes: Tensor) -> Tensor:
    """The inverse: float32, shape (r, n). ``levels``: float32, shape (r, 2). ``codes``: uint8, shape (r, n)."""
    values = torch.where((codes & 2).bool(), levels[:, 1:], levels[:, :1])
    # In place, with a byte for each value: a gather from four values would take 8 for each index.
    np.negative(values.numpy(), out=values.numpy(), where=(codes & 1).numpy().view(np.bool_))
    return values


def level_bytes(levels: Tensor) -> bytes:
    """bfloat16, one row after the other."""
    return levels.cpu().contiguous().view(torch.int16).numpy().tobytes()


def read_levels(view: memoryview, offset: int, count: int, name: str) -> Tensor:
    """The inverse: float32, shape (count, 2). The caller has checked that the bytes are there.

    Raises:
        NonFiniteError: NaN or infinity.
        CodecError: a negative level, or a lower one above the higher one.
    """
    raw = np.frombuffer(view, dtype="<u2", count=2 * count, offset=offset).astype(np.uint32) << 16
    levels = torch.from_numpy(raw.view(np.float32).reshape(count, 2))
    if not bool(levels.isfinite().all()):
        raise NonFiniteError(f"non-finite {name} levels: row {int((~levels.isfinite()).any(dim=1).nonzero()[0])}")
    if count and (bool(levels.signbit().any()) or bool((levels[:, 0] > levels[:, 1]).any())):
        raise CodecError(f"{name} levels: expected 0 <= lower <= higher")
    return levels


def pack_codes(codes: Tensor) -> bytes:
    """Four to a byte, from the lowest bits on. ``codes``: uint8, shape (n,), 0 to 3."""
    padded: NDArray[np.uint8] = np.zeros(-(-codes.numel() // 4) * 4, np.uint8)
    padded[: codes.numel()] = codes.cpu().numpy()
    quads = padded.reshape(-1, 4)
    return (quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6).astype(np.uint8).tobytes()


def unpack_codes(view: memoryview, offset: int, count: int, name: str) -> Tensor:
    """The inverse: uint8, shape (count,). The caller has checked that the bytes are there.

    Raises:
        CodecError: spare bits that are not 0.
    """
    packed = np.frombuffer(view, dtype=np.uint8, count=-(-count // 4), offset=offset)
    codes = (packed[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).astype(np.uint8).reshape(-1)
    if codes[count:].any():
        raise CodecError(f"{name} values: bits after the last of {count} values are not 0")
    return torch.from_numpy(codes[:count])
