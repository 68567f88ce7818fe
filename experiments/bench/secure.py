"""What secure aggregation adds to a federated round: the same run with it and without, by turns.

Training takes a while in which the processor is free, as that of a client with a machine of its own: keys are agreed on
and masks are made meanwhile. The clients of one process train one after the other.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import gradbus
from gradbus import models
from gradbus.experiments.bench.federation import controller_of, take_part
from gradbus.experiments.bench.processes import DOMAIN, LEASE_S, run_alone
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.rounds import Rounds, run_rounds
from gradbus.experiments.bench.timing import by_turns
from gradbus.experiments.bench.training import Data

DIM = 1_199_882
TRAIN_S = 0.2
LAUNCHES, ROUNDS = 3, 14


class SecureCase(NamedTuple):
    """``clients``: in so many ``processes``. ``at_most_ms``: that secure aggregation may add to a round. ``codec``: of
    the updates, of the plain ones as well."""

    clients: int
    processes: int
    at_most_ms: float | None
    codec: str = "fp32"


CASES = (SecureCase(2, 2, 50.0), SecureCase(10, 5, 50.0), SecureCase(10, 5, 50.0, "q8"))


def launch(case: SecureCase, dim: int, rounds: int, *, secure: bool) -> Rounds:
    """One run."""
    return run_rounds(
        dim,
        clients=case.clients,
        processes=case.processes,
        rounds=rounds,
        train_s=TRAIN_S,
        min_clients=2,
        codec=case.codec,
        secure_aggregation={"enabled": secure},
    )


def measure(
    dim: int = DIM, launches: int = LAUNCHES, rounds: int = ROUNDS, cases: tuple[SecureCase, ...] = CASES
) -> Iterator[Measurement]:
    """Time, processor time and bytes of a round, beside those of a plain one with the same codec."""
    for case in cases:
        run = partial(launch, case, dim, rounds)
        taken = by_turns({"plain": partial(run, secure=False), "secure": partial(run, secure=True)}, launches)
        plain, secure = taken["plain"], taken["secure"]
        what = f"{4 * dim / 1e6:.3g} MB, {case.clients} clients in {case.processes} processes"
        what += f", {case.codec}" * (case.codec != "fp32")
        periods = {name: [1e3 * statistics.median(one.overheads_s) for one in runs] for name, runs in taken.items()}
        added = [one - other for one, other in zip(periods["secure"], periods["plain"], strict=True)]
        note = f"beside training: {' '.join(f'{one:.0f}' for one in periods['plain'])} ms of a plain round"
        yield measurement(
            f"added to a round by secure aggregation, {what}", "ms", added, at_most=case.at_most_ms, note=note
        )
        yield measurement(
            f"processor time of a round with secure aggregation, {what}",
            "ms",
            [1e3 * one.cpu_s for one in secure],
            against=("plain", [1e3 * one.cpu_s for one in plain]),
            note="all processes",
        )
        yield measurement(
            f"bytes of updates with secure aggregation, {what}",
            "MB",
            [one.bytes_up / 1e6 for one in secure],
            against=("plain", [one.bytes_up / 1e6 for one in plain]),
            at_most=2.0,
        )


class MaskedTraining(NamedTuple):
    """A training whose accuracy is compared: ``clients`` with Dirichlet shares of the first ``samples``."""

    clients: int = 10
    samples: int = 12_000
    rounds: int = 20
    alpha: float = 0.5
    data: Data = "mnist"


TRAINING = MaskedTraining()


def accuracy(setting: MaskedTraining, codec: Any, seed: int, *, secure: bool) -> float:
    """Test accuracy in percent after one run, with all of its actors in a process of their own."""
    return float(run_alone("training", _train, setting, codec, seed, secure, timeout_s=600.0))


async def _train(setting: MaskedTraining, codec: Any, seed: int, secure: bool) -> float:
    split = models.load(setting.data, download=False)
    train = models.Dataset(
        split.train.name, split.train.images[: setting.samples], split.train.labels[: setting.samples]
    )
    task = models.ClassificationTask(
        partial(models.mnist_mlp, hidden=64),
        models.DataSplit(train, split.test),
        {"kind": "dirichlet", "alpha": setting.alpha},
        setting.clients,
        batch_size=32,
        momentum=0.9,
        seed=seed,
    )
    rules = {
        "rounds": setting.rounds, "seed": seed, "eval_every": setting.rounds, "codec": codec, "training": {"lr": 0.05},
        "clients": {"num": setting.clients, "min": setting.clients}, "secure_aggregation": {"enabled": secure},
    }  # fmt: skip
    connect = partial(gradbus.connect, f"bench-{os.getpid()}", domain=DOMAIN, lease_s=LEASE_S)
    async with controller_of(connect(), task, rules) as (_, controller), asyncio.TaskGroup() as group:
        for client_id in range(setting.clients):
            group.create_task(take_part(connect(), task, client_id), name=f"client {client_id}")
        reports = await controller.run()
    return 100.0 * (reports[-1].accuracy or 0.0)


def measure_accuracy(setting: MaskedTraining = TRAINING, seeds: int = 3) -> Iterator[Measurement]:
    """Codecs on the common grid of secure aggregation, beside the same ones without. A sample is a seed."""
    what = f"{setting.clients} clients, Dirichlet {setting.alpha:g}, {setting.rounds} rounds"
    chosen: dict[str, Any] = {"q8": "q8", "sq8 of density 0.25": {"name": "sq8", "density": 0.25}}
    for name, codec in chosen.items():
        plain, masked = (
            [accuracy(setting, codec, seed, secure=secure) for seed in range(seeds)] for secure in (False, True)
        )
        note = f"{' '.join(f'{one:.2f}' for one in masked)} %, plain {' '.join(f'{one:.2f}' for one in plain)} %"
        below = [one - other for one, other in zip(plain, masked, strict=True)]
        yield measurement(f"accuracy below plain {name} with secure aggregation, {what}", "points", below, note=note)
