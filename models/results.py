"""What a task hands back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The outcome of one client's training in one round.

    Attributes:
        num_samples: distinct samples trained on, whatever the number of epochs: the weight of this update in the mean.
        loss: mean over all samples of all epochs, as seen while training; None where there is none. One that is not
            finite says that training has diverged.
    """

    num_samples: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The quality of a model on the test set.

    Attributes:
        accuracy: share of correct answers, 0..1.
        loss: mean over the samples.
        num_samples: size of the test set.
    """

    accuracy: float
    loss: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What one rank counted on its part of the test set. The sums over all ranks give accuracy and loss of the whole.

    Attributes:
        correct: right answers. total: samples. loss_sum: of the losses of all samples.
    """

    correct: int
    total: int
    loss_sum: float


class TrainingStopped(Exception):
    """``should_stop()`` was true between two batches; the model holds a half-trained state, to be thrown away.

    Attributes:
        batches: number of batches done before the stop.
    """

    def __init__(self, batches: int) -> None:
        super().__init__(f"training stopped on request after {batches} batches")
        self.batches = batches
