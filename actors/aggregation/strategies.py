"""Aggregation strategies: from the updates of a round to the next model.

All strategies here see the exact weighted mean ``delta`` of the clients' differences and treat it as a pseudo-gradient
(Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2):

    FedAvg    w <- w + delta                                  McMahan et al., AISTATS 2017
    FedAvgM   v <- beta v + delta;  w <- w + eta v            Hsu et al., arXiv:1909.06335
    FedAdam   m <- beta1 m + (1 - beta1) delta
              v <- beta2 v + (1 - beta2) delta^2;  w <- w + eta m / (sqrt(v) + tau)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from gradbus.actors.aggregation.exact_sum import ExactMean
from gradbus.actors.aggregation.partial_sum import PartialSum
from gradbus.codecs import Parsed
from gradbus.runtime.choices import Options
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.config.settings import Positive
from gradbus.runtime.errors import CheckpointError


class NoRoom(ValueError):
    """There is no memory for one more update."""


class Strategy(ABC):
    """Turns the updates of a round into the next model. Called from the compute thread, one call at a time.

    Attributes:
        weighs_samples: an update of more samples weighs more. False: their number does not matter.
        adds_sums: it needs the sum of the updates alone, so that :meth:`add_sum` works.
    """

    choice: ClassVar[str] = ""  # its name in the configuration, of a built-in one
    Options: ClassVar[type[BaseModel]] = Options
    weighs_samples = True
    adds_sums = False

    @abstractmethod
    def begin(self, round_id: int, base: Tensor) -> None:
        """Start a round, or start it anew.

        Args:
            round_id: the round.
            base: float32, shape (D,): the model that the clients hold. It stays as it is until the round is finished.
        """

    @abstractmethod
    def add(self, client_id: int, update: Parsed, num_samples: int) -> None:
        """Take in one update. It either counts in full or, with an exception, not at all.

        Raises:
            ValueError: the update cannot be used; the text says why.
        """

    def add_sum(self, partial: PartialSum) -> None:
        """Take in the exact sum of a site's updates, in full or, with an exception, not at all.

        Raises:
            ValueError: it cannot be used; the text says why.
        """
        raise NotImplementedError(f"{self.name} needs the updates one by one")

    @abstractmethod
    def finish(self, weights: Tensor) -> None:
        """Change ``weights``, float32, shape (D,), in place to the next model. At least one update has been added."""

    @property
    def name(self) -> str:
        """For reports and checkpoints."""
        return type(self).__name__

    def check(self, config: FederatedConfig) -> None:  # noqa: B027 - most strategies work by any rules
        """Check the rules once, before a run. Raises ConfigError: the strategy cannot work by them."""

    def marks(self) -> Mapping[str, tuple[int, ...]]:
        """Clients of this round whose updates it changed, by what it did, for the round's report."""
        return {}

    def state(self) -> Mapping[str, Tensor]:
        """Tensors that have to be kept from round to round."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 - a strategy without state has nothing to do
        """Restore what :meth:`state` gave. Raises CheckpointError: it does not fit."""


class FedAvg(Strategy):
    """The mean of the clients' models, weighted by their samples."""

    choice = "fedavg"
    adds_sums = True

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._mean: ExactMean | None = None  # made at the first round: a controller that waits needs no sum
        self._base: Tensor | None = None

    def begin(self, round_id: int, base: Tensor) -> None:
        if self._mean is None:
            self._mean = ExactMean(self._dim)
        self._mean.reset()
        self._base = base

    def add(self, client_id: int, update: Parsed, num_samples: int) -> None:
        assert self._mean is not None, "begin() comes first"
        assert self._base is not None
        self._mean.add(update, base=self._base, num_samples=num_samples)

    def add_sum(self, partial: PartialSum) -> None:
        assert self._mean is not None, "begin() comes first"
        self._mean.add_sum(partial)

    def finish(self, weights: Tensor) -> None:
        assert self._mean is not None, "begin() comes first"
        for place, delta in self._mean.blocks():
            self._step(place, delta, weights[place])

    def _step(self, place: slice, delta: Tensor, weights: Tensor) -> None:
        """Change one piece of the weights; ``delta`` is float64 and may be used up."""
        weights.copy_(delta.add_(weights))


class _WithBuffers(FedAvg):
    """A strategy with float32 buffers of the size of the model."""

    names: tuple[str, ...] = ()

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self._buffers = {name: torch.zeros(dim) for name in self.names}

    def state(self) -> Mapping[str, Tensor]:
        return self._buffers

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, buffer in self._buffers.items():
            if name not in state or (state[name].shape, state[name].dtype) != (buffer.shape, buffer.dtype):
                raise CheckpointError(
                    f"the checkpoint holds no {name!r} of {self._dim} values for {type(self).__name__}: made with "
                    f"another strategy or model. Use the same, or start afresh in another state directory"
                )
            buffer.copy_(state[name])


class ServerOptions(Options):
    """Options of a strategy that is an optimizer of the server."""

    lr: Positive = 1.0
    """Learning rate of the server."""


class FedAvgMOptions(ServerOptions):
    """Options of FedAvgM."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the server."""


class FedAvgM(_WithBuffers):
    """FedAvg with momentum at the server."""

    choice = "fedavgm"
    names = ("server_momentum",)

    Options = FedAvgMOptions

    def __init__(self, dim: int, *, lr: float = 1.0, momentum: float = 0.9) -> None:
        super().__init__(dim)
        self._lr, self._momentum = lr, momentum

    def _step(self, place: slice, delta: Tensor, weights: Tensor) -> None:
        velocity = self._buffers["server_momentum"][place]
        velocity.mul_(self._momentum).add_(delta)
        weights.add_(velocity, alpha=self._lr)


class FedAdamOptions(ServerOptions):
    """Options of FedAdam."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay of the second moment."""
    tau: Positive = 1e-3
    """Constant that is added to the denominator."""


class FedAdam(_WithBuffers):
    """Adam at the server, without bias correction, as in the paper."""

    choice = "fedadam"
    names = ("server_m", "server_v")

    Options = FedAdamOptions

    def __init__(
        self, dim: int, *, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
    ) -> None:
        super().__init__(dim)
        self._lr, self._beta1, self._beta2, self._tau = lr, beta1, beta2, tau

    def _step(self, place: slice, delta: Tensor, weights: Tensor) -> None:
        m, v = self._buffers["server_m"][place], self._buffers["server_v"][place]
        delta32 = delta.to(torch.float32)
        m.mul_(self._beta1).add_(delta32, alpha=1 - self._beta1)
        v.mul_(self._beta2).addcmul_(delta32, delta32, value=1 - self._beta2)
        weights.addcdiv_(m, v.sqrt().add_(self._tau), value=self._lr)
