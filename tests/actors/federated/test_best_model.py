"""The best model beside the newest checkpoints, over restarts and damages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradbus.actors.federated.controller.best_model import BestModel, SavedBest, place_of
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.actors.federated.controller.saved_run import restore_weights
from gradbus.actors.federated.controller.state import RunState
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.choices import STRATEGIES
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import CheckpointError, ConfigError


class Run:
    """A start of a run, whose rounds make models of their number alone."""

    def __init__(self, directory: Path, **checkpoint: Any) -> None:
        chosen = {"dir": directory, "keep_best": "eval_loss", **checkpoint}
        self.config = FederatedConfig(checkpoint=chosen)  # type: ignore[arg-type]
        model = FlatModel(nn.Linear(3, 4))
        self.state = RunState(self.config, model, STRATEGIES.make(self.config.strategy, model.dim))
        self.best = BestModel(self.config.checkpoint, self.state)

    def round(self, loss: float | None, **report: Any) -> None:
        self.commit()
        self.best.note(RoundReport(round_id=self.state.round_id, eval_loss=loss, **report))

    def commit(self) -> None:
        self.state.weights.fill_(self.state.round_id + 1)
        self.state.commit(RoundReport(round_id=self.state.round_id + 1), None)

    def end(self) -> None:
        self.best.close()
        self.state.close()


def kept(directory: Path) -> tuple[int, float, float]:
    """Round, value and weights of the model that is kept."""
    store = CheckpointStore.to_read(place_of(directory))
    checkpoint = store.load_newest(SavedBest.of)
    assert checkpoint is not None
    module = nn.Linear(3, 4)
    restore_weights(module, checkpoint, store.load_constant)
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    assert len(weights.unique()) == 1
    return checkpoint.round_id, SavedBest.of(checkpoint).best.value, float(weights[0])


def test_the_model_of_the_best_evaluation_is_kept_and_no_other(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for loss in (3.0, 1.0, 1.0, float("nan"), None, 2.0):
        run.round(loss)
    run.end()
    assert kept(tmp_path) == (2, 1.0, 2.0)
    assert len(list(place_of(tmp_path).glob("round-*"))) == 2, "its tensors and its JSON"


def test_a_large_value_may_be_the_good_one(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_best="accuracy", best_mode="max")
    for accuracy in (0.5, 0.75, 0.25):
        run.round(1.0, accuracy=accuracy)
    run.end()
    assert kept(tmp_path) == (2, 0.75, 2.0)


def test_a_run_that_goes_on_knows_its_best_model(tmp_path: Path) -> None:
    first = Run(tmp_path)
    for loss in (3.0, 1.0, 2.0):
        first.round(loss)
    first.end()
    second = Run(tmp_path)
    assert second.best.round_id == 2
    second.best.note(RoundReport(round_id=3, eval_loss=2.0))  # evaluated again after the resume
    second.round(1.5)
    second.end()
    assert kept(tmp_path)[0] == 2
    third = Run(tmp_path)
    third.round(0.5)
    third.end()
    assert kept(tmp_path) == (5, 0.5, 5.0)


def test_a_crash_between_the_new_model_and_the_removal_of_the_old_one_leaves_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.round(3.0)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "remove", lambda self, round_id: None)  # the process is gone by then
        run.round(1.0)
    run.end()
    assert len(CheckpointStore.to_read(place_of(tmp_path)).rounds()) == 2
    again = Run(tmp_path)
    assert (again.best.round_id, again.best.best and again.best.best.value) == (2, 1.0)
    again.end()
    assert CheckpointStore.to_read(place_of(tmp_path)).rounds() == [2]


def test_a_crash_while_the_model_is_written_leaves_the_one_before(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.round(3.0)
    run.commit()
    run.end()
    (place_of(tmp_path) / "round-000002.safetensors").write_bytes(b"half a file")  # its JSON is the commit
    assert kept(tmp_path)[0] == 1
    again = Run(tmp_path)
    again.best.note(RoundReport(round_id=2, eval_loss=1.0))
    again.end()
    assert kept(tmp_path) == (2, 1.0, 2.0)


def test_a_damaged_model_is_replaced_by_the_next_evaluation(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.round(1.0)
    run.end()
    (place_of(tmp_path) / "round-000001.safetensors").write_bytes(b"damaged")
    again = Run(tmp_path)
    assert again.best.best is None
    again.round(5.0)
    again.end()
    assert kept(tmp_path) == (2, 5.0, 2.0)


@pytest.mark.parametrize("changed", [{"keep_best": "accuracy"}, {"best_mode": "max"}])
def test_with_another_metric_the_search_begins_anew(tmp_path: Path, changed: dict[str, Any]) -> None:
    run = Run(tmp_path)
    run.round(1.0, accuracy=0.5)
    run.end()
    again = Run(tmp_path, **changed)
    assert again.best.best is None
    again.round(5.0, accuracy=0.25)
    again.end()
    assert kept(tmp_path)[0] == 2


def test_what_another_run_has_left_in_the_folder_is_removed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for loss in (9.0, 8.0, 0.5):
        run.round(loss)
    run.end()
    for path in tmp_path.glob("round-*"):
        path.unlink()
    other = Run(tmp_path)
    other.round(7.0)
    other.end()
    assert kept(tmp_path)[:2] == (1, 7.0)


def test_without_a_directory_of_checkpoints_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"keep_best needs federated\.checkpoint\.dir"):
        Run(None)  # type: ignore[arg-type]


def test_a_metric_that_no_evaluation_has_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_best="rmse")
    with pytest.raises(ConfigError, match=r"keep_best: the evaluation has no 'rmse'; it has eval_loss"):
        run.round(1.0)
    run.end()


def test_two_processes_do_not_keep_a_best_model_in_one_folder(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(CheckpointError, match="in use"):
        BestModel(run.config.checkpoint, run.state)
    run.end()
