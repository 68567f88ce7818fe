"""The mean loss of all ranks, for algorithms that go by it: it is agreed on with the exchange of a step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradbus.actors.data_parallel.step import TrainingStep
from gradbus.runtime.algorithms.base import Step
from gradbus.runtime.algorithms.requests import AllReduce, Program


def summed(status: Tensor, name: str = "status") -> Program[None]:
    """Add up the status of all ranks, in place. The bits are equal on all ranks. ``name``: of the request."""
    yield AllReduce(name, status, "sum", out=status)


class MeanLoss:
    """The mean loss of the ranks, as far as they have agreed on it.

    Attributes:
        is_needed: whether the algorithm goes by it.
        value: of the last step that was not skipped, over the ranks that made it; NaN if nobody needs it. Where weights
            are exchanged, of the step before the exchange, and NaN if no rank has made that one.
    """

    def __init__(self, value: float | None, *, is_needed: bool) -> None:
        """``value``: that of the step before; None: there is none."""
        self.is_needed = is_needed
        self.value = math.nan if value is None else value

    def step_with(self, step: TrainingStep) -> Step:
        """Return the step as the algorithm sees it, with the newest loss."""
        return Step(step.number, step.epoch, step.active, self.value)

    @staticmethod
    def status_of(step: TrainingStep) -> Tensor:
        """Return this rank's status, to be summed up over all: float64, shape (3,): how many were not finite, the sum
        of the mean losses of those whose loss is finite, and how many these are. Waits for the device."""
        counts = step.batches > 0 and step.own_is_finite()
        loss = float(step.loss) / step.batches if counts else 0.0
        return torch.tensor([float(not step.is_finite), loss, float(counts)], dtype=torch.float64)

    def note(self, status: Tensor) -> None:
        """Take the loss from the summed status of all ranks. It follows from that alone, so it has equal bits on all of
        them."""
        self.value = float(status[1] / status[2])  # NaN: no rank has one that is finite
