"""A task that changes the module itself, and not its values alone: the next round begins with a sound one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.nn.utils import parametrizations, prune

from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.client.local_evaluation import LocalEvaluation
from gradbus.actors.federated.client.local_training import LocalTraining
from gradbus.actors.federated.client.round_inputs import RoundInputs
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing
from gradbus.models.task import EvalResult, TrainResult
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.shm.segment import PayloadMemory
from gradbus.runtime.user_errors import WrongResult, user_error
from gradbus.runtime.wire.control import EvaluationRequest, Welcome
from gradbus.runtime.wire.messages import Identity, TrainCmd

Change = Callable[[nn.Module], object]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def adapted() -> nn.Module:
    """A frozen base, which is sent once, and a trained head."""
    module = net()
    module[0].requires_grad_(False)
    return module


class Changing:
    """Changes the module as the test says, and then raises, or returns."""

    def __init__(self, build: Callable[[], nn.Module] = net) -> None:
        self.build_model = build
        self.change: Change | None = None
        self.raises = True

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def _work(self, model: nn.Module) -> None:
        change, self.change = self.change, None
        if change is not None:
            change(model)
            if self.raises:
                raise torch.OutOfMemoryError("CUDA out of memory")

    def train(self, model: nn.Module, **_: Any) -> TrainResult:
        self._work(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 1
        return TrainResult(num_samples=2, loss=0.5)

    def evaluate_local(self, model: nn.Module, *, client_id: int) -> EvalResult:
        self._work(model)
        return EvalResult(None, float(model(torch.ones(3)).sum()), 2)


class Client:
    def __init__(self, task: Changing) -> None:
        self.model = FlatModel(task.build_model(), rebuild=lambda: task.build_model())
        self.model.arrange(Sharing("trained"))
        store = ClientStateStore(None, 0)
        self.training = LocalTraining(task, Identity(0, 1), self.model, store, PayloadMemory(switched_on=False))  # type: ignore[arg-type]
        self.evaluation = LocalEvaluation(task, self.model, 0, store)  # type: ignore[arg-type]
        self.base = self.model.read().clone()
        self.frozen = self.model.frozen

    def welcome(self) -> Welcome:
        return Welcome(0, 1, 7, 1, "fp32", "{}", 1, 0.5, frozen=self.frozen)

    def train(self, round_id: int) -> bytes:
        inputs = RoundInputs(welcome=self.welcome(), command=TrainCmd(round_id, 0, 1, 0.1, 0), base=self.base)
        return bytes(self.training.train(inputs, round_id, lambda: False).payload)


def prune_it(model: nn.Module) -> None:
    prune.random_unstructured(model[2], "weight", amount=0.5)  # type: ignore[no-untyped-call]


def parametrize_it(model: nn.Module) -> None:
    parametrizations.weight_norm(model[2])


def widen_it(model: nn.Module) -> None:
    model[2] = nn.Linear(4, 5)


def swap_activation(model: nn.Module) -> None:
    model[1] = nn.Tanh()


def leave_a_hook(model: nn.Module) -> None:
    model[2].register_forward_hook(lambda *_: torch.zeros(2))


def freeze_it(model: nn.Module) -> None:
    model[2].requires_grad_(False)


each_change = pytest.mark.parametrize(
    "change", [prune_it, parametrize_it, widen_it, swap_activation, leave_a_hook, freeze_it]
)


@each_change
def test_a_training_that_fails_half_way_through_a_change_of_the_module_costs_its_own_round_alone(
    change: Change,
) -> None:
    client = Client(task := Changing())
    expected = client.train(1)
    task.change = change
    with pytest.raises(torch.OutOfMemoryError):
        client.train(2)
    with capture_logs() as logs:
        assert client.train(3) == expected
    assert [one["event"] for one in logs] == ["model built again"]
    assert [type(one) for one in client.model.module.modules()] == [type(one) for one in net().modules()]


def test_a_failure_that_has_left_the_module_alone_leaves_the_task_its_module() -> None:
    """As a task may keep an optimizer of its parameters from round to round."""
    client = Client(task := Changing())
    before = client.model.module
    task.change = lambda model: model(torch.ones(3)).sum().backward()
    with pytest.raises(torch.OutOfMemoryError):
        client.train(1)
    client.train(2)
    assert client.model.module is before


@pytest.mark.parametrize("change", [prune_it, parametrize_it, widen_it])
def test_a_training_that_returns_a_changed_module_says_which_tensors_and_the_next_round_is_sound(
    change: Change,
) -> None:
    client = Client(task := Changing())
    expected = client.train(1)
    task.change, task.raises = change, False
    with pytest.raises(
        WrongResult, match=r"training has changed the tensors of the model: '2\.weight' .*Undo"
    ) as caught:
        client.train(2)
    assert user_error(caught.value).place.endswith(
        f"{Path(__file__).name}:{Changing.train.__code__.co_firstlineno} in train"
    )
    assert client.train(3) == expected


@each_change
def test_an_evaluation_that_changes_the_module_costs_no_later_training(change: Change) -> None:
    client = Client(task := Changing())
    expected = client.train(1)
    task.change = change
    request = EvaluationRequest(7, 1, "0", 9.0)
    result = client.evaluation.evaluate(client.base, client.welcome(), request, lambda: False)
    assert result.failure.startswith("OutOfMemoryError: CUDA out of memory")
    assert client.train(2) == expected


def test_frozen_values_of_the_controller_outlive_a_failure_that_has_left_them() -> None:
    client = Client(task := Changing(adapted))
    client.training.take_frozen(client.welcome(), torch.arange(16.0))
    client.frozen = client.model.frozen
    expected = client.train(1)
    task.change = prune_it
    with pytest.raises(torch.OutOfMemoryError):
        client.train(2)
    assert client.train(3) == expected
    assert torch.equal(client.model.read_frozen(), torch.arange(16.0))


def test_frozen_values_that_a_failure_has_changed_are_known_to_be_lacking() -> None:
    client = Client(task := Changing(adapted))
    client.training.take_frozen(client.welcome(), torch.arange(16.0))
    client.frozen = client.model.frozen
    task.change = lambda model: nn.init.zeros_(model[0].weight)
    with pytest.raises(torch.OutOfMemoryError):
        client.train(1)
    with pytest.raises(RuntimeError, match="frozen parameters are not those of the controller"):
        client.train(2)  # as in a process of a pool: a client of its own asks first, and gets them
    assert client.training.lacks_frozen(client.welcome())
    client.training.take_frozen(client.welcome(), torch.arange(16.0))
    client.train(3)


def test_a_build_model_that_gives_the_same_object_again_is_named() -> None:
    module = net()
    client = Client(task := Changing(lambda: module))
    task.change = prune_it
    with pytest.raises(torch.OutOfMemoryError):
        client.train(1)
    with pytest.raises(ConfigError, match="Let build_model make a new module in each call"):
        client.train(2)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("module", [nn.ReLU(), Counting()], ids=["nothing", "integers"])
def test_a_model_without_a_floating_point_tensor_is_an_error_of_the_configuration(module: nn.Module) -> None:
    with pytest.raises(
        ConfigError,
        match=r"no floating-point tensor, so there is nothing to train or exchange: build_model has returned",
    ):
        FlatModel(module)


def test_a_lazy_model_that_has_seen_no_batch_is_an_error_that_says_what_to_do() -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    said = r"'0\.weight', '0\.bias'.* have no shape before the first batch: run one batch .* in build_model"
    with pytest.raises(ConfigError, match=said):
        FlatModel(module)
    module(torch.ones(2, 3))
    assert FlatModel(module).dim == 16 + 4 * 4
