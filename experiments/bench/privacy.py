"""Differential privacy: epsilon beside other accountants, and accuracy on MNIST with a budget of 8 and 100 clients.

    python -m gradbus.experiments.bench.privacy epsilon --other PYTHON
    python -m gradbus.experiments.bench.privacy accuracy --rounds 20

``PYTHON`` is an interpreter that has dp-accounting, which may ask for other packages than gradbus does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import gradbus
from gradbus import models
from gradbus.actors.privacy.accountant import epsilon_of
from gradbus.experiments.bench.processes import DOMAIN, LEASE_S, Processes, context

CLIENTS, EPSILON, DELTA = 100, 8.0, 1e-5
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


def epsilons(other: str) -> None:
    """Print the table. ``other``: an interpreter with dp-accounting."""
    ran = subprocess.run(
        [other, "-c", _OTHER], input=json.dumps(SETTINGS), capture_output=True, text=True, check=True, timeout=120
    )
    print("| noise | rounds | delta | gradbus | opacus | dp-accounting RDP | dp-accounting PLD | closed form |")
    print("|---|---|---|---|---|---|---|---|")
    for setting, (rdp, pld) in zip(SETTINGS, json.loads(ran.stdout), strict=True):
        noise_multiplier, rounds, delta = setting
        found = [
            epsilon_of([(noise_multiplier, rounds)], delta), opacus_epsilon(*setting), rdp, pld,
            gaussian_epsilon(*setting),
        ]  # fmt: skip
        print(f"| {noise_multiplier:g} | {rounds} | {delta:g} | " + " | ".join(f"{one:.4f}" for one in found) + " |")
        for name, one in ("opacus", found[1]), ("dp-accounting RDP", rdp):
            if abs(found[0] / one - 1) > 0.01:
                raise SystemExit(f"epsilon is {found[0]:.4f}, and {one:.4f} by {name}: more than 1 % apart")


def linear(seed: int = 0) -> nn.Module:
    """Logistic regression: 7,850 parameters. The norm of the noise grows with their root."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def _task(options: Mapping[str, Any]) -> models.ClassificationTask:
    torch.set_num_threads(1)
    return models.ClassificationTask(
        linear, models.load("mnist", download=False), num_clients=CLIENTS, batch_size=50, seed=options["seed"]
    )


async def _controller(job: str, options: Mapping[str, Any], ended: Any) -> list[tuple[float | None, float | None]]:
    private = {"name": "central", "epsilon": EPSILON, "delta": DELTA, "clip_norm": options["clip_norm"]}
    config = gradbus.FederatedConfig(
        rounds=options["rounds"], seed=options["seed"], eval_every=5,
        clients={"num": CLIENTS, "min": CLIENTS, "dead_after_s": 120.0},
        strategy={"name": "fedavgm", "momentum": options["momentum"], "lr": 1.0},
        training={"lr": options["lr"]}, privacy=private if options["private"] else "none",
    )  # fmt: skip
    try:
        async with gradbus.connect(job, domain=DOMAIN, lease_s=LEASE_S) as bus:
            controller = gradbus.Controller(bus, _task(options), config)
            return [(report.accuracy, report.epsilon) async for report in controller.rounds()]
    finally:
        ended.set()


async def _clients(job: str, options: Mapping[str, Any], ids: Sequence[int], ended: Any) -> None:
    task = _task(options)  # one for all: the data is there once
    async with gradbus.connect(job, domain=DOMAIN, lease_s=LEASE_S) as bus, asyncio.TaskGroup() as group:
        running = [group.create_task(gradbus.Client(bus, task, client_id=one).run()) for one in ids]
        await asyncio.to_thread(ended.wait)
        for each in running:
            each.cancel()


def accuracy(options: Mapping[str, Any]) -> list[tuple[float | None, float | None]]:
    """Accuracy, where it was evaluated, and epsilon of each round. The clients share a process."""
    job, ended = f"bench-privacy-{os.getpid()}", context.Event()
    with Processes() as running:
        running.start("controller", _controller, job, options, ended)
        running.start("clients", _clients, job, options, range(CLIENTS), ended)
        found: list[tuple[float | None, float | None]] = running.results(580.0)[0]
    return found


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    compared = commands.add_parser("epsilon", help="epsilon at five settings, by gradbus and by other accountants")
    compared.add_argument("--other", required=True, help="a Python with dp-accounting")
    trained = commands.add_parser("accuracy", help="accuracy on MNIST at epsilon 8, one seed")
    trained.add_argument("--rounds", type=int, default=20)
    trained.add_argument("--lr", type=float, default=0.1)
    trained.add_argument("--momentum", type=float, default=0.0)
    trained.add_argument("--clip-norm", type=float, default=0.5)
    trained.add_argument("--seed", type=int, default=0)
    trained.add_argument("--plain", dest="private", action="store_false", help="without noise and bound")
    options = vars(parser.parse_args())
    if options["command"] == "epsilon":
        epsilons(options["other"])
        return
    began_s = time.perf_counter()
    for round_id, (found, epsilon) in enumerate(accuracy(options), 1):
        if found is not None:
            spent = "no noise" if epsilon is None else f"epsilon {epsilon:.3f}"
            print(f"round {round_id}: accuracy {found:.2%}, {spent}")
    print(f"{time.perf_counter() - began_s:.0f} s")


if __name__ == "__main__":
    main()
