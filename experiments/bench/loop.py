"""How long gradbus holds the event loop of its host, from a cold start to the end of a run.

``make bench-loop``. Each host is a process that has just started, with a task on its loop that wants to run every
millisecond (loop_host.py). Its peer is in the process of the benchmark, which has loaded everything.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import gradbus
from gradbus.experiments.bench import loop_host
from gradbus.experiments.bench.command import Benchmark, Part
from gradbus.experiments.bench.loop_host import HostGaps
from gradbus.experiments.bench.processes import DOMAIN
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.runtime.forks import die_with_parent

LATE_MS = 50.0  # that a loop may be later than an idle one
_HOST_S = 120.0
_runs = itertools.count()

_PEERS: dict[str, Callable[[gradbus.Bus], Awaitable[None]]] = {  # by the role of the host
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
    command = [sys.executable, "-m", "gradbus.experiments.bench.loop_host", role, "--job", job, "--domain", str(domain)]
    async with asyncio.timeout(_HOST_S), gradbus.connect(job, domain=domain) as bus:
        peer = asyncio.create_task(_PEERS[role](bus), name=f"peer of the {role}")
        try:
            host = await asyncio.create_subprocess_exec(
                *command, *options, stdout=asyncio.subprocess.PIPE, preexec_fn=die_with_parent()
            )
            try:
                printed, _ = await host.communicate()
            finally:
                if host.returncode is None:
                    host.kill()
            if host.returncode:
                raise RuntimeError(f"the host with a {role} ended with {host.returncode}: see above")
            await peer
        finally:
            peer.cancel()
            await asyncio.wait([peer])
    return HostGaps(**json.loads(printed))


def measure_role(role: str, chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Hosts of one role, with gradbus.preload and without it, by turns."""
    found: dict[bool, list[HostGaps]] = {True: [], False: []}
    for number in range(chosen.processes):
        for preloads in (True, False) if number % 2 else (False, True):
            found[preloads].append(asyncio.run(watch(role, *(["--preload"] if preloads else []))))
    for preloads, title in ((True, "after preload()"), (False, "without preload()")):
        hosts = found[preloads]
        late_ms, idle_ms = ([1e3 * one for one in column] for column in zip(
            *((host.loop_s, host.idle_s) for host in hosts), strict=True
        ))  # fmt: skip
        yield measurement(f"{role}, {title}: longest delay of a process", "ms", late_ms)
        yield measurement(f"{role}, {title}: the same of the idle loop", "ms", idle_ms)
        yield measurement(
            f"{role}, {title}: p100 over that of the idle loop", "ms", [max(0.0, max(late_ms) - max(idle_ms))],
            at_most=LATE_MS if preloads else None,
            note=f"{max(late_ms):.0f} and {max(idle_ms):.0f} ms, {len(hosts)} processes",
        )  # fmt: skip
    yield measurement(f"{role}: preload() itself", "s", [host.preload_s for host in found[True]])
    yield measurement(f"{role}: connect without it", "s", [host.starts_s for host in found[False]])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=20, help="of each kind [%(default)s]")


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        role: Part(partial(measure_role, role), f"The loop of a host: {role}, from a cold start to the end", 600)
        for role in _PEERS
    },
    _options,
)
