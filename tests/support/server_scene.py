"""Runs with parameter servers in one process, each worker and server on a bus of its own, over DDS."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from ddp_scene import new_place, vector
from settings import nested
from torch import Tensor

import gradbus
from gradbus.actors import EpochReport, WorkerSummary
from gradbus.actors.parameter_server.agreement import NETWORK
from gradbus.actors.parameter_server.server import ParameterServer, ServerSummary
from gradbus.actors.parameter_server.worker import ParameterServerWorker
from gradbus.runtime.collectives import Group, join_group
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.parameter_server import ParameterServerSettings


@dataclass
class WorkerEnd:
    """What a worker came to."""

    worker: ParameterServerWorker | None = None
    summary: WorkerSummary | None = None
    reports: list[EpochReport] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def parameters(self) -> Tensor:
        assert self.worker is not None
        return vector(self.worker.model)


@dataclass
class ServerEnd:
    """What a server came to. ``received_bytes``: of what workers sent it."""

    server: ParameterServer | None = None
    summary: ServerSummary | None = None
    error: BaseException | None = None


@dataclass
class Ends:
    workers: list[WorkerEnd]
    servers: list[ServerEnd]

    def succeeded(self) -> Ends:
        """The same; fails with the first error there is."""
        for one in (*self.servers, *self.workers):
            if one.error is not None:
                raise one.error
        return self


Play = Callable[[Group, ParameterServerWorker], Awaitable[None]]


def serve(
    *tasks: Any,
    workers: int = 2,
    servers: int = 1,
    parallel: dict[str, Any] | None = None,
    at_servers: dict[str, Any] | None = None,
    callbacks: Sequence[Sequence[Any]] = (),
    play: Play | None = None,
    **settings: Any,
) -> Ends:
    """Run all workers and servers to their ends.

    One task for all workers, or one for each. ``settings``: of the parameter server; ``parallel``: of training;
    ``at_servers``: what servers have in place of them, and as ``task`` in place of the first worker's. ``play``: called
    for each worker in place of ``epochs()``.
    """
    torch.set_num_threads(1)
    tasks = tasks if len(tasks) > 1 else tasks * workers
    place = new_place()
    of_workers = ParameterServerSettings(servers=servers, **settings)
    others = dict(at_servers or {})
    server_task, theirs = others.pop("task", tasks[0]), others.pop("parallel", {})
    of_servers = ParameterServerSettings(servers=servers, **{**settings, **others})
    config = DataParallelConfig(**nested(parallel or {}))
    server_config = DataParallelConfig(**nested({**(parallel or {}), **theirs}))
    world = workers + servers
    limits = {"timeout_s": 20.0, "collective_timeout_s": 20.0}

    async def work(rank: int) -> WorkerEnd:
        end = WorkerEnd()
        try:
            async with (
                gradbus.connect(**place) as bus,
                join_group(bus, rank=rank, world=workers, **limits) as group,
                join_group(bus, rank=rank, world=world, name=NETWORK, **limits) as network,
            ):
                end.worker = worker = ParameterServerWorker(
                    group, network, tasks[rank], config, of_workers, callbacks=callbacks[rank] if callbacks else ()
                )
                if play is not None:
                    await play(network, worker)
                else:
                    async for report in worker.epochs():
                        end.reports.append(report)
                end.summary = worker.summary
        except Exception as error:
            end.error = error
        return end

    async def hold(index: int) -> ServerEnd:
        end = ServerEnd()
        try:
            async with (
                gradbus.connect(**place) as bus,
                join_group(bus, rank=workers + index, world=world, name=NETWORK, **limits) as network,
            ):
                end.server = ParameterServer(network, server_task, server_config, of_servers)
                end.summary = await end.server.run()
        except Exception as error:
            end.error = error
        return end

    async def everybody() -> Ends:
        async with asyncio.timeout(60):
            found = await asyncio.gather(
                *(work(rank) for rank in range(workers)), *(hold(index) for index in range(servers))
            )
        return Ends(found[:workers], found[workers:])  # type: ignore[arg-type]

    return asyncio.run(everybody())
