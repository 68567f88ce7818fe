"""One process of a federated benchmark: a controller, or some clients, that report what they used.

Memory and processor time are those of this process alone, which is why each role has a process of its own.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

TICK_S = 0.001
LEASE_S = 10.0  # a busy machine must not look like a death
WARM_UP_ROUNDS = 2  # buffers are made, DDS has found its window


def cpu_s() -> float:
    """Processor time of this process so far, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def memory_bytes(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> None:
    """Let VmHWM start again from the present."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


@asynccontextmanager
async def loop_gaps(wanted: bool) -> AsyncIterator[list[float]]:
    """Seconds by which a task that wants to run every millisecond came late, as long as the block runs.

    It costs processor time itself (1,000 wake-ups a second), so it runs only where it is ``wanted``.
    """
    gaps: list[float] = []
    if not wanted:
        yield gaps
        return

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            gaps.append(max(0.0, now - last - TICK_S))
            last = now

    task = asyncio.create_task(tick())
    try:
        yield gaps
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def percentile(values: list[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


async def run_controller(spec: dict[str, Any]) -> dict[str, Any]:
    """A controller with a model that learns nothing."""
    import gradbus
    from gradbus.models import NullTask

    share = spec.get("shared_memory", True)
    async with gradbus.connect(spec["job"], domain=spec["domain"], lease_s=LEASE_S, shared_memory=share) as bus:
        empty = memory_bytes("VmRSS")
        opened_s = time.time()
        config = gradbus.FederatedConfig(**spec["federated"])
        controller = gradbus.Controller(bus, NullTask(spec["dim"]), config)
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

        watcher = asyncio.create_task(watch_idle())
        async with loop_gaps(spec.get("gaps", False)) as gaps:
            async for report in controller.rounds():
                if report.round_id == WARM_UP_ROUNDS:
                    gaps.clear()
                ends.append(time.perf_counter())
                cpus.append(cpu_s())
        await watcher
        reports = [report.to_json() for report in controller.progress.reports]
        return {
            "opened_s": opened_s, "ends_s": ends, "cpu_s": cpus, "empty_bytes": empty,
            "idle_bytes": idle, "peak_bytes": memory_bytes("VmHWM"), "gap_p99_s": percentile(gaps, 0.99),
            "gap_max_s": max(gaps, default=0.0), "reports": reports,
        }  # fmt: skip


async def run_clients(spec: dict[str, Any]) -> dict[str, Any]:
    """Some clients on one bus."""
    import gradbus
    from gradbus.models import NullTask

    cpu_at: dict[int, float] = {}
    first_command_s = 0.0
    delay_s: dict[str, float] = spec.get("delay_s", {})

    class Task(NullTask):
        """Notes the processor time at the start of each round."""

        def train(self, model: Any, **arguments: Any) -> Any:
            nonlocal first_command_s
            first_command_s = first_command_s or time.time()
            cpu_at.setdefault(arguments["round_id"], cpu_s())
            time.sleep(delay_s.get(str(arguments["client_id"]), 0.0))  # for another order of arrival
            return super().train(model, **arguments)

    share = spec.get("shared_memory", True)
    async with gradbus.connect(spec["job"], domain=spec["domain"], lease_s=LEASE_S, shared_memory=share) as bus:
        empty, opened_s = memory_bytes("VmRSS"), time.time()
        async with loop_gaps(spec.get("gaps", False)) as gaps, asyncio.TaskGroup() as group:
            for client_id in spec["clients"]:
                task = Task(spec["dim"], delta=spec.get("delta", "constant"))
                group.create_task(gradbus.Client(bus, task, client_id=client_id).run())
    return {
        "opened_s": opened_s, "first_command_s": first_command_s,
        "cpu_s": {str(round_id): used for round_id, used in cpu_at.items()}, "gap_p99_s": percentile(gaps, 0.99),
        "gap_max_s": max(gaps, default=0.0), "empty_bytes": empty, "peak_bytes": memory_bytes("VmHWM"),
    }  # fmt: skip
