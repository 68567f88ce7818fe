"""What a task returns, read without trust in its form: its numbers, and the errors for what cannot be used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gradbus.actors.federated.protocol import SAT_OUT, TRAINING_FAILED
from gradbus.actors.federated.task import implementation
from gradbus.runtime.user_errors import WrongResult
from gradbus.runtime.wire.control import MAX_METRIC_CHARS, MAX_METRICS


class NonFiniteResult(ValueError):
    """Training returned a loss or a model that is not finite.

    ``reason``: one of :data:`~gradbus.actors.federated.protocol.FAILURES`.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class NothingToTrain(Exception):
    """A task has nothing to train in a round, and says so by ``TrainResult.nothing()``: its client sits it out."""

    reason = SAT_OUT


def reason_of(error: Exception) -> str:
    """Return the reason by which a client reports what it ends a training with."""
    return error.reason if isinstance(error, NonFiniteResult | NothingToTrain) else TRAINING_FAILED


def sendable(metrics: Mapping[str, float], others: int = 0) -> dict[str, float]:
    """Return the first of these that are finite, as many as a message has room for beside ``others``, with names that
    fit."""
    finite = {name[:MAX_METRIC_CHARS]: value for name, value in metrics.items() if math.isfinite(value)}
    return dict(list(finite.items())[: MAX_METRICS - others])


def as_floats(named: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the numbers that a task has found, by name, without those that are None. It may give scalars of NumPy, or
    tensors of one value. Raises whatever reading one raises."""
    return {str(name): float(value) for name, value in (named or {}).items() if value is not None}


def unreadable(task: object, method: str, found: Any, error: Exception) -> WrongResult:
    """The error for what this method of a task has returned: it says what is expected."""
    return WrongResult(
        f"{method} has returned {described(found)} that cannot be read ({error}): expected None, or an object with "
        f"num_samples and loss, if there is one accuracy, and metrics, a mapping of names to single numbers, such as "
        f"gradbus.models.EvalResult",
        implementation(task, method),
    )


def described(found: Any) -> str:
    """Describe a result in a word or two: its class, and of a mapping the first keys."""
    keys = f" with {', '.join(map(repr, list(found)[:5]))}" if isinstance(found, Mapping) and found else ""
    return "None" if found is None else f"{type(found).__name__}{keys}"
