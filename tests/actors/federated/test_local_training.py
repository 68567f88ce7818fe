"""What a client makes of its training: an update that its controller takes, or a failure that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradbus import codecs
from gradbus.actors.aggregation.exact_sum import ExactMean
from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.client.local_training import LocalTraining
from gradbus.actors.federated.client.round_inputs import RoundInputs
from gradbus.actors.federated.client.updates_out import EncodedUpdate
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.models import ClassificationTask, Dataset, DataSplit
from gradbus.models.task import TrainResult
from gradbus.runtime.shm.segment import PayloadMemory
from gradbus.runtime.user_errors import WrongResult, traceback_with_place, user_error
from gradbus.runtime.wire.control import Receipt, Welcome
from gradbus.runtime.wire.messages import Identity, TrainCmd

DIM = 100
SCALES = (1e-3, 1.0, 1e3, 3e4, 7e4, 1e5, 1e9, 1e30)
each_variant = pytest.mark.parametrize(
    ("codec", "version"), [(name, version) for name in codecs.ALL for version in codecs.get(name).versions]
)


class Jumping:
    """Training that moves the model by a direction of this length in each value, or less."""

    def __init__(self, scale: float, num_samples: int) -> None:
        self.scale, self.num_samples = scale, num_samples

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def train(self, model: nn.Module, *, round_id: int, **_: Any) -> TrainResult:
        with torch.no_grad():
            for vector in model.parameters():
                vector += self.scale * torch.rand(vector.shape, generator=torch.Generator().manual_seed(round_id))
        return TrainResult(num_samples=self.num_samples, loss=0.0)


class Client:
    """One that trains round after round, and whose updates all count."""

    def __init__(self, task: Any, codec: str = "fp32", version: int = 2) -> None:
        options = {"version": version} | ({"density": 0.5} if codec in ("s4", "sq8") else {})
        options |= {"chunk_elems": 64} if codec in ("q8", "q4", "q2", "sq8") else {}
        self.welcome = Welcome(0, 1, 7, 1, codec, json.dumps(options), 1, 0.5)
        self.training = LocalTraining(
            task,
            Identity(0, 1),
            FlatModel(nn.Linear(DIM, 1, bias=False)),
            ClientStateStore(None, 0),
            PayloadMemory(switched_on=False),
        )

    def train(self, round_id: int, base: torch.Tensor, *, accepted: bool = True) -> EncodedUpdate:
        command = TrainCmd(round_id, 0, 1, 0.1, 0)
        update = self.training.train(
            RoundInputs(welcome=self.welcome, command=command, base=base), round_id, lambda: False
        )
        self.training.on_receipt(update, Receipt(0, 1, 7, round_id, round_id, accepted, ""))
        return update


def test_what_a_client_owes_is_known_again_after_a_restart_also_where_frozen_parameters_travel(tmp_path: Path) -> None:
    def started() -> tuple[Client, ClientStateStore]:
        # The controller has exchange="all": welcome.frozen is 0.
        module = nn.Sequential(nn.Linear(DIM, 1, bias=False), nn.Linear(DIM, 1, bias=False).requires_grad_(False))
        client, kept = Client(Jumping(1e-3, 1), "s4"), ClientStateStore(tmp_path, 0)
        client.training = LocalTraining(
            Jumping(1e-3, 1),
            Identity(0, 1),
            FlatModel(module),  # type: ignore[arg-type]
            kept,
            PayloadMemory(switched_on=False),
        )
        return client, kept

    first, _ = started()
    owed = first.train(1, torch.zeros(2 * DIM)).state.get("residual")
    first.training.close()
    assert owed is not None
    again, kept = started()
    again.train(2, torch.zeros(2 * DIM))
    known = kept.before(2)["residual"]
    again.training.close()
    assert torch.equal(known, owed)


def test_the_residual_of_an_update_that_was_refused_is_not_kept(tmp_path: Path) -> None:
    client, kept = Client(Jumping(1e-3, 1), "s4"), ClientStateStore(tmp_path, 0)
    client.training = LocalTraining(
        Jumping(1e-3, 1),
        Identity(0, 1),
        FlatModel(nn.Linear(DIM, 1, bias=False)),
        kept,
        PayloadMemory(switched_on=False),
    )
    counted = client.train(1, torch.zeros(DIM)).state["residual"].clone()
    client.train(2, torch.zeros(DIM), accepted=False)
    assert torch.equal(kept.before(3)["residual"], counted)
    client.training.close()


@each_variant
@pytest.mark.parametrize("far", [0.0, 1e6])
def test_an_update_is_one_that_the_sum_takes_or_the_training_has_failed(codec: str, version: int, far: float) -> None:
    base = torch.full((DIM,), far)
    failed: list[tuple[float, str]] = []
    for scale in SCALES:
        client = Client(Jumping(scale, 60_000), codec, version)
        for round_id in (1, 2):
            try:
                update = client.train(round_id, base)
            except ValueError as error:
                failed.append((scale, str(error)))
                break
            parsed = codecs.parse(update.payload, expected_dim=DIM)
            if not (parsed.is_sparse and not parsed.is_delta):
                ExactMean(DIM).add(parsed, base=base, num_samples=update.request.num_samples)
    assert all("Lower the learning rate" in text for _, text in failed)
    scales = [scale for scale, _ in failed]
    assert scales[-3:] == [1e5, 1e9, 1e30]
    assert 3e4 not in scales or (far and not codecs.get(codec, version=version).lossless)


class Returning(Jumping):
    """Trains, and returns what the test says."""

    def __init__(self, outcome: Any) -> None:
        super().__init__(0.1, 1)
        self.outcome = outcome

    def train(self, model: nn.Module, *, round_id: int, **_: Any) -> Any:
        return self.outcome


def train_by_function(model: nn.Module, samples: Any, **_: Any) -> Any:
    return None


class Wrapping(Returning):
    """As the task of a configuration file, which stands for one of the user's."""

    def __init__(self, task: Any) -> None:
        super().__init__(None)
        self.__wrapped__ = task

    def train(self, model: nn.Module, **command: Any) -> Any:
        return self.__wrapped__.train(model, **command)


def line_of(function: Any) -> str:
    return f"{Path(__file__).name}:{function.__code__.co_firstlineno} in {function.__name__}"


@pytest.mark.parametrize(("num_samples", "loss"), [(0, 0.0), (-1, 0.5), (0, float("nan")), (-1, None)])
def test_training_without_samples_is_told_how_to_sit_the_round_out(num_samples: int, loss: float | None) -> None:
    with pytest.raises(WrongResult) as caught:
        Client(Returning(TrainResult(num_samples, loss))).train(1, torch.zeros(DIM))
    told = str(user_error(caught.value))
    assert told.startswith(f"WrongResult: train has returned num_samples={num_samples} and loss={loss}: expected at ")
    assert "TrainResult.nothing()" in told
    assert told.endswith(line_of(Returning.train))


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (None, "train has returned None: "),
        ({"loss": 0.5}, "train has returned dict with 'loss': "),
        (0.5, "train has returned float: "),
        (TrainResult(None, 0.5), "train has returned TrainResult: "),  # type: ignore[arg-type]
        (TrainResult(3, "low"), "train has returned TrainResult: "),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("wrap", [lambda task: task, Wrapping], ids=["itself", "wrapped"])
def test_training_that_returns_no_result_is_told_what_to_return_and_where(outcome: Any, said: str, wrap: Any) -> None:
    with pytest.raises(WrongResult) as caught:
        Client(wrap(Returning(outcome))).train(1, torch.zeros(DIM))
    told = traceback_with_place(caught.value)
    assert told.startswith(f"WrongResult: {said}expected")
    assert "gradbus.models.TrainResult(num_samples=..., loss=...)" in told
    assert told.endswith(line_of(Returning.train)), "the user's function, and no line of gradbus"


def test_a_training_function_that_returns_none_is_named_in_place_of_the_task_that_calls_it() -> None:
    data = DataSplit(Dataset("one", torch.zeros(1, DIM), torch.zeros(1, dtype=torch.int64)))
    task = ClassificationTask(lambda: nn.Linear(DIM, 1, bias=False), data, train_fn=train_by_function)
    with pytest.raises(WrongResult) as caught:
        Client(task).train(1, torch.zeros(DIM))
    assert str(user_error(caught.value)).endswith(line_of(train_by_function))
