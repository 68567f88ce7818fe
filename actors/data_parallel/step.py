"""One step of a rank: its place in the run, what its batches came to, whether it counts; and the sums over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradbus.actors.data_parallel.metrics import MetricSums
from gradbus.runtime.algorithms.base import TensorBucket


@dataclass(slots=True, eq=False)
class TrainingStep:
    """A step from its forward pass until it is applied. What is exchanged for it is in an object of its own: a
    :class:`~.stepping.GradientExchange`, or a :class:`~.parameter_exchange.ParameterExchange`.

    Attributes:
        number, epoch: count from 0. active: ranks with data. batches: of this rank. memory: which set of it is used.
        weight: of this rank's mean gradient.
        loss: sum over this rank's batches, on the device of the model. metrics: of these batches.
        gradients: the buckets.
        own: where weights are predicted, the gradients of this rank by parameter, before they are exchanged; None: they
            are not finite, or there are none.
        is_finite: whether loss and gradients of this rank are, as far as is known.
        skipped_by: None: the step counts. Else it was skipped, for these ranks were not finite; empty: it is not known
            which.
    """

    number: int
    epoch: int
    active: int
    batches: int
    memory: int
    loss: Tensor
    weight: float = 1.0
    metrics: MetricSums = field(default_factory=MetricSums)
    gradients: Sequence[TensorBucket] = ()
    own: Mapping[Tensor, Tensor] | None = None
    is_finite: bool = True
    skipped_by: tuple[int, ...] | None = None

    def own_is_finite(self) -> bool:
        """Return whether this rank's losses and gradients were finite, as far as is known. Waits for the device."""
        return self.is_finite and bool(self.loss.isfinite())


class EpochSums:
    """Adds up the losses and metrics of this rank's batches of an epoch, without those of steps that are skipped."""

    def __init__(self, device: torch.device) -> None:
        """``device``: of the model, where the losses are: reading them waits for the steps."""
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._metrics = MetricSums()
        self._before: tuple[int, Tensor, MetricSums] | None = None  # the step added last, and the sums without it

    def start(self, loss_sum: float, metrics: Mapping[str, Any]) -> None:
        """Begin an epoch, or go on with one from these sums."""
        self._loss = torch.full_like(self._loss, loss_sum)
        self._metrics = MetricSums(metrics)
        self._before = None

    def new_loss(self) -> Tensor:
        """Return 0 where the losses of a step are added up: float64, shape ()."""
        return torch.zeros_like(self._loss)

    def add(self, step: TrainingStep) -> None:
        """Add a step, unless it is skipped."""
        self._before = step.number, self._loss, self._metrics
        if step.skipped_by is None:
            self._loss, self._metrics = self._loss + step.loss, self._metrics.merged(step.metrics)

    def undo(self, number: int) -> None:
        """Take the step with this number out, if it was the last one to be added."""
        if self._before is not None and self._before[0] == number:
            _, self._loss, self._metrics = self._before

    @property
    def loss(self) -> float:
        """Return the sum of the losses. Waits for the device."""
        return self._loss.item()

    @property
    def metrics(self) -> dict[str, Any]:
        """Return the sums of the metrics as plain data."""
        return self._metrics.plain()
