"""A run that ends before its last round: by patience, or by a callback."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from gradbus.actors.federated.controller.combinations import check_choices
from gradbus.actors.federated.controller.early_stop import EarlyStop
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.actors.virtual.simulation import choices_of
from gradbus.runtime.callbacks import Callbacks
from gradbus.runtime.config.federated import EarlyStopSettings, FederatedConfig
from gradbus.runtime.errors import ConfigError

NONE = Callbacks("federated", [], [])


def reports_of(*losses: float | None, metric: str = "") -> list[RoundReport]:
    return [
        RoundReport(round_id=number, eval_loss=loss, metrics={metric: loss} if metric and loss is not None else {})
        for number, loss in enumerate(losses, 1)
    ]


def ends_after(settings: EarlyStopSettings, *losses: float | None, metric: str = "") -> int | None:
    stop = EarlyStop(settings, NONE)
    for report in reports_of(*losses, metric=metric):
        stop.note_round(report)
        if stop.reason:
            return report.round_id
    return None


def test_a_run_ends_after_so_many_evaluations_that_were_no_better() -> None:
    assert ends_after(EarlyStopSettings(patience=2), 3.0, 2.0, 2.5, 1.9, 2.0, 1.9, 0.0) == 6
    assert ends_after(EarlyStopSettings(patience=2), 3.0, None, None, None, 2.0) is None  # not evaluated
    assert ends_after(EarlyStopSettings(patience=2, min_delta=0.2), 3.0, 2.9, 2.85, 0.0) == 3
    assert ends_after(EarlyStopSettings(patience=1), 3.0, math.nan) == 2
    assert ends_after(EarlyStopSettings(patience=2), math.nan, 3.0, 2.0, 1.0) is None  # each is better than none
    assert ends_after(EarlyStopSettings(patience=1, mode="max"), 3.0, math.inf) == 2
    assert ends_after(EarlyStopSettings(), 1.0, 2.0, 3.0) is None


def test_a_run_without_any_finite_evaluation_ends_and_says_so() -> None:
    stop = EarlyStop(EarlyStopSettings(patience=2), NONE)
    for report in reports_of(math.nan, -math.inf):
        stop.note_round(report)
    assert stop.reason == "eval_loss was not finite in 2 evaluations"


def test_any_metric_of_the_evaluation_may_decide_and_may_be_one_that_grows() -> None:
    assert ends_after(EarlyStopSettings(patience=1, metric="f1", mode="max"), 0.1, 0.2, 0.15, metric="f1") == 3


def check_modes_of(evaluation: dict[str, Any], rules: dict[str, Any]) -> None:
    check_choices(FederatedConfig(evaluation=evaluation, **rules))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rules", "key"),
    [
        ({"early_stop": {"patience": 1, "metric": "accuracy", "mode": "min"}}, "early_stop.mode"),
        ({"checkpoint": {"keep_best": "client.auc.median", "best_mode": "min"}}, "checkpoint.best_mode"),
    ],
)
def test_small_values_of_a_metric_of_which_large_ones_are_good_are_refused_as_what_to_look_for(
    rules: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"{key} is min.*evaluation.maximize"):
        check_modes_of({"every": 1}, rules)
    check_modes_of({"every": 1, "maximize": []}, rules)


def test_a_metric_that_there_is_not_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no 'accuracy'; it has eval_loss, f1"):
        ends_after(EarlyStopSettings(patience=1, metric="accuracy"), 0.5, metric="f1")


def test_a_resumed_run_remembers_what_it_waited_for() -> None:
    history = reports_of(1.0, 2.0, 3.0)
    assert not EarlyStop(EarlyStopSettings(patience=3), NONE, history).reason
    again = EarlyStop(EarlyStopSettings(patience=2), NONE, history)
    assert again.reason
    assert again.best_round == 1


def test_a_metric_that_evaluations_before_a_resume_lack_is_refused_with_what_has_changed_and_what_to_do() -> None:
    history = reports_of(None, 2.0, 1.0, metric="f1")
    with pytest.raises(ConfigError) as error:
        EarlyStop(EarlyStopSettings(patience=2, metric="f11"), NONE, history)
    assert str(error.value) == (
        "federated.early_stop.metric: the evaluation of round 2, before the run was resumed, has no 'f11': the setting "
        "has changed since, or what the task evaluates. Name a metric that it has, set federated.early_stop.patience "
        "to null, or begin a new run in another federated.checkpoint.dir; it has eval_loss, f1. Did you mean f1?"
    )


def test_the_last_round_before_a_resume_counts_when_it_is_evaluated_after_it() -> None:
    *before, last = reports_of(1.0, 2.0, 3.0)
    resumed = EarlyStop(EarlyStopSettings(patience=2), NONE, [*before, dataclasses.replace(last, eval_loss=None)])
    assert not resumed.reason
    resumed.note(last)
    assert resumed.reason


def test_a_callback_sees_rounds_and_reports_and_may_end_the_run() -> None:
    class Watching:
        def __init__(self) -> None:
            self.seen: list[object] = []

        def on_round(self, round_id: int) -> None:
            self.seen.append(round_id)

        def on_report(self, report: RoundReport) -> bool:
            self.seen.append(report.eval_loss)
            return report.round_id == 2

    watching = Watching()
    stop = EarlyStop(EarlyStopSettings(), Callbacks("federated", [watching], []))
    for report in reports_of(3.0, 2.0):
        assert stop.call_on_round(report.round_id)
        stop.note_round(report)
    assert not stop.call_on_round(3)
    stop.call_on_end([])
    assert watching.seen == [1, 3.0, 2, 2.0]
    assert "Watching.on_report" in stop.reason


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected an object with some of on_round"):
        Callbacks("federated", [object()], [])
    with pytest.raises(ConfigError, match="set eval_every"):
        FederatedConfig(eval_every=0, early_stop={"patience": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("without", "key", "off"),
    [
        ({"early_stop": {"metric": "client.loss"}}, "patience", None),
        ({"early_stop": {"mode": "max"}}, "patience", None),
        ({"early_stop": {"min_delta": 0.1}}, "patience", None),
        ({"checkpoint": {"best_mode": "max"}}, "keep_best", None),
        ({"evaluation": {"count": 3}}, "every", 0),
        ({"evaluation": {"fraction": 0.5}}, "every", 0),
        ({"evaluation": {"least_answered": 0.1}}, "every", 0),
    ],
)
def test_a_setting_without_the_one_that_gives_it_an_effect_is_refused_unless_that_is_switched_off_by_name(
    without: dict[str, dict[str, Any]], key: str, off: Any
) -> None:
    ((group, given),) = without.items()
    (name,) = given
    with pytest.raises(ConfigError, match=f"{group}: {name} has no effect without {key}: set {key}, too"):
        FederatedConfig(**without)  # type: ignore[arg-type]
    default = type(getattr(FederatedConfig(), group)).model_fields[name].default
    FederatedConfig(**{group: {name: default}})  # type: ignore[arg-type]  # asks for nothing
    written = FederatedConfig(**{group: {key: off, **given}})  # type: ignore[arg-type]
    assert choices_of(written, 3, None).config.replaced("clients.num", None) == written
    assert FederatedConfig(**written.model_dump(mode="json")) == written
