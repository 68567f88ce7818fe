"""SCAFFOLD at the server: the mean of the clients' control variates is kept, and sent with each model.

Karimireddy et al., SCAFFOLD, ICML 2020 (arXiv:1910.06378), Algorithm 1, lines 16 and 17:
``w <- w + lr mean(Delta w)`` and ``c <- c + |S| / N mean(Delta c)`` over the clients S of the round, of N in all.
Differs from the paper: both means are weighted by samples, as that of FedAvg. A run comes to rest where ``c`` is zero,
so its objective is the mean over samples, where that of the paper is the mean over clients; with equally many samples
both are the same. For that the server keeps the sum of samples times variate, and divides it by the samples of all
clients: of those that have not sent anything yet, and whose variates are zero, it takes the mean of the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradbus.actors.aggregation.exact_sum import ExactMean, OutOfRange, fits
from gradbus.actors.aggregation.strategies import ServerOptions, WithBuffers
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import CheckpointError, ConfigError

CONTROL = "control"
_SUM, _SAMPLES = "control_sum", "samples_of_clients"  # in a checkpoint


class Scaffold(WithBuffers):
    """Control variates of server and clients against drift; with the training rule of that name."""

    choice = "scaffold"
    names = (_SUM,)
    adds_sums = False
    takes_repeats = False
    Options = ServerOptions

    def __init__(self, dim: int, *, lr: float = 1.0) -> None:
        super().__init__(dim)
        self._lr = lr
        self._num_clients = 0
        self._samples: dict[int, int] = {}  # by client, as of its newest update
        self._added: dict[int, int] = {}  # the same, of this round
        self._change: ExactMean | None = None

    def _make_buffers(self) -> None:
        super()._make_buffers()
        self._control = torch.zeros(self._dim, dtype=torch.float32)
        self._zeros = torch.zeros(1, dtype=torch.float32).expand(self._dim)  # the base of a difference

    @property
    def sections(self) -> Mapping[str, int]:
        return {CONTROL: self._dim}

    def check(self, config: FederatedConfig) -> None:
        if config.clients.num is None:
            raise ConfigError("strategy scaffold divides by the number of all clients: set federated.clients.num")
        self._num_clients = config.clients.num
        optimizer = config.training.optimizer.name
        if optimizer not in ("task", "sgd"):
            raise ConfigError(
                f"strategy scaffold takes the way of a client, divided by its steps and rate, for a mean gradient, "
                f"which it is with SGD alone, and federated.training.optimizer is {optimizer}: set it to sgd"
            )

    def broadcast(self) -> Tensor:
        return self._control

    def state(self) -> Mapping[str, Tensor]:
        samples = torch.tensor(sorted(self._samples.items()), dtype=torch.int64).reshape(-1, 2)
        return {**super().state(), _SAMPLES: samples}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_state(state)
        samples = state.get(_SAMPLES)
        if samples is None or samples.dtype != torch.int64 or samples.dim() != 2 or samples.shape[1] != 2:
            raise CheckpointError(
                f"the checkpoint holds no int64 {_SAMPLES!r} of shape (clients, 2) for {type(self).__name__}: start "
                f"afresh in another state directory"
            )
        if (samples < 0).any():
            raise CheckpointError(f"{_SAMPLES} of the checkpoint has numbers below 0: it is damaged")
        self._samples = {int(client): int(count) for client, count in samples}
        self._set_control()

    def begin(self, round_id: int, base: Tensor) -> None:
        super().begin(round_id, base)
        if self._change is None:
            self._change = ExactMean(self._dim)
        self._change.reset()
        self._added.clear()

    def add(self, update: Update, facts: Facts) -> None:
        assert self._change is not None, "begin() comes first"
        control = update.others[CONTROL]
        if not fits(control, self._zeros, facts.num_samples):
            raise OutOfRange("its control variate does not fit the exact sum")
        super().add(update, facts)  # may refuse it; what follows cannot
        self._change.add(control, base=self._zeros, num_samples=facts.num_samples)
        self._added[facts.client_id] = facts.num_samples

    def finish(self, weights: Tensor) -> None:
        super().finish(weights)
        assert self._change is not None
        total = self._buffers[_SUM]
        for place, change in self._change.blocks():
            total[place] = change.mul_(self._change.num_samples).add_(total[place])
        self._samples |= self._added
        self._set_control()

    def _set_control(self) -> None:
        known = len(self._samples)
        samples = sum(self._samples.values()) * max(self._num_clients, known) / max(1, known)
        torch.div(self._buffers[_SUM], max(samples, 1.0), out=self._control)

    def _step(self, place: slice, delta: Tensor, weights: Tensor) -> None:
        weights.copy_(delta.mul_(self._lr).add_(weights))
