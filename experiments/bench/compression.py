"""Algorithms of data-parallel training side by side: accuracy after equal steps, bytes, time of a step and of coding.

``make bench PART=compression``. Which algorithms: those of the table of gradbus, with the options and learning rates of
``recipes.py``. Accuracy and bytes are of all ranks in one process, in lockstep, whose bits are those of a run with a
process for each rank; each result is kept in a file beside ``--out`` as it comes, and another run computes what is
missing there. StepTimes are of real processes over DDS. MNIST as ``--data-root`` or ``GRADBUS_DATA`` says.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gradbus import models
from gradbus.experiments.bench.command import Benchmark, Part, add_training
from gradbus.experiments.bench.data_parallel import EVERY_STEP, steps_of, typical
from gradbus.experiments.bench.gloo_training import GlooRun, bytes_of_torchs_hook, train_on_gloo
from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.experiments.bench.lockstep_training import LockstepTraining, NotFinite
from gradbus.experiments.bench.processes import run_ranks
from gradbus.experiments.bench.recipes import TORCH_POWERSGD, Recipe, all_recipes
from gradbus.experiments.bench.results import Measurement, commit, measurement
from gradbus.experiments.bench.timing import by_turns
from gradbus.experiments.bench.training import Data, Training
from gradbus.runtime import fast_paths
from gradbus.runtime.algorithms.base import Place, Step, bucket_of, make_algorithm

_MODELS: dict[str, Callable[..., nn.Module]] = {"CNN": models.mnist_cnn, "MLP": models.mnist_mlp}
_TIMED_AGAINST = "powersgd rank 4"  # what ByteGrad is said to be half as fast again as
_WARM_UP_STEPS = 8
_CODING_STEPS = 8  # two exchanges of those that have one in four steps
_SAMPLES = 512  # generated digits: what a step costs does not depend on them
_SMALL_LR = 1e-6  # where only bytes and times count: Adam hardly warmed up diverges
_OF_CHANCE = 0.1  # accuracy of a training that has diverged
_LOCKSTEP_NUMEL = 1 << 16  # 64 entries for each part of a ring of 1,024
_IN_LOCKSTEP: Mapping[str, tuple[str, dict[str, Any]]] = {
    "dense, ring": ("dense", {"route": "ring"}), "decentralized, shift-one": ("decentralized", {"peers": "shift-one"}),
    "decentralized, ring": ("decentralized", {"peers": "ring"}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainingSetting:
    """Holds what all algorithms have in common. ``batch_size``: of one rank. ``schedule``: of the learning rate, which
    rises from 0 over the first ``warmup_steps``."""

    model: str
    world: int
    batch_size: int
    steps: int
    schedule: str = "fixed"
    warmup_steps: int = 0

    @property
    def name(self) -> str:
        return f"{self.model}, world {self.world}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionPlan:
    """Tells how much is measured.

    Attributes:
        settings: for accuracy, of which ``seeds`` are a sample each, from 0. longer: the same, for the recipes with a
            limit. sending: for bytes. timing: for times, of ``launches`` each, and ``timed`` the titles of the recipes;
            empty: all.
    """

    settings: Sequence[TrainingSetting]
    longer: Sequence[TrainingSetting]
    seeds: int
    sending: Sequence[TrainingSetting]
    timing: Sequence[TrainingSetting]
    launches: int
    timed: Sequence[str] = ()
    lockstep_world: int = 1024
    data: Data = "mnist"


PLANS = {
    "tiny": CompressionPlan(
        settings=[TrainingSetting("MLP", 2, 4, 2)], longer=[TrainingSetting("MLP", 2, 4, 3)], seeds=1,
        sending=[TrainingSetting("MLP", 2, 4, 4)],
        timing=[TrainingSetting("MLP", 2, 4, 3)], launches=1, timed=["dense fp32", _TIMED_AGAINST, "bytegrad"],
        lockstep_world=8, data="glyphs",
    ),
    "quick": CompressionPlan(
        settings=[TrainingSetting("MLP", 4, 128, 60)], longer=[TrainingSetting("MLP", 4, 128, 60)], seeds=1,
        sending=[TrainingSetting("CNN", 2, 16, 8)],
        timing=[TrainingSetting("CNN", 2, 64, 12)], launches=1,
        timed=["dense fp32", _TIMED_AGAINST, "hybrid", "bytegrad", "topk 1 %", "signsgd"],
    ),
    "full": CompressionPlan(
        settings=[TrainingSetting("MLP", 4, 128, 351), TrainingSetting("CNN", 4, 16, 351, "cosine"),
                  TrainingSetting("CNN", 2, 16, 351, "cosine"), TrainingSetting("MLP", 2, 128, 351)],
        longer=[TrainingSetting("CNN", 4, 16, 936, "cosine", 47), TrainingSetting("CNN", 2, 32, 936, "cosine", 47)],
        seeds=3, sending=[TrainingSetting("CNN", world, 8, 8) for world in (2, 4, 8)],
        timing=[TrainingSetting("CNN", 2, 64, 24), TrainingSetting("CNN", 4, 64, 24)], launches=3,
    ),
}  # fmt: skip


def accuracy_key(recipe: Recipe, setting: TrainingSetting, data: str, seed: int) -> str:
    """Return what decides the accuracy, as text: a result is kept by it."""
    fields = {name: value for name, value in asdict(recipe).items() if name in _DECIDES}
    if recipe.predicts_weights:
        fields["predicts_weights"] = "own gradients"  # true: results of a prediction by the momentum alone
    return json.dumps({**fields, **asdict(setting), "data": data, "seed": seed}, sort_keys=True)


_DECIDES = ("algorithm", "options", "lr", "momentum", "delay_steps")


class KeptResults:
    """Results of trainings in a file, a line of JSON each, in the order in which they came.

    What decides a result is its key, without the code: where one of other code is used, a line on stderr says so.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_told = False
        self._found: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                one = json.loads(line)
                self._found[json.dumps(one["of"], sort_keys=True)] = one
        self._earlier = dict(self._found)

    @functools.cached_property
    def _of_other_code(self) -> set[str]:
        """Keys of what was there before this run. Files that are changed now may have been others then."""
        here = commit()
        return {key for key, one in self._earlier.items() if one.get("commit") != here or here.endswith("+")}

    def get(self, key: str) -> Mapping[str, Any] | None:
        """The result of this key, or None."""
        if not self._has_told and key in self._earlier and key in self._of_other_code:
            self._has_told = True
            print(
                f"{self._path}: {len(self._of_other_code)} of {len(self._earlier)} kept results are of another commit, "
                f"or of files changed since, and are used as they are. Remove the file to measure anew",
                file=sys.stderr,
                flush=True,
            )
        return self._found.get(key)

    def add(self, key: str, result: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write a result, and return it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._found[key] = {"of": json.loads(key), **result}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self._found[key]) + "\n")
        return self._found[key]


def measure_accuracy(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Points below dense, of each algorithm in each setting; a sample is a seed. Those with a limit come first."""
    limited, others = _by_limit(those_named(chosen, _compared()))
    settings = PLANS[chosen.effort].settings
    yield from _accuracies(chosen, [(limited, one) for one in settings] + [(others, one) for one in settings])


def measure_longer(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Measure the same after an epoch, for the algorithms with a limit: seed by seed, as time is short."""
    limited, _ = _by_limit(those_named(chosen, _compared()))
    yield from _accuracies(chosen, [(limited, one) for one in PLANS[chosen.effort].longer])


def _accuracies(
    chosen: argparse.Namespace, work: Sequence[tuple[Sequence[Recipe], TrainingSetting]]
) -> Iterator[Measurement]:
    """Train what is not kept yet, in this order, and compare with dense."""
    plan = PLANS[chosen.effort]
    fast_paths.keep_memory()  # as every process with a bus: else a fifth of the time goes into page faults
    kept = KeptResults(chosen.out.with_name(f"{chosen.out.stem}-accuracy.jsonl"))
    split = models.load(plan.data, chosen.data_root, download=False)
    until_s = time.monotonic() + 60 * chosen.minutes
    percent: dict[tuple[TrainingSetting, str], dict[int, float]] = {}  # by seed
    for (recipes, setting), seed in itertools.product(work, range(plan.seeds)):
        task = models.ClassificationTask(_MODELS[setting.model], split, batch_size=setting.batch_size, seed=seed)
        on_gloo = partial(train_torch_powersgd_on_gloo, setting, plan.data, chosen.data_root, seed)
        for recipe in recipes:
            key = accuracy_key(recipe, setting, plan.data, seed)
            found = kept.get(key)
            if found is None and time.monotonic() < until_s:
                train = partial(train_lockstep, recipe, setting, task, seed) if recipe.algorithm else on_gloo
                found = kept.add(key, _reported(f"{setting.name}, seed {seed}: {recipe.title}", train))
            if found is not None:
                percent.setdefault((setting, recipe.title), {})[seed] = 100 * found["accuracy"]
    for setting, recipe in itertools.product(dict.fromkeys(setting for _, setting in work), _compared()):
        own, dense = percent.get((setting, recipe.title), {}), percent.get((setting, _compared()[0].title), {})
        if own.keys() & dense.keys():
            yield _below_dense(recipe, setting, own, dense, asks=chosen.effort == "full")


def _by_limit(recipes: Sequence[Recipe]) -> tuple[list[Recipe], list[Recipe]]:
    """Dense and those with a limit, which come first where time is short; and the others."""
    limited = [recipe for at, recipe in enumerate(recipes) if at == 0 or recipe.most_points is not None]
    return limited, [recipe for recipe in recipes if recipe not in limited]


def _compared() -> list[Recipe]:
    return [*all_recipes(), TORCH_POWERSGD]


def those_named(chosen: argparse.Namespace, recipes: Sequence[Recipe]) -> list[Recipe]:
    """Return those that ``--only`` names, and dense."""
    return [recipe for at, recipe in enumerate(recipes) if at == 0 or not chosen.only or recipe.title in chosen.only]


def _reported(title: str, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    began_s = time.perf_counter()
    found = train()
    seconds = round(time.perf_counter() - began_s, 1)
    print(f"{title}: {100 * found['accuracy']:.2f} %, {seconds} s", file=sys.stderr, flush=True)
    return {**found, "seconds": seconds, "commit": commit()}


def train_lockstep(
    recipe: Recipe, setting: TrainingSetting, task: models.ClassificationTask, seed: int
) -> dict[str, Any]:
    """All ranks in this process."""
    try:
        schedule = {"name": setting.schedule, "warmup_steps": setting.warmup_steps}
        training = LockstepTraining(recipe, task, setting.world, seed, schedule=schedule)
        return training.run(setting.steps)._asdict()
    except NotFinite as error:
        return {"accuracy": _OF_CHANCE, "diverged": str(error)}


def train_torch_powersgd_on_gloo(
    setting: TrainingSetting, data: Data, data_root: Path | None, seed: int
) -> dict[str, Any]:
    """PyTorch's hook has ranks as processes."""
    training = Training(
        model=_MODELS[setting.model],
        batch_size=setting.batch_size,
        config={"seed": seed},
        data=data,
        data_root=data_root,
    )
    run = GlooRun(training=training, steps=setting.steps, evaluates=True, **_torch_options())
    return {"accuracy": run_ranks(train_on_gloo, setting.world, run, timeout_s=900.0)[0].accuracy}


def _torch_options() -> dict[str, Any]:
    return {
        "lr": TORCH_POWERSGD.lr,
        "momentum": TORCH_POWERSGD.momentum,
        "powersgd_rank": TORCH_POWERSGD.options["rank"],
    }


def _below_dense(
    recipe: Recipe, setting: TrainingSetting, own: Mapping[int, float], dense: Mapping[int, float], *, asks: bool
) -> Measurement:
    """``own``, ``dense``: percent by seed."""
    below = [dense[seed] - own[seed] for seed in sorted(own.keys() & dense.keys())]
    note = f"{statistics.mean(own.values()):.2f} % ({' '.join(f'{one:.2f}' for one in own.values())})"
    return measurement(
        f"{setting.name}: {recipe.title}",
        "points",
        below,
        note=note,
        at_most=recipe.most_points if asks else None,
    )


def measure_bytes(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Yield what a rank sends in a step, when warm-up is over: the mean of the second half of a short run."""
    plan = PLANS[chosen.effort]
    split = models.load(plan.data, chosen.data_root, download=False)
    for setting in plan.sending:
        task = models.ClassificationTask(_MODELS[setting.model], split, batch_size=setting.batch_size)
        model_bytes = 4.0 * task.num_params
        dense = 0.0
        for recipe in all_recipes():
            steady = replace(recipe, options={**recipe.options, **recipe.steady}, lr=_SMALL_LR)
            sent = LockstepTraining(steady, task, setting.world).run(setting.steps, evaluates=False).late_bytes
            dense = dense or sent
            limit = recipe.most_bytes if setting.model == "CNN" else None
            note = f"{dense / sent:,.1f} times fewer"
            name = f"{setting.name}: {recipe.title}"
            yield measurement(name, "B", [sent], against=("dense", [dense]), at_most=limit, note=note)
            if recipe.most_models is not None:
                name = f"{setting.name}: {recipe.title}, in models"
                yield measurement(name, "B", [sent], against=("model", [model_bytes]), at_most=recipe.most_models)
        sent = bytes_of_torchs_hook(task.build_model(), TORCH_POWERSGD.options["rank"], setting.world)
        note = f"{dense / sent:,.1f} times fewer; from the shapes of its factors"
        yield measurement(f"{setting.name}: {TORCH_POWERSGD.title}", "B", [sent], against=("dense", [dense]), note=note)


class StepTimes(NamedTuple):
    """Milliseconds of a step, medians over the steps of a run.

    Attributes:
        step: of the slowest rank. wait: of the rank that waits least, for the exchange alone. coding: that the
            algorithm computes, and hands over, the mean over ranks, in a run without overlap, whose step is step_apart.
            Whether what comes of it is finite is looked at in every step, also without a bus: that is no coding.
    """

    step: float
    wait: float = 0.0
    coding: float = 0.0
    step_apart: float = 0.0


def measure_time(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Steps of real processes, of all algorithms by turns."""
    plan = PLANS[chosen.effort]
    for setting in plan.timing:
        recipes = [
            recipe
            for recipe in those_named(chosen, [*all_recipes()])
            if chosen.only or not plan.timed or recipe.title in plan.timed
        ]
        ways: dict[str, Callable[[], StepTimes]] = {
            recipe.title: partial(_times_of, recipe, setting) for recipe in recipes
        }
        ways |= {
            title: partial(_times_on_gloo, setting, rank)
            for title, rank in (("gloo DDP", None), (TORCH_POWERSGD.title, TORCH_POWERSGD.options["rank"]))
        }
        taken = by_turns(ways, plan.launches)
        steps = {title: [times.step for times in found] for title, found in taken.items()}
        for recipe in recipes:
            name = f"{setting.name}: {recipe.title}"
            yield measurement(f"{name}, step", "ms", steps[recipe.title], against=("dense", steps[recipes[0].title]))
            found = taken[recipe.title]
            yield measurement(f"{name}, wait", "ms", [times.wait for times in found])
            if any(times.coding for times in found):
                coding, limit = [times.coding for times in found], recipe.most_coding if plan.seeds > 1 else None
                against = ("its step", [times.step_apart for times in found])
                yield measurement(f"{name}, coding", "ms", coding, against=against, at_most=limit)
            alone, note = _coding_alone(recipe, setting), "in lockstep, without the work of sending"
            yield measurement(f"{name}, processor time of coding", "ms", alone, note=note)
        title = TORCH_POWERSGD.title
        yield measurement(
            f"{setting.name}: gloo DDP, step", "ms", steps["gloo DDP"], against=("dense", steps[recipes[0].title])
        )
        yield measurement(f"{setting.name}: {title}, step", "ms", steps[title], against=("gloo DDP", steps["gloo DDP"]))
        if {"bytegrad", _TIMED_AGAINST} <= steps.keys():
            yield measurement(
                f"{setting.name}: bytegrad beside {_TIMED_AGAINST}, step",
                "ms",
                steps["bytegrad"],
                against=(_TIMED_AGAINST, steps[_TIMED_AGAINST]),
                note="claimed by its authors: 0.67",
            )


def measure_lockstep(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Processor time of one exchange of many ranks on one core: how large a world can be tried out in one process."""
    world = PLANS[chosen.effort].lockstep_world
    for title, (name, options) in _IN_LOCKSTEP.items():
        algorithms = [make_algorithm(name, Place(rank, world), options) for rank in range(world)]
        buckets = [bucket_of({"x": torch.full((_LOCKSTEP_NUMEL,), float(rank))}) for rank in range(world)]
        programs = [
            one.exchange(bucket, Step(0, active=world)) for one, bucket in zip(algorithms, buckets, strict=True)
        ]
        lockstep, began_s = Lockstep(world), time.process_time()
        lockstep.run(programs)
        taken_s = time.process_time() - began_s
        note = f"{sum(lockstep.cost.messages):,} messages"
        full = chosen.effort == "full"
        yield measurement(f"{world:,} ranks: {title}", "s", [taken_s], at_most=60 if full else None, note=note)


def _times_of(recipe: Recipe, setting: TrainingSetting) -> StepTimes:
    """Return the times of a Worker on each rank, over DDS and what one host shares."""
    steady = replace(recipe, options={**recipe.options, **recipe.steady}, lr=_SMALL_LR)
    config = {**EVERY_STEP, "max_steps": _WARM_UP_STEPS + setting.steps, **steady.settings()}
    taken = steps_of(_timed(setting, config), _WARM_UP_STEPS)
    step, wait = (1e3 * typical(of_ranks, taken[name]) for of_ranks, name in ((max, "step_s"), (min, "wait_s")))
    if recipe.runs_beside:
        return StepTimes(step, wait)
    apart = steps_of(_timed(setting, {**config, "overlap": False}), _WARM_UP_STEPS)
    coding = sum(1e3 * typical(statistics.mean, apart[name]) for name in ("encode_s", "decode_s"))
    return StepTimes(step, wait, coding, 1e3 * typical(max, apart["step_s"]))


def _coding_alone(recipe: Recipe, setting: TrainingSetting) -> list[float]:
    """Return milliseconds of processor time that the programs of a rank take in each step: of the algorithm alone,
    where the coding of processes has what else their cores do meanwhile."""
    steady = replace(recipe, options={**recipe.options, **recipe.steady}, lr=_SMALL_LR)
    training = LockstepTraining(steady, _timed(setting, {}).task(), setting.world)
    taken: list[float] = []
    for number in range(_WARM_UP_STEPS + _CODING_STEPS):
        before_s = training.coding_s
        training.step(number)
        taken.append(1e3 * (training.coding_s - before_s))
    return taken[_WARM_UP_STEPS:]


def _times_on_gloo(setting: TrainingSetting, powersgd_rank: int | None) -> StepTimes:
    steps = _WARM_UP_STEPS + setting.steps
    run = GlooRun(training=_timed(setting, {}), steps=steps, powersgd_rank=powersgd_rank)
    found = run_ranks(train_on_gloo, setting.world, run)
    return StepTimes(1e3 * typical(max, [rank.steps_s[_WARM_UP_STEPS:] for rank in found]))


def _timed(setting: TrainingSetting, config: Mapping[str, Any]) -> Training:
    return Training(
        model=_MODELS[setting.model],
        batch_size=setting.batch_size,
        world=setting.world,
        config=dict(config),
        samples=_SAMPLES,
        data="glyphs",
    )


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    titles = [it.title for it in _compared()]
    add_training(parser, titles, "accuracy and time of dense and this row alone, such as 'topk 1 %%'")


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        "accuracy": Part(
            measure_accuracy,
            "Compression: points of accuracy below dense after equal steps",
            6000,
            300,
            needs_mnist=True,
        ),
        "longer": Part(
            measure_longer,
            "Compression: points of accuracy below dense after an epoch of the CNN",
            9000,
            5,
            needs_mnist=True,
        ),
        "bytes": Part(measure_bytes, "Compression: bytes that a rank sends in a step", 120, 20, needs_mnist=True),
        "lockstep": Part(
            measure_lockstep, "Compression: processor time of an exchange of 1,024 ranks in lockstep", 60, 60
        ),
        "time": Part(measure_time, "Compression: time of a step, of waiting and of coding", 1500, 240),
    },
    options,
    ("accuracy", "bytes", "lockstep", "time"),
)
