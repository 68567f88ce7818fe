"""Processes that are stopped, starved or killed: is a live one taken for dead, and how soon is a death known?

    make bench PART=pauses                              # some minutes: everything once
    make bench PART=pauses ARGS="--part pauses --runs 100"  # until there are so many runs

Groups of 2 and 4 ranks, through shared memory and over DDS alone, call one collective after another. A *run* is one
group and one disturbance; all groups are disturbed at once. In a run no process dies, so none may be taken for dead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import random
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import gradbus
from gradbus.experiments.bench.command import Benchmark, Part, parse, run
from gradbus.experiments.bench.processes import context
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.runtime import logs
from gradbus.runtime.collectives import Group, join_group
from gradbus.runtime.errors import GradbusError
from gradbus.runtime.security import Security
from gradbus.runtime.transport.dds.network import discovery_ports
from gradbus.runtime.transport.dds.participant import Participant
from gradbus.runtime.transport.dds.spdp import goodbye
from gradbus.runtime.wire.messages import Control

START_S = 60.0  # for a group to form
STEP_S = 0.02  # between two collectives: several groups share two cores
RECOVER_S = 15.0  # for the next collective after a pause
COLLECTIVE_S = 120.0


@dataclass(frozen=True, slots=True)
class GroupKind:
    """How a group is made. ``key``: of the job, which is encrypted with it; "" for none."""

    world: int
    shared_memory: bool
    key: str = ""

    def __str__(self) -> str:
        sealed = ", psk" if self.key else ""
        return f"{self.world} ranks, {'shared memory' if self.shared_memory else 'DDS only'}{sealed}"


KINDS = tuple(GroupKind(world, share) for world in (2, 4) for share in (True, False))


# In the processes


@dataclass(frozen=True, slots=True)
class Seat:
    """The part of one rank process in a group."""

    kind: GroupKind
    job: str
    domain: int
    rank: int
    step_s: float


def _live(work: Callable[..., Any], *arguments: Any) -> None:
    """The whole life of a process that has a bus."""
    logs.configure(level="error")
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(work(*arguments))


async def _rank(seat: Seat, pipe: Connection) -> None:
    """Join, call collectives until killed, and report each on the pipe: an event, when, and a fact about it."""
    kind = seat.kind
    if kind.key:
        os.environ["GRADBUS_KEY"] = kind.key
    security = Security(level="psk") if kind.key else Security(insecure=True)
    network = gradbus.NetworkConfig(shared_memory=kind.shared_memory)
    orders: list[float] = []
    threading.Thread(target=_receive_orders, args=(pipe, orders), daemon=True).start()
    started_s = time.monotonic()
    try:
        async with (
            gradbus.connect(seat.job, domain=seat.domain, network=network, security=security) as bus,
            join_group(
                bus,
                rank=seat.rank,
                world=kind.world,
                timeout_s=START_S,
                collective_timeout_s=COLLECTIVE_S,
                stall_warning_s=0.0,
            ) as group,
        ):
            pipe.send(("formed", time.monotonic(), time.monotonic() - started_s))
            try:
                await _call_collectives(group, seat, pipe, orders)
            except GradbusError as error:  # before it leaves the group, which takes its time
                pipe.send(("failed", time.monotonic(), f"{type(error).__name__}: {error}"))
    except GradbusError as error:
        pipe.send(("failed", time.monotonic(), f"{type(error).__name__}: {error}"))


async def _call_collectives(group: Group, seat: Seat, pipe: Connection, orders: list[float]) -> None:
    small, large = torch.ones(256), torch.ones(64 << 10)
    steps = 0
    while True:
        if orders:  # a call of a C function that keeps the GIL for so many seconds
            ctypes.PyDLL(None).usleep(int(orders.pop(0) * 1e6))
        out = await group.all_reduce("x", large if steps % 8 == 0 else small, round_id=steps)
        assert float(out[0]) == group.world
        steps += 1
        pipe.send(("step", time.monotonic(), steps))
        await asyncio.sleep(seat.step_s)


def _receive_orders(pipe: Connection, orders: list[float]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            orders.append(pipe.recv())


async def _idle_bus(domain: int, lease_s: float | None, pipe: Connection) -> None:
    async with gradbus.connect("idle", domain=domain, lease_s=lease_s, security=Security(insecure=True)) as bus:
        bus.subscribe(Control)
        bus.open_writer(Control)
        pipe.send("open")
        await asyncio.sleep(600)


def _burn(for_s: float, nice: int) -> None:
    os.nice(nice)
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        sum(range(10_000))


def _start(work: Callable[..., Any], *arguments: Any) -> tuple[Any, Connection]:
    """A process with a bus, and this end of the pipe to it."""
    near, far = context.Pipe()
    process = context.Process(target=_live, args=(work, *arguments, far), daemon=True)
    process.start()
    far.close()
    return process, near


def _signal(processes: Sequence[Any], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has crashed
            os.kill(process.pid, number)


# Groups as seen from outside


@dataclass(slots=True, eq=False)
class RankProcess:
    """One rank.

    Attributes:
        formed_s: how long its group took to form; -1: it has not. stepped_s: time.monotonic of the last collective.
        failed: its error; failed_s: time.monotonic of that.
    """

    process: Any
    pipe: Connection
    formed_s: float = -1.0
    stepped_s: float = 0.0
    steps: int = 0
    failed: str = ""
    failed_s: float = 0.0

    def poll(self) -> None:
        """Take the reports that have arrived."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                match self.pipe.recv():
                    case ("formed", _, seconds):
                        self.formed_s = seconds
                    case ("step", at_s, count):
                        self.stepped_s, self.steps = at_s, count
                    case ("failed", at_s, why):
                        self.failed, self.failed_s = why, at_s


@dataclass(slots=True, eq=False)
class GroupRun:
    """A group of rank processes."""

    kind: GroupKind
    domain: int
    step_s: float = STEP_S
    ranks: list[RankProcess] = field(default_factory=list)

    def start(self) -> None:
        """Start all ranks."""
        job = f"pauses-{os.getpid()}-{random.getrandbits(40):x}"
        for rank in range(self.kind.world):
            seat = Seat(self.kind, job, self.domain, rank, self.step_s)
            self.ranks.append(RankProcess(*_start(_rank, seat)))

    def wait(self, done: Callable[[RankProcess], bool], timeout_s: float, *, whatever: bool = False) -> bool:
        """Wait until ``done`` holds for all ranks, and no longer than until one fails, unless ``whatever``. Returns
        whether it did in time."""
        until_s = time.monotonic() + timeout_s
        while True:
            trouble = self.trouble
            if all(done(rank) for rank in self.ranks):
                return True
            if time.monotonic() > until_s or (trouble and not whatever):
                return False
            time.sleep(0.002)

    @property
    def trouble(self) -> str:
        """A description of what went wrong so far; empty if nothing did."""
        for rank in self.ranks:
            rank.poll()
        failed = [f"rank {number}: {rank.failed}" for number, rank in enumerate(self.ranks) if rank.failed]
        crashed = [
            f"rank {number}: exit code {rank.process.exitcode}"
            for number, rank in enumerate(self.ranks)
            if rank.process.exitcode not in (None, 0)
        ]
        return "; ".join(failed + crashed)

    def end(self) -> None:
        """Kill all ranks that are left."""
        for rank in self.ranks:
            if rank.process.exitcode is None:
                rank.process.kill()
        for rank in self.ranks:
            rank.process.join(10.0)
            rank.pipe.close()
        self.ranks.clear()


@contextlib.contextmanager
def groups(kinds: Sequence[GroupKind], domain: int) -> Iterator[list[GroupRun]]:
    """Groups that have formed."""
    made = [GroupRun(kind, domain) for kind in kinds]
    try:
        for group in made:
            group.start()
        for group in made:
            if not group.wait(lambda rank: rank.steps > 0, START_S + 30.0):
                raise SystemExit(f"no group: {group.kind}: {group.trouble or 'it did not form in time'}")
        yield made
    finally:
        for group in made:
            group.end()


# Disturbances


Disturbance = Callable[[Sequence[GroupRun]], None]


def stop_one(for_s: float) -> Disturbance:
    """Stop the last rank of each group."""
    return lambda made: _stop([group.ranks[-1].process for group in made], for_s)


def stop_all(for_s: float) -> Disturbance:
    """Stop all ranks at once, as when the machine stands still."""
    return lambda made: _stop([rank.process for group in made for rank in group.ranks], for_s)


def _stop(processes: Sequence[Any], for_s: float) -> None:
    _signal(processes, signal.SIGSTOP)
    time.sleep(for_s)
    _signal(processes, signal.SIGCONT)


def hold_gil(for_s: float) -> Disturbance:
    """Have the last rank of each group spend so long in one C call that keeps the GIL."""

    def disturb(made: Sequence[GroupRun]) -> None:
        for group in made:
            group.ranks[-1].pipe.send(for_s)
        time.sleep(for_s)

    return disturb


def starve_one(for_s: float, busy: int = 8, burner_nice: int = 0) -> Disturbance:
    """Let the last rank of each group run at the lowest priority beside ``busy`` other processes of a higher one."""

    def disturb(made: Sequence[GroupRun]) -> None:
        starved = [group.ranks[-1].process.pid for group in made]
        for process in starved:
            _renice(process, 19)
        burners = [context.Process(target=_burn, args=(for_s + 30.0, burner_nice), daemon=True) for _ in range(busy)]
        for burner in burners:
            burner.start()
        time.sleep(for_s)
        for burner in burners:
            burner.kill()
            burner.join(10.0)
        with contextlib.suppress(PermissionError):
            for process in starved:
                _renice(process, 0)

    return disturb


def _renice(process: int, nice: int) -> None:
    for thread in os.listdir(f"/proc/{process}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), nice)


def forge_goodbyes(times: int, every_s: float) -> Disturbance:
    """Send all ranks, in the name of each of them, that it leaves: 84 bytes that anybody on the machine can send."""

    def disturb(made: Sequence[GroupRun]) -> None:
        domain = made[0].domain
        prefixes = _prefixes(domain, {rank.process.pid for group in made for rank in group.ranks})
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(times):
                for prefix in prefixes:
                    for port in discovery_ports(domain):
                        sender.sendto(goodbye(prefix), ("127.0.0.1", port))
                time.sleep(every_s)

    return disturb


def _prefixes(domain: int, processes: Collection[int]) -> list[bytes]:
    """The GUID prefixes of the participants of these processes."""
    node = Participant(domain_id=domain, partition="outsider", network=gradbus.NetworkConfig())
    try:
        until_s = time.monotonic() + START_S
        while True:
            node.look_around()
            found = [prefix for prefix, claim in node.others.items() if int(claim.split()[1]) in processes]
            if len(found) >= len(processes):
                return found
            if time.monotonic() > until_s:
                raise SystemExit(f"of {len(processes)} participants {len(found)} were found")
            time.sleep(0.1)
    finally:
        node.close()


DISTURBANCES: dict[str, Disturbance] = {
    "one rank stopped for 1.2 s": stop_one(1.2),
    "one rank stopped for 5 s": stop_one(5.0),
    "one rank stopped for 20 s": stop_one(20.0),
    "all ranks stopped for 3 s": stop_all(3.0),
    "all ranks stopped for 10 s": stop_all(10.0),
    "12 s in one C call with the GIL": hold_gil(12.0),
    "forged goodbyes of all ranks, 3 times": forge_goodbyes(3, 2.0),
    "nice 19 beside 8 busy processes for 60 s": starve_one(60.0),
}


def survive(made: Sequence[GroupRun], disturb: Disturbance, recover_s: float = RECOVER_S) -> dict[GroupRun, str]:
    """Disturb all groups. Returns what went wrong in each; empty: it goes on."""
    disturb(made)
    done_s = time.monotonic()
    found: dict[GroupRun, str] = {}
    for group in made:
        goes_on = group.wait(lambda rank: rank.stepped_s > done_s, max(0.1, done_s + recover_s - time.monotonic()))
        found[group] = group.trouble or ("" if goes_on else f"no collective within {recover_s:g} s")
    return found


# What is measured


def measure_pauses(runs: int, domain: int, seconds_s: float) -> Iterator[Measurement]:
    """All disturbances, again and again until there are so many runs or the time is over."""
    deaths: dict[str, list[float]] = {name: [] for name in DISTURBANCES}
    until_s = time.monotonic() + seconds_s
    while (total := sum(map(len, deaths.values()))) < runs and (not total or time.monotonic() < until_s):
        with groups(KINDS, domain) as made:
            for name, disturb in DISTURBANCES.items():
                found = survive(made, disturb)
                deaths[name] += [bool(trouble) for trouble in found.values()]
                for group, trouble in found.items():
                    if trouble:
                        print(f"  {group.kind}, {name}: {trouble}", file=sys.stderr, flush=True)
                if any(found.values()):
                    break  # a group is gone: all anew
    for name, of_name in deaths.items():
        if of_name:
            yield measurement(name, "deaths", [sum(of_name)], at_most=0, note=f"{len(of_name)} runs")


def measure_kills(times: int, domain: int) -> Iterator[Measurement]:
    """kill -9 of one rank: how long until all others have failed with PeerLost."""
    encrypted = GroupKind(4, True, "gradbus-key-1 " + "6b" * 32)
    for kind in (GroupKind(2, True), GroupKind(4, True), GroupKind(4, False), encrypted):
        taken_s: list[float] = []
        for _ in range(times):
            with groups([kind], domain) as (group,):
                killed_s = time.monotonic()
                group.ranks.pop().process.kill()
                group.wait(lambda rank: bool(rank.failed), 30.0, whatever=True)
                wrong = [rank.failed for rank in group.ranks if not rank.failed.startswith("PeerLost")]
                if wrong:
                    raise RuntimeError(f"{kind}: {wrong}")
                taken_s += [rank.failed_s - killed_s for rank in group.ranks]
        name = f"kill -9, {kind}: PeerLost on all others"
        yield measurement(f"{name}, worst", "s", [max(taken_s)], at_most=0.3)
        yield measurement(name, "s", taken_s)


def measure_crowds(times: int, world: int, domain: int) -> Iterator[Measurement]:
    """How long many processes on few cores take to form one group, from the start of the first process."""
    taken_s = []
    for _ in range(times):
        group = GroupRun(GroupKind(world, True), domain, step_s=0.5)
        try:
            began_s = time.monotonic()
            group.start()
            formed = group.wait(lambda rank: rank.formed_s >= 0, START_S + 30.0)
            taken_s.append(time.monotonic() - began_s)
            if group.trouble or not formed:
                raise RuntimeError(f"{world} processes formed no group: {group.trouble or 'not in time'}")
        finally:
            group.end()
    yield measurement(f"{world} processes form a group", "s", taken_s, at_most=START_S)


@contextlib.contextmanager
def idle_buses(count: int, domain: int, lease_s: float | None = None) -> Iterator[list[Any]]:
    """Processes of buses without traffic, one each, when all are open."""
    started: list[tuple[Any, Connection]] = []
    try:
        started.extend(_start(_idle_bus, domain, lease_s) for _ in range(count))
        for _, pipe in started:
            with contextlib.suppress(EOFError):  # it has crashed, which its exit code shows
                pipe.recv()
        yield [process for process, _ in started]
    finally:
        for process, pipe in started:
            process.kill()
            process.join(10.0)
            pipe.close()


def measure_idle(buses: int, domain: int, for_s: float = 10.0) -> Iterator[Measurement]:
    """The processor time of buses without traffic, in percent of a core."""
    with idle_buses(buses, domain) as processes:
        time.sleep(10.0)  # until all have found each other, and have announced themselves for the last time
        before = [_used_s(process) for process in processes]
        time.sleep(for_s)
        shares = [100 * (_used_s(p) - b) / for_s for p, b in zip(processes, before, strict=True)]
    yield measurement(f"{buses} idle buses, of a core each", "%", [statistics.mean(shares)], at_most=0.3)


def _used_s(process: Any) -> float:
    """Processor time that all threads of a process have used, to the nanosecond."""
    tasks = Path(f"/proc/{process.pid}/task")
    return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks.iterdir()) / 1e9


def crashes(stops: int, domain: int, lease_s: float | None, buses: int = 32, for_s: float = 1.5) -> int:
    """Stop all processes, again and again, while they discover each other: how many crash?

    Cyclone DDS 11.0.1 registers the lease of a discovered participant before it notes the address. When that lease
    ends in between, as in a process that was stopped just then for longer, it looks for an address that is not
    there (``ddsi_spdp_unref_locator``): SIGSEGV. That is seen with ``lease_s`` below ``for_s``; by default it is not.
    """
    done, crashed = 0, 0
    while done < stops:
        with idle_buses(buses, domain, lease_s) as processes:
            while done < stops and all(process.exitcode is None for process in processes):
                time.sleep(random.uniform(0.0, 0.3))  # they discover each other again, all at once
                _stop(processes, for_s)
                done += buses
            crashed += sum(process.exitcode not in (None, 0) for process in processes)
    return crashed


def measure_crashes(stops: int, domain: int, lease_s: float | None) -> Iterator[Measurement]:
    """Processes that crash when they are stopped while they discover each other."""
    lease = "the lease of the profile" if lease_s is None else f"a lease of {lease_s:g} s"
    found = crashes(stops, domain, lease_s)
    yield measurement(f"{stops} stops of 1.5 s with {lease}", "crashes", [found], at_most=0)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=28, help="of pauses [%(default)s]")
    parser.add_argument("--within", type=float, default=900.0, help="seconds that pauses may begin in [%(default)s]")
    parser.add_argument("--kills", type=int, default=3, help="of each kind of group [%(default)s]")
    parser.add_argument("--crowds", type=int, default=1, help="[%(default)s]")
    parser.add_argument("--world", type=int, default=48, help="of a crowd [%(default)s]")
    parser.add_argument("--stops", type=int, default=512, help="for a crash [%(default)s]")
    parser.add_argument("--lease", type=float, help="of those that are stopped: 1 shows a fault of Cyclone DDS 11.0.1")
    parser.add_argument("--domain", type=int, default=91, help="of DDS [%(default)s]")


_PARTS = {
    "kill": Part(lambda it: measure_kills(it.kills, it.domain), "a rank is killed", 60),
    "idle": Part(lambda it: measure_idle(12, it.domain), "buses without traffic", 25),
    "crash": Part(lambda it: measure_crashes(it.stops, it.domain, it.lease), "stopped during discovery", 60),
    "crowd": Part(lambda it: measure_crowds(it.crowds, it.world, it.domain), "many processes form a group", 45),
    "pauses": Part(lambda it: measure_pauses(it.runs, it.domain, it.within), "stopped and starved ranks", 300),
}
BENCHMARK = Benchmark(__doc__ or "", _PARTS, _options)


if __name__ == "__main__":
    chosen, words = parse("pauses", BENCHMARK, sys.argv[1:])
    raise SystemExit(run(BENCHMARK, chosen, words)[0])
