"""What the actors need of a task: structural types, so that actors need not know where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn


class TrainOutcome(Protocol):
    """Holds what training gives back."""

    @property
    def num_samples(self) -> int:
        """Samples trained on: the weight of the update. 0, with a loss of None: this client had nothing to train, and
        sits the round out."""

    @property
    def loss(self) -> float | None:
        """Mean training loss; None where there is none. One that is not finite says that training has diverged: then
        its update does not count."""


class EvalOutcome(Protocol):
    """Holds what evaluation gives back."""

    # One more is looked for: ``metrics``, numbers by name, for those that a task finds beside the accuracy or without.

    @property
    def accuracy(self) -> float | None:
        """Share of right answers, 0 .. 1; None for a task without such."""

    @property
    def loss(self) -> float:
        """Mean loss on the test set."""


class FederatedTask(Protocol):
    """Model, data and loss. ``gradbus.models.ClassificationTask`` is one; any object with these methods will do."""

    def build_model(self) -> nn.Module:
        """The model, with the same initial weights on every node that starts from the same settings."""

    def prepare(self, client_id: int, num_clients: int) -> None:
        """Load the data of this client. Called once, before its first round, off the event loop.

        ``num_clients``: how many the run expects; 0 if it does not know: then the task's own number holds.
        """

    def train(
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
    ) -> TrainOutcome:
        """Train in place. ``should_stop()`` says that the result is no longer wanted: return or raise soon.

        One more keyword comes where ``federated.training.optimizer`` names an optimizer: ``make_optimizer``, a function
        from parameters to an optimizer with the learning rate of this round. And with ``federated.training.steps``:
        ``steps``, the number of optimizer steps to make, in place of ``epochs``. A ``train`` that has an argument
        ``round`` gets the packets of its round there.
        """

    def evaluate(self, model: nn.Module) -> EvalOutcome | None:
        """Quality on the test set, or None."""

    # One more method is looked for, for evaluations by clients (federated.evaluation):
    #
    #   evaluate_local(model, *, client_id) -> LocalEvalOutcome | None
    #
    # Quality on data that this client does not train on, without gradients; None: it has no such data. It is called
    # between two trainings, and its forward passes end with an exception once its result is of no more use.


class LocalEvalOutcome(EvalOutcome, Protocol):
    """Is returned by an evaluation on a client's own data."""

    @property
    def num_samples(self) -> int:
        """Samples that it was made on: the weight of this client."""


def implementation(task: object, method: str) -> Callable[..., Any]:
    """Return the function behind a method of a task, for errors that name it: that of the task which another one wraps
    (``__wrapped__``), and the ``train_fn`` that a ``gradbus.models.ClassificationTask`` trains with."""
    task = getattr(task, "__dict__", {}).get("__wrapped__", task)
    given = getattr(task, "train_fn", None) if method == "train" else None
    found: Callable[..., Any] = given if callable(given) else getattr(task, method)
    return found
