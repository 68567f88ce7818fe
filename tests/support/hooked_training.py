"""A small training with a communication hook of gradbus.torch.hooks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_node import RankLocation

from gradbus.torch import hooks

STEPS = 6
LR = 0.05
SMALL_BUCKETS = {"bucket_cap_mb": 0.005}  # so that there are several

HOOKS: dict[str, tuple[Callable[..., Any], Any]] = {
    "dgc": (lambda named, **more: hooks.DgcHookState(named, density=0.05, min_numel=80, **more), hooks.dgc),
    "dgc fp16": (lambda named, **more: hooks.DgcHookState(named, density=0.02, value_dtype="fp16", **more), hooks.dgc),
    "top k": (lambda named, **more: hooks.TopKHookState(named, density=0.05, **more), hooks.top_k),
    "top k int8": (
        lambda named, **more: hooks.TopKHookState(named, density=0.05, value_dtype="int8", **more),
        hooks.top_k,
    ),
    "byte grad": (lambda named, **more: hooks.ByteGradHookState(named, chunk_elems=500, **more), hooks.byte_grad),
    "bf16": (lambda named, **more: hooks.Bf16HookState(named, **more), hooks.bf16),
}
EVERYTHING = (lambda named, **more: hooks.DgcHookState(named, density=1.0, momentum=0.9, **more), hooks.dgc)


class Net(nn.Module):
    """No buffers, which DDP would send around, and a layer that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.first = nn.Linear(288, 64)
        self.sometimes = nn.Linear(64, 64)
        self.last = nn.Linear(64, 4)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = torch.relu(self.first(torch.relu(self.conv(x)).flatten(1)))
        return self.last(x if skip else torch.relu(self.sometimes(x)))


class Run:
    """A model, its DDP, its hook and its optimizer. ``hook``: of :data:`HOOKS`, "everything", or none."""

    def __init__(self, hook: str, *, process_group: Any = None, lr: float = LR, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = Net()
        self.ddp = DistributedDataParallel(self.model, process_group=process_group, **options)
        if hook:
            make, function = {**HOOKS, "everything": EVERYTHING}[hook]
            self.state = make(self.model.named_parameters(), process_group=process_group)
            self.ddp.register_comm_hook(self.state, function)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.digests: list[str] = []

    def loss(
        self, place: RankLocation, step: int, part: int = 0, *, skip: bool = False, wrapped: bool = True
    ) -> Tensor:
        random = torch.Generator().manual_seed(1000 * place.rank + 10 * step + part)
        x, y = torch.randn(16, 1, 8, 8, generator=random), torch.randint(0, 4, (16,), generator=random)
        return nn.functional.cross_entropy((self.ddp if wrapped else self.model)(x, skip), y)

    def step(self, place: RankLocation, step: int, *, skip: bool = False, parts: int = 1) -> None:
        """``parts``: mini-batches whose gradients add up before they are exchanged."""
        self.optimizer.zero_grad()
        for part in range(parts):
            more: AbstractContextManager[None] = self.ddp.no_sync() if part < parts - 1 else contextlib.nullcontext()
            with more:
                self.loss(place, step, part, skip=skip).backward()
        self.optimizer.step()
        self.digests.append(digest(self.model))


def digest(model: nn.Module) -> str:
    """Of all bits of all parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()
