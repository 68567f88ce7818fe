"""What a client does to evaluate a model on its own data, off the event loop."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradbus.actors.federated.client_state import PERSONAL, ClientStateStore, part_of
from gradbus.actors.federated.flat_model import FlatModel
from gradbus.actors.federated.sharing import Sharing
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.privacy.client import privacy_of
from gradbus.runtime.compute_limiter import TRAINING
from gradbus.runtime.logs import get_logger
from gradbus.runtime.user_errors import user_error
from gradbus.runtime.wire.control import EvaluationRequest, EvaluationResult, Welcome

MAX_METRICS = 32  # that a message has room for
MAX_NAME_CHARS = 64
MAX_FAILURE_CHARS = 200
MAX_SAMPLES = 1 << 40
NO_METHOD = "its task has no evaluate_local"
NO_DATA = "it holds no data out"
PRIVATE = "its updates have noise, and metrics would have none"
NOT_SHARED = "client.share_model is false: its model is not shown to others"
MASKED = "its updates are masked, and its model would show the newest one"
NO_MODEL = "it has trained no model in this run since it was started"
HOSTED = "it is a virtual client, which keeps no model"


log = get_logger("client")


class EvaluationStopped(Exception):
    """The result is no longer wanted."""


@dataclass(frozen=True, slots=True)
class LocalEvaluation:
    """Evaluates models on the data of one client.

    Attributes:
        task: which may have a method ``evaluate_local(model, client_id=...)``.
        model: it holds what was evaluated last.
        kept: the states of this client, with the tensors of the model that it does not share.
        tells_errors: the text of what the task raises may leave this client, not its kind alone.
    """

    task: FederatedTask
    model: FlatModel
    client_id: int
    kept: ClientStateStore
    tells_errors: bool = True

    def evaluate(
        self, vector: Tensor, welcome: Welcome, request: EvaluationRequest, should_stop: Callable[[], bool]
    ) -> EvaluationResult:  # fmt: skip
        """The result of this request. Clients that share a process take turns. What the task raises becomes the
        failure of the result.

        Args:
            vector: float32, shape (D,): the model, or what of it is shared; the rest is this client's own.

        Raises:
            EvaluationStopped: ``should_stop`` was true, between two calls of the module.
        """
        began_s = time.perf_counter()
        with TRAINING.take(should_stop):
            found, failure = self._found(vector, welcome, should_stop)
        metrics, num_samples = ({}, 0) if failure else (_metrics(found), min(int(found.num_samples), MAX_SAMPLES))
        seconds = max(0.0, time.perf_counter() - began_s)
        return EvaluationResult(request.run_id, request.round_id, num_samples, metrics, failure, seconds)

    def _found(self, vector: Tensor, welcome: Welcome, should_stop: Callable[[], bool]) -> tuple[Any, str]:
        """What the task has found, or why there is nothing."""
        if privacy_of(welcome.options) is not None:
            return None, PRIVATE
        method: Callable[..., Any] | None = getattr(self.task, "evaluate_local", None)
        if method is None:
            return None, NO_METHOD
        self.model.arrange(Sharing.of_welcome(welcome))
        self.kept.start_run(welcome.run_id, self.model.dim)
        self.model.write(vector)
        self.model.write_personal(part_of(self.kept.after_newest(), PERSONAL))
        try:
            with torch.no_grad(), _stoppable(self.model.module, should_stop):
                found = method(self.model.module, client_id=self.client_id)
        except EvaluationStopped:
            raise
        except Exception as error:
            log.warning("evaluation failed", client=self.client_id, error=str(user_error(error)))
            why = str(user_error(error)) if self.tells_errors else type(error).__name__
            return None, why[:MAX_FAILURE_CHARS]
        return found, "" if found is not None and found.num_samples > 0 else NO_DATA


def _metrics(found: Any) -> dict[str, float]:
    """Finite numbers by name: the loss, the accuracy where there is one, and the task's own."""
    named: Mapping[str, Any] = {
        "loss": found.loss, "accuracy": getattr(found, "accuracy", None), **getattr(found, "metrics", {})
    }  # fmt: skip
    known = {str(name)[:MAX_NAME_CHARS]: float(value) for name, value in named.items() if value is not None}
    finite = {name: value for name, value in known.items() if math.isfinite(value)}
    return dict(list(finite.items())[:MAX_METRICS])


@contextlib.contextmanager
def _stoppable(module: nn.Module, should_stop: Callable[[], bool]) -> Iterator[None]:
    def stop(*_: Any) -> None:
        if should_stop():
            raise EvaluationStopped

    hook = module.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        hook.remove()
