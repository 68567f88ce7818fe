"""The task: model, data and loss as one object, the only thing that actors know about the training; and its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The outcome of one client's training in one round.

    Attributes:
        num_samples: distinct samples trained on, whatever the number of epochs: the weight of this update in the mean.
            Of text it may be the number of tokens, on all clients alike.
        loss: mean over all samples of all epochs while training; None where there is none, not finite where training
            has diverged.
        metrics: more numbers of this training by name, at most 32; those that are not finite are left out.
        parts: what the update is made of, in place of the trained model: see :meth:`packets`. None: of that.
    """

    num_samples: int
    loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    parts: Iterable[bytes | tuple[bytes, int]] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def nothing(cls) -> TrainResult:
        """The outcome of a client that has nothing to train in this round, as without data: it sits the round out, and
        sends no update."""
        return cls(0, None)

    @classmethod
    def packets(
        cls,
        packets: Iterable[bytes | tuple[bytes, int]],
        *,
        num_samples: int = 0,
        loss: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> TrainResult:
        """The outcome of a training whose update comes in packets, which are added element by element.

        Args:
            packets: each a message of any codec (``gradbus.codecs``) of the whole model vector, or such a message and
                the number of samples so far; of these that of the last packet counts. They are taken one by one, and
                sent while the next is made: it may well be a generator that trains an epoch, and yields.
            num_samples: of the update, where the packets come without such. loss, metrics: as above.
        """
        return cls(num_samples, loss, metrics or {}, packets)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Holds what was found on a test set.

    Attributes:
        accuracy: share of correct answers, 0 to 1; None for a task without such. loss: mean over its samples.
        num_samples: how many they are. metrics: more numbers by name.
    """

    accuracy: float | None
    loss: float
    num_samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardResult:
    """Holds what one rank found on its part of the test set.

    Attributes:
        correct: right answers; None for a task without such. total: samples. loss_sum: of the losses of all.
        metrics: more numbers by name.
    """

    correct: int | None
    total: int
    loss_sum: float
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Metric:
    """A number about a batch, or about one rank's part of a test set, in a form in which those of all can be combined.

    Attributes:
        value: the sum over the samples, for ``sum``, ``mean`` and ``root_mean``; else the largest or smallest value. A
            tensor with one element stays on its device until the epoch ends.
        count: number of samples. kind: how it is combined: the sum; sum / count; the root of that, as for the mean
            squared error; the largest; the smallest.
    """

    value: float | Tensor
    count: float | Tensor = 1
    kind: Literal["sum", "mean", "root_mean", "max", "min"] = "mean"


class TrainingStopped(Exception):
    """``should_stop()`` was true after ``batches`` batches.

    Attributes:
        result: of these batches, which counts where the time of a budget is over (``client.budget``); None: what was
            done is thrown away then, too.
    """

    def __init__(self, batches: int, result: TrainResult | None = None) -> None:
        super().__init__(f"training stopped on request after {batches} batches")
        self.batches = batches
        self.result = result


@runtime_checkable
class Task(Protocol):
    """The methods that a controller and its clients call; a class of your own needs no base class.

    In a minimal task ``prepare`` does nothing and ``evaluate`` returns None. All methods may be called from a thread
    other than the one that made the task, and ``train`` for different clients from several threads at once, each with a
    model of its own.
    """

    def build_model(self) -> nn.Module:
        """A new model with its initial parameters, bit-equal on every node and at every call. It has at least one
        floating-point tensor, and lazy layers have seen a batch."""

    def prepare(self, client_id: int, num_clients: int) -> None:
        """Get ready to train as ``client_id`` of ``num_clients`` (load data, warm up), before the first round.

        ``num_clients`` is 0 where the run does not know it: the task's own number holds then.
        """

    def train(  # noqa: PLR0913 (the public signature)
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
        """Train ``model`` in place on the data of ``client_id``.

        Args:
            model: from :meth:`build_model`, with the parameters of this round loaded; the same object from round to
                round, but a new one after a training that has changed more of it than values. When training returns,
                its tensors must have the names and shapes that they had.
            client_id: whose data to use, 0..num_clients-1.
            round_id: with ``seed`` and ``client_id`` decides every random choice, so that a repeat gives equal bits.
            epochs: passes over the samples of this round, >= 1.
            lr: learning rate, > 0.
            seed: of the run.
            subset_size: samples used in this round, drawn from the client's share; 0: the whole share.
            should_stop: asked between batches, from the training thread; when true, ``train`` gives up at once.

        Raises:
            TrainingStopped: ``should_stop`` was true. A task of your own may raise any other exception.
        """

    def evaluate(self, model: nn.Module) -> EvalResult | None:
        """Quality on the test set, or None if the task has none."""
