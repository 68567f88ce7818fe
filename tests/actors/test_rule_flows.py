"""Sections, rules and settings of a round over real DDS, with all actors on one loop."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from dds_domains import new_domain
from torch import nn

import gradbus
from gradbus import codecs
from gradbus.actors.federated.client.client_optimizer import split_terms
from gradbus.actors.federated.client.local_training import LocalTraining
from gradbus.actors.federated.client.rules.base import RoundEnd
from gradbus.actors.federated.client.rules.scaffold import ControlVariates
from gradbus.models.task import EvalResult, TrainResult
from gradbus.runtime.errors import ConfigError

LR, STEPS, WIDTH = 0.05, 3, 3
_jobs = itertools.count()


class Quadratic:
    """``||w - target||^2 / 2``, with another target at each client, by gradient descent."""

    def __init__(self, target: float = 0.0) -> None:
        self.target = target

    def build_model(self) -> nn.Module:
        model = nn.Linear(WIDTH, 1, bias=False)
        nn.init.ones_(model.weight)
        return model

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def train(self, model: Any, *, lr: float, epochs: int, steps: int = 0, **_: Any) -> TrainResult:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for _step in range(steps or STEPS * epochs):
            optimizer.zero_grad()
            loss = 0.5 * (model.weight - self.target).square().sum()
            loss.backward()
            optimizer.step()
        return TrainResult(1, float(loss.detach()))

    def evaluate(self, model: Any) -> EvalResult:
        return EvalResult(None, float(model.weight.detach().square().sum()), 1)


def run(
    config: gradbus.FederatedConfig, targets: Sequence[float], *, at_end: list[float] | None = None
) -> tuple[torch.Tensor, list[gradbus.RoundReport]]:
    """A whole run. ``at_end`` gets of each client by how much it has ended after the newest report."""
    job, domain = f"rules-{os.getpid()}-{next(_jobs)}", new_domain()
    config = config.replaced("clients.dead_after_s", 30.0)

    reported_s: list[float] = []

    async def one(client_id: int, task: Any) -> None:
        async with gradbus.connect(job=job, domain=domain) as bus:
            await gradbus.Client(bus, task, client_id=client_id).run()
            if at_end is not None:
                at_end.append(time.monotonic() - reported_s[-1])

    async def main() -> tuple[torch.Tensor, list[gradbus.RoundReport]]:
        async with asyncio.timeout(60), gradbus.connect(job=job, domain=domain) as bus, asyncio.TaskGroup() as group:
            controller = gradbus.Controller(bus, Quadratic(), config)
            for client_id, target in enumerate(targets):
                group.create_task(one(client_id, Quadratic(target)))
            reports = []
            async for report in controller.rounds():
                reports.append(report)
                reported_s.append(time.monotonic())
        return controller.weights.clone(), reports

    return asyncio.run(main())


@pytest.mark.parametrize(("codec", "error"), [("fp32", 1e-5), ("q8", 1e-2), ("q4", 1e-2)])
def test_scaffold_runs_with_its_control_variates_up_and_down(codec: str, error: float) -> None:
    targets = (2.0, -1.0)
    config = gradbus.FederatedConfig(
        rounds=3,
        clients={"num": 2, "min": 2},
        strategy="scaffold",
        training={"lr": LR, "rule": "scaffold"},
        section_codec=codec,
    )
    found, reports = run(config, targets)
    w, c, own = 1.0, 0.0, [0.0, 0.0]
    for _ in range(3):
        moves, changes = [], []
        for i, target in enumerate(targets):
            y = w
            for _step in range(STEPS):
                y -= LR * (y - target - own[i] + c)
            change = (w - y) / (STEPS * LR) - c
            moves.append(y - w)
            changes.append(change)
            own[i] += change
        w, c = w + sum(moves) / 2, c + sum(changes) / 2
    np.testing.assert_allclose(found.numpy(), np.full(WIDTH, w), atol=error)
    assert [report.clients for report in reports] == [(0, 1)] * 3


def test_settings_of_a_round_reach_the_clients_with_its_command() -> None:
    changes = {2: {"epochs": 2, "mu": 0.0}, 3: {"lr": 0.1}, 4: {"steps": 1}, 6: {"epochs": 1}}
    config = gradbus.FederatedConfig(
        rounds=6,
        clients={"num": 1},
        training={"lr": LR, "rule": {"name": "fedprox", "mu": 1.0}, "from_round": changes},
    )
    found, _ = run(config, [2.0])
    w = 1.0
    for lr, steps, mu in (
        (LR, STEPS, 1.0),
        (LR, 2 * STEPS, 0.0),
        (0.1, 2 * STEPS, 0.0),
        (0.1, 1, 0.0),
        (0.1, 1, 0.0),
        (0.1, STEPS, 0.0),
    ):
        y = w
        for _step in range(steps):
            y -= lr * (y - 2.0 + mu * (y - w))
        w = y
    np.testing.assert_allclose(found.numpy(), np.full(WIDTH, w), atol=1e-5)


def test_epochs_of_a_later_round_are_in_place_of_steps() -> None:
    config = gradbus.FederatedConfig(
        rounds=2, clients={"num": 1}, training={"lr": LR, "steps": 1, "from_round": {2: {"epochs": 1}}}
    )
    found, _ = run(config, [2.0])
    np.testing.assert_allclose(found.numpy(), np.full(WIDTH, 2 - (1 - LR) ** (1 + STEPS)), atol=1e-5)


def test_the_density_of_a_round_is_that_of_the_updates() -> None:
    config = gradbus.FederatedConfig(
        rounds=3,
        clients={"num": 1},
        codec={"name": "s4", "density": 0.3},
        training={"lr": LR, "from_round": {2: {"density": 1.0}, 3: {"density": 0.5}}},
    )
    _, reports = run(config, [2.0])
    codec = codecs.get("s4", density=1.0)
    few, all_of_them, some = (report.bytes_up for report in reports)
    assert few < some < all_of_them <= codec.max_bytes(WIDTH)


def test_a_run_without_accuracy_ends_early_and_its_clients_end_at_once() -> None:
    config = gradbus.FederatedConfig(
        rounds=1000, clients={"num": 2}, training={"lr": LR}, early_stop={"patience": 2, "min_delta": 100.0}
    )
    ended_s: list[float] = []
    _, reports = run(config, [1.0, 2.0], at_end=ended_s)
    assert [report.round_id for report in reports] == [1, 2, 3]
    assert {report.accuracy for report in reports} == {None}
    assert len(ended_s) == 2
    assert max(ended_s) < 2.0


def test_clients_whose_sections_are_not_those_of_the_strategy_or_whose_steps_cannot_be_are_struck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = ControlVariates.finish

    def finish(self: ControlVariates, local: torch.Tensor) -> RoundEnd:
        end, about = honest(self, local), round(float(local[0]) / 10)
        if about == 4:
            self.steps = 1_000_000
        sections = {
            1: {},
            2: {"control": torch.zeros(WIDTH + 1)},
            3: {**end.sections, "another": torch.zeros(WIDTH)},
            5: {"another": torch.zeros(WIDTH)},
            6: {"control": torch.full((WIDTH,), 1e30)},
        }.get(about, end.sections)
        return dataclasses.replace(end, sections=sections)

    monkeypatch.setattr(ControlVariates, "finish", finish)
    config = gradbus.FederatedConfig(
        rounds=1, clients={"num": 7}, strategy="scaffold", training={"lr": LR, "rule": "scaffold"}
    )
    far = 1 / (1 - (1 - LR) ** STEPS)  # of which a client goes a part in its steps
    _, (report,) = run(config, [1.0, *(1 + (10 * about - 1) * far for about in range(1, 7))])
    assert report.clients == (0,)
    assert {strike.client_id: strike.reason for strike in report.strikes} == {
        1: "malformed",
        2: "oversized",
        3: "oversized",
        4: "steps",
        5: "malformed",
        6: "refused",
    }


@pytest.mark.parametrize(
    ("training", "claimed", "reason"),
    [
        ({}, {"num_samples": 10**12}, "samples"),
        ({}, {"steps": 17 * STEPS}, "steps"),
        ({"steps": 4}, {"steps": 5}, "steps"),
        ({"steps": 4}, {"steps": 1}, "steps"),
        ({"from_round": {1: {"steps": 4}}}, {"steps": 5}, "steps"),
    ],
)
def test_a_client_that_announces_what_cannot_be_is_struck(
    monkeypatch: pytest.MonkeyPatch, training: dict[str, Any], claimed: dict[str, int], reason: str
) -> None:
    honest = LocalTraining.train

    def train(self: LocalTraining, inputs: Any, *others: Any) -> Any:
        update = honest(self, inputs, *others)
        lies = claimed if update.key.sender == 1 else {}
        return dataclasses.replace(update, request=dataclasses.replace(update.request, **lies))

    monkeypatch.setattr(LocalTraining, "train", train)
    config = gradbus.FederatedConfig(rounds=1, clients={"num": 2}, training={"lr": LR, **training})
    _, (report,) = run(config, [1.0, 2.0])
    assert report.clients == (0,)
    assert {strike.client_id: strike.reason for strike in report.strikes} == {1: reason}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"strategy": "scaffold"}, "set the rule to scaffold"),
        ({"strategy": "qfedavg"}, "set the rule to loss_before"),
        ({"training": {"rule": "scaffold"}}, "needs updates of the model alone"),
        ({"strategy": "scaffold", "training": {"rule": "scaffold"}, "downlink_codec": "q8"}, "may not be rounded"),
        ({"clients": {"kind": "sites"}, "training": {"rule": "fedprox", "from_round": {2: {"mu": 1}}}}, "sites"),
        ({"section_codec": "q8"}, "hold the model alone"),
        ({"clients": {"kind": "sites"}, "training": {"from_round": {2: {"steps": 1}}}}, "sites"),
        (
            {
                "clients": {"num": 2, "min": 2},
                "codec": "sq8",
                "secure_aggregation": {"enabled": True},
                "training": {"from_round": {2: {"density": 0.5}}},
            },
            "share positions",
        ),
    ],
)
def test_what_cannot_work_together_is_refused_at_the_start(settings: dict[str, Any], text: str) -> None:
    config = gradbus.FederatedConfig(**{"rounds": 1, "clients": {"num": 1}, **settings})
    with pytest.raises(ExceptionGroup) as caught:
        run(config, [])
    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigError)
    assert text in str(error)


@pytest.mark.parametrize(
    "changes",
    [
        {1: {"epohs": 2}},
        {1: {"epochs": 0}},
        {1: {"epochs": "2"}},
        {0: {"epochs": 1}},
        {1: {"mu": -1}},
        {1: {"steps": -1}},
        {1: {"steps": 2.5}},
        {1: {"steps": 2, "epochs": 2}},
        {1: {"density": 0.5}},
    ],
)
def test_a_setting_of_a_round_that_cannot_be_is_refused(changes: Any) -> None:
    with pytest.raises(ConfigError):
        gradbus.FederatedConfig(training={"rule": "fedprox", "from_round": changes})


@pytest.mark.parametrize("key", ["steps", "density"])
def test_an_option_of_a_rule_of_ones_own_with_the_name_of_a_setting_of_the_round_is_not_changed(key: str) -> None:
    rule = {"name": "a.b:Rule", key: 1}
    with pytest.raises(ConfigError, match=f"{key} is a setting of the round here, and a.b:Rule has an option"):
        gradbus.FederatedConfig(codec="sq8", training={"rule": rule, "from_round": {2: {key: 1}}})


@pytest.mark.parametrize("terms", [{"density": "much"}, {"density": True}, {"density": 0.0}, {"steps": -1}])
def test_terms_of_a_round_that_cannot_be_are_told_by_the_client(terms: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the controller has sent"):
        split_terms({f"training.{key}": value for key, value in terms.items()})


@pytest.mark.parametrize("density", [0, 1.5, True])
def test_a_density_that_cannot_be_is_refused(density: Any) -> None:
    gradbus.FederatedConfig(codec="sq8", training={"from_round": {1: {"density": 0.5}}})
    with pytest.raises(ConfigError):
        gradbus.FederatedConfig(codec="sq8", training={"from_round": {1: {"density": density}}})


def test_steps_of_a_round_are_refused_where_each_client_has_its_own() -> None:
    settings = {"mode": "asynchronous", "asynchronous": {"proportional_steps": True}}
    with pytest.raises(ConfigError, match="leave steps and epochs out"):
        gradbus.FederatedConfig(**settings, training={"steps": 4, "from_round": {2: {"steps": 2}}})


def test_an_update_from_an_earlier_model_may_have_the_steps_of_its_round() -> None:
    training = gradbus.FederatedConfig(
        training={"steps": 9, "from_round": {3: {"steps": 4}, 5: {"epochs": 2}}}
    ).training
    assert set(training.list_work(2, 5)) == {(1, 9), (1, 4), (2, 0)}
    assert set(training.list_work(4, 4)) == {(1, 4)}
    assert set(training.list_work(-7, 1)) == {(1, 9)}
