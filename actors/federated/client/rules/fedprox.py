"""FedProx: a term that keeps the local model near the global one.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020 (arXiv:1812.06127), equation 2: each step
minimises ``F_k(w) + mu / 2 ||w - w_global||^2``. Differs from the paper: the number of epochs is not drawn per client;
a client that stops early does so by its own task.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from gradbus.actors.federated.client.rules.base import ClientRule, RoundStart
from gradbus.runtime.choices import Options
from gradbus.runtime.complex_pairs import from_pairs


class FedProxOptions(Options):
    """Options of FedProx."""

    mu: Annotated[float, Field(ge=0, le=1e6)] = 0.01
    """Weight of the term. 0: as plain."""


class FedProx(ClientRule):
    """Adds the squared distance from the global model to the loss of each step, times mu / 2."""

    choice = "fedprox"
    Options = FedProxOptions

    def __init__(self, *, mu: float = 0.01) -> None:
        self._mu = mu
        self._pairs: list[tuple[nn.Parameter, Tensor]] = []

    def start(self, begin: RoundStart) -> None:
        self._pairs = [(one, from_pairs(begin.base[place], one).to(one)) for one, place in begin.parameters]

    def loss_term(self, model: nn.Module) -> Tensor | None:
        if not self._mu:
            return None
        squares = [_in_floats(parameter - base).square().sum() for parameter, base in self._pairs]
        return self._mu / 2 * torch.stack(squares).sum()


def _in_floats(difference: Tensor) -> Tensor:
    """Return the floats of a difference, through which gradients pass: of a complex number both parts are drawn."""
    return torch.view_as_real(difference) if difference.is_complex() else difference
