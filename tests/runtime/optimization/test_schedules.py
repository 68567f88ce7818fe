"""Schedules by name: the rates of torch's own classes, a warm-up, and where the run is longer than the schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import CyclicLR

from gradbus.runtime.choices import CLIENT_SCHEDULES, SCHEDULES, Choice
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.optimization.schedules import RoundRates, Schedule

STEPS, EPOCHS, LR = 12, 4, 0.1


class Halved(lr_scheduler.LRScheduler):
    """A schedule of the user's."""

    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 2) -> None:
        self.every = every
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [base * 0.5 ** (self.last_epoch // self.every) for base in self.base_lrs]


def sgd() -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(2))]}, {"params": [nn.Parameter(torch.zeros(3))], "lr": 2 * LR}]
    return torch.optim.SGD(groups, lr=LR, momentum=0.9)


def schedule(choice: Any, optimizer: torch.optim.Optimizer) -> Schedule:
    checked = Choice.model_validate(SCHEDULES.check(choice))
    return Schedule(SCHEDULES, checked, optimizer, steps=STEPS, epochs=EPOCHS)


def values(optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("choice", "plain"),
    [
        ("cosine", lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS)),
        ({"name": "cosine", "T_max": 5, "eta_min": 0.01}, lambda o: lr_scheduler.CosineAnnealingLR(o, 5, 0.01)),
        ("one-cycle", lambda o: lr_scheduler.OneCycleLR(o, [LR, 2 * LR], total_steps=STEPS)),
        ({"name": "step", "step_size": 3, "gamma": 0.5}, lambda o: lr_scheduler.StepLR(o, 3, 0.5)),
        ({"name": "multi-step", "milestones": [2, 7]}, lambda o: lr_scheduler.MultiStepLR(o, [2, 7])),
        ({"name": "exponential", "gamma": 0.9}, lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
        ({"name": "linear", "total_iters": 4}, lambda o: lr_scheduler.LinearLR(o, total_iters=4)),
        ({"name": "polynomial", "power": 2.0}, lambda o: lr_scheduler.PolynomialLR(o, STEPS, 2.0)),
        ({"name": "cosine-restarts", "T_0": 5}, lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5)),
        ({"name": "cyclic", "base_lr": 0.01, "step_size_up": 3}, lambda o: CyclicLR(o, 0.01, [LR, 0.2], 3)),
        ("constant", lr_scheduler.ConstantLR),
        ("fixed", lambda o: None),
        ({"name": f"{__name__}:Halved", "every": 3}, lambda o: Halved(o, 3)),
    ],
)
def test_each_step_has_the_rates_that_torch_gives_it(choice: Any, plain: Any) -> None:
    ours, theirs = sgd(), sgd()
    going, scheduler = schedule(choice, ours), plain(theirs)
    for step in range(STEPS):
        going.go_to(step, 0)
        assert values(ours) == values(theirs)
        theirs.step()
        if scheduler is not None and step + 1 < STEPS:
            scheduler.step()


@pytest.mark.parametrize("choice", ["cosine", "one-cycle", {"name": "step", "step_size": 2}, "fixed"])
def test_where_a_schedule_stands_follows_from_the_step_alone(choice: Any) -> None:
    gone, jumped = sgd(), sgd()
    one, other = schedule(choice, gone), schedule(choice, jumped)
    for step in range(8):
        one.go_to(step, step // 3)
    other.go_to(7, 7 // 3)
    assert values(gone) == values(jumped)


def test_a_schedule_may_count_epochs() -> None:
    optimizer = sgd()
    going = schedule({"name": "step", "step_size": 1, "gamma": 0.5, "per": "epoch"}, optimizer)
    rates = []
    for step in range(STEPS):
        going.go_to(step, step // 3)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [LR * 0.5 ** (step // 3) for step in range(STEPS)]


def test_a_warm_up_multiplies_the_rates_of_the_first_steps() -> None:
    warm, cold = sgd(), sgd()
    one, other = schedule({"name": "cosine", "warmup_steps": 4}, warm), schedule("cosine", cold)
    for step in range(STEPS):
        one.go_to(step, 0)
        other.go_to(step, 0)
        factor = min(1.0, (step + 1) / 4)
        assert warm.param_groups[1]["lr"] == pytest.approx(factor * cold.param_groups[1]["lr"], rel=1e-12)


def test_beyond_its_end_the_last_rate_stays() -> None:
    optimizer = sgd()
    going = schedule({"name": "one-cycle", "total_steps": 5}, optimizer)
    going.go_to(4, 0)
    last = values(optimizer)
    going.go_to(11, 0)
    assert values(optimizer) == last


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("cosin", "did you mean 'cosine'?"),
        ("reduce-on-plateau", "it follows the loss"),
        ("step", "step_size"),
        ({"name": "cosine", "t_max": 4}, "did you mean 'T_max'?"),
        ({"name": "cosine", "per": "round"}, "Input should be 'step' or 'epoch'"),
        ({"name": "one-cycle", "pct_start": 2.0}, "OneCycleLR refuses: "),
        ("torch.nn:Linear", "is no torch.optim.lr_scheduler.LRScheduler"),
        ("torch.optim.lr_scheduler:LambdaLR", "LambdaLR needs lr_lambda"),
    ],
)
def test_wrong_names_and_options_are_errors_that_say_what_is_there(choice: Any, text: str) -> None:
    with pytest.raises((ValueError, ConfigError)) as caught:
        schedule(choice, sgd())
    assert text in str(caught.value)


def test_rounds_of_a_federated_run_have_rates_of_the_same_schedules() -> None:
    choice = Choice.model_validate(CLIENT_SCHEDULES.check({"name": "cosine", "warmup_rounds": 2}))
    rates = RoundRates(CLIENT_SCHEDULES, choice, LR, 10)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR)
    plain = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for round_id in range(1, 11):
        expected = optimizer.param_groups[0]["lr"] * min(1.0, round_id / 2)
        assert rates.at(round_id) == pytest.approx(expected, rel=1e-12)
        assert rates.at(round_id) == rates.at(round_id)  # an attempt that is repeated
        optimizer.step()
        plain.step()
    assert RoundRates(CLIENT_SCHEDULES, CLIENT_SCHEDULES.default, LR, 10).at(7) == LR
