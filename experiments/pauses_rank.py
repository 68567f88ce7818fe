"""What the processes of :mod:`.pauses` do: call collectives as a rank, hold a bus that nobody uses, compute."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

import gradbus
from gradbus.runtime import logs
from gradbus.runtime.collectives import join_group
from gradbus.runtime.errors import GradbusError
from gradbus.runtime.security import Security
from gradbus.runtime.wire.messages import Control

PATIENCE_S = 120.0  # of a collective


def play(spec: dict[str, Any], pipe: Connection) -> None:
    """One rank: joins, calls collectives until it is told to end, and says how it went."""
    logs.configure(level="error")
    if spec["key"]:
        os.environ["GRADBUS_KEY"] = spec["key"]
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(_play(spec, pipe))


async def _play(spec: dict[str, Any], pipe: Connection) -> None:
    security = Security(level="psk") if spec["key"] else Security(insecure=True)
    network = gradbus.NetworkConfig(shared_memory=spec["shared_memory"], lease_s=spec["lease_s"])
    orders: list[str] = []
    threading.Thread(target=_hear, args=(pipe, orders), daemon=True).start()
    started_s, steps = time.monotonic(), 0
    try:
        async with (
            gradbus.connect(spec["job"], domain=spec["domain"], network=network, security=security) as bus,
            join_group(
                bus, rank=spec["rank"], world=spec["world"], timeout_s=spec["start_s"],
                collective_timeout_s=PATIENCE_S, stall_warning_s=0.0,
            ) as group,
        ):  # fmt: skip
            pipe.send(("formed", time.monotonic(), time.monotonic() - started_s))
            small, large = torch.ones(256), torch.ones(64 << 10)
            try:
                while "end" not in orders:
                    if orders:
                        _hold_the_interpreter(float(orders.pop(0)))
                    values = large if steps % 8 == 0 else small
                    out = await group.all_reduce("x", values, round_id=steps)
                    assert float(out[0]) == spec["world"]
                    steps += 1
                    pipe.send(("step", time.monotonic(), steps))
                    await asyncio.sleep(spec["step_s"])
                    ready = await group.all_reduce("end", torch.tensor([float("end" in orders)]), round_id=steps)
                    if float(ready[0]) > 0:
                        orders.append("end")
            except GradbusError as error:
                failed_s = time.monotonic()  # before it leaves the group, which takes its time
                pipe.send(("failed", failed_s, f"{type(error).__name__}: {error}"))
                return
        pipe.send(("ended", time.monotonic(), steps))
    except GradbusError as error:
        pipe.send(("failed", time.monotonic(), f"{type(error).__name__}: {error}"))


def _hear(pipe: Connection, orders: list[str]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            orders.append(pipe.recv())


def _hold_the_interpreter(for_s: float) -> None:
    """A call of a C function that keeps the GIL."""
    ctypes.PyDLL(None).usleep(int(for_s * 1e6))


def sit(domain: int, lease_s: float | None, pipe: Connection) -> None:
    async def wait() -> None:
        async with gradbus.connect("idle", domain=domain, lease_s=lease_s, security=Security(insecure=True)) as bus:
            bus.subscribe(Control)
            bus.open_writer(Control)
            pipe.send("open")
            await asyncio.sleep(600)

    logs.configure(level="error")
    asyncio.run(wait())


def burn(for_s: float) -> None:
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        sum(range(10_000))
