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

The average w is the momentum of EF21-SGDM: the optimizer that follows is SGD without one. With momentum in both, and
few entries sent, G comes too late for training to get anywhere.

Differs from the papers: with fewer active ranks than the world, gradients count world / active times. G is a sum of
rounded differences, so where all entries are sent it is the mean of gradients but for roundings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.parts import flattened, mean_of, split_by_size, sum_sparse, take_largest
from gradbus.runtime.algorithms.requests import AllGather, AllReduce, Program, side_by_side
from gradbus.runtime.errors import ConfigError


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

    def check(self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        super().check(parameters, optimizer)
        if self.options.eta < 1 and any(group.get("momentum") for group in optimizer.param_groups):
            raise ConfigError(
                f"ef21 with eta < 1 has a momentum of its own: it needs an optimizer without one, got "
                f"{type(optimizer).__name__} with momentum"
            )

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        large, small = split_by_size(bucket.tensors, self.options.min_numel)
        # The mean is shared, so that all ranks ask for the same.
        whole = {name: tensor for name, tensor in large.items() if self.memory.find("mean", name) is None}
        later = {name: tensor for name, tensor in large.items() if name not in whole}
        yield from side_by_side(
            self._first(whole, step), self._differences(later, step), mean_of("dense", small, step.active)
        )

    @torch.no_grad()
    def _first(self, tensors: dict[str, Tensor], step: Step) -> Program[None]:
        if not tensors:
            return
        averages = self._averages(tensors, step)
        mean = yield AllReduce("first", flattened(averages), "mean")
        self._stage(tensors, averages, averages, mean)

    @torch.no_grad()
    def _differences(self, tensors: dict[str, Tensor], step: Step) -> Program[None]:
        """All tensors are one index space: one message."""
        if not tensors:
            return
        averages = self._averages(tensors, step)
        known = {name: self._known(name) for name in tensors}
        sizes = [average.numel() for average in averages.values()]
        difference = flattened(averages).sub_(flattened(known))
        message, rest = take_largest(difference.clone(), sizes, self.options.density)
        messages = yield AllGather("sparse", message)
        sent = difference.sub_(rest).split_with_sizes(sizes)  # what the others decode, bit by bit
        known = {name: one + part for (name, one), part in zip(known.items(), sent, strict=True)}
        change = torch.zeros_like(rest)
        sum_sparse(messages, change)
        means = {name: self.memory.find_or_zeros("mean", name, one) for name, one in known.items()}
        self._stage(tensors, averages, known, change.mul_(1 / self.place.world).add_(flattened(means)))

    def _averages(self, tensors: dict[str, Tensor], step: Step) -> dict[str, Tensor]:
        """w of each tensor: float32, shape (n,)."""
        found = {}
        for name, tensor in tensors.items():
            gradient = tensor.reshape(-1) * (self.place.world / step.active)
            before = self.memory.find("momentum", name)
            if before is not None and before.shape == gradient.shape:
                gradient = before * (1 - self.options.eta) + gradient * self.options.eta
            found[name] = gradient
        return found

    def _known(self, name: str) -> Tensor:
        known = self.memory.find("known", name)
        if known is None:
            raise RuntimeError(f"ef21: a mean of {name!r} without what this rank has sent of it: join by regroup()")
        return known

    def _stage(
        self, tensors: dict[str, Tensor], averages: dict[str, Tensor], known: dict[str, Tensor], mean: Tensor
    ) -> None:
        parts = mean.split_with_sizes([tensor.numel() for tensor in tensors.values()])
        for (name, tensor), part in zip(tensors.items(), parts, strict=True):
            self.memory.stage("known", name, known[name])
            self.memory.stage("momentum", name, averages[name])
            self.memory.stage("mean", name, part.clone())  # of its own: a view would keep and save all of them
            tensor.copy_(part.view(tensor.shape))
