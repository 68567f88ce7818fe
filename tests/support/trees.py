"""Trees of Controllers in one process, over real DDS: each level has a job of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dds_domains import new_domain

import gradbus
from gradbus.actors import Site
from gradbus.actors.federated.controller.report import Progress
from gradbus.actors.federated.site.site_controller import LevelAbove, SiteController
from gradbus.models import NoopTask
from gradbus.models.task import TrainResult
from gradbus.runtime.config.federated import UpstreamConfig
from gradbus.runtime.testing.failpoints import FailPoint
from gradbus.runtime.wire.control import Welcome

DIM = 30_000
PATIENT = {"dead_after_s": 30.0, "start_grace_s": 60.0}

_jobs = itertools.count()


class UnequalTask(NoopTask):
    """Each client has other samples and another loss, so that a mean of means would be another one."""

    def __init__(self, dim: int = DIM, hold: Callable[[int, int], None] = lambda client_id, round_id: None) -> None:
        """``hold(client, round)`` is called as training begins, on its thread."""
        super().__init__(dim, delta="seeded")
        self._hold = hold

    def train(self, model: Any, **arguments: Any) -> TrainResult:
        client_id, round_id = arguments["client_id"], arguments["round_id"]
        self._hold(client_id, round_id)
        super().train(model, **arguments)
        return TrainResult(num_samples=3 + 2 * client_id, loss=0.1 * (client_id + 1) / round_id)


class DiesAfterCommit(gradbus.Controller):
    """Has the model of a round on its disk when it ends, and has sent it to nobody."""

    def dies_after(self, round_id: int) -> DiesAfterCommit:
        def die() -> None:
            raise ConnectionAbortedError

        self._probe.fail = FailPoint(f"after_commit_before_publish:{round_id}", die)
        return self


@dataclass
class Tree:
    """Buses of the jobs of one tree, closed with it."""

    stack: AsyncExitStack
    domain: int = field(default_factory=new_domain)
    name: str = field(default_factory=lambda: f"tree-{os.getpid()}-{next(_jobs)}")

    async def bus(self, level: str, **options: Any) -> gradbus.Bus:
        """A bus of its own on the job of a level."""
        place = {"job": f"{self.name}-{level}", "domain": self.domain, **options}
        return await self.stack.enter_async_context(gradbus.connect(**place))


@contextlib.asynccontextmanager
async def tree(timeout_s: float = 60.0) -> AsyncIterator[Tree]:
    async with asyncio.timeout(timeout_s), AsyncExitStack() as stack:
        yield Tree(stack)


def rules(participants: int, *, sites: bool = False, **more: Any) -> gradbus.FederatedConfig:
    """Of a level that waits for all of its participants."""
    clients = {"num": participants, "min": participants, "kind": "sites" if sites else "clients", **PATIENT}
    config: dict[str, Any] = {"eval_every": 0, **more}
    config["clients"] = {**clients, **more.get("clients", {})}
    return gradbus.FederatedConfig(**config)


def site_of(above: gradbus.Bus, bus: gradbus.Bus, number: int, config: gradbus.FederatedConfig, **more: Any) -> Site:
    """A site; ``more``: of UpstreamConfig. Alone it goes on only if it has a directory."""
    alone = config.checkpoint.dir is not None
    return Site(above, bus, NoopTask(DIM), config, UpstreamConfig(site=number, **{"alone": alone, **more}))


def state(path: Path, name: str) -> dict[str, Any]:
    return {"checkpoint": {"dir": path / name}}


async def ended(task: asyncio.Task[Any]) -> None:
    """Stop it, and wait until it has let go of its bus."""
    task.cancel()
    await asyncio.wait({task})


def serve_site(
    group: asyncio.TaskGroup,
    bus: gradbus.Bus,
    config: gradbus.FederatedConfig,
    reports: list[gradbus.RoundReport] | None = None,
) -> tuple[SiteController, asyncio.Task[None]]:
    """A site's Controller, told what to do by the test in place of a level above."""
    controller = SiteController(
        bus,
        NoopTask(DIM),
        config,
        above=LevelAbove(Welcome(0, 1, 7, 1, "fp32", "{}", 2, 0.5, round_s=20.0), None),
        progress=Progress(),
        on_open=lambda: None,
    )
    return controller, group.create_task(controller.serve(([] if reports is None else reports).append))
