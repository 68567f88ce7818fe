"""Whole gradients: the mean over all ranks, in float32 or in half precision on the wire."""

from __future__ import annotations

from typing import Any, Literal

import torch

from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.requests import AllReduce, Program

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Dense(Algorithm):
    """The mean of whole gradients.

    With ``wire`` fp16 or bf16 each rank's gradient is rounded once, the sum is taken in float32 and rounded once: half
    of the bytes, and an error of at most two roundings. A value beyond 65,504 becomes infinite in fp16, so that all
    ranks skip the step.
    """

    choice = "dense"

    class Options(base.Options):
        """Options of ``dense``."""

        wire: Literal["fp32", "fp16", "bf16"] = "fp32"
        """Format of the values on the wire."""

    options: Any

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        flat = bucket.flat
        dtype = _DTYPES[self.options.wire]
        if dtype is torch.float32:
            yield AllReduce("mean", flat, "mean", out=flat, divisor=step.active)
            return
        half = flat.to(dtype)
        yield AllReduce("mean", half, "mean", out=half, divisor=step.active)
        flat.copy_(half)
