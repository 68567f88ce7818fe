"""Parameter servers: accuracy with bounded staleness and a slow worker, bytes into each server, the time of a step.

Real processes, one per worker and server, over real DDS on this machine. That a synchronous run is bit-equal to one
process is not measured here: ``tests/actors/parameter_server/test_synchronous_runs.py`` checks it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import gradbus
from gradbus import models
from gradbus.actors.parameter_server.server import ParameterServer
from gradbus.actors.parameter_server.worker import ParameterServerWorker
from gradbus.experiments.bench.command import Benchmark, Part
from gradbus.experiments.bench.processes import BenchRank, run_ranks
from gradbus.experiments.bench.results import Measurement, measurement
from gradbus.experiments.bench.training import Training, train
from gradbus.runtime.config.parameter_server import ParameterServerSettings

_LR = 0.05
_SLOW_S = 0.004  # more than a step of the perceptron takes


class _Slowed(models.ClassificationTask):
    """Worker 1 waits before each batch."""

    def batches(self, *, rank: int, world: int, epoch: int, seed: int) -> Iterator[Any]:
        for batch in super().batches(rank=rank, world=world, epoch=epoch, seed=seed):
            if rank == 1:
                time.sleep(_SLOW_S)
            yield batch


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedTraining:
    """A run with parameter servers. ``training``: the rest of it; ``is_slowed``: worker 1 is slow."""

    training: Training
    workers: int
    settings: dict[str, Any] = field(default_factory=dict)
    is_slowed: bool = False

    def task(self) -> models.ClassificationTask:
        """Model, data and loss."""
        run = self.training
        kind = _Slowed if self.is_slowed else models.ClassificationTask
        return kind(run.model, run.split, batch_size=run.batch_size, seed=run.config.get("seed", 0))


async def _take_part(place: BenchRank) -> dict[str, Any]:
    run: ServedTraining = place.spec
    config = gradbus.DataParallelConfig(**run.training.config)
    settings = ParameterServerSettings(**run.settings)
    async with place.group() as network:
        if place.rank >= run.workers:
            summary = await ParameterServer(network, run.task(), config, settings).run()
            return {"bytes_in": summary.bytes_in, "held_bytes": summary.held_bytes}
        async with network.subgroup(range(run.workers), name="workers") as workers:
            worker = ParameterServerWorker(workers, network, run.task(), config, settings)
            epochs = [report.to_json() async for report in worker.epochs()]
    return {"epochs": epochs, "accuracy": worker.summary.accuracy}


def serve(run: ServedTraining, *, timeout_s: float = 600.0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train in one process for each worker and server. Returns what workers and what servers found.

    Raises:
        ProcessFailed: one of them failed, or some had not ended in time.
    """
    found = run_ranks(_take_part, run.workers + run.settings["servers"], run, timeout_s=timeout_s)
    return found[: run.workers], found[run.workers :]


def measure_accuracy(
    *, seeds: int = 3, epochs: int = 2, data: Any = "mnist", most: float = 0.5
) -> Iterator[Measurement]:
    """The perceptron with three workers, of which one is slow, and two servers. A sample is a seed."""
    percent: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    stale: list[dict[str, float]] = []
    for seed in range(seeds):
        for name, more in (
            ("synchronous", {}),
            ("asynchronous, staleness 4", {"mode": "asynchronous", "staleness": 4}),
        ):
            config = {"epochs": epochs, "optimizer": {"lr": _LR}, "seed": seed}
            training = Training(model=models.mnist_mlp, batch_size=64, config=config, data=data)
            settings = {"servers": 2, "cut_bytes": 1 << 18, **more}
            workers, _ = serve(ServedTraining(training=training, workers=3, settings=settings, is_slowed=True))
            last = workers[0]["epochs"][-1]
            percent.setdefault(name, []).append(100 * workers[0]["accuracy"])
            seconds.setdefault(name, []).append(statistics.mean(epoch["seconds"] for epoch in workers[0]["epochs"]))
            stale += [last["train_metrics"]] if more else []
    measured = ", ".join(f"{one['staleness_mean']:.2f} ({one['staleness_max']:.0f})" for one in stale)
    for name, values in percent.items():
        note = f"staleness of gradients in the last epoch, mean (maximum): {measured}" if "stale" in name else ""
        yield measurement(f"MLP, 3 workers, one slow, {name}: test accuracy", "%", values, note=note)
    (synchronous, asynchronous) = percent.values()
    gaps = [one - other for one, other in zip(synchronous, asynchronous, strict=True)]
    note = "by seed: " + ", ".join(f"{gap:+.2f}" for gap in gaps)
    yield measurement(
        "asynchronous with staleness 4: points below synchronous",
        "points",
        [statistics.mean(gaps)],
        at_most=most,
        note=note,
    )
    for name, values in seconds.items():
        yield measurement(f"epoch of it, {name}", "s", values)


def measure_bytes(
    cases: Sequence[tuple[int, int]] = ((2, 1), (4, 1), (4, 2), (4, 4)), *, steps: int = 10
) -> Iterator[Measurement]:
    """Payload into the busiest server in a step, over N K / S: the difference of a long and a short run."""
    for workers, servers in cases:
        taken = {}
        for count in (steps, 2 * steps):
            config = {"max_steps": count, "epochs": 100, "eval_every_epochs": 0}
            training = Training(
                model=functools.partial(models.mnist_mlp, hidden=64),
                batch_size=4,
                config=config,
                samples=1000,
                data="glyphs",
            )
            settings = {"servers": servers, "cut_bytes": 1024}
            _, held = serve(ServedTraining(training=training, workers=workers, settings=settings))
            taken[count] = [server["bytes_in"] for server in held]
            weights = sum(server["held_bytes"] for server in held)
        a_step = max((after - before) / steps for before, after in zip(taken[steps], taken[2 * steps], strict=True))
        asked = workers * weights / servers
        note = f"{a_step:,.0f} B, N K / S is {asked:,.0f} B; K {weights:,} B"
        title = f"bytes into a server in a step, {workers} workers, {servers} servers, over N K / S"
        yield measurement(title, "x", [a_step / asked], at_most=1.03, note=note)


def measure_step(model: Any = models.mnist_cnn, *, repeats: int = 3, steps: int = 60) -> Iterator[Measurement]:
    """A synchronous step of two workers and two servers, against one of two ranks without a server, by turns."""
    config = {"max_steps": steps, "epochs": 100, "eval_every_epochs": 0, "hash_every": 0, "optimizer": {"lr": _LR}}
    training = Training(model=model, batch_size=16, config=config, samples=512, data="glyphs")
    ms: dict[str, list[float]] = {"served": [], "dense": []}
    for _ in range(repeats):
        settings = {"servers": 2, "cut_bytes": 1 << 18}
        workers, _ = serve(ServedTraining(training=training, workers=2, settings=settings))
        ranks = train(training)
        for name, found in (("served", workers), ("dense", ranks)):
            ms[name].append(1e3 * statistics.median(epoch["step_s_mean"] for epoch in found[0]["epochs"]))
    title = "synchronous step, CNN, batch 16, 2 workers and 2 servers"
    yield measurement(title, "ms", ms["served"], against=("2 ranks without a server", ms["dense"]))


BENCHMARK = Benchmark(
    __doc__ or "",
    {
        "bytes": Part(lambda _: measure_bytes(), "into each server", 90),
        "step": Part(lambda _: measure_step(), "a step with servers, and without", 60),
        "accuracy": Part(lambda _: measure_accuracy(), "with a slow worker, 6 runs of 2 epochs", 150, needs_mnist=True),
    },
)
