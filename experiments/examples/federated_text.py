"""A language model of characters, federated: perplexity in place of an accuracy.

The text of :mod:`.text`, of which each client has a piece, and holds the end of that out. As
``text.json``:

    {"task": {"task": "gradbus.experiments.examples.federated_text:FederatedText"},
     "federated": {"rounds": 20, "training": {"steps": 50, "optimizer": {"name": "adamw", "lr": 0.001}},
                   "evaluation": {"every": 5}, "checkpoint": {"keep_best": "perplexity"}}}

and ``gradbus virtual text.json --clients 8``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradbus.experiments.examples.text import CharTransformer, corpus
from gradbus.models import EvalResult, TrainResult, local_sgd


class FederatedText:
    """The task. A sample is a window of characters; each client trains on the first nine tenths of those of its piece,
    and evaluates on the rest."""

    def __init__(
        self,
        context: int = 32,
        width: int = 32,
        layers: int = 1,
        windows: int = 32,
        num_clients: int = 8,
        seed: int = 0,
    ) -> None:
        """``context``: characters of a window. ``width``, ``layers``: of the model. ``windows``: of an evaluation.
        ``num_clients``: pieces of the text, where the run does not say how many clients there are."""
        self.context, self.windows, self.seed = context, windows, seed
        self._model = {"width": width, "layers": layers, "heads": max(1, width // 16), "context": context}
        self._num_clients = num_clients

    def build_model(self) -> nn.Module:
        """A small transformer, with the same initial weights at every call."""
        return CharTransformer(self.seed, **self._model)

    def prepare(self, client_id: int, num_clients: int) -> None:
        """Load the text."""
        self._num_clients = num_clients or self._num_clients
        self._starts(client_id)

    def _starts(self, client_id: int) -> tuple[Tensor, Tensor]:
        """Return where the windows of this client begin in the text, int64: of training, and held out."""
        text, _ = corpus()
        size = text.numel() // max(self._num_clients, client_id + 1)
        starts = torch.arange(client_id * size, (client_id + 1) * size - self.context - 1, self.context)
        cut = 9 * len(starts) // 10
        return starts[:cut], starts[cut:]

    def _loss(self, model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
        rows = text[starts[:, None] + torch.arange(self.context + 1)]
        return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def train(self, model: nn.Module, *, client_id: int, **command: Any) -> TrainResult:
        """Train on the piece of this client."""
        text, _ = corpus()
        starts, _ = self._starts(client_id)
        return local_sgd(model, starts, lambda some: self._loss(model, text, some), client_id=client_id, **command)

    def evaluate(self, model: nn.Module) -> EvalResult:
        """On text that is nobody's."""
        _, text = corpus()
        return self._measured(model, text, torch.arange(0, text.numel() - self.context - 1, self.context))

    def evaluate_local(self, model: nn.Module, *, client_id: int) -> EvalResult:
        """On the end of this client's piece."""
        return self._measured(model, corpus()[0], self._starts(client_id)[1])

    @torch.no_grad()
    def _measured(self, model: nn.Module, text: Tensor, starts: Tensor) -> EvalResult:
        """Mean loss of a character in nats, and its exponential, over windows that are spread over these."""
        model.eval()
        picked = starts[torch.linspace(0, len(starts) - 1, min(self.windows, len(starts))).long()]
        loss = float(self._loss(model, text, picked))
        return EvalResult(None, loss, len(picked), {"perplexity": math.exp(min(loss, 80.0))})
