"""Parameters that are frozen when they are wrapped, and trained later: on all ranks, and on one of them only."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from structlog.testing import capture_logs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_node import RankLocation

import gradbus.torch as dds
from gradbus.torch import hooks

ODD = 1  # the rank that freezes or unfreezes alone


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: list[int],
    number: int,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """On the mean of the losses of these ranks' data."""
    optimizer.zero_grad()
    for rank in ranks:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + number))
        loss = model(x).square().mean() / len(ranks)
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten().clone() for one in model.parameters()])


def unfrozen(ranks: list[int], distributed: bool) -> list[Tensor]:
    """Weights after each of six steps: before step 1 the body is unfrozen, before step 3 the head is frozen, before
    step 4 unfrozen again."""
    model, found = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    if distributed:
        dds.DistributedOptimizer(optimizer, model.named_parameters())
    for number in range(6):
        if number == 1:
            model.body.requires_grad_()
        if number in (3, 4):
            model.head.requires_grad_(number == 4)
        step(model, optimizer, ranks, number)
        found.append(weights(model))
    return found


def on_all_ranks(place: RankLocation) -> list[Tensor]:
    place.start()
    return unfrozen([place.rank], distributed=True)


def failed(call: Callable[[], Any]) -> dict[str, Any]:
    began_s = time.monotonic()
    try:
        call()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "took_s": time.monotonic() - began_s}
    return {"error": "", "took_s": 0.0}


def on_one_rank(place: RankLocation) -> dict[str, Any]:
    """What a DistributedOptimizer raises on each rank, and whether the weights have changed by the step."""
    place.start(timeout_s=50.0)
    found = {}
    for name in ("unfrozen", "frozen", "added"):
        model = Net()
        optimizer = torch.optim.SGD([*model.head.parameters()], lr=0.5)
        if name != "added":
            optimizer.add_param_group({"params": [*model.body.parameters()]})
        dds.DistributedOptimizer(optimizer, model.named_parameters())
        step(model, optimizer, [place.rank], 0)
        if place.rank == ODD and name == "unfrozen":
            model.body.requires_grad_()
        if place.rank == ODD and name == "frozen":
            model.head.bias.requires_grad_(False)
        if place.rank == ODD and name == "added":
            optimizer.add_param_group({"params": [*model.body.requires_grad_().parameters()]})
        before = weights(model)
        found[name] = failed(partial(step, model, optimizer, [place.rank], 1))
        found[name]["unchanged"] = torch.equal(before, weights(model))
    return found


# Algorithms


def attached(way: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if way == "diloco":
        dds.DiLoCo(net, optimizer, steps=2)
        return net, optimizer
    ddp = DistributedDataParallel(net)
    if way == "a hook's state":
        ddp.register_comm_hook(hooks.HookState(net.named_parameters(), "topk"), hooks.exchange)
    else:
        options = {"delay_steps": 1} if way == "late" else {}
        name = way if way in ("powersgd", "decentralized") else "dense"
        dds.with_algorithm(ddp, optimizer, name, **options)
    return ddp, optimizer


WAYS = ("dense", "scaled", "late", "powersgd", "decentralized", "a hook's state", "diloco")


def exchanged(place: RankLocation) -> dict[str, Any]:
    """By algorithm, what a training raises in whose step 2 a rank, or all of them, unfreezes; and in which step."""
    place.start(timeout_s=50.0)
    found: dict[str, Any] = {}
    for way in WAYS:
        for who in ("one", "all", "none"):
            model, optimizer = attached(way)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if way == "scaled" else None
            body = (model.module if isinstance(model, DistributedDataParallel) else model).body
            with capture_logs() as logs:
                for number in range(10):
                    if number == 2 and (who == "all" or (who == "one" and place.rank == ODD)):
                        body.requires_grad_()
                    result = failed(partial(step, model, optimizer, [place.rank], number, scaler))
                    if result["error"]:
                        break
            skipped = [one["reason"] for one in logs if one["event"] == "step skipped"]
            found[f"{way}, {who}"] = {**result, "step": number, "skipped": skipped}
    return found


def not_ours(place: RankLocation) -> str:
    """A parameter that is unfrozen, but that no optimizer of the algorithm steps, concerns no other rank."""
    place.start()
    net = Net()
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1)
    ddp = DistributedDataParallel(net)
    dds.with_algorithm(ddp, optimizer, "dense")
    net.body.requires_grad_()
    return failed(lambda: step(ddp, optimizer, [place.rank], 0))["error"]
