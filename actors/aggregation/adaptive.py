"""Adaptive optimizers at the server: a step that is divided by the root of a second moment.

Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv:2003.00295), Algorithm 2, with the exact weighted mean
``delta`` of the clients' differences as pseudo-gradient:

    all          m <- beta1 m + (1 - beta1) delta;  w <- w + eta m / (sqrt(v) + tau)
    FedAdagrad   v <- v + delta^2
    FedAdam      v <- beta2 v + (1 - beta2) delta^2
    FedYogi      v <- v - (1 - beta2) delta^2 sign(v - delta^2)

Differs from the paper: v begins at 0, not at tau^2, and the mean is weighted by samples.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradbus.actors.aggregation.strategies import ServerOptions, WithBuffers
from gradbus.runtime.config.settings import Positive


class AdaptiveOptions(ServerOptions):
    """Options of FedAdagrad."""

    # The first step of FedAdam and FedYogi is nearly lr in each coordinate whose delta is well above 10 tau, and such
    # deltas are far below 1: with 1.0 the MNIST example is at chance after two rounds.
    lr: Positive = 0.01
    """Learning rate of the server."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    tau: Positive = 1e-3
    """Constant that is added to the denominator."""


class FedAdamOptions(AdaptiveOptions):
    """Options of FedAdam and FedYogi."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay of the second moment."""


class _Adaptive(WithBuffers):
    """A step that is divided by the root of a second moment."""

    names = ("server_m", "server_v")

    def __init__(self, dim: int, *, lr: float = 0.01, beta1: float = 0.9, tau: float = 1e-3) -> None:
        super().__init__(dim)
        self._lr, self._beta1, self._tau = lr, beta1, tau

    @abstractmethod
    def _second_moment(self, v: Tensor, delta: Tensor) -> None:
        """Change ``v`` in place."""

    def _step(self, place: slice, delta: Tensor, weights: Tensor) -> None:
        m, v = self._buffers["server_m"][place], self._buffers["server_v"][place]
        delta32 = delta.to(torch.float32)
        m.mul_(self._beta1).add_(delta32, alpha=1 - self._beta1)
        self._second_moment(v, delta32)
        weights.addcdiv_(m, v.sqrt().add_(self._tau), value=self._lr)


class FedAdam(_Adaptive):
    """Adam at the server, without bias correction, as in the paper."""

    choice = "fedadam"
    Options = FedAdamOptions

    def __init__(self, dim: int, *, beta2: float = 0.99, **options: float) -> None:
        super().__init__(dim, **options)
        self._beta2 = beta2

    def _second_moment(self, v: Tensor, delta: Tensor) -> None:
        v.mul_(self._beta2).addcmul_(delta, delta, value=1 - self._beta2)


class FedYogi(FedAdam):
    """Yogi at the server: the second moment grows and shrinks slowly."""

    choice = "fedyogi"

    def _second_moment(self, v: Tensor, delta: Tensor) -> None:
        square = delta * delta
        v.addcmul_(square, torch.sign(v - square), value=-(1 - self._beta2))


class FedAdagrad(_Adaptive):
    """Adagrad at the server: the second moment is the sum of all squares."""

    choice = "fedadagrad"
    Options = AdaptiveOptions

    def _second_moment(self, v: Tensor, delta: Tensor) -> None:
        v.addcmul_(delta, delta)
