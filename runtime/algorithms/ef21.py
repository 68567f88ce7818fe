"""EF21 and EF21-SGDM: each rank sends the compressed difference to what the others know of its gradient.

Richtarik, Sokolov and Fatkhullin, "EF21: a new, simpler, theoretically better, and practically faster error feedback",
NeurIPS 2021 (arXiv:2106.05203), algorithm 2; Fatkhullin, Tyurin and Richtarik, "Momentum provably improves error
feedback!", NeurIPS 2023 (arXiv:2305.15155), algorithm 1 (EF21-SGDM).

    w = (1 - eta) w + eta g                 # eta = 1: EF21
    c = topk(w - g_i);  g_i += c;  G += (1 / N) sum of c over the ranks;  gradient = G

There is no accumulator of errors: ``topk`` has one, and is another method. The step is taken with the dense G, although
only k entries travel. Two vectors are kept: g_i, this rank's, and G, equal on all ranks. The first step sends the whole
gradient, as the authors' code for deep networks does, so that G is its mean. So does the first step after a rank has
joined or left: what the others know of a rank would not fit to what it knows, and G would be off for ever.

Differs from the papers: with fewer active ranks than the world, gradients count world / active times.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.parts import mean_of, split_by_size, sum_sparse, take_largest
from gradbus.runtime.algorithms.requests import AllGather, AllReduce, Program, side_by_side


class EF21(Algorithm):
    """Compressed differences of gradients; ``eta`` below 1 is EF21-SGDM."""

    choice = "ef21"
    own = frozenset({"known", "momentum"})
    shared = frozenset({"mean"})
    relative = frozenset({"known", "mean"})

    class Options(base.Options):
        """Options of ``ef21``."""

        density: float = Field(default=0.01, gt=0, le=1)
        """Share of the entries of a tensor that is sent."""
        eta: float = Field(default=1.0, gt=0, le=1)
        """Weight of the newest gradient in the average that is sent. 1: EF21; less: EF21-SGDM."""
        min_numel: int = Field(default=0, ge=0)
        """Number of entries below which a tensor is sent dense."""

    options: Any

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        large, small = split_by_size(bucket.tensors, self.options.min_numel)
        programs = [self._differences(name, tensor, step) for name, tensor in large.items()]
        yield from side_by_side(*programs, mean_of("dense", small, step.active))

    @torch.no_grad()
    def _differences(self, name: str, tensor: Tensor, step: Step) -> Program[None]:
        average = tensor.reshape(-1) * (self.place.world / step.active)
        before = self.memory.find("momentum", name)
        if before is not None and before.shape == average.shape:
            average = before * (1 - self.options.eta) + average * self.options.eta
        known, mean = self.memory.find("known", name), self.memory.find("mean", name)
        if mean is None:  # shared, so that all ranks ask for the same
            mean = yield AllReduce(f"first/{name}", average, "mean")
            known = average
        elif known is None:
            raise RuntimeError(f"ef21: a mean of {name!r} without what this rank has sent of it: join by regroup()")
        else:
            difference = average - known
            message, rest = take_largest(difference.clone(), [difference.numel()], self.options.density)
            messages = yield AllGather(f"sparse/{name}", message)
            known = known + (difference - rest)  # what the others decode, bit by bit
            change = torch.zeros_like(mean)
            sum_sparse(messages, change)
            mean = mean + change.mul_(1 / self.place.world)
        self.memory.stage("known", name, known)
        self.memory.stage("momentum", name, average)
        self.memory.stage("mean", name, mean)
        tensor.copy_(mean.view(tensor.shape))
