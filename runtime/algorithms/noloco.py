"""NoLoCo: DiLoCo without a mean over all ranks; after their local steps random pairs exchange what they have changed.

Kolehmainen et al., "NoLoCo: no-all-reduce low communication training method for large models", 2025
(arXiv:2506.10911), section 3. phi_i is what rank i had after its last outer step, theta_i what it has made of it by
``steps`` local steps. In each exchange all ranks are paired anew, at random; with its partner j

    Delta = (phi_i - theta_i + phi_j - theta_j) / 2
    d_i <- outer_momentum d_i - outer_lr Delta - consensus (phi_i - (phi_i + phi_j) / 2);  phi_i <- phi_i + d_i

and theta_i goes on from phi_i. A rank that is left over, where their number is odd, does the same with itself alone.
A message is two models, to one rank, whatever the number of ranks is. ``consensus``, gamma in the paper, holds the
ranks together; 1 starts both from their mean.

The formula is that of the authors' source (github.com/jkolehm/noloco, ``src/noloco/sparse_optimizer_c.py``), where
gamma is the outer learning rate; 0.7 and 0.3 are those of its configurations. It was not compared with the text of the
paper, nor was its bound for gamma: which values hold the ranks together is calculated here, see :func:`spread_rate`.

Pairs follow from ``seed`` and the number of the exchange alone. Replicas differ: the model of a run is their mean.
"""

from __future__ import annotations

import numpy as np
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
            if (rate := spread_rate(self.outer_momentum, self.consensus)) >= 1:
                raise ValueError(
                    f"consensus={self.consensus} with outer_momentum={self.outer_momentum}: among many ranks the "
                    f"variance between them grows {rate:.2f} times in an exchange; lower either"
                )
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


def spread_rate(momentum: float, consensus: float) -> float:
    """By what the variance between many ranks is multiplied in an exchange, in the long run, where no rank trains.

    e is how far a rank's phi is from the mean of all, and d its momentum. With a partner that is independent of it,
    d' = momentum d - consensus (e - e_j) / 2 and e' = e + d': a linear map of the expected squares of e and d, and of
    their product. The result is its spectral radius.
    """
    squares_of_d = np.array([consensus**2 / 2, -momentum * consensus, momentum**2])
    product = np.array([-consensus / 2, momentum, 0.0])  # of e and d'
    squares_of_e = np.array([1.0, 0.0, 0.0]) + 2 * product + squares_of_d
    step = np.stack([squares_of_e, product + squares_of_d, squares_of_d])
    return float(np.abs(np.linalg.eigvals(step)).max())


def random_partner(rank: int, world: int, number: int, seed: int) -> int | None:
    """The rank that this one is paired with in an exchange; None: it is left over.

    Args:
        number: of the exchange. seed: the pairs of all exchanges follow from it.
    """
    order = torch.randperm(world, generator=torch.Generator().manual_seed((seed << 31) + number)).tolist()
    seat: int = order.index(rank) ^ 1
    return order[seat] if seat < world else None
