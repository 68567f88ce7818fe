"""uint8 between the smallest and the largest value of each chunk: 1 byte per value and 8 per chunk.

The quantization of ByteGrad in Gan et al., "BAGUA: scaling up distributed learning with system relaxations"
(arXiv:2107.01499): ``step = (max - min) / 255``, ``q = round_half_even((x - min) / step)``, ``x_hat = min + q * step``.
The authors' implementation rounds ``x / step``, and loses the bits of a chunk whose values lie close together far from
0; this rounds the distance from the minimum.

Against int8 by the largest magnitude (:mod:`gradbus.codecs.quantize`) a chunk with values of one sign has half the
error. A chunk with NaN or infinity is sent as NaN, so that receivers can skip the step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradbus.codecs.quantize import check_chunk_elems, chunk_spans, num_chunks

LEVELS = 255  # steps between the 256 values of a byte

# Below the smallest normal number a step has too few bits. A chunk that lies so close together is its minimum.
_MIN_STEP = torch.finfo(torch.float32).tiny


class MinMax(NamedTuple):
    """lows, steps: float32, shape (ceil(n / chunk_elems),), NaN where a chunk is not finite. q: uint8, shape (n,)."""

    lows: Tensor
    steps: Tensor
    q: Tensor


def min_max_bytes(num_elems: int, chunk_elems: int) -> int:
    """Bytes of the three parts together."""
    return 8 * num_chunks(num_elems, chunk_elems) + num_elems


@torch.no_grad()
def quantize_min_max(x: Tensor, chunk_elems: int) -> MinMax:
    """``x`` as bytes; each value comes back within half a step, give or take the rounding of float32.

    A chunk whose spread overflows float32 counts as not finite.

    Args:
        x: float32, shape (n,), contiguous, any device.
    """
    check_chunk_elems(chunk_elems)
    if x.dim() != 1 or x.dtype != torch.float32:
        raise ValueError(f"x must be float32 of shape (n,), got {x.dtype} of shape {tuple(x.shape)}")
    chunks = num_chunks(x.numel(), chunk_elems)
    lows, steps = (torch.empty(chunks, dtype=torch.float32, device=x.device) for _ in range(2))
    q = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    for elems, of_chunks in chunk_spans(x.numel(), chunk_elems, x.numel()):
        rows = x[elems].view(of_chunks.stop - of_chunks.start, -1)
        low, high = rows.amin(1), rows.amax(1)  # on a CPU 20 times as fast as torch.aminmax
        spread = high - low
        step = spread / LEVELS
        step = step.where(step >= _MIN_STEP, 0.0).where(spread.isfinite(), torch.nan)
        lows[of_chunks], steps[of_chunks] = low.where(spread.isfinite(), torch.nan), step
        levels = (rows - low.unsqueeze(1)).div_(step.where(step != 0, 1.0).unsqueeze(1)).round_().clamp_(0, LEVELS)
        q[elems] = levels.nan_to_num_(0.0).view(-1).to(torch.uint8)
    return MinMax(lows, steps, q)


@torch.no_grad()
def dequantize_min_max(message: MinMax, chunk_elems: int) -> Tensor:
    """float32, shape (n,). Any bytes give a result; it may hold NaN or infinity.

    A multiplication and an addition, never fused: all processors get the same bits.

    Raises:
        ValueError: not one low and one step per chunk.
    """
    lows, steps, q = message
    expected = (num_chunks(q.numel(), chunk_elems),)
    if lows.shape != expected or steps.shape != expected:
        raise ValueError(f"lows and steps must have shape {expected}, got {tuple(lows.shape)} and {tuple(steps.shape)}")
    x = q.to(torch.float32)
    for elems, of_chunks in chunk_spans(q.numel(), chunk_elems, q.numel()):
        rows = x[elems].view(of_chunks.stop - of_chunks.start, -1)
        rows.mul_(steps[of_chunks].unsqueeze(1)).add_(lows[of_chunks].unsqueeze(1))
    return x
