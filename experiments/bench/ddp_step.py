"""A step of DistributedDataParallel, dds and gloo by turns in the same processes: a part of bench-collectives."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradbus.experiments.bench.limits import Row, Taken, at_most, failed
from gradbus.experiments.bench.processes import TRANSPORTS, BenchRank, ProcessFailed, Transport, run_ranks
from gradbus.experiments.bench.timing import block, in_turns, ratio_note, ratios_of

LIMITS: dict[Transport, float] = {"one-host": 1.0, "dds-only": 1.1}
BATCH_SIZE = 16
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


MODELS: dict[str, Callable[[], nn.Module]] = {"ResNet-18": resnet18, "small": small_cnn}


class Steps(NamedTuple):
    """The work of all ranks: repeats of so many steps with one of MODELS."""

    model: str
    steps: int
    repeats: int


class _Trained:
    """One model, data parallel on a process group. Same model and data for every group."""

    def __init__(self, place: BenchRank, group: dist.ProcessGroup) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(MODELS[place.spec.model](), process_group=group)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        numbers = torch.Generator().manual_seed(1 + place.rank)
        self._images = torch.randn(BATCH_SIZE, 3, 32, 32, generator=numbers)
        self._labels = torch.randint(0, 10, (BATCH_SIZE,), generator=numbers)

    def step(self) -> None:
        """Forward, backward, update."""
        self._optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(self.model(self._images), self._labels))
        self._optimizer.step()


def time_steps(place: BenchRank) -> dict[str, Any]:
    """The role of a rank: medians of each repeat. Its spec: Steps.

    Raises:
        RuntimeError: the models of the two groups differ after the same steps.
    """
    spec: Steps = place.spec
    groups = place.start_both()
    trained = {name: _Trained(place, group) for name, group in groups.items()}
    for one in trained.values():
        block(one.step, _WARM_UP_STEPS)
    medians: dict[str, list[float]] = {name: [] for name in trained}
    for name in in_turns(trained, spec.repeats):
        dist.barrier(group=groups["gloo"])
        medians[name].append(statistics.median(block(trained[name].step, spec.steps)))
    ours, gloo = (list(one.model.parameters()) for one in trained.values())
    if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(ours, gloo, strict=True)):
        raise RuntimeError("after the same steps the two models have different parameters")
    dist.barrier(group=groups["gloo"])
    dist.destroy_process_group(groups["ours"])
    return {"median_s": medians, "elements": sum(parameter.numel() for parameter in ours)}


def step_rows(
    transports: Iterable[Transport] = TRANSPORTS, *, repeats: int = 7, steps: int = 2, model: str = "ResNet-18"
) -> Taken:
    """A row for each transport, world 2."""
    rows: list[Row] = []
    taken: dict[str, Any] = {}
    for transport in transports:
        name = f"step of {model}, batch {BATCH_SIZE}, {TRANSPORTS[transport]}, world 2"
        try:
            found = run_ranks(time_steps, 2, Steps(model, steps, repeats), transport=transport, timeout_s=600.0)
        except ProcessFailed as error:
            rows.append(failed(name, error))
            continue
        taken[name] = found
        ratios, ms = ratios_of(found)
        note = ratio_note(ratios, ms, "ours", "gloo")
        rows.append(at_most(name, statistics.median(ratios["ours"]), LIMITS[transport], "x gloo", note))
    return rows, taken
