"""The ranks of a data-parallel benchmark: real processes over real DDS on this machine, one torch thread each.

Ranks are forked from a server that has imported everything, so that eight of them start in a second.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

import gradbus
from gradbus import models
from gradbus.actors.replicas import fingerprint
from gradbus.runtime import logs
from gradbus.runtime.collectives import Group
from gradbus.runtime.network import NetworkConfig

Data = Literal["mnist", "glyphs"]
DOMAIN = 21
_context = multiprocessing.get_context("forkserver")
# torch._dynamo: the first optimizer of a process imports it, which takes seconds.
_context.set_forkserver_preload(["gradbus.actors", "gradbus.models", "gradbus.runtime.bus", "torch._dynamo"])
_numbers = itertools.count()


class RankFailed(RuntimeError):
    """A rank ended with an error, or took too long."""


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
        RankFailed: one of them failed, or some had not ended in time. The others are ended.
    """
    job = f"bench-ddp-{os.getpid()}-{next(_numbers)}"
    pipes: dict[Connection, int] = {}
    processes = []
    found: dict[int, dict[str, Any]] = {}
    try:
        for rank in range(role.world):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_rank_process, args=(role, rank, job, theirs), name=f"rank-{rank}")
            process.start()
            theirs.close()
            pipes[ours] = rank
            processes.append(process)
        deadline = time.monotonic() + timeout_s
        while pipes:
            ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {sorted(pipes.values())} have not ended after {timeout_s:g} s")
            for pipe in [pipe for pipe in pipes if pipe in ready]:
                rank = pipes.pop(pipe)
                found[rank] = _received(pipe, rank)
    finally:
        for process in processes:
            process.join(timeout=5.0 if len(found) == role.world else 0.0)
            if process.is_alive():
                process.kill()
                process.join()
    return [found[rank] for rank in range(role.world)]


def _received(pipe: Connection, rank: int) -> dict[str, Any]:
    try:
        with pipe:
            result: dict[str, Any] = pipe.recv()
    except EOFError:
        raise RankFailed(f"rank {rank} died") from None
    if "error" in result:
        raise RankFailed(f"rank {rank} failed: {result['error']}")
    return result


def _rank_process(role: Role, rank: int, job: str, pipe: Connection) -> None:
    """The whole life of a rank."""
    logs.configure(level="error")
    torch.set_num_threads(1)
    try:
        result = asyncio.run(_join_and_run(role, rank, job))
    except BaseException:
        result = {"error": traceback.format_exc()}
    with pipe:
        pipe.send(result)
    os._exit(0)  # torch's teardown takes its time and is nobody's figure


async def _join_and_run(role: Role, rank: int, job: str) -> dict[str, Any]:
    network = role.network or gradbus.NetworkConfig()
    async with (
        gradbus.connect(job=job, domain=DOMAIN, network=network) as bus,
        gradbus.join_group(bus, rank=rank, world=role.world) as group,
    ):
        found = await role.run(group)
        await group.barrier("bench/end")  # nobody leaves while others still work
        return found
