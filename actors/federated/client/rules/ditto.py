"""Ditto: a personal model at each client, kept near the global one.

Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021 (arXiv:2012.04221), Algorithm 1:
beside the update of the global model w, which is that of FedAvg, each client takes steps on its own model,
``v <- v - lr (grad F_k(v) + lam (v - w))``, with w as the round began with it. Differs from the paper: v takes as many
passes over the data as w does, unless ``own_epochs`` says otherwise, where the paper counts steps; a client begins with
the first global model that it gets as v; and the data come to v in the order in which they come to w.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gradbus.actors.federated.client.rules.base import ClientRule, PersonalTraining
from gradbus.actors.federated.client.rules.fedprox import FedProx
from gradbus.runtime.choices import Options


class DittoOptions(Options):
    """Options of Ditto."""

    lam: Annotated[float, Field(ge=0, le=1e6)] = 0.1
    """Weight lambda of the pull to the global model. 0: each client trains for itself; large: v is the global model."""
    own_lr: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Learning rate of the personal model. 0: that of the round."""
    own_epochs: Annotated[int, Field(ge=0, le=0x7FFF_FFFF)] = 0
    """Number of passes of the personal model over the client's samples. 0: as of the round."""


class DittoTerm(FedProx):
    """The pull of a personal model to the global one: the term of FedProx, under a name of its own in errors."""


class Ditto(ClientRule):
    """Trains a personal model beside the global one, with lam / 2 times the squared distance from that in its loss."""

    choice = "ditto"
    Options = DittoOptions

    def __init__(self, *, lam: float = 0.1, own_lr: float = 0.0, own_epochs: int = 0) -> None:
        self._training = PersonalTraining(rule=DittoTerm(mu=lam), epochs=own_epochs, lr=own_lr)

    def personal(self) -> PersonalTraining:
        return self._training
