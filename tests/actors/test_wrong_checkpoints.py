"""Checkpoints whose checksums are right and whose contents are not: each is refused as such, or does no harm."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from training_scene import Scene

from gradbus import codecs
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.data_parallel.state import Position, WorkerState, position_of
from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.controller.report import RoundReport
from gradbus.actors.federated.controller.saved_run import SavedRun
from gradbus.actors.federated.controller.state import RunState
from gradbus.actors.federated.controller.update_admission import Strike
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.commands.rundir.whole_run import totals
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.choices import STRATEGIES
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.json_text import json_text

MUTATIONS = 200  # of each kind of checkpoint
NAMES = "".join(map(chr, range(32)))
WRONG: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 7, 1 << 31, 1 << 63, (1 << 64) - 1, 10**39, 10**41, 0.5, -1e308,
    float("nan"), float("inf"), "", "7", "x" * 400, "f" * 16, NAMES, "\u202e", [], [None], [[]], [0] * 30, [{}],
    {}, {"a": 1}, {"": {"": []}},
)  # fmt: skip


# The three kinds of checkpoint: what makes one, and what goes on from it.


def federated(directory: Path) -> RunState:
    """The state of a controller with all that there is to save; opened again it goes on."""
    config = FederatedConfig(checkpoint={"dir": directory}, strategy="fedadam", downlink_codec="q8")
    torch.manual_seed(0)
    model = FlatModel(torch.nn.Linear(3, 4))
    strategy = STRATEGIES.make(config.strategy, model.dim)
    state = RunState(config, model, strategy)
    for round_id in range(state.round_id + 1, state.round_id + 3):
        assert state.held is not None
        strategy.begin(round_id, state.held)
        delta = codecs.get("fp32").encode(torch.ones(model.dim))
        strategy.add(Update(codecs.parse(delta, expected_dim=model.dim)), Facts(client_id=0, num_samples=10))
        strategy.finish(state.weights)
        state.quarantine.strike(4, round_id, "non-finite", "a value is NaN")
        strikes = (Strike(4, round_id, "stale", "late", 1),)
        report = RoundReport(round_id=round_id, clients=(0, 3), loss=0.5, strikes=strikes, marks={"clipped": (3,)})
        state.commit(report, state.held)
    assert json_text(totals(state.history))
    assert [json_text(report.to_json()) for report in state.history]
    assert all(isinstance(client_id, int) for client_id in state.quarantine.excluded(state.round_id))
    state.close()
    return state


def client(directory: Path) -> None:
    """What a client still owes. A checkpoint that cannot be used is named in the log, and does not count."""
    residuals = ClientStateStore(directory, 5)
    try:
        residuals.start_run(7, dim=8)
        owed = residuals.before(99).get("residual")
        residuals.keep(3, {"residual": torch.ones(8) if owed is None else owed + 1})
    finally:
        residuals.close()


def rank(directory: Path, algorithm: str) -> None:
    """What rank 0 saves in the midst of an epoch."""
    options = {"algorithm__density": 0.1} if algorithm == "dgc" else {}
    scene = Scene(algorithm=algorithm, checkpoint__dir=directory, **options)
    state = WorkerState(scene.config, 0, 1, label=scene.training.label)
    try:
        position = Position(step=3, epoch=1, epoch_step=2, loss_sum=1.5, batches=2, skipped=1, skipped_in_row=1)
        if state.steps():
            checkpoint = state.load(3)
            scene.training.state.restore(checkpoint, 0)
            position = position_of(checkpoint)
        scene.step()
        scene.save(state, position, num_batches=4, report=EpochReport(epoch=0, step=1, loss=0.5))
    finally:
        state.close()


KINDS: dict[str, Callable[[Path], object]] = {
    "controller": federated,
    "client": client,
    "dense rank": lambda directory: rank(directory, "dense"),
    "dgc rank": lambda directory: rank(directory, "dgc"),
}


def newest(directory: Path) -> Path:
    """The JSON of the newest checkpoint."""
    return max(directory.rglob("round-*.json"))


def sign(path: Path, document: Any) -> None:
    """Write it with a checksum that is right, as a program with another idea of it would."""
    body = {key: value for key, value in document.items() if key != "sha256"}
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**body, "sha256": checksum}))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every entry, at every depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in items:
        yield (*path, key)
        yield from places(entry, (*path, key))


def mutations(document: Any, draw: random.Random) -> Iterator[tuple[str, Any]]:
    """Each entry left out; then, at random, others in its place."""
    found = [place for place in places(document) if place[0] != "sha256"]

    def changed(place: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
        whole = copy.deepcopy(document)
        parent = whole
        for key in place[:-1]:
            parent = parent[key]
        change(parent, place[-1])
        return whole

    for place in found:
        yield f"without {place}", changed(place, lambda parent, key: parent.pop(key))
    for _ in range(MUTATIONS):
        place, wrong = draw.choice(found), draw.choice(WRONG)
        yield f"{place}: {wrong!r}", changed(place, lambda parent, key, wrong=wrong: parent.__setitem__(key, wrong))


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is about contents need not wait for the disk a thousand times."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("kind", KINDS)
def test_json_that_is_well_formed_and_wrong_is_refused_or_does_no_harm(tmp_path: Path, kind: str) -> None:
    go_on, refused, taken = KINDS[kind], 0, 0
    go_on(tmp_path / "good")
    document = json.loads(newest(tmp_path / "good").read_text())
    if kind == "controller":
        for name in (tmp_path / "good").glob("round-000001.*"):
            name.unlink()
    for number, (what, wrong) in enumerate(mutations(document, random.Random(15))):
        directory = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", directory)
        sign(newest(directory), wrong)
        try:
            go_on(directory)
            taken += 1
        except CheckpointError as error:
            refused += 1
            text = str(error)
            assert text.isprintable(), what
            assert "round-" in text or "checkpoint of" in text, what
            assert len(text) < 1000, what
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
        shutil.rmtree(directory)
    assert taken > 10  # a loss, a time, a name of another run
    assert refused > 100 or kind == "client"


def tensors_of(path: Path) -> dict[str, Tensor]:
    return load_file(path.with_suffix(".safetensors"))


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_are_missing_or_of_another_shape_or_type_are_refused(tmp_path: Path, kind: str) -> None:
    go_on = KINDS[kind]
    go_on(tmp_path / "good")
    for name in tensors_of(newest(tmp_path / "good")):
        for change in (lambda tensor: None, lambda tensor: torch.zeros(2, 2), lambda tensor: tensor.to(torch.int64)):
            directory = tmp_path / "bad"
            shutil.copytree(tmp_path / "good", directory)
            path = newest(directory)
            tensors: dict[str, Any] = tensors_of(path)
            tensors[name] = change(tensors[name])
            save_file({k: v for k, v in tensors.items() if v is not None}, path.with_suffix(".safetensors"))
            document = json.loads(path.read_text())
            checksum = hashlib.sha256(path.with_suffix(".safetensors").read_bytes()).hexdigest()
            sign(path, {**document, "tensors_sha256": checksum})
            is_kept_by_optimizer = "optimizer" in name and tensors[name] is None  # SGD then begins with no momentum
            is_kept_by_dgc = "samples" in name and (tensors[name] is None or tensors[name].shape == (2,))
            if kind == "client" or is_kept_by_optimizer or is_kept_by_dgc:
                go_on(directory)
            else:
                with pytest.raises(CheckpointError):
                    go_on(directory)
            shutil.rmtree(directory)


def test_an_entry_that_is_wrong_is_told_with_its_place_and_what_was_expected(tmp_path: Path) -> None:
    federated(tmp_path)
    path = newest(tmp_path)
    document = json.loads(path.read_text())
    document["meta"]["history"][1]["bytes_up"] = ["many"]
    sign(path, document)
    with CheckpointStore(tmp_path) as store, pytest.raises(CheckpointError) as caught:
        store.load(2, SavedRun.of)
    assert str(caught.value) == (f"{path.name}: meta.history.1.bytes_up: Input should be a valid integer, got ['many']")


def test_a_checkpoint_of_an_earlier_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    rank(tmp_path, "dense")
    document = json.loads(newest(tmp_path).read_text())
    document["meta"]["settings"] = {"seed": 0, "accumulation_steps": 1, "exchange": "dense", "exchange_options": "{}"}
    sign(newest(tmp_path), document)
    with pytest.raises(CheckpointError, match=r"earlier version.*parallel\.exchange='dense'.*another checkpoint\.dir"):
        rank(tmp_path, "dense")


def test_a_wrong_checkpoint_counts_as_damaged_and_the_one_before_it_is_taken(tmp_path: Path) -> None:
    federated(tmp_path)
    document = json.loads(newest(tmp_path).read_text())
    document["meta"]["run_id"] = None
    sign(newest(tmp_path), document)
    assert federated(tmp_path).round_id == 3  # two more after round 1
