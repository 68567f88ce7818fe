"""Collectives through ``torch.distributed`` and on a ``Group``, against gloo in the same processes, by turns.

Real processes of one torch thread each on this machine. ``make bench PART=collectives`` compares with limits.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradbus.experiments.bench.cells import Cells, CellTimes, time_cells, time_multicast
from gradbus.experiments.bench.command import Benchmark, Part
from gradbus.experiments.bench.processes import TRANSPORTS, BenchRank, Transport, run_ranks
from gradbus.experiments.bench.results import Measurement, join_all, measurement
from gradbus.experiments.bench.timing import KIB, MIB, block, memory_bytes, reset_peak, size_text, slowest_ms, timed
from gradbus.runtime.torch_compat import available_accelerator

SIZES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 64 * MIB)
REPEATS = 15  # of 0.12 s each: with 7 of them the median of the ratios moved by 15 % from run to run
FEW_REPEATS = 7  # of what takes longer
GB = 10**9
_MAX_ENCRYPTED = 1.05  # of the time without encryption, where data goes through shared memory
_MAX_BUSY = 0.8  # of gloo's time, beside other programs
BUSY = 2  # such programs
_BOTH = ("all_reduce", "all_gather")


class Setup(NamedTuple):
    """Processes of their own. ``limits``: for each collective, the most of ours/gloo by size, where it has a limit."""

    transport: Transport
    world: int
    limits: Mapping[str, Mapping[int, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivesPlan:
    """Holds what is measured.

    Attributes:
        launches: of each set-up: from start to start the ranks lie otherwise in memory and on cores.
        repeats: blocks of each backend in one launch.
        encryption: whether what encryption costs is shown as well.
    """

    setups: Sequence[Setup]
    sizes: Sequence[int]
    launches: int
    repeats: int
    encryption: bool = False


def _setup(transport: Transport, world: int, *collectives: str, **limits: tuple[float, ...]) -> Setup:
    """``collectives``: that have no limits. ``limits``: of the others, for each of SIZES."""
    asked = {name: dict(zip(SIZES, values, strict=True)) for name, values in limits.items()}
    for name in collectives:
        asked[name] = {}
    return Setup(transport, world, asked)


SETUPS = (
    _setup("one-host", 2, all_reduce=(0.6, 0.5, 0.5, 0.4, 0.5)),
    _setup("dds-only", 2, all_reduce=(0.8, 0.9, 1.0, 1.1, 1.2), all_gather=(0.9, 1.0, 1.1, 0.9, 0.6)),
    _setup("one-host", 4, all_reduce=(0.4, 0.4, 0.8, 0.7, 0.8)),
)
PLANS = {
    "tiny": CollectivesPlan(setups=[_setup("dds-only", 2, "all_reduce")], sizes=(4 * KIB,), launches=1, repeats=2),
    "quick": CollectivesPlan(
        setups=[
            _setup("one-host", 2, "all_reduce"), _setup("dds-only", 2, *_BOTH), _setup("one-host", 4, "all_reduce"),
        ],
        sizes=(4 * KIB, MIB, 4 * MIB), launches=3, repeats=2,
    ),
    "full": CollectivesPlan(
        setups=[_setup(transport, world, *_BOTH) for world in (2, 4) for transport in TRANSPORTS],
        sizes=(*SIZES, 100 * MIB), launches=3, repeats=3,
    ),
}  # fmt: skip


def measure(chosen: argparse.Namespace) -> list[Measurement]:
    """Every cell of the suite."""
    return measure_cells(PLANS[chosen.effort])


def measure_cells(plan: CollectivesPlan) -> list[Measurement]:
    """Every cell of a plan, through ``torch.distributed`` and on a Group; and what encryption costs, if asked for."""
    found: dict[str, Measurement] = {}
    for _ in range(plan.launches):
        for setup in plan.setups:
            spec = Cells(list(setup.limits), plan.sizes, plan.repeats)
            ranks = run_ranks(time_cells, setup.world, spec, transport=setup.transport, timeout_s=600.0)
            cells = [(collective, size) for collective in spec.collectives for size in spec.sizes]
            for (collective, size), of_ranks in zip(cells, zip(*ranks, strict=True), strict=True):
                join_all(found, _figures(setup, collective, size, of_ranks, encryption=plan.encryption))
    return list(found.values())


def _figures(
    setup: Setup, collective: str, size: int, ranks: Sequence[CellTimes], *, encryption: bool
) -> Iterator[Measurement]:
    name = f"{collective} {size_text(size)}, {TRANSPORTS[setup.transport]}, world {setup.world}"
    ms = slowest_ms([rank.through_torch for rank in ranks])
    on_group = slowest_ms([rank.on_group for rank in ranks])
    limit, through_memory = setup.limits[collective].get(size), setup.transport == "one-host"
    gloo = ("gloo", ms["gloo"])
    yield measurement(name, "ms", ms["ours"], against=gloo, at_most=limit if through_memory else None)
    yield measurement(f"{name}, on a Group", "ms", on_group["Group"], against=("gloo", on_group["gloo"]))
    if encryption:
        # Over the network the limit is of what is not encrypted, for gloo does not encrypt either.
        bare = None if through_memory else limit
        yield measurement(f"{name}, not encrypted", "ms", ms["none"], against=gloo, at_most=bare)
        limit = _MAX_ENCRYPTED if through_memory else None
        yield measurement(f"{name}, encrypted", "ms", ms["ours"], against=("none", ms["none"]), at_most=limit)


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Other programs that compute all the time, for as long as the block or this process lives."""
    script = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    programs = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def measure_beside_others(transport: Transport, sizes: Sequence[int], repeats: int) -> Iterator[Measurement]:
    """all_reduce of two ranks while other programs use the cores."""
    spec = Cells(("all_reduce",), sizes, repeats)
    with busy_programs(BUSY):
        ranks = run_ranks(time_cells, 2, spec, transport=transport, timeout_s=600.0)
    for size, of_ranks in zip(sizes, zip(*ranks, strict=True), strict=True):
        ms = slowest_ms([rank.through_torch for rank in of_ranks])
        name = f"all_reduce {size_text(size)}, {TRANSPORTS[transport]}, world 2, beside {BUSY} busy programs"
        yield measurement(name, "ms", ms["ours"], against=("gloo", ms["gloo"]), at_most=_MAX_BUSY)


def measure_multicast(worlds: Sequence[int], sizes: Sequence[int], repeats: int) -> Iterator[Measurement]:
    """Collectives of a Group over DDS alone, with multicast and without it."""
    spec = Cells(("broadcast", "all_gather", "all_reduce"), sizes, repeats)
    for world in worlds:
        ranks = run_ranks(time_multicast, world, spec, transport="dds-only", timeout_s=300.0)
        names = [f"{collective} {size_text(size)}" for collective in spec.collectives for size in sizes]
        for name, of_ranks in zip(names, zip(*ranks, strict=True), strict=True):
            ms = slowest_ms(of_ranks)
            title = f"{name} by multicast, DDS only, world {world}"
            yield measurement(title, "ms", ms["multicast"], against=("unicast", ms["unicast"]))


# A step of DistributedDataParallel

DDP_LIMITS: dict[Transport, float] = {"one-host": 1.0, "dds-only": 1.1}
DDP_BATCH_SIZE = 16
_WARM_UP_STEPS = 3  # buckets are rebuilt after the first, and buffers made


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32 x 32: its first layer keeps their size."""
    from torchvision import models  # takes seconds to import

    model: nn.Module = models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def small_cnn() -> nn.Module:
    """A small network, for tests."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(3600, 10))


class Steps(NamedTuple):
    """The work of all ranks: repeats of two steps with one model."""

    model: Callable[[], nn.Module]
    repeats: int


def time_steps(place: BenchRank) -> dict[str, list[float]]:
    """The role of a rank: medians of each repeat, with the same model and data on each backend. Its spec: Steps."""
    spec: Steps = place.spec
    groups = place.start_both()
    steps = {name: _ddp_step(spec.model, place.rank, group) for name, group in groups.items()}
    for step in steps.values():
        block(step, _WARM_UP_STEPS)
    blocks = {name: partial(block, step) for name, step in steps.items()}
    medians = timed(blocks, groups["gloo"], spec.repeats, calls=2)
    dist.barrier(group=groups["gloo"])
    dist.destroy_process_group(groups["ours"])
    return medians


def _ddp_step(make_model: Callable[[], nn.Module], rank: int, group: dist.ProcessGroup) -> Callable[[], None]:
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    numbers = torch.Generator().manual_seed(1 + rank)
    images = torch.randn(DDP_BATCH_SIZE, 3, 32, 32, generator=numbers)
    labels = torch.randint(0, 10, (DDP_BATCH_SIZE,), generator=numbers)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()

    return step


def measure_steps(
    transports: Sequence[Transport], repeats: int, model: Callable[[], nn.Module] = resnet18
) -> Iterator[Measurement]:
    """A step in a world of 2, over each transport."""
    for transport in transports:
        ms = slowest_ms(run_ranks(time_steps, 2, Steps(model, repeats), transport=transport, timeout_s=600.0))
        name = f"step of {model.__name__}, batch {DDP_BATCH_SIZE}, {TRANSPORTS[transport]}, world 2"
        yield measurement(name, "ms", ms["ours"], against=("gloo", ms["gloo"]), at_most=DDP_LIMITS[transport])


# Tensors of an accelerator


class OnDevice(NamedTuple):
    """The work of all ranks: an all_reduce of tensors on a device, of each size in bytes."""

    device: str
    sizes: Sequence[int]
    repeats: int


def time_device(place: BenchRank) -> list[dict[str, list[float]]]:
    """The role of a rank: medians of each repeat, size by size, on the device and on the CPU. Its spec: OnDevice."""
    spec: OnDevice = place.spec
    groups, found = place.start_both(), []
    for size in spec.sizes:
        tensors = {"device": torch.zeros(size // 4, device=spec.device), "cpu": torch.zeros(size // 4)}
        blocks = {
            name: partial(block, partial(dist.all_reduce, tensor, group=groups["ours"]))
            for name, tensor in tensors.items()
        }
        found.append(timed(blocks, groups["gloo"], spec.repeats))
    dist.barrier(group=groups["gloo"])
    dist.destroy_process_group(groups["ours"])
    return found


def measure_device(
    transport: Transport, sizes: Sequence[int], repeats: int, device: str | None = None
) -> Iterator[Measurement]:
    """Time an all_reduce of two ranks that share the first accelerator, or ``device``, beside the same on the CPU."""
    if device is None:
        accelerator = available_accelerator()
        if accelerator is None:
            print("gpu: skipped, as torch finds no accelerator on this machine", file=sys.stderr)
            return
        device = f"{accelerator.type}:0"
    ranks = run_ranks(time_device, 2, OnDevice(device, sizes, repeats), transport=transport, timeout_s=600.0)
    for size, of_ranks in zip(sizes, zip(*ranks, strict=True), strict=True):
        ms = slowest_ms(of_ranks)
        name = f"all_reduce {size_text(size)} on {device}, {TRANSPORTS[transport]}, world 2"
        yield measurement(name, "ms", ms["device"], against=("cpu", ms["cpu"]))


# Memory


def reduce_big(place: BenchRank) -> tuple[int, float]:
    """The role of a rank: bytes above what it had, and seconds, of one collective. Its spec: bytes of the tensor."""
    place.start("dds")
    small = torch.zeros(MIB // 4)
    for _ in range(3):
        dist.all_reduce(small)
    dist.barrier()
    reset_peak()
    baseline = memory_bytes("VmRSS")
    tensor = torch.arange(place.spec // 4, dtype=torch.float32)
    dist.barrier()
    began_s = time.perf_counter()
    dist.all_reduce(tensor)
    took_s = time.perf_counter() - began_s
    above = memory_bytes("VmHWM") - baseline
    dist.destroy_process_group()
    return above, took_s


def measure_memory(transports: Sequence[Transport], size: int = GB) -> Iterator[Measurement]:
    """Peak memory of one large all_reduce of two ranks, over each transport."""
    for transport in transports:
        above, took_s = map(max, zip(*run_ranks(reduce_big, 2, size, transport=transport), strict=True))
        note = f"VmHWM above VmRSS before the tensor was made, tensor included, worst rank; first call {took_s:.2f} s"
        name = f"peak memory, all_reduce of {size / GB:g} GB, {TRANSPORTS[transport]}, world 2"
        yield measurement(name, "tensors", [above / size], at_most=3, note=note)


# The command


def size_of(text: str) -> int:
    """The bytes in "64KiB". Raises ArgumentTypeError: it is no size, or not of whole float32."""
    found = re.fullmatch(r"(\d+) *(KiB|MiB|B?)", text)
    size = int(found[1]) * {"KiB": KIB, "MiB": MIB}.get(found[2], 1) if found else 0
    if size < 4 or size % 4:
        raise argparse.ArgumentTypeError(f"a size is a multiple of 4 bytes, such as 64KiB, got {text!r}")
    return size


def _options(parser: argparse.ArgumentParser) -> None:
    few = f"whole repeats, for medians; by default {REPEATS}, or {FEW_REPEATS} of what takes long"
    parser.add_argument("--repeats", type=int, help=few)
    parser.add_argument("--sizes", nargs="+", type=size_of, help="of tensors, such as 4KiB 1MiB")
    parser.add_argument("--world", type=int, help="only set-ups with so many ranks")
    only = "only this; one-host: what the backend picks by itself"
    parser.add_argument("--transport", choices=list(TRANSPORTS), help=only)


def _measure_checked(chosen: argparse.Namespace) -> list[Measurement]:
    setups = [it for it in SETUPS if chosen.world in (None, it.world) and chosen.transport in (None, it.transport)]
    if not setups:
        raise ValueError(f"there are no limits for {chosen.world} ranks, {chosen.transport or 'any transport'}")
    repeats = chosen.repeats or REPEATS
    return measure_cells(
        CollectivesPlan(setups=setups, sizes=chosen.sizes or SIZES, launches=1, repeats=repeats, encryption=True)
    )


def _transports(chosen: argparse.Namespace) -> Sequence[Transport]:
    return (chosen.transport,) if chosen.transport else tuple(TRANSPORTS)


_SMALL, _LARGE = (4 * KIB, 64 * KIB, MIB), (64 * KIB, MIB, 16 * MIB)
_PARTS = {
    "collectives": Part(_measure_checked, "all_reduce and all_gather, worlds 2 and 4", 180),
    "busy": Part(
        lambda it: measure_beside_others(it.transport or "one-host", it.sizes or _SMALL, it.repeats or REPEATS),
        "all_reduce while two other programs use the cores", 60,
    ),
    "multicast": Part(
        lambda it: measure_multicast(
            [it.world] if it.world else (3, 4, 8), it.sizes or _LARGE, it.repeats or FEW_REPEATS
        ),
        "what goes to all ranks, with multicast and without", 120,
    ),
    # The two differ by a hundredth, and repeats scatter by two of them: so there are many.
    "ddp": Part(
        lambda it: measure_steps(_transports(it), 6 * (it.repeats or FEW_REPEATS) + 1),
        "a step of DistributedDataParallel", 210,
    ),
    "gpu": Part(
        lambda it: measure_device(it.transport or "one-host", it.sizes or _LARGE, it.repeats or FEW_REPEATS),
        "all_reduce of tensors on a GPU, against the CPU; skipped where there is none", 20,
    ),
    "big": Part(lambda it: measure_memory(_transports(it)), "memory for a tensor of 1 GB", 30),
}  # fmt: skip
BENCHMARK = Benchmark(__doc__ or "", _PARTS, _options)
