"""A program whose event loop is watched while an actor of gradbus starts on it; a fresh process for each measurement.

    python -m gradbus.experiments.bench.loop_host client --job cold --domain 22 [--preload]

It prints one line of JSON, the fields of :class:`HostGaps`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import gradbus
from gradbus.experiments.bench.ticker import loop_gaps

if TYPE_CHECKING:
    from gradbus.models import ClassificationTask

IDLE_S = 3.0
ROUNDS = 2
STEPS = 6
SAMPLES = 512  # of a client and round: a training of about a second


@dataclass(frozen=True, slots=True)
class HostGaps:
    """What a host has measured of its event loop.

    Attributes:
        idle_s: the longest delay while the loop had nothing to do. loop_s: from connect to the end of the run. held_s:
            the same without the time for which the loop's thread had no core, as other processes took it.
        starts_s: from connect until the actor runs. seconds: of the whole run. preload_s: of gradbus.preload.
        ticks: of the run; far fewer than its milliseconds where the loop stood.
    """

    idle_s: float
    loop_s: float
    held_s: float
    starts_s: float
    seconds: float
    preload_s: float
    ticks: int


def make_task() -> ClassificationTask:
    """Return the CNN of 4.8 MB on images that are drawn from a generator."""
    import torch

    from gradbus import models

    torch.set_num_threads(1)

    def data() -> models.DataSplit:
        generator = torch.Generator().manual_seed(7)
        images = torch.randn(2 * SAMPLES, 1, 28, 28, generator=generator)
        labels = torch.randint(10, (2 * SAMPLES,), generator=generator)
        noise = models.Dataset("noise", images, labels)
        return models.DataSplit(noise, noise)

    return models.ClassificationTask(models.mnist_cnn, data)


def rules(folder: Path | None = None) -> gradbus.FederatedConfig:
    """Return the rules of the run, with checkpoints in a folder."""
    return gradbus.FederatedConfig(
        rounds=ROUNDS,
        clients={"num": 1, "start_timeout_s": 60.0},
        training={"epochs": 1, "subset_size": SAMPLES, "lr": 0.01},
        checkpoint={"dir": folder},
    )


def steps() -> gradbus.DataParallelConfig:
    """Return the rules of the data-parallel run."""
    return gradbus.DataParallelConfig(epochs=1, max_steps=STEPS, timeouts={"join_s": 60.0})


async def be_client(bus: gradbus.Bus, task: Any, folder: Path | None) -> None:
    """Take part in the rounds."""
    config = gradbus.ClientConfig(controller_timeout_s=60.0, state_dir=folder)
    await gradbus.Client(bus, task, client_id=0, config=config).run()


async def be_controller(bus: gradbus.Bus, task: Any, folder: Path | None) -> None:
    """Run the rounds."""
    await gradbus.Controller(bus, task, rules(folder)).run()


async def be_worker(bus: gradbus.Bus, task: Any, folder: Path | None, rank: int = 1) -> None:
    """Be a rank of two."""
    async with gradbus.join_group(bus, rank=rank, world=2, timeout_s=60.0) as group:
        async for _ in gradbus.Worker(group, task, steps()).epochs():
            pass


ROLES: dict[str, Callable[[gradbus.Bus, Any, Path | None], Coroutine[Any, Any, None]]] = {
    "client": be_client,
    "controller": be_controller,
    "worker": be_worker,
}


async def _host(given: argparse.Namespace, folder: Path, stacks: TextIO | None) -> HostGaps:
    async with loop_gaps() as idle:
        await asyncio.sleep(IDLE_S)
    held_s: list[float] = []
    async with loop_gaps(stacks=stacks, late_s=given.late_s, held_s=held_s) as gaps:
        began_s = time.perf_counter()
        async with gradbus.connect(given.job, domain=given.domain) as bus:
            task = await asyncio.to_thread(make_task)  # what a host imports for itself is not measured
            starts_s = time.perf_counter() - began_s
            await ROLES[given.role](bus, task, folder)
        seconds = time.perf_counter() - began_s
    return HostGaps(max(idle), max(gaps), max(held_s), starts_s, seconds, 0.0, len(gaps))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=list(ROLES))
    parser.add_argument("--job", required=True)
    parser.add_argument("--domain", type=int, required=True)
    parser.add_argument("--preload", action="store_true", help="call gradbus.preload before the loop starts")
    parser.add_argument("--stacks", type=Path, help="file for the stacks of all threads when the loop is late")
    parser.add_argument("--late-s", type=float, default=0.05, help="that late (%(default)s s)")
    given = parser.parse_args(arguments)
    began_s = time.perf_counter()
    if given.preload:
        gradbus.preload()
    preload_s = time.perf_counter() - began_s
    with tempfile.TemporaryDirectory(prefix="gradbus-loop-") as folder, contextlib.ExitStack() as stack:
        stacks = stack.enter_context(given.stacks.open("w", encoding="utf-8")) if given.stacks else None
        found = asyncio.run(_host(given, Path(folder), stacks))
    json.dump(asdict(found) | {"preload_s": preload_s}, sys.stdout)


if __name__ == "__main__":
    main()
