"""The benchmark of compression: every algorithm has a row, trainings in lockstep have the bits of deployed ones, and
what has been trained is not trained again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scene import make_task, succeeded, train, vector

from gradbus import models
from gradbus.experiments.bench import __main__ as bench
from gradbus.experiments.bench import compression
from gradbus.experiments.bench.compression import KeptResults, TrainingSetting, accuracy_key
from gradbus.experiments.bench.lockstep_training import LockstepTraining, NotFinite, ReplicasDiffer
from gradbus.experiments.bench.recipes import TORCH_POWERSGD, Recipe, all_recipes, local_recipes
from gradbus.experiments.bench.results import Results
from gradbus.runtime.algorithms.base import ALGORITHMS, Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.requests import AllReduce, Program
from gradbus.runtime.choices import Choice
from gradbus.runtime.config.data_parallel import DataParallelConfig

RECIPES = {recipe.title: recipe for recipe in all_recipes()}


def test_every_algorithm_of_the_table_has_a_recipe_whose_options_it_takes() -> None:
    local = local_recipes()
    assert {recipe.algorithm for recipe in (*RECIPES.values(), *local)} == set(ALGORITHMS.table)
    assert len(RECIPES) == len(list(all_recipes()))
    assert next(iter(RECIPES)) == "dense fp32"
    for recipe in (*RECIPES.values(), *local):
        for more in ({}, recipe.steady):
            given = Choice.model_validate({**recipe.options, **more, "name": recipe.algorithm})
            assert ALGORITHMS.options(given).keys() >= given.options.keys()


@pytest.mark.parametrize(
    "title",
    [
        "dense fp32",
        "dense, a step late",
        "powersgd, adaptive rank",
        "dgc 0.1 %",
        "qadam",
        "decentralized ring",
        "async averaging",
        "streaming DiLoCo",
        "SparseLoCo",
    ],
)
def test_a_training_in_lockstep_has_the_bits_of_ranks_that_are_deployed(title: str) -> None:
    options = {"codec": "q4", "steps": 4, "fragments": 2, "delay": 1}
    soon = {
        "streaming DiLoCo": Recipe(title=title, algorithm="diloco", options=options),
        "SparseLoCo": Recipe(title=title, algorithm="sparseloco", options={"steps": 3}),
    }
    recipe = soon.get(title) or RECIPES[title]
    config = DataParallelConfig(epochs=2, **recipe.settings())
    outcomes = succeeded(train(make_task(), configs=[config] * 2))
    training = LockstepTraining(recipe, make_task(), world=2)
    steps = outcomes[0].worker.summary.steps
    assert steps == 14  # the last one of an epoch has fewer samples
    training.run(steps)
    for outcome in outcomes:
        assert torch.equal(outcome.parameters, vector(training.mean_model()[0]))


def test_results_that_are_a_step_late_are_all_applied_at_the_end() -> None:
    in_time, late = (LockstepTraining(RECIPES[title], make_task(), 2) for title in ("dense fp32", "dense, a step late"))
    start = vector(late.models[0])
    late.step(0)
    assert torch.equal(vector(late.models[0]), start)
    late.drain()
    in_time.step(0)
    assert torch.equal(vector(late.models[0]), vector(in_time.models[0]))


class Unequal(Algorithm):
    """Leaves every rank with its own gradients."""

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        yield AllReduce("nothing", torch.zeros(1))


def test_replicas_that_promise_to_be_equal_and_are_not_are_an_error() -> None:
    recipe = Recipe(title="", algorithm=f"{__name__}:Unequal")
    with pytest.raises(ReplicasDiffer, match="step 0: rank 1 has another result than rank 0"):
        LockstepTraining(recipe, make_task(), 2).run(1)


def test_a_training_that_diverges_says_in_which_step() -> None:
    recipe = Recipe(title="", algorithm="dense", lr=1e30)
    with pytest.raises(NotFinite, match=r"step [1-9]: a gradient has NaN"):
        LockstepTraining(recipe, make_task(), 2).run(20)


def test_the_model_of_ranks_that_differ_is_their_mean() -> None:
    training = LockstepTraining(RECIPES["decentralized shift-one"], make_task(), 3)
    outcome = training.run(3)
    mean, _ = training.mean_model()
    expected = torch.stack([vector(model).double() for model in training.models]).mean(0)
    assert torch.allclose(vector(mean).double(), expected, atol=1e-7)
    assert 0 < outcome.distance < 1
    assert LockstepTraining(RECIPES["topk 1 %"], make_task(), 3).run(1).distance == 0


def test_what_decides_the_accuracy_is_the_key_of_a_result_and_what_does_not_is_not() -> None:
    recipe, setting = RECIPES["qadam"], TrainingSetting("MLP", 2, 4, 2)
    key = accuracy_key(recipe, setting, "mnist", 0)
    assert accuracy_key(Recipe(**{**asdict(recipe), "title": "other", "why": "x"}), setting, "mnist", 0) == key
    for other in (
        accuracy_key(Recipe(**{**asdict(recipe), "lr": 1.0}), setting, "mnist", 0),
        accuracy_key(Recipe(**{**asdict(recipe), "options": {}}), setting, "mnist", 0),
        accuracy_key(recipe, TrainingSetting("MLP", 2, 4, 3), "mnist", 0),
        accuracy_key(recipe, setting, "mnist", 1),
    ):
        assert other != key


def test_a_result_is_kept_as_soon_as_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kept.jsonl"
    kept = KeptResults(path)
    for name in "ab":
        kept.add(json.dumps({"name": name}), {"accuracy": 0.5})
        assert KeptResults(path).get(json.dumps({"name": name})) == {"of": {"name": name}, "accuracy": 0.5}
    assert kept.get(json.dumps({"name": "c"})) is None


@pytest.mark.parametrize(("here", "others"), [("1111", 1), ("2222", 2), ("1111+", 3)])
def test_that_kept_results_are_of_another_commit_is_said_once_when_one_of_them_is_used(
    here: str, others: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compression, "commit", lambda: here)
    path = tmp_path / "kept.jsonl"
    *keys, new = (json.dumps({"name": name}) for name in "abcd")
    kept = KeptResults(path)
    for key, commit in zip(keys, ("1111", "1111", "2222"), strict=True):
        kept.add(key, {"accuracy": 0.5, "commit": commit})
    kept = KeptResults(path)
    kept.add(new, {"accuracy": 0.5, "commit": here})
    assert kept.get(new)
    assert capsys.readouterr().err == ""  # it is of this run
    assert all(kept.get(key) for key in keys)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{path}: {others} of 3 kept results are of another commit, or of files changed since")


def test_a_tiny_run_has_every_algorithm_beside_dense_and_another_run_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "train_torch_powersgd_on_gloo", lambda *_: {"accuracy": 0.5})  # no processes here
    few = models.glyphs(train=600, test=100)  # the next test draws them all
    monkeypatch.setattr(models, "load", lambda *_, **__: few)
    arguments = ["compression", "--tiny", "--out", "c.json", "--part", "accuracy", "--part", "bytes"]
    assert bench.main(arguments) == 0
    results = Results.load(tmp_path / "c.json")
    accuracy, sent = (results.run(part) for part in ("accuracy", "bytes"))
    assert accuracy is not None
    assert sent is not None
    assert {one.name for one in accuracy.figures} == {
        f"MLP, world 2: {title}" for title in (*RECIPES, TORCH_POWERSGD.title)
    }
    ratios = {one.name: one.judged for one in sent.figures}
    assert ratios["MLP, world 2: dense fp16"] == 0.5
    assert ratios["MLP, world 2: powersgd rank 4"] < 0.02
    assert ratios[f"MLP, world 2: {TORCH_POWERSGD.title}"] == ratios["MLP, world 2: powersgd rank 4"]
    before = (tmp_path / "c-accuracy.jsonl").read_text(encoding="utf-8")

    def train_again(*_: Any) -> None:
        raise AssertionError("it is there")

    monkeypatch.setattr(compression, "train_lockstep", train_again)
    assert bench.main([*arguments[:4], "--part", "accuracy"]) == 0
    assert (tmp_path / "c-accuracy.jsonl").read_text(encoding="utf-8") == before


def test_only_what_is_named_is_trained_beside_dense(tmp_path: Path) -> None:
    arguments = ["compression", "--tiny", "--out", "c.json", "--part", "accuracy", "--only", "topk 1 %"]
    assert bench.main(arguments) == 0
    run = Results.load(tmp_path / "c.json").run("accuracy")
    assert run is not None
    assert {one.name for one in run.figures} == {"MLP, world 2: dense fp32", "MLP, world 2: topk 1 %"}


def test_exchanges_of_a_large_world_are_timed_in_lockstep(tmp_path: Path) -> None:
    assert bench.main(["compression", "--tiny", "--out", "c.json", "--part", "lockstep"]) == 0
    run = Results.load(tmp_path / "c.json").run("lockstep")
    assert run is not None
    notes = {one.name: one.note for one in run.figures}
    assert notes["8 ranks: dense, ring"] == f"{8 * 2 * 7} messages"


@pytest.mark.slow
def test_pytorchs_own_hook_is_trained_on_gloo() -> None:
    found = compression.train_torch_powersgd_on_gloo(TrainingSetting("MLP", 2, 4, 4), "glyphs", None, 0)
    assert 0 <= found["accuracy"] <= 1
    assert TORCH_POWERSGD.title not in RECIPES


@pytest.mark.slow
def test_steps_of_real_processes_are_timed_beside_those_on_gloo(tmp_path: Path) -> None:
    assert bench.main(["compression", "--tiny", "--part", "time", "--out", "t.json"]) == 0
    run = Results.load(tmp_path / "t.json").run("time")
    assert run is not None
    names = {one.name for one in run.figures}
    assert {"MLP, world 2: bytegrad, coding", "MLP, world 2: bytegrad beside powersgd rank 4, step"} <= names
    assert all(min(one.samples) > 0 for one in run.figures if one.name.endswith(", step"))
