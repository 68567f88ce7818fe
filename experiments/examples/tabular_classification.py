"""Rare cases in a synthetic table: the area under the ROC curve and F1 in place of an accuracy, which tells little.

One row in ten is positive; each client has another share of them. As ``rare.json``:

    {"task": {"task": "gradbus.experiments.examples.tabular_classification:RareCases"},
     "federated": {"rounds": 10, "training": {"epochs": 2, "lr": 0.1}, "evaluation": {"every": 2},
                   "checkpoint": {"keep_best": "client.auc", "best_mode": "max"}}}

and ``gradbus virtual rare.json --clients 8``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from gradbus.models import EvalResult, TrainResult, local_sgd, seeded_generator, seeded_global_generator

COLUMNS = 10


def rows(number: int, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """The table of a client, float32, shapes (samples, COLUMNS) and (samples, 1): targets are 0 or 1. -1: of nobody."""
    generator = seeded_generator("rare cases", seed, number)
    share = 0.1 if number < 0 else 0.05 + 0.1 * float(torch.rand((), generator=generator))
    targets = (torch.rand(samples, 1, generator=generator) < share).float()
    targets[0], targets[-1] = 1.0, 0.0  # of both there is one
    shift = torch.linspace(0.0, 1.0, COLUMNS)
    return torch.randn(samples, COLUMNS, generator=generator) + targets * shift, targets


class RareCases:
    """The task. Each client trains on the first half of its rows, and evaluates on the rest."""

    def __init__(self, samples: int = 400, seed: int = 0) -> None:
        """``samples``: of each client."""
        self.samples, self.seed = samples, seed
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def build_model(self) -> nn.Module:
        """A perceptron with one hidden layer, with the same initial weights at every call."""
        with seeded_global_generator(self.seed):
            return nn.Sequential(nn.Linear(COLUMNS, 16), nn.Tanh(), nn.Linear(16, 1))

    def prepare(self, client_id: int, num_clients: int) -> None:
        """Make the table of this client."""
        self._table(client_id)

    def _table(self, number: int) -> tuple[Tensor, Tensor]:
        if number not in self._tables:
            self._tables[number] = rows(number, self.samples, self.seed)
        return self._tables[number]

    def train(self, model: nn.Module, *, client_id: int, **command: Any) -> TrainResult:
        """Train on the table of this client."""
        table, targets = self._table(client_id)

        def loss_of(picked: Tensor) -> Tensor:
            return binary_cross_entropy_with_logits(model(table[picked]), targets[picked])

        return local_sgd(model, torch.arange(self.samples // 2), loss_of, client_id=client_id, **command)

    def evaluate(self, model: nn.Module) -> EvalResult:
        """On a table that is nobody's."""
        return measured(model, *self._table(-1))

    def evaluate_local(self, model: nn.Module, *, client_id: int) -> EvalResult:
        """On the rows that this client does not train on."""
        table, targets = self._table(client_id)
        return measured(model, table[self.samples // 2 :], targets[self.samples // 2 :])


@torch.no_grad()
def measured(model: nn.Module, table: Tensor, targets: Tensor) -> EvalResult:
    """Mean loss, the area under the ROC curve, and F1 where an even chance is the threshold."""
    model.eval()
    logits = model(table)
    found = {"auc": auc(logits.flatten(), targets.flatten()), "f1": f1(logits > 0, targets > 0)}
    return EvalResult(None, float(binary_cross_entropy_with_logits(logits, targets)), len(table), found)


def auc(scores: Tensor, targets: Tensor) -> float:
    """The share of pairs of a positive and a negative row in which the positive one has the higher score; equal scores
    count half."""
    positive, negative = scores[targets > 0], scores[targets == 0]
    if not len(positive) or not len(negative):
        return float("nan")  # it is not announced
    above = (positive[:, None] > negative).double() + 0.5 * (positive[:, None] == negative).double()
    return float(above.mean())


def f1(said: Tensor, true: Tensor) -> float:
    """The harmonic mean of precision and recall; 0 where nothing was found."""
    hits = int((said & true).sum())
    return 2 * hits / max(1, int(said.sum()) + int(true.sum()))
