"""Regression on a synthetic table: the root mean squared error in place of an accuracy.

The price of a house from eight columns, of which each client has those of a town of its own. As ``regression.json``:

    {"task": {"task": "gradbus.experiments.examples.tabular_regression:HousePrices"},
     "federated": {"rounds": 10, "training": {"epochs": 2}, "evaluation": {"every": 1},
                   "checkpoint": {"keep_best": "rmse"}}}

and ``gradbus virtual regression.json --clients 8``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gradbus.models import EvalResult, TrainResult, local_sgd, seeded_generator, seeded_global_generator

COLUMNS = 8


def town(number: int | str, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """The table of a town, float32, shapes (samples, COLUMNS) and (samples, 1). Its columns are around means of its
    own; the law that makes prices is that of all."""
    generator = seeded_generator("town", seed, number)
    means = torch.randn(COLUMNS, generator=generator) * (0.0 if number == "test" else 0.7)
    table = torch.randn(samples, COLUMNS, generator=generator) + means
    weights = torch.linspace(-1.0, 1.0, COLUMNS)
    price = table @ weights + table[:, 0] * table[:, 1] + 0.1 * torch.randn(samples, generator=generator)
    return table, price.unsqueeze(1)


class HousePrices:
    """The task. Each client trains on the first four fifths of its town, and evaluates on the rest."""

    def __init__(self, samples: int = 200, seed: int = 0) -> None:
        """``samples``: of each town."""
        self.samples, self.seed = samples, seed
        self._train = 4 * samples // 5
        self._towns: dict[int | str, tuple[Tensor, Tensor]] = {}

    def build_model(self) -> nn.Module:
        """A perceptron with one hidden layer, with the same initial weights at every call."""
        with seeded_global_generator(self.seed):
            return nn.Sequential(nn.Linear(COLUMNS, 32), nn.ReLU(), nn.Linear(32, 1))

    def prepare(self, client_id: int, num_clients: int) -> None:
        """Make the table of this client."""
        self._table(client_id)

    def _table(self, number: int | str) -> tuple[Tensor, Tensor]:
        if number not in self._towns:
            self._towns[number] = town(number, self.samples, self.seed)
        return self._towns[number]

    def train(self, model: nn.Module, *, client_id: int, **command: Any) -> TrainResult:
        """Train on the table of this client."""
        table, price = self._table(client_id)
        own = torch.arange(self._train)
        return local_sgd(
            model, own, lambda rows: mse_loss(model(table[rows]), price[rows]), client_id=client_id, **command
        )

    def evaluate(self, model: nn.Module) -> EvalResult:
        """On a town that is nobody's."""
        return measured(model, *self._table("test"))

    def evaluate_local(self, model: nn.Module, *, client_id: int) -> EvalResult:
        """On the rows that this client does not train on."""
        table, price = self._table(client_id)
        return measured(model, table[self._train :], price[self._train :])


@torch.no_grad()
def measured(model: nn.Module, table: Tensor, price: Tensor) -> EvalResult:
    """Mean squared error as the loss, its root, and the share of the variance that the model explains."""
    model.eval()
    loss = float(mse_loss(model(table), price))
    variance = float(price.var(correction=0))
    return EvalResult(None, loss, len(table), {"rmse": loss**0.5, "r2": 1.0 - loss / variance})
