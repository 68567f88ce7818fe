"""A run in two processes, for tests: ``controller`` is a program that lowers the rate after a bad round, ``clients``
are two clients whose training depends on all that is ordered.

Each is a process that is forked from the warm server, see :mod:`warm`; the controller sends its rounds at its end.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import torch

import gradbus
from gradbus.models import NoopTask

DIM, ROUNDS, CLIENTS = 1000, 6, 2


class Task(NoopTask):
    """Moves the weights by what was ordered; the loss is bad in every second round."""

    def train(self, model: Any, *, client_id: int, **ordered: Any) -> Any:
        result = super().train(model, client_id=client_id, **ordered)
        random = torch.Generator().manual_seed(ordered["seed"] * 1000 + ordered["round_id"] * 10 + client_id)
        with torch.no_grad():
            noise = torch.randn(model.vector.shape, generator=random)
            model.vector += ordered["lr"] * ordered["epochs"] * noise / (1 + ordered["subset_size"])
        return dataclasses.replace(result, loss=float(ordered["round_id"] % 2) + 0.5, num_samples=1 + client_id)


async def control(place: dict[str, Any], state: str, fail_at: str | None) -> list[Any]:
    """Order all rounds, each by the reports of the rounds before, so that a crash changes nothing."""
    config = gradbus.FederatedConfig(
        rounds=ROUNDS,
        eval_every=0,
        codec="sq8",
        strategy="fedavgm",
        checkpoint={"dir": state},
        clients={"num": CLIENTS, "min": CLIENTS, "dead_after_s": 30.0},
    )
    async with gradbus.connect(**place) as bus:
        controller = gradbus.Controller(bus, NoopTask(DIM), config, fail_at=fail_at)
        async with controller.open() as run:
            while not run.is_over:
                bad = sum((report.loss or 0.0) > 1.0 for report in run.reports)
                one = {len(run.reports) % CLIENTS: {"epochs": 3 + bad}}
                await run.round(lr=0.5**bad, epochs=1 + bad, subset_size=bad, seed=7 + len(run.reports), each=one)
            return [[report.round_id, report.weights_crc32, dict(report.order)] for report in run.reports]


async def train(place: dict[str, Any], state: str) -> None:
    """Both clients, until the run has ended."""
    async with asyncio.TaskGroup() as group:
        for client_id in range(CLIENTS):
            group.create_task(train_one(place, client_id, state))


async def train_one(place: dict[str, Any], client_id: int, state: str) -> None:
    """One client, on a bus of its own."""
    client = gradbus.ClientConfig(state_dir=f"{state}-clients")
    async with gradbus.connect(**place) as bus:
        await gradbus.Client(bus, Task(DIM), client_id=client_id, config=client).run()


def play(spec: dict[str, Any], pipe: Any) -> None:
    """Entry of a forked process. ``role``, ``place`` and ``state`` are always in the spec, ``fail_at`` may be."""
    if spec["role"] == "clients":
        asyncio.run(train(spec["place"], spec["state"]))
    else:
        rounds = asyncio.run(control(spec["place"], spec["state"], spec.get("fail_at")))
        pipe.send({"event": "done", "rounds": rounds})
