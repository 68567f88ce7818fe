"""Small integers with one float32 scale per chunk: the arithmetic that ``q8``, ``sq8`` and ``q4`` share.

``scale = max|x| / q_max`` over the chunk, ``q = round_half_even(x / scale)``, ``x_hat = q * scale``; ``q_max`` is 127
for 8 bits, 7 for 4 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from gradbus.codecs.base import DenseBlock, check_finite, tensor_view
from gradbus.codecs.errors import CodecError, NonFiniteError

Q_MAX = 127

_FLT_MAX = torch.tensor(torch.finfo(torch.float32).max, dtype=torch.float32)
# Below the smallest normal number a scale has too few bits to keep the error within scale / 2.
MIN_SCALE = torch.finfo(torch.float32).tiny

_CPU_BLOCK_ELEMS = 1 << 18  # 1 MiB of float32: the temporaries of a block stay in the cache


@functools.cache  # some microseconds, which short tensors notice
def max_scale(q_max: int) -> float:
    """The largest scale: q_max * scale must not overflow. float32(FLT_MAX / 127) * 127 is infinite, its lower neighbour
    is not."""
    return float(torch.nextafter(_FLT_MAX / q_max, torch.tensor(0.0, dtype=torch.float32)))


def check_chunk_elems(chunk_elems: int) -> None:
    """The option of both codecs; version 1 of sq8 keeps it in an int32."""
    if not isinstance(chunk_elems, int) or not 1 <= chunk_elems < 2**31:
        raise ValueError(f"chunk_elems must be a whole number, 1 .. 2**31 - 1, got {chunk_elems!r}")


def num_chunks(num_elems: int, chunk_elems: int) -> int:
    """Chunks, and so scales, for ``num_elems`` values; the last one may be shorter."""
    return -(-num_elems // chunk_elems)


def quantize(x: Tensor, chunk_elems: int, q_max: int = Q_MAX) -> tuple[Tensor, Tensor]:
    """``x`` as int8 with one scale per chunk, computed on the device of ``x``.

    Args:
        x: float32, shape (n,), contiguous.

    Returns:
        q: int8, shape (n,), within [-q_max, q_max].
        scales: float32, shape (ceil(n / chunk_elems),), positive; 1.0 for a chunk of zeros.

    Raises:
        NonFiniteError: NaN or infinity in ``x``.
    """
    q = torch.empty(x.numel(), dtype=torch.int8, device=x.device)
    scales = torch.empty(num_chunks(x.numel(), chunk_elems), dtype=torch.float32, device=x.device)
    most = max_scale(q_max)
    block_elems = _CPU_BLOCK_ELEMS if x.device.type == "cpu" else x.numel()
    for elems, chunks in chunk_spans(x.numel(), chunk_elems, block_elems):
        rows = x[elems].view(chunks.stop - chunks.start, -1)
        peak = rows.abs().amax(dim=1)
        scale = (peak / q_max).clamp_(MIN_SCALE, most).where(peak != 0, 1.0)
        scales[chunks] = torch.where(peak.isfinite(), scale, peak)  # a chunk with NaN or infinity keeps its mark
        q[elems] = (rows / scale.unsqueeze(1)).round_().clamp_(-q_max, q_max).view(-1)
    if not scales.isfinite().all():
        check_finite(x, "vector")  # says which element
    return q, scales


def dequantized_blocks(q: Tensor, scales: Tensor, chunk_elems: int, block_elems: int) -> Iterator[DenseBlock]:
    """``x_hat`` in blocks of at most ``block_elems`` values; a sender's choice of a huge chunk does not change that."""
    for elems, chunks in chunk_spans(q.numel(), chunk_elems, block_elems):
        num_rows = chunks.stop - chunks.start
        step = block_elems if num_rows == 1 else elems.stop - elems.start
        for start in range(elems.start, elems.stop, step):
            rows = q[start : min(start + step, elems.stop)].view(num_rows, -1).to(torch.float32)
            yield DenseBlock(start, rows.mul_(scales[chunks].unsqueeze(1)).view(-1))


def quantized_views(view: memoryview, offset: int, count: int, chunk_elems: int, name: str) -> tuple[Tensor, Tensor]:
    """q and scales of ``count`` values: the scales begin at ``offset``, q follows. Checked, not copied.

    The caller has checked that the bytes are there. Raises as :func:`check_quantized`.
    """
    chunks = num_chunks(count, chunk_elems)
    scales = tensor_view(view, torch.float32, offset, chunks)
    q = tensor_view(view, torch.int8, offset + 4 * chunks, count)
    check_quantized(q, scales, name)
    return q, scales


def check_quantized(q: Tensor, scales: Tensor, name: str, q_max: int = Q_MAX) -> None:
    """Check that bytes of a peer are as :func:`quantize` makes them.

    Raises:
        NonFiniteError: a scale that is, or leads to, NaN or infinity.
        CodecError: a scale <= 0, or the unused code below -q_max.
    """
    if not q.numel():
        return
    check_finite(scales, f"{name} scales")
    low, high = (float(bound) for bound in torch.aminmax(scales))
    if high > max_scale(q_max):
        raise NonFiniteError(f"non-finite {name} values: scale {high:.9g} times {q_max} overflows float32")
    if low <= 0:
        raise CodecError(f"{name} scales: expected > 0, got {low:.9g} at chunk {int(scales.argmin())}")
    if int(q.min()) < -q_max:
        raise CodecError(f"{name} values: expected {-q_max} .. {q_max}, got {int(q.min())} at entry {int(q.argmin())}")


def chunk_spans(num_elems: int, chunk_elems: int, block_elems: int) -> Iterator[tuple[slice, slice]]:
    """Element and chunk ranges that cover everything in order; in each range all chunks have the same length."""
    step = max(1, block_elems // chunk_elems)
    full = num_elems // chunk_elems
    for first in range(0, full, step):
        last = min(first + step, full)
        yield slice(first * chunk_elems, last * chunk_elems), slice(first, last)
    if full * chunk_elems < num_elems:
        yield slice(full * chunk_elems, num_elems), slice(full, full + 1)
