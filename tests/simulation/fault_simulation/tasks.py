"""Tasks whose clients learn noise: one reports what it has learned, one sends it in several packets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradbus import codecs
from gradbus.models import NoopTask, TrainResult

DIM = 100
TRAINING_SEED = 7  # with which clients train in all rounds
PACKETS = 3


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
