"""A regression task for data-parallel tests, and the same training in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradbus.models import Metric

SAMPLES, BATCH, WIDTH = 96, 16, 6
STEPS = SAMPLES // BATCH  # of an epoch
_DRAWN = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))
INPUTS, TARGETS = _DRAWN, _DRAWN.sum(1, keepdim=True).sin()


@dataclass(frozen=True)
class Found:
    """What a rank found on its part of the test set: no right answers in a regression."""

    total: int
    loss_sum: float
    metrics: Mapping[str, Any] = field(default_factory=dict)


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """The same at every call: by a generator of its own, as other ranks build theirs on other threads meanwhile."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


class Regression:
    """All ranks together see a batch of :data:`BATCH` samples in each step, in an order that follows from the epoch."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        draw_weights(model)
        model[2].requires_grad_(False)
        return model

    def prepare_shard(self, rank: int, world: int) -> None:
        pass

    def num_batches(self, *, rank: int, world: int, epoch: int) -> int:
        return STEPS

    def batches(self, *, rank: int, world: int, epoch: int, seed: int) -> Iterator[Tensor]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for block in order.split(BATCH):
            yield block.tensor_split(world)[rank]

    def loss(self, model: nn.Module, batch: Tensor) -> Any:
        return (model(INPUTS[batch]) - TARGETS[batch]).square().mean()

    def evaluate_shard(self, model: nn.Module, *, rank: int, world: int) -> Any:
        mine = torch.arange(SAMPLES).tensor_split([30, 41][: world - 1])[rank]  # not equally many
        with torch.no_grad():
            errors = (model(INPUTS[mine]) - TARGETS[mine]).square()
        return Found(
            len(mine),
            float(errors.sum()),
            {
                "rmse": Metric(float(errors.sum()), len(mine), "root_mean"),
                "worst": Metric(float(errors.max()), kind="max"),
                "share": (float((errors < 0.1).sum()), len(mine)),
            },
        )


def plain(
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    make_schedule: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: None,
    *,
    epochs: int = 2,
    bf16: bool = False,
) -> nn.Module:
    """The same training in one process, by hand."""
    task = Regression()
    model = task.build_model()
    optimizer = make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    schedule = make_schedule(optimizer)
    for epoch in range(epochs):
        for batch in task.batches(rank=0, world=1, epoch=epoch, seed=0):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            if schedule is not None and schedule.last_epoch + 1 < epochs * STEPS:
                schedule.step()
    return model
