"""The ranks of the benchmark of ``torch.distributed``: real processes, with gloo and our backend side by side."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradbus.experiments.bench_children import ChildFailed, Processes
from gradbus.experiments.bench_process import LEASE_S
from gradbus.experiments.bench_rows import Row

DOMAIN = 22
_STORE_S = 60.0
_SHARED_MEMORY = "GRADBUS_BUS__SHARED_MEMORY"
_UNSEALED = {"GRADBUS_BUS__SECURITY": "none", "GRADBUS_BUS__JOB": "unsealed"}

Transport = Literal["one-host", "dds-only"]
TRANSPORTS: dict[Transport, str] = {"one-host": "one host", "dds-only": "DDS only"}


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
        """gloo, the default process group, and ours beside it: as it is by default on one host; over DDS alone without
        sealing, as between machines gloo does not encrypt either."""
        gloo = self.start("gloo")
        return {"ours": new_group() if self.transport == "one-host" else unsealed_group(), "gloo": gloo}


Role = Callable[[Place], dict[str, Any]]


def new_group() -> dist.ProcessGroup:
    """One of ours, of all ranks."""
    group = dist.new_group(backend="dds")
    assert isinstance(group, dist.ProcessGroup)
    return group


def unsealed_group() -> dist.ProcessGroup:
    """The same on a bus of its own that seals nothing."""
    os.environ |= _UNSEALED
    try:
        group = new_group()
        dist.barrier(group=group)  # its bus is opened when it is used first
    finally:
        for name in _UNSEALED:
            del os.environ[name]
    return group


def run_ranks(
    role: Role, world: int, transport: Transport, spec: dict[str, Any], *, timeout_s: float = 120.0,
    last_dies: bool = False, lease_s: float = LEASE_S,
) -> list[dict[str, Any]]:  # fmt: skip
    """Start all ranks and return what they found, in order.

    Args:
        role: what each of them does: a function of a module.
        transport: one-host: what the backend picks by itself. dds-only: shared memory is switched off.
        last_dies: the last rank ends itself on the way, and reports nothing.
        lease_s: after so long a silence a rank is dead.

    Raises:
        ChildFailed: one of them failed or died, or some had not ended in time. The others are ended.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Processes() as processes:
        for rank in range(world):
            place = Place(rank, world, store.port, transport, spec)
            processes.start(f"rank {rank}", _play, role, place, lease_s, dies=last_dies and rank == world - 1)
        return processes.results(timeout_s)


def _play(role: Role, place: Place, lease_s: float) -> dict[str, Any]:
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo", "GRADBUS_BUS__DOMAIN": str(DOMAIN), "GRADBUS_BUS__LEASE_S": f"{lease_s:g}",
    }  # fmt: skip
    os.environ.pop(_SHARED_MEMORY, None)
    if place.transport == "dds-only":
        os.environ[_SHARED_MEMORY] = "false"
    return role(place)


def failed(name: str, error: ChildFailed) -> Row:
    """A figure that falls short because its ranks failed."""
    return Row(name, "runs", 0, "", False, str(error).strip().splitlines()[-1])
