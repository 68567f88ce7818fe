"""Where the time of one collective goes: processor time and switches of every thread, and of every function.

Threads are watched without any instrument, functions in other processes with ``cProfile``, which slows them down.
"""

from __future__ import annotations

import cProfile
import os
import resource
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from gradbus.experiments.bench.cells import Cell
from gradbus.experiments.bench.processes import TRANSPORTS, BenchRank, Transport, run_ranks
from gradbus.experiments.bench.timing import block, calls_for, size_text

_TASKS = Path("/proc/self/task")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_TOP = 14  # functions of a thread

# Of a thread, since it began. cpu_s: on a core. waited_s: ready, but no core free. system_s: of cpu_s, in the kernel,
# to a tick of the clock. slept, pushed: how often it gave up its core, and lost it.
_FACTS = ("cpu_s", "waited_s", "system_s", "slept", "pushed")


def thread_facts() -> dict[int, tuple[str, tuple[float, ...]]]:
    """Name and facts of every thread of this process, by its id."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = {}
    for folder in _TASKS.iterdir():
        try:
            ran, waited, _ = (folder / "schedstat").read_text(encoding="ascii").split()
            name, _, rest = (folder / "stat").read_text(encoding="utf-8").partition("(")[2].rpartition(")")
            status = (folder / "status").read_text(encoding="utf-8").splitlines()
        except OSError:  # it has ended meanwhile
            continue
        switches = [float(line.split()[1]) for line in status if "ctxt_switches" in line]
        system_s = int(rest.split()[12]) * _TICK_S
        thread = int(folder.name)
        found[thread] = (names.get(thread, name), (int(ran) / 1e9, int(waited) / 1e9, system_s, *switches))
    return found


class Watched(NamedTuple):
    """The collective that all ranks call, for so many seconds."""

    collective: str
    size: int
    seconds: float


def _start(place: BenchRank) -> tuple[dict[str, dist.ProcessGroup], Cell, float]:
    spec: Watched = place.spec
    groups, cell = place.start_both(), Cell(place, spec.collective, spec.size)
    cell.check(groups)
    return groups, cell, spec.seconds


def watch_threads(place: BenchRank) -> dict[str, Any]:
    """The role of a rank: what every thread does in some seconds of calls, through dds and through gloo, per call.

    Its spec: Watched.
    """
    groups, cell, seconds = _start(place)
    found = {}
    for name, group in groups.items():
        call = cell.call(group)
        calls = calls_for(seconds, partial(block, call), groups["gloo"], most=1_000_000)
        dist.barrier(group=groups["gloo"])
        before, faults = thread_facts(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        taken = block(call, calls)
        after, faults = thread_facts(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        threads: dict[str, Counter[str]] = {}
        for thread, (its_name, facts) in after.items():
            began = before.get(thread, ("", (0.0,) * len(_FACTS)))[1]
            change = {fact: (b - a) / calls for fact, a, b in zip(_FACTS, began, facts, strict=True)}
            threads.setdefault(its_name, Counter()).update(change)
        found[name] = {
            "calls": calls, "wall_s": statistics.median(taken), "mean_s": statistics.mean(taken),
            "slowest_s": max(taken), "page_faults": faults / calls,
            "threads": {its_name: dict(facts) for its_name, facts in threads.items()},
        }  # fmt: skip
    dist.barrier(group=groups["gloo"])
    return found


class _Profiles:
    """Profiles of every Python thread that starts after this, and of the one that makes it."""

    def __init__(self) -> None:
        self._of: dict[str, cProfile.Profile] = {}
        if sys.version_info < (3, 12):  # from then on a process has but one profile
            threading.setprofile(self._begin)
        self._begin()

    def _begin(self, *_: Any) -> None:
        thread = threading.current_thread()
        profile = self._of[f"{thread.name} ({thread.native_id})"] = cProfile.Profile()
        profile.enable(builtins=True)

    def taken(self) -> dict[str, dict[str, tuple[int, float, float]]]:
        """By thread and function: calls, seconds in it alone, seconds in it and what it calls. On the thread that made
        this; what it does here is not counted."""
        mine = next(iter(self._of.values()))
        mine.disable()
        found: dict[str, dict[str, tuple[int, float, float]]] = {}
        for thread, profile in list(self._of.items()):
            functions = found.setdefault(thread, {})
            for entry in profile.getstats():
                name = _function(entry.code)
                calls, alone, within = functions.get(name, (0, 0.0, 0.0))
                functions[name] = (calls + entry.callcount, alone + entry.inlinetime, within + entry.totaltime)
        mine.enable(builtins=True)
        return found


def _function(code: Any) -> str:
    if isinstance(code, str):
        return code
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.name}:{code.co_firstlineno} {code.co_qualname}"


def watch_functions(place: BenchRank) -> dict[str, Any]:
    """The role of a rank: in which functions the threads are while it calls dds, per call. Its spec: Watched."""
    profiles = _Profiles()
    groups, cell, seconds = _start(place)
    call = cell.call(groups["ours"])
    calls = calls_for(seconds, partial(block, call), groups["gloo"], most=1_000_000)
    dist.barrier(group=groups["gloo"])
    before = profiles.taken()
    wall_s = statistics.median(block(call, calls))
    after = profiles.taken()
    dist.barrier(group=groups["gloo"])
    threads = {}
    for thread, functions in after.items():
        then = before.get(thread, {})
        change = {
            name: [(b - a) / calls for a, b in zip(then.get(name, (0, 0.0, 0.0)), facts, strict=True)]
            for name, facts in functions.items()
        }
        longest_first = sorted(change.items(), key=lambda item: item[1][1], reverse=True)
        threads[thread] = {name: facts for name, facts in longest_first if facts[0]}
    return {"calls": calls, "wall_s": wall_s, "threads": threads}


def print_profile(
    collective: str, size: int, transport: Transport, world: int, seconds: float, show_ranks: Sequence[int] = (0,)
) -> dict[str, Any]:
    """Measure, print the profiles of some ranks, and return those of all."""
    threads, functions = (
        run_ranks(
            role, world, Watched(collective, size, seconds), transport=transport, timeout_s=60.0 + 20 * seconds
        )
        for role in (watch_threads, watch_functions)
    )  # fmt: skip
    for rank in show_ranks:
        print(f"\n{collective} {size_text(size)}, {TRANSPORTS[transport]}, world {world}, rank {rank}; all per call")
        for backend, facts in threads[rank].items():
            _print_threads(backend, facts)
        print("  functions of dds, in other processes and slower for being watched:", end="")
        print(f" {1e6 * functions[rank]['wall_s']:.1f} us median of {functions[rank]['calls']}")
        for thread, entries in functions[rank]["threads"].items():
            if entries:
                print(f"    {thread}: calls, us alone, us with what it calls")
            for name, (calls, alone_s, within_s) in islice(entries.items(), _TOP):
                print(f"      {calls:7.2f} {1e6 * alone_s:9.1f} {1e6 * within_s:9.1f}  {name}")
    return {"threads": threads, "functions": functions}


def _print_threads(backend: str, facts: dict[str, Any]) -> None:
    print(
        f"  {backend}: {1e6 * facts['wall_s']:.1f} us median of {facts['calls']} (mean {1e6 * facts['mean_s']:.1f}, "
        f"slowest {1e6 * facts['slowest_s']:.0f}), {facts['page_faults']:.2f} page faults"
    )
    print(f"    {'thread':28} {'cpu us':>9} {'kernel us':>9} {'ready us':>9} {'slept':>7} {'pushed':>7}")
    rows = sorted(facts["threads"].items(), key=lambda item: item[1]["cpu_s"], reverse=True)
    for name, of in [*rows, ("all", dict(sum((Counter(of) for _, of in rows), Counter())))]:
        cpu, waited, system, slept, pushed = (of.get(fact, 0.0) for fact in _FACTS)
        if cpu > 1e-7:
            times = f"{1e6 * cpu:9.1f} {1e6 * system:9.1f} {1e6 * waited:9.1f}"
            print(f"    {name[:28]:28} {times} {slept:7.2f} {pushed:7.2f}")
