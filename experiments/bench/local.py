"""Training with local steps against synchronous training: accuracy and loss at equal samples, bytes, and utilisation.

``make bench PART=local``. Trainings run in lockstep, on one core, and are kept beside the results: a run that is
interrupted goes on where it was. :mod:`gradbus.experiments.bench.utilisation` has the part ``utilisation``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradbus import models
from gradbus.experiments.bench.command import Benchmark, Part, add_training
from gradbus.experiments.bench.compression import KeptResults, TrainingSetting, accuracy_key, those_named
from gradbus.experiments.bench.lockstep_training import LockstepTraining, NotFinite
from gradbus.experiments.bench.recipes import Recipe, local_recipes
from gradbus.experiments.bench.results import Measurement, commit, measurement
from gradbus.experiments.bench.training import Data
from gradbus.experiments.bench.utilisation import measure_utilisation
from gradbus.experiments.examples.text import TextTask

_MODELS: Mapping[str, Callable[..., nn.Module]] = {"CNN": models.mnist_cnn, "MLP": models.mnist_mlp}
_OF_CHANCE = 0.1  # accuracy of a training that has diverged
_ADAMW = {"name": "adamw", "lr": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "clip_norm": 1.0}
_CONTEXT = 32  # characters: twice the steps of 64 in the same time


_TUNING_SEED = 100  # of no sample
_HELD_OUT = 10_000  # samples of the training set, the last ones, that options are chosen on
_SCHEDULE = {"name": "cosine", "warmup_steps": 100}  # of the transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRecipe(Recipe):
    """A way to train the transformer; the inner optimizer is AdamW.

    Attributes:
        most: how many times as large as that of dense the loss may be.
    """

    most: float | None = None

    def settings(self) -> dict[str, Any]:
        """Return what a Worker is to be configured with."""
        return {"algorithm": {"name": self.algorithm, **self.options}, "optimizer": _ADAMW}


def _text_recipe(steps: int, lr: float, momentum: float, dense_steps: int, most: float | None = None) -> TextRecipe:
    options = {"steps": steps, "outer_lr": lr, "outer_momentum": momentum, "dense_steps": dense_steps}
    title = f"DiLoCo q8, H = {steps}, outer lr {lr:g}, momentum {momentum:g}"
    return TextRecipe(
        title=title + (f", {dense_steps} dense steps" if dense_steps else ""),
        algorithm="diloco",
        options=options,
        most=most,
    )


_DENSE_TEXT = TextRecipe(title="dense", algorithm="dense", options={})


def text_recipes(dense_steps: Mapping[int, int]) -> list[TextRecipe]:
    """Dense, and DiLoCo in 8 bits at each interval: after so many synchronous steps, and from the first one."""
    found = [_DENSE_TEXT]
    for is_late, steps in itertools.product((True, False), dense_steps):
        outer, most = ((0.8, 0.6), 1.03) if steps >= 100 else ((0.7, 0.7), 1.01 if steps >= 20 else None)
        found.append(_text_recipe(steps, *outer, is_late * dense_steps[steps], most))
    return found


def tuned_text_recipes(dense_steps: int) -> list[TextRecipe]:
    """The options of ``diloco`` that were compared."""
    tried = [(20, *one) for one in ((1.0, 0.0, 0), (1.0, 0.5, 0), (0.5, 0.8, 0), (0.7, 0.7, 0))]
    tried += [(steps, *one, dense_steps) for steps in (20, 100) for one in ((0.7, 0.7), (0.8, 0.6))]
    tried += [(100, *one, dense_steps) for one in ((0.7, 0.8), (1.0, 0.5))]
    return [_DENSE_TEXT, *(_text_recipe(*one) for one in tried)]


def tuned_recipes() -> list[Recipe]:
    """Learning rates of dense and the options of ``diloco`` that were compared for MNIST."""
    tried = [(30, 0.7, 0.5, 0.02), (30, 0.7, 0.5, 0.03)]
    tried += [(50, *outer, 0.05) for outer in ((0.7, 0.5), (0.7, 0.9), (1.0, 0.0))]
    return [Recipe(title=f"dense, lr {lr:g}", algorithm="dense", lr=lr) for lr in (0.02, 0.03)] + [
        Recipe(
            title=f"DiLoCo q8, H = {steps}, outer lr {outer:g}, momentum {momentum:g}, lr {lr:g}",
            algorithm="diloco",
            options={"steps": steps, "outer_lr": outer, "outer_momentum": momentum},
            lr=lr,
        )
        for steps, outer, momentum, lr in tried
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPlan:
    """Tells how much is measured.

    Attributes:
        settings: on MNIST, of which ``seeds`` are a sample each. text_steps: of the transformer, on two ranks.
        dense_steps: synchronous steps of its recipes, by their intervals. windows: of text, that are evaluated.
    """

    settings: Sequence[TrainingSetting]
    seeds: int
    text_steps: int
    dense_steps: Mapping[int, int]
    windows: int = 1024
    data: Data = "mnist"


PLANS = {
    "tiny": LocalPlan(
        settings=[TrainingSetting("MLP", 2, 4, 2)], seeds=1, text_steps=2, dense_steps={1: 1}, data="glyphs",
        windows=8,
    ),
    "quick": LocalPlan(
        settings=[TrainingSetting("MLP", 2, 32, 600, "cosine"), TrainingSetting("CNN", 2, 16, 400, "cosine")],
        seeds=1, text_steps=400, dense_steps={20: 40, 100: 80},
    ),
    "full": LocalPlan(  # steps that 20, 30, 50 and 100 divide: the last exchange has all of them
        settings=[TrainingSetting("CNN", 2, 16, 2400, "cosine"), TrainingSetting("CNN", 4, 8, 2400, "cosine"),
                  TrainingSetting("MLP", 2, 32, 1200, "cosine"), TrainingSetting("MLP", 4, 32, 1200, "cosine")],
        seeds=3, text_steps=1600, dense_steps={20: 160, 100: 320},
    ),
}  # fmt: skip


def measure_accuracy(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Points of accuracy below dense, and its bytes over these, of each recipe in each setting; a sample is a seed."""
    plan = PLANS[chosen.effort]
    split = models.load(plan.data, chosen.data_root, download=False)
    found: dict[tuple[TrainingSetting, str], dict[int, Mapping[str, Any]]] = {}
    trainer = _Trainer(chosen, "accuracy")
    dense, *others = those_named(chosen, local_recipes())
    asked = [dense, *(one for one in others if one.most_points is not None)]  # first, where time is short
    for recipes in (asked, [one for one in others if one.most_points is None]):
        for setting, seed in itertools.product(plan.settings, range(plan.seeds)):
            for recipe in recipes:
                one = trainer.of_digits(recipe, setting, split, plan.data, seed)
                if one is not None:
                    found.setdefault((setting, recipe.title), {})[seed] = one
    for setting, recipe in itertools.product(plan.settings, others):
        own, reference = found.get((setting, recipe.title), {}), found.get((setting, dense.title), {})
        seeds = sorted(own.keys() & reference.keys())
        if not seeds:
            continue
        asks = chosen.effort == "full" and setting.model == "CNN"
        accuracies = [100 * own[seed]["accuracy"] for seed in seeds]
        below = [100 * reference[seed]["accuracy"] - one for seed, one in zip(seeds, accuracies, strict=True)]
        note = f"{statistics.mean(accuracies):.2f} % ({' '.join(f'{one:.2f}' for one in accuracies)})"
        name = f"{setting.name}: {recipe.title}"
        yield measurement(name, "points", below, note=note, at_most=recipe.most_points if asks else None)
        sent = own[seeds[0]].get("bytes_per_step")
        if sent:
            all_sent = reference[seeds[0]]["bytes_per_step"]
            limit = recipe.most_bytes if asks and (setting.world == 2 or recipe.algorithm != "sparseloco") else None
            note = f"{sent * setting.steps / 1e6:,.3g} MB a rank in the whole run, {all_sent / sent:,.0f} times fewer"
            yield measurement(f"{name}, bytes", "B", [sent], against=("dense", [all_sent]), at_most=limit, note=note)


def measure_tuning(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Yield what the options were chosen by: on the last samples of the training set, and on other windows of the text,
    with a seed that is of no sample."""
    plan = PLANS[chosen.effort]
    trainer = _Trainer(chosen, "tuning")
    whole = models.load(plan.data, chosen.data_root, download=False).train
    first = len(whole) - min(_HELD_OUT, len(whole) // 6)
    kept, held_out = (
        models.Dataset(whole.name, whole.images[part], whole.labels[part])
        for part in (slice(first), slice(first, None))
    )
    split, setting = models.DataSplit(kept, held_out), plan.settings[0]
    for recipe in tuned_recipes():
        one = trainer.of_digits(recipe, setting, split, f"{plan.data}, held out", _TUNING_SEED)
        if one is not None:
            yield measurement(f"{setting.name}: {recipe.title}", "% wrong", [100 - 100 * one["accuracy"]])
    for of_text in tuned_text_recipes(min(plan.dense_steps.values())):
        one = trainer.of_text(of_text, plan, _TUNING_SEED, is_tuned=True)
        if one is not None:
            yield measurement(f"transformer: {of_text.title}", "nats", [one["eval_loss"]])


def measure_text(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """The loss of validation of the transformer over that of dense, at equal samples; a sample is a seed."""
    plan = PLANS[chosen.effort]
    trainer = _Trainer(chosen, "text")
    recipes = text_recipes(plan.dense_steps)
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for seed, recipe in itertools.product(range(plan.seeds), recipes):
        one = trainer.of_text(recipe, plan, seed)
        if one is not None:
            found.setdefault(recipe.title, {})[seed] = one
    dense = found.get(_DENSE_TEXT.title, {})
    for recipe in recipes[1:]:
        own = found.get(recipe.title, {})
        seeds = sorted(own.keys() & dense.keys())
        if seeds:
            fewer = dense[seeds[0]]["bytes_per_step"] / own[seeds[0]]["bytes_per_step"]
            yield measurement(
                f"transformer, 2 ranks, {plan.text_steps} steps: {recipe.title}",
                "nats",
                [own[seed]["eval_loss"] for seed in seeds],
                against=("dense", [dense[seed]["eval_loss"] for seed in seeds]),
                at_most=recipe.most if chosen.effort == "full" else None,
                note=f"loss of validation; {fewer:,.0f} times fewer bytes",
            )


class _Trainer:
    """Trains what is not kept yet, in lockstep, until the time is over."""

    def __init__(self, chosen: argparse.Namespace, part: str) -> None:
        self._kept = KeptResults(chosen.out.with_name(f"{chosen.out.stem}-{part}.jsonl"))
        self._until_s = time.monotonic() + 60 * chosen.minutes

    def _result(self, key: str, train: Callable[[], dict[str, Any]]) -> Mapping[str, Any] | None:
        found = self._kept.get(key)
        if found is None and time.monotonic() < self._until_s:
            found = self._kept.add(key, train())
        return found

    def of_digits(
        self, recipe: Recipe, setting: TrainingSetting, split: models.DataSplit, data: str, seed: int
    ) -> Mapping[str, Any] | None:
        """None: there was no time for it. ``data``: the name of ``split``, which results are kept by."""

        def train() -> dict[str, Any]:
            task = models.ClassificationTask(_MODELS[setting.model], split, batch_size=setting.batch_size, seed=seed)
            return train_and_report(recipe, setting, task, seed)

        return self._result(accuracy_key(recipe, setting, data, seed), train)

    def of_text(
        self, recipe: TextRecipe, plan: LocalPlan, seed: int, *, is_tuned: bool = False
    ) -> Mapping[str, Any] | None:
        """None: there was no time for it. ``is_tuned``: evaluated for a choice of options."""
        key = json.dumps(
            {
                "algorithm": recipe.algorithm,
                "options": dict(recipe.options),
                "optimizer": _ADAMW,
                "seed": seed,
                "steps": plan.text_steps,
                "world": 2,
                "context": _CONTEXT,
                "schedule": _SCHEDULE,
                "is_tuned": is_tuned,
            },
            sort_keys=True,
        )
        return self._result(key, lambda: train_text_and_report(recipe, plan, seed, is_tuned=is_tuned))


def train_and_report(
    recipe: Recipe, setting: TrainingSetting, task: models.ClassificationTask, seed: int
) -> dict[str, Any]:
    began_s = time.perf_counter()
    training = LockstepTraining(recipe, task, setting.world, seed, schedule={"name": setting.schedule})
    try:
        found = training.run(setting.steps)._asdict()
    except NotFinite as error:
        found = {"accuracy": _OF_CHANCE, "diverged": str(error)}
    return _reported(f"{setting.name}, seed {seed}: {recipe.title}: {100 * found['accuracy']:.2f} %", found, began_s)


def train_text_and_report(recipe: TextRecipe, plan: LocalPlan, seed: int, *, is_tuned: bool) -> dict[str, Any]:
    began_s, steps = time.perf_counter(), plan.text_steps
    task = TextTask(steps=steps, seed=seed, context=_CONTEXT, windows=plan.windows, is_tuned=is_tuned)
    training = LockstepTraining(recipe, task, 2, seed, schedule=_SCHEDULE)
    try:
        found = training.run(steps, evaluates=False)
        loss = task.evaluate(training.mean_model()[0]).loss
    except NotFinite as error:
        lost = {"eval_loss": math.log(96), "bytes_per_step": math.nan, "diverged": str(error)}
        return _reported(f"text: {recipe.title}: {error}", lost, began_s)
    sent = {"eval_loss": loss, "bytes_per_step": found.bytes_per_step}
    return _reported(f"text, {steps} steps, seed {seed}: {recipe.title}: {loss:.4f}", sent, began_s)


def _reported(text: str, found: Mapping[str, Any], began_s: float) -> dict[str, Any]:
    seconds = round(time.perf_counter() - began_s, 1)
    print(f"{text}, {seconds} s", file=sys.stderr, flush=True)
    return {**found, "seconds": seconds, "commit": commit()}


def _options(parser: argparse.ArgumentParser) -> None:
    titles = [it.title for it in local_recipes()]
    add_training(parser, titles, "accuracy of dense and this row alone, such as 'SparseLoCo, H = 30'")
    parser.add_argument("--runs", type=int, default=3, help="of each way, for the utilisation [%(default)s]")


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        "accuracy": Part(
            measure_accuracy, "Local steps: points below dense after equal steps", 7200, 300, needs_mnist=True
        ),
        "tuning": Part(
            measure_tuning, "Local steps: options compared, on samples of the training set", 1800, 300, needs_mnist=True
        ),
        "text": Part(measure_text, "Local steps: loss of a transformer over dense's", 10_800, 600),
        "utilisation": Part(measure_utilisation, "Local steps: compute over wall time on slow links", 1140, 300),
    },
    _options,
    ("accuracy", "text", "utilisation"),
)
