"""The bus: round trips and streams between two processes against bare TCP, one writer to many readers, the loop."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import gradbus
from gradbus.experiments.bench.bus_words import ANSWER_S, DOMAINS, ECHO, LATE, WATCH, Words, network
from gradbus.experiments.bench.results import Effort, Figure, figure
from gradbus.experiments.bench.tcp import Echo
from gradbus.experiments.bench_collectives_timing import in_turns, size_text
from gradbus.experiments.bench_process import loop_gaps, percentile
from gradbus.experiments.peer_link import END, GOT, PING, ROOT
from gradbus.runtime.wire.messages import ClientUpdate, Control

KIB, MIB = 1 << 10, 1 << 20
_PING_BYTES = 64
_LARGE_BYTES = 64 * KIB
_WARM_UP_BLOCKS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """``blocks``: of each figure. ``trips``: round trips of one. ``stream_bytes``: of a stream in one. ``fan_bytes``:
    of what goes to all ``readers``, ``fans`` times in a block."""

    blocks: int
    trips: int
    streams: Sequence[int] = (MIB, 4 * MIB)
    stream_bytes: int = 32 * MIB
    readers: Sequence[int] = (2, 4, 8)
    fan_bytes: int = 16 * MIB
    fans: int = 3


PLANS: dict[Effort, Plan] = {
    "tiny": Plan(blocks=2, trips=5, streams=(MIB,), stream_bytes=2 * MIB, readers=(), fans=1),
    "quick": Plan(blocks=7, trips=100),
    "full": Plan(blocks=15, trips=300, stream_bytes=64 * MIB),
}

Block = Callable[[], Coroutine[Any, Any, float]]


def measure(effort: Effort) -> list[Figure]:
    """All figures of the bus."""
    return asyncio.run(_measure(PLANS[effort]))


async def _measure(plan: Plan) -> list[Figure]:
    async with _Root.open(["unicast"], 1) as root:
        figures = await _pair_figures(root, plan)
    for count in plan.readers:
        async with _Root.open(["unicast", "multicast"], count) as root:
            figures += await _fan_figures(root, plan, count)
    return figures


class _Root:
    """The writer's process: one end for each network configuration, and the peers that were started."""

    def __init__(self, ends: dict[str, Words], peers: Sequence[int]) -> None:
        self.ends = ends
        self.peers = peers

    @classmethod
    @asynccontextmanager
    async def open(cls, names: Sequence[str], readers: int) -> AsyncIterator[_Root]:
        """Start the readers, and meet them on every bus."""
        job, peers = f"bench-bus-{os.getpid()}", range(1, readers + 1)
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "gradbus.experiments.bench.bus_peer", str(peer), *names, job
            )
            for peer in peers
        ]
        try:
            async with _ends(job, list(names)) as ends:
                for end in ends.values():
                    await end.meet_all(peers)
                yield cls(ends, peers)
                for end in ends.values():
                    await end.say(END)
                async with asyncio.timeout(ANSWER_S):
                    for process in processes:
                        await process.wait()
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def send(self, name: str, size: int, count: int) -> float:
        """Seconds until so many transfers are at all readers, by their word for the last one."""
        end, payload = self.ends[name], bytes(size)
        began_s = time.perf_counter()
        for _ in range(count):
            transfer = await end.send_model(payload)
        await end.hear_all(f"{GOT} {transfer}", self.peers)
        return time.perf_counter() - began_s


@asynccontextmanager
async def _ends(job: str, names: list[str]) -> AsyncIterator[dict[str, Words]]:
    if not names:
        yield {}
        return
    *others, name = names
    async with _ends(job, others) as ends, gradbus.connect(job, domain=DOMAINS[name], network=network(name)) as bus:
        with bus.subscribe(Control, ClientUpdate) as inbox:
            yield {**ends, name: Words(bus, ROOT, inbox)}


async def _pair_figures(root: _Root, plan: Plan) -> list[Figure]:
    end = root.ends["unicast"]
    ping = PING.ljust(_PING_BYTES, ".")

    async def small() -> float:
        began_s = time.perf_counter()
        await end.say(ping)
        await end.hear_all(ping, root.peers)
        return time.perf_counter() - began_s

    async def large() -> float:
        began_s = time.perf_counter()
        await end.send_model(bytes(_LARGE_BYTES), ECHO)
        await end.receive_update()
        return time.perf_counter() - began_s

    figures = []
    with Echo() as echo:
        for name, trip, size in (("64 B", small, _PING_BYTES), ("64 KiB", large, _LARGE_BYTES)):
            taken = await _alternate(
                plan.blocks, bus=_median_of(trip, plan.trips), tcp=_median_of(_blocking(echo.round_trip_s, size), 20)
            )
            figures.append(
                figure(
                    f"round trip, {name}", "us", (1e6 * one for one in taken["bus"]),
                    against=("TCP", (1e6 * one for one in taken["tcp"])),
                )
            )  # fmt: skip
        for size in plan.streams:
            count = plan.stream_bytes // size

            async def stream(size: int = size, count: int = count) -> float:
                return await root.send("unicast", size, count) / count

            async def bare(size: int = size, count: int = count) -> float:
                return echo.stream_s(size, count) / count

            taken = await _alternate(plan.blocks, bus=stream, tcp=bare)
            rate = size / statistics.median(taken["bus"]) / 1e6
            figures.append(
                figure(
                    f"stream of {size_text(size)} messages", "ms", (1e3 * one for one in taken["bus"]),
                    against=("TCP", (1e3 * one for one in taken["tcp"])), note=f"{rate:,.0f} MB/s",
                )
            )  # fmt: skip
    return figures + await _gap_figures(root, plan)


async def _gap_figures(root: _Root, plan: Plan) -> list[Figure]:
    """How late the loops of both ends are while 4 MiB messages go through: p99 of each block."""
    writer, reader, end = [], [], root.ends["unicast"]
    for _ in range(plan.blocks):
        await end.say(WATCH)
        async with loop_gaps(True) as gaps:
            await root.send("unicast", 4 * MIB, max(1, plan.stream_bytes // (4 * MIB)))
        await end.say(LATE)
        (word,) = await end.hear_all(LATE, root.peers)
        writer.append(1e3 * percentile(gaps, 0.99))
        reader.append(1e3 * float(word.split()[1]))
    note = "p99 of each block; a task that wants to run every millisecond"
    return [
        figure("event loop late while 4 MiB messages go out", "ms", writer, note=note),
        figure("event loop late while 4 MiB messages come in", "ms", reader, note=note),
    ]


async def _fan_figures(root: _Root, plan: Plan, count: int) -> list[Figure]:
    def fan(name: str) -> Block:
        async def send() -> float:
            return await root.send(name, plan.fan_bytes, plan.fans) / plan.fans

        return send

    taken = await _alternate(plan.blocks, unicast=fan("unicast"), multicast=fan("multicast"))
    ms = {name: [1e3 * one for one in values] for name, values in taken.items()}
    name = f"{size_text(plan.fan_bytes)} to {count} readers"
    return [
        figure(f"{name}, unicast", "ms", ms["unicast"]),
        figure(f"{name}, multicast", "ms", ms["multicast"], against=("unicast", ms["unicast"])),
    ]


def _median_of(trip: Block, count: int) -> Block:
    async def block() -> float:
        return statistics.median([await trip() for _ in range(count)])

    return block


def _blocking(call: Callable[[int], float], size: int) -> Block:
    async def block() -> float:
        return call(size)

    return block


async def _alternate(blocks: int, **calls: Block) -> dict[str, list[float]]:
    """What the blocks give, by turns, after one of each that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_WARM_UP_BLOCKS):
        for call in calls.values():
            await call()
    for name in in_turns(calls, blocks):
        taken[name].append(await calls[name]())
    return taken
