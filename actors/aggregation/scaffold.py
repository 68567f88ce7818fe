"""SCAFFOLD at the server: the mean of the control variates is kept, and sent with each model.

Karimireddy et al., SCAFFOLD, ICML 2020 (arXiv:1910.06378), Algorithm 1, lines 16 and 17:
``w <- w + lr mean(Delta w)`` and ``c <- c + |S| / N mean(Delta c)`` over the clients S of the round, of N in all.
Differs from the paper: ``mean(Delta w)`` is weighted by samples, as that of FedAvg; ``mean(Delta c)`` is not. So a run
comes to rest where ``c``, the plain mean of the clients' gradients, is zero: at the optimum of the paper's objective,
the mean over clients, and not of the mean over samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradbus.actors.aggregation.exact_sum import ExactMean, OutOfRange, fits
from gradbus.actors.aggregation.strategies import ServerOptions, WithBuffers
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError

CONTROL = "control"


class Scaffold(WithBuffers):
    """Control variates of server and clients against drift; with the training rule of that name."""

    choice = "scaffold"
    names = ("server_control",)
    adds_sums = False
    takes_repeats = False
    Options = ServerOptions

    def __init__(self, dim: int, *, lr: float = 1.0) -> None:
        super().__init__(dim)
        self._lr = lr
        self._num_clients = 0
        self._change: ExactMean | None = None
        self._zeros = torch.zeros(1).expand(dim)  # the base of a difference

    @property
    def sections(self) -> Mapping[str, int]:
        return {CONTROL: self._dim}

    def check(self, config: FederatedConfig) -> None:
        if config.clients.num is None:
            raise ConfigError("strategy scaffold divides by the number of all clients: set federated.clients.num")
        self._num_clients = config.clients.num

    def broadcast(self) -> Tensor:
        return self._buffers["server_control"]

    def begin(self, round_id: int, base: Tensor) -> None:
        super().begin(round_id, base)
        if self._change is None:
            self._change = ExactMean(self._dim)
        self._change.reset()

    def add(self, update: Update, facts: Facts) -> None:
        assert self._change is not None, "begin() comes first"
        control = update.others[CONTROL]
        if not fits(control, self._zeros, 1):
            raise OutOfRange("its control variate does not fit the exact sum")
        super().add(update, facts)  # may refuse it; what follows cannot
        self._change.add(control, base=self._zeros, num_samples=1)

    def finish(self, weights: Tensor) -> None:
        super().finish(weights)
        assert self._change is not None
        control, share = (
            self._buffers["server_control"],
            self._change.count / max(self._num_clients, self._change.count),
        )
        for place, change in self._change.blocks():
            control[place] = change.mul_(share).add_(control[place])

    def _step(self, place: slice, delta: Tensor, weights: Tensor) -> None:
        weights.copy_(delta.mul_(self._lr).add_(weights))
