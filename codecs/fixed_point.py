"""float32 to int32 with a power of two for each chunk, so that a sum over ranks is exact in any order.

With N ranks and the exponent ``e`` of a chunk, the least one with ``|x| < 2^e`` on all ranks, an entry becomes

    q = round_half_even(x * 2^(30 - ceil(log2 N) - e))

so ``|q| <= 2^(30 - ceil(log2 N))``, and no sum of N of them leaves int32. The scale is a power of two: nothing is lost
but the bits below ``2^(e - 30 + ceil(log2 N))``, and the mean over N = 2^k ranks is exact. Error of a sum: at most
N / 2 units of the last place, 27 bits below 2^e at N = 8, 20 bits at N = 1,024.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradbus.codecs.quantize import num_chunks

SUM_BITS = 30
NO_EXPONENT = -(1 << 15)
"""The exponent of a chunk of zeros: below that of any other."""
NON_FINITE = (1 << 15) - 1
"""The exponent of a chunk with NaN or infinity: above that of any other, so that all ranks learn of it."""
CHECKSUM_MODULUS = 1 << 64

_LARGEST_WORLD = 1 << 20
_CHECKSUM_ELEMS = 1 << 16


def exponents(x: Tensor, chunk_elems: int) -> Tensor:
    """The exponent of each chunk: int32, shape (ceil(n / chunk_elems),). Its maximum over ranks is the common one.

    Args:
        x: float32, shape (n,); the last chunk may be shorter. NaN or infinity: :data:`NON_FINITE`.
    """
    peaks = _rows(x, chunk_elems).abs().amax(dim=1)
    found = torch.frexp(peaks).exponent.to(torch.int32)  # |x| < 2^exponent, and 2^(exponent - 1) is not above
    found = found.where(peaks != 0, NO_EXPONENT)
    return found.where(peaks.isfinite(), NON_FINITE)


def to_fixed(x: Tensor, common: Tensor, *, world: int, chunk_elems: int) -> Tensor:
    """The entries as integers: int32, shape (chunks, chunk_elems), zeros behind the last one.

    Args:
        common: the largest exponents of all ranks, int32, shape (chunks,). Chunks of zeros, and those that are not
            finite on some rank, become zeros.

    Raises:
        ValueError: an entry is not below 2^exponent of its chunk, or the world is none.
    """
    rows = _rows(x, chunk_elems)
    if common.shape != rows.shape[:1]:
        raise ValueError(f"exponents: expected shape {tuple(rows.shape[:1])}, got {tuple(common.shape)}")
    has_values = _has_values(common)
    rows = rows.where(has_values.unsqueeze(1), 0.0)
    # float64 holds every float32 times every such scale, and rounds nothing before the rounding that is meant.
    scaled = torch.ldexp(rows.double(), _shift(common, world).unsqueeze(1))
    largest = float(scaled.abs().max()) if scaled.numel() else 0.0
    if largest > 1 << (SUM_BITS - _world_bits(world)):
        raise ValueError(
            f"to_fixed: an entry of {largest:g} is above the exponent of its chunk: not all ranks' maximum"
        )
    return scaled.round_().to(torch.int32)


def from_fixed(total: Tensor, common: Tensor, numel: int, *, world: int, divisor: int = 1) -> Tensor:
    """The sum over ranks, divided: float32, shape (numel,), rounded once. NaN in chunks that were not finite.

    Args:
        total: the sum of the ranks' integers, int32, shape (chunks, chunk_elems). common: as for :func:`to_fixed`.
    """
    values = torch.ldexp(total.double(), -_shift(common, world).unsqueeze(1)).div_(divisor)
    values[common == NON_FINITE] = torch.nan
    return values.view(-1)[:numel].float()


def linear_checksum(blocks: Tensor, seed: int) -> int:
    """A checksum modulo 2^64 whose sum over ranks is that of the sum: each entry has a random weight.

    Ranks add theirs without the aggregator, and compare: an aggregator that does not know the weights changes a sum
    unnoticed with a probability of at most 2^-27: an error of an entry is below 2^32, so it keeps 32 bits of its
    weight, and two errors that cancel out need weights that agree in 27 bits or more.

    Args:
        blocks: int32, any shape. seed: of the weights, equal on all ranks, not known to the aggregator.
    """
    random = np.random.default_rng(seed)
    flat = blocks.detach().reshape(-1).numpy()
    # The weight of entry j of chunk c is a product of two, so that few are kept.
    within = random.integers(1 << 64, size=_CHECKSUM_ELEMS, dtype=np.uint64, endpoint=False)
    total = 0
    for start in range(0, len(flat), _CHECKSUM_ELEMS):
        part = flat[start : start + _CHECKSUM_ELEMS].astype(np.int64).view(np.uint64)
        of_chunk = int(random.integers(1 << 63, dtype=np.int64)) * 2 + 1  # odd: it loses no bit
        total += of_chunk * int((part * within[: len(part)]).sum(dtype=np.uint64))
    return total % CHECKSUM_MODULUS


def _rows(x: Tensor, chunk_elems: int) -> Tensor:
    """Shape (chunks, chunk_elems), with zeros behind the last entry."""
    if x.dtype != torch.float32 or x.dim() != 1 or chunk_elems < 1:
        raise ValueError(f"expected float32 of shape (n,) and a chunk of at least 1, got {x.dtype} {tuple(x.shape)}")
    chunks = num_chunks(x.numel(), chunk_elems)
    if x.numel() == chunks * chunk_elems:
        return x.view(chunks, chunk_elems)
    return torch.nn.functional.pad(x, (0, chunks * chunk_elems - x.numel())).view(chunks, chunk_elems)


def _has_values(common: Tensor) -> Tensor:
    return (common != NO_EXPONENT) & (common != NON_FINITE)


def _world_bits(world: int) -> int:
    if not 1 <= world <= _LARGEST_WORLD:
        raise ValueError(f"world must be 1 to {_LARGEST_WORLD}, got {world}")
    return (world - 1).bit_length()


def _shift(common: Tensor, world: int) -> Tensor:
    """The exponent of the scale; 0 for chunks without values."""
    shift: Tensor = SUM_BITS - _world_bits(world) - common
    return shift.where(_has_values(common), 0)
