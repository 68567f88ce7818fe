"""What a run has learnt in the end, when much has failed in it: as much as an unbroken one."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from torch import nn

import gradbus
from gradbus.models import ClassificationTask, Dataset, DataSplit

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(320)]

CLIENTS, ROUNDS, MAX_LOSS = 4, 8, 0.005  # half a point
DIM, SPREAD = 40, 1.4
FAULTS = (
    "drop control p=0.03; drop update p=0.05; drop model p=0.05; duplicate p=0.05; corrupt p=0.03;"
    "reorder p=0.1 seconds=0.05; seed={seed}"
)


def clouds() -> DataSplit:
    """Ten clouds of points that overlap a little: a linear model soon tells them apart as well as can be."""
    generator = torch.Generator().manual_seed(3)
    centres = torch.randn(10, DIM, generator=generator)

    def draw(count: int) -> Dataset:
        labels = torch.randint(10, (count,), generator=generator)
        return Dataset("clouds", centres[labels] + SPREAD * torch.randn(count, DIM, generator=generator), labels)

    return DataSplit(draw(2000), draw(2000))


def task(split: DataSplit) -> ClassificationTask:
    return ClassificationTask(lambda: nn.Linear(DIM, 10), split, num_clients=CLIENTS, batch_size=32)


async def learn(split: DataSplit, *, broken: bool) -> list[gradbus.RoundReport]:
    """A run; where it is to be broken, all messages are at risk, and in every third round a client dies."""
    network = gradbus.NetworkConfig(lease_s=4.0, shared_memory=False)
    place: dict[str, Any] = {"job": f"learn-{os.getpid()}", "domain": new_domain(), "network": network}
    # Where nothing fails nobody is dead; else the default, as a client that nobody hears is what is to happen.
    dead_after_s = 2.5 if broken else 20.0
    config = gradbus.FederatedConfig(
        rounds=ROUNDS,
        codec="sq8",
        downlink_codec="s4",
        training={"lr": 0.02, "epochs": 1},
        round={"timeout_s": 10.0},
        clients={"num": CLIENTS, "heartbeat_s": 0.3, "dead_after_s": dead_after_s, "start_grace_s": 30.0},
    )

    def faults(seed: int) -> str:
        return FAULTS.format(seed=seed) if broken else ""

    async def client(client_id: int, start: int) -> None:
        async with gradbus.connect(**place, faults=faults(100 * start + client_id)) as bus:
            await gradbus.Client(bus, task(split), client_id=client_id).run()

    async with asyncio.timeout(150), asyncio.TaskGroup() as group:
        clients = [group.create_task(client(client_id, 0)) for client_id in range(CLIENTS)]
        async with gradbus.connect(**place, faults=faults(99)) as bus:
            controller = gradbus.Controller(bus, task(split), config)
            async for report in controller.rounds():
                if broken and report.round_id % 3 == 0:
                    victim = report.round_id // 3 % CLIENTS
                    clients[victim].cancel()
                    await asyncio.wait([clients[victim]])
                    clients[victim] = group.create_task(client(victim, report.round_id))
    return list(controller.progress.reports)


def test_a_run_in_which_much_fails_is_as_accurate_in_the_end_as_an_unbroken_one() -> None:
    split = clouds()
    unbroken = asyncio.run(learn(split, broken=False))
    broken = asyncio.run(learn(split, broken=True))
    assert [len(report.clients) for report in unbroken] == [CLIENTS] * ROUNDS
    assert min(len(report.clients) for report in broken) < CLIENTS
    best, left = unbroken[-1].accuracy, broken[-1].accuracy
    assert best is not None
    assert left is not None
    assert best > 0.95
    assert left >= best - MAX_LOSS
