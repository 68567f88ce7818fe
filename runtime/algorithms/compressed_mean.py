"""The mean of the ranks' vectors in a few bits for each entry, with error feedback; sums are taken in float32.

What rounding leaves out of a message is this rank's residual, and is added to its next vector (see
:mod:`gradbus.codecs.feedback`). Half precision is summed as such. Of codecs, up to two ranks send each other their
whole vectors, rounded once. More of them scatter and gather: rank r is sent part r of every vector, adds the parts up
in rank order, and sends the mean of its part to all, rounded a second time, with a residual of its own:
2 (N - 1) / N messages, where to send whole vectors to all takes N - 1. All ranks decode the same bytes, so the mean is
bit-equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradbus.codecs import CodecError, NonFiniteError, decode, residual_step
from gradbus.codecs.base import Codec
from gradbus.runtime.algorithms.base import Memory, Place
from gradbus.runtime.algorithms.requests import AllGather, AllReduce, Program, Swap

RESIDUAL, RESIDUAL_OF_MEAN = "residual", "residual-of-mean"
"""Kinds in the memory: what a rank's own messages have left out, and what those of its part of the mean have. The
latter goes with the place: it is to be forgotten when ranks join or leave."""


@torch.no_grad()
def half_mean(memory: Memory, key: str, vector: Tensor, dtype: torch.dtype) -> Program[Tensor]:
    """The mean of float32 vectors of shape (n,) that travel as float16 or bfloat16."""
    total = vector + memory.find_or_zeros(RESIDUAL, key, vector)
    half = total.to(dtype)
    memory.stage(RESIDUAL, key, total - half.float())
    mean = yield AllReduce(key, half, "mean")
    return mean.float()  # type: ignore[no-any-return]


@torch.no_grad()
def coded_mean(place: Place, memory: Memory, key: str, vector: Tensor, codec: Codec) -> Program[Tensor]:
    """The mean of float32 vectors of shape (n,) that travel as a codec's messages, all of one length.

    Args:
        memory: of the residuals, which are staged under ``key``.

    Returns:
        float32, shape (n,), new memory; NaN where a vector of any rank is not finite.

    Raises:
        CodecError: a rank has sent what is no message of this length.
    """
    residual = memory.find_or_zeros(RESIDUAL, key, vector)
    mean, left = yield from mean_of_coded(place, memory, key, vector, residual, codec)
    memory.stage(RESIDUAL, key, left)
    return mean


@torch.no_grad()
def mean_of_coded(
    place: Place, memory: Memory, key: str, vector: Tensor, residual: Tensor, codec: Codec, *, in_parts: bool = True
) -> Program[tuple[Tensor, Tensor]]:
    """As :func:`coded_mean`, for callers that keep this rank's residual themselves.

    Args:
        memory: of the residual of this rank's part of the mean, which is staged under ``key``.
        residual: of this rank's vector, shape (n,); not changed.
        in_parts: whether each of more than two ranks averages a part, which needs messages of one length; else all
            send whole messages to all, of any length.

    Returns:
        The mean, and the new residual.
    """
    world, rank = place.world, place.rank
    if world <= 2 or not in_parts:
        message, left = _encoded(vector, residual, codec)
        messages = yield AllGather(key, message)
        return _mean(messages, vector.numel(), codec), left
    parts, residuals = vector.tensor_split(world), residual.tensor_split(world)
    coded = [_encoded(part, old, codec) for part, old in zip(parts, residuals, strict=True)]
    residual = torch.cat([left for _, left in coded])
    own = parts[rank].numel()
    others = [peer for peer in range(world) if peer != rank]
    receive = {peer: torch.empty(1 + codec.max_bytes(own), dtype=torch.uint8) for peer in others}
    came = yield Swap(f"{key} parts", {peer: coded[peer][0] for peer in others}, receive)
    mean = _mean([coded[rank][0] if peer == rank else came[peer] for peer in range(world)], own, codec)
    message, left = _encoded(mean, memory.find_or_zeros(RESIDUAL_OF_MEAN, key, mean), codec)
    memory.stage(RESIDUAL_OF_MEAN, key, left)
    messages = yield AllGather(f"{key} means", message)
    found = [_decoded(one, part.numel(), codec) for one, part in zip(messages, parts, strict=True)]
    if any(one is None for one in found):
        return torch.full_like(vector, math.nan), residual
    return torch.cat([one for one in found if one is not None]), residual


def _encoded(vector: Tensor, residual: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """The message, uint8, and the new residual. Its first byte: whether the vector is finite; if not zeros follow."""
    try:
        payload, left = residual_step(vector, residual, codec, is_delta=True)
    except NonFiniteError:
        return torch.zeros(1 + codec.max_bytes(vector.numel()), dtype=torch.uint8), residual
    return torch.frombuffer(bytearray(b"\1" + payload), dtype=torch.uint8), left


def _decoded(message: Tensor, dim: int, codec: Codec) -> Tensor | None:
    data = memoryview(message.contiguous().numpy().data)
    if not len(data) or data[0] > 1:
        raise CodecError(f"message of {len(data)} bytes that does not begin with 0 or 1")
    return decode(data[1:], expected_dim=dim, own=(type(codec),)).vector if data[0] else None


def _mean(messages: Sequence[Tensor], dim: int, codec: Codec) -> Tensor:
    """Of what the messages hold, in rank order: the sum, times 1 / N."""
    total = torch.zeros(dim, dtype=torch.float32)
    for message in messages:
        vector = _decoded(message, dim, codec)
        if vector is None:
            return total.fill_(math.nan)
        total += vector
    return total.mul_(1 / len(messages))
