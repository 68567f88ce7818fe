"""Rounds to an accuracy on MNIST where clients have very different data: FedAvg beside what is made against drift.

Twenty virtual clients share MNIST by a Dirichlet distribution of alpha 0.1 for each label, so that most have two or
three labels, and amounts of data that are far apart. They train by SGD without momentum, and the model is evaluated on
the test set after each round. There are two settings:

- All of them train in each round, for one epoch, until the model has 95 %. One epoch takes a client not far from the
  global model, so that FedProx, which keeps it near, has nothing to mend.
- Four of them, drawn at random, train in each round, for five epochs, until it has 90 %. That is what FedProx is made
  for: few clients, and much local work. The learning rate is one that is too large for FedAvg, and the same for all;
  FedAvg is there with the one that suits it best as well.

A sample is a seed: of the shares, the model and the order of the data. ``mu`` of FedProx is chosen by part
``drift-tuning``, on samples of the training set that nobody trains with, and with a seed that is of no sample.

Trainings are kept beside the results: a run that is interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import gradbus
from gradbus import models
from gradbus.experiments.bench.compression import KeptResults
from gradbus.experiments.bench.processes import DOMAIN, run_alone
from gradbus.experiments.bench.results import Measurement, commit, measurement
from gradbus.experiments.bench.training import Data

SEEDS = 3
_TUNING_SEED = 100  # of no sample
_HELD_OUT = 10_000  # samples of the training set, the last ones, that mu is chosen on
_RUN_S = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftSetting:
    """Holds what all runs have in common.

    Attributes:
        target: accuracy that a run ends with. rounds: most of them. alpha: of the Dirichlet distribution.
        count: clients of a round; None: all. epochs: of a client in a round.
    """

    target: float = 0.95
    rounds: int = 60
    clients: int = 20
    alpha: float = 0.1
    batch_size: int = 64
    lr: float = 0.1
    count: int | None = None
    epochs: int = 1
    data: Data = "mnist"


class DriftMethod(NamedTuple):
    """A strategy, and a training rule of its clients. ``lr``: in place of that of the setting."""

    strategy: str
    rule: Any = "plain"
    lr: float | None = None


def fedprox(mu: float) -> dict[str, DriftMethod]:
    """FedProx, by its name."""
    return {f"FedProx, mu {mu:g}": DriftMethod("fedavg", {"name": "fedprox", "mu": mu})}


METHODS = {
    "FedAvg": DriftMethod("fedavg"),
    **fedprox(0.001),
    "SCAFFOLD": DriftMethod("scaffold", "scaffold"),
    "FedNova": DriftMethod("fednova"),
}
FEW = DriftSetting(target=0.9, lr=0.3, count=4, epochs=5)
FEW_METHODS = {
    "FedAvg": METHODS["FedAvg"],
    "FedAvg, learning rate 0.2": DriftMethod("fedavg", lr=0.2),
    **fedprox(0.1),
    "SCAFFOLD": METHODS["SCAFFOLD"],
    "FedNova": METHODS["FedNova"],
}
_TRIED_MU = ((DriftSetting(), (0.001, 0.01, 0.1)), (FEW, (0.03, 0.1, 0.3)))


class _Target:
    """Ends a run once it has the accuracy."""

    def __init__(self, target: float) -> None:
        self._target = target

    def on_report(self, report: gradbus.RoundReport) -> bool:
        return (report.accuracy or 0.0) >= self._target


def train(setting: DriftSetting, method: DriftMethod, seed: int, held_out: int = 0) -> list[float]:
    """The accuracy after each round of one run, in this process.

    Args:
        held_out: so many of the last samples of the training set are evaluated on, in place of the test set, and not
            trained with.
    """
    split = models.load(setting.data, download=False)
    if held_out:
        kept, others = (
            models.Dataset(split.train.name, split.train.images[part], split.train.labels[part])
            for part in (slice(-held_out), slice(-held_out, None))
        )
        split = models.DataSplit(kept, others)
    task = models.ClassificationTask(
        models.mnist_mlp,
        split,
        {"kind": "dirichlet", "alpha": setting.alpha},
        setting.clients,
        batch_size=setting.batch_size,
        momentum=0.0,
        seed=seed,
    )
    config = gradbus.FederatedConfig(
        rounds=setting.rounds,
        seed=seed,
        strategy=method.strategy,
        codec={"name": "fp32", "version": 2},
        training={"lr": method.lr or setting.lr, "rule": method.rule, "epochs": setting.epochs},
        selection={"name": "uniform", **({} if setting.count is None else {"count": setting.count})},
    )
    result = gradbus.simulate(
        task,
        setting.clients,
        config=config,
        callbacks=[_Target(setting.target)],
        options=gradbus.SimulationOptions(domain=DOMAIN),
    )
    return [report.accuracy or 0.0 for report in result.rounds]


class _Runs:
    """Runs that are kept in a file, each in a process of its own."""

    def __init__(self, chosen: argparse.Namespace, part: str) -> None:
        self._kept = KeptResults(chosen.out.with_name(f"{chosen.out.stem}-{part}.jsonl"))

    def rounds(
        self, setting: DriftSetting, name: str, method: DriftMethod, seed: int, held_out: int = 0
    ) -> Mapping[str, Any]:
        """``rounds`` to the target, or all of them; ``accuracies`` after each."""
        key = json.dumps({**asdict(setting), **method._asdict(), "seed": seed, "held_out": held_out}, sort_keys=True)
        if (found := self._kept.get(key)) is None:
            began_s = time.perf_counter()
            accuracies: list[float] = run_alone(name, train, setting, method, seed, held_out, timeout_s=_RUN_S)
            found = self._kept.add(
                key,
                {
                    "rounds": len(accuracies),
                    "accuracies": [round(one, 4) for one in accuracies],
                    "seconds": round(time.perf_counter() - began_s, 1),
                    "commit": commit(),
                },
            )
            said = f"{name}, seed {seed}: {len(accuracies)} rounds, {accuracies[-1]:.2%}, {found['seconds']} s"
            print(said, file=sys.stderr, flush=True)
        return found


def _figure(setting: DriftSetting, name: str, runs: list[Mapping[str, Any]], **more: Any) -> Measurement:
    """Rounds to the target; a run without it counts as all its rounds, which the note tells."""
    missed = sum(one["accuracies"][-1] < setting.target for one in runs)
    note = f"{missed} of {len(runs)} without it, after {setting.rounds} rounds" if missed else ""
    clients = f"{setting.clients} clients"
    if setting.count is not None:
        clients = f"{setting.count} of {clients}, {setting.epochs} epochs, learning rate {setting.lr:g}"
    title = f"rounds to {setting.target:.0%}, {clients}, Dirichlet {setting.alpha:g}: {name}"
    return measurement(title, "rounds", [one["rounds"] for one in runs], note=note, **more)


def measure(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Both settings."""
    yield from measure_setting(chosen, DriftSetting(), METHODS)
    yield from measure_setting(chosen, FEW, FEW_METHODS)


def measure_setting(
    chosen: argparse.Namespace, setting: DriftSetting, methods: Mapping[str, DriftMethod], seeds: int = SEEDS
) -> Iterator[Measurement]:
    """Rounds to the target of each method, beside those of the first one with the same seed."""
    runs = _Runs(chosen, "drift")
    found: dict[str, list[Mapping[str, Any]]] = {name: [] for name in methods}
    for seed in range(seeds):
        for name, method in methods.items():
            found[name].append(runs.rounds(setting, name, method, seed))
    (base, reference), *others = found.items()
    yield _figure(setting, base, reference)
    for name, own in others:
        yield _figure(setting, name, own, against=(base, [one["rounds"] for one in reference]))


def measure_tuning(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Measure what ``mu`` was chosen by."""
    runs = _Runs(chosen, "drift-tuning")
    for setting, tried in _TRIED_MU:
        for mu in tried:
            ((name, method),) = fedprox(mu).items()
            yield _figure(setting, f"{name}, held out", [runs.rounds(setting, name, method, _TUNING_SEED, _HELD_OUT)])
