"""How long gradbus holds the event loop of its host, and how punctual a control loop is beside training.

``make bench PART=loop``. Each host is a process that has just started, with a task on its loop that wants to run every
millisecond (loop_host.py). Its peer is in the process of the benchmark, which has loaded everything.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import gradbus
from gradbus.experiments.bench import loop_host
from gradbus.experiments.bench.command import Benchmark, Part
from gradbus.experiments.bench.control_host import STARTS_S, WAYS, ControlGaps
from gradbus.experiments.bench.loop_host import HostGaps
from gradbus.experiments.bench.processes import DOMAIN
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.timing import in_turns
from gradbus.experiments.examples.control_loop import control_run
from gradbus.runtime.forks import die_with_parent

LATE_MS = 50.0  # that a loop may be later than an idle one
TIMES_LATER = 1.5  # that a control loop may be late with training, of the time without
RECOMMENDED = "process"
_ROUNDS = 1_000_000
_HOST_S = 120.0
_WITHOUT_EVERY = 4
_runs = itertools.count()

_PEERS: dict[str, Callable[[gradbus.Bus], Coroutine[Any, Any, None]]] = {  # by the role of the host
    "client": lambda bus: loop_host.be_controller(bus, loop_host.make_task(), None),
    "controller": lambda bus: loop_host.be_client(bus, loop_host.make_task(), None),
    "worker": lambda bus: loop_host.be_worker(bus, loop_host.make_task(), None, rank=0),
}


async def watch(role: str, *options: str, domain: int = DOMAIN) -> HostGaps:
    """Run one host, with its peer. ``options``: of the host's command line.

    Raises:
        RuntimeError: the host has failed; its own text is on stderr. TimeoutError: it has not ended.
    """
    job = f"loop-{os.getpid()}-{next(_runs)}"
    async with asyncio.timeout(_HOST_S), gradbus.connect(job, domain=domain) as bus:
        peer = asyncio.create_task(_PEERS[role](bus), name=f"peer of the {role}")
        try:
            found = await _run(["loop_host", role, "--job", job, "--domain", str(domain), *options])
            await peer
        finally:
            peer.cancel()
            await asyncio.wait([peer])
    return HostGaps(**found)


def measure_role(role: str, chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Hosts of one role with gradbus.preload, and after each fourth one a host without it."""
    found: dict[bool, list[HostGaps]] = {True: [], False: []}
    for number in range(chosen.processes):
        found[True].append(asyncio.run(watch(role, "--preload")))
        if number % _WITHOUT_EVERY == 0:
            found[False].append(asyncio.run(watch(role)))
    for preloads, title in ((True, "after preload()"), (False, "without preload()")):
        hosts = found[preloads]
        late_ms, held_ms, idle_ms = (
            [1e3 * one for one in column]
            for column in zip(*((host.loop_s, host.held_s, host.idle_s) for host in hosts), strict=True)
        )
        yield measurement(f"{role}, {title}: longest delay of a process", "ms", late_ms)
        yield measurement(
            f"{role}, {title}: the same without what other processes took",
            "ms",
            held_ms,
            note=f"p100 {max(held_ms):.0f} ms",
        )
        yield measurement(f"{role}, {title}: longest delay of the idle loop", "ms", idle_ms)
        yield measurement(
            f"{role}, {title}: p100 over that of the idle loop",
            "ms",
            [max(0.0, max(late_ms) - max(idle_ms))],
            at_most=LATE_MS if preloads else None,
            note=f"{max(late_ms):.0f} and {max(idle_ms):.0f} ms, {len(hosts)} processes",
        )
    yield measurement(f"{role}: preload() itself", "s", [host.preload_s for host in found[True]])
    yield measurement(f"{role}: connect without it", "s", [host.starts_s for host in found[False]])


async def watch_control(way: str, seconds: float, domain: int = DOMAIN) -> ControlGaps:
    """Run one robot, measured without and with training, beside the controller of its run.

    Raises:
        RuntimeError: the robot has failed; its own text is on stderr. TimeoutError: it has not ended.
    """
    job = f"control-{os.getpid()}-{next(_runs)}"
    controller = asyncio.create_task(control_run(job, 1, _ROUNDS, domain=domain), name="controller")
    try:
        async with asyncio.timeout(_HOST_S + STARTS_S + 3 * seconds):
            words = ["control_host", way, "--job", job, "--domain", str(domain), "--seconds", str(seconds)]
            return ControlGaps(**await _run(words))
    finally:
        controller.cancel()
        await asyncio.wait([controller])


async def _run(words: list[str]) -> dict[str, Any]:
    """Run a module of this folder in a fresh process, and return the JSON that it prints. Raises RuntimeError."""
    program = [sys.executable, "-m", f"gradbus.experiments.bench.{words[0]}", *words[1:]]
    host = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE, preexec_fn=die_with_parent())
    try:
        printed, _ = await host.communicate()
    finally:
        if host.returncode is None:
            host.kill()
    if host.returncode:
        raise RuntimeError(f"{' '.join(words[:2])} ended with {host.returncode}: see above")
    found: dict[str, Any] = json.loads(printed)
    return found


def measure_control(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Robots with each way to train beside a control loop, by turns."""
    found: dict[str, list[ControlGaps]] = {way: [] for way in chosen.way or WAYS}
    for way in in_turns(found, chosen.robots):
        found[way].append(asyncio.run(watch_control(way, chosen.seconds)))
    for way, gaps in found.items():
        title = WAYS[way]
        (idle, idle_most), (training, most) = (
            ([1e3 * one[0] for one in column], max(1e3 * one[1] for one in column))
            for column in ([gap.idle_s for gap in gaps], [gap.training_s for gap in gaps])
        )
        rounds = sum(gap.rounds for gap in gaps) / (len(gaps) * chosen.seconds)
        yield measurement(
            f"{title}: p99 of how late a tick is",
            "ms",
            training,
            against=("without training", idle),
            at_most=TIMES_LATER if way == RECOMMENDED else None,
            note=f"most {most:.1f}, without training {idle_most:.1f} ms; {rounds:.1f} rounds/s",
        )
        yield measurement(
            f"{title}: the same while it starts",
            "ms",
            [1e3 * gap.starting_s[0] for gap in gaps],
            note=f"most {max(1e3 * gap.starting_s[1] for gap in gaps):.1f} ms",
        )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=20, help="with preload() [%(default)s]")
    parser.add_argument("--robots", type=int, default=5, help="with a control loop, of each kind [%(default)s]")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="to train beside a control loop; all")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a control loop [%(default)s]")


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        **{
            role: Part(partial(measure_role, role), f"The loop of a host: {role}, from a cold start to the end", 600)
            for role in _PEERS
        },
        "control": Part(measure_control, "A control loop of 10 ms beside training", 900),
    },
    _options,
)
