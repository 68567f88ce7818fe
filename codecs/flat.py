"""A model's tensors as one vector and back: the form in which every codec takes them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def flat_size(tensors: Iterable[Tensor]) -> int:
    """Elements of all ``tensors`` together: the D of the vector."""
    return sum(tensor.numel() for tensor in tensors)


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Copy ``tensors``, row-major and in the order given, into one new vector.

    Returns:
        float32, shape (D,), on the device of the first tensor (CPU if there is none).

    Raises:
        ValueError: a tensor that is not of floating point: float32 would corrupt large integers without a word.
    """
    parts = [tensor.detach() for tensor in tensors]
    flat = torch.empty(flat_size(parts), dtype=torch.float32, device=parts[0].device if parts else None)
    start = 0
    for position, part in enumerate(parts):
        _check_float(part, position)
        flat[start : start + part.numel()].view(part.shape).copy_(part)
        start += part.numel()
    return flat


@torch.no_grad()
def unflatten_into(flat: Tensor, tensors: Iterable[Tensor]) -> None:
    """Copy ``flat``, shape (D,), into ``tensors``: the inverse of :func:`flatten`. In place, each keeps its storage.

    Raises:
        ValueError: the sizes do not add up to D (then nothing has been written), or a tensor is not of floating point.
    """
    parts = list(tensors)
    if flat.dim() != 1 or flat.numel() != flat_size(parts):
        raise ValueError(f"flat must have shape ({flat_size(parts)},) for these tensors, got {tuple(flat.shape)}")
    for position, part in enumerate(parts):
        _check_float(part, position)
    start = 0
    for part in parts:
        part.copy_(flat[start : start + part.numel()].view(part.shape))
        start += part.numel()


def _check_float(tensor: Tensor, position: int) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"tensor {position} must be of floating point, got {tensor.dtype}")
