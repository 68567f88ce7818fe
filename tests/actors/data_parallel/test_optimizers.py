"""Optimizers, schedules and autocast of workers: the steps of plain torch, on any number of ranks, over a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scene import make_task, succeeded, train, vector
from regression import STEPS, Regression, plain
from torch import nn
from torch.optim import lr_scheduler

from gradbus.runtime.algorithms.base import Algorithm, Place
from gradbus.runtime.algorithms.dense import Dense
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CheckpointError, ConfigError

OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": ({"lr": 0.05}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "adamw": ({"lr": 0.01, "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    "rmsprop": ({"lr": 0.01, "momentum": 0.5}, lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5)),
    "adagrad": ({"lr": 0.05}, lambda p: torch.optim.Adagrad(p, lr=0.05)),
}
SCHEDULES: dict[str, Any] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 2 * STEPS),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(
        o, o.param_groups[0]["lr"], total_steps=2 * STEPS, cycle_momentum=False
    ),
}  # fmt: skip


class TwoGroups(Regression):
    """Makes an optimizer with two groups, and a schedule with a state of its own."""

    def make_optimizer(self, model: nn.Sequential) -> torch.optim.Optimizer:
        return torch.optim.NAdam(
            [
                {"params": list(model[0].parameters())},
                {"params": list(model[4].parameters()), "lr": 0.02},
            ],
            lr=0.01,
        )

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        first, second = lr_scheduler.MultiStepLR(optimizer, [3], 0.5), lr_scheduler.ExponentialLR(optimizer, 0.9)
        return lr_scheduler.SequentialLR(optimizer, [first, second], [5])


class Incomplete(Regression):
    def make_optimizer(self, model: nn.Sequential) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[0].parameters(), lr=0.1)


class SumOfLosses(Regression):
    def make_optimizer(self, model: nn.Sequential) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad])


class Plateau(Regression):
    def make_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer)


class OneCycle(Regression):
    """Makes a schedule that changes momentum."""

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS)


class EndsAfter:
    """Ends the run when a step has been made."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, report: Any) -> bool:
        return bool(report.step == self._step)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_rank_and_two_take_the_steps_of_plain_torch(name: str, schedule: str) -> None:
    options, make = OPTIMIZERS[name]
    expected = vector(plain(make, SCHEDULES[schedule]))
    more = {"cycle_momentum": False} if schedule == "one-cycle" else {}
    for world in (1, 2):
        outcomes = train(
            Regression(),
            world=world,
            epochs=2,
            hash_every=1,
            eval_every_epochs=0,
            optimizer={"name": name, **options},
            schedule={"name": schedule, **more},
        )
        for outcome in succeeded(outcomes):
            torch.testing.assert_close(outcome.parameters, expected, rtol=0, atol=1e-6)
            assert world == 2 or torch.equal(outcome.parameters, expected)


def test_the_task_may_make_the_optimizer_and_the_schedule() -> None:
    task = TwoGroups()
    expected = vector(plain(lambda p: task.make_optimizer(nn.Sequential(*_layers(p))), task.make_schedule))
    for outcome in succeeded(train(task, epochs=2, optimizer={"name": "task", "clip_norm": 1e9})):
        torch.testing.assert_close(outcome.parameters, expected, rtol=0, atol=1e-6)
    named = train(task, world=1, epochs=2, optimizer="sgd", schedule="fixed")
    expected = vector(plain(OPTIMIZERS["sgd"][1]))
    torch.testing.assert_close(succeeded(named)[0].parameters, expected, rtol=0, atol=1e-6)


def _layers(parameters: list[torch.Tensor]) -> list[nn.Module]:
    """Modules that hold these parameters where :class:`TwoGroups` looks for them."""
    layers: list[nn.Module] = [nn.Linear(1, 1) for _ in range(5)]
    for layer, (weight, bias) in ((layers[0], parameters[:2]), (layers[4], parameters[2:])):
        layer.weight, layer.bias = weight, bias
    return layers


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        (Regression(), {"optimizer": "adamw", "schedule": {"name": "one-cycle", "warmup_steps": 3}}),
        (Regression(), {"optimizer": "asgd", "schedule": {"name": "step", "step_size": 1, "per": "epoch"}}),
        (TwoGroups(), {}),
        (Regression(), {"optimizer": {"name": "adafactor", "lr": 0.05}, "algorithm": "decentralized"}),
    ],
)
def test_a_run_that_is_resumed_has_the_bits_of_one_that_never_stopped(
    task: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    whole = succeeded(train(task, epochs=2, **settings))
    saved = {"checkpoint__dir": tmp_path, **settings}
    cut = succeeded(train(task, epochs=2, callbacks=[[EndsAfter(7)], []], **saved))
    assert [outcome.worker.step for outcome in cut] == [8, 8]
    again = succeeded(train(task, epochs=2, **saved))
    for one, other in zip(whole, again, strict=True):
        assert torch.equal(one.parameters, other.parameters)
        assert one.reports[-1].loss == other.reports[-1].loss


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    succeeded(train(Regression(), world=1, epochs=1, optimizer="adamw", checkpoint__dir=tmp_path))
    error = train(Regression(), world=1, epochs=2, optimizer="rmsprop", checkpoint__dir=tmp_path)[0].error
    assert isinstance(error, CheckpointError)
    assert "was made with optimizer='adamw', now it is 'rmsprop'" in str(error)


class Adam(Regression):
    def make_optimizer(self, model: nn.Sequential) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)


@pytest.mark.parametrize(("first", "then"), [(Adam(), Regression()), (Regression(), Adam())], ids=["Adam", "SGD"])
def test_a_task_that_makes_another_optimizer_does_not_go_on_with_its_checkpoint(
    tmp_path: Path, first: Any, then: Any
) -> None:
    succeeded(train(first, world=1, epochs=1, checkpoint__dir=tmp_path))
    error = train(then, world=1, epochs=2, checkpoint__dir=tmp_path)[0].error
    assert isinstance(error, ConfigError)
    assert "the state was saved with the optimizer" in str(error)
    assert "damaged" not in str(error)
    named = {"optimizer": "task" if isinstance(first, Adam) else "sgd"}  # what it was without a word, too
    succeeded(train(first, world=1, epochs=2, checkpoint__dir=tmp_path, **named))


@pytest.mark.parametrize("algorithm", ["dense", "decentralized"])
def test_all_ranks_say_that_a_checkpoint_is_of_another_optimizer(tmp_path: Path, algorithm: str) -> None:
    succeeded(train(Adam(), Adam(), epochs=1, checkpoint__dir=tmp_path, algorithm=algorithm))
    for outcome in train(Regression(), Regression(), epochs=2, checkpoint__dir=tmp_path, algorithm=algorithm):
        assert isinstance(outcome.error, ConfigError)
        assert "the state was saved with the optimizer" in str(outcome.error)


class Counts(torch.optim.SGD):
    """Counts its steps in its groups, and lowers the learning rate by that."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.05 / group["k"]
        super().step(closure)


class Halves(Regression):
    """Its callback changes the learning rate in the midst of the run."""

    def make_optimizer(self, model: nn.Sequential) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        return self.optimizer

    def on_step(self, report: Any) -> None:
        if report.step == 3:
            self.optimizer.param_groups[0]["lr"] = 0.001


@pytest.mark.parametrize("who", ["callback", "optimizer"])
@pytest.mark.parametrize("algorithm", ["dense", "decentralized"])
def test_settings_that_change_during_a_run_are_resumed(tmp_path: Path, who: str, algorithm: str) -> None:
    def run(**more: Any) -> list[Any]:
        tasks = [Halves(), Halves()] if who == "callback" else [Regression(), Regression()]
        if who == "optimizer":
            more["optimizer"] = {"name": f"{__name__}:Counts", "lr": 0.05}
        called = [[task] if who == "callback" else [] for task in tasks]
        return succeeded(train(*tasks, epochs=2, callbacks=called, algorithm=algorithm, **more))

    whole = run()
    run(checkpoint__dir=tmp_path, max_steps=4)
    for one, other in zip(whole, run(checkpoint__dir=tmp_path), strict=True):
        assert torch.equal(one.parameters, other.parameters)


@pytest.mark.parametrize(
    ("task", "settings", "text"),
    [
        (Incomplete(), {}, "make_optimizer of the task: the optimizer lacks 4.weight, 4.bias"),
        (Regression(), {"optimizer": "task"}, "Regression has no make_optimizer"),
        (Regression(), {"optimizer": "adamw", "algorithm": "dgc"}, "dgc brings an optimizer of its own, a kind of sgd"),
        (TwoGroups(), {"algorithm": "dgc"}, "and so does the task"),
        (Regression(), {"optimizer": "adamw", "algorithm": "qadam"}, "torch.optim.SGD without momentum, got AdamW"),
        (Regression(), {"optimizer": "muon"}, "Muon refuses: Muon only supports 2D parameters"),
        (Regression(), {"schedule": {"name": "one-cycle", "pct_start": 2.0}}, "OneCycleLR refuses"),
        (Regression(), {"algorithm": "dgc", "optimizer__dampening": 0.5}, "dgc has no dampening"),
        (SumOfLosses(), {}, "make_optimizer of the task: LBFGS cannot be used: its step computes the loss several"),
        (Regression(), {"optimizer": "torch.optim:LBFGS"}, "LBFGS cannot be used: its step computes the loss several"),
        (Plateau(), {}, "make_schedule of the task: ReduceLROnPlateau cannot be used: it follows the loss"),
        (
            Regression(),
            {"schedule": "torch.optim.lr_scheduler:ReduceLROnPlateau"},
            "ReduceLROnPlateau cannot be used: it follows the loss",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_before_the_first_step(
    task: Any, settings: dict[str, Any], text: str
) -> None:
    (outcome,) = train(task, world=1, **settings)
    assert isinstance(outcome.error, ConfigError)
    assert text in str(outcome.error)


@pytest.mark.parametrize("algorithm", ["qadam", "onebit-adam", "dgc"])
@pytest.mark.parametrize(
    ("task", "schedule"),
    [
        (Regression(), {"schedule": "one-cycle"}),
        (Regression(), {"schedule": {"name": "cyclic", "base_lr": 0.01, "max_lr": 0.1}}),
        (OneCycle(), {}),
    ],
    ids=["one-cycle", "cyclic", "of the task"],
)
def test_an_algorithm_with_the_momentum_refuses_a_schedule_that_changes_it(
    task: Any, schedule: dict[str, Any], algorithm: str
) -> None:
    momentum = 0.9 if algorithm == "dgc" else 0.0
    (outcome,) = train(task, world=1, algorithm=algorithm, optimizer__momentum=momentum, **schedule)
    assert isinstance(outcome.error, ConfigError)
    assert f"{algorithm} has a momentum of its own" in str(outcome.error)
    assert "cycle_momentum=false" in str(outcome.error)


def test_without_the_cycle_of_momentum_it_takes_the_schedule() -> None:
    schedule = {"name": "one-cycle", "cycle_momentum": False}
    for algorithm, momentum in (("qadam", 0.0), ("dgc", 0.9)):
        succeeded(
            train(Regression(), world=1, epochs=1, algorithm=algorithm, optimizer__momentum=momentum, schedule=schedule)
        )


def test_an_algorithm_that_refuses_momentum_does_so_after_the_schedule() -> None:
    def make(place: Place) -> Algorithm:
        return WithoutMomentum(place, Dense.Options())

    (outcome,) = train(
        Regression(), world=1, algorithms=[make], optimizer__momentum=0.0, schedule={"name": "one-cycle"}
    )
    assert "no momentum, please. The schedule gives it momentum: set cycle_momentum=false" in str(outcome.error)


def test_the_average_of_ef21_sgdm_takes_no_second_momentum_from_the_optimizer_or_a_schedule() -> None:
    sgdm = {"name": "ef21", "eta": 0.1}
    (outcome,) = train(Regression(), world=1, algorithm=sgdm, optimizer__momentum=0.9)
    assert isinstance(outcome.error, ConfigError)
    assert "ef21 with eta < 1 has a momentum of its own" in str(outcome.error)
    (outcome,) = train(Regression(), world=1, algorithm=sgdm, optimizer__momentum=0.0, schedule="one-cycle")
    assert isinstance(outcome.error, ConfigError)
    assert "The schedule gives it momentum: set cycle_momentum=false" in str(outcome.error)
    succeeded(train(Regression(), world=1, epochs=1, algorithm=sgdm, optimizer__momentum=0.0))


class WithoutMomentum(Dense):
    choice = "without-momentum"

    def check(self, parameters: Any, optimizer: torch.optim.Optimizer) -> None:
        if any(group["momentum"] for group in optimizer.param_groups):
            raise ConfigError("no momentum, please")


def test_ranks_with_other_options_do_not_start_together() -> None:
    configs = [DataParallelConfig(optimizer={"name": "adamw", "eps": eps}) for eps in (1e-8, 1e-7)]
    for outcome in train(Regression(), Regression(), configs=configs):
        assert isinstance(outcome.error, ConfigError)
        assert "optimizer.eps is 1e-08, but rank 1 has 1e-07" in str(outcome.error)


def test_autocast_computes_in_bf16_with_gradients_in_float32() -> None:
    make = OPTIMIZERS["adamw"][1]
    expected, exact = vector(plain(make, bf16=True)), vector(plain(make))
    settings: dict[str, Any] = {"epochs": 2, "optimizer": {"name": "adamw", **OPTIMIZERS["adamw"][0]}}
    outcome = succeeded(train(Regression(), world=1, autocast="bf16", **settings))[0]
    assert torch.equal(outcome.parameters, expected)
    assert not torch.equal(outcome.parameters, exact)
    assert {p.grad.dtype for p in outcome.worker.model.parameters() if p.grad is not None} == {torch.float32}
    two = succeeded(train(make_task(), autocast="bf16", epochs=1, hash_every=1))
    assert torch.equal(two[0].parameters, two[1].parameters)


def test_fp16_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="fp16 needs losses that are scaled up"):
        DataParallelConfig(autocast="fp16")  # type: ignore[arg-type]
