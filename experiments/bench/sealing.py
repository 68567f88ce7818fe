"""What encryption costs: alone, and in federated rounds and collectives with and without it, in the same processes.

``make bench PART=sealing`` compares with limits.

Each process has three buses, with ``none``, ``psk`` and ``identity``, and all do the same, block by block in turns: so
all that changes with time or with the start of a process affects all. An encrypted block is compared with the line
between the blocks with ``none`` before and after it; a row has the median of these ratios and their quartiles, of time
and of processor time of all processes together.

Real processes on this machine, so both sides of every transfer share its cores. With shared memory only the messages
that say where the data lies are encrypted. Without, all data is: on the bus of one machine, where it passes between
processes at the speed of memory; and between two hosts, network namespaces joined by a link of MTU 1500, where nothing
starts without a key. The link takes no time but that of the kernel.

``none`` puts a CRC-32 on what it sends, ``psk`` the tag of the cipher. Only the collectives of one machine go without:
nothing but its memory is between them. So they are compared twice on its bus: with ``none`` as it is elsewhere, which
has the limit, and with ``none`` as it is there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import gradbus
from gradbus.commands.lab.namespaces import Host, NoNamespaces, enter_namespace, two_hosts
from gradbus.experiments.bench.command import Benchmark, Part
from gradbus.experiments.bench.federation import note_rounds, take_part
from gradbus.experiments.bench.processes import LEASE_S, Processes
from gradbus.experiments.bench.results import Measurement, join_all, measurement
from gradbus.experiments.bench.timing import block
from gradbus.models import NoopTask
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.security import Security
from gradbus.runtime.security.encryption import PskKeys, SessionCipher
from gradbus.runtime.security.identity.allow_list import AllowList, Entry, write_allow_list
from gradbus.runtime.security.identity.key import new_node_key, public_text
from gradbus.runtime.security.job_key import new_job_key, write_secret_file

DOMAIN = 219
DIM = 1_199_882
ELEMENTS = 1 << 20  # 4 MiB of float32
LEVELS = ("none", "psk", "identity")
# Of the time with psk to that with none. The default, the key of the user, is psk on one machine.
MAX_RATIO, MAX_THROUGH_MEMORY = 1.10, 1.05
NODES = ("server", "host-1", "robot-0", "robot-1")
# Of each block. The first ones are not counted: another level's data is in the caches.
ROUNDS, WARM_ROUNDS = 6, 1
CALLS, WARM_CALLS = 12, 2
_SETTLE_S = 0.02  # clients still take in the model when the controller has sent it
_TIMEOUT_S = 120.0


class SealingCase(NamedTuple):
    """One measurement: the role of the process that measures, and of the others, on the other host if there are two.

    Attributes:
        blocks: of each level. memory: whether it is shared.
        checksums: whether collectives with ``none`` have them although all is on one machine. asked: whether the time
            with ``psk`` has a limit.
    """

    title: str
    measures: str
    others: tuple[str, ...]
    blocks: int
    memory: bool = False
    two_hosts: bool = False
    checksums: bool = False
    asked: bool = True


_ROUND, _REDUCE = "federated round, 2 clients, 4.8 MB", "all_reduce of 4 MiB, 2 ranks"
CASES = {
    "round": SealingCase(f"{_ROUND}, shared memory", "controller", ("client", "client"), 9, True),
    "round-bus": SealingCase(f"{_ROUND}, all on the bus", "controller", ("client", "client"), 9),
    "round-network": SealingCase(f"{_ROUND}, two hosts", "controller", ("client", "client"), 7, two_hosts=True),
    "all-reduce": SealingCase(f"{_REDUCE}, shared memory", "rank", ("rank",), 41, True),
    "all-reduce-bus": SealingCase(f"{_REDUCE}, all on the bus", "rank", ("rank",), 41, checksums=True),
    "all-reduce-bare": SealingCase(
        f"{_REDUCE}, all on the bus, none without checksums", "rank", ("rank",), 41, asked=False
    ),
    "all-reduce-network": SealingCase(f"{_REDUCE}, two hosts", "rank", ("rank",), 13, two_hosts=True),
}


class TimedBlock(NamedTuple):
    """Some rounds or calls in a row: the median of their times, and what all processes used for one of them."""

    level: str
    seconds: float
    cpu_s: float


def _make_keys(folder: Path) -> None:
    """Make the key of a job, keys of nodes, and the list of those that may take part."""
    write_secret_file(folder / "job.key", new_job_key().text)
    keys = {name: new_node_key(name) for name in NODES}
    for name, key in keys.items():
        write_secret_file(folder / f"{name}.key", key.text)
    (folder / "controller.public").write_text(public_text(keys["server"].public))
    ranks = Entry("host-1", "worker", keys["host-1"].public, ((1, 1),))
    robots = [Entry(f"robot-{n}", "client", keys[f"robot-{n}"].public, ((n, n),)) for n in (0, 1)]
    write_allow_list(folder / "allow.list", AllowList((ranks, *robots)))


@dataclass(frozen=True, kw_only=True, slots=True)
class SealingProcess:
    """One process of a start.

    Attributes:
        role: controller, client or rank. number: of the client or rank.
        host: None on one machine; peers: the addresses of all hosts. pids: of the others, for the one that measures.
    """

    case: SealingCase
    role: str
    number: int
    folder: Path
    job: str
    host: Host | None = None
    peers: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()

    def connect(self, level: str) -> AbstractAsyncContextManager[Bus]:
        """A bus of this level."""
        network = gradbus.NetworkConfig(lease_s=LEASE_S, shared_memory=self.case.memory)
        if self.host is not None:
            network = replace(network, profile="network", interface=self.host.interface, peers=self.peers)
        security = self._security(level)
        return gradbus.connect(f"{self.job}-{level}", domain=DOMAIN, network=network, security=security)

    def _security(self, level: str) -> Security:
        if level == "none":
            return Security(level="none", insecure=self.host is not None)
        if level == "psk":
            return Security(level="psk", key_file=self.folder / "job.key")
        is_rank = self.role == "rank"
        name = f"robot-{self.number}" if self.role == "client" else "host-1" if is_rank and self.number else "server"
        return Security(
            level="identity",
            key_file=self.folder / f"{name}.key",
            allow_file=self.folder / "allow.list",
            controller_key=(self.folder / "controller.public").read_text(),
            role="worker" if is_rank else "client",
        )

    def cpu_s(self) -> float:
        """Processor seconds of the others and of this process so far, by the numbers that Linux gives their clocks."""
        return time.process_time() + sum(time.clock_gettime(~pid << 3 | 2) for pid in self.pids)


async def _client(member: SealingProcess) -> None:
    async with asyncio.TaskGroup() as all_levels:
        for level in LEVELS:
            all_levels.create_task(take_part(member.connect(level), NoopTask(DIM), member.number), name=level)


class _Turns:
    """Lets the threads of one level after the other go on, each for a block, when all have had their first at once."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._changed = threading.Condition()
        self._ended = 0  # blocks, of all levels

    def end(self, level: str) -> None:
        """A block has ended: wait for the next one. Nobody waits after the last."""
        place, count = LEVELS.index(level), len(LEVELS)
        with self._changed:
            self._ended += 1
            self._changed.notify_all()
            if self._ended > count * (self._blocks - 1):
                return
            if not self._changed.wait_for(
                lambda: self._ended >= count and self._ended % count == place, timeout=_TIMEOUT_S
            ):
                raise TimeoutError(f"another controller did not end its block within {_TIMEOUT_S:g} s")


class _BlockTask(NoopTask):
    """Is evaluated at the end of each block, and so holds up the next round until it is its turn."""

    def __init__(self, level: str, turns: _Turns, member: SealingProcess) -> None:
        super().__init__(DIM)
        self._level = level
        self._turns = turns
        self._member = member
        self._began_cpu_s = 0.0
        self.cpu_s: list[float] = []

    def evaluate(self, model: nn.Module) -> None:
        time.sleep(_SETTLE_S)
        self.cpu_s.append((self._member.cpu_s() - self._began_cpu_s) / ROUNDS)
        self._turns.end(self._level)
        self._began_cpu_s = self._member.cpu_s()


async def _controller(member: SealingProcess) -> list[TimedBlock]:
    turns = _Turns(member.case.blocks)
    blocks: dict[str, list[TimedBlock]] = {}

    async def run(level: str) -> None:
        rules = {"rounds": ROUNDS * member.case.blocks, "clients": {"num": 2}, "eval_every": ROUNDS}
        task = _BlockTask(level, turns, member)
        times = (await note_rounds(member.connect(level), task, rules, lambda report: report.seconds)).rounds
        starts = range(ROUNDS, len(times), ROUNDS)  # all had their first block at once
        seconds = [statistics.median(times[at + WARM_ROUNDS : at + ROUNDS]) for at in starts]
        blocks[level] = [TimedBlock(level, *one) for one in zip(seconds, task.cpu_s[1:], strict=True)]

    async with asyncio.TaskGroup() as all_levels:
        for level in LEVELS:
            all_levels.create_task(run(level), name=level)
    return [one for turn in zip(*(blocks[level] for level in LEVELS), strict=True) for one in turn]


async def _rank(member: SealingProcess) -> list[TimedBlock]:
    tensor = torch.ones(ELEMENTS)
    blocks = []
    async with contextlib.AsyncExitStack() as opened:
        groups = []
        for level in LEVELS:
            bus = await opened.enter_async_context(member.connect(level))
            if member.case.checksums:
                # For its frames, that is what decides.
                bus._transport.traits = replace(bus._transport.traits, leaves_machine=True)  # noqa: SLF001 - no setting asks for checksums on one machine
            joining = gradbus.join_group(bus, rank=member.number, world=2)
            groups.append(await opened.enter_async_context(joining))
            (port,) = bus._ports  # noqa: SLF001 - a group does not say whether its frames have checksums
            assert port.needs_crc == (level == "none" and (member.case.checksums or member.host is not None))
        for number in range(len(LEVELS) * member.case.blocks):
            group, times = groups[number % len(LEVELS)], []
            await group.barrier()
            began_cpu_s = member.cpu_s()
            for step in range(CALLS):
                await group.barrier()
                began_s = time.perf_counter()
                await group.all_reduce("x", tensor, op="mean", out=tensor, round_id=number * CALLS + step)
                times.append(time.perf_counter() - began_s)
            cpu_s = (member.cpu_s() - began_cpu_s) / CALLS
            blocks.append(TimedBlock(LEVELS[number % len(LEVELS)], statistics.median(times[WARM_CALLS:]), cpu_s))
    return blocks


async def _live(member: SealingProcess) -> Any:
    """The whole life of a process."""
    if member.host is not None:
        enter_namespace(member.host.name)  # before any thread of DDS
    return await _ROLES[member.role](member)


_ROLES: dict[str, Callable[[SealingProcess], Awaitable[Any]]] = {
    "controller": _controller,
    "client": _client,
    "rank": _rank,
}


def measured_blocks(case: SealingCase, folder: Path) -> list[TimedBlock]:
    """Start the processes once, and measure. Raises NoNamespaces."""
    job = f"sealing-{os.getpid()}-{time.time_ns()}"
    with contextlib.ExitStack() as opened:
        hosts = opened.enter_context(two_hosts()) if case.two_hosts else ()
        here, there = hosts or (None, None)
        member = partial(SealingProcess, case=case, folder=folder, job=job, peers=tuple(host.address for host in hosts))
        processes = opened.enter_context(Processes())
        pids = tuple(
            processes.start(f"{role} {number}", _live, member(role=role, number=number, host=there))
            for number, role in enumerate(case.others, start=case.measures == "rank")
        )
        measures = member(role=case.measures, number=0, host=here, pids=pids)
        processes.start(f"{case.measures} that measures", _live, measures)
        blocks: list[TimedBlock] = processes.results(_TIMEOUT_S)[-1]
    return blocks


def figures(case: SealingCase, blocks: Sequence[TimedBlock]) -> Iterator[Measurement]:
    """Time and processor time of the encrypted levels.

    The reference of a block is the line between those with ``none`` before and after it. The last block of a level has
    none after it, and does not count.
    """
    turn = len(LEVELS)
    for what, label in (("seconds", ""), ("cpu_s", ", processor")):
        ms = [1e3 * getattr(block, what) for block in blocks]
        for place, level in enumerate(LEVELS[1:], start=1):
            before, after = ms[0:-turn:turn], ms[turn::turn]
            none = [a + place / turn * (b - a) for a, b in zip(before, after, strict=True)]
            asked = case.asked and level == "psk" and what == "seconds"
            limit = (MAX_THROUGH_MEMORY if case.memory else MAX_RATIO) if asked else None
            yield measurement(
                f"{case.title}: {level}{label}", "ms", ms[place:-turn:turn], against=("none", none), at_most=limit
            )


def measure(case: SealingCase, repeats: int) -> list[Measurement]:
    """Measure in so many starts of the processes; nothing where it needs namespaces, and there can be none."""
    found: dict[str, Measurement] = {}
    with tempfile.TemporaryDirectory() as folder:
        _make_keys(Path(folder))
        for _ in range(repeats):
            try:
                blocks = measured_blocks(case, Path(folder))
            except NoNamespaces as error:
                print(f"not measured: {case.title}: {error}", file=sys.stderr)
                return []
            join_all(found, figures(case, blocks))
    return list(found.values())


def measure_alone() -> Iterator[Measurement]:
    """Seconds of one thread to encrypt and to decrypt: the best of some tries, as the machine may be busy."""
    key = new_job_key()
    ours, theirs = (SessionCipher(PskKeys("bench", key)) for _ in range(2))
    encryptor, decryptor = ours.encryptor("bench"), theirs.decryptor("bench", ignores_own=True)
    for size in (1 << 10, 1 << 16, 1 << 20):
        data = os.urandom(size)
        seal_s, open_s = [], []
        for _ in range(300):
            envelope = encryptor.envelope((data,))
            octets = memoryview(bytearray(envelope.size))
            start = len(envelope.header)
            octets[:start] = envelope.header
            seal_s += block(lambda: envelope.seal_into(octets[start:]), 1)  # noqa: B023 - it is called at once
            open_s += block(lambda: decryptor.open(octets), 1)  # noqa: B023 - it is called at once
        yield measurement(f"encrypt {size >> 10} KiB", "us", [1e6 * min(seal_s)])
        yield measurement(f"decrypt {size >> 10} KiB", "us", [1e6 * min(open_s)])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, help="starts of the processes for each part")


def _part(case: SealingCase) -> Part:
    return Part(lambda chosen: measure(case, chosen.repeats), case.title, 20)


BENCHMARK = Benchmark(
    __doc__ or "",
    {"alone": Part(lambda _: measure_alone(), "one thread encrypts and decrypts", 2)}
    | {name: _part(case) for name, case in CASES.items()},
    _options,
)
