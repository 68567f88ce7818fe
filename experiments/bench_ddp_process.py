"""The ranks of a data-parallel benchmark: real processes over real DDS on this machine, one torch thread each."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

import gradbus
from gradbus import models
from gradbus.actors.data_parallel.replicas import fingerprint
from gradbus.experiments.bench_children import Processes
from gradbus.experiments.bench_process import LEASE_S
from gradbus.runtime.collectives import Group
from gradbus.runtime.dds.network import NetworkConfig

Data = Literal["mnist", "glyphs"]
DOMAIN = 21
NETWORK = NetworkConfig(lease_s=LEASE_S)
_numbers = itertools.count()


class Role(Protocol):
    """What every rank of a run does. It travels to the processes by pickle."""

    @property
    def world(self) -> int:
        """Ranks."""

    @property
    def network(self) -> NetworkConfig | None:
        """None: that of one machine."""

    async def run(self, group: Group) -> dict[str, Any]:
        """What this rank found out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A run of :class:`gradbus.Worker` on MNIST or on the first of its samples.

    Attributes:
        model: takes ``seed``. batch_size: of one rank. config: of ``gradbus.DataParallelConfig``, which also says the
            seed. samples: of the training set, None for all. data: glyphs are for tests.
        record: return a hash of all parameters after every step. give_model: return the parameters.
    """

    world: int
    model: Callable[..., nn.Module]
    batch_size: int
    config: dict[str, Any] = field(default_factory=dict)
    samples: int | None = None
    data: Data = "mnist"
    record: bool = False
    give_model: bool = False
    network: NetworkConfig | None = None

    def task(self) -> models.ClassificationTask:
        """Model, data and loss, also for a loop in one process."""

        def data() -> models.DataSplit:
            if self.data == "glyphs":
                return models.glyphs(train=self.samples or 1000, test=50)
            split = models.load(self.data, download=False)
            if self.samples is None:
                return split
            return models.DataSplit(split.train.subset(torch.arange(self.samples)), None)

        return models.ClassificationTask(self.model, data, batch_size=self.batch_size, seed=self.config.get("seed", 0))

    async def run(self, group: Group) -> dict[str, Any]:
        """Train to the end."""
        worker = gradbus.Worker(group, self.task(), gradbus.DataParallelConfig(**self.config))
        with hashes_of_steps(self.record) as hashes:
            epochs = [report.to_json() async for report in worker.epochs()]
        summary = worker.summary
        found: dict[str, Any] = {
            "epochs": epochs, "steps": summary.steps, "params_hash": summary.params_hash,
            "accuracy": summary.accuracy, "mean": summary.profile.mean,
            "windows": [window.mean for window in summary.profile.windows], "hashes": hashes,
        }  # fmt: skip
        if self.give_model:
            found["params"] = [p.detach().numpy() for p in worker.model.parameters()]
        return found


@contextmanager
def hashes_of_steps(wanted: bool = True) -> Iterator[list[int]]:
    """A list that gets a hash of all parameters after every step of any optimizer in this process, if ``wanted``."""
    hashes: list[int] = []
    if not wanted:
        yield hashes
        return

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        hashes.append(fingerprint(optimizer.param_groups[0]["params"]))

    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield hashes
    finally:
        hook.remove()


def run_ranks(role: Role, *, timeout_s: float = 300.0) -> list[dict[str, Any]]:
    """Start all ranks and return what they found, in order.

    Raises:
        ChildFailed: one of them failed, or some had not ended in time. The others are ended.
    """
    job = f"bench-ddp-{os.getpid()}-{next(_numbers)}"
    with Processes() as processes:
        for rank in range(role.world):
            processes.start(f"rank {rank}", _join_and_run, role, rank, job)
        return processes.results(timeout_s)


async def _join_and_run(role: Role, rank: int, job: str) -> dict[str, Any]:
    network = role.network or NETWORK
    async with (
        gradbus.connect(job=job, domain=DOMAIN, network=network) as bus,
        gradbus.join_group(bus, rank=rank, world=role.world) as group,
    ):
        found = await role.run(group)
        await group.barrier("bench/end")  # nobody leaves while others still work
        return found
