"""One step of a rank: its place in the run, what its batches came to, and whether it counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
