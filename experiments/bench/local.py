"""Training with local steps against synchronous training: accuracy and loss at equal samples, bytes, and utilisation.

``make bench-local``. Trainings run in lockstep, on one core, and are kept beside the results: a run that is interrupted
goes on where it was. ``utilisation`` trains in network namespaces of this machine, whose links to a switch have a rate
(tbf), beside what the bytes and the rate give.
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
from pathlib import Path
from typing import Any

from torch import nn

from gradbus import models
from gradbus.experiments.bench.command import Benchmark, Part
from gradbus.experiments.bench.compression import KeptResults, TrainingSetting, accuracy_key
from gradbus.experiments.bench.lockstep_training import LockstepTraining, NotFinite
from gradbus.experiments.bench.recipes import Recipe, local_recipes
from gradbus.experiments.bench.results import Measurement, commit, measurement
from gradbus.experiments.bench.training import Data, Training, train
from gradbus.experiments.namespaces import hosts_on_a_switch
from gradbus.models.text import TextTask

_MODELS: Mapping[str, Callable[..., nn.Module]] = {"CNN": models.mnist_cnn, "MLP": models.mnist_mlp}
_OF_CHANCE = 0.1  # accuracy of a training that has diverged
_ADAMW = {"name": "adamw", "lr": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "clip_norm": 1.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRecipe(Recipe):
    """A way to train the transformer; the inner optimizer is AdamW.

    Attributes:
        most: how many times as large as that of dense the loss may be.
    """

    most: float | None = None

    def settings(self) -> dict[str, Any]:
        """What a Worker is to be configured with."""
        return {"algorithm": {"name": self.algorithm, **self.options}, "optimizer": _ADAMW}


def text_recipes(intervals: Sequence[int], rates: Sequence[float]) -> list[TextRecipe]:
    """Dense, and DiLoCo in 8 bits at each interval and outer learning rate; there are few exchanges, so the outer
    momentum is low."""
    most = {20: 1.01, 100: 1.03}
    found = [TextRecipe(title="dense", algorithm="dense", options={})]
    for steps, lr in itertools.product(intervals, rates):
        options = {"steps": steps, "outer_lr": lr, "outer_momentum": 0.5}
        title = f"DiLoCo q8, H = {steps}, outer lr {lr:g}"
        found.append(TextRecipe(title=title, algorithm="diloco", options=options, most=most.get(steps)))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPlan:
    """How much is measured.

    Attributes:
        settings: on MNIST, of which ``seeds`` are a sample each. text_steps: of the transformer, on two ranks.
        intervals, outer_lrs: of its recipes. windows: of text, that are evaluated.
        rates: of links, in Mbit/s, with ``cells`` of the ways to train.
    """

    settings: Sequence[TrainingSetting]
    seeds: int
    text_steps: int
    intervals: Sequence[int] = (20, 100)
    outer_lrs: Sequence[float] = (0.4, 0.7, 1.0)
    rates: Sequence[float] = (10, 50, 100, 1000)
    cells: int = 6
    windows: int = 1024
    data: Data = "mnist"


PLANS = {
    "tiny": LocalPlan(
        settings=[TrainingSetting("MLP", 2, 4, 2)], seeds=1, text_steps=2, intervals=(1,), outer_lrs=(0.7,),
        rates=(50,), cells=1, data="glyphs", windows=8,
    ),
    "quick": LocalPlan(
        settings=[TrainingSetting("MLP", 2, 32, 600, "cosine"), TrainingSetting("CNN", 2, 16, 400, "cosine")],
        seeds=1, text_steps=400, outer_lrs=(0.7,), rates=(50,),
    ),
    "full": LocalPlan(
        settings=[TrainingSetting("CNN", 2, 16, 600, "cosine"), TrainingSetting("MLP", 2, 32, 1400, "cosine"),
                  TrainingSetting("CNN", 4, 16, 600, "cosine"), TrainingSetting("MLP", 4, 32, 1400, "cosine")],
        seeds=3, text_steps=1000,
    ),
}  # fmt: skip


def measure_accuracy(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Points of accuracy below dense, and its bytes over these, of each recipe in each setting; a sample is a seed."""
    plan = PLANS[chosen.effort]
    kept = KeptResults(chosen.out.with_name(f"{chosen.out.stem}-accuracy.jsonl"))
    split = models.load(plan.data, chosen.data_root, download=False)
    until_s = time.monotonic() + 60 * chosen.minutes
    found: dict[tuple[TrainingSetting, str], dict[int, Mapping[str, Any]]] = {}
    for seed, setting in itertools.product(range(plan.seeds), plan.settings):
        task = models.ClassificationTask(_MODELS[setting.model], split, batch_size=setting.batch_size, seed=seed)
        for recipe in local_recipes():
            key = accuracy_key(recipe, setting, plan.data, seed)
            one = kept.get(key)
            if one is None and time.monotonic() < until_s:
                one = kept.add(key, _trained(recipe, setting, task, seed))
            if one is not None:
                found.setdefault((setting, recipe.title), {})[seed] = one
    dense_title = local_recipes()[0].title
    for setting, recipe in itertools.product(plan.settings, local_recipes()[1:]):
        own, dense = found.get((setting, recipe.title), {}), found.get((setting, dense_title), {})
        seeds = sorted(own.keys() & dense.keys())
        if not seeds:
            continue
        asks = chosen.effort == "full" and setting.model == "CNN"
        accuracies = [100 * own[seed]["accuracy"] for seed in seeds]
        below = [100 * dense[seed]["accuracy"] - one for seed, one in zip(seeds, accuracies, strict=True)]
        note = f"{statistics.mean(accuracies):.2f} % ({' '.join(f'{one:.2f}' for one in accuracies)})"
        name = f"{setting.name}: {recipe.title}"
        yield measurement(name, "points", below, note=note, at_most=recipe.most_points if asks else None)
        sent = own[seeds[0]].get("bytes_per_step")
        if sent:
            all_sent = dense[seeds[0]]["bytes_per_step"]
            limit = recipe.most_bytes if asks and (setting.world == 2 or recipe.algorithm != "sparseloco") else None
            note = f"{all_sent / sent:,.0f} times fewer"
            yield measurement(f"{name}, bytes", "B", [sent], against=("dense", [all_sent]), at_most=limit, note=note)


def _trained(recipe: Recipe, setting: TrainingSetting, task: models.ClassificationTask, seed: int) -> dict[str, Any]:
    began_s = time.perf_counter()
    try:
        found = (
            LockstepTraining(recipe, task, setting.world, seed, schedule={"name": setting.schedule})
            .run(setting.steps)
            ._asdict()
        )
    except NotFinite as error:
        found = {"accuracy": _OF_CHANCE, "diverged": str(error)}
    return _reported(f"{setting.name}, seed {seed}: {recipe.title}: {100 * found['accuracy']:.2f} %", found, began_s)


def _reported(text: str, found: Mapping[str, Any], began_s: float) -> dict[str, Any]:
    seconds = round(time.perf_counter() - began_s, 1)
    print(f"{text}, {seconds} s", file=sys.stderr, flush=True)
    return {**found, "seconds": seconds, "commit": commit()}


def measure_text(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """The loss of validation of the transformer over that of dense, at equal samples; a sample is a seed."""
    plan = PLANS[chosen.effort]
    kept = KeptResults(chosen.out.with_name(f"{chosen.out.stem}-text.jsonl"))
    until_s = time.monotonic() + 60 * chosen.minutes
    recipes = text_recipes(plan.intervals, plan.outer_lrs)
    losses: dict[str, dict[int, float]] = {}
    for seed, recipe in itertools.product(range(plan.seeds), recipes):
        key = json.dumps({
            "algorithm": recipe.algorithm, "options": dict(recipe.options), "optimizer": _ADAMW, "seed": seed,
            "steps": plan.text_steps, "world": 2,
        }, sort_keys=True)  # fmt: skip
        one = kept.get(key)
        if one is None and time.monotonic() < until_s:
            one = kept.add(key, _trained_text(recipe, plan, seed))
        if one is not None:
            losses.setdefault(recipe.title, {})[seed] = one["eval_loss"]
    dense = losses.get("dense", {})
    for recipe in recipes:
        seeds = sorted(losses.get(recipe.title, {}).keys() & dense.keys())
        if seeds:
            own = [losses[recipe.title][seed] for seed in seeds]
            yield measurement(
                f"transformer, 2 ranks, {plan.text_steps} steps: {recipe.title}", "nats", own,
                against=("dense", [dense[seed] for seed in seeds]), note="loss of validation",
            )  # fmt: skip
    for steps in plan.intervals:
        best = _best(steps, losses, plan)
        if best and best.keys() & dense.keys():
            seeds = sorted(best.keys() & dense.keys())
            most = next(one.most for one in recipes if one.options.get("steps") == steps)
            yield measurement(
                f"transformer, H = {steps}: the best outer lr", "nats", [best[seed] for seed in seeds],
                against=("dense", [dense[seed] for seed in seeds]), at_most=most if chosen.effort == "full" else None,
            )  # fmt: skip


def _best(steps: int, losses: Mapping[str, Mapping[int, float]], plan: LocalPlan) -> Mapping[int, float]:
    """The losses by seed of the outer learning rate with the lowest mean."""
    titles = [one.title for one in text_recipes([steps], plan.outer_lrs)[1:] if losses.get(one.title)]
    return losses[min(titles, key=lambda title: statistics.mean(losses[title].values()))] if titles else {}


def _trained_text(recipe: TextRecipe, plan: LocalPlan, seed: int) -> dict[str, Any]:
    began_s, steps = time.perf_counter(), plan.text_steps
    task = TextTask(steps=steps, seed=seed, windows=plan.windows)
    training = LockstepTraining(recipe, task, 2, seed)
    try:
        found = training.run(steps, evaluates=False)
        loss = task.evaluate(training.mean_model()[0]).loss
    except NotFinite as error:
        return _reported(f"text: {recipe.title}: {error}", {"eval_loss": math.log(96), "diverged": str(error)}, began_s)
    sent = {"eval_loss": loss, "bytes_per_step": found.bytes_per_step}
    return _reported(f"text, {steps} steps, seed {seed}: {recipe.title}: {loss:.4f}", sent, began_s)


# Utilisation

_WAYS: Mapping[str, tuple[dict[str, Any], int]] = {  # how many steps, for slow links
    "DDP": ({"name": "dense"}, 8),
    "DGC 0.1 %": ({"name": "dgc", "density": 0.001, "warmup": "none"}, 32),
    "DiLoCo q8, H = 8": ({"name": "diloco", "steps": 8}, 32),
    "DiLoCo q8, H = 32": ({"name": "diloco", "steps": 32}, 64),
    "DiLoCo q8, H = 128": ({"name": "diloco", "steps": 128}, 256),
    "streaming q4, H = 128, 4 fragments, 16 late": (
        {"name": "diloco", "steps": 128, "fragments": 4, "delay": 16, "codec": "q4"}, 256,
    ),
}  # fmt: skip


def measure_utilisation(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Compute over wall time of the MLP on two hosts, beside what bytes and rate give."""
    plan = PLANS[chosen.effort]
    for rate, (name, (algorithm, steps)) in itertools.product(plan.rates, list(_WAYS.items())[: plan.cells]):
        run = Training(
            model=models.mnist_mlp, batch_size=64, samples=max(512, 2 * 64 * steps), data="glyphs",
            config={
                "algorithm": algorithm, "epochs": 1, "max_steps": steps, "eval_every_epochs": 0, "hash_every": 0,
                "optimizer": {"lr": 0.01, "momentum": 0.0}, "timeouts": {"join_s": 600, "collective_s": 300},
            },
        )  # fmt: skip
        with hosts_on_a_switch(2, rate) as hosts:
            ranks: list[dict[str, Any]] = train(run, timeout_s=600.0, hosts=hosts)
        epochs = [rank["epochs"][-1] for rank in ranks]
        wall = max(one["step_s_mean"] for one in epochs)
        compute = wall - min(one["wait_s_mean"] for one in epochs)
        sent = max(one["bytes_out_per_step"] for one in epochs)
        wire = sent / (rate * 125_000)
        is_late = bool(algorithm.get("delay"))
        curve = compute / (max(compute, wire) if is_late else compute + wire)
        note = f"{1e3 * compute:.1f} ms computing in {1e3 * wall:.1f} ms, {sent / 1e3:,.1f} kB a step"
        yield measurement(
            f"{rate:g} Mbit/s: {name}", "", [compute / wall], against=("curve", [curve]), note=note,
        )  # fmt: skip


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-root", type=Path, help="folder that holds MNIST/raw; else $GRADBUS_DATA")
    parser.add_argument(
        "--minutes", type=float, default=math.inf,
        help="begin no training after so long: rows then have fewer seeds, and another run trains what is missing",
    )  # fmt: skip
    parser.add_argument("--quick", dest="effort", action="store_const", const="quick", help="fewer steps, one seed")
    parser.add_argument("--tiny", dest="effort", action="store_const", const="tiny", help=argparse.SUPPRESS)  # tests


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        "accuracy": Part(measure_accuracy, "Local steps: points below dense after equal steps", 7200, 300,
                         needs_mnist=True),
        "text": Part(measure_text, "Local steps: loss of a transformer over dense's", 10_800, 600),
        "utilisation": Part(measure_utilisation, "Local steps: compute over wall time on slow links", 900, 240),
    },
    _options,
)  # fmt: skip
