"""What process groups leave behind in a process and on the machine, and the memory that one large collective takes."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradbus.experiments.bench_children import ChildFailed
from gradbus.experiments.bench_collectives_ranks import TRANSPORTS, Place, Transport, failed, new_group, run_ranks
from gradbus.experiments.bench_process import LEASE_S, memory_bytes, reset_peak
from gradbus.experiments.bench_rows import Row, at_most, shown

GB = 10**9
_SHARED = ("/memfd:", "/dev/shm/", "/dev/zero", "/SYSV")  # how the kernel names what processes share
_SHM = Path("/dev/shm")
_SETTLE_S = 10.0
_TENSOR_BYTES = 1 << 20
_LAST_TENSOR_BYTES = 64 << 20  # under way when the rank is killed
_CHECKED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process holds, by the kernel's tables.

    Attributes:
        threads: name by id. segments: name by inode, of shared memory that is open or mapped here, or has a name in
            /dev/shm. files: number of open descriptors.
    """

    threads: dict[int, str]
    segments: dict[int, str]
    files: int

    @classmethod
    def now(cls) -> Holdings:
        """Of this process."""
        threads, segments, files = {}, dict(_named_segments()), 0
        python = {thread.native_id: thread.name for thread in threading.enumerate()}
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                threads[int(task.name)] = python.get(int(task.name)) or (task / "comm").read_text().strip()
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                target, inode = os.readlink(descriptor), descriptor.stat().st_ino
                files += 1
                if target.startswith(_SHARED):
                    segments[inode] = target
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(_SHARED):
                segments[int(fields[4])] = fields[5]
        return cls(threads, segments, files)

    def since(self, before: Holdings) -> dict[str, list[str]]:
        """What was not there before."""
        return {
            "threads": [name for thread, name in self.threads.items() if thread not in before.threads],
            "segments": [name for inode, name in self.segments.items() if inode not in before.segments],
        }


def _named_segments() -> dict[int, str]:
    found = {}
    for path in _SHM.iterdir():
        with suppress(OSError):
            found[path.stat().st_ino] = str(path)
    return found


def _settled(before: Holdings) -> dict[str, Any]:
    """What is left, at the latest after some seconds: threads need a moment to end. ``in_cycles``: so many of these
    things nobody uses any more, and Python's collector of reference cycles finds them."""
    until_s = time.monotonic() + _SETTLE_S
    while True:
        now = Holdings.now()
        left = now.since(before)
        if not any(left.values()) or time.monotonic() > until_s:
            break
        time.sleep(0.02)
    gc.collect()
    for_good = Holdings.now().since(before)
    in_cycles = {kind: len(names) - len(for_good[kind]) for kind, names in left.items()}
    return {**left, "in_cycles": in_cycles, "files": now.files - before.files}


def make_and_destroy(place: Place) -> dict[str, Any]:
    """The role of a rank: many groups of ours, each with a collective; most of them while another one is there, so that
    the bus stays open; the others open it and close it. Its spec: ``groups``.
    """
    place.start("gloo")
    before = Holdings.now()
    began_s = time.perf_counter()
    number = place.spec["groups"]
    keeper = _used_group()
    most = number - 1 - number // 10
    for _ in range(most):
        dist.destroy_process_group(_used_group())
    dist.destroy_process_group(keeper)
    for _ in range(number - 1 - most):
        dist.destroy_process_group(_used_group())
    took_s = time.perf_counter() - began_s
    return {**_settled(before), "took_s": took_s}


def _used_group() -> dist.ProcessGroup:
    group = new_group()
    tensor = torch.ones(_TENSOR_BYTES // 4)
    dist.all_reduce(tensor, group=group)
    if not bool((tensor == dist.get_world_size()).all()):
        raise RuntimeError("all_reduce in a new group: a wrong result")
    return group


def outlive_a_rank(place: Place) -> dict[str, Any]:
    """The role of a rank: the last one is killed in the middle of a collective; the others report what they have left.

    Raises:
        RuntimeError: the collective did not fail.
    """
    before = Holdings.now()
    place.start("dds")
    tensor = torch.zeros(_TENSOR_BYTES // 4)
    for _ in range(3):
        dist.all_reduce(tensor)
    tensor = torch.zeros(_LAST_TENSOR_BYTES // 4)
    dist.barrier()
    began_s = time.monotonic()
    if place.rank == place.world - 1:
        dist.all_reduce(tensor, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.all_reduce(tensor)
    except RuntimeError as error:
        text, after_s = str(error), time.monotonic() - began_s
    dist.destroy_process_group()
    return {**_settled(before), "text": text, "after_s": after_s}


def leftover_rows(
    transport: Transport = "one-host", *, groups: int = 100, lease_s: float = 1.0
) -> tuple[list[Row], dict[str, Any]]:
    """Segments and threads left after many groups, and after the death of a rank, which is known after ``lease_s``."""
    rows: list[Row] = []
    taken: dict[str, Any] = {}
    for role, world, last_dies, what in (
        (make_and_destroy, 2, False, f"after {groups} groups made and destroyed"),
        (outlive_a_rank, 3, True, "after kill -9 of a rank of three"),
    ):
        before = _named_segments()
        lease = lease_s if last_dies else LEASE_S
        try:
            found = run_ranks(role, world, transport, {"groups": groups}, last_dies=last_dies, lease_s=lease)
        except ChildFailed as error:
            rows.append(failed(f"left {what}", error))
            continue
        taken[what] = found
        there = [name for inode, name in _named_segments().items() if inode not in before]
        for kind, name in (("segments", "shared-memory segments"), ("threads", "threads")):
            names = [name for of_rank in found for name in of_rank[kind]] + (there if kind == "segments" else [])
            note = f"{len(found)} ranks, and /dev/shm"
            if names:
                in_cycles = sum(of_rank["in_cycles"][kind] for of_rank in found)
                note = f"{', '.join(sorted(set(names))[:5])}; {in_cycles} of them in reference cycles"
            rows.append(Row(f"{name} left {what}", "none", len(names), "", not names, note))
        if not last_dies:
            took = f"world {world}, {max(of_rank['took_s'] for of_rank in found):.1f} s in all"
            rows.append(shown(f"open files left {what}", max(of_rank["files"] for of_rank in found), "", took))
        else:
            after_s = max(of_rank["after_s"] for of_rank in found)
            rows.append(shown(f"until the others know, {what}", after_s, "s", found[0]["text"][:100]))
    return rows, taken


def reduce_big(place: Place) -> dict[str, Any]:
    """The role of a rank: one collective on a tensor of ``bytes``, and the memory of the process meanwhile.

    Raises:
        RuntimeError: the result is wrong.
    """
    place.start("dds")
    small = torch.zeros(_TENSOR_BYTES // 4)
    for _ in range(3):
        dist.all_reduce(small)
    dist.barrier()
    reset_peak()
    baseline = memory_bytes("VmRSS")
    elements = place.spec["bytes"] // 4
    tensor = torch.arange(elements, dtype=torch.float32).mul_(1 + place.rank)
    dist.barrier()
    began_s = time.perf_counter()
    dist.all_reduce(tensor)
    took_s = time.perf_counter() - began_s
    peak = memory_bytes("VmHWM")
    for start in range(0, elements, _CHECKED_AT_ONCE):
        one = torch.arange(start, min(elements, start + _CHECKED_AT_ONCE), dtype=torch.float32)
        expected = one.clone()
        for rank in range(1, place.world):
            expected += one * (1 + rank)
        if not torch.equal(tensor[start : start + len(one)], expected):
            raise RuntimeError(f"all_reduce of {elements} elements: wrong from {start} on")
    dist.destroy_process_group()
    return {"baseline_bytes": baseline, "peak_bytes": peak, "took_s": took_s}


def big_rows(transports: Iterable[Transport] = TRANSPORTS, *, size: int = GB) -> tuple[list[Row], dict[str, Any]]:
    """A row for each transport, world 2."""
    rows: list[Row] = []
    taken: dict[str, Any] = {}
    for transport in transports:
        name = f"peak memory, all_reduce of {size / GB:g} GB, {TRANSPORTS[transport]}, world 2"
        try:
            found = run_ranks(reduce_big, 2, transport, {"bytes": size})
        except ChildFailed as error:
            rows.append(failed(name, error))
            continue
        taken[name] = found
        above = max(of_rank["peak_bytes"] - of_rank["baseline_bytes"] for of_rank in found)
        took_s = max(of_rank["took_s"] for of_rank in found)
        note = f"VmHWM above VmRSS before the tensor was made, tensor included, worst rank; first call {took_s:.2f} s"
        rows.append(at_most(name, above / size, 3, "tensors", note))
    return rows, taken
