"""q-FedAvg: clients with a large loss weigh more, so that accuracies of clients come closer together.

Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020 (arXiv:1905.10497), Algorithm 2:
``Delta_k = L (w - w_k)``, ``h_k = q F_k^(q-1) ||Delta_k||^2 + L F_k^q``, ``w <- w - sum F_k^q Delta_k / sum h_k``, with
``F_k`` the loss of client k before it trains. Differs from the paper: clients are not drawn in proportion to their
samples, which therefore do not count, and as in the authors' program a loss counts as 1e-10 more than it is, so that
one of 0 has a power as well.

A loss is the client's word, and where clients may lie it is bounded: by ``F^q``, and with q below 1 by ``F^(q-1)`` as
well, which a loss near 0 makes so large that the model stands still.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

from pydantic import Field
from torch import Tensor

from gradbus.actors.aggregation.clipping import norm_of, scaled
from gradbus.actors.aggregation.strategies import FedAvg
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.runtime.choices import Options
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.config.settings import Positive

LOSS_BEFORE = "loss_before"
_LEAST_LOSS = 1e-10
_LARGEST_WEIGHT = 1e30  # float32 has it
_WEIGHT = 1 << 10  # of each vector in the exact sum: F^q may be small, and has ten bits more then


class QFedAvgOptions(Options):
    """Options of q-FedAvg."""

    q: Annotated[float, Field(ge=0, le=20)] = 1.0
    """How much a large loss counts. 0: the mean of all clients."""
    lipschitz: Positive | None = None
    """L of the paper. null: 1 / the first learning rate of the clients, as there."""


class QFedAvg(FedAvg):
    """A mean in which clients weigh by their loss to the power of q; with the training rule loss_before."""

    choice = "qfedavg"
    weighs_samples = False
    adds_sums = False
    takes_repeats = False
    metrics = (LOSS_BEFORE,)
    Options = QFedAvgOptions

    def __init__(self, dim: int, *, q: float = 1.0, lipschitz: float | None = None) -> None:
        super().__init__(dim)
        self._q, self._lipschitz = q, lipschitz
        self._h: list[float] = []
        self._factor = 0.0

    def check(self, config: FederatedConfig) -> None:
        self._lipschitz = self._lipschitz or 1 / config.training.first_lr

    def begin(self, round_id: int, base: Tensor) -> None:
        super().begin(round_id, base)
        self._h = []

    def weights(self, facts: Facts) -> tuple[float, ...]:
        if not (q := self._q):
            return ()
        loss = _loss_of(facts)
        return (loss**q, loss ** (q - 1)) if q < 1 else (loss**q,)

    def believed(self, facts: Facts, most: tuple[float, ...]) -> Facts:
        if not (q := self._q):
            return facts
        loss = _loss_of(facts)
        least = most[1] ** (1 / (q - 1)) if q < 1 else 0.0
        loss = min(max(loss, least), _root(most[0], q))
        return dataclasses.replace(facts, metrics={**facts.metrics, LOSS_BEFORE: max(0.0, loss - _LEAST_LOSS)})

    def add(self, update: Update, facts: Facts) -> None:
        loss = _loss_of(facts)
        assert self._base is not None, "begin() comes first"
        q, ell = self._q, self._lipschitz or 1.0
        weight, length = loss**q, ell * norm_of(update.model, self._base)  # F^q, ||Delta||
        if not weight <= _LARGEST_WEIGHT:
            raise ValueError(f"its {LOSS_BEFORE} of {loss:g} to the power of {q:g} is more than {_LARGEST_WEIGHT:g}")
        model = scaled(update.model, self._base, weight)
        super().add(dataclasses.replace(update, model=model), dataclasses.replace(facts, num_samples=_WEIGHT))
        self._h.append(q * loss ** (q - 1) * length**2 + ell * weight)

    def finish(self, weights: Tensor) -> None:
        total = math.fsum(self._h)  # 0 where all powers are too small for a float: then nothing moves
        self._factor = (self._lipschitz or 1.0) * len(self._h) / total if total else 0.0
        super().finish(weights)

    def _step(self, place: slice, delta: Tensor, weights: Tensor) -> None:
        weights.copy_(delta.mul_(self._factor).add_(weights))


def _root(weight: float, q: float) -> float:
    """Return the loss whose power is ``weight``; infinite where that is beyond a float, as with a small q."""
    try:
        return float(weight ** (1 / q))
    except OverflowError:
        return math.inf


def _loss_of(facts: Facts) -> float:
    """The loss before training, above 0. Raises ValueError: it is out of range."""
    loss = facts.metrics.get(LOSS_BEFORE, math.nan)
    if not 0 <= loss < 1e6:
        raise ValueError(f"its {LOSS_BEFORE} is {loss}: expected one of 0 or more, and below 1e6")
    return loss + _LEAST_LOSS
