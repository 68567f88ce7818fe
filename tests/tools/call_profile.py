"""Where the time of one collective goes, thread by thread: ``make bench PART=profile``.

Processor time and switches of every thread, and of every function, per call, through dds and through gloo. Threads are
watched without any instrument, functions in other processes with ``cProfile``, which slows them down.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import resource
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from gradbus.experiments.bench.cells import Cell
from gradbus.experiments.bench.collectives import size_of
from gradbus.experiments.bench.command import Benchmark, Part, parse, run
from gradbus.experiments.bench.processes import TRANSPORTS, BenchRank, Transport, run_ranks
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.timing import KIB, block, calls_for, size_text

_TASKS = Path("/proc/self/task")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_TOP = 14  # functions of a thread

# Of a thread, since it began, in seconds: on a core; of that in the kernel, to a tick of the clock; ready, but no core
# free. And how often it gave up its core, and lost it.
_FACTS = ("cpu", "kernel", "ready", "slept", "pushed")


class Watched(NamedTuple):
    """The collective that all ranks call, for so many seconds."""

    collective: str
    size: int
    seconds: float


class ThreadTimes(NamedTuple):
    """Calls through one backend: seconds of each, page faults of one, and by thread its facts per call."""

    taken: list[float]
    page_faults: float
    threads: dict[str, Counter[str]]


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
        kernel_s, thread = int(rest.split()[12]) * _TICK_S, int(folder.name)
        found[thread] = (names.get(thread, name), (int(ran) / 1e9, kernel_s, int(waited) / 1e9, *switches))
    return found


def watch_threads(place: BenchRank) -> dict[str, ThreadTimes]:
    """The role of a rank: what every thread does in some seconds of calls, by backend. Its spec: Watched."""
    spec: Watched = place.spec
    groups, cell = place.start_both(), Cell(place.world, spec.collective, spec.size)
    found = {}
    for name, group in groups.items():
        call = cell.call(group)
        calls = calls_for(spec.seconds, partial(block, call), groups["gloo"], most=1_000_000)
        dist.barrier(group=groups["gloo"])
        before, faults = thread_facts(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        taken = block(call, calls)
        after, faults = thread_facts(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        threads: dict[str, Counter[str]] = {}
        for thread, (its_name, facts) in after.items():
            began = before.get(thread, ("", (0.0,) * len(_FACTS)))[1]
            change = {fact: (b - a) / calls for fact, a, b in zip(_FACTS, began, facts, strict=True)}
            threads.setdefault(its_name, Counter()).update(change)
        found[name] = ThreadTimes(taken, faults / calls, threads)
    dist.barrier(group=groups["gloo"])
    return found


Functions = dict[str, tuple[float, float, float]]
"""By function: calls, seconds in it alone, seconds in it and what it calls."""


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

    def taken(self) -> dict[str, Functions]:
        """By thread. On the thread that made this; what it does here is not counted."""
        mine = next(iter(self._of.values()))
        mine.disable()
        found: dict[str, Functions] = {}
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


def watch_functions(place: BenchRank) -> dict[str, Functions]:
    """The role of a rank: in which functions the threads are while it calls dds, per call. Its spec: Watched."""
    spec: Watched = place.spec
    profiles = _Profiles()
    groups, cell = place.start_both(), Cell(place.world, spec.collective, spec.size)
    call = cell.call(groups["ours"])
    calls = calls_for(spec.seconds, partial(block, call), groups["gloo"], most=1_000_000)
    dist.barrier(group=groups["gloo"])
    before = profiles.taken()
    block(call, calls)
    after = profiles.taken()
    dist.barrier(group=groups["gloo"])
    found = {}
    for thread, functions in after.items():
        then = before.get(thread, {})
        change: Functions = {}
        for name, facts in functions.items():
            began = then.get(name, (0, 0.0, 0.0))
            made, alone_s, within_s = ((b - a) / calls for a, b in zip(began, facts, strict=True))
            change[name] = made, alone_s, within_s
        longest_first = sorted(change.items(), key=lambda item: item[1][1], reverse=True)
        found[thread] = dict([item for item in longest_first if item[1][0]][:_TOP])
    return found


def profile(spec: Watched, world: int, transport: Transport, show_ranks: Sequence[int]) -> Iterator[Measurement]:
    """Microseconds of a call in every thread of some ranks, and in those functions of dds that take longest."""
    where = f"{spec.collective} {size_text(spec.size)}, {TRANSPORTS[transport]}, world {world}"
    threads, functions = (
        run_ranks(role, world, spec, transport=transport, timeout_s=60.0 + 20 * spec.seconds)
        for role in (watch_threads, watch_functions)
    )
    for rank in show_ranks:
        name = f"{where}, rank {rank}"
        for backend, times in threads[rank].items():
            us = [1e6 * one for one in times.taken]
            note = f"mean {statistics.mean(us):.1f}, slowest {max(us):.0f}, {times.page_faults:.2f} page faults"
            yield measurement(f"{name}, {backend}", "us", [statistics.median(us)], note=note)
            for thread, of in sorted(times.threads.items(), key=lambda item: item[1]["cpu"], reverse=True):
                if of["cpu"] > 1e-7:
                    note = ", ".join(f"{fact} {1e6 * of[fact]:.1f} us" for fact in ("kernel", "ready"))
                    note += f"; slept {of['slept']:.2f}, pushed {of['pushed']:.2f} times"
                    yield measurement(f"{name}, {backend}, {thread}", "us", [1e6 * of["cpu"]], note=note)
        for thread, entries in functions[rank].items():
            for function, (calls, alone_s, within_s) in entries.items():
                note = f"{calls:.2f} calls, {1e6 * within_s:.1f} us with what it calls; slower for being watched"
                yield measurement(f"{name}, {thread}: {function}", "us", [1e6 * alone_s], note=note)


def _measure(chosen: argparse.Namespace) -> Iterator[Measurement]:
    for size in chosen.sizes:
        spec = Watched(chosen.collective, size, chosen.seconds)
        yield from profile(spec, chosen.world, chosen.transport, chosen.ranks)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", type=size_of, default=[4 * KIB], help="of tensors, such as 4KiB 1MiB")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--transport", choices=list(TRANSPORTS), default="one-host")
    parser.add_argument("--collective", choices=("all_reduce", "all_gather"), default="all_reduce")
    parser.add_argument("--seconds", type=float, default=1.0, help="of calls")
    parser.add_argument("--ranks", nargs="+", type=int, default=[0], help="whose profiles are shown")


BENCHMARK = Benchmark(__doc__ or "", {"profile": Part(_measure, "Microseconds of a call", 10)}, _options)


if __name__ == "__main__":
    options, words = parse("profile", BENCHMARK, sys.argv[1:])
    raise SystemExit(run(BENCHMARK, options, words)[0])
