"""Error-feedback top-k: each rank sends the largest entries of gradient plus residual, and keeps the rest.

Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018 (arXiv:1809.07599), algorithm 1; Karimireddy et
al., "Error feedback fixes SignSGD", ICML 2019 (arXiv:1901.09847), algorithm 2.

    p = g + e;  c = topk(p);  e = p - c;  gradient = (1 / N) sum of c over the ranks

Differs from the papers: the residual is in units of the gradient, not of the step (p = lr * g + e there), so that any
optimizer can follow; it is not rescaled when the learning rate changes. k = max(1, ceil(n * density)) for each tensor,
ties go to the lower index. The residual is taken against what was sent, bit by bit.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.parts import (
    copy_into,
    flattened,
    mean_of,
    split_by_size,
    sum_sparse,
    take_largest,
)
from gradbus.runtime.algorithms.requests import AllGather, Program, side_by_side


class TopK(Algorithm):
    """The largest entries of each tensor of two or more dimensions, with error feedback; the others dense."""

    choice = "topk"
    own = frozenset({"residual"})

    class Options(base.Options):
        """Options of ``topk``."""

        density: float = Field(default=0.01, gt=0, le=1)
        """Share of the entries of a tensor that is sent."""
        min_numel: int = Field(default=0, ge=0)
        """Number of entries below which a tensor is sent dense."""

    options: Any

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        large, small = split_by_size(bucket.tensors, self.options.min_numel)
        yield from side_by_side(self.exchange_largest(large, step), mean_of("dense", small, step.active))

    @torch.no_grad()
    def exchange_largest(self, tensors: dict[str, Tensor], step: Step) -> Program[None]:
        """Exchange the largest entries. All tensors are one index space: one message, one coding of the indices."""
        if not tensors:
            return
        p = flattened(tensors)
        if step.active < self.place.world:  # so that the mean is over those with data, and residuals keep their weight
            p *= self.place.world / step.active
        parts = p.split_with_sizes([tensor.numel() for tensor in tensors.values()])
        for name, part in zip(tensors, parts, strict=True):
            part += self.memory.find_or_zeros("residual", name, part)
        message, p = take_largest(p, [part.numel() for part in parts], self.options.density)
        messages = yield AllGather("sparse", message)
        for name, part in zip(tensors, parts, strict=True):
            self.memory.stage("residual", name, part.clone())
        total = torch.zeros_like(p)
        sum_sparse(messages, total)
        copy_into(tensors, total.mul_(1 / self.place.world))
