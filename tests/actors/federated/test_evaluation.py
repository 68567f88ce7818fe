"""Evaluation by clients as pure objects: who is awaited, and what the results say together."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from structlog.testing import capture_logs

from gradbus.actors.federated.controller.early_stop import EarlyStop
from gradbus.actors.federated.controller.evaluation import (
    LATE,
    LOST,
    MAX_REASONS,
    NO_SAMPLES,
    OTHERS,
    ClientEvaluation,
    CrossSite,
    CrossSiteRow,
    OpenEvaluation,
)
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.runtime.callbacks import Callbacks
from gradbus.runtime.config.federated import EarlyStopSettings, FederatedConfig, LimitSettings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.wire.control import EvaluationResult


def result(num_samples: int = 10, round_id: int = 3, failure: str = "", **metrics: float) -> EvaluationResult:
    return EvaluationResult(7, round_id, num_samples, metrics, failure, 0.1)


def opened(*asked: int, **options: Any) -> OpenEvaluation:
    return OpenEvaluation(3, asked, **{"now_s": 100.0, "timeout_s": 10.0, **options})


def summary(found: OpenEvaluation, **limits: Any) -> ClientEvaluation:
    return found.summary(LimitSettings(**limits), ["accuracy"], now_s=102.0)


def test_the_mean_is_weighted_by_samples_and_the_spread_is_over_clients() -> None:
    found, losses, samples = opened(0, 1, 2), [0.5, 2.0, 1.25], [30, 10, 20]
    for client_id in (2, 0, 1):
        assert found.add(client_id, result(samples[client_id], loss=losses[client_id], accuracy=client_id / 4))
    said = summary(found)
    loss = said.metrics["loss"]
    assert loss.mean == pytest.approx(np.average(losses, weights=samples), abs=1e-12)
    assert loss.std == pytest.approx(np.std(losses), abs=1e-12)
    assert (loss.min, loss.max, loss.clients) == (0.5, 2.0, 3)
    assert loss.worst == ((1, 2.0), (2, 1.25), (0, 0.5)), "of a loss the largest is the worst"
    assert said.metrics["accuracy"].worst == ((0, 0.0), (1, 0.25), (2, 0.5)), "of an accuracy the smallest"
    assert (said.asked, said.answered, said.num_samples, said.seconds) == (3, 3, 60, 2.0)


def test_it_is_over_when_all_have_answered_or_at_the_deadline() -> None:
    found = opened(0, 1)
    found.add(0, result(loss=1.0))
    assert not found.is_over(109.9)
    assert found.is_over(110.0)
    found.add(1, result(failure="no data"))
    assert found.is_over(100.1)


def test_results_that_are_missing_are_counted_by_reason() -> None:
    found = opened(0, 1, 2, 3, 4)
    found.add(0, result(loss=1.0))
    assert found.follow_clients({0, 2, 3, 4}) == [1]
    found.add(2, result(failure="no data"))
    found.add(3, result(0, loss=1.0))
    found.close()
    said = summary(found)
    assert (said.asked, said.answered) == (5, 1)
    assert said.missing == {LOST: 1, "no data": 1, NO_SAMPLES: 1, LATE: 1}


def test_the_result_of_a_client_that_was_taken_for_lost_counts_if_it_comes() -> None:
    found = opened(0, 1)
    found.follow_clients({1})
    assert found.open == {1}
    assert found.add(0, result(loss=1.0))
    assert set(found.results) == {0}


def test_only_the_first_result_of_a_client_that_was_asked_counts() -> None:
    found = opened(0)
    assert not found.add(5, result(loss=9.0))
    assert not found.add(0, result(round_id=2, loss=9.0))
    assert found.add(0, result(loss=1.0))
    assert not found.add(0, result(loss=9.0))
    assert found.results[0].metrics == {"loss": 1.0}


def test_a_client_counts_as_so_many_samples_as_the_limits_say() -> None:
    def mean(**limits: Any) -> float:
        found = opened(0, 1, 2)
        for client_id, num_samples in enumerate((10, 10, 1 << 30)):
            found.add(client_id, result(num_samples, loss=float(client_id == 2)))
        return summary(found, **limits).metrics["loss"].mean

    assert mean(trust="adversarial") == pytest.approx(40 / 60)  # four times the median
    assert mean(cap_samples=10, trust="adversarial") == mean(cap_samples=10) == pytest.approx(1 / 3)
    assert mean() == pytest.approx(1.0, abs=1e-6)


def test_more_samples_than_any_client_has_are_no_result() -> None:
    found = opened(0, max_samples=100)
    found.add(0, result(101, loss=1.0))
    assert found.failures == {0: NO_SAMPLES}


def test_what_clients_make_up_is_bounded() -> None:
    found = opened(*range(40))
    for client_id in range(40):
        own = {f"metric-{client_id}-{number}": 1.0 for number in range(30)}
        found.add(client_id, result(**own, loss=1.0) if client_id < 20 else result(failure=f"reason {client_id}" * 25))
    said = summary(found)
    assert len(said.metrics) == 32
    assert said.metrics["loss"].clients == 20
    assert len(said.missing) == MAX_REASONS + 1
    assert sum(said.missing.values()) == 20
    assert said.missing[OTHERS] == 20 - MAX_REASONS


def test_no_number_is_so_large_that_the_others_are_lost() -> None:
    found = opened(0, 1, 2)
    for client_id, loss in enumerate((1.0, 1e308, 3.0)):
        found.add(client_id, result(loss=loss))
    loss = summary(found).metrics["loss"]
    assert (loss.mean, loss.clients) == (2.0, 2)
    assert math.isfinite(loss.std)


def test_the_numbers_do_not_depend_on_the_order_of_arrival() -> None:
    values = [0.1 * number + 1e-17 for number in range(9)]

    def said(order: list[int]) -> ClientEvaluation:
        found = opened(*range(9))
        for client_id in order:
            found.add(client_id, result(1 + client_id, loss=values[client_id]))
        return summary(found)

    assert said(list(range(9))) == said([4, 2, 8, 0, 1, 7, 3, 6, 5])


def test_a_report_comes_back_from_its_line_in_a_file() -> None:
    found = opened(0, 1)
    found.add(0, result(loss=1.0))
    found.close()
    report = RoundReport(round_id=3, clients=(0, 1), by_clients=summary(found))
    line = json.loads(json.dumps(report.to_json()))
    assert RoundReport.from_json(line) == report
    assert TypeAdapter(RoundReport).validate_python({**line, "timeline": []}) == report
    assert report.without_clients().by_clients.metrics["loss"].worst == ()
    assert RoundReport(round_id=1).to_json()["by_clients"] == {}
    assert RoundReport.from_json({"round_id": 1}).by_clients.asked == 0


def evaluated(round_id: int, *losses: float) -> RoundReport:
    found = opened(*range(len(losses)))
    for client_id, loss in enumerate(losses):
        found.add(client_id, result(loss=loss))
    return RoundReport(round_id=round_id, eval_loss=1.0, by_clients=summary(found))


def test_a_run_may_end_by_what_its_worst_client_finds() -> None:
    stop = EarlyStop(EarlyStopSettings(patience=2, metric="client.loss.max"), Callbacks("federated", [], []))
    for number, losses in enumerate([(1.0, 3.0), (0.5, 3.0), (0.25, 3.5)], start=1):
        assert not stop.reason
        stop.note(evaluated(number, *losses))
    assert stop.reason == "client.loss.max is no better than in round 1 after 2 evaluations"


def test_an_evaluation_without_any_result_is_none_to_early_stop() -> None:
    stop = EarlyStop(EarlyStopSettings(patience=1, metric="client.loss"), Callbacks("federated", [], []))
    for number in range(1, 5):
        stop.note(evaluated(number))
    assert not stop.reason


def test_a_round_that_is_evaluated_twice_after_a_resume_counts_once() -> None:
    stop = EarlyStop(EarlyStopSettings(patience=2, metric="client.loss"), Callbacks("federated", [], []))
    for _ in range(5):
        stop.note(evaluated(1, 1.0))
    assert not stop.reason


def test_a_metric_that_clients_do_not_find_is_named_with_those_that_they_do() -> None:
    stop = EarlyStop(EarlyStopSettings(patience=1, metric="client.rmse"), Callbacks("federated", [], []))
    with capture_logs() as entries:
        for number in range(1, 4):
            stop.note(evaluated(number, 1.0))
    assert not stop.reason
    said = str(entries)
    assert "client.rmse" in said
    assert "client.loss.median" in said


def test_losses_that_are_not_there_as_the_model_diverges_end_no_run() -> None:
    stop = EarlyStop(EarlyStopSettings(patience=2, metric="client.loss"), Callbacks("federated", [], []))
    stop.note(evaluated(1, 1.0))
    for number in range(2, 6):
        found = opened(0)
        found.add(0, result(accuracy=0.1))  # its loss was not finite
        stop.note(RoundReport(round_id=number, by_clients=summary(found)))
    assert not stop.reason


def test_a_metric_that_too_few_clients_have_found_decides_nothing() -> None:
    stop = EarlyStop(
        EarlyStopSettings(patience=1, metric="client.loss"), Callbacks("federated", [], []), least_answered=0.5
    )

    def round_of(number: int, *losses: float) -> RoundReport:
        found = opened(*range(4))
        for client_id, loss in enumerate(losses):
            found.add(client_id, result(loss=loss))
        return RoundReport(round_id=number, by_clients=summary(found))

    stop.note(round_of(1, 1.0, 1.0, 1.0))
    stop.note(round_of(2, 9.0))
    assert not stop.reason
    stop.note(round_of(3, 0.5, 0.5))
    assert stop.best_round == 3


def test_one_client_does_not_move_the_median() -> None:
    found = opened(0, 1, 2)
    for client_id, loss in enumerate((1.0, -1e29, 3.0)):
        found.add(client_id, result(loss=loss))
    named = summary(found).named()
    assert named["client.loss.median"] == 1.0
    assert named["client.loss"] < -1e28


def test_a_client_cannot_give_a_number_the_name_of_another() -> None:
    found = opened(0, 1)
    found.add(0, result(**{"loss.max": -5.0, "loss.median": -5.0, "loss": 1.0}))
    found.add(1, result(loss=2.0))
    named = summary(found).named()
    assert (named["client.loss.max"], named["client.loss.median"]) == (2.0, 1.5)


def test_names_that_one_client_makes_up_hide_none_of_the_others() -> None:
    junk = {f"junk-{number}": 1.0 for number in range(32)}
    row = CrossSiteRow(model=None, results={0: junk, 1: {"loss": 1.0}, 2: {"loss": 2.0}})
    assert "loss" in CrossSite(round_id=3, clients=(0, 1, 2), rows=(row,)).names()


def test_results_of_many_clients_take_time_by_their_number() -> None:
    many = 20_000
    found, one = opened(*range(many)), result(loss=1.0)
    looks = 0

    class Looked(set[int]):
        def __iter__(self) -> Any:  # a walk over all who are awaited
            nonlocal looks
            looks += 1
            return super().__iter__()

    found.open = Looked(found.open)
    for client_id in range(many):
        assert found.add(client_id, one)
        assert found.is_over(100.1) is (client_id == many - 1)
    assert looks == 0
    assert len(found.results) == many


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"early_stop": {"patience": 1, "metric": "client.loss"}}, "set evaluation.every"),
        ({"checkpoint": {"keep_best": "client.loss"}}, "set evaluation.every"),
        ({"checkpoint": {"keep_best": "accuracy"}, "eval_every": 0}, "set eval_every"),
        ({"evaluation": {"fraction": 0.5, "count": 3}}, "give fraction or count"),
        ({"training": {"steps": 5, "rule": {"name": "ditto", "own_epochs": 2}}}, "own_epochs and steps"),
    ],
)
def test_settings_that_need_an_evaluation_that_never_is_are_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FederatedConfig(**changed)
