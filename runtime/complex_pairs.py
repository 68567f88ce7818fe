"""Complex tensors as pairs of floats, real part first: how they are averaged, and how files have them.

The dtype of the pairs is that of the parts: float32 of complex64, float64 of complex128, float16 of complex32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def is_inexact(dtype: torch.dtype) -> bool:
    """Return whether numbers of this dtype can be averaged: floats, and pairs of them."""
    return dtype.is_floating_point or dtype.is_complex


def as_pairs(tensor: Tensor) -> Tensor:
    """Return a complex tensor of shape S as floats of shape (*S, 2), a view where that is possible; any other tensor as
    it is."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def from_pairs(values: Tensor, like: Tensor) -> Tensor:
    """Return float values, as many as ``like`` has, in its shape; of a complex one their pairs as complex numbers. The
    dtype is that of the values, so a copy into ``like`` converts them."""
    if not like.is_complex():
        return values.view(like.shape)
    return torch.view_as_complex(values.clone().view(*like.shape, 2))  # a view must begin at an even place


def restored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what :func:`as_pairs` made of a tensor of this dtype as such a tensor again."""
    return torch.view_as_complex(values.clone()) if dtype.is_complex else values


def shape_in_floats(dtype: torch.dtype, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a tensor's floats, as :func:`as_pairs` gives them."""
    return (*shape, 2) if dtype.is_complex else tuple(shape)


def count_floats(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return how many floats a tensor has: two for each complex number."""
    return math.prod(shape_in_floats(dtype, shape))
