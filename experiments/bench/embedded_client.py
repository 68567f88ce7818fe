"""A client inside a program: how soon a new model is in use after its commit, and whether training keeps its budget.

``python -m gradbus.experiments.bench client``. Controller and clients are processes of one machine, as they are on a
robot with an edge computer next to it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import gradbus
from gradbus.actors.federated.client.client_observer import ClientReport
from gradbus.experiments.bench.command import Benchmark, Part, add_effort
from gradbus.experiments.bench.federated import MODEL_4_8_MB
from gradbus.experiments.bench.federation import RoleWork, note_rounds, run_federation, take_part
from gradbus.experiments.bench.processes import DOMAIN
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.models import NoopTask, TrainResult
from gradbus.models.local_sgd import local_sgd

WINDOW_S = 10.0
SAMPLE_S = 0.1
ASKED_SWAP_MS = 50.0
ASKED_SHARE = 0.1  # of the share that is asked for
_jobs = itertools.count()


class Effort(NamedTuple):
    """How much is measured. ``rounds``: swaps of a model. ``train_s``: of a training within its share."""

    rounds: int
    train_s: float


EFFORTS = {"full": Effort(40, 60.0), "quick": Effort(10, 25.0), "tiny": Effort(3, 2.0)}


# The swap of a model


class Busy(NoopTask):
    """Computes for so long in each round. ``seconds``: of processor time of the thread that trains."""

    def __init__(self, dim: int, seconds: float) -> None:
        super().__init__(dim, delta="constant")
        self.seconds = seconds

    def train(self, model: Any, **arguments: Any) -> TrainResult:
        left, right = torch.randn(256, 256), torch.randn(256, 256)
        until_s = time.thread_time() + self.seconds
        while time.thread_time() < until_s and not arguments["should_stop"]():
            left @ right
        return super().train(model, **{**arguments, "should_stop": lambda: False})


class Swapping:
    """Loads each model into a module that the program uses, and notes when that was done, by ``time.time``."""

    def __init__(self, dim: int) -> None:
        self.used = NoopTask(dim).build_model()
        self.done_s: dict[int, float] = {}

    def on_model(self, round_id: int, model: dict[str, torch.Tensor]) -> None:
        """Use it."""
        self.used.load_state_dict(model)
        self.done_s[round_id] = time.time()


async def _client(job: str, client_id: int, dim: int, seconds: float) -> dict[int, float]:
    """Return when the client's program used the model of each round."""
    swapping = Swapping(dim)
    await take_part(gradbus.connect(job, domain=DOMAIN), Busy(dim, seconds), client_id, callbacks=[swapping])
    return swapping.done_s


async def _committed(job: str, dim: int, rounds: int, directory: Path, rules: dict[str, Any]) -> dict[int, float]:
    """Have the rounds done. Returns when the checkpoint of each got its name, as its inode says: within a tick of the
    kernel's clock, which makes it up to 4 ms too early."""
    rules |= {"rounds": rounds, "eval_every": 0, "clients": {"num": 2}, "checkpoint": {"dir": str(directory)}}

    def committed(report: gradbus.RoundReport) -> tuple[int, float]:
        file = directory / f"round-{report.round_id:06d}.safetensors"
        return report.round_id, file.stat().st_ctime_ns / 1e9

    return dict((await note_rounds(gradbus.connect(job, domain=DOMAIN), NoopTask(dim), rules, committed)).rounds)


def swaps_ms(dim: int, rounds: int, *, train_s: Sequence[float], **rules: Any) -> list[float]:
    """Milliseconds from the rename of each checkpoint until client 1 uses the model.

    Args:
        train_s: how long each of the two clients trains in a round. rules: of the controller.
    """
    job = f"swap-{os.getpid()}-{next(_jobs)}"
    clients = {
        f"client {number}": RoleWork(_client, (job, number, dim, seconds)) for number, seconds in enumerate(train_s)
    }
    with tempfile.TemporaryDirectory(prefix="gradbus-swap-") as directory:
        controller = RoleWork(_committed, (job, dim, rounds, Path(directory), rules))
        committed, (_, used) = run_federation(controller, clients, 300.0)
    if rounds not in used:
        raise RuntimeError(f"client 1 has not used the model of the last round, {rounds}: it has used {sorted(used)}")
    return [1e3 * (used[number] - committed[number]) for number in sorted(committed.keys() & used.keys())]


def measure_swap(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """From the commit of a model on the controller to its use in the program of a client."""
    rounds, dim = EFFORTS[chosen.effort].rounds, 1000 if chosen.effort == "tiny" else MODEL_4_8_MB
    cases = {
        "waits": (swaps_ms(dim, rounds, train_s=(0.05, 0.05)), "rename of the checkpoint to load_state_dict done"),
        "trains": (
            swaps_ms(dim, rounds, train_s=(0.3, 1e6), round={"quorum": 0.5, "grace_s": 0.0}),
            "the same; the model comes in the midst of a training, on a thread of torch",
        ),
    }
    for name, (found, note) in cases.items():
        what = f"a new model of {4 * dim / 1e6:.2g} MB in use at a client that {name}"
        yield measurement(f"{what}, median", "ms", found, at_most=ASKED_SWAP_MS, note=note)
        yield measurement(f"{what}, slowest", "ms", [max(found)], note=f"of {len(found)}")


# The share of a core


class Small:
    """Trains a small network on random images, in batches of some milliseconds."""

    def build_model(self) -> nn.Module:
        """Return the network."""
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 26 * 26, 10))

    def prepare(self, client_id: int, num_clients: int) -> None:
        """Draw the images."""
        self.images, self.labels = torch.randn(2048, 1, 28, 28), torch.randint(10, (2048,))

    def train(self, model: nn.Module, **arguments: Any) -> TrainResult:
        """Train until the time is over."""

        def loss_of(batch: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(model(self.images[batch]), self.labels[batch])

        return local_sgd(model, torch.arange(2048), loss_of, **arguments)

    def evaluate(self, model: nn.Module) -> None:
        """Return None."""


def _note_cpu_s(known: dict[str, float]) -> float:
    """Processor time of the threads that train, by the kernel's own account of each, in seconds. ``known``: by thread,
    what each has had so far."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (task / "comm").read_text().startswith("gradbus-"):
                known[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return sum(known.values())


def shares(budget: dict[str, Any], train_s: float, threads: int) -> tuple[list[float], ClientReport]:
    """The share of a core that training took in each window of ten seconds, and the report of the round."""
    job = f"share-{os.getpid()}-{next(_jobs)}"
    samples: list[tuple[float, float]] = []
    began_s: list[float] = []
    reports: list[ClientReport] = []
    begun, over = threading.Event(), threading.Event()
    window_s = min(WINDOW_S, train_s / 2)

    class Beginning:
        """Notes when training begins."""

        def on_round(self, round_id: int) -> None:
            began_s.append(time.monotonic())
            begun.set()

    def sample() -> None:
        begun.wait()
        known: dict[str, float] = {}
        while not over.wait(SAMPLE_S):
            samples.append((time.monotonic(), _note_cpu_s(known)))

    async def main() -> None:
        config = gradbus.ClientConfig(budget={**budget, "seconds_per_round": train_s})
        rules = gradbus.FederatedConfig(rounds=1, eval_every=0, clients={"num": 1}, training={"epochs": 100_000})
        async with gradbus.connect(job, domain=DOMAIN) as bus, gradbus.connect(job, domain=DOMAIN) as other:
            client = gradbus.Client(other, Small(), client_id=0, config=config, callbacks=[Beginning()])
            running = asyncio.create_task(gradbus.Controller(bus, Small(), rules).run())
            reports.extend([report async for report in client.rounds()])
            await running

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        asyncio.run(main())
    finally:
        begun.set()
        over.set()
        sampler.join()
        torch.set_num_threads(before)
    samples = [one for one in samples if one[0] <= began_s[0] + train_s]
    found = [
        (end - begin) / (end_s - begin_s)
        for (begin_s, begin), (end_s, end) in itertools.combinations(samples, 2)
        if window_s <= end_s - begin_s < window_s + 2 * SAMPLE_S
    ]
    if not found:
        raise RuntimeError(f"no window of {window_s:g} s in a training of {train_s:g} s: the machine is too busy")
    return found, reports[0]


def measure_share(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """The processor time of training in any ten seconds, against the share that its budget has."""
    train_s = EFFORTS[chosen.effort].train_s
    for share, threads in ((0.25, 1), (0.5, 1), (0.5, 2)):
        found, report = shares({"core_share": share}, train_s, threads)
        least, most = min(found) / share, max(found) / share
        what = f"a training with core_share={share}, {threads} thread{'s' * (threads > 1)} of torch"
        note = f"{len(found)} windows of {WINDOW_S:g} s; {report.num_samples} samples, {report.steps} steps"
        yield measurement(
            f"{what}: least share in 10 s",
            "of what is asked",
            [least],
            at_least=1 - ASKED_SHARE,
            note="less where the machine has no idle time",
        )
        yield measurement(
            f"{what}: largest share in 10 s", "of what is asked", [most], at_most=1 + ASKED_SHARE, note=note
        )


def _options(parser: argparse.ArgumentParser) -> None:
    add_effort(parser, "fewer rounds, shorter trainings")


PARTS = {
    "hot-swap": Part(measure_swap, "A new model in the program of a client", 60, 30),
    **({"share": Part(measure_share, "The budget of a client", 200, 90)} if sys.platform == "linux" else {}),
}
BENCHMARK = Benchmark(__doc__ or "", PARTS, _options)
