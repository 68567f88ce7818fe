"""Differential privacy: epsilon beside other accountants, the noise, accuracy with a budget of 8, the cost of a round.

``make bench PART=privacy ARGS="--other PYTHON"``, where ``PYTHON`` is an interpreter that has dp-accounting, which may
ask for other packages than gradbus does; without it that accountant is left out. Trainings are kept beside the results:
a run that is interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import gradbus
from gradbus import models
from gradbus.actors.privacy.accountant import epsilon_of
from gradbus.actors.privacy.discrete_gaussian import discrete_gaussian
from gradbus.experiments.bench.command import Benchmark, Part
from gradbus.experiments.bench.compression import KeptResults
from gradbus.experiments.bench.processes import DOMAIN, run_alone
from gradbus.experiments.bench.results import Measurement, commit, measurement
from gradbus.experiments.bench.rounds import run_rounds
from gradbus.experiments.bench.timing import by_turns

CLIENTS, ROUNDS, EPSILON, DELTA, CLIP_NORM = 100, 20, 8.0, 1e-5, 0.5
SEEDS = 3
WITHIN = 0.01  # of other accountants
# Multiplier of the noise, rounds, delta.
SETTINGS = ((1.0, 1, 1e-5), (2.0, 10, 1e-5), (4.0, 100, 1e-6), (10.0, 50, 1e-3), (3.1, 20, 1e-5))
# A round is an event of the whole Gaussian mechanism: RDP as gradbus uses it, and the tighter loss distributions.
_OTHER = """
import json, sys
import dp_accounting as dp
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
found = []
for noise, rounds, delta in json.load(sys.stdin):
    event = dp.SelfComposedDpEvent(dp.GaussianDpEvent(noise), rounds)
    found.append([one.compose(event).get_epsilon(delta) for one in (RdpAccountant(), PLDAccountant())])
print(json.dumps(found))
"""


def gaussian_epsilon(noise_multiplier: float, rounds: int, delta: float) -> float:
    """The least epsilon of so many releases of the Gaussian mechanism, by its closed form: Balle and Wang, ICML 2018,
    Theorem 8, where r releases are one of sensitivity ``sqrt(r)``."""
    sensitivity = math.sqrt(rounds) / noise_multiplier

    def normal(at: float) -> float:
        return math.erfc(-at / math.sqrt(2)) / 2

    low, high = 0.0, 700.0
    for _ in range(200):
        middle = (low + high) / 2
        half, rest = sensitivity / 2, middle / sensitivity
        is_spent = normal(half - rest) - math.exp(middle) * normal(-half - rest) > delta
        low, high = (middle, high) if is_spent else (low, middle)
    return high


def opacus_epsilon(noise_multiplier: float, rounds: int, delta: float) -> float:
    """By opacus as its users call it."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for _ in range(rounds):
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=1.0)
    return float(accountant.get_epsilon(delta))


def dp_accounting_epsilons(python: str) -> Sequence[tuple[float, float]]:
    """Return epsilon of each setting by both accountants of dp-accounting, RDP and PLD, which this interpreter has."""
    ran = subprocess.run(
        [python, "-c", _OTHER], input=json.dumps(SETTINGS), capture_output=True, text=True, check=True, timeout=120
    )
    found: list[tuple[float, float]] = json.loads(ran.stdout)
    return found


def measure_epsilon(python: str) -> Iterator[Measurement]:
    """Epsilon at each setting over that of opacus and of dp-accounting, with the limit; the tighter ones beside it."""
    others = dp_accounting_epsilons(python) if python else [None] * len(SETTINGS)
    for setting, other in zip(SETTINGS, others, strict=True):
        noise_multiplier, rounds, delta = setting
        ours = epsilon_of([(noise_multiplier, rounds)], delta)
        name = f"epsilon, noise {noise_multiplier:g}, {rounds} rounds, delta {delta:g}"
        compared = {"opacus": opacus_epsilon(*setting)} | ({} if other is None else {"dp-accounting RDP": other[0]})
        for beside, theirs in compared.items():
            yield measurement(
                f"{name}, by {beside}", "", [ours], against=(beside, [theirs]), at_most=1 + WITHIN, at_least=1 - WITHIN
            )
        tighter = {} if other is None else {"dp-accounting PLD": other[1]}
        for beside, theirs in {**tighter, "closed form": gaussian_epsilon(*setting)}.items():
            note = "of the continuous Gaussian, and tighter: for information"
            yield measurement(f"{name}, by {beside}", "", [ours], against=(beside, [theirs]), note=note)


# The noise

_DRAWN = 2_000_000
_CHANCE = 1e-4  # with which a right sampler exceeds the limit


def chi_squared(counts: NDArray[Any], probabilities: NDArray[Any]) -> float:
    """Pearson's statistic over the value that a right sampler exceeds with the chance above. Each class is expected at
    least 5 times."""
    from scipy.stats import chi2  # of the extra gradbus[privacy]

    expected = probabilities / probabilities.sum() * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return statistic / float(chi2.isf(_CHANCE, len(counts) - 1))


def integer_classes(samples: NDArray[Any], sigma: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return how often each integer came, with the tails from 4 sigma on as a class each, and its probability."""
    end = math.floor(4 * sigma)
    grid = np.arange(-40 * end, 40 * end + 1)
    weights = np.exp(-(grid**2) / (2 * sigma**2))
    size = 2 * end + 1
    found = np.bincount(np.clip(samples, -end, end) + end, minlength=size)
    return found, np.bincount(np.clip(grid, -end, end) + end, weights=weights, minlength=size)


def measure_noise(drawn: int = _DRAWN) -> Iterator[Measurement]:
    """The sampler against the probabilities that it has to have, and how fast it is."""
    for sigma in (1, 3, 17):
        statistic = chi_squared(*integer_classes(discrete_gaussian(drawn, sigma), sigma))
        name = f"chi-squared of {drawn:,} samples at each integer, sigma {sigma}"
        yield measurement(name, "", [statistic], at_most=1, note=f"over the value at {_CHANCE:g}")
    sigma = round(4.2 * 2**30)
    began_s = time.perf_counter()
    samples = discrete_gaussian(drawn, sigma)
    seconds = time.perf_counter() - began_s
    normal = 0.5 * (1 + torch.erf(torch.from_numpy(samples / sigma) / math.sqrt(2)))
    places = (normal.clamp(max=1 - 1e-12) * 100).long().numpy()
    for name, counts in {
        "in 100 quantiles": np.bincount(places, minlength=100),
        "in their lowest 10 bits": np.bincount(samples & 1023, minlength=1024),
    }.items():
        yield measurement(
            f"chi-squared of {drawn:,} samples {name}, sigma 4.2 on the grid of a run",
            "",
            [chi_squared(counts, np.ones(len(counts)))],
            at_most=1,
            note=f"over the value at {_CHANCE:g}",
        )
    yield measurement("time of a sample, sigma 4.2 on the grid of a run", "ns", [1e9 * seconds / drawn])


# Accuracy


def train(options: Mapping[str, Any]) -> list[tuple[float | None, float | None]]:
    """Accuracy, where it was evaluated, and epsilon of each round of one run with virtual clients."""
    data = models.load(options["data"], download=False)
    task = models.ClassificationTask(models.mnist_linear, data, batch_size=50, seed=options["seed"])
    private = {"name": "central", "epsilon": EPSILON, "delta": DELTA, "clip_norm": CLIP_NORM}
    config = gradbus.FederatedConfig(
        rounds=options["rounds"],
        seed=options["seed"],
        eval_every=5,
        clients={"min": options["clients"]},
        training={"lr": 0.1},
        privacy=private if options["private"] else "none",
    )
    result = gradbus.simulate(task, options["clients"], config=config, options=gradbus.SimulationOptions(domain=DOMAIN))
    return [(report.accuracy, report.epsilon) for report in result.rounds]


def measure_accuracy(chosen: argparse.Namespace, seeds: int = SEEDS, **smaller: Any) -> Iterator[Measurement]:
    """After some rounds, with noise and bound and without. A sample is a seed. ``smaller``: in tests."""
    kept = KeptResults(chosen.out.with_name(f"{chosen.out.stem}-accuracy.jsonl"))
    found: dict[tuple[bool, int], list[tuple[float, float]]] = {}
    for seed, private in itertools.product(range(seeds), (True, False)):
        options = {"clients": CLIENTS, "rounds": ROUNDS, "data": "mnist", "seed": seed, "private": private, **smaller}
        key = json.dumps({**options, "epsilon": EPSILON, "delta": DELTA, "clip_norm": CLIP_NORM}, sort_keys=True)
        if (one := kept.get(key)) is None:
            trained = run_alone("training", train, options, timeout_s=580.0)
            one = kept.add(key, {"rounds": trained, "commit": commit()})
            print(f"seed {seed}, {'private' if private else 'plain'}: {one['rounds'][-1]}", file=sys.stderr, flush=True)
        for round_id, (accuracy, epsilon) in enumerate(one["rounds"], 1):
            if accuracy is not None:
                found.setdefault((private, round_id), []).append((100 * accuracy, epsilon or 0.0))
    for (private, round_id), values in found.items():
        if private:
            plain = [accuracy for accuracy, _ in found[False, round_id]]
            yield measurement(
                f"accuracy, {options['clients']} clients, round {round_id}, epsilon {values[0][1]:.2f}",
                "%",
                [accuracy for accuracy, _ in values],
                against=("without noise and bound", plain),
                note=f"these: {' '.join(f'{one:.2f}' for one in plain)} %",
            )


# Cost

_COST_DIM = 1_199_882  # the CNN's
_WAYS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "central": {"privacy": {"name": "central", "noise_multiplier": 1.0}},
    "central, adaptive bound": {"privacy": {"name": "central", "noise_multiplier": 1.0, "target_quantile": 0.5}},
    "local": {"privacy": {"name": "local", "noise_multiplier": 1.0}},
}


def measure_cost(launches: int = 3, dim: int = _COST_DIM, clients: int = 8, rounds: int = 12) -> Iterator[Measurement]:
    """Overhead and processor time of a round, with noise and without, by turns."""
    run = {way: partial(run_rounds, dim, clients=clients, rounds=rounds, **one) for way, one in _WAYS.items()}
    taken = by_turns(run, launches)
    what = f"{4 * dim / 1e6:.3g} MB, {clients} clients"
    plain = taken.pop("none")
    for way, found in taken.items():
        for name, of in (
            ("round overhead", lambda one: 1e3 * float(np.median(one.overheads_s))),
            ("processor time of a round", lambda one: 1e3 * one.cpu_s),
        ):
            yield measurement(f"{name}, {what}, {way}", "ms", map(of, found), against=("none", map(of, plain)))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--other", metavar="PYTHON", default="", help="of part epsilon: a Python with dp-accounting, to compare with"
    )


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        "epsilon": Part(lambda chosen: measure_epsilon(chosen.other), "Privacy: epsilon at five settings", 10),
        "noise": Part(lambda _: measure_noise(), "Privacy: the noise has its distribution", 5),
        "private-accuracy": Part(
            measure_accuracy, "Privacy: accuracy with a budget of 8 and 100 clients", 240, needs_mnist=True
        ),
        "private-rounds": Part(lambda _: measure_cost(), "Privacy: what a round costs", 60),
    },
    _options,
)
