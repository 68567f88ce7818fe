"""The clients' optimizer as the controller names it: over the wire to the task, with the steps of plain torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from regression import draw_weights
from torch import nn

import gradbus
from gradbus.actors.federated.client.client_optimizer import (
    optimizer_argument,
    split_options,
    steps_argument,
    takes_round,
)
from gradbus.commands.configured_task import ConfiguredTask
from gradbus.commands.files import ClientFile
from gradbus.models import ClassificationTask, EvalResult, TrainResult, glyphs
from gradbus.runtime.choices import Choice
from gradbus.runtime.config.federated import FederatedConfig, TrainingSettings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.wire.control import Welcome, decode, encode

STEPS = 3


class Quadratic:
    """A linear model and three steps with the same batch."""

    def build_model(self) -> nn.Module:
        model = nn.Linear(4, 2)
        draw_weights(model)
        return model

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def train(self, model: nn.Module, *, lr: float, make_optimizer: Any = None, **_: Any) -> TrainResult:
        steps(model, make_optimizer(model.parameters()))
        return TrainResult(8, 0.0)

    def evaluate(self, model: nn.Module) -> EvalResult:
        return EvalResult(None, 0.5, 8, {"rmse": 0.25})  # a regression has no accuracy


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs = torch.arange(32.0).reshape(8, 4) / 32
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()


def travelled(training: dict[str, Any]) -> dict[str, Any]:
    """The options of a Welcome that has been bytes."""
    sent = FederatedConfig(training=training).training.sent_options()
    message = decode(encode(Welcome(0, 1, 2, 3, "fp32", "{}", 2, 0.5, options=sent)))
    assert isinstance(message, Welcome)
    return message.options


def test_a_run_trains_with_the_optimizer_and_the_schedule_of_its_controller() -> None:
    rules = FederatedConfig(
        rounds=2,
        clients={"num": 1},
        training={
            "optimizer": {"name": "adamw", "lr": 0.1, "betas": [0.8, 0.9]},
            "schedule": {"name": "cosine", "T_max": 4},
        },
    )
    domain = new_domain()

    async def main() -> dict[str, torch.Tensor]:
        async with asyncio.timeout(60), gradbus.connect(job="optimizers", domain=domain, network="loopback") as bus:
            controller = gradbus.Controller(bus, Quadratic(), rules)
            async with asyncio.TaskGroup() as group:
                group.create_task(client())
                reports = await controller.run()
            assert [(r.accuracy, r.eval_loss, r.metrics) for r in reports] == [(None, 0.5, {"rmse": 0.25})] * 2
            return await controller.state_dict()

    async def client() -> None:
        async with gradbus.connect(job="optimizers", domain=domain, network="loopback") as bus:
            await gradbus.Client(bus, Quadratic(), client_id=0).run()

    trained = asyncio.run(main())
    expected = Quadratic().build_model()
    for lr in (0.1, 0.1 * (1 + 2**-0.5) / 2):  # cosine over 4 rounds
        steps(expected, torch.optim.AdamW(expected.parameters(), lr=lr, betas=(0.8, 0.9)))
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("training", "plain"),
    [
        ({"optimizer": "sgd"}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
        ({"optimizer": {"name": "adamw", "amsgrad": True}}, lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True)),
        ({"optimizer": {"name": "rmsprop", "alpha": 0.9}}, lambda p: torch.optim.RMSprop(p, lr=0.05, alpha=0.9)),
        ({"optimizer": "adagrad"}, lambda p: torch.optim.Adagrad(p, lr=0.05)),
    ],
)
def test_the_default_task_takes_the_same_steps_as_with_that_optimizer_of_torch(
    training: dict[str, Any], plain: Callable[[Any], torch.optim.Optimizer]
) -> None:
    task = ClassificationTask(lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), glyphs(train=60, test=10))
    rule, choice = split_options(travelled(training))
    assert rule == {}
    command = {"client_id": 0, "round_id": 1, "epochs": 2, "lr": 0.05, "seed": 1, "subset_size": 0}
    models = [task.build_model() for _ in range(2)]
    arguments = (optimizer_argument(task, choice, 0.05), {"make_optimizer": plain})
    for model, argument in zip(models, arguments, strict=True):
        task.train(model, **command, should_stop=lambda: False, **argument)  # type: ignore[arg-type]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, torch.zeros_like(one))


def test_the_norm_of_a_clients_gradients_can_be_limited() -> None:
    _, choice = split_options(travelled({"optimizer": {"name": "sgd", "momentum": 0.0, "clip_norm": 0.5}}))
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = optimizer_argument(Quadratic(), choice, 1.0)["make_optimizer"]([parameter])
    parameter.grad = torch.full((4,), 5.0)
    optimizer.step()
    assert float(parameter.detach().norm()) == pytest.approx(0.5, rel=1e-5)


def test_without_an_optimizer_in_the_settings_a_task_is_called_as_ever() -> None:
    rule, choice = split_options(travelled({"rule": {"name": "mine:Rule", "mu": 0.5}}))
    assert (rule, choice) == ({"mu": 0.5}, None)
    assert optimizer_argument(Quadratic(), choice, 0.1) == {}


def test_a_task_that_makes_its_own_optimizer_is_told_what_to_do() -> None:
    class Stubborn(Quadratic):
        def train(self, model: nn.Module, *, client_id: int, lr: float) -> TrainResult:  # type: ignore[override]
            return TrainResult(1, 0.0)

    _, choice = split_options(travelled({"optimizer": "adamw"}))
    with pytest.raises(ConfigError, match=r"train of Stubborn makes its own: let it take make_optimizer"):
        optimizer_argument(Stubborn(), choice, 0.1)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ({"optimizer.name": "antigravity:Optimizer"}, "there is no optimizer 'antigravity:Optimizer'"),
        ({"optimizer.lr": 0.1}, "there is no optimizer 'None'"),
        ({"optimizer.name": "adamw", "optimizer.beta": 1}, "did you mean 'betas'"),
        ({"optimizer.name": "adamw", "optimizer.betas": "[" * 200}, "cannot make"),
        ({"optimizer.name": "adamw", "optimizer.betas": "[1e400, 0]"}, "finite"),
    ],
)
def test_what_a_controller_sends_is_checked_and_nothing_is_imported(sent: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        split_options(sent)


def test_options_that_cannot_travel_are_refused_with_the_settings() -> None:
    long = {"name": "mine:Rule", **{f"key{number}": number for number in range(30)}}
    with pytest.raises(ConfigError, match="the rule and the optimizer travel to the clients"):
        TrainingSettings(rule=long, optimizer={"name": "adamw", "eps": 1e-7, "weight_decay": 0.0})


def own_loop(model: Any, dataset: Any, *, epochs: int, lr: float, seed: int, should_stop: Any) -> Any:
    raise AssertionError("it was called")


def of_own_loop() -> ClassificationTask:
    return ClassificationTask(lambda: torch.nn.Linear(2, 2), lambda: None, train_fn=own_loop)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("configured", [False, True])
def test_a_train_fn_that_takes_no_argument_of_a_setting_is_named_before_it_is_called(configured: bool) -> None:
    task: Any = of_own_loop()
    if configured:
        task = ConfiguredTask(ClientFile(task={"task": f"{__name__}:of_own_loop"}).task)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="train_fn own_loop makes its own: let it take make_optimizer"):
        optimizer_argument(task, Choice(name="adam"), 0.1)
    with pytest.raises(ConfigError, match="train_fn own_loop counts epochs: let it take steps"):
        steps_argument(task, 5)
    assert not takes_round(task)
    assert not takes_round(ClassificationTask(lambda: torch.nn.Linear(2, 2), lambda: None))  # type: ignore[arg-type, return-value]
