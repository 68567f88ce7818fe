"""Training with a DistributedOptimizer, and the same in one process with the data of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch_node import RankLocation

import gradbus.torch as dds

STEPS = 6


class Net(nn.Module):
    """With a frozen layer, one that is used by some data only, and weights that are not contiguous."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6, sparse=sparse)
        self.first = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.sometimes = nn.Linear(24, 24)
        self.last = nn.Linear(24, 3)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        spread = self.embedding(x)[:, None].to(memory_format=torch.channels_last)
        hidden = torch.relu(self.frozen(self.first(spread).flatten(1)[:, :24]))
        return self.last(hidden if skip else self.sometimes(hidden))


@dataclass
class Way:
    """How to train."""

    options: dict[str, Any] = field(default_factory=dict)
    passes: int = 1
    kind: str = "SGD"
    clip: bool = False
    closure: bool = False
    scheduler: bool = False
    scaler: bool = False
    sparse: bool = False
    joined: bool = False  # in one process: one batch of all data, and not the gradients of all ranks added up
    close: float = 0.0  # how much parameters may differ; 0: not by a bit


WAYS = {
    "plain": Way(),
    "of the joined batch": Way(joined=True, close=1e-6),
    "several passes": Way({"backward_passes_per_step": 3}, passes=3, close=1e-6),
    "fp16": Way({"compression": "fp16"}, close=1e-4),
    "bf16": Way({"compression": "bf16"}, close=1e-3),
    "sum": Way({"op": "sum"}),
    "Adam": Way(kind="Adam"),
    "sparse": Way(sparse=True, close=1e-5),
    "sparse, made dense": Way({"sparse_as_dense": True}, kind="Adam", sparse=True, close=1e-6),
    "clipped": Way(clip=True),
    "closure": Way(closure=True),
    "a scheduler from before": Way(scheduler=True),
    "a gradient scaler": Way(scaler=True),
}


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randint(0, 10, (8, 6), generator=random), torch.randint(0, 3, (8,), generator=random)


def losses(model: Net, way: Way, ranks: list[int], number: int) -> list[Tensor]:
    """Of each rank, divided by their number. Rank 1 leaves a layer out now and then."""
    divisor = 1 if way.options.get("op") == "sum" else len(ranks)
    data = [batch(rank, number) for rank in ranks]
    if way.joined:
        x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
        return [nn.functional.cross_entropy(model(x, skip=False), y)]
    skips = [rank == 1 and number % 2 == 1 for rank in ranks]
    return [nn.functional.cross_entropy(model(x, skip), y) / divisor for (x, y), skip in zip(data, skips, strict=True)]


def train(way: Way, ranks: list[int], distributed: bool) -> list[Tensor]:
    """Parameters after some steps. ``ranks``: whose data is trained on here."""
    torch.manual_seed(3)
    model = Net(way.sparse)
    options: dict[str, Any] = {"lr": 0.05} | ({"momentum": 0.9} if way.kind == "SGD" and not way.closure else {})
    optimizer = getattr(torch.optim, way.kind)(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2) if way.scheduler else None
    if distributed:
        same = dds.DistributedOptimizer(optimizer, model.named_parameters(), **way.options)
        assert same is optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if way.scaler else None
    for step in range(STEPS):
        backward = _backward(model, way, ranks, step, scaler)
        optimizer.zero_grad()
        if way.closure:
            optimizer.step(backward)
            continue
        backward()
        if not distributed and way.options.get("sparse_as_dense"):
            for parameter in model.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad.to_dense()
        if way.clip or scaler:
            _step_with_care(model, optimizer, scaler, distributed)
        else:
            optimizer.step()
        if scheduler:
            scheduler.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _backward(model: Net, way: Way, ranks: list[int], step: int, scaler: Any) -> Callable[[], Tensor]:
    def backward() -> Tensor:
        total = torch.zeros(())
        for number in range(way.passes):
            for loss in losses(model, way, ranks, step * way.passes + number):
                (scaler.scale(loss) if scaler else loss).backward()
                total = total + loss.detach()
        return total

    return backward


def _step_with_care(model: Net, optimizer: Any, scaler: Any, distributed: bool) -> None:
    """With changes to the gradients between synchronisation and step."""
    if distributed:
        optimizer.synchronize()
    if scaler:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    if not distributed:
        scaler.step(optimizer) if scaler else optimizer.step()
    elif scaler:
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    else:
        optimizer.step()  # it knows that this is done
    if scaler:
        scaler.update()


def every_way(place: RankLocation) -> dict[str, list[Tensor]]:
    place.start()
    return {name: train(way, [place.rank], True) for name, way in WAYS.items()}
