"""Measure what the tricks of docs/traps.md gain: each with it and without it, by turns.

    PYTHONPATH=tests/tools .venv/bin/python -P -m trap_gains              # 15 minutes, two cores
    PYTHONPATH=tests/tools .venv/bin/python -P -m trap_gains --part dispatcher polling --repeats 9

Each sample is taken in processes of its own, so no switch of an earlier one is left. A figure is the median of the
samples; the gain is the median of the paired ratios, without / with: above 1, the trick pays.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from cyclonedds.topic import Topic as BindingTopic

from gradbus.experiments.bench.processes import LEASE_S, BenchRank, Transport, run_ranks
from gradbus.experiments.bench.timing import KIB, MIB, in_turns, size_text
from gradbus.runtime import fast_paths
from gradbus.runtime.bus.wait_loop import Handover
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.transport.dds import libddsc, native_topics

_WARM_UP = 20
_BLOCKS, _BLOCK_CALLS = 32, 60
_LIMIT_S = 180.0


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def _default_interval() -> None:
    real = sys.setswitchinterval
    sys.setswitchinterval = lambda _: real(0.005)


# By trick: what leaves it out, in a process that has not opened a bus yet.
LEAVE_OUT: Mapping[str, Callable[[], None]] = {
    "libddsc": _set(libddsc, "self_test", lambda *_: "left out"),
    "native topics": _set(native_topics, "CTopic", BindingTopic),
    "polling": _set(Handover, "poll", lambda *_: None),
    "switch interval": _default_interval,
    "malloc": _set(fast_paths, "keep_memory", lambda: False),
}


@dataclass(frozen=True, slots=True)
class Calls:
    """A figure of two ranks that call one all_reduce after the other.

    Attributes:
        trick: which is left out in every second sample.
        size_bytes: of the tensor. calls: in one sample.
        is_cpu: whether the processor time of a rank is measured, which depends little on other programs, or the time.
        is_busy: whether a thread of each rank computes in Python meanwhile.
    """

    trick: str
    transport: Transport
    size_bytes: int
    calls: int
    is_cpu: bool = True
    is_busy: bool = False

    @property
    def what(self) -> str:
        """A description of the figure."""
        of = ": processor time of a rank" if self.is_cpu else ""
        beside = ", beside a thread that computes" if self.is_busy else ""
        return f"all_reduce of a Group, {size_text(self.size_bytes)}, {self.transport}{beside}{of}"


CALLS = (
    Calls("libddsc", "dds-only", 64 * KIB, 300),
    Calls("libddsc", "dds-only", 4 * MIB, 20),
    Calls("native topics", "dds-only", 64 * KIB, 300),
    Calls("native topics", "dds-only", 16 * MIB, 10),
    Calls("malloc", "dds-only", 4 * MIB, 20),
    Calls("polling", "dds-only", 4 * KIB, 400, is_cpu=False),
    Calls("switch interval", "dds-only", 64, 60, is_cpu=False, is_busy=True),
)


DISPATCHES: tuple[tuple[Transport, int], ...] = (("one-host", 4 * KIB), ("one-host", 64 * KIB), ("dds-only", 64 * KIB))


async def call(place: BenchRank) -> float:
    """Run one rank of a sample. Returns the time of a call, in seconds: the mean of the processor's, or the median."""
    figure, is_left_out = place.spec
    if is_left_out:
        LEAVE_OUT[figure.trick]()
    tensor, taken = torch.ones(figure.size_bytes // 4), []
    with _busy_thread() if figure.is_busy else contextlib.nullcontext():
        network = NetworkConfig(lease_s=LEASE_S, shared_memory=place.transport == "one-host")
        async with place.group(network) as group:
            for number in range(_WARM_UP + figure.calls):
                if number == _WARM_UP:
                    used_s = time.process_time()
                began_s = time.perf_counter()
                await group.all_reduce("x", tensor, round_id=number)
                taken.append(time.perf_counter() - began_s)
            used_s = time.process_time() - used_s
    return used_s / figure.calls if figure.is_cpu else statistics.median(taken[_WARM_UP:])


def dispatch(place: BenchRank) -> list[tuple[float, float]]:
    """Run one rank of blocks of all_gather, past torch's dispatcher and through it by turns.

    Returns:
        By pair of blocks: the median time of a call past it, and of one through it, in seconds.
    """
    from gradbus.torch import process_group

    place.start("dds")
    past, through = process_group.can_skip_dispatcher, lambda _: False
    tensor = torch.ones(place.spec // 4)
    out = [torch.empty_like(tensor) for _ in range(place.world)]

    def block(way: Any) -> float:
        process_group.can_skip_dispatcher, taken = way, []
        for _ in range(_BLOCK_CALLS):
            began_s = time.perf_counter()
            dist.all_gather(out, tensor)
            taken.append(time.perf_counter() - began_s)
        return statistics.median(taken)

    found = []
    for number in range(_BLOCKS):
        pair = [block(way) for way in ((past, through) if number % 2 else (through, past))]
        found.append((pair[0], pair[1]) if number % 2 else (pair[1], pair[0]))
    dist.barrier()
    return found[2:]


@contextlib.contextmanager
def _busy_thread() -> Iterator[None]:
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


# Programs: what one prints is its sample. IS_LEFT_OUT is True or False in front of each.
_STEP = """
import resource, torch
from gradbus.runtime.optimization.deferred_compiler import defer_compiler
if not IS_LEFT_OUT: defer_compiler()
weight = torch.ones(8, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.sum().backward(); optimizer.step()
used = resource.getrusage(resource.RUSAGE_SELF)
"""
_CPU, _PEAK = "print(used.ru_utime + used.ru_stime)", "print(used.ru_maxrss / 1024)"
_BACKEND = """
import resource, torch, gradbus.torch
if IS_LEFT_OUT: import torch._dynamo
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""
_DISPATCH = """
import time, torch, torch.distributed as dist
import gradbus.torch
from gradbus.torch import process_group
if IS_LEFT_OUT: process_group.can_skip_dispatcher = lambda _: False
dist.init_process_group("dds", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(1024)
out = [torch.empty(1024)]
for number in range(2200):
    if number == 200: used_s = time.thread_time()
    dist.all_gather(out, tensor)
print(1e6 * (time.thread_time() - used_s) / 2000)
dist.destroy_process_group()
"""
_START = """
import gc, resource
if not IS_LEFT_OUT: gc.set_threshold(50_000, 20)
import gradbus.commands.cli.main, gradbus.actors.federated.controller.controller
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""
_END = """
import os, sys, time
from gradbus.__main__ import main
import gradbus.commands.cli.main as command, gradbus.actors.federated.controller.controller
if IS_LEFT_OUT: os._exit = lambda code: None
def run():
    print(time.monotonic())
    raise SystemExit(0)
command.main = run
main()
"""
_PAUSE = """
import gc, time, gradbus
gradbus.preload(freeze=not IS_LEFT_OUT)
taken = []
for _ in range(5):
    began_s = time.perf_counter(); gc.collect(); taken.append(time.perf_counter() - began_s)
print(sorted(taken)[2])
"""


@dataclass(frozen=True, slots=True)
class Program:
    """A figure of one process. ``until_end``: what it prints is a time, and the figure is from then to its end."""

    trick: str
    what: str
    unit: str
    text: str
    until_end: bool = False


PROGRAMS = (
    Program("dispatcher", "all_gather of 4 KiB, one rank: processor time of the caller", "us", _DISPATCH),
    Program("deferred compiler", "first step of an optimizer: processor time", "s", _STEP + _CPU),
    Program("deferred compiler", "first step of an optimizer: peak memory", "MiB", _STEP + _PEAK),
    Program("untraced", "import gradbus.torch: processor time", "s", _BACKEND),
    Program("quick end", "end of a command", "s", _END, until_end=True),
    Program("rare collections", "start of a command: processor time", "s", _START),
    Program("freeze", "one collection of garbage", "s", _PAUSE),
)


def run_program(program: Program, is_left_out: bool) -> float:
    """Take one sample. Raises CalledProcessError: the program has failed."""
    text = f"IS_LEFT_OUT = {is_left_out}\n{program.text}"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=_LIMIT_S, check=True, env=os.environ
    )
    found = float(done.stdout.split()[-1])
    return time.monotonic() - found if program.until_end else found


def measure(sample: Callable[[bool], float], repeats: int) -> tuple[list[float], list[float]]:
    """Take so many samples with the trick and without it, by turns."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    for name in in_turns(("with", "without"), repeats):
        taken[name == "without"].append(sample(name == "without"))
    return taken[False], taken[True]


def row(trick: str, what: str, unit: str, taken: Sequence[Sequence[float]]) -> str:
    """A line of the table. ``taken``: the samples with the trick, and those without it."""
    ratios = [without / with_it for with_it, without in zip(*taken, strict=True)]
    middle = [statistics.median(samples) for samples in taken]
    gain = f"{statistics.median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})"
    return f"| {trick} | {what} | {middle[0]:.3g} {unit} | {middle[1]:.3g} {unit} | {gain} |"


def _rank_sample(figure: Calls, is_left_out: bool) -> float:
    found = run_ranks(call, 2, (figure, is_left_out), transport=figure.transport, timeout_s=_LIMIT_S)
    return float(1e3 * max(found))


def main() -> None:
    """Print one line of the table after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tricks = list(dict.fromkeys(one.trick for one in (*PROGRAMS, *CALLS)))
    parser.add_argument("--part", nargs="+", choices=tricks, default=tricks, help="Tricks to measure.")
    parser.add_argument("--repeats", type=int, default=7, help="Number of samples, each with and without the trick.")
    chosen = parser.parse_args()
    print("| trick | figure | with it | without | without / with |\n|---|---|---|---|---|", flush=True)
    for program in PROGRAMS:
        if program.trick in chosen.part:
            taken = measure(lambda out, program=program: run_program(program, out), chosen.repeats)  # type: ignore[misc]
            print(row(program.trick, program.what, program.unit, taken), flush=True)
    for transport, size_bytes in DISPATCHES if "dispatcher" in chosen.part else ():
        ranks = run_ranks(dispatch, 2, size_bytes, transport=transport, timeout_s=_LIMIT_S)
        pairs = [[1e3 * max(times) for times in zip(*pair, strict=True)] for pair in zip(*ranks, strict=True)]
        what = f"all_gather of torch.distributed, {size_text(size_bytes)}, {transport}"
        print(row("dispatcher", what, "ms", tuple(zip(*pairs, strict=True))), flush=True)
    for figure in CALLS:
        if figure.trick in chosen.part:
            taken = measure(lambda out, figure=figure: _rank_sample(figure, out), chosen.repeats)  # type: ignore[misc]
            print(row(figure.trick, figure.what, "ms", taken), flush=True)


if __name__ == "__main__":
    main()
