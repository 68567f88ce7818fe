"""The processes of an elastic run for benchmarks, which others kill, stop and cut off, and the journals they write."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

import gradbus
from gradbus import models
from gradbus.actors.data_parallel.callbacks import StepReport
from gradbus.commands.lab.namespaces import Host, enter_host
from gradbus.experiments.bench.processes import DOMAIN, context, end_with_benchmark
from gradbus.runtime import logs
from gradbus.runtime.json_text import parse_json
from gradbus.runtime.security import Level, Security
from gradbus.runtime.testing.journal import History

Event = dict[str, Any]
_POLL_S = 0.002
_END_S = 10.0
_runs = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticSeat:
    """Holds what a process is to do.

    Attributes:
        job: of the run. directory: for journals and logs.
        config: of DataParallelConfig, nested. model: its maker. samples: of glyphs, of which a step takes
            ``batch_size`` a rank.
        number, founders: see ElasticPlace. hosts: namespaces, one for each number; empty: all on this machine.
        lease_s, shared_memory, loss_per_mille: of the bus. until_s: time.monotonic of the run's end, which its ranks
            agree on. compute_s: that each batch takes besides, with the processor free.
        gloo: no run of gradbus, but a fixed group of torch over gloo, which sums as many numbers as the model has in
            each step, without an end.
    """

    job: str
    directory: Path
    config: dict[str, Any]
    model: Callable[..., torch.nn.Module] = models.mnist_mlp
    samples: int = 4096
    batch_size: int = 16
    number: int = 0
    founders: int = 0
    hosts: tuple[Host, ...] = ()
    lease_s: float | None = None
    shared_memory: bool = True
    loss_per_mille: int = 0
    compute_s: float = 0.0
    until_s: float = math.inf
    gloo: bool = False

    @property
    def network(self) -> gradbus.NetworkConfig:
        """Return the network that its bus is on."""
        network = gradbus.NetworkConfig(
            lease_s=self.lease_s, shared_memory=self.shared_memory, loss_per_mille=self.loss_per_mille
        )
        if not self.hosts:
            return network
        peers = tuple(host.address for host in self.hosts)
        return replace(network, profile="network", interface=self.hosts[self.number].interface, peers=peers)


class _Steps:
    """A callback: notes each step, and has the run end when its time is over."""

    def __init__(self, journal: History, until_s: float) -> None:
        self._journal = journal
        self._until_s = until_s

    def on_step(self, report: StepReport) -> bool:
        self._journal.note("step", step=report.step, world=report.world)
        return time.monotonic() >= self._until_s


class _Task(models.ClassificationTask):
    """Glyphs; each batch takes its time, and is noted before."""

    def __init__(self, seat: ElasticSeat, journal: History) -> None:
        super().__init__(seat.model, lambda: models.glyphs(train=seat.samples, test=50), batch_size=seat.batch_size)
        self._journal = journal
        self._compute_s = seat.compute_s
        self.worker: gradbus.ElasticWorker

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        self._journal.note("begins", step=self.worker.step + 1)
        if self._compute_s:
            time.sleep(self._compute_s)
        return super().loss(model, batch)


async def _train(seat: ElasticSeat) -> None:
    journal = History(seat.directory, f"rank-{seat.number}")  # of which the worker writes, too: whole lines
    config = gradbus.DataParallelConfig(**seat.config).replaced("history.dir", seat.directory)
    security: Level | Security = Security(insecure=True) if seat.hosts else "user"
    async with gradbus.connect(seat.job, domain=DOMAIN, network=seat.network, security=security) as bus:
        task = _Task(seat, journal)
        place = gradbus.ElasticPlace(bus=bus, number=seat.number, founders=seat.founders)
        task.worker = gradbus.ElasticWorker(place, task, config, callbacks=[_Steps(journal, seat.until_s)])
        summary = await task.worker.run()
    journal.note("done", step=summary.steps, hash=f"{summary.params_hash:016x}")


def _sum_over_gloo(seat: ElasticSeat) -> None:
    journal = History(seat.directory, f"rank-{seat.number}")
    if seat.hosts:
        os.environ["GLOO_SOCKET_IFNAME"] = seat.hosts[seat.number].interface
    meets_at = (seat.directory / "store").absolute().as_uri()
    dist.init_process_group("gloo", init_method=meets_at, rank=seat.number, world_size=seat.founders)
    numbers = torch.zeros(sum(parameter.numel() for parameter in seat.model().parameters()))
    for step in itertools.count(1):
        time.sleep(seat.compute_s)
        try:
            dist.all_reduce(numbers)
        except RuntimeError as error:  # a connection is broken, or 30 minutes are over
            journal.note("lost", step=step, error=str(error))
            raise
        journal.note("step", step=step, world=seat.founders)


def _live(seat: ElasticSeat) -> None:
    """The whole life of a process."""
    end_with_benchmark()
    log = os.open(seat.directory / f"log-{seat.number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if seat.hosts:
        enter_host(seat.hosts[seat.number])
    logs.configure(level="info")
    torch.set_num_threads(1)
    code = 1
    try:
        if seat.gloo:
            _sum_over_gloo(seat)
        else:
            asyncio.run(_train(seat))
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


@dataclass(slots=True)
class ElasticProcess:
    """One process, over all its starts.

    Attributes:
        events: of its journal so far. started_s: time.monotonic of its newest start.
    """

    number: int
    path: Path
    process: BaseProcess | None = None
    started_s: float = 0.0
    events: list[Event] = field(default_factory=list)
    _offset: int = 0

    def poll(self) -> None:
        """Read what has been written since."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                with contextlib.suppress(ValueError):  # of a process that was killed
                    self.events.append(parse_json(line.decode()))

    def since(self, at_s: float, name: str) -> list[Event]:
        """Events of this name after that time."""
        found = []
        for event in reversed(self.events):
            if event["at_s"] < at_s:
                break
            if event["event"] == name:
                found.append(event)
        return found[::-1]

    @property
    def pid(self) -> int:
        """Return the number of the process that trains; 0: there is none."""
        alive = self.process is not None and self.process.is_alive()
        return (self.process.pid or 0) if alive and self.process is not None else 0


class RunStuck(RuntimeError):
    """Says that what was waited for has not come."""


class ElasticProcesses:
    """A run of processes that do not outlive the ``with`` block."""

    def __init__(self, seat: ElasticSeat, world: int) -> None:
        """``seat``: of all, but for number and founders."""
        seat.directory.mkdir(parents=True, exist_ok=True)
        self.seat = seat
        self.processes = [ElasticProcess(number, seat.directory / f"rank-{number}.jsonl") for number in range(world)]

    def __enter__(self) -> Self:
        for process in self.processes:
            self.start(process.number, founders=len(self.processes))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self.processes:
            self.signal(process.number, signal.SIGKILL)
            if process.process is not None:
                process.process.join(1.0)
                if process.process.is_alive():
                    process.process.kill()
                process.process.join(_END_S)

    def start(self, number: int, *, founders: int = 0, cold: bool = False) -> float:
        """Start a process; by default it joins.

        Args:
            cold: from an interpreter that has imported nothing; else forked from a process that has imported all.

        Returns:
            time.monotonic before that.
        """
        process = self.processes[number]
        seat = replace(self.seat, number=number, founders=founders)
        process.started_s = time.monotonic()
        made = multiprocessing.get_context("spawn") if cold else context
        process.process = made.Process(target=_live, args=(seat,), name=f"elastic-{number}")
        process.process.start()
        return process.started_s

    def signal(self, number: int, what: signal.Signals) -> float:
        """Send a signal. Returns time.monotonic before that."""
        at_s = time.monotonic()
        if pid := self.processes[number].pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)
        return at_s

    def wait(self, what: str, done: Callable[[], bool], timeout_s: float) -> None:
        """Raises RunStuck: ``done`` does not hold in time."""
        until_s = time.monotonic() + timeout_s
        while True:
            for process in self.processes:
                process.poll()
            if done():
                return
            if time.monotonic() > until_s:
                last = [process.events[-1]["event"] if process.events else "nothing" for process in self.processes]
                raise RunStuck(f"not within {timeout_s:g} s: {what}; last events {last}; logs in {self.seat.directory}")
            time.sleep(_POLL_S)

    def first(self, numbers: Sequence[int], since_s: float, name: str, timeout_s: float, **facts: Any) -> list[Event]:
        """The first event of this name after that time, with these facts, of each of the processes."""

        def found() -> list[Event | None]:
            return [
                next((e for e in self.processes[number].since(since_s, name) if facts.items() <= e.items()), None)
                for number in numbers
            ]

        self.wait(f"{name} {facts} of {list(numbers)}", lambda: None not in found(), timeout_s)
        return [event for event in found() if event is not None]


def new_job(what: str) -> str:
    """A name that no other run has."""
    return f"elastic-{what}-{os.getpid()}-{next(_runs)}"


# The storm

KINDS = ("kill", "stop", "partition", "slow")
_LASTS_S = {"kill": (0.1, 2.0), "stop": (1.0, 8.0), "partition": (2.0, 10.0), "slow": (5.0, 12.0)}
CALM_S = 20.0  # at the end, without a new fault


@dataclass(frozen=True, slots=True)
class Fault:
    """Holds what happens to whom, from when on and for how long, in seconds from the beginning."""

    at_s: float
    kind: str
    number: int
    lasts_s: float


def schedule(seed: int, *, minutes: float, per_hour: float, world: int) -> list[Fault]:
    """Faults of a storm, one at a time, equally many of each kind. They follow from the seed."""
    chance, found, kinds = random.Random(seed), list[Fault](), list[str]()
    every_s = 3600 / per_hour
    at_s = every_s * chance.uniform(0.3, 0.7)
    while at_s < 60 * minutes - CALM_S:
        if not kinds:
            kinds = list(KINDS)
            chance.shuffle(kinds)
        kind = kinds.pop()
        lasts_s = min(chance.uniform(*_LASTS_S[kind]), 0.5 * every_s)
        found.append(Fault(round(at_s, 2), kind, chance.randrange(world), round(lasts_s, 2)))
        at_s += every_s * chance.uniform(0.7, 1.3)
    return found


@dataclass(frozen=True, slots=True)
class StormScore:
    """Holds what the journals of a storm say.

    Attributes:
        committed: steps that are part of what the run has come to. attempted: pairs of generation and step that some
            rank has begun. useful: share of the time that the committed steps take without faults, by their median.
        participation: ranks of a step's generation over those there could be, averaged over time.
        differing: places in the run, generation and step, where hashes differ. compared: places. generations: begun.
    """

    committed: int
    attempted: int
    useful: float
    participation: float
    differing: tuple[str, ...]
    compared: int
    generations: int


def score(journals: Sequence[Sequence[Event]], world: int, began_s: float, ended_s: float) -> StormScore:
    """Judge the journals of all processes, of the time from the first to the last of these."""
    at: dict[tuple[int, int], tuple[float, int]] = {}  # generation, step: when it was first applied, and the ranks
    hashes: dict[tuple[int, int], dict[str, set[int]]] = {}
    begun: set[tuple[int, int]] = set()
    starts: dict[int, int] = {}  # generation: the step that it begins behind
    for number, event, generation in _placed(journals):
        place = generation, event.get("step", 0)
        match event["event"]:
            case "started":
                starts[generation] = place[1]
            case "begins":
                begun.add(place)
            case "step":
                at[place] = min(at.get(place, (math.inf, 0)), (event["at_s"], event["world"]))
            case "hash":
                hashes.setdefault(place, {}).setdefault(event["hash"], set()).add(number)
    order = sorted(starts)
    ends = {generation: starts[later] for generation, later in itertools.pairwise(order)}
    ran = sorted(
        (when, ranks)
        for (generation, step), (when, ranks) in at.items()
        if starts[generation] < step <= ends.get(generation, step) and began_s <= when <= ended_s
    )
    gaps = [(later - when, ranks) for (when, _), (later, ranks) in itertools.pairwise([(began_s, 0), *ran])]
    middle = sorted(gap for gap, _ in gaps)[len(gaps) // 2] if gaps else 0.0
    spent_s = sum(gap for gap, _ in gaps) or 1.0
    in_time = {place for place in begun if place not in at or began_s <= at[place][0] <= ended_s}
    return StormScore(
        committed=len(ran),
        attempted=len(in_time),
        useful=len(ran) * middle / max(ended_s - began_s, 1e-9),
        participation=sum(gap * ranks for gap, ranks in gaps) / spent_s / world,
        differing=tuple(f"generation {g}, step {s}: {found}" for (g, s), found in hashes.items() if len(found) > 1),
        compared=sum(len(set[int]().union(*found.values())) > 1 for found in hashes.values()),
        generations=len(order),
    )


def _placed(journals: Sequence[Sequence[Event]]) -> Iterator[tuple[int, Event, int]]:
    """Number of the process, event, and the generation that the process was in then."""
    for number, events in enumerate(journals):
        generation: dict[int, int] = {}  # by start
        for event in events:
            if event["event"] == "started":
                generation[event["pid"]] = event["generation"]
            if event["pid"] in generation:
                yield number, event, generation[event["pid"]]
