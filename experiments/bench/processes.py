"""The processes of a benchmark: forked from a server that has imported everything, and ended with the benchmark.

Imports are no part of any figure and take seconds: so eight processes start in one. Each has one torch thread.
:class:`Processes` starts any work, :func:`run_alone` one process; :func:`run_ranks` starts the ranks of one group, each
with its :class:`BenchRank`.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from inspect import iscoroutine
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradbus.commands.lab.namespaces import Host, enter_host
from gradbus.runtime import logs
from gradbus.runtime.bus.bus import Bus, connect
from gradbus.runtime.collectives import Group, join_group
from gradbus.runtime.fast_paths import IS_LINUX
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.security import Level, Security

LEASE_S = 10.0  # a busy machine must not look like a death
DOMAIN = 22
_STORE_S = 60.0
_SHARED_MEMORY = "GRADBUS_BUS__SHARED_MEMORY"
_UNSEALED = {"GRADBUS_BUS__SECURITY": "none", "GRADBUS_BUS__JOB": "unsealed"}

Transport = Literal["one-host", "dds-only"]
TRANSPORTS: dict[Transport, str] = {"one-host": "one host", "dds-only": "DDS only"}

context = multiprocessing.get_context("forkserver")
# torch._dynamo: the first optimizer of a process imports it, which takes seconds.
context.set_forkserver_preload(
    [
        "gradbus.actors.data_parallel.elastic",
        "gradbus.actors.federated.controller.controller",
        "gradbus.actors.federated.site.site",
        "gradbus.actors.parameter_server.server",
        "gradbus.actors.parameter_server.worker",
        "gradbus.models",
        "gradbus.runtime.bus.bus",
        "torch._dynamo",
    ]
)
_runs = itertools.count()


class ProcessFailed(RuntimeError):
    """A process ended with an error, or took too long."""


class Processes:
    """Processes that do not outlive the ``with`` block."""

    def __init__(self) -> None:
        self._started: list[BaseProcess] = []
        self._pipes: dict[Connection, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self._started:
            process.join(5.0 if kind is None else 0.0)
            if process.is_alive():
                process.kill()
                process.join()

    def start(self, name: str, work: Callable[..., Any], *arguments: Any) -> int:
        """Start a process that does ``work(*arguments)``, a function or coroutine function of a module.

        Returns:
            The process id.
        """
        near, far = context.Pipe(duplex=False)
        process = context.Process(target=_live, args=(far, work, arguments), name=name)
        process.start()
        self._started.append(process)
        far.close()
        self._pipes[near] = name
        assert process.pid is not None
        return process.pid

    def results(self, timeout_s: float) -> list[Any]:
        """The results of the work of each process, in the order in which they were started.

        Raises:
            ProcessFailed: one of them failed or died, or some have not ended in time.
        """
        until_s = time.monotonic() + timeout_s
        found: dict[Connection, Any] = {}
        while waiting := [pipe for pipe in self._pipes if pipe not in found]:
            ready = wait(waiting, max(0.0, until_s - time.monotonic()))
            if not ready:
                names = ", ".join(self._pipes[pipe] for pipe in waiting)
                raise ProcessFailed(f"{names}: not ended after {timeout_s:g} s")
            failures = []
            for pipe in (pipe for pipe in waiting if pipe in ready):
                try:
                    failed_s, found[pipe] = pipe.recv()
                except EOFError:
                    failed_s, found[pipe] = 0.0, "it died"
                pipe.close()
                if failed_s is not None:
                    failures.append((failed_s, f"{self._pipes[pipe]} failed: {found[pipe]}"))
            if failures:
                raise ProcessFailed(min(failures)[1])  # those that fail later mostly fail because of it
        return [found[pipe] for pipe in self._pipes]


def run_alone(name: str, work: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """Return what ``work(*arguments)`` finds in a process of its own. Raises ProcessFailed."""
    with Processes() as running:
        running.start(name, work, *arguments)
        return running.results(timeout_s)[0]


def end_with_benchmark() -> None:
    """Have the kernel kill this process, which ``multiprocessing`` has started for a benchmark, when that one is gone.

    The parent is the fork server, and ends after its children: each holds the pipe that it waits for, so as to fork
    others by it. So the signal comes of the pipe whose write end the benchmark alone has, as that is closed. Only Linux
    sends another signal than SIGIO.
    """
    benchmark = multiprocessing.parent_process()
    if benchmark is None or not IS_LINUX:
        return
    fcntl.fcntl(benchmark.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(benchmark.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(benchmark.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    if not benchmark.is_alive():  # it was closed before that was in force
        os._exit(1)


def _live(pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The whole life of such a process."""
    end_with_benchmark()
    logs.configure(level="error")
    torch.set_num_threads(1)
    outcome: tuple[float | None, Any]
    try:
        found = work(*arguments)
        outcome = None, asyncio.run(found) if iscoroutine(found) else found
    except BaseException:
        outcome = time.monotonic(), traceback.format_exc()
    with pipe:
        pipe.send(outcome)
    os._exit(0)  # torch's teardown takes its time and belongs to no figure


@dataclass(frozen=True, slots=True)
class BenchRank:
    """The place of a rank process in its run.

    Attributes:
        job: its name, which no other run has. port: of the store, in the process of the benchmark.
        spec: what the benchmark asks of all ranks.
        hosts: network namespaces; equally many ranks on each, one after the other. Empty: on
            this machine.
    """

    rank: int
    world: int
    job: str
    port: int
    transport: Transport
    spec: Any
    hosts: tuple[Host, ...] = ()

    @property
    def host(self) -> Host | None:
        """Return where this rank is; None: on this machine. Ranks of one host follow one another."""
        return self.hosts[self.rank * len(self.hosts) // self.world] if self.hosts else None

    def start(self, backend: str, timeout_s: float = 60.0) -> dist.ProcessGroup:
        """Make the default process group of ``torch.distributed``, and return it."""
        store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=_STORE_S))
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world, timeout=timedelta(seconds=timeout_s)
        )
        group = dist.group.WORLD
        assert group is not None
        return group

    def start_both(self) -> dict[str, dist.ProcessGroup]:
        """gloo, the default process group, and dds beside it, which is called "ours".

        On one host dds is as it is by default; over DDS alone it is not sealed, as gloo does not encrypt either.
        """
        gloo = self.start("gloo")
        return {"ours": dds_group() if self.transport == "one-host" else unsealed_group(), "gloo": gloo}

    def bus(self, network: NetworkConfig | None = None) -> AbstractAsyncContextManager[Bus]:
        """Return a bus of this rank, to be entered, on its host if it has one."""
        bus_network = network or NetworkConfig(lease_s=LEASE_S)
        security: Level | Security = "user"
        if self.host is not None:
            security = Security(insecure=True)  # nobody else is on these networks
            bus_network = replace(
                bus_network,
                profile="network",
                interface=self.host.interface,
                peers=tuple(host.address for host in self.hosts),
            )
        return connect(self.job, domain=DOMAIN, network=bus_network, security=security)

    @asynccontextmanager
    async def group(self, network: NetworkConfig | None = None) -> AsyncIterator[Group]:
        """The ranks as a :class:`Group` of a bus of their own; none leaves it while another one still works."""
        async with self.bus(network) as bus, join_group(bus, rank=self.rank, world=self.world) as group:
            yield group
            await group.barrier("bench/end")


def dds_group() -> dist.ProcessGroup:
    """A process group of all ranks on the dds backend."""
    group = dist.new_group(backend="dds")
    assert isinstance(group, dist.ProcessGroup)
    return group


def unsealed_group() -> dist.ProcessGroup:
    """A process group of all ranks on the dds backend, on a bus of its own that encrypts nothing."""
    os.environ |= _UNSEALED
    try:
        group = dds_group()
        dist.barrier(group=group)  # its bus is opened when it is used first
    finally:
        for name in _UNSEALED:
            del os.environ[name]
    return group


def run_ranks(
    role: Callable[[BenchRank], Any],
    world: int,
    spec: Any = None,
    *,
    transport: Transport = "one-host",
    timeout_s: float = 120.0,
    hosts: tuple[Host, ...] = (),
) -> list[Any]:
    """Start all ranks and return what they found, in rank order.

    Args:
        role: what each of them does: a function or coroutine function of a module.
        transport: one-host: what the backend picks by itself. dds-only: shared memory is switched off.
        hosts: network namespaces that the ranks are on, equally many on each; they have no torch.distributed there.

    Raises:
        ProcessFailed: one of them failed or died, or some had not ended in time. The others are ended.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = f"bench-{os.getpid()}-{next(_runs)}"
    with Processes() as processes:
        for rank in range(world):
            place = BenchRank(rank, world, job, store.port, transport, spec, hosts)
            processes.start(f"rank {rank}", _rank, role, place)
        return processes.results(timeout_s)


def _rank(role: Callable[[BenchRank], Any], place: BenchRank) -> Any:
    if place.host is not None:
        enter_host(place.host)  # before any thread of DDS
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "GRADBUS_BUS__DOMAIN": str(DOMAIN),
        "GRADBUS_BUS__LEASE_S": f"{LEASE_S:g}",
    }
    os.environ.pop(_SHARED_MEMORY, None)
    if place.transport == "dds-only":
        os.environ[_SHARED_MEMORY] = "false"
    return role(place)
