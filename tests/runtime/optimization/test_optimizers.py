"""Optimizers by name: classes of torch with the options of their constructors, and clear errors about both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradbus.runtime.choices import OPTIMIZERS, Choice
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.optimization.optimizers import UNFIT, make_optimizer

OF_TORCH = {
    kind.__name__.lower()
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}


class Lookahead(torch.optim.SGD):
    """An optimizer of the user's."""

    def __init__(self, params: Any, lr: float = 0.1, slow: float = 0.5, steps: tuple[int, int] = (1, 2)) -> None:
        super().__init__(params, lr=lr)
        self.slow, self.steps = slow, steps


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class NeedsFunction(torch.optim.SGD):
    """Takes what no configuration can give."""

    def __init__(self, params: Any, rule: nn.Module) -> None:
        super().__init__(params)


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (3, 2))]


def made(choice: Any) -> torch.optim.Optimizer:
    return make_optimizer(OPTIMIZERS, Choice.model_validate(OPTIMIZERS.check(choice)), parameters())


def refused(choice: Any) -> str:
    with pytest.raises((ValueError, ConfigError)) as caught:
        made(choice)
    return str(caught.value)


def test_every_optimizer_of_torch_that_steps_from_gradients_can_be_named_and_makes_a_step() -> None:
    assert (OPTIMIZERS.table.keys() | UNFIT) - {"task"} == OF_TORCH
    for name in OF_TORCH - UNFIT.keys():
        optimizer = made(name)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        before = optimizer.param_groups[0]["params"][0].clone()
        optimizer.step()
        assert not torch.equal(before, optimizer.param_groups[0]["params"][0]), name


def test_options_are_those_of_the_constructor_with_its_defaults() -> None:
    adamw = made({"name": "adamw", "lr": 0.01, "betas": [0.8, 0.9]})
    assert type(adamw) is torch.optim.AdamW
    plain = torch.optim.AdamW(parameters(), lr=0.01, betas=(0.8, 0.9)).param_groups[0]
    assert {key: value for key, value in adamw.param_groups[0].items() if key != "params"} == {
        key: value for key, value in plain.items() if key != "params"
    }
    sgd = made("sgd").param_groups[0]
    assert (sgd["lr"], sgd["momentum"], sgd["weight_decay"]) == (0.05, 0.9, 0.0)


def test_a_class_of_the_users_is_named_by_its_module_and_its_options_follow_from_its_constructor() -> None:
    own = made({"name": f"{__name__}:Lookahead", "slow": 0.25, "steps": [3, 4]})
    assert isinstance(own, Lookahead)
    assert (own.slow, own.steps) == (0.25, (3, 4))


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("adamv", "there is no optimizer 'adamv'; did you mean 'adam"),
        ("lbfgs", "'lbfgs' cannot be chosen: its step computes the loss several times"),
        ({"name": "adamw", "beta": [0.9, 0.99]}, "there is no such option, did you mean 'betas'?"),
        ({"name": "adamw", "momentum": 0.9}, "this is an option of muon, rmsprop, sgd"),
        ({"name": "adamw", "betas": "high"}, "Input should be a valid tuple"),
        ({"name": "adamw", "lr": -1}, "parallel.optimizer: AdamW refuses: Invalid learning rate: -1.0"),
        ({"lr": 0}, "Input should be greater than 0"),
        ({"name": "adamw", "lr": float("nan")}, "Input should be"),
        ({"name": "adamw", "betas": [2, 0.5]}, "parallel.optimizer: AdamW refuses: Invalid beta parameter"),
        ({"nesterov": True, "momentum": 0}, "nesterov=true needs momentum > 0"),
        ("torch.optim:LBFGS", "LBFGS cannot be used: its step computes the loss several times"),
        (f"{__name__}:NeedsClosure", "NeedsClosure computes the loss in its step"),
        ("torch.nn:Linear", "is no torch.optim.Optimizer"),
        (f"{__name__}:NeedsFunction", "NeedsFunction needs rule"),
        (f"{__name__}:Lookahed", "did you mean 'Lookahead'?"),
        ({"name": f"{__name__}:Lookahead", "slw": 1}, "slw: there is no such option, did you mean 'slow'?"),
    ],
)
def test_wrong_names_and_options_are_errors_that_say_what_is_there(choice: Any, text: str) -> None:
    assert text in refused(choice)


def test_the_clients_optimizer_and_its_learning_rate_are_checked_with_the_settings() -> None:
    training = FederatedConfig(training={"optimizer": {"name": "adamw", "lr": 0.002}}).training
    assert training.first_lr == 0.002
    assert FederatedConfig(training={"lr": 0.3, "optimizer": "rmsprop"}).training.first_lr == 0.3
    for wrong, text in [
        ({"lr": 0.1, "optimizer": {"name": "adamw", "lr": 0.2}}, "lr is 0.1, and optimizer.lr 0.2: give one of them"),
        ({"optimizer": {"clip_norm": 1.0}}, "this is an option of adadelta"),
        ({"optimizer": "adamx"}, "did you mean 'adam"),
        ({"schedule": "cosinus"}, "did you mean 'cosine'?"),
        ({"optimizer": f"{__name__}:Lookahead"}, "there is no optimizer"),
    ]:
        with pytest.raises(ConfigError, match=text.replace("?", r"\?").replace("(", r"\(")):
            FederatedConfig(training=wrong)
