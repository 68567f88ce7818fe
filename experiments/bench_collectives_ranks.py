"""The ranks of the benchmark of ``torch.distributed``: real processes, with gloo and our backend side by side.

They are forked from the server that those of :mod:`gradbus.experiments.bench_ddp_process` come from.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradbus.experiments.bench_ddp_process import RankFailed
from gradbus.experiments.bench_rows import Row
from gradbus.runtime import logs

DOMAIN = 22
_STORE_S = 60.0
_SHARED_MEMORY = "GRADBUS_BUS__SHARED_MEMORY"

Transport = Literal["one-host", "dds-only"]
TRANSPORTS: dict[Transport, str] = {"one-host": "one host", "dds-only": "DDS only"}

_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank a process is.

    Attributes:
        port: of the store, in the process of the benchmark. spec: what the benchmark asks of all ranks.
    """

    rank: int
    world: int
    port: int
    transport: Transport
    spec: dict[str, Any]

    def start(self, backend: str, timeout_s: float = 60.0) -> dist.ProcessGroup:
        """Make the default process group, and return it."""
        store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=_STORE_S))
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world, timeout=timedelta(seconds=timeout_s)
        )
        group = dist.group.WORLD
        assert group is not None
        return group

    def start_both(self) -> dict[str, dist.ProcessGroup]:
        """gloo, the default process group, and ours beside it."""
        gloo = self.start("gloo")
        return {"ours": new_group(), "gloo": gloo}


Role = Callable[[Place], dict[str, Any]]


def new_group() -> dist.ProcessGroup:
    """One of ours, of all ranks."""
    group = dist.new_group(backend="dds")
    assert isinstance(group, dist.ProcessGroup)
    return group


def run_ranks(
    role: Role, world: int, transport: Transport, spec: dict[str, Any], *, timeout_s: float = 120.0,
    last_dies: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Start all ranks and return what they found, in order.

    Args:
        role: what each of them does: a function of a module.
        transport: one-host: what the backend picks by itself. dds-only: shared memory is switched off.
        last_dies: the last rank ends itself on the way, and reports nothing.

    Raises:
        RankFailed: one of them failed or died, or some had not ended in time. The others are ended.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    found: list[dict[str, Any]] = []
    until_s = time.monotonic() + timeout_s
    try:
        for rank in range(world):
            ours, theirs = _context.Pipe(duplex=False)
            place = Place(rank, world, store.port, transport, spec)
            processes.append(_context.Process(target=_rank_process, args=(role, place, theirs), name=f"rank-{rank}"))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        found = [_received(pipe, until_s) for pipe in pipes[: -1 if last_dies else None]]
    finally:
        all_well = bool(found) and not any("error" in of_rank for of_rank in found)
        for process in processes:
            process.join(5.0 if all_well else 0.0)
            if process.is_alive():
                process.kill()
                process.join()
    errors = [(of_rank["at_s"], rank, of_rank["error"]) for rank, of_rank in enumerate(found) if "error" in of_rank]
    if errors:
        _, rank, text = min(errors)  # those that fail later mostly fail because of it
        raise RankFailed(f"rank {rank} failed: {text}")
    return found


def _received(pipe: Connection, until_s: float) -> dict[str, Any]:
    with pipe:
        if not pipe.poll(max(0.0, until_s - time.monotonic())):
            return {"error": "it has not ended in time", "at_s": math.inf}
        try:
            found: dict[str, Any] = pipe.recv()
        except EOFError:
            return {"error": "it died", "at_s": 0.0}
        return found


def _rank_process(role: Role, place: Place, pipe: Connection) -> None:
    """The whole life of a rank."""
    logs.configure(level="error")
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "GRADBUS_BUS__DOMAIN": str(DOMAIN)}
    os.environ.pop(_SHARED_MEMORY, None)
    if place.transport == "dds-only":
        os.environ[_SHARED_MEMORY] = "false"
    try:
        found = role(place)
    except BaseException:
        found = {"error": traceback.format_exc(), "at_s": time.monotonic()}
    with pipe:
        pipe.send(found)
    os._exit(0)  # torch's teardown takes its time and is nobody's figure


def failed(name: str, error: RankFailed) -> Row:
    """A figure that falls short because its ranks failed."""
    return Row(name, "runs", 0, "", False, str(error).strip().splitlines()[-1])
