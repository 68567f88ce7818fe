"""Local SGD: ranks train by themselves, and take the mean of all weights every few steps.

Stich, "Local SGD converges fast and communicates little", ICLR 2019 (arXiv:1805.09767), algorithm 1; Lin et al., "Don't
use large mini-batches, use local SGD", ICLR 2020 (arXiv:1808.07217), section 3, "post-local SGD".

    after every ``steps`` steps:  x <- mean of x over all ranks

The optimizer may be any one; its state stays with its rank. ``async-averaging`` is the same with a delay of one step.

Post-local SGD has a mean after each of the first ``dense_steps`` steps. With SGD, with momentum too, these are
synchronous steps: the step is linear in the gradients, so the mean of what the ranks make of the same weights is what
one process makes of the mean gradient. With other optimizers it is close to that.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.requests import AllReduce, Program


class LocalSGD(Algorithm):
    """The mean of all weights every few steps."""

    choice = "local-sgd"
    scope = "weights"
    equal_replicas = False

    class Options(base.Options):
        """Options of ``local-sgd``."""

        steps: int = Field(default=8, ge=1)
        """Number of local steps between two means (H)."""

    options: Any

    @property
    def _every(self) -> int:
        return int(self.options.steps)

    @property
    def interval_steps(self) -> int:
        return self._every

    def is_due(self, step: Step) -> bool:
        return self.place.world > 1 and (step.number + 1) % self._every == 0

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        if self.is_due(step):
            yield AllReduce("weights", bucket.flat, "mean", out=bucket.flat)


class PostLocalSGD(LocalSGD):
    """The mean of all weights in each of the first steps, then every few steps."""

    choice = "post-local-sgd"

    class Options(LocalSGD.Options):
        """Options of ``post-local-sgd``."""

        dense_steps: int = Field(default=500, ge=0)
        """Number of steps at the start with a mean after each."""

    @property
    def interval_steps(self) -> int:
        return 1 if self.options.dense_steps else super().interval_steps

    def is_due(self, step: Step) -> bool:
        return super().is_due(step) or (self.place.world > 1 and step.number < self.options.dense_steps)
