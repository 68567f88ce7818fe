"""Training with DistributedDataParallel in several ways, for comparison with gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel
from torch_node import RankLocation

STEPS = 6
SMALL_BUCKETS = {"bucket_cap_mb": 0.02}  # so that there are several

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several buckets": SMALL_BUCKETS,
    "gradients as views": {"gradient_as_bucket_view": True, **SMALL_BUCKETS},
    "static graph": {"static_graph": True, **SMALL_BUCKETS},
    "unused parameters": {"find_unused_parameters": True, **SMALL_BUCKETS},
}


class Net(nn.Module):
    """Has a buffer, which DDP broadcasts, and a layer that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.second = nn.Linear(64, 64)
        self.sometimes = nn.Linear(64, 64)
        self.last = nn.Linear(64, 4)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        x = torch.relu(self.second(self.first(x)))
        return self.last(x if skip else torch.relu(self.sometimes(x)))


def train(place: RankLocation, options: dict[str, Any], hook: str = "", *, skips: bool = False) -> list[Tensor]:
    """Parameters and buffers after some steps. ``skips``: some steps leave a layer out."""
    torch.manual_seed(3)
    model = DistributedDataParallel(Net(), **options)
    if hook:
        register(model, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        random = torch.Generator().manual_seed(100 * place.rank + step)
        x, y = torch.randn(16, 24, generator=random), torch.randint(0, 4, (16,), generator=random)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, skips and (step + place.rank) % 2 == 0), y).backward()
        optimizer.step()
    return [tensor.detach().clone() for tensor in (*model.module.parameters(), *model.module.buffers())]


def register(model: DistributedDataParallel, hook: str) -> None:
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = power_sgd.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
        )
        model.register_comm_hook(state, power_sgd.powerSGD_hook)
    elif hook == "quantization":
        model.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_pertensor_hook)
    else:
        raise ValueError(hook)


def every_way(place: RankLocation) -> dict[str, list[Tensor]]:
    place.start()
    results = {}
    for name, options in WAYS.items():
        results[name] = train(place, options, skips=name == "unused parameters")
    results["fp16 hook"] = train(place, SMALL_BUCKETS, "fp16")
    # gloo mixes up what the callbacks of several buckets call, so it gets one; torch's default is 25 MB.
    for hook in ("powersgd", "quantization"):
        results[f"{hook}, one bucket"] = train(place, {}, hook)
    return results


def hooks_that_call_collectives(place: RankLocation) -> dict[str, list[Tensor]]:
    place.start()
    return {hook: train(place, SMALL_BUCKETS, hook) for hook in ("powersgd", "quantization")}


def some_ways(place: RankLocation) -> dict[str, list[Tensor]]:
    place.start()
    return {
        name: train(place, WAYS[name], skips=name == "unused parameters") for name in ("plain", "unused parameters")
    }
