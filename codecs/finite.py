"""Whether tensors hold NaN or infinity, found at the price of a sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all entries of all tensors are finite. The answer is exact, so equal bits give equal answers everywhere.

    A finite sum proves it, at one read per entry and one wait for the device per call. Only where a sum is not finite,
    which it may be although all entries are, are the entries looked at one by one.

    Args:
        tensors: of floating point, any shapes, dtypes and devices; there may be none.
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return True
    device = tensors[0].device
    sums = torch.stack([tensor.sum().to(device, torch.float32) for tensor in tensors])
    return bool(sums.isfinite().all()) or all(bool(tensor.isfinite().all()) for tensor in tensors)
