"""Federated rounds without training: a controller and its clients in processes of their own, and what a round costs.

Training returns at once, so the period from command to command, less the slowest client's training, is overhead.
Memory and processor time are those of one process alone, which is why the controller has a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gradbus
from gradbus.experiments.bench.federation import OpenBus, RoleWork, run_federation
from gradbus.experiments.bench.processes import LEASE_S
from gradbus.experiments.bench.ticker import loop_gaps
from gradbus.experiments.bench.timing import cpu_s, memory_bytes, percentile, reset_peak
from gradbus.models import NoopTask

DOMAIN = 20
WAYS = {"one host": True, "DDS only": False}  # shared_memory, of all processes: by itself, and as between machines
_WARM_UP_ROUNDS = 2  # buffers are made, DDS has found its window


class RoundsJob(NamedTuple):
    """The settings that all processes of a run share. ``gaps``: whether they measure how late their event loops are.
    ``train_s``: how long training takes, in which its thread waits, as for a GPU."""

    name: str
    dim: int
    shared_memory: bool = True
    gaps: bool = False
    train_s: float = 0.0


class Rounds(NamedTuple):
    """The outcome of a run: the reports of the controller and of the processes of clients."""

    controller: dict[str, Any]
    clients: list[dict[str, Any]]

    @property
    def overheads_s(self) -> list[float]:
        """Seconds from the end of a round to the end of the next, less the slowest training, after the warm-up."""
        ends = self.controller["ends_s"][_WARM_UP_ROUNDS - 1 :]
        trained = self.controller["train_s"][_WARM_UP_ROUNDS:]
        return [b - a - t for a, b, t in zip(ends, ends[1:], trained, strict=False)]

    @property
    def bytes_up(self) -> float:
        """Bytes of the updates of a round."""
        return float(self.controller["bytes_up"][-1])

    @property
    def controller_cpu_s(self) -> float:
        """Processor seconds of the controller in a round, after the warm-up."""
        used = self.controller["cpu_s"][_WARM_UP_ROUNDS - 1 :]
        return float(used[-1] - used[0]) / (len(used) - 1)

    @property
    def clients_cpu_s(self) -> float:
        """Processor seconds of all processes of clients in a round, after the warm-up."""
        rounds, first = len(self.controller["cpu_s"]), _WARM_UP_ROUNDS + 1
        return sum(float(c["cpu_s"][rounds] - c["cpu_s"][first]) / (rounds - first) for c in self.clients)

    @property
    def cpu_s(self) -> float:
        """Processor seconds of all processes in a round, after the warm-up."""
        return self.controller_cpu_s + self.clients_cpu_s

    @property
    def start_s(self) -> float:
        """Seconds from the moment at which all have a bus to the last client's first command."""
        opened = max(process["opened_s"] for process in (self.controller, *self.clients))
        return float(max(client["first_command_s"] for client in self.clients) - opened)

    @property
    def gap_p99_s(self) -> float:
        """The 99th percentile of how late the event loop of the worst process was, in seconds."""
        return float(max(process["gap_p99_s"] for process in (self.controller, *self.clients)))


def run_rounds(  # noqa: PLR0913 - settings by keyword
    dim: int,
    *,
    clients: int,
    rounds: int,
    processes: int = 2,
    timeout_s: float = 300.0,
    shared_memory: bool = True,
    gaps: bool = False,
    train_s: float = 0.0,
    min_clients: int = 1,
    **settings: Any,
) -> Rounds:
    """Run a controller and so many clients, which share ``processes`` processes. ``gaps``,
    ``train_s``: as of a :class:`RoundsJob`. ``min_clients``, ``settings``: of the run.

    Raises:
        ProcessFailed: a process failed, or not all have ended in time.
    """
    job = RoundsJob(f"bench-{os.getpid()}", dim, shared_memory, gaps, train_s)
    present = {"num": clients, "start_timeout_s": 120.0, "dead_after_s": 20.0, "min": min_clients}
    rules = {"rounds": rounds, "clients": present, "eval_every": 0, **settings}
    shares = {f"clients {index}": range(index, clients, processes) for index in range(processes)}
    works = {name: RoleWork(_clients, (job, client_ids)) for name, client_ids in shares.items()}
    return Rounds(*run_federation(RoleWork(_controller, (job, rules)), works, timeout_s))


def _connect(job: RoundsJob) -> OpenBus:
    return gradbus.connect(job.name, domain=DOMAIN, lease_s=LEASE_S, shared_memory=job.shared_memory)


async def _controller(job: RoundsJob, rules: Mapping[str, Any]) -> dict[str, Any]:
    """The life of the controller's process: a model that learns nothing."""
    async with _connect(job) as bus:
        empty, opened_s = memory_bytes("VmRSS"), time.time()
        controller = gradbus.Controller(bus, NoopTask(job.dim), gradbus.FederatedConfig(**rules))
        ends: list[float] = []
        cpus: list[float] = []
        idle = 0

        async def watch_idle() -> None:
            """Note the memory of a controller that has its model and waits for clients."""
            nonlocal idle
            while controller.progress.phase != "waiting":  # noqa: ASYNC110 - a watcher must not be part of what it watches
                await asyncio.sleep(0.001)
            idle = memory_bytes("VmRSS")
            reset_peak()

        watcher = asyncio.create_task(watch_idle(), name="watch idle memory")
        async with loop_gaps(job.gaps) as gaps:
            async for report in controller.rounds():
                if report.round_id == _WARM_UP_ROUNDS:
                    gaps.clear()
                ends.append(time.perf_counter())
                cpus.append(cpu_s())
        await watcher
        return {
            "opened_s": opened_s,
            "ends_s": ends,
            "cpu_s": cpus,
            "gap_p99_s": percentile(gaps, 0.99),
            "train_s": [report.train_s for report in controller.progress.reports],
            "bytes_up": [report.bytes_up for report in controller.progress.reports],
            "empty_bytes": empty,
            "idle_bytes": idle,
            "peak_bytes": memory_bytes("VmHWM"),
        }


async def _clients(job: RoundsJob, client_ids: Sequence[int]) -> dict[str, Any]:
    """The life of a process with some clients on one bus."""
    cpu_at: dict[int, float] = {}
    first_command_s = 0.0

    class ConstantTask(NoopTask):
        """Notes the processor time at the start of each round."""

        def train(self, model: Any, **arguments: Any) -> Any:
            nonlocal first_command_s
            first_command_s = first_command_s or time.time()
            cpu_at.setdefault(arguments["round_id"], cpu_s())
            time.sleep(job.train_s)
            return super().train(model, **arguments)

    async with _connect(job) as bus:
        empty, opened_s = memory_bytes("VmRSS"), time.time()
        async with loop_gaps(job.gaps) as gaps, asyncio.TaskGroup() as group:
            for client_id in client_ids:
                client = gradbus.Client(bus, ConstantTask(job.dim, delta="constant"), client_id=client_id)
                group.create_task(client.run(), name=f"client {client_id}")
    return {
        "opened_s": opened_s,
        "first_command_s": first_command_s,
        "cpu_s": cpu_at,
        "gap_p99_s": percentile(gaps, 0.99),
        "empty_bytes": empty,
        "peak_bytes": memory_bytes("VmHWM"),
    }
