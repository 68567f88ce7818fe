"""A small training with a communication hook of gradbus.torch.hooks."""

from __future__ import annotations

import contextlib
import hashlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_node import RankLocation

from gradbus.runtime.choices import ALGORITHMS
from gradbus.torch import hooks

STEPS = 6
LR = 0.05
SMALL_BUCKETS = {"bucket_cap_mb": 0.005}  # so that there are several

# The hooks with names of their own, as they were registered before there were algorithms: state, hook, options.
NAMED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dgc": (hooks.DgcHookState, hooks.dgc, {"density": 0.05, "min_numel": 80}),
    "dgc fp16": (hooks.DgcHookState, hooks.dgc, {"density": 0.02, "value_dtype": "fp16"}),
    "top k": (hooks.TopKHookState, hooks.top_k, {"density": 0.05}),
    "byte grad": (hooks.ByteGradHookState, hooks.byte_grad, {"chunk_elems": 500}),
    "bf16": (hooks.Bf16HookState, hooks.bf16, {}),
}
OPTIONS: dict[str, dict[str, Any]] = {"dgc": {"warmup": "none", "density": 0.05}}
EVERY = {**dict.fromkeys(NAMED), **dict.fromkeys(ALGORITHMS.table)}


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
    """A model, its DDP, its hook and its optimizer. ``name``: of :data:`NAMED`, or an algorithm."""

    state: Any

    def __init__(self, name: str, *, process_group: Any = None, lr: float = LR, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = Net()
        self.ddp = DistributedDataParallel(self.model, process_group=process_group, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        named = self.model.named_parameters()
        if name in NAMED:
            make, hook, given = NAMED[name]
            self.state = make(named, process_group=process_group, **given)
        else:
            hook, given = hooks.exchange, OPTIONS.get(name, {})
            weights = [self.optimizer] if ALGORITHMS.find(name).scope == "weights" else []
            self.state = hooks.HookState(named, name, process_group=process_group, optimizers=weights, **given)
        self.ddp.register_comm_hook(self.state, hook)
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
                loss = self.loss(place, step, part, skip=skip)
                loss.backward()
        self.state.report_loss(loss)
        self.optimizer.step()
        self.digests.append(digest(self.model))


def digest(model: nn.Module) -> str:
    """Of all bits of all parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()
