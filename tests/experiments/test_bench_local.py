"""The benchmark of local steps: rows of all recipes, kept results, and the text that its transformer is trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradbus import models
from gradbus.experiments.bench import __main__ as bench
from gradbus.experiments.bench import local
from gradbus.experiments.bench.recipes import local_recipes
from gradbus.experiments.bench.results import Results
from gradbus.experiments.examples.text import VOCABULARY, CharTransformer, TextTask, corpus, sentences
from gradbus.runtime.algorithms.base import ALGORITHMS
from gradbus.runtime.choices import Choice

RECIPES = [one for one in local_recipes() if one.title in ("dense fp32", "DiLoCo q4, H = 50", "SparseLoCo, H = 30")]


def test_a_tiny_run_has_its_recipes_beside_dense_and_another_run_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "local_recipes", lambda: RECIPES)
    few = models.glyphs(train=600, test=100)  # the next test draws them all
    monkeypatch.setattr(models, "load", lambda *_, **__: few)
    arguments = ["local", "--tiny", "--out", "l.json", "--part", "accuracy", "--part", "text", "--part", "tuning"]
    assert bench.main(arguments) == 0
    results = Results.load(tmp_path / "l.json")
    accuracy, text, tuning = (results.run(part) for part in ("accuracy", "text", "tuning"))
    assert accuracy is not None
    assert text is not None
    assert tuning is not None
    assert [one.unit for one in tuning.figures] == ["% wrong"] * len(local.tuned_recipes()) + ["nats"] * len(
        local.tuned_text_recipes(1)
    )
    titles = {one.name.removesuffix(", bytes") for one in accuracy.figures}
    assert titles == {f"MLP, world 2: {recipe.title}" for recipe in RECIPES[1:]}
    title = "DiLoCo q8, H = 1, outer lr 0.7, momentum 0.7"
    assert [one.name.rpartition(": ")[2] for one in text.figures] == [f"{title}, 1 dense steps", title]
    kept = [(tmp_path / f"l-{part}.jsonl").read_text(encoding="utf-8") for part in ("accuracy", "text", "tuning")]

    def trains(*_: object) -> None:
        raise AssertionError("this was trained before")

    monkeypatch.setattr(local, "train_and_report", trains)
    monkeypatch.setattr(local, "train_text_and_report", trains)
    assert bench.main(arguments) == 0
    again = [(tmp_path / f"l-{part}.jsonl").read_text(encoding="utf-8") for part in ("accuracy", "text", "tuning")]
    assert again == kept


def test_only_what_is_named_is_trained_beside_dense_and_its_bytes_are_those_of_the_whole_run(tmp_path: Path) -> None:
    out = tmp_path / "l.json"
    arguments = ["local", "--tiny", "--out", str(out), "--part", "accuracy", "--only", "local SGD, H = 8"]
    assert bench.main([*arguments, "--only", "post-local SGD, H = 8"]) == 0
    accuracy = Results.load(out).run("accuracy")
    assert accuracy is not None
    found = {one.name.removeprefix("MLP, world 2: "): one for one in accuracy.figures}
    assert found.keys() == {"local SGD, H = 8", "post-local SGD, H = 8", "post-local SGD, H = 8, bytes"}
    sent = found["post-local SGD, H = 8, bytes"]  # in these two steps only this one exchanges anything
    assert sent.note == f"{2 * sent.samples[0] / 1e6:,.3g} MB a rank in the whole run, 1 times fewer"


def test_recipes_of_the_transformer_have_options_that_their_algorithms_take() -> None:
    for recipe in (*local.text_recipes({20: 40, 100: 80}), *local.tuned_text_recipes(40)):
        chosen = Choice.model_validate({**recipe.options, "name": recipe.algorithm})
        assert ALGORITHMS.options(chosen).keys() >= recipe.options.keys()
        assert recipe.settings()["optimizer"]["name"] == "adamw"


def test_the_text_is_the_same_at_each_call_and_ranks_draw_from_it_apart() -> None:
    assert sentences(500, 1) == sentences(900, 1)[:500] != sentences(500, 2)
    train, held_out = corpus()
    assert train.numel() > 1_000_000
    assert 0 <= int(train.min()) <= int(train.max()) < VOCABULARY
    assert 0.08 < held_out.numel() / (train.numel() + held_out.numel()) < 0.12
    task = TextTask(steps=2)
    first, again, other = (list(task.batches(rank=rank, world=2, epoch=0, seed=0)) for rank in (0, 0, 1))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert first[0].shape == (8, 65)


def test_the_transformer_has_tied_embeddings_and_looks_at_no_later_character() -> None:
    model = CharTransformer(3)
    assert 0.78e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.85e6
    assert model.head.weight is model.embed.weight
    x = torch.arange(20)[None]
    changed = x.clone()
    changed[0, -1] = 50
    with torch.no_grad():
        assert torch.allclose(model(x)[:, :-1], model(changed)[:, :-1], atol=1e-6)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), CharTransformer(3).parameters(), strict=True))
