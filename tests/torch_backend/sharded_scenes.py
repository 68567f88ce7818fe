"""Compression together with sharded optimizers and models: what works, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch_node import RankLocation

import gradbus.torch as hvd
from gradbus.torch import hooks
from gradbus.torch.cpu_copies import local_of

STEPS = 4
# By the columns of the matrix in docs/torch.md: algorithms with an optimizer that suits each.
GRADIENTS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "topk": ({"density": 0.1}, torch.optim.Adam, {"lr": 0.01}),
    "powersgd": ({"rank": 2}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "dgc": ({"warmup": "none", "density": 0.1}, torch.optim.SGD, {"lr": 0.1}),
    "qadam": ({"warmup_steps": 2, "eps": 1e-3}, torch.optim.SGD, {"lr": 0.01}),
}


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 6))


def train(model: nn.Module, forward: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    for step in range(STEPS):
        random = torch.Generator().manual_seed(100 * rank + step)
        x, y = torch.randn(8, 12, generator=random), torch.randint(0, 6, (8,), generator=random)
        optimizer.zero_grad()
        nn.functional.cross_entropy(forward(x), y).backward()
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


def optimizer_of(sharded: bool, parameters: Any, kind: Any, options: dict[str, Any]) -> Any:
    return ZeroRedundancyOptimizer(parameters, kind, **options) if sharded else kind(parameters, **options)


def zero(place: RankLocation) -> dict[str, list[list[Tensor]]]:
    """By way of compression, the weights with the optimizer itself, and with its state in shards."""
    place.start()
    found: dict[str, list[list[Tensor]]] = {}
    for name, (options, kind, its_options) in GRADIENTS.items():
        found[f"with_algorithm {name}"] = both = []
        for sharded in (False, True):
            model = net()
            ddp = DistributedDataParallel(model)
            optimizer = optimizer_of(sharded, model.parameters(), kind, its_options)
            hvd.with_algorithm(ddp, [optimizer], name, **options)
            both.append(train(model, ddp, optimizer, place.rank))
    found["hooks"] = both = []
    for sharded in (False, True):
        model = net()
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(hooks.ByteGradHookState(model.named_parameters()), hooks.byte_grad)
        optimizer = optimizer_of(sharded, model.parameters(), torch.optim.Adam, {"lr": 0.01})
        both.append(train(model, ddp, optimizer, place.rank))
    found["DistributedOptimizer"] = both = []
    for sharded in (False, True):
        model = net()
        optimizer = optimizer_of(sharded, model.parameters(), torch.optim.Adam, {"lr": 0.01})
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), hvd.Compression.fp16)
        both.append(train(model, model, optimizer, place.rank))
    found["not finite"] = [skipped(place)]
    return found


def skipped(place: RankLocation) -> list[Tensor]:
    """The weights before and after a step whose gradients are not finite on one rank."""
    model = net()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    hvd.with_algorithm(ddp, [optimizer], "topk", density=0.5)
    before = torch.cat([one.detach().flatten() for one in model.parameters()])
    (ddp(torch.ones(2, 12)).sum() * (float("inf") if place.rank else 1.0)).backward()
    optimizer.step()
    return [before, torch.cat([one.detach().flatten() for one in model.parameters()])]


def refused(place: RankLocation) -> dict[str, str]:
    """The error of each combination that cannot be right."""
    place.start()
    return {what: told(attempt) for what, attempt in attempts()}


def told(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def attempts() -> Iterator[tuple[str, Callable[[], Any]]]:
    mesh = init_device_mesh("cpu", (2,))
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("hosts", "ranks"))
    models = {
        "FSDP2": fully_shard(net(), mesh=mesh),
        "HSDP": fully_shard(net(), mesh=square),
        "FSDP1": FullyShardedDataParallel(net(), device_id=torch.device("cpu")),
        "FSDP1 with original parameters": FullyShardedDataParallel(
            net(), device_id=torch.device("cpu"), use_orig_params=True
        ),
        "FSDP1 without shards": FullyShardedDataParallel(
            net(), device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD
        ),
        "tensor parallel": parallelize_module(net(), mesh, {"0": ColwiseParallel()}),
    }
    for name, model in models.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        yield f"{name}, with_algorithm", lambda m=model, o=optimizer: hvd.with_algorithm(m, [o], "topk")
        yield f"{name}, hooks", lambda m=model: hooks.TopKHookState(m.named_parameters())
        yield f"{name}, DistributedOptimizer", lambda o=optimizer: hvd.DistributedOptimizer(o)
        yield f"{name}, weights", lambda m=model, o=optimizer: hvd.with_algorithm(m, [o], "local-sgd")
        yield f"{name}, DiLoCo", lambda m=model, o=optimizer: hvd.DiLoCo(m, o)

    state = hooks.TopKHookState(net().named_parameters())
    flat = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    flat.register_comm_hook(state, hooks.exchange)
    yield "FSDP1, register_comm_hook", lambda: flat(torch.ones(2, 12)).sum().backward()

    model = net()
    plain = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    ddp = DistributedDataParallel(model)
    yield "ZeRO-1, weights", lambda: hvd.with_algorithm(ddp, [plain], "local-sgd")
    yield "ZeRO-1, DiLoCo", lambda: hvd.DiLoCo(model, plain)
    momentum = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    yield "ZeRO-1, momentum", lambda: hvd.with_algorithm(ddp, [momentum], "dgc")
    overlapping = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    yield "ZeRO-1 with overlap, with_algorithm", lambda: hvd.with_algorithm(ddp, [overlapping], "topk")
    yield "ZeRO-1 with overlap, DistributedOptimizer", lambda: hvd.DistributedOptimizer(overlapping)
    yield "ZeRO-1 with overlap, weights", lambda: hvd.with_algorithm(ddp, [overlapping], "local-sgd")
    yield "ZeRO-1 with overlap, DiLoCo", lambda: hvd.DiLoCo(model, overlapping)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, overlapping))
    yield "ZeRO-1 with overlap, hooks", lambda: ddp.register_comm_hook(state, hooks.top_k)


def replicas(place: RankLocation) -> dict[str, list[bool]]:
    """Whether the shards of the ranks that hold the same one are equal after an exchange, and after a further step."""
    place.start()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("hosts", "ranks"))
    found = {}
    for name in ("DiLoCo", "local-sgd"):
        model = fully_shard(net(), mesh=mesh["ranks"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if name == "DiLoCo":
            hvd.DiLoCo(model, optimizer, group=mesh.get_group("hosts"), steps=STEPS)
        else:
            group = mesh.get_group("hosts")
            hvd.with_algorithm(model, [optimizer], name, process_group=group, steps=STEPS)
        train(model, model, optimizer, place.rank)
        found[name] = [are_equal(model)]
        optimizer.zero_grad()
        model(torch.ones(2, 12) * place.rank).sum().backward()
        optimizer.step()
        found[name].append(are_equal(model))
    return found


def are_equal(model: nn.Module) -> bool:
    flat = torch.cat([local_of(one).flatten() for one in model.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    return torch.equal(*both)
