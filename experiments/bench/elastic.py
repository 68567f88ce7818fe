"""Elastic runs under faults: how soon a death is known, training goes on and a rank is back; storms; what it costs.

``make bench PART=elastic``. Real processes, over shared memory and DDS on one machine, or each on a host of its own
(network namespaces with process numbers of their own, joined by a switch) where machines are cut off. Every process
writes a journal, from which all figures follow.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradbus
from gradbus import models
from gradbus.commands.lab.conditions import LinkConditions
from gradbus.commands.lab.namespaces import Host, hosts_on_a_switch, set_link
from gradbus.experiments.bench.command import Benchmark, Part
from gradbus.experiments.bench.elastic_processes import (
    KINDS,
    ElasticProcesses,
    ElasticSeat,
    Fault,
    RunStuck,
    new_job,
    schedule,
    score,
)
from gradbus.experiments.bench.idle import measure_idle
from gradbus.experiments.bench.processes import DOMAIN, BenchRank, context, end_with_benchmark, run_ranks
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.timing import percentile
from gradbus.runtime.collectives import join_group
from gradbus.runtime.config.timeouts import ELASTIC_LEASE_S
from gradbus.runtime.forks import die_with_parent

LINKS = LinkConditions(rate_bit_s=1e9)
_START_S = 30.0  # before the first fault of a storm
START_S = 90.0
TORCHFT_PYTHON = "GRADBUS_TORCHFT_PYTHON"  # an interpreter that has torchft; else that of make setup-integrations
_ROOT = Path(__file__).resolve().parents[2]
_BATCH = 32  # samples of a rank and step, for the cost of a commit
_CONFIG: dict[str, Any] = {
    "epochs": 1_000_000, "eval_every_epochs": 0, "hash_every": 10,
    "elastic": {"min_world": 1, "max_world": 8, "wait_s": 120.0},
}  # fmt: skip


@contextmanager
def _run(what: str, world: int, **seat: Any) -> Iterator[ElasticProcesses]:
    """A run of so many founders; what it has written is removed unless something fails."""
    directory = Path(tempfile.mkdtemp(prefix=f"gradbus-{what}-"))
    config = _CONFIG | seat.pop("config", {})
    with ElasticProcesses(ElasticSeat(job=new_job(what), directory=directory, config=config, **seat), world) as run:
        yield run
    shutil.rmtree(directory, ignore_errors=True)


# Faults, one at a time


def measure_faults(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """kill -9 of ranks on one machine, and machines that are cut off: knowing, going on, and being back."""
    known: list[float] = []
    stepped: list[float] = []
    back: dict[bool, list[float]] = {False: [], True: []}
    bare: list[float] = []
    with _run("kill", 3, model=models.mnist_cnn, samples=1024, config={"hash_every": 1}) as run:
        run.first(range(3), 0.0, "step", START_S, world=3)
        for repeat in range(chosen.repeats):
            victim, cold = repeat % 3, bool(repeat % 2)
            others = [number for number in range(3) if number != victim]
            time.sleep(0.5)
            killed_s = run.signal(victim, signal.SIGKILL)
            known.append(max(e["at_s"] for e in run.first(others, killed_s, "lost", 30.0)) - killed_s)
            stepped.append(max(e["at_s"] for e in run.first(others, killed_s, "step", 30.0, world=2)) - killed_s)
            if cold:
                bare.append(_bare_start())
            started_s = run.start(victim, cold=cold)
            back[cold].append(run.first([victim], started_s, "step", 60.0, world=3)[0]["at_s"] - started_s)
            run.first(others, started_s, "step", 30.0, world=3)
    yield measurement("kill -9 of one of 3: known to the others", "s", known, at_most=1.0)
    yield measurement("kill -9 of one of 3: next step of the others", "s", stepped, at_most=2.0)
    if back[True]:
        note = "with the start of Python and its imports"
        yield measurement("back at work after its process started, CNN", "s", back[True], at_most=5.0, note=note)
        yield measurement("of that, what a process of torch alone needs to a step", "s", bare, note="by turns with it")
    note = "forked from a process that has imported all"
    yield measurement("back at work after a fork, CNN", "s", back[False], note=note)
    yield from _machines(chosen.repeats)


def _bare_start() -> float:
    """Seconds of a process that imports torch and makes one step."""
    step = (
        "import torch; model = torch.nn.Linear(784, 10); optimizer = torch.optim.SGD(model.parameters(), lr=0.1); "
        "model(torch.ones(16, 784)).sum().backward(); optimizer.step()"
    )
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", step], check=True, timeout=120.0)
    return time.monotonic() - began_s


def _machines(repeats: int) -> Iterator[Measurement]:
    known: list[float] = []
    stepped: list[float] = []
    back: list[float] = []
    with (
        hosts_on_a_switch(3, LINKS) as network,
        _run("machines", 3, model=models.mnist_cnn, samples=1024, hosts=network.hosts, lease_s=ELASTIC_LEASE_S) as run,
    ):
        run.first(range(3), 0.0, "step", START_S, world=3)
        for repeat in range(repeats):
            victim = repeat % 3
            others = [number for number in range(3) if number != victim]
            time.sleep(0.5)
            cut_s = time.monotonic()
            set_link(network.hosts[victim], False)
            known.append(max(e["at_s"] for e in run.first(others, cut_s, "lost", 60.0)) - cut_s)
            stepped.append(max(e["at_s"] for e in run.first(others, cut_s, "step", 60.0, world=2)) - cut_s)
            mended_s = time.monotonic()
            set_link(network.hosts[victim], True)
            back.append(run.first([victim], mended_s, "step", 90.0, world=3)[0]["at_s"] - mended_s)
            run.first(others, mended_s, "step", 30.0, world=3)
    note = f"lease of {ELASTIC_LEASE_S:g} s"
    yield measurement("one of 3 machines cut off: known to the others", "s", known, at_most=5.0, note=note)
    yield measurement("one of 3 machines cut off: next step of the others", "s", stepped, note=note)
    yield measurement("a machine that was cut off is back at work", "s", back, note="after the link is mended")


# The storm


def measure_storm(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Faults one after the other on four hosts, and what the journals say at the end."""
    world, seconds = 4, 60 * chosen.minutes
    faults = schedule(chosen.seed, minutes=chosen.minutes, per_hour=chosen.faults_per_hour, world=world)
    config = {"timeouts": {"collective_s": 10.0}}
    with hosts_on_a_switch(world, LINKS) as network:
        until_s = time.monotonic() + _START_S + seconds
        seat = {"hosts": network.hosts, "lease_s": ELASTIC_LEASE_S, "compute_s": 0.1, "until_s": until_s}
        with _run("storm", world, config=config, **seat) as run:
            run.first(range(world), 0.0, "step", START_S, world=world)
            began_s, ended_s = max(time.monotonic(), until_s - seconds), until_s
            print(f"storm of {len(faults)} faults; journals and logs in {run.seat.directory}", file=sys.stderr)
            died = _storm(run, faults, began_s, ended_s, network.hosts)
            ends = _end(run)
            found = score([process.events for process in run.processes], world, began_s, ended_s)
            for line in found.differing:
                print(f"  hashes differ: {line}", file=sys.stderr)
            if found.differing or died or ends:
                raise RunStuck(
                    f"hashes differ in {len(found.differing)} places; ended by themselves: {died}; not ended in time, "
                    f"or with an error: {ends}; {found}; journals in {run.seat.directory}"
                )
    kinds = ", ".join(f"{sum(fault.kind == kind for fault in faults)} {kind}" for kind in KINDS)
    note = f"{len(faults)} faults in {chosen.minutes:g} minutes ({kinds}), seed {chosen.seed}"
    attempted = max(1, found.attempted)
    yield measurement(
        "steps committed of those attempted", "%", [100 * found.committed / attempted], at_least=95, note=note
    )
    yield measurement("time that committed steps need, of all time", "%", [100 * found.useful], note="useful share")
    yield measurement("participation of 4 ranks", "%", [100 * found.participation], at_least=90, note=note)
    yield measurement(
        "places where weights differ",
        "",
        [len(found.differing)],
        at_most=0,
        note=f"{found.compared} places in {found.generations} generations compared",
    )
    yield measurement("processes that ended by themselves, or hung", "", [len(died) + len(ends)], at_most=0)


def _storm(
    run: ElasticProcesses, faults: Sequence[Fault], began_s: float, ended_s: float, hosts: Sequence[Host]
) -> list[int]:
    """Do all faults, and have processes that were killed started again. Returns those that ended by themselves."""
    waiting = list(faults)
    undo: list[tuple[float, Fault]] = []
    died: list[int] = []
    slow: dict[int, float] = {}  # until when
    is_stopped = False
    while (now_s := time.monotonic()) < ended_s:
        if waiting and now_s >= began_s + waiting[0].at_s:
            fault = waiting.pop(0)
            print(f"  {now_s - began_s:7.1f} s: {fault}", file=sys.stderr, flush=True)
            _strike(run, fault, hosts)
            if fault.kind == "slow":
                slow[fault.number] = now_s + fault.lasts_s
            undo.append((now_s + fault.lasts_s, fault))
        for due in [due for due in undo if now_s >= due[0]]:
            undo.remove(due)
            slow.pop(due[1].number, None)
            _undo(run, due[1], hosts)
        is_stopped = not is_stopped
        for number in slow:  # half of the time
            run.signal(number, signal.SIGSTOP if is_stopped else signal.SIGCONT)
        down = {fault.number for _, fault in undo if fault.kind == "kill"}
        for process in run.processes:
            process.poll()
            ended = process.process is not None and not process.process.is_alive()
            if ended and process.number not in down and now_s < ended_s - 1.0:
                print(f"  {now_s - began_s:7.1f} s: process {process.number} has ended by itself", file=sys.stderr)
                died.append(process.number)
                run.start(process.number)
        time.sleep(0.05)
    for _, fault in undo:
        _undo(run, fault, hosts)
    return died


def _strike(run: ElasticProcesses, fault: Fault, hosts: Sequence[Host]) -> None:
    match fault.kind:
        case "kill":
            run.signal(fault.number, signal.SIGKILL)
            process = run.processes[fault.number].process
            if process is not None:
                process.join(10.0)
        case "stop":
            run.signal(fault.number, signal.SIGSTOP)
        case "partition":
            set_link(hosts[fault.number], False)


def _undo(run: ElasticProcesses, fault: Fault, hosts: Sequence[Host]) -> None:
    match fault.kind:
        case "kill":
            run.start(fault.number)
        case "partition":
            set_link(hosts[fault.number], True)
        case _:
            run.signal(fault.number, signal.SIGCONT)


def _end(run: ElasticProcesses, within_s: float = 60.0) -> list[int]:
    """Wait for all to end. Returns those that do not, or with an error."""
    with suppress(RunStuck):
        run.wait("the end", lambda: all(it.process and not it.process.is_alive() for it in run.processes), within_s)
    return [it.number for it in run.processes if it.process is None or it.process.exitcode != 0]


# False deaths


@dataclass(frozen=True, slots=True)
class _Case:
    """Something that happens to processes that live."""

    name: str
    do: Callable[[Sequence[ElasticProcesses]], None]
    still_s: float = 0.0  # how long ranks get no processor at all


def _stopped(all_ranks: bool, for_s: float) -> Callable[[Sequence[ElasticProcesses]], None]:
    def do(runs: Sequence[ElasticProcesses]) -> None:
        for what in (signal.SIGSTOP, signal.SIGCONT):
            for run in runs:
                for process in run.processes if all_ranks else run.processes[-1:]:
                    run.signal(process.number, what)
            if what is signal.SIGSTOP:
                time.sleep(for_s)

    return do


def _burn() -> None:
    end_with_benchmark()
    while True:
        sum(range(10_000))


def _starved(nice: int, for_s: float) -> Callable[[Sequence[ElasticProcesses]], None]:
    def renice(runs: Sequence[ElasticProcesses], to: int) -> None:
        for run in runs:
            pid = run.processes[-1].pid
            for thread in os.listdir(f"/proc/{pid}/task"):
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, int(thread), to)

    def do(runs: Sequence[ElasticProcesses]) -> None:
        renice(runs, nice)
        burners = [context.Process(target=_burn, daemon=True) for _ in range(8)]
        try:
            for burner in burners:
                burner.start()
            time.sleep(for_s)
        finally:
            for burner in burners:
                burner.kill()
                burner.join(10.0)
        with suppress(PermissionError):
            renice(runs, 0)

    return do


_CASES = (
    _Case("one rank stopped for 1.2 s", _stopped(False, 1.2), 1.2),
    _Case("all ranks stopped for 1.2 s", _stopped(True, 1.2), 1.2),
    _Case("all ranks stopped for 3 s", _stopped(True, 3.0), 3.0),
    _Case("all ranks stopped for 10 s", _stopped(True, 10.0), 10.0),
    _Case("nice 10 beside 8 busy processes for 5 s", _starved(10, 5.0)),
    _Case("nice 19 beside 8 busy processes for 5 s", _starved(19, 5.0)),
)


def measure_false_deaths(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Nobody dies: no run may lose a generation. A run of the table is a run of ranks and one disturbance."""
    yield from _false_deaths(
        chosen.runs,
        _CASES,
        [(world, {"shared_memory": shared, "compute_s": 0.03}) for world in (2, 4) for shared in (True, False)],
    )


def measure_false_deaths_between_hosts(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """The same where each rank is on a host of its own, and loses 1 % of its packets: there the lease decides who is
    dead, so that cases are left out in which all ranks stand still for as long as it, or longer. The ranks of gloo
    lose no packets."""
    lease_s = chosen.lease_s
    cases = [case for case in _CASES if case.still_s < lease_s]
    with hosts_on_a_switch(4, LINKS) as network:
        seat = {"hosts": network.hosts, "lease_s": lease_s, "compute_s": 0.03, "loss_per_mille": 10}
        for found in _false_deaths(chosen.runs, cases, [(world, seat) for world in (2, 4)]):
            yield found.model_copy(update={"name": f"{found.name}, between hosts, lease of {lease_s:g} s"})


def _false_deaths(
    count: int, cases: Sequence[_Case], kinds: Sequence[tuple[int, dict[str, Any]]]
) -> Iterator[Measurement]:
    """``kinds``: of runs that are disturbed at the same time: how many ranks, and their seat."""
    deaths: dict[str, list[int]] = {case.name: [] for case in cases}
    of_gloo: list[int] = []
    kinds = [*kinds, *((world, seat | {"gloo": True}) for world, seat in dict(kinds).items())]  # one of each world
    while sum(map(len, deaths.values())) < count:
        with ExitStack() as stack:
            runs = [stack.enter_context(_run("false", world, **seat)) for world, seat in kinds]
            for run in runs:
                run.first(range(len(run.processes)), 0.0, "step", START_S, world=len(run.processes))
            done = False
            while not done and sum(map(len, deaths.values())) < count:
                for case in cases:
                    faults = _disturb(runs, case)
                    for run, fault in zip(runs, faults, strict=True):
                        (of_gloo if run.seat.gloo else deaths[case.name]).append(bool(fault))
                    for fault in filter(None, faults):
                        print(f"  {case.name}: {fault}", file=sys.stderr, flush=True)
                        done = True  # all anew
    runs_made = sum(map(len, deaths.values()))
    yield measurement(
        "false deaths in all cases", "", [sum(map(sum, deaths.values()))], at_most=0, note=f"{runs_made} runs"
    )
    yield measurement(
        "the same with torch over gloo", "", [sum(of_gloo)], note=f"{len(of_gloo)} runs, disturbed at the same time"
    )
    for name, found in deaths.items():
        yield measurement(name, "", [sum(found)], at_most=0, note=f"{len(found)} runs")


def _disturb(runs: Sequence[ElasticProcesses], case: _Case) -> list[str]:
    """Return what went wrong in each run; empty: nothing."""
    began_s = time.monotonic()
    case.do(runs)
    done_s = time.monotonic()
    found = []
    for run in runs:
        fault = ""
        try:
            run.first(range(len(run.processes)), done_s, "step", 30.0, world=len(run.processes))
        except RunStuck as error:
            fault = str(error)
        for process in run.processes:
            for name in ("lost", "started", "failed"):
                if events := process.since(began_s, name):
                    fault = f"{len(run.processes)} ranks, process {process.number}: {events[0]}"
        found.append(fault)
    return found


# The cost of a commit


def measure_commit(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """Steps of two ranks of an elastic run, against those of a fixed group, by turns in the same processes."""
    found: list[dict[str, list[float]]] = run_ranks(_blocks, 2, (chosen.blocks, chosen.steps), timeout_s=600.0)
    seconds = {name: list(map(max, *(rank[name] for rank in found))) for name in ("elastic", "fixed")}
    more = [1e3 * (own - other) for own, other in zip(seconds["elastic"], seconds["fixed"], strict=True)]
    note = f"{chosen.steps} steps a block, MLP"
    yield measurement("what a step of an elastic run takes more, 2 ranks", "ms", more, at_most=0.5, note=note)
    yield measurement(
        "a step, 2 ranks, elastic",
        "ms",
        [1e3 * one for one in seconds["elastic"]],
        against=("fixed", [1e3 * one for one in seconds["fixed"]]),
    )
    python = torchft_python()
    if not python.exists():
        print(
            f"no column of torchft: there is no {python}. It comes with 'make setup-integrations', or set "
            f"{TORCHFT_PYTHON} to the Python of an environment that has torchft and gradbus",
            file=sys.stderr,
        )
        return
    ended = run_torchft(chosen.blocks, chosen.steps)
    if ended.returncode:
        print(f"no column of torchft: {ended.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return
    own, fixed = ([float(word) for word in line.split()] for line in ended.stdout.strip().splitlines()[-2:])
    yield measurement(
        "what a step takes more with torchft, 2 replicas",
        "ms",
        [a - b for a, b in zip(own, fixed, strict=True)],
        note="the same model over gloo",
    )


def run_torchft(blocks: int, steps: int) -> subprocess.CompletedProcess[str]:
    """Run the same with torchft, in a process that ends with this one."""
    return subprocess.run(
        [str(torchft_python()), "-P", "-m", "gradbus.experiments.bench.torchft_commit", str(blocks), str(steps)],
        capture_output=True,
        text=True,
        timeout=600,
        preexec_fn=die_with_parent(),
    )


def torchft_python() -> Path:
    """The interpreter that torchft is measured with, which need not exist."""
    return Path(os.environ.get(TORCHFT_PYTHON) or _ROOT / ".venv-integrations" / "bin" / "python")


async def _blocks(place: BenchRank) -> dict[str, list[float]]:
    """Seconds of a step of each block, an epoch, by turns of two runs that are open at the same time: what else goes on
    in the machine meets both alike. Without callbacks, as they have a fixed group vote, too."""
    blocks, steps = place.spec
    samples = steps * place.world * _BATCH

    def task() -> models.ClassificationTask:
        return models.ClassificationTask(
            models.mnist_mlp, lambda: models.glyphs(train=samples, test=50), batch_size=_BATCH
        )

    def config(**more: Any) -> gradbus.DataParallelConfig:
        return gradbus.DataParallelConfig(epochs=blocks + 1, eval_every_epochs=0, hash_every=0, **more)

    found: dict[str, list[float]] = {"elastic": [], "fixed": []}
    async with AsyncExitStack() as stack:
        buses = {
            name: await stack.enter_async_context(gradbus.connect(f"{place.job}-{name}", domain=DOMAIN))
            for name in found
        }
        group = await stack.enter_async_context(join_group(buses["fixed"], rank=place.rank, world=place.world))
        seat = gradbus.ElasticPlace(bus=buses["elastic"], number=place.rank, founders=place.world)
        elastic = gradbus.ElasticWorker(seat, task(), config(elastic={"min_world": 1, "max_world": 2}))
        runs = {"elastic": elastic.epochs(), "fixed": gradbus.Worker(group, task(), config()).epochs()}
        for run in runs.values():
            await stack.enter_async_context(aclosing(run))
        for number in range(blocks + 1):
            for name in sorted(runs, reverse=bool(number % 2)):  # the first of a pair by turns
                report = await anext(runs[name])
                if number:  # the first one warms up
                    found[name].append(report.step_s_mean)
        for run in runs.values():
            assert await anext(run, None) is None, "all epochs have been made"
    return found


def measure_embed(chosen: argparse.Namespace) -> Iterator[Measurement]:
    """A rank that joins, trains and leaves on the event loop of a web service, again and again."""
    from gradbus.experiments.bench.elastic_embed import measure as lateness  # needs aiohttp, of the extra `web`

    note = "99 % of the ticks are less late; a rank of the MLP beside one other process"
    late: list[float] = []
    idle: list[float] = []
    asked: list[float] = []
    for _ in range(chosen.services):
        found = lateness(times=3, trains_s=3.0, domain=DOMAIN)
        late.append(1e3 * percentile(found.loop_s, 0.99))
        idle.append(1e3 * percentile(found.idle_s, 0.99))
        asked.append(1e3 * percentile(found.requests_s, 0.99))
    yield measurement("a service's loop while a rank joins, trains and leaves", "ms", late, at_most=20.0, note=note)
    yield measurement("the same loop while it has no rank", "ms", idle, note="meanwhile the other process starts")
    yield measurement("a request to it, 99 % are faster", "ms", asked)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=9, help="of each fault [%(default)s]")
    parser.add_argument("--minutes", type=float, default=20.0, help="of the storm [%(default)s]")
    parser.add_argument("--faults-per-hour", type=float, default=120.0, help="of the storm [%(default)s]")
    parser.add_argument("--seed", type=int, default=1, help="of the storm's faults [%(default)s]")
    parser.add_argument("--runs", type=int, default=100, help="of ranks that do not die [%(default)s]")
    parser.add_argument("--blocks", type=int, default=60, help="of steps, for the cost of a commit [%(default)s]")
    parser.add_argument(
        "--lease-s", type=float, default=ELASTIC_LEASE_S, help="of ranks on hosts that do not die [%(default)s]"
    )
    parser.add_argument("--idle-s", type=float, default=60.0, help="of idle members [%(default)s]")
    parser.add_argument("--services", type=int, default=3, help="with a rank each [%(default)s]")
    parser.add_argument("--steps", type=int, default=50, help="of a block [%(default)s]")


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        "faults": Part(measure_faults, "Elastic runs: deaths known, training that goes on, ranks that are back", 180),
        "storm": Part(measure_storm, "Elastic runs: a storm of faults on four hosts", 1260),
        "false-deaths": Part(measure_false_deaths, "Elastic runs: nobody dies, and nobody is taken for dead", 240),
        "false-deaths-hosts": Part(
            measure_false_deaths_between_hosts, "Elastic runs between hosts: nobody is taken for dead", 240
        ),
        "commit": Part(measure_commit, "Elastic runs: what a step takes more than one of a fixed group", 180),
        "idle": Part(measure_idle, "What idle members send between hosts", 150),
        "embed": Part(measure_embed, "Elastic runs: a rank inside a web service", 90),
    },
    _options,
)
