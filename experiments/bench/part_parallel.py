"""A data-parallel step: dense, DGC, and stock DistributedDataParallel on gloo. Same model, same data, world 2.

Each runs in processes of its own, by turns, so that none has threads of another beside it. malloc is set for all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradbus import models
from gradbus.experiments.bench.results import Effort, Figure, figure
from gradbus.experiments.bench_collectives_ranks import Place
from gradbus.experiments.bench_collectives_ranks import run_ranks as run_places
from gradbus.experiments.bench_collectives_timing import in_turns
from gradbus.experiments.bench_ddp_process import Training, run_ranks
from gradbus.runtime.dds import malloc

_WORLD = 2
_LR = 0.05
_SAMPLES = 512  # generated digits: what a step costs does not depend on them
_MODELS: dict[str, Callable[..., nn.Module]] = {"CNN": models.mnist_cnn, "MLP": models.mnist_mlp}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """``launches``: of each way. ``steps``: that count, after ``warm_up``. ``batch_size``: of one rank."""

    launches: int
    steps: int
    warm_up: int = 8
    batch_size: int = 16
    model: str = "CNN"


PLANS: dict[Effort, Plan] = {
    "tiny": Plan(launches=1, steps=3, warm_up=2, model="MLP"),
    "quick": Plan(launches=3, steps=24),
    "full": Plan(launches=7, steps=60, batch_size=64),
}


def measure(effort: Effort) -> list[Figure]:
    """Dense and DGC, each against gloo."""
    plan = PLANS[effort]
    ways: dict[str, Callable[[], float]] = {
        "dense": lambda: _worker_step_s(plan, exchange="dense"),
        "DGC": lambda: _worker_step_s(plan, exchange="dgc", warmup="none"),
        "gloo": lambda: _gloo_step_s(plan),
    }
    ms: dict[str, list[float]] = {name: [] for name in ways}
    for name in in_turns(ways, plan.launches):
        ms[name].append(1e3 * ways[name]())
    where = f"{plan.model}, batch {plan.batch_size}, world {_WORLD}, one host"
    against = ("gloo DDP", ms["gloo"])
    return [figure(f"step, {name}, {where}", "ms", ms[name], against=against) for name in ("dense", "DGC")]


def _training(plan: Plan, **config: Any) -> Training:
    settings = {
        "max_steps": plan.warm_up + plan.steps, "epochs": 100_000, "hash_every": 0, "eval_every_epochs": 0,
        "profile_window_steps": 1, "lr": _LR, **config,
    }  # fmt: skip
    return Training(
        world=_WORLD, model=_MODELS[plan.model], batch_size=plan.batch_size, config=settings, samples=_SAMPLES,
        data="glyphs",
    )  # fmt: skip


def _worker_step_s(plan: Plan, **config: Any) -> float:
    """Median step of :class:`gradbus.Worker`, of the slower rank in each."""
    found = run_ranks(_training(plan, **config))
    steps = [[window["step_s"] for window in rank["windows"][plan.warm_up :]] for rank in found]
    return _of_slower_rank(steps)


def _gloo_step_s(plan: Plan) -> float:
    found = run_places(gloo_steps, _WORLD, "one-host", {"plan": plan})
    return _of_slower_rank([rank["step_s"] for rank in found])


def _of_slower_rank(steps_s: Sequence[Sequence[float]]) -> float:
    return float(statistics.median(max(of_step) for of_step in zip(*steps_s, strict=True)))


def gloo_steps(place: Place) -> dict[str, Any]:
    """The role of a rank: seconds of each step. Its spec: ``plan``."""
    plan: Plan = place.spec["plan"]
    malloc.keep_memory()  # as every process with a bus: it saves training page faults that are not gloo's doing
    place.start("gloo")
    task = _training(plan).task()
    model = task.build_model()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.9)
    taken: list[float] = []
    epoch = 0
    while len(taken) < plan.warm_up + plan.steps:
        began_s = time.perf_counter()
        for batch in task.batches(rank=place.rank, world=place.world, epoch=epoch, seed=0):
            optimizer.zero_grad()
            torch.autograd.backward(task.loss(parallel, batch))
            optimizer.step()
            ended_s = time.perf_counter()
            taken.append(ended_s - began_s)
            began_s = ended_s
        epoch += 1
    dist.barrier()
    dist.destroy_process_group()
    return {"step_s": taken[plan.warm_up : plan.warm_up + plan.steps]}
