"""What hostile clients do to the accuracy, and how much of it each defence saves.

``make bench PART=attacks`` compares with limits. Of ten clients three are hostile in every round. They train like the
others and then send something else:

    sign flip    their update the other way round
    scaled       ten times that
    noise        normal noise, thirty times as long as their update
    label flip   an honest update, of training with the label 9 - y in place of y

Training, encoding, decoding and the strategies are those of a run; what passes between is left out, as it changes no
number. A defence knows how many are hostile, not which. ``--part time`` measures what the strategies cost.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gradbus import codecs
from gradbus.actors.aggregation.clipping import LimitedStrategy
from gradbus.actors.aggregation.robust import CoordinateMedian, Krum, MultiKrum, TrimmedMean
from gradbus.actors.aggregation.strategies import FedAvg, Strategy
from gradbus.actors.aggregation.updates import Facts, Update
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.codecs.base import l2_norm
from gradbus.experiments.bench.command import Benchmark, Part
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.timing import block
from gradbus.models import ClassificationTask, load, mnist_mlp, seeded_generator

CLIENTS, HOSTILE = 10, 3
SAMPLES = 300  # of each client and round
LR = 0.05
CLASSES = 10
TIMED_DIM = 1_199_882  # the CNN's

MAKE: dict[str, Callable[[int, float], Strategy]] = {
    "mean": lambda dim, _: FedAvg(dim),
    "clip": lambda dim, norm: LimitedStrategy(FedAvg(dim), clip_norm=norm),
    "median": lambda dim, _: CoordinateMedian(dim, byzantine=HOSTILE),
    "trimmed_mean": lambda dim, _: TrimmedMean(dim, byzantine=HOSTILE),
    "krum": lambda dim, _: Krum(dim, byzantine=HOSTILE),
    "multi_krum": lambda dim, _: MultiKrum(dim, byzantine=HOSTILE),
}
ATTACKS = ("none", "sign flip", "scaled", "noise", "label flip")
CEILING_POINTS = 5.0  # that an attack may cost a defence that averages, where the mean is lost


class AttackScene:
    """Clients with their data, and an attack."""

    def __init__(self, data_root: Path | None, partition: str, seed: int) -> None:
        self._seed = seed
        split = load("mnist", data_root)
        options: dict[str, Any] = {"batch_size": 32, "seed": seed}
        self._honest = ClassificationTask(mnist_mlp, split, partition, CLIENTS, **options)
        self._flipped = ClassificationTask(mnist_mlp, split, partition, CLIENTS, loss=_flipped_loss, **options)
        self._model = FlatModel(self._honest.build_model())
        self.dim = self._model.dim
        self.initial = self._model.read().clone()

    def update(self, client_id: int, round_id: int, base: Tensor, attack: str) -> Tensor:
        """The update that this client sends: float32, shape (D,)."""
        hostile = client_id < HOSTILE
        task = self._flipped if hostile and attack == "label flip" else self._honest
        self._model.write(base)
        task.train(
            self._model.module,
            client_id=client_id,
            round_id=round_id,
            epochs=1,
            lr=LR,
            seed=self._seed,
            subset_size=SAMPLES,
            should_stop=lambda: False,
        )
        delta = self._model.read() - base
        if not hostile or attack in ("none", "label flip"):
            return delta
        if attack == "noise":
            generator = seeded_generator("attack", self._seed, client_id, round_id)
            noise = torch.randn(self.dim, generator=generator)
            return noise * (30 * l2_norm(delta) / l2_norm(noise))
        return delta * {"sign flip": -1.0, "scaled": -10.0}[attack]

    def accuracy(self, weights: Tensor) -> float:
        """Accuracy on the test set, in percent."""
        self._model.write(weights)
        outcome = self._honest.evaluate(self._model.module)
        assert outcome is not None, "MNIST has a test set"
        assert outcome.accuracy is not None
        return 100.0 * outcome.accuracy


def _flipped_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, CLASSES - 1 - labels)


def run(scene: AttackScene, strategy: Strategy, attack: str, rounds: int) -> float:
    """Test accuracy in percent after the last round."""
    weights, encode = scene.initial.clone(), codecs.get("fp32").encode
    for round_id in range(1, rounds + 1):
        base = weights.clone()
        strategy.begin(round_id, base)
        for client_id in range(CLIENTS):
            payload = encode(scene.update(client_id, round_id, base, attack))
            with contextlib.suppress(ValueError):  # it has grown out of all bounds, and is refused as in a run
                update = Update(codecs.parse(payload, expected_dim=scene.dim))
                strategy.add(update, Facts(client_id=client_id, num_samples=SAMPLES))
        strategy.finish(weights)
    return scene.accuracy(weights)


def typical_norm(scene: AttackScene) -> float:
    """Median L2 norm of the updates of the first round without an attack."""
    return statistics.median(l2_norm(scene.update(i, 1, scene.initial, "none")) for i in range(CLIENTS))


def measure_accuracy(data_root: Path | None, partition: str, rounds: int, seeds: int) -> Iterator[Measurement]:
    """Test accuracy after the last round of each defence under each attack. A sample is a seed."""
    last: dict[str, dict[str, list[float]]] = {attack: {name: [] for name in MAKE} for attack in ATTACKS}
    for seed in range(seeds):
        scene = AttackScene(data_root, partition, seed)
        norm = typical_norm(scene)
        for attack in ATTACKS:
            for name, make in MAKE.items():
                last[attack][name].append(run(scene, make(scene.dim, norm), attack, rounds))
            print(f"seed {seed}, {attack}: done", file=sys.stderr, flush=True)
    for attack, found in last.items():
        mean = statistics.mean(found["mean"])
        for name, values in found.items():
            alone = statistics.mean(last["none"][name])
            change, saved = statistics.mean(values) - alone, statistics.mean(values) - mean
            note = "" if attack == "none" else f"{saved:+.1f} points against the mean, {change:+.1f} against no attack"
            asks = partition == "iid" and attack in ("scaled", "noise") and name not in ("mean", "clip")
            limit = round(alone - CEILING_POINTS, 1) if asks else None
            yield measurement(f"{attack}: {name}", "%", values, at_least=limit, note=note)


def measure_time() -> Iterator[Measurement]:
    """The time of the end of a round of ten updates, on one thread, by strategy."""
    encode = codecs.get("fp32").encode
    vectors = [0.01 * torch.randn(TIMED_DIM, generator=seeded_generator("time", i)) for i in range(CLIENTS)]
    updates = [codecs.parse(encode(vector), expected_dim=TIMED_DIM) for vector in vectors]
    for name, make in MAKE.items():
        strategy, weights = make(TIMED_DIM, 1.0), torch.zeros(TIMED_DIM)
        add_ms, finish_ms = [], []
        for _ in range(6):
            strategy.begin(1, weights.clone())
            started_s = time.perf_counter()
            for client_id, update in enumerate(updates):
                strategy.add(Update(update), Facts(client_id=client_id, num_samples=1))
            add_ms.append(1e3 * (time.perf_counter() - started_s) / CLIENTS)
            finish_ms += [1e3 * one for one in block(partial(strategy.finish, weights), 1)]
        note = f"and {statistics.median(add_ms[1:]):.1f} ms to add one update"
        yield measurement(f"{name}: the end of a round", "ms", finish_ms[1:], at_most=250, note=note)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-root", type=Path, help="folder that holds MNIST/raw; else $GRADBUS_DATA")
    parser.add_argument("--partition", default="iid", help="iid, dirichlet, shards or by_label")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=2)


def _accuracy(chosen: argparse.Namespace) -> Iterator[Measurement]:
    return measure_accuracy(chosen.data_root, chosen.partition, chosen.rounds, chosen.seeds)


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        "accuracy": Part(_accuracy, "each defence under each attack", 600, needs_mnist=True),
        "time": Part(lambda _: measure_time(), "what the strategies cost", 10),
    },
    _options,
)
