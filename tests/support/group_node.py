"""Groups for tests: all ranks in one process, each with a bus of its own, or each rank a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import torch
from ranks import Ranks

import gradbus
from gradbus.commands.lab.namespaces import enter_namespace
from gradbus.runtime import logs
from gradbus.runtime.collectives import Group
from gradbus.runtime.security import Security

Script = Callable[[Group], Awaitable[Any]]
LEASE_S = 20.0  # where no death is tested, a machine that stands still for seconds is none


@contextlib.asynccontextmanager
async def joined(place: dict[str, Any], rank: int, world: int, **options: Any) -> AsyncIterator[Group]:
    """One rank of a group, on a bus of its own."""
    network = options.pop("network", {"lease_s": LEASE_S})
    # In a network namespace nobody else is there.
    security = Security(**options.pop("security", {"insecure": True}))
    async with gradbus.connect(**place, network=gradbus.NetworkConfig(**network), security=security) as bus:
        options = {"timeout_s": 20.0, "collective_timeout_s": 20.0, **options}
        async with gradbus.join_group(bus, rank=rank, world=world, **options) as group:
            yield group


async def as_ranks(place: dict[str, Any], world: int, script: Script, **options: Any) -> list[Any]:
    """Run the script as every rank of a group. Returns what each returned, in rank order."""

    async def run(rank: int) -> Any:
        async with joined(place, rank, world, **options) as group:
            return await script(group)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run(rank)) for rank in range(world)]
    return [task.result() for task in running]


def group_ranks(script: Callable[..., Any], world: int, **common: Any) -> Ranks:
    """Ranks of one group as processes.

    Args:
        script: run in each process, as ``script(Rank(...))``; a function of some module, for it is pickled.
        common: what all ranks are told, see :class:`Rank`.
    """
    return Ranks(run_forked, world, script=script, **common)


def all_done(ranks: Ranks) -> list[dict[str, Any]]:
    """Start all; what each says when it is done, of a script that ends well and leaves nothing pending."""
    found = []
    for node in ranks.start_all():
        assert node.wait(60.0) == 0
        (done,) = node.all("done")
        assert (done["pending"], done["early_bytes"]) == (0, 0)
        found.append(done)
    return found


class Rank:
    """A rank in its own process, as its script sees it."""

    def __init__(self, spec: dict[str, Any], pipe: Any) -> None:
        self.spec = spec
        self.rank: int = spec["rank"]
        self.world: int = spec["world"]
        self._pipe = pipe
        self._saying = threading.Lock()

    def say(self, event: str, **facts: Any) -> None:
        """Tell the test. ``at_s`` is of a clock that all processes of this machine share."""
        with self._saying:
            self._pipe.send({"event": event, "at_s": time.monotonic(), **facts})

    def hear(self) -> None:
        """Wait for a word of the test: one that a script expects, by ``Ranks.tell``. Blocks."""
        self._pipe.recv()

    def join(self, **options: Any) -> contextlib.AbstractAsyncContextManager[Group]:
        """Join the group."""
        network = self.spec.get("network", {"lease_s": LEASE_S})
        limits = self.spec.get("limits", {}) | {key: self.spec[key] for key in ("security",) if key in self.spec}
        return joined(self.spec["place"], self.rank, self.world, network=network, **limits, **options)


def run_forked(spec: dict[str, Any], pipe: Any) -> None:
    """Entry of a forked process. Its exit code is 0 unless the script raises. ``namespace``: of the network that it and
    the threads that it starts shall use."""
    if "namespace" in spec:
        enter_namespace(spec["namespace"])
    logs.configure(level=os.environ.get("TEST_LOG", "error"))
    torch.set_num_threads(1)
    rank = Rank(spec, pipe)
    made = spec["script"](rank)
    if asyncio.iscoroutine(made):
        asyncio.run(made)
    sys.exit(0)
