"""NoLoCo: DiLoCo without a mean over all ranks; after their local steps random pairs exchange what they have changed.

Kolehmainen et al., "NoLoCo: no-all-reduce low communication training method for large models", 2025
(arXiv:2506.10911), section 3. phi_i is what rank i had after its last outer step, theta_i what it has made of it by
``steps`` local steps. In each exchange all ranks are paired anew, at random; with its partner j

    Delta = (phi_i - theta_i + phi_j - theta_j) / 2
    d_i <- outer_momentum d_i - outer_lr Delta - consensus (phi_i - (phi_i + phi_j) / 2);  phi_i <- phi_i + d_i

and theta_i goes on from phi_i. A rank that is left over, where their number is odd, does the same with itself alone.
A message is two models, to one rank, whatever the number of ranks is. ``consensus``, gamma in the paper, holds the
ranks together, and must lie between the momentum and the root of 2 plus its square; 1 starts both from their mean.

Pairs follow from ``seed`` and the number of the exchange alone. Replicas differ: the model of a run is their mean.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.anchored import ANCHOR, MOMENTUM, Anchored
from gradbus.runtime.algorithms.base import Step, TensorBucket
from gradbus.runtime.algorithms.requests import Program, Swap


class NoLoCo(Anchored):
    """Local steps, then an outer step with one other rank, drawn at random."""

    choice = "noloco"
    own = frozenset({ANCHOR, MOMENTUM})

    class Options(base.Options):
        """Options of ``noloco``."""

        steps: int = Field(default=50, ge=1)
        """Number of local steps between two exchanges."""
        outer_lr: float = Field(default=0.7, gt=0)
        """Learning rate of the outer step (beta in the paper)."""
        outer_momentum: float = Field(default=0.3, ge=0, lt=1)
        """Momentum of the outer step (alpha in the paper)."""
        consensus: float = Field(default=1.0, gt=0)
        """How strongly a pair is drawn together (gamma in the paper)."""
        seed: int = Field(default=0, ge=0, lt=1 << 31)
        """Of the pairs, equal on all ranks."""

        @model_validator(mode="after")
        def _holds_together(self) -> NoLoCo.Options:
            most = math.sqrt(2 + self.outer_momentum**2)
            if not self.outer_momentum < self.consensus < most:
                raise ValueError(f"consensus={self.consensus}: expected outer_momentum to {most:.3f}, else ranks drift")
            return self

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        if not self.is_due(step):
            return
        key, options, theta = "weights", self.options, bucket.flat
        phi = self.anchor(key, theta)
        own = torch.stack([phi - theta, phi])
        peer = random_partner(self.place.rank, self.place.world, (step.number + 1) // options.steps, options.seed)
        mean = own
        if peer is not None:
            came: dict[int, Tensor] = yield Swap("pair", {peer: own}, {peer: torch.empty_like(own)})
            mean = (own + came[peer]) / 2
        momentum = self.memory.find_or_zeros(MOMENTUM, key, theta) * options.outer_momentum
        momentum = momentum - options.outer_lr * mean[0] - options.consensus * (phi - mean[1])
        theta.copy_(phi + momentum)
        self.memory.stage(ANCHOR, key, theta.clone())
        self.memory.stage(MOMENTUM, key, momentum)


def random_partner(rank: int, world: int, number: int, seed: int) -> int | None:
    """The rank that this one is paired with in an exchange; None: it is left over.

    Args:
        number: of the exchange. seed: the pairs of all exchanges follow from it.
    """
    order = torch.randperm(world, generator=torch.Generator().manual_seed((seed << 31) + number)).tolist()
    seat: int = order.index(rank) ^ 1
    return order[seat] if seat < world else None
