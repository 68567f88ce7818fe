"""What a client does to evaluate a model on its own data, off the event loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.client.run_terms import RunChoices
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.own_tensors import PERSONAL, part_of
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.federated.task_results import as_floats, sendable, unreadable
from gradbus.runtime.compute_limiter import TRAINING
from gradbus.runtime.logs import get_logger
from gradbus.runtime.not_finite import warn_not_finite
from gradbus.runtime.plain_text import plain_line
from gradbus.runtime.user_errors import user_error
from gradbus.runtime.wire.control import (
    CANDIDATE_ROUNDS,
    EvaluationRequest,
    EvaluationResult,
    Welcome,
)

MAX_FAILURE_CHARS = 200
MAX_SAMPLES = 1 << 40
NO_METHOD = "its task has no evaluate_local"
NO_DATA = "it holds no data out"
NOT_FINITE = "none of its numbers is finite"
DECLINED = "client.evaluates is false: it evaluates no models"
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
        choices: reads what a controller has chosen.
    """

    task: FederatedTask
    model: FlatModel
    client_id: int
    kept: ClientStateStore
    tells_errors: bool = True
    choices: RunChoices = field(default_factory=RunChoices)

    def evaluate(
        self,
        vector: Tensor,
        welcome: Welcome,
        request: EvaluationRequest,
        should_stop: Callable[[], bool],
        buffers: bytes = b"",
    ) -> EvaluationResult:
        """The result of this request. Clients that share a process take turns. What the task raises becomes the
        failure of the result.

        Args:
            vector: float32, shape (D,): the model, or what of it is shared; the rest is this client's own.
            buffers: the block of its merged buffers.

        Raises:
            EvaluationStopped: ``should_stop`` was true, between two calls of the module.
        """
        began_s = time.perf_counter()
        with TRAINING.take(should_stop):
            if should_stop():
                raise EvaluationStopped
            try:
                num_samples, metrics, failure = self._found(vector, buffers, welcome, request.round_id, should_stop)
            except EvaluationStopped:
                self.model.note_failure()
                raise
            except Exception as error:
                self.model.note_failure()
                num_samples, metrics, failure = 0, {}, log_failure(error, self.client_id, self.tells_errors)
        seconds = max(0.0, time.perf_counter() - began_s)
        return EvaluationResult(request.run_id, request.round_id, num_samples, metrics, failure, seconds)

    def _found(
        self, vector: Tensor, buffers: bytes, welcome: Welcome, round_id: int, should_stop: Callable[[], bool]
    ) -> tuple[int, dict[str, float], str]:
        """Samples, metrics, and why there are none. Raises what the task raises, and what its result is not fit for."""
        run = self.choices.read(welcome)
        if run.privacy is not None:
            return 0, {}, PRIVATE
        method: Callable[..., Any] | None = getattr(self.task, "evaluate_local", None)
        if method is None:
            return 0, {}, NO_METHOD
        self.model.repair()
        self.model.arrange(run.sharing)
        self.kept.start_run(welcome.run_id, self.model.dim)
        kept = state_for(self.kept, round_id)
        self.model.write(vector)
        self.model.write_personal(part_of(kept, PERSONAL))
        self.model.write_buffers(self.model.buffers.unpack(buffers))
        with torch.no_grad(), _stoppable(self.model.module, should_stop):
            found = method(self.model.module, client_id=self.client_id)
        if found is None:
            return 0, {}, NO_DATA
        num_samples, known = _read(self.task, found)
        warn_not_finite(log, known, client=self.client_id, round=round_id)
        metrics = sendable(known)
        if num_samples < 1:
            return 0, {}, NO_DATA
        return (min(num_samples, MAX_SAMPLES), metrics, "") if metrics or not known else (0, {}, NOT_FINITE)


def state_for(kept: ClientStateStore, round_id: int) -> Mapping[str, Tensor]:
    """Return what a client keeps that belongs to the model of this round. What it has had since then is undone; a model
    that is of no round is evaluated with the newest."""
    return kept.state_after_newest() if round_id in CANDIDATE_ROUNDS else kept.before(round_id + 1)


def log_failure(error: Exception, client_id: int, tells_errors: bool) -> str:
    """Log why a client has found nothing. Returns what of that may leave it."""
    text = plain_line(str(user_error(error)))
    log.warning("evaluation failed", client=client_id, error=text)
    return (text if tells_errors else type(error).__name__)[:MAX_FAILURE_CHARS]


def _read(task: object, found: Any) -> tuple[int, dict[str, float]]:
    """Number of samples, and numbers by name: the loss, the accuracy where there is one, and the task's own.

    Raises:
        WrongResult: it is no result of an evaluation; it says what is.
    """
    try:
        num_samples = int(found.num_samples)
        known = as_floats({"loss": found.loss, "accuracy": getattr(found, "accuracy", None)})
        known |= as_floats(getattr(found, "metrics", None))
    except Exception as error:
        raise unreadable(task, "evaluate_local", found, error) from None
    return num_samples, known


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
