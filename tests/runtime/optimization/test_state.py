"""The state of any optimizer goes through tensors by name and back, and training goes on with the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from gradbus.runtime.choices import OPTIMIZERS, Choice
from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.optimization.optimizers import make_optimizer
from gradbus.runtime.optimization.state import check_parameters, group_settings, load_state, state_tensors

NAMES = sorted(OPTIMIZERS.table.keys() - {"task"})


class Counting(torch.optim.SGD):
    """An optimizer of the user's, with a number in its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            count = self.state[parameter].get("count", 0)
            parameter.data.mul_(1 - 0.01 * count)
            self.state[parameter]["count"] = count + 1


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2, bias=False))
    made[1].requires_grad_(False)
    return made


def trained(of: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in of.named_parameters() if parameter.requires_grad}


def step(of: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    of(inputs).square().mean().backward()
    optimizer.step()


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", [*NAMES, f"{__name__}:Counting"])
def test_training_goes_on_with_the_same_bits(name: str) -> None:
    def optimizer(of: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(OPTIMIZERS, Choice(name=name), trained(of).values(), lr=0.01)

    whole, resumed = model(), model()
    going = optimizer(whole)
    for number in range(3):
        step(whole, going, number)
    resumed.load_state_dict(whole.state_dict())
    again = optimizer(resumed)
    load_state(again, trained(resumed), copied(state_tensors(going, trained(whole))))
    for number in range(3, 6):
        step(whole, going, number)
        step(resumed, again, number)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_groups_and_a_schedule_with_a_state_of_its_own_are_kept() -> None:
    def make(of: nn.Module) -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
        groups = [
            {"params": list(of[0].parameters()), "lr": 0.01},
            {"params": list(of[2].parameters()), "lr": 0.02, "betas": (0.5, 0.6)},
        ]
        optimizer = torch.optim.AdamW(groups)
        first = lr_scheduler.MultiStepLR(optimizer, [2, 4])
        return optimizer, lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.5)], [5])

    whole, resumed = model(), model()
    going, schedule = make(whole)
    for number in range(4):
        step(whole, going, number)
        schedule.step()
    resumed.load_state_dict(whole.state_dict())
    again, other_schedule = make(resumed)
    saved = copied(state_tensors(going, trained(whole), schedule, made=group_settings(going)))
    load_state(again, trained(resumed), saved, other_schedule)
    for number in range(4, 9):
        assert [group["lr"] for group in going.param_groups] == [group["lr"] for group in again.param_groups]
        assert [group["betas"] for group in going.param_groups] == [group["betas"] for group in again.param_groups]
        step(whole, going, number)
        step(resumed, again, number)
        schedule.step()
        other_schedule.step()
    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["sequence", "chain"])
@pytest.mark.parametrize("before", [2, 5])
def test_schedules_within_a_schedule_go_on_where_they_were(kind: str, before: int) -> None:
    def make(of: nn.Module) -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD(of.parameters(), lr=1.0)
        inner = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.MultiStepLR(optimizer, [7, 9])]
        if kind == "chain":
            return optimizer, lr_scheduler.ChainedScheduler(inner)
        return optimizer, lr_scheduler.SequentialLR(optimizer, inner, [3])

    whole, resumed = model(), model()
    going, schedule = make(whole)
    for number in range(before):
        step(whole, going, number)
        schedule.step()
    again, other_schedule = make(resumed)
    saved = copied(state_tensors(going, trained(whole), schedule, made=group_settings(going)))
    load_state(again, trained(resumed), saved, other_schedule)
    for number in range(before, 14):
        assert [group["lr"] for group in going.param_groups] == [group["lr"] for group in again.param_groups]
        step(whole, going, number)
        step(resumed, again, number)
        schedule.step()
        other_schedule.step()


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        (
            "optimizer/exp_avg/0.weight",
            torch.zeros(5),
            r"exp_avg of '0.weight' is \(5,\) of torch.float32, here \(3, 4",
        ),
        ("optimizer/exp_avg/0.weight", torch.zeros(3, 4, dtype=torch.float64), "of torch.float64, here"),
        ("optimizer/exp_avg/1.weight", torch.zeros(3, 3), "here None"),
        ("optimizer-json", torch.tensor(list(b"{"), dtype=torch.uint8), "cannot be read"),
        ("optimizer-json", torch.zeros(3), "cannot be read"),
        ("optimizer-json", torch.tensor(list(b'{"groups": [{}, {}]}'), dtype=torch.uint8), "expected 1 groups"),
        ("optimizer-json", torch.tensor(list(b'{"state": {"x": {}}}'), dtype=torch.uint8), "no parameter 'x'"),
    ],
)
def test_state_that_does_not_fit_is_refused(name: str, tensor: Tensor, text: str) -> None:
    of = model()
    optimizer = torch.optim.AdamW(trained(of).values())
    with pytest.raises(CheckpointError, match=text):
        load_state(optimizer, trained(of), {name: tensor})


def sgd(of: nn.Module, lr: Any = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(of).values(), lr=lr)


def resumed(
    before: torch.optim.Optimizer, made: list[dict[str, Any]], again: torch.optim.Optimizer, of: nn.Module
) -> Any:
    """The first group of the second optimizer with the state of the first."""
    load_state(again, trained(of), copied(state_tensors(before, trained(of), made=made)))
    return again.param_groups[0]


def test_settings_that_have_changed_since_the_optimizer_was_made_are_kept_and_no_others() -> None:
    of = model()
    optimizer = sgd(of)
    made = group_settings(optimizer)
    optimizer.param_groups[0].update(momentum=np.float32(0.5), k=3)
    group = resumed(optimizer, made, sgd(of, 0.2), of)
    assert (group["lr"], group["momentum"], group["k"]) == (0.2, 0.5, 3)
    assert state_tensors(sgd(of), trained(of), made=group_settings(sgd(of))) == {}


def test_a_learning_rate_that_is_a_tensor_stays_one() -> None:
    of = model()
    optimizer = sgd(of, torch.tensor(0.1))
    made = group_settings(optimizer)
    optimizer.param_groups[0]["lr"].mul_(0.5)
    group = resumed(optimizer, made, sgd(of, torch.tensor(0.1)), of)
    assert torch.equal(group["lr"], torch.tensor(0.1) * 0.5)


@pytest.mark.parametrize("where", ["group", "state"])
def test_what_cannot_be_saved_is_an_error_when_it_is_to_be(where: str) -> None:
    """A builtin function, and not ``print``, which Ray replaces."""
    of = model()
    optimizer = sgd(of)
    made = group_settings(optimizer)
    if where == "group":
        optimizer.param_groups[0]["rule"] = len
    else:
        optimizer.state[of[0].weight]["rule"] = len
    with pytest.raises(
        CheckpointError, match=r"rule of .* of SGD is a builtin_function_or_method, which cannot be saved"
    ):
        state_tensors(optimizer, trained(of), made=made)


def test_settings_that_cannot_be_saved_and_have_not_changed_are_no_error() -> None:
    of = model()
    optimizer = torch.optim.SGD([{"params": list(trained(of).values()), "rule": len}], lr=0.1)
    assert state_tensors(optimizer, trained(of), made=group_settings(optimizer)) == {}


def test_the_state_of_another_optimizer_is_refused() -> None:
    of = model()
    saved = state_tensors(sgd(of), trained(of), origin=("sgd", "SGD"))
    load_state(sgd(of), trained(of), saved, origin=("sgd", "SGD"))
    with pytest.raises(ConfigError, match=r"saved with the optimizer \['sgd', 'SGD'\], here it is \['task', 'Adam'\]"):
        load_state(torch.optim.Adam(trained(of).values()), trained(of), saved, origin=("task", "Adam"))


def test_an_optimizer_of_the_tasks_must_step_what_the_model_trains() -> None:
    of = model()
    with pytest.raises(ValueError, match=r"lacks 2\.weight"):
        check_parameters(torch.optim.SGD(of[0].parameters(), lr=0.1), trained(of))
    with pytest.raises(ValueError, match="does not train"):
        check_parameters(torch.optim.SGD([*of.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1), trained(of))
    check_parameters(torch.optim.SGD(of.parameters(), lr=0.1), trained(of))
