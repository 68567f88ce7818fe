"""Clients that have nothing to train in a round, with secure aggregation: the others count, and no sum is of fewer than
may be known."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from secure_runs import Moving, Observer, Run, plain_weights, replace_masking
from structlog.testing import capture_logs

import gradbus
from gradbus.actors.federated.client.client import Client
from gradbus.actors.federated.client.update_masks import ClientMasking
from gradbus.actors.federated.protocol import SAT_OUT
from gradbus.models.task import TrainResult
from gradbus.runtime.errors import RoundTimeout
from gradbus.runtime.wire.control import MaskRoster, MaskSurvivors, TrainingFailure
from gradbus.runtime.wire.messages import Control


class Sometimes(Moving):
    """Has data in some rounds only. ``without``: rounds by client; ``after_s``: how long that takes to find out."""

    def __init__(self, without: Mapping[int, Collection[int]], after_s: float) -> None:
        super().__init__()
        self._without, self._after_s = without, after_s

    def train(self, model: Any, **arguments: Any) -> TrainResult:
        if arguments["round_id"] in self._without.get(arguments["client_id"], ()):
            time.sleep(self._after_s)
            return TrainResult.nothing()
        time.sleep(0.2)
        return super().train(model, **arguments)


SLOW = pytest.mark.parametrize("after_s", [0.0, 0.5], ids=["at once", "after the shares"])


def run(count: int, without: Mapping[int, Collection[int]], after_s: float = 0.0, **settings: Any) -> Run:
    job = Run(range(count), **settings)
    job.task = Sometimes(without, after_s)
    return job


def finished(job: Run) -> tuple[gradbus.Controller, list[Any]]:
    with capture_logs() as logs:
        controller = job()
    return controller, [one for one in logs if one["log_level"] in ("warning", "error")]


def played(
    job: Run, task: Any, masking: type[ClientMasking], on_failure: Callable[[int], object]
) -> tuple[gradbus.RoundReport, gradbus.Controller]:
    """Run a round in which client 0 has this masking. ``on_failure`` gets the id of each client that has nothing to
    train, as soon as it has said so."""

    def make_client(bus: Any, task: Any, *, client_id: int, config: Any) -> Client:
        client = Client(bus, task, client_id=client_id, config=config)
        if client_id == 0:
            replace_masking(client, masking)
        return client

    def observe(_: Any, message: Control) -> None:
        if isinstance(message.body, TrainingFailure):
            on_failure(message.sender)

    job.task, job.make_client = task, make_client
    Observer(job, observe)
    controller, _ = finished(job)
    (report,) = controller.progress.reports
    return report, controller


@SLOW
def test_where_enough_have_something_to_train_the_sum_is_theirs(after_s: float) -> None:
    job = run(4, {3: {1}}, after_s, rounds=2, limits={"cap_samples": None})
    controller, warned = finished(job)
    first, second = controller.progress.reports
    assert [(one.clients, one.attempt) for one in (first, second)] == [((0, 1, 2), 1), ((0, 1, 2, 3), 1)]
    assert (first.dropped[SAT_OUT], first.strikes, first.outcome) == (1, (), "all live clients answered")
    assert not warned


@SLOW
def test_where_more_sit_out_than_the_threshold_allows_the_others_have_a_roster_of_their_own(after_s: float) -> None:
    job = run(5, {3: {1}, 4: {1}}, after_s, round={"max_attempts": 1})
    controller, _ = finished(job)
    (report,) = controller.progress.reports
    assert report.clients == (0, 1, 2)
    assert report.dropped[SAT_OUT] == 2
    assert torch.equal(controller.weights, plain_weights(3))
    assert report.attempt <= 2, "the second one has no other reason, and does not count for max_attempts"
    assert sorted(job.task.trained) == [(0, 1), (1, 1), (2, 1)], "nobody trains twice for a round"


@SLOW
def test_where_all_sit_out_the_round_is_committed_with_the_same_model_and_nothing_is_unmasked(after_s: float) -> None:
    job = run(3, {one: {1} for one in range(3)}, after_s, rounds=2)
    observer = Observer(job)
    controller, warned = finished(job)
    first, second = controller.progress.reports
    assert (first.clients, first.outcome, first.attempt) == ((), "no client had anything to train", 1)
    assert (second.clients, second.attempt) == ((0, 1, 2), 1)
    assert {body.round_id for _, body in observer.all(MaskSurvivors)} == {2}
    assert not warned


@SLOW
def test_one_client_that_has_something_is_not_shown_by_itself(after_s: float) -> None:
    job = run(4, {one: {1} for one in range(3)}, after_s, secure_aggregation={"keys_timeout_s": 2.0})
    observer = Observer(job)
    began_s = time.monotonic()
    with pytest.raises(RoundTimeout, match="clients 0, 1, 2 had nothing to train"):
        job()
    assert time.monotonic() - began_s < 10.0, "the deadline of the round is not waited for"
    assert not observer.all(MaskSurvivors)


def test_who_sits_out_after_it_has_shared_helps_to_unmask_where_another_one_drops_out() -> None:
    class Waiting(ClientMasking):
        """Shares once it is known that client 3 sits out: before that nobody gets the shares of the others."""

        def on_request(self, request: Any, *arguments: Any) -> None:
            if has_sat_out or not isinstance(request, MaskRoster):
                super().on_request(request, *arguments)

    has_sat_out: list[int] = []
    job = Run(range(4), quits={2: 3}, secure_aggregation={"unmask_timeout_s": 3.0})
    report, controller = played(job, Sometimes({3: {1}}, 0.5), Waiting, has_sat_out.append)
    assert set(has_sat_out) == {3}
    assert (report.clients, report.attempt) == ((0, 1, 2), 1)
    assert torch.equal(controller.weights, plain_weights(3))


def test_those_that_sat_out_are_asked_again_in_the_next_round() -> None:
    job = run(5, {3: {1}, 4: {1}}, 0.5, rounds=2)
    observer = Observer(job)
    controller, _ = finished(job)
    assert [one.clients for one in controller.progress.reports] == [(0, 1, 2), (0, 1, 2, 3, 4)]
    members = [(body.round_id, body.attempt, len(body.members) // 100) for _, body in observer.all(MaskRoster)]
    assert {each[2] for each in members if each[0] == 1} == {5, 3}
    assert {each[2] for each in members if each[0] == 2} == {5}


def test_clients_that_say_one_after_the_other_that_they_have_nothing_have_all_sat_out() -> None:
    class Silent(ClientMasking):
        """Gives no shares, as where its client has said before that it has nothing."""

        def on_request(self, request: Any, *arguments: Any) -> None:
            pass

    class OneAfterTheOther(Sometimes):
        def train(self, model: Any, **arguments: Any) -> TrainResult:
            if arguments["client_id"] == 1:
                first_is_out.wait(30.0)
                time.sleep(0.5)  # by now the controller has found that too few are left
            return super().train(model, **arguments)

    first_is_out = threading.Event()
    task = OneAfterTheOther({0: {1}, 1: {1}}, 0.0)
    report, _ = played(Run(range(2)), task, Silent, lambda _: first_is_out.set())
    assert (report.clients, report.outcome, report.attempt) == ((), "no client had anything to train", 1)
