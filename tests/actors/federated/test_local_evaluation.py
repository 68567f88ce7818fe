"""What a client does to evaluate: whatever its task raises or returns, there is a result that fits into a message."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.client.local_evaluation import (
    MAX_METRICS,
    NO_DATA,
    NO_METHOD,
    PRIVATE,
    EvaluationStopped,
    LocalEvaluation,
)
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.models import NoopTask
from gradbus.models.task import EvalResult
from gradbus.runtime.wire import control
from gradbus.runtime.wire.control import EvaluationRequest, EvaluationResult, Welcome

REQUEST = EvaluationRequest(5, 3, "7", 9.0)


def welcome(**options: Any) -> Welcome:
    return Welcome(7, 1, 5, 1, "fp32", "{}", 3, 0.5, options=options)


class Returning(NoopTask):
    """Evaluates to what the test says, or raises it."""

    def __init__(self, outcome: Any) -> None:
        super().__init__(3)
        self._outcome = outcome
        self.seen: list[float] = []

    def evaluate_local(self, model: nn.Module, *, client_id: int) -> Any:
        assert client_id == 7
        assert not torch.is_grad_enabled()
        self.seen.append(float(next(model.parameters())[0]))
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def evaluated(task: Any, *, tells_errors: bool = True, **options: Any) -> EvaluationResult:
    evaluation = LocalEvaluation(task, FlatModel(task.build_model()), 7, ClientStateStore(None, 7), tells_errors)
    result = evaluation.evaluate(torch.full((3,), 0.5), welcome(**options), REQUEST, lambda: False)
    assert control.decode(control.encode(result)) == result
    assert (result.run_id, result.round_id) == (5, 3)
    return result


def test_the_result_has_loss_accuracy_and_the_tasks_own_metrics_of_the_model_that_was_asked_for() -> None:
    task = Returning(EvalResult(0.75, 0.5, 20, {"f1": 0.25}))
    result = evaluated(task)
    assert (result.num_samples, result.metrics, result.failure) == (20, {"loss": 0.5, "accuracy": 0.75, "f1": 0.25}, "")
    assert task.seen == [0.5]


def test_metrics_that_are_not_finite_and_those_that_have_no_room_are_left_out() -> None:
    many = {f"metric {number} {'x' * 100}": 1.0 for number in range(50)}
    result = evaluated(Returning(EvalResult(None, math.nan, 20, {"auc": math.inf, **many})))
    assert len(result.metrics) == MAX_METRICS
    assert not {"loss", "accuracy", "auc"} & result.metrics.keys()


def test_an_evaluation_that_is_not_finite_is_logged_and_is_no_answer_if_nothing_else_is_left() -> None:
    with capture_logs() as lines:
        part = evaluated(Returning(EvalResult(0.5, math.nan, 20)))
        nothing = evaluated(Returning(EvalResult(None, math.inf, 20)))
    assert (part.metrics, part.failure) == ({"accuracy": 0.5}, "")
    assert (nothing.num_samples, nothing.metrics, nothing.failure) == (0, {}, "none of its numbers is finite")
    told = [(line["log_level"], line["client"], line["round"], str(line["metrics"])) for line in lines]
    assert told == [("warning", 7, 3, "{'loss': nan}"), ("warning", 7, 3, "{'loss': inf}")]
    assert lines[0]["event"] == "evaluation is not finite"


@pytest.mark.parametrize("outcome", [None, EvalResult(None, 0.5, 0)], ids=["none", "no samples"])
def test_a_client_without_data_says_so(outcome: Any) -> None:
    result = evaluated(Returning(outcome))
    assert (result.num_samples, result.metrics, result.failure) == (0, {}, NO_DATA)


def test_what_a_task_raises_is_the_reason_unless_that_may_not_leave_the_client() -> None:
    error = ValueError("patient 17 has no image" + "!" * 1000)
    assert evaluated(Returning(error)).failure.startswith("ValueError: patient 17 has no image")
    assert evaluated(Returning(error), tells_errors=False).failure == "ValueError"
    unreadable = FileNotFoundError("scan-\udcff.png")  # a byte of its name that is not UTF-8
    assert "scan-\N{REPLACEMENT CHARACTER}.png" in evaluated(Returning(unreadable)).failure


@pytest.mark.parametrize(
    "outcome",
    [
        {"loss": 0.5},
        SimpleNamespace(loss=0.5),
        SimpleNamespace(num_samples=3),
        SimpleNamespace(num_samples=3, loss=torch.zeros(3)),
        SimpleNamespace(num_samples="many", loss=0.5),
        EvalResult(None, 0.5, 3, {"f1": "good"}),  # type: ignore[dict-item]
        SimpleNamespace(num_samples=3, loss=0.5, metrics=[0.5]),
    ],
    ids=["dict", "no samples", "no loss", "vector", "text", "metric of text", "list"],
)
def test_what_a_task_returns_that_is_no_result_is_a_failure_that_says_what_it_should_be(outcome: Any) -> None:
    result = evaluated(Returning(outcome))
    assert (result.num_samples, result.metrics) == (0, {})
    assert result.failure.startswith("WrongResult: evaluate_local has returned")
    assert evaluated(Returning(outcome), tells_errors=False).failure == "WrongResult"


def test_a_result_without_metrics_of_its_own_counts() -> None:
    assert evaluated(Returning(SimpleNamespace(num_samples=3, loss=0.5, metrics=None))).metrics == {"loss": 0.5}


def test_a_task_that_knows_of_no_evaluation_says_so() -> None:
    assert evaluated(NoopTask(3)).failure == NO_METHOD


def test_a_client_whose_updates_have_noise_tells_nothing_of_its_data() -> None:
    task = Returning(EvalResult(0.75, 0.5, 20))
    result = evaluated(task, **{"privacy.name": "local", "privacy.clip_norm": 1.0, "privacy.noise_multiplier": 2.0})
    assert (result.num_samples, result.metrics, result.failure) == (0, {}, PRIVATE)
    assert task.seen == []


def test_an_evaluation_ends_at_the_next_forward_pass_once_it_is_of_no_use() -> None:
    class Passing(NoopTask):
        def build_model(self) -> Any:
            return nn.Linear(1, 1)

        def evaluate_local(self, model: nn.Module, *, client_id: int) -> Any:
            while True:
                model(torch.zeros(1))

    task, asked = Passing(2), iter([False, False, False, False, True])
    evaluation = LocalEvaluation(task, FlatModel(task.build_model()), 7, ClientStateStore(None, 7))
    with pytest.raises(EvaluationStopped):
        evaluation.evaluate(torch.zeros(2), welcome(), REQUEST, lambda: next(asked, True))
    evaluation.model.module(torch.zeros(1))  # as it was: nothing asks whether it is of use
