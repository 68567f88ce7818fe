"""Trainings that are measured with gradbus.torch.profile."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_node import RankLocation

import gradbus.torch
from gradbus.torch.observed import observed

STEPS = 12
LATE_S = 0.05


class Late(nn.Module):
    """A model whose forward pass takes long on rank 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            time.sleep(LATE_S)
        return self.layers(x)


def measured(place: RankLocation) -> dict[str, Any]:
    """What the profiles of three trainings have, and what is left behind."""
    place.start()
    backward = torch.autograd.backward
    found: dict[str, Any] = {}
    for name in ("dense", "topk", "DistributedOptimizer"):
        model = Late(place.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        forward: nn.Module = model
        if name == "DistributedOptimizer":
            optimizer = gradbus.torch.DistributedOptimizer(optimizer, model.named_parameters())
        else:
            forward = DistributedDataParallel(model)
        if name == "topk":
            gradbus.torch.with_algorithm(forward, [optimizer], name, density=0.05)
        with gradbus.torch.profile(f"{place.options['folder']}/{name}", window_steps=4) as p:
            for step in range(STEPS):
                x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + place.rank))
                optimizer.zero_grad()
                forward(x).square().mean().backward()
                optimizer.step()
        summary = p.summary()
        found[name] = {
            "steps": summary.steps, "failed": summary.failed_steps, "mean": dict(summary.mean), "table": p.table(),
            "total": dict(summary.total), "outside": dict(summary.outside),
        }  # fmt: skip
    with gradbus.torch.profile() as p:
        found["nested"] = told(lambda: gradbus.torch.profile().__enter__())
        dist.all_reduce(torch.ones(1000))
        p.step()
    found["by hand"] = [p.summary().steps, p.summary().total["bytes_out"], p.summary().mean["wait_s"] > 0]
    found["left"] = [observed.observer is None, torch.autograd.backward is backward]
    return found


def told(attempt: Any) -> str:
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
