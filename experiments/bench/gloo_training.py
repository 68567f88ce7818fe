"""Stock DistributedDataParallel on gloo, as the reference of data-parallel benchmarks: dense, or PyTorch's PowerSGD."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradbus.experiments.bench.processes import BenchRank
from gradbus.experiments.bench.training import Training
from gradbus.runtime import fast_paths

_MIN_RATE = 2  # of PyTorch's hook, as of ours


@dataclass(frozen=True, kw_only=True, slots=True)
class GlooRun:
    """A run of so many steps with SGD.

    Attributes:
        powersgd_rank: of PyTorch's hook, which sends whole gradients in the first two steps; None: dense.
        evaluates: whether rank 0 looks at the test set at the end.
    """

    training: Training
    steps: int
    lr: float = 0.05
    momentum: float = 0.9
    powersgd_rank: int | None = None
    evaluates: bool = False


class GlooTimes(NamedTuple):
    """Holds what a rank found: seconds of each step, and the share of the test set that is right, where it was asked
    for."""

    steps_s: list[float]
    accuracy: float | None


def bytes_of_torchs_hook(model: nn.Module, rank: int, world: int) -> float:
    """Return what a rank sends in a step with PyTorch's hook: 2 (N - 1) / N of both factors of each matrix that it
    compresses, and of the other tensors."""
    entries = 0
    for tensor in model.parameters():
        rows = tensor.shape[0] if tensor.dim() > 1 else 1
        columns = tensor.numel() // rows
        factors = (rows + columns) * min(rows, columns, rank)
        entries += factors if tensor.dim() > 1 and factors * _MIN_RATE < tensor.numel() else tensor.numel()
    return 2 * (world - 1) / world * 4 * entries


def train_on_gloo(place: BenchRank) -> GlooTimes:
    """The role of a rank. Its spec: GlooRun."""
    run: GlooRun = place.spec
    fast_paths.keep_memory()  # as every process with a bus: it saves training page faults that are not gloo's doing
    place.start("gloo")
    task = run.training.task()
    model = task.build_model()
    # One bucket for the hook: with several, its collectives come in another order on each rank, and gloo takes one for
    # another ("op.preamble.length <= op.nbytes").
    parallel = DistributedDataParallel(model, bucket_cap_mb=None if run.powersgd_rank is None else 1000)
    if run.powersgd_rank is not None:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=run.powersgd_rank, start_powerSGD_iter=2, min_compression_rate=_MIN_RATE
        )
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum)
    seed = run.training.config.get("seed", 0)
    taken: list[float] = []
    epoch = 0
    while len(taken) < run.steps:
        began_s = time.perf_counter()
        for batch in task.batches(rank=place.rank, world=place.world, epoch=epoch, seed=seed):
            optimizer.zero_grad()
            torch.autograd.backward(task.loss(parallel, batch))
            optimizer.step()
            ended_s = time.perf_counter()
            taken.append(ended_s - began_s)
            began_s = ended_s
            if len(taken) == run.steps:
                break
        epoch += 1
    found = task.evaluate(model) if run.evaluates and place.rank == 0 else None
    dist.barrier()
    dist.destroy_process_group()
    return GlooTimes(taken, found.accuracy if found else None)
