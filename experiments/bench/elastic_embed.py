"""How late the event loop of a web service is while a rank of an elastic run joins, trains and leaves on it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from dataclasses import dataclass, field

import torch
from aiohttp import ClientSession, web

import gradbus
from gradbus.experiments.bench.processes import end_with_benchmark
from gradbus.experiments.examples.embed_elastic import (
    EmbeddedRank,
    example_config,
    example_task,
    found,
    make_app,
)

TICK_S = 0.002
JOINS_S = 60.0


@dataclass(slots=True)
class Lateness:
    """Holds what was measured. ``loop_s``: how late each tick of the loop was, without and with the rank.
    ``requests_s``: of each request meanwhile. ``generations``: what the service said of the rank each time it was
    in."""

    idle_s: list[float] = field(default_factory=list)
    loop_s: list[float] = field(default_factory=list)
    requests_s: list[float] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    progress: list[str] = field(default_factory=list)


def _founder(job: str, domain: int) -> None:
    end_with_benchmark()
    torch.set_num_threads(1)
    asyncio.run(found(job, domain=domain))


def measure(times: int, trains_s: float, domain: int) -> Lateness:
    """Have a rank join and leave so many times, and train for so long each time, beside one in a process of its own."""
    job = f"embedded-{os.getpid()}"
    other = multiprocessing.get_context("spawn").Process(target=_founder, args=(job, domain), daemon=True)
    other.start()
    torch.set_num_threads(1)
    try:
        return asyncio.run(_serve(job, domain, times, trains_s))
    finally:
        other.kill()
        other.join()


async def _serve(job: str, domain: int, times: int, trains_s: float) -> Lateness:
    found = Lateness()
    rank = EmbeddedRank(lambda: gradbus.connect(job, domain=domain), 1, example_task(), example_config())
    runner = web.AppRunner(make_app(rank), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with ClientSession() as session:
        ticks = asyncio.create_task(_tick(found.idle_s))
        await asyncio.sleep(trains_s)
        ticks.cancel()
        # What is loaded at the first join of a process is part of its start, not of the service's life.
        await _stay(session, address, 0.0, Lateness())
        ticks = asyncio.create_task(_tick(found.loop_s))
        for _ in range(times):
            await _stay(session, address, trains_s, found)
        ticks.cancel()
    await runner.cleanup()
    return found


async def _stay(session: ClientSession, address: str, trains_s: float, found: Lateness) -> None:
    """Join, train, leave, and ask the service all the while."""

    async def ask() -> str:
        began_s = time.perf_counter()
        async with session.get(f"{address}/rank") as answer:
            status = await answer.json()
        found.requests_s.append(time.perf_counter() - began_s)
        return str(status["progress"])

    async with session.post(f"{address}/join"):
        pass
    asked_s = time.perf_counter()
    while "processes 0, 1" not in await ask():
        if time.perf_counter() > asked_s + JOINS_S:
            raise TimeoutError(f"the rank has not joined after {JOINS_S:g} s")
        await asyncio.sleep(TICK_S)
    until_s = time.perf_counter() + trains_s
    progress = await ask()
    while time.perf_counter() < until_s:
        progress = await ask()
        await asyncio.sleep(TICK_S)
    found.progress.append(progress)
    async with session.post(f"{address}/leave") as answer:
        found.outcomes.append(str((await answer.json())["outcome"]))


async def _tick(late_s: list[float]) -> None:
    while True:
        due_s = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        late_s.append(time.perf_counter() - due_s)
