"""FedNova: the mean of the clients' updates, each divided by how far its steps could go.

Wang et al., Tackling the Objective Inconsistency Problem, NeurIPS 2020 (arXiv:2007.07481), equations 5 and 9:
``w <- w + tau_eff sum p_i Delta_i / ||a_i||_1`` with ``p_i`` the share of samples and ``tau_eff = sum p_i ||a_i||_1``.
For SGD ``||a_i||_1`` is the number of steps K; with momentum m it is ``(K - m (1 - m^K) / (1 - m)) / (1 - m)``.
Differs from the paper: no proximal term in ``a_i``, and no momentum at the server. With `training.steps` a client that
announces another number than it was asked for is struck.

The number of steps is the client's word. One that announces too few has its own update divided by too little, and one
that announces too many makes all updates longer, by ``tau_eff``. So where clients may lie, an update weighs by
``n_i / ||a_i||_1`` and by ``n_i ||a_i||_1``, and both are bounded.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from typing import Annotated

from pydantic import Field
from torch import Tensor

from gradbus.actors.aggregation.clipping import scaled
from gradbus.actors.aggregation.strategies import FedAvg
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.runtime.choices import Options
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError

_MOST_STEPS = 1 << 32


class FedNovaOptions(Options):
    """Options of FedNova."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of the clients' SGD: what `training.optimizer.momentum` is, or `task.momentum` where the task brings the
    optimizer."""


class FedNova(FedAvg):
    """The mean of the updates, each divided by its number of local steps."""

    choice = "fednova"
    adds_sums = False
    uses_steps = True
    Options = FedNovaOptions

    def __init__(self, dim: int, *, momentum: float = 0.0) -> None:
        super().__init__(dim)
        self._momentum = momentum
        self._reaches: list[tuple[int, float]] = []
        self._effective = 0.0

    def check(self, config: FederatedConfig) -> None:
        optimizer = config.training.optimizer
        if optimizer.name == "task":
            return  # only the client knows it
        momentum = float(optimizer.options.get("momentum", 0.0))
        if optimizer.name != "sgd" or momentum != self._momentum or optimizer.options.get("nesterov"):
            has = dict(optimizer.options) or "its defaults"
            raise ConfigError(
                f"strategy fednova divides by how far steps of SGD with momentum {self._momentum:g} go, and the "
                f"clients have federated.training.optimizer {optimizer.name} with {has}: choose sgd without nesterov, "
                f"and set its momentum and federated.strategy.momentum to the same value"
            )

    def begin(self, round_id: int, base: Tensor) -> None:
        super().begin(round_id, base)
        self._reaches = []

    def reach(self, steps: int) -> float:
        """``||a||_1`` of so many steps."""
        m = self._momentum
        return (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)

    def _reach_of(self, facts: Facts) -> float:
        if facts.steps < 1:
            raise ValueError(
                "it announces no optimizer steps, by which FedNova divides: train with an optimizer of torch"
            )
        return self.reach(facts.steps)

    def weights(self, facts: Facts) -> tuple[float, ...]:
        reach = self._reach_of(facts)
        return facts.num_samples / reach, facts.num_samples * reach

    def believed(self, facts: Facts, most: tuple[float, ...]) -> Facts:
        self._reach_of(facts)
        # The product of both weights is the square of the samples.
        samples = max(1, min(facts.num_samples, int(math.sqrt(most[0] * most[1]))))
        numbers = range(1, _MOST_STEPS)
        fewest = 1 + bisect.bisect_left(numbers, samples / most[0], key=self.reach)
        steps = min(facts.steps, bisect.bisect_right(numbers, most[1] / samples, key=self.reach))
        return dataclasses.replace(facts, num_samples=samples, steps=max(fewest, steps))

    def add(self, update: Update, facts: Facts) -> None:
        assert self._base is not None, "begin() comes first"
        reach = self._reach_of(facts)
        model = scaled(update.model, self._base, 1 / reach)
        super().add(dataclasses.replace(update, model=model), facts)
        self._reaches.append((facts.num_samples, reach))

    def finish(self, weights: Tensor) -> None:
        samples = sum(count for count, _ in self._reaches)
        self._effective = math.fsum(count * reach for count, reach in self._reaches) / samples  # tau_eff
        super().finish(weights)

    def _step(self, place: slice, delta: Tensor, weights: Tensor) -> None:
        weights.copy_(delta.mul_(self._effective).add_(weights))
