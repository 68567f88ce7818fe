"""Error feedback around any codec: what a message leaves out is the residual, and is added to the next vector.

Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD",
ICML 2019 (arXiv:1901.09847). The state is one vector, kept and saved by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradbus.codecs.base import Codec, DenseBlock
from gradbus.codecs.errors import CodecError
from gradbus.codecs.registry import parse


@torch.no_grad()
def residual_step(
    vector: Tensor, residual: Tensor | None, codec: Codec, *, is_delta: bool | None = None
) -> tuple[bytes, Tensor]:
    """Encode ``vector`` plus the residual. Returns the message and the new residual.

    That is taken against the *decoded own message*, so that rounding to int8 is fed back as well. For values sent in
    float32 the sum ``sent + residual`` equals the input exactly: each element is in one of the two.

    Args:
        vector: float32, shape (D,).
        residual: as returned by the last step, or None at the start; not changed.
        is_delta: handed to ``codec.encode``.

    Raises:
        NonFiniteError: NaN or infinity in the sum; the residual given is then still the valid one.
        ValueError: shapes differ.
    """
    if residual is not None and residual.shape != vector.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}, expected that of vector {tuple(vector.shape)}")
    p = vector.detach().to(torch.float32, copy=True)
    if residual is not None:
        p += residual
    payload = codec.encode(p, is_delta=is_delta)
    if codec.lossless:
        return payload, p.zero_()
    for block in parse(payload, expected_dim=p.numel(), own=(type(codec),)).blocks():
        values = block.values.to(p.device)
        if isinstance(block, DenseBlock):
            p[block.start : block.start + values.numel()] -= values
        else:
            p[block.indices.to(p.device)] -= values  # each index occurs once
    return payload, p


@torch.no_grad()
def add_into(vector: Tensor, payload: Any, own: Sequence[type[Codec]] = ()) -> None:
    """``vector += decode(payload)``, block by block; the same operations on every node, so that copies stay bit-equal.

    ``own``: as of :func:`gradbus.codecs.parse`.

    Raises:
        CodecError: bad bytes; the vector is as it was.
    """
    parsed = parse(payload, expected_dim=vector.numel(), own=own)
    if not parsed.is_delta:
        raise CodecError(f"a difference is expected, this {parsed.codec} message holds weights")
    for block in parsed.blocks(30 * 1024):
        if isinstance(block, DenseBlock):
            vector[block.start : block.start + block.values.numel()] += block.values
        else:
            vector[block.indices] += block.values
