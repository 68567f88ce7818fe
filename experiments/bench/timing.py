"""How a benchmark takes its samples: clocks and counters of a process, and blocks of calls by turns."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

KIB, MIB = 1 << 10, 1 << 20
_BLOCK_S = 0.12
_MIN_CALLS, _MAX_CALLS = 3, 1000
_WARM_UP_CALLS = 5
_WARM_UP_S = 0.1

Block = Callable[[int], list[float]]
"""Makes so many calls, one after the other, and returns the seconds of each."""

T = TypeVar("T")


def size_text(size: int) -> str:
    """A size in bytes as in "64 KiB"."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def block(call: Callable[[], Any], calls: int) -> list[float]:
    """Seconds of each of so many calls, one after the other."""
    taken = []
    for _ in range(calls):
        began_s = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began_s)
    return taken


def in_turns(names: Iterable[str], repeats: int) -> list[str]:
    """All names in every repeat, in the opposite order in every second one, so that a drift of the machine cancels."""
    forth = list(names)
    return [name for number in range(repeats) for name in (forth[::-1] if number % 2 else forth)]


def by_turns(samples: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """So many samples of each, by turns."""
    taken: dict[str, list[T]] = {name: [] for name in samples}
    for name in in_turns(samples, repeats):
        taken[name].append(samples[name]())
    return taken


def calls_for(seconds: float, run: Block, gloo: dist.ProcessGroup, most: int = _MAX_CALLS) -> int:
    """Return how many calls take about so long, the same number on all ranks. It warms up, too."""
    calls = _WARM_UP_CALLS
    for aim_s in (_WARM_UP_S, seconds):
        typical_s = statistics.median(run(calls))
        count = torch.tensor([max(_MIN_CALLS, min(most, round(aim_s / typical_s)))])
        dist.broadcast(count, 0, group=gloo)
        calls = int(count)
    return calls


def timed(
    blocks: Mapping[str, Block], gloo: dist.ProcessGroup, repeats: int, calls: int | None = None
) -> dict[str, list[float]]:
    """The median of the calls of each repeat, by name: one block after the other, all ranks at once.

    Args:
        calls: of each block, by default as many as take 0.12 s.
    """
    counts = {name: calls or calls_for(_BLOCK_S, run, gloo) for name, run in blocks.items()}

    def sample(name: str) -> float:
        dist.barrier(group=gloo)
        return statistics.median(blocks[name](counts[name]))

    return by_turns({name: lambda name=name: sample(name) for name in blocks}, repeats)  # type: ignore[misc]


def slowest_ms(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """From what :func:`timed` gave on each rank: milliseconds of the slowest in each repeat, by name."""
    return {
        name: [1e3 * max(repeat) for repeat in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]
    }


def cpu_s() -> float:
    """Processor time of this process so far, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def memory_bytes(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> None:
    """Let ``VmHWM`` start again from the present."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed; 0 of no values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
