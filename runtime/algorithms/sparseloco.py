"""SparseLoCo: local steps, then the mean of the largest changes, in 2 bits, with error feedback.

Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", 2025 (arXiv:2508.15706), algorithm 1. theta is
what all ranks had after the last exchange, theta_k what rank k has made of it by ``steps`` local steps:

    e_k <- decay e_k + (theta - theta_k);  c_k = the 64 largest of each 4,096 of e_k, in 2 bits;  e_k <- e_k - c_k
    theta <- theta - outer_lr (sum of c_k) / (number of ranks that have sent this entry);  theta_k <- theta

There is no outer momentum: the residuals e_k have its part. A message is 116 bytes for 4,096 weights (codec ``loco``);
all ranks get those of all, (N - 1) messages where ranks are sent to one by one.

With ``clip`` what a rank has sent of a block of 4,096 is shortened to the median norm, over the ranks, of that block
(of an even number of ranks the mean of the two in the middle), so that no rank outweighs the others. Differs from the
source: there tensors are cut into blocks, here the vector of all of them is; and see :mod:`gradbus.codecs.loco`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from gradbus import codecs
from gradbus.codecs import CodecError, NonFiniteError
from gradbus.codecs.base import SparseBlock
from gradbus.codecs.loco import BLOCK
from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.anchored import ANCHOR, Anchored
from gradbus.runtime.algorithms.base import Step, TensorBucket
from gradbus.runtime.algorithms.compressed_mean import RESIDUAL
from gradbus.runtime.algorithms.requests import AllGather, Program


class SparseLoCo(Anchored):
    """Local steps, then the mean of the largest changes, in 2 bits."""

    choice = "sparseloco"
    own = frozenset({RESIDUAL})
    shared = frozenset({ANCHOR})

    class Options(base.Options):
        """Options of ``sparseloco``."""

        steps: int = Field(default=30, ge=1)
        """Number of local steps between two exchanges (H)."""
        outer_lr: float = Field(default=1.0, gt=0)
        """Learning rate of the outer step."""
        decay: float = Field(default=0.95, ge=0, le=1)
        """Share of the residual that is left after an exchange."""
        clip: bool = True
        """Whether blocks are shortened to the median norm of all ranks' ones."""

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        if not self.is_due(step):
            return
        theta = self.anchor("weights", bucket.flat)
        residual = self.memory.find_or_zeros(RESIDUAL, "weights", bucket.flat)
        try:
            payload, left = codecs.residual_step(
                theta - bucket.flat, residual * self.options.decay, codecs.get("loco"), is_delta=True
            )
        except NonFiniteError:
            payload, left = b"", residual
        message = torch.frombuffer(bytearray(b"\1" + payload), dtype=torch.uint8)
        messages = yield AllGather("changes", message)
        if any(one.numel() == 1 for one in messages):
            bucket.flat.fill_(math.nan)
            return
        sent = [_entries(one, theta.numel()) for one in messages]
        bucket.flat.copy_(theta - self.options.outer_lr * mean_of_senders(sent, theta.numel(), clip=self.options.clip))
        self.memory.stage(RESIDUAL, "weights", left)
        self.memory.stage(ANCHOR, "weights", bucket.flat.clone())


def _entries(message: Tensor, dim: int) -> SparseBlock:
    """Those of a message. Raises CodecError: it is none."""
    parsed = codecs.parse(message.contiguous().numpy().tobytes()[1:], expected_dim=dim)
    if parsed.codec != "loco":
        raise CodecError(f"a message of {parsed.codec}, expected loco")
    blocks = [block for block in parsed.blocks(max(1, dim)) if isinstance(block, SparseBlock)]
    return blocks[0] if blocks else SparseBlock(torch.empty(0, dtype=torch.int64), torch.empty(0))


def mean_of_senders(sent: Sequence[SparseBlock], dim: int, *, clip: bool) -> Tensor:
    """float32, shape (dim,): of each entry the mean over those that have sent it, 0 where nobody has.

    Args:
        sent: of each rank, added up in this order.
        clip: whether blocks of 4,096 are shortened to the median norm over the ranks.
    """
    scales = _clip_scales(sent, dim) if clip else None
    total = torch.zeros(dim, dtype=torch.float32)
    senders = torch.zeros_like(total)
    for rank, entries in enumerate(sent):
        values = entries.values
        if scales is not None:
            values = values * scales[rank][entries.indices // BLOCK]
        total[entries.indices] += values  # an index occurs once
        senders[entries.indices] += 1
    return total / senders.clamp_(min=1)


def _clip_scales(sent: Sequence[SparseBlock], dim: int) -> Tensor:
    """float32, shape (ranks, blocks), at most 1. The median is of the ranks that have sent something of a block: with
    the others' zeros a change that few ranks have, as in an embedding's rows, would be taken away altogether."""
    squares = torch.zeros(len(sent), -(-dim // BLOCK), dtype=torch.float64)
    for rank, entries in enumerate(sent):
        squares[rank].index_add_(0, entries.indices // BLOCK, entries.values.double().square())
    norms = squares.sqrt()
    median = norms.masked_fill(norms == 0, torch.nan).nanquantile(0.5, dim=0).nan_to_num(0.0)
    return (median / norms.clamp(min=torch.finfo(torch.float64).tiny)).clamp_(max=1).float()
