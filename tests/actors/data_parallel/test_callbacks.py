"""Callbacks and metrics of workers: when they are called, what they get, and how they end a run on all ranks."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from ddp_scene import make_task, succeeded, train
from regression import INPUTS, SAMPLES, STEPS, TARGETS, Regression
from torch import Tensor, nn

from gradbus.actors import EpochReport
from gradbus.actors.data_parallel.metrics import MAX_METRICS, MetricSums, combined
from gradbus.models import Metric
from gradbus.runtime.callbacks import Callbacks
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CallbackFailed, ConfigError


class Follower:
    """Writes down its calls."""

    made: ClassVar[list[Follower]] = []

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[str] = set()
        Follower.made.append(self)

    def _note(self, what: str, report: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append((what, report))

    def on_step(self, report: Any) -> None:
        self._note("step", report)

    def on_evaluation(self, report: EpochReport) -> None:
        self._note("evaluation", report)

    def on_epoch(self, report: EpochReport) -> None:
        self._note("epoch", report)

    def on_end(self, summary: Any) -> None:
        self._note("end", summary)


class EndsAt:
    """Ends the run at some step, or after some epoch."""

    def __init__(self, *, step: int = -1, epoch: int = -1) -> None:
        self._step, self._epoch = step, epoch

    def on_step(self, report: Any) -> bool:
        return bool(report.step == self._step)

    def on_epoch(self, report: EpochReport) -> bool:
        return report.epoch == self._epoch


class Broken:
    def on_epoch(self, report: EpochReport) -> None:
        raise KeyError("no such column")


class WithMetrics(Regression):
    """Reports metrics of batches, as tensors."""

    def loss(self, model: nn.Module, batch: Tensor) -> Any:
        errors = (model(INPUTS[batch]) - TARGETS[batch]).square()
        count = torch.tensor(float(len(batch)))
        return errors.mean(), {
            "squares": Metric(errors.sum(), count),
            "seen": Metric(count, kind="sum"),
            "least": Metric(errors.min(), kind="min"),
        }


class WithMeans(Regression):
    def loss(self, model: nn.Module, batch: Tensor) -> Any:
        return super().loss(model, batch), {"mae": 0.5}


def test_callbacks_follow_steps_epochs_and_evaluations_on_the_compute_thread() -> None:
    follower = Follower()
    outcomes = succeeded(train(Regression(), epochs=2, eval_every_epochs=2, callbacks=[[follower], []]))
    expected = [*["step"] * STEPS, "epoch", *["step"] * STEPS, "evaluation", "epoch", "end"]
    assert [what for what, _ in follower.calls] == expected
    steps = [report for what, report in follower.calls if what == "step"]
    assert [report.step for report in steps] == list(range(1, 2 * STEPS + 1))
    assert {(report.rank, report.world, report.skipped) for report in steps} == {(0, 2, False)}
    assert all(math.isfinite(report.loss) and report.lr == 0.05 for report in steps)
    assert [report for what, report in follower.calls if what == "epoch"] == outcomes[0].reports
    assert follower.calls[-1][1].steps == 2 * STEPS
    assert len(follower.threads) == 1
    assert follower.threads != {threading.current_thread().name}


@pytest.mark.parametrize(
    "settings",
    [
        {"delay_steps": 1},
        {"algorithm": "decentralized"},
        {"algorithm": {"name": "async-averaging", "every_steps": 1}},
    ],
    ids=str,
)
def test_each_step_is_reported_and_counted_once_also_where_results_come_late(settings: dict[str, Any]) -> None:
    followers = [Follower(), Follower()]
    outcomes = succeeded(train(Regression(), epochs=1, callbacks=[[one] for one in followers], **settings))
    steps = [[report for what, report in one.calls if what == "step"] for one in followers]
    assert [[report.step for report in mine] for mine in steps] == [list(range(1, STEPS + 1))] * 2
    losses = [report.loss for mine in steps for report in mine]
    assert outcomes[0].reports[-1].loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_a_callback_of_one_rank_ends_the_run_on_all_ranks_after_the_same_step() -> None:
    outcomes = succeeded(train(Regression(), world=3, epochs=5, callbacks=[[], [EndsAt(step=3)], []]))
    assert [outcome.worker.step for outcome in outcomes] == [4, 4, 4]
    assert [(len(outcome.reports), outcome.reports[-1].finished) for outcome in outcomes] == [(1, False)] * 3
    assert all(torch.equal(outcome.parameters, outcomes[0].parameters) for outcome in outcomes)
    assert outcomes[0].reports[-1].test_samples == SAMPLES  # the end is evaluated


@pytest.mark.parametrize(
    "ends", [EndsAt(epoch=0), EndsAt(step=STEPS), EndsAt(step=STEPS - 1)], ids=["epoch", "last", "last but one"]
)
def test_at_the_end_of_an_epoch_the_run_ends_with_it(ends: EndsAt) -> None:
    outcomes = succeeded(train(Regression(), epochs=5, callbacks=[[ends], []]))
    assert [(outcome.worker.step, outcome.reports[-1].finished) for outcome in outcomes] == [(STEPS, True)] * 2


@pytest.mark.parametrize("step", [STEPS, STEPS - 1], ids=["last", "last but one"])
def test_a_step_that_is_applied_when_the_epoch_ends_may_end_the_run_too(step: int) -> None:
    outcomes = succeeded(train(Regression(), epochs=5, delay_steps=1, callbacks=[[EndsAt(step=step)], []]))
    assert [(outcome.worker.step, outcome.reports[-1].finished) for outcome in outcomes] == [(STEPS, True)] * 2


def test_a_step_that_is_applied_before_a_checkpoint_may_end_the_run_too(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"delay_steps": 1, "checkpoint__every_steps": 2, "checkpoint__dir": tmp_path}
    outcomes = succeeded(train(Regression(), epochs=5, callbacks=[[EndsAt(step=2)], []], **settings))
    assert [outcome.worker.step for outcome in outcomes] == [4, 4]  # the vote of step 3, counted one step later


def test_an_exception_in_a_callback_ends_the_rank_with_its_name() -> None:
    failed, other = train(Regression(), callbacks=[[Broken()], []])
    assert isinstance(failed.error, CallbackFailed)
    assert "test_callbacks:Broken: on_epoch raised KeyError: 'no such column'" in str(failed.error)
    assert isinstance(failed.error.__cause__, KeyError)
    assert other.error is not None


class Returns:
    """Returns the same after each step."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def on_step(self, report: Any) -> Any:
        return self._value


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True)], ids=["bool", "numpy", "tensor"])
def test_true_of_numpy_and_torch_counts(value: Any) -> None:
    assert len(Callbacks("parallel", [Returns(value)], []).call("on_step", None)) == 1


@pytest.mark.parametrize(
    "value", [None, False, np.False_, torch.tensor(False)], ids=["None", "bool", "numpy", "tensor"]
)
def test_false_and_none_let_the_run_go_on(value: Any) -> None:
    assert Callbacks("parallel", [Returns(value)], []).call("on_step", None) == []


@pytest.mark.parametrize("value", [1, "stop", torch.tensor([True, False]), np.array(1.0)], ids=str)
def test_what_is_neither_true_nor_false_is_an_error_of_the_callback(value: Any) -> None:
    with pytest.raises(
        CallbackFailed, match=r"on_step raised TypeError: it returned a .*, expected True to end the run"
    ):
        Callbacks("parallel", [Returns(value)], []).call("on_step", None)


def test_callbacks_are_named_by_the_configuration() -> None:
    Follower.made.clear()
    config = DataParallelConfig(callbacks=(f"{__name__}:Follower",))
    succeeded(train(Regression(), world=1, configs=[config]))
    (made,) = Follower.made
    assert made.calls[-1][0] == "end"


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("antigravit:Callback", "there is no module 'antigravit'"),
        (f"{__name__}:Folower", "did you mean 'Follower'?"),
        (f"{__name__}:Regression", "expected an object with some of on_step, on_evaluation, on_epoch, on_end"),
        ("gradbus.models:Metric", "It is made without arguments"),
    ],
)
def test_what_is_no_callback_is_refused(spec: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Callbacks("parallel", [], [spec])
    assert text in str(caught.value)


def test_metrics_are_those_of_all_samples_whatever_the_ranks_have_of_them() -> None:
    two, one = (succeeded(train(WithMetrics(), world=world, epochs=1)) for world in (2, 1))
    report = two[0].reports[-1]
    model = two[0].worker.model
    with torch.no_grad():
        errors = (model(INPUTS) - TARGETS).square()
    assert report.accuracy is None
    assert report.metrics.keys() == {"rmse", "share", "worst"}
    assert report.metrics["rmse"] == pytest.approx(float(errors.mean().sqrt()), rel=1e-6)
    assert report.metrics["share"] == pytest.approx(float((errors < 0.1).float().mean()))
    assert report.metrics["worst"] == pytest.approx(float(errors.max()))
    assert report.eval_loss == pytest.approx(float(errors.mean()), rel=1e-6)
    assert report.train_metrics["seen"] == SAMPLES
    assert report.train_metrics["squares"] == pytest.approx(report.loss, rel=1e-6)
    assert report.train_metrics == pytest.approx(one[0].reports[-1].train_metrics, rel=1e-5)
    assert [outcome.reports[-1].metrics for outcome in two] == [report.metrics] * 2


def test_accuracy_is_that_of_a_task_that_counts_right_answers() -> None:
    (outcome,) = succeeded(train(make_task(), world=1, epochs=1))
    assert outcome.reports[-1].accuracy is not None
    assert outcome.reports[-1].metrics == {}


def test_a_mean_without_its_count_is_refused_with_the_reason() -> None:
    (outcome,) = train(WithMeans(), world=1)
    assert isinstance(outcome.error, ValueError)
    assert "metric 'mae' is a float, expected gradbus.models.Metric" in str(outcome.error)


def test_sums_are_combined_and_not_means() -> None:
    first, second = MetricSums(), MetricSums()
    first.add({"mean": (1.0, 1), "root": Metric(9.0, 1, "root_mean"), "most": Metric(2.0, kind="max")}, "it")
    most = Metric(torch.tensor(5), kind="max")
    second.add({"mean": (1.0, 3), "root": Metric(7.0, 3, "root_mean"), "most": most}, "it")
    expected = {"mean": 0.5, "most": 5.0, "root": 2.0}
    assert combined([first.plain(), second.plain()]) == expected
    both = first.merged(second)
    assert combined([MetricSums(both.plain()).plain()]) == expected
    assert combined([{}, {"mean": ("mean", 0.0, 0.0)}])["mean"] != 0  # of nothing there is no mean


@pytest.mark.parametrize(
    ("reports", "text"),
    [
        ([{"x": Metric(1.0)}, {"x": Metric(1.0, kind="sum")}], "as sum, and as mean before"),
        ([{"": (1, 1)}], "names of metrics"),
        ([{"x" * 65: (1, 1)}], "names of metrics"),
        ([{f"m{number}": (1, 1)} for number in range(MAX_METRICS + 1)], "more than 64 metrics"),
        ([{"x": Metric(1.0, kind="median")}], "expected gradbus.models.Metric"),  # type: ignore[arg-type]
    ],
)
def test_metrics_that_cannot_be_combined_are_errors(reports: list[Any], text: str) -> None:
    sums, (*before, wrong) = MetricSums(), reports
    for report in before:
        sums.add(report, "the task")
    with pytest.raises(ValueError, match=text):
        sums.add(wrong, "the task")
