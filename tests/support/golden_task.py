"""The task of the stored runs in ``tests/golden/directories``; ``tests/tools/golden_runs.py`` has made them.

It must stay as it is: later versions resume those runs with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradbus.models.task import EvalResult, TrainResult

TARGET = 0.5


class GoldenModel(nn.Module):
    """All that makes a vector and names differ: a frozen layer, tied weights, batch norm with its counter, a head in
    half precision, and a buffer that ``state_dict()`` does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.first = nn.Linear(3, 5), nn.Linear(5, 5)
        self.norm, self.last = nn.BatchNorm1d(5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 2, dtype=torch.bfloat16)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters(), start=1):
                parameter.copy_(torch.linspace(-number, number, parameter.numel()).view(parameter.shape) / 8)

    def squared_error(self, target: Tensor | float) -> Tensor:
        """Return the sum over the trained parameters."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.stack([(parameter.float() - target).square().sum() for parameter in trained]).sum()


class GoldenTask:
    """Brings each trained parameter nearer to a target, for clients and for ranks. There are no data."""

    def build_model(self) -> nn.Module:
        return GoldenModel()

    # Of clients

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def train(self, model: Any, *, client_id: int, **_: Any) -> TrainResult:
        loss = float(model.squared_error(TARGET).detach())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.25 * (TARGET + 0.1 * client_id - parameter)
            model.norm.running_mean += 0.1
            model.norm.num_batches_tracked += 1
        return TrainResult(10 + client_id, loss)

    def evaluate(self, model: Any) -> EvalResult:
        loss = float(model.squared_error(TARGET).detach())
        return EvalResult(1 / (1 + loss), loss, 10)

    def evaluate_local(self, model: Any, *, client_id: int) -> EvalResult:
        return self.evaluate(model)

    # Of ranks

    def prepare_shard(self, rank: int, world: int) -> None:
        pass

    def num_batches(self, *, rank: int, world: int, epoch: int) -> int:
        return 3

    def batches(self, *, rank: int, world: int, epoch: int, seed: int) -> Iterator[Tensor]:
        return iter([torch.tensor(TARGET + 0.1 * rank) for _ in range(3)])

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        with torch.no_grad():
            model.norm.num_batches_tracked += 1
        loss: Tensor = model.squared_error(batch)
        return loss

    def evaluate_shard(self, model: Any, *, rank: int, world: int) -> Any:
        return _Counts()


class _Counts:
    correct, total, loss_sum = 4, 5, 1.0
