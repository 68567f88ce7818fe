"""Choosing k entries of a vector, the largest or any, the same ones on every machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradbus.codecs.base import check_finite
from gradbus.codecs.seeded_stream import SeededStream

_MAGNITUDE_BITS = 0x7FFF_FFFF  # all of a float32 but its sign
_INFINITY_BITS = 0x7F80_0000  # NaNs lie above


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """``values[j]`` at ``indices[j]``, 0 elsewhere.

    dim: D, the length of the dense vector. indices: int64, shape (k,), strictly ascending, in [0, D).
    values: float32, shape (k,).
    """

    dim: int
    indices: Tensor
    values: Tensor

    def to_dense(self) -> Tensor:
        """float32, shape (D,)."""
        dense = torch.zeros(self.dim, dtype=self.values.dtype, device=self.values.device)
        dense[self.indices] = self.values
        return dense

    def without_zeros(self) -> SparseVector:
        """Return the same vector with only its entries other than 0."""
        keep = self.values != 0
        if keep.all():
            return self
        return SparseVector(self.dim, self.indices[keep], self.values[keep])


def top_k(x: Tensor, k: int) -> SparseVector:
    """Exactly the ``k`` entries of largest ``|x|``; among equal ones those of lower index.

    The result depends on the values alone; ``torch.topk`` leaves open which of several equal entries it takes, so that
    it may differ between devices and versions. The comparison is of bit patterns: with the sign cleared, a float32
    sorts like its int32 bits, and integers partition several times as fast as floats.

    Args:
        x: float32, shape (D,), any device.
        k: 0 .. D.

    Raises:
        NonFiniteError: NaN or infinity in ``x`` (a NaN is larger than everything, so it would be chosen first).
        ValueError: ``k`` outside 0 .. D, or ``x`` not a float32 vector.
    """
    if x.dim() != 1 or x.dtype != torch.float32:
        raise ValueError(f"x must be float32 of shape (D,), got {x.dtype} of shape {tuple(x.shape)}")
    if not 0 <= k <= x.numel():
        raise ValueError(f"k must be 0 .. {x.numel()}, got {k}")
    x = x.detach().contiguous()
    magnitude = x.view(torch.int32) & _MAGNITUDE_BITS
    if x.numel() and int(magnitude.max()) >= _INFINITY_BITS:
        check_finite(x, "vector")
    if k == x.numel():
        indices = torch.arange(k, device=x.device)
    elif k == 0:
        indices = torch.empty(0, dtype=torch.int64, device=x.device)
    elif x.device.type == "cpu":
        indices = torch.from_numpy(largest_by_numpy(magnitude.numpy(), k))
    else:
        indices = largest_by_torch(magnitude, k)
    return SparseVector(x.numel(), indices, x[indices])


def largest_by_numpy(magnitude: NDArray[np.int32], k: int) -> NDArray[np.int64]:
    """Indices, ascending; 0 < k < D. numpy's vectorised partition is far ahead of ``torch.topk`` on a CPU."""
    border = magnitude.size - k
    threshold = np.partition(magnitude, border)[border]
    indices: NDArray[np.int64] = np.flatnonzero(magnitude >= threshold)
    if indices.size > k:  # ties at the threshold: leave out the last ones
        tied = np.flatnonzero(magnitude[indices] == threshold)
        indices = np.delete(indices, tied[k - indices.size :])
    return indices


def largest_by_torch(magnitude: Tensor, k: int) -> Tensor:
    """The same where the vector lies. Only the threshold is taken from ``torch.topk``: which ties it picks is open."""
    threshold = torch.topk(magnitude, k, sorted=False).values.min()
    indices = torch.nonzero(magnitude >= threshold).squeeze(1)
    if indices.numel() > k:
        tied = torch.nonzero(magnitude[indices] == threshold).squeeze(1)
        keep = torch.ones(indices.numel(), dtype=torch.bool, device=magnitude.device)
        keep[tied[k - indices.numel() :]] = False
        indices = indices[keep]
    return indices


def random_k(numel: int, k: int, seed: bytes) -> Tensor:
    """Entries that a seed chooses: int64, shape (k,), strictly ascending, in [0, numel).

    One from each of k equal parts, all turned by another drawn number: k + 1 numbers in place of a permutation of all
    entries. An entry is as likely as with a permutation, k / numel; neighbours are seldom chosen together.

    Args:
        numel: of the vector. k: 0 .. numel. seed: any bytes; equal ones choose the same entries.

    Raises:
        ValueError: ``k`` outside 0 .. numel.
    """
    if not 0 <= k <= numel:
        raise ValueError(f"k must be 0 .. {numel}, got {k}")
    if not k:
        return torch.empty(0, dtype=torch.int64)
    words, at, (width, longer) = SeededStream(seed).words(k + 1), np.arange(k), divmod(numel, k)
    widths = width + (at < longer)
    drawn = (words[:k] >> np.uint64(11)) * 2.0**-53 * widths  # which rounding may bring to the width itself
    entries = at * width + np.minimum(at, longer) + np.minimum(drawn.astype(np.int64), widths - 1)
    turn = int(words[k]) % numel  # else those of shorter parts are chosen more often
    beyond = int(np.searchsorted(entries, numel - turn))  # from here on they come round to the front
    return torch.from_numpy(np.concatenate((entries[beyond:] + (turn - numel), entries[:beyond] + turn)))
