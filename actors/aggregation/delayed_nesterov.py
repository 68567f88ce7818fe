"""Delayed Nesterov momentum, for updates that come one by one.

Liu et al., Asynchronous Local-SGD Training for Language Modeling, 2024 (arXiv:2401.09135), Algorithm 3: with each
pseudo-gradient g ``w <- w + lr g / N``, and after every N of them, whose sum is D, ``m <- b m + D / N`` and
``w <- w + lr b m``. Differs from the paper: c, the share of the momentum that each update would have, is always 0, its
default there; a round may have several updates, which count as their mean, weighted by samples and staleness, times
their number, and the momentum changes at the end of a round in which N have come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradbus.actors.aggregation.strategies import ServerOptions, WithBuffers
from gradbus.runtime.errors import CheckpointError

_ARRIVED = "server_arrived"


class DelayedNesterovOptions(ServerOptions):
    """Options of delayed Nesterov momentum."""

    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.7
    """Learning rate of the server."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the server."""
    every: Annotated[int, Field(ge=1, le=100_000)] = 8
    """N, number of updates between two changes of the momentum; about the number of clients."""


class DelayedNesterov(WithBuffers):
    """Plain steps for each update, and Nesterov momentum after every N of them. `w <- w + lr g / N` at once; then
    `m <- b m + D / N`, `w <- w + lr b m`, where D is the sum of the last N. Ordinary momentum, changed at each update
    of an asynchronous run, diverges.

    Of a round with several updates g is their mean times their number. The momentum changes at its end if N have come.
    """

    choice = "delayednesterov"
    names = ("server_momentum", "server_delayed")

    Options = DelayedNesterovOptions

    def __init__(self, dim: int, *, lr: float = 0.7, momentum: float = 0.9, every: int = 8) -> None:
        super().__init__(dim)
        self._lr, self._beta, self._every = lr, momentum, every
        self._arrived = 0  # since the momentum changed

    def finish(self, weights: Tensor) -> None:
        assert self._mean is not None, "begin() comes first"
        arrived = self._arrived + self._mean.count
        is_due = arrived >= self._every
        for place, mean in self._mean.blocks():
            g = mean.mul_(self._mean.count)
            m, delayed = (self._buffers[name][place] for name in self.names)
            weights[place].add_(g, alpha=self._lr / self._every)  # theta <- theta - eps g / N
            delayed.add_(g)
            if is_due:
                m.mul_(self._beta).add_(delayed, alpha=1 / self._every)  # m <- beta m + Delta / N
                weights[place].add_(m, alpha=self._lr * self._beta)  # theta <- theta - eps beta m
                delayed.zero_()
        self._arrived = 0 if is_due else arrived

    def state(self) -> Mapping[str, Tensor]:
        return {**super().state(), _ARRIVED: torch.tensor([self._arrived])}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_state(state)
        found = state.get(_ARRIVED)
        if found is None or found.shape != (1,) or found.dtype != torch.int64 or not 0 <= int(found) < self._every:
            raise CheckpointError(
                f"the checkpoint holds no {_ARRIVED!r} below {self._every}: made with another strategy or another "
                f"strategy.every. Use the same, or start afresh in another state directory"
            )
        self._arrived = int(found)
