"""A task of ranks and clients that waits before each step while no file ``hurry`` is in the folder of the job.

So a job lasts until the last fault of a test, and ends soon after it. What is computed is the same at either pace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradbus.models import EvalResult, TrainResult

_PAUSE_S = 0.1
_INPUTS = 16
_BATCHES = 100


class Counts(NamedTuple):
    """Holds what a rank counted on its part of the test set."""

    correct: int
    total: int
    loss_sum: float


class Task:
    """Learn the sum of the inputs."""

    def __init__(self) -> None:
        self._hurry = Path("hurry").absolute()

    def build_model(self) -> nn.Module:
        """Return a network with the same weights in every process."""
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(_INPUTS, 32), nn.Tanh(), nn.Linear(32, 1))

    def _batch(self, *place: int) -> Tensor:
        """Return random inputs that follow from ``place``."""
        if not self._hurry.exists():
            time.sleep(_PAUSE_S)
        seed = 0
        for number in place:
            seed = 1000 * seed + number
        return torch.randn(8, _INPUTS, generator=torch.Generator().manual_seed(seed))

    # Of ranks

    def prepare_shard(self, rank: int, world: int) -> None:
        """Do nothing: batches are made as they are needed."""

    def num_batches(self, *, rank: int, world: int, epoch: int) -> int:
        """Return the same number for all."""
        return _BATCHES

    def batches(self, *, rank: int, world: int, epoch: int, seed: int) -> Iterator[Tensor]:
        """Make the batches of one epoch."""
        for number in range(_BATCHES):
            yield self._batch(seed + 1, epoch, number, rank)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean squared error."""
        error: Tensor = model(batch)[:, 0] - batch.sum(1)
        return error.square().mean()

    def evaluate_shard(self, model: nn.Module, *, rank: int, world: int) -> Counts:
        """Return nothing of interest."""
        return Counts(0, 1, 0.0)

    # Of clients

    def prepare(self, client_id: int, num_clients: int) -> None:
        """Do nothing: batches are made as they are needed."""

    def train(  # noqa: PLR0913 - as the protocol of tasks has it
        self,
        model: nn.Module,
        *,
        client_id: int,
        round_id: int,
        epochs: int,
        lr: float,
        seed: int,
        subset_size: int,
        should_stop: Callable[[], bool],
    ) -> TrainResult:
        """Make four steps."""
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        total = 0.0
        for number in range(4):
            optimizer.zero_grad()
            loss = self.loss(model, self._batch(seed + 1, round_id, number, client_id))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(loss.detach())
        return TrainResult(32 + client_id, total / 4)

    def evaluate(self, model: nn.Module) -> EvalResult | None:
        """Return None: there is no test set."""
        return None
