"""The baseline that compressed training was first compared with: int8, one scale per tensor, sent to everybody.

Its arithmetic is that of ``q8`` with a whole tensor as the chunk: ``scale = max(abs(x)) / 127``, and ``x / scale`` is
rounded half to even. Every rank takes the mean of the decoded gradients of all ranks, its own included, in rank order;
what rounding loses is forgotten. All tensors of a step travel in one message, where the original sent one for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradbus.codecs.base import are_finite
from gradbus.codecs.quantize import quantize
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.requests import AllGather, Program
from gradbus.runtime.errors import CollectiveError


class Int8(Algorithm):
    """The mean of quantized gradients, when all are there.

    A message is the scales, float32, one for each parameter, and then all values, int8, in the order of the model. With
    NaN or infinity in a gradient all scales are NaN, and all ranks skip the step.
    """

    choice = "int8"
    scope = "step"

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        """Raises CollectiveError: a rank's message has another length."""
        gradients = list(bucket.tensors.values())
        sizes = [gradient.numel() for gradient in gradients]
        messages = yield AllGather("int8", encoded(gradients))
        mean = torch.zeros(sum(sizes))
        skipped_by = []
        for rank, message in enumerate(messages):
            if len(message) != 4 * len(sizes) + sum(sizes):
                raise CollectiveError(
                    f"step {step.number}: int8 message of rank {rank}: expected {4 * len(sizes) + sum(sizes)} bytes, "
                    f"got {len(message)}"
                )
            payload = message.numpy()
            scales = payload[: 4 * len(sizes)].view("<f4")
            if not np.isfinite(scales).all():
                skipped_by.append(rank)
                continue
            values = torch.from_numpy(payload[4 * len(sizes) :].view(np.int8).astype(np.float32))
            for part, of_sum, scale in zip(torch.split(values, sizes), torch.split(mean, sizes), scales, strict=True):
                of_sum.add_(part, alpha=float(scale))
        self.not_finite = tuple(skipped_by)
        mean.mul_(math.nan if skipped_by else 1.0 / step.active)
        for gradient, part in zip(gradients, torch.split(mean, sizes), strict=True):
            gradient.copy_(part.view_as(gradient))


def encoded(gradients: Sequence[Tensor]) -> Tensor:
    """The message of one rank: uint8, shape (bytes,)."""
    sizes = [gradient.numel() for gradient in gradients]
    scales = np.full(len(sizes), np.nan, dtype="<f4")
    values = np.zeros(sum(sizes), dtype=np.int8)
    if are_finite(gradients):
        starts = np.cumsum([0, *sizes])
        for index, (gradient, size) in enumerate(zip(gradients, sizes, strict=True)):
            q, scale = quantize(gradient.detach().reshape(-1).contiguous(), max(1, size))
            scales[index] = scale.item() if size else 1.0
            values[starts[index] : starts[index + 1]] = q.numpy()
    return torch.from_numpy(np.concatenate([scales.view(np.uint8), values.view(np.uint8)]))
