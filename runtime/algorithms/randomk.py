"""Error-feedback random-k: all ranks send the same entries, chosen from a seed, so that no index travels.

Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018 (arXiv:1809.07599), algorithm 1 with rand_k.

Differs from the paper: all ranks draw the same entries, so that they can be reduced, one from each of k equal parts
of a tensor, all turned by another drawn number: k + 1 numbers in place of a permutation of all entries. An entry is
as likely as with rand_k, k / n, on which the theory rests; neighbours are seldom sent together. The values are not
scaled by n / k, which error feedback makes up for. The mean delay of an entry is 1 / density steps: at a density of 1
% the learning rate and the momentum of dense training are too large.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from gradbus.codecs.base import are_finite
from gradbus.codecs.sparse import random_k
from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.parts import entries_of, mean_of, split_by_size
from gradbus.runtime.algorithms.requests import AllReduce, Program, side_by_side


class RandomK(Algorithm):
    """Entries from a shared seed, with error feedback, for each tensor of two or more dimensions; the others dense."""

    choice = "randomk"
    own = frozenset({"residual"})

    class Options(base.Options):
        """Options of ``randomk``."""

        density: float = Field(default=0.1, gt=0, le=1)
        """Share of the entries of a tensor that is sent."""
        min_numel: int = Field(default=0, ge=0)
        """Number of entries below which a tensor is sent dense."""
        seed: int = Field(default=0, ge=0)
        """Seed of the choice, with the name of the tensor and the number of the step."""

    options: Any

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        large, small = split_by_size(bucket.tensors, self.options.min_numel)
        yield from side_by_side(self._chosen(large, step), mean_of("dense", small, step.active))

    @torch.no_grad()
    def _chosen(self, tensors: dict[str, Tensor], step: Step) -> Program[None]:
        if not tensors:
            return
        sums = {name: self._with_residual(name, tensor, step) for name, tensor in tensors.items()}
        indices = {name: self.chosen(name, p.numel(), step.number) for name, p in sums.items()}
        values = torch.cat([p[indices[name]] for name, p in sums.items()])
        if not are_finite(list(sums.values())):  # the entry may be one that is not sent
            values.fill_(torch.nan)
        mean = yield AllReduce("values", values, "mean")
        parts = mean.split_with_sizes([index.numel() for index in indices.values()])
        for (name, tensor), part in zip(tensors.items(), parts, strict=True):
            sums[name][indices[name]] = 0
            self.memory.stage("residual", name, sums[name])
            flat = torch.zeros(tensor.numel(), dtype=torch.float32)
            flat[indices[name]] = part
            tensor.copy_(flat.view(tensor.shape))

    def _with_residual(self, name: str, tensor: Tensor, step: Step) -> Tensor:
        p = tensor.reshape(-1) * (self.place.world / step.active)
        return p + self.memory.find_or_zeros("residual", name, p)

    def chosen(self, name: str, numel: int, step: int) -> Tensor:
        """The entries of a tensor that a step sends, ascending: int64, shape (k,), equal on all ranks."""
        seed = f"{self.options.seed} {step} {name}".encode()
        return random_k(numel, entries_of(self.options.density, numel), seed)
