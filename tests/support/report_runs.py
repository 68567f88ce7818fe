"""Real runs, small ones, for reports: whatever a run leaves in its directory, left by the code that leaves it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from patience import PATIENT_S
from torch import Tensor, nn

import gradbus
from gradbus.commands.files import ControllerFile, WorkerFile
from gradbus.commands.rank_environment import RankPlace
from gradbus.commands.run.data_parallel import Output, run_worker
from gradbus.commands.run.federated import run_controller
from gradbus.commands.rundir.directory import ControllerDirectory

TRUTH = torch.linspace(-1, 1, 2000)


@dataclass(frozen=True)
class Result:
    """Of training, of evaluation, and of a part of the test set."""

    num_samples: int = 10
    loss: float = 0.0
    accuracy: float = 0.0
    correct: int = 0
    total: int = 100
    loss_sum: float = 0.0


class Line(nn.Module):
    """2000 numbers to be learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(len(TRUTH)))


class Learning:
    """Comes nearer to the truth in each round, and each step; as a task of clients and of workers."""

    def build_model(self) -> nn.Module:
        return Line()

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def train(self, model: Any, *, should_stop: Callable[[], bool], **_: Any) -> Result:
        with torch.no_grad():
            loss = float((model.w - TRUTH).square().mean())
            model.w += 0.3 * (TRUTH - model.w)
        return Result(loss=loss)

    def evaluate(self, model: Any) -> Result:
        loss = float((model.w.detach() - TRUTH).square().mean())
        return Result(loss=loss, accuracy=1 / (1 + loss))

    def prepare_shard(self, rank: int, world: int) -> None:
        pass

    def num_batches(self, *, rank: int, world: int, epoch: int) -> int:
        return 5

    def batches(self, *, rank: int, world: int, epoch: int, seed: int) -> Iterator[Tensor]:
        return iter(TRUTH.expand(5, -1))

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        return (model.w - batch).square().sum()

    def evaluate_shard(self, model: Any, *, rank: int, world: int) -> Result:
        loss = float((model.w.detach() - TRUTH).square().mean())
        return Result(correct=int(100 / (1 + loss)), loss_sum=100 * loss)


def federated_run(path: Path, *, domain: int, rounds: int = 10, clients: int = 3, **rules: Any) -> Path:
    """A controller and its clients over DDS, on one loop."""
    job = f"report-{path.name}"
    settings = {
        "bus": {"job": job, "domain": domain},
        "task": {"task": "report_runs:Learning"},
        "federated": {"rounds": rounds, "clients": {"num": clients, "dead_after_s": PATIENT_S}, **rules},
    }

    async def client(client_id: int) -> None:
        async with gradbus.connect(job=job, domain=domain) as bus:
            await gradbus.Client(bus, Learning(), client_id=client_id).run()

    async def main() -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for client_id in range(clients):
                group.create_task(client(client_id))
            with ControllerDirectory(path) as run:
                await run_controller(ControllerFile.model_validate(settings), run)

    asyncio.run(main())
    return path


def parallel_run(path: Path, *, domain: int, world: int = 2, epochs: int = 3, **rules: Any) -> Path:
    """All ranks over DDS, on one loop."""
    settings = {
        "bus": {"job": f"report-{path.name}", "domain": domain},
        "task": {"task": "report_runs:Learning", "threads": 1},
        "parallel": {"epochs": epochs, "optimizer": {"lr": 0.1}, "profile": {"window_steps": 5}, **rules},
        "run_dir": str(path),
    }

    async def main() -> None:
        file = WorkerFile.model_validate(settings)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for rank in range(world):
                group.create_task(run_worker(file, RankPlace(rank, world), Output()))

    asyncio.run(main())
    return path
