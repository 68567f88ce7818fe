"""Tasks that learn noise: of clients, one reports what it has learned, one sends it in several packets; of ranks, one
has gradients that are known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gradbus import codecs
from gradbus.models import NoopTask, TrainResult
from gradbus.models.noop import VectorModel

DIM = 100
TRAINING_SEED = 7  # with which clients train in all rounds
PACKETS = 3
STEPS_IN_EPOCH = 4


class ReportingTask(NoopTask):
    """Adds normal noise to the parameters, as ``NoopTask(dim, delta="seeded")``, and reports what it has added."""

    def __init__(self, dim: int, report: Callable[[int, int, torch.Tensor], None]) -> None:
        """``report``: takes the client, the round, and the change, float32 (dim,)."""
        super().__init__(dim, delta="seeded")
        self._report = report

    def train(self, model: nn.Module, **given: Any) -> TrainResult:
        """Train as a NoopTask does."""
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        result = super().train(model, **given)
        change = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before
        self._report(given["client_id"], given["round_id"], change)
        return result


class PacketTask(NoopTask):
    """Adds normal noise to the parameters, as ``NoopTask(dim, delta="seeded")``, and sends it in packets."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, delta="seeded")

    def train(self, model: nn.Module, **given: Any) -> Any:
        """Train, and return the change in packets, of different codecs."""
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        result = super().train(model, **given)
        change = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before
        return TrainResult.packets(self._parts(change), num_samples=result.num_samples, loss=0.0)

    @staticmethod
    def _parts(change: torch.Tensor) -> Any:
        encode: Callable[[torch.Tensor], Any] = codecs.get("s4", density=1.0).encode
        for number in range(PACKETS):
            part = torch.zeros_like(change)
            part[number::PACKETS] = change[number::PACKETS]
            yield encode(part)


class GradientTask:
    """A task of data-parallel training whose gradients are known beforehand. Implements ``DataParallelTask``.

    The batch ``number`` of an epoch of one rank is a vector v of normal noise. The loss is p v, whose gradient is v, or
    with ``pulls`` |p - v|^2 / 2, whose gradient p - v shows also with which weights p it was computed.
    """

    def __init__(self, dim: int, *, pulls: bool = False, batches: int = STEPS_IN_EPOCH) -> None:
        self._dim = dim
        self._pulls = pulls
        self._batches = batches

    def build_model(self) -> nn.Module:
        """Return a model with one parameter of ``dim`` zeros."""
        return VectorModel(self._dim)

    def prepare_shard(self, rank: int, world: int) -> None:
        """Load nothing."""

    def num_batches(self, *, rank: int, world: int, epoch: int) -> int:
        """Return the same number for all."""
        return self._batches

    def batches(self, *, rank: int, world: int, epoch: int, seed: int) -> Iterator[torch.Tensor]:
        """Yield the vectors of this rank."""
        for number in range(self._batches):
            yield batch_of(self._dim, rank, epoch, number)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        vector = next(model.parameters())
        return ((vector - batch) ** 2).sum() / 2 if self._pulls else (vector * batch).sum()

    def evaluate_shard(self, model: nn.Module, *, rank: int, world: int) -> None:
        """Evaluate nothing."""

    def parameters(self, model: nn.Module) -> torch.Tensor:
        """Return a copy of the parameters, float32 (dim,)."""
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def batch_of(dim: int, rank: int, epoch: int, number: int) -> torch.Tensor:
    """Return a batch of a :class:`GradientTask`, float32 (dim,)."""
    generator = torch.Generator().manual_seed((rank * 1000 + epoch) * 1000 + number)
    return torch.randn(dim, generator=generator)
