"""What PyTorch builds on torch.distributed, in small: each part gives tensors that are compared with those of gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch_node import RankLocation

STEPS = 4


def every_part(place: RankLocation) -> dict[str, list[Tensor]]:
    place.start()
    parts = {name.removeprefix("part_"): part for name, part in globals().items() if name.startswith("part_")}
    found = {name: part(place) for name, part in parts.items()}
    dist.barrier()
    return found


def net() -> nn.Sequential:
    """The same on all ranks."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 6))


def batch(rank: int, step: int = 0, rows: int = 8) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(rows, 12, generator=random), torch.randint(0, 6, (rows,), generator=random)


def train(model: nn.Module, optimizer: Any, rank: int, steps: int = STEPS) -> None:
    for step in range(steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def values(tensors: Any) -> list[Tensor]:
    return [t.full_tensor() if isinstance(t, DTensor) else t.detach().clone() for t in tensors]


def part_fsdp(place: RankLocation) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (place.world,))
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), place.rank)
    return values(model.parameters())


def part_zero(place: RankLocation) -> list[Tensor]:
    """Each rank has the optimizer's state of some parameters, and rank 0 collects it at the end."""
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    train(model, optimizer, place.rank)
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if place.rank == 0 else {}
    return values(model.parameters()) + [state[number]["exp_avg"] for number in sorted(state)]


def part_checkpoint(place: RankLocation) -> list[Tensor]:
    """Saved by all ranks, a shard from each, and loaded into other memory, which is sharded otherwise."""
    mesh = init_device_mesh("cpu", (place.world,))
    whole, steps = torch.arange(24.0).view(6, 4), torch.tensor(7)
    folder = place.options["folder"]
    checkpoint.save({"w": distribute_tensor(whole, mesh, [Shard(0)]), "steps": steps}, checkpoint_id=folder)
    state: dict[str, Any] = {"w": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)]), "steps": torch.tensor(0)}
    checkpoint.load(state, checkpoint_id=folder)
    assert torch.equal(state["w"].full_tensor(), whole)
    return [state["w"].to_local(), state["w"].full_tensor(), state["steps"]]


def part_pipeline(place: RankLocation) -> list[Tensor]:
    """Two stages, four micro-batches."""
    group = dist.new_group([0, 1])
    if place.rank > 1:
        return []
    layers = net()
    module = layers[:2] if place.rank == 0 else layers[2:]
    stage = PipelineStage(module, place.rank, 2, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.cross_entropy)
    x, y = batch(0, rows=16)
    losses: list[Tensor] = []
    output = schedule.step(x) if place.rank == 0 else schedule.step(target=y, losses=losses)
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return values([*gradients, *losses, *([] if output is None else [output])])


def part_tensor_parallel(place: RankLocation) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (place.world,))
    rows = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(0)])
    product = rows @ distribute_tensor(torch.ones(4, 6), mesh, [Replicate()])
    partial = DTensor.from_local(torch.full((4, 2), float(place.rank + 1)), mesh, [Partial()])
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x, y = batch(0)
    nn.functional.cross_entropy(model(x), y).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    turned = product.redistribute(mesh, [Shard(1)]).to_local()
    return [turned, product.full_tensor(), partial.redistribute(mesh, [Shard(0)]).to_local(), *values(gradients)]


def part_functional(place: RankLocation) -> list[Tensor]:
    group, x = dist.group.WORLD, batch(place.rank, rows=2 * place.world)[0]
    sizes = [2] * place.world
    results = [
        functional.all_reduce(x, "sum", group),
        functional.all_gather_single(x, 0, group),
        functional.reduce_scatter_single(x, "sum", 0, group),
        functional.all_to_all_single(x, sizes, sizes, group),
        functional.broadcast(x, 1, group),
        *functional.all_reduce_coalesced([x, x[:1]], "max", group),
        torch.compile(lambda t: functional.all_reduce(t * 2, "sum", group) + 1, backend="eager", fullgraph=True)(x),
    ]
    return [t.wait() if isinstance(t, functional.AsyncCollectiveTensor) else t for t in results]


def part_ddp_in_debug_mode(place: RankLocation) -> list[Tensor]:
    """As with TORCH_DISTRIBUTED_DEBUG=DETAIL, for a group that is made then. With gloo that ends the process."""
    if place.backend == "dds":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group()
        model = DistributedDataParallel(net(), process_group=group, find_unused_parameters=True)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), place.rank)
        dist.barrier(group=group)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    return values(model.parameters())


def part_split_group(place: RankLocation) -> list[Tensor]:
    half = dist.split_group(split_ranks=[[0], list(range(1, place.world))])
    assert half is not None
    tensor = batch(place.rank)[0]
    dist.all_reduce(tensor, group=half)
    return [tensor]


def part_messages(place: RankLocation) -> list[Tensor]:
    """To both neighbours and from both, in one batch."""
    after, before = (place.rank + 1) % place.world, (place.rank - 1) % place.world
    x, came = batch(place.rank)[0], [torch.empty(8, 12) for _ in range(2)]
    operations = [
        dist.P2POp(dist.isend, x, after, tag=1), dist.P2POp(dist.isend, -x, before, tag=2),
        dist.P2POp(dist.irecv, came[0], before, tag=1), dist.P2POp(dist.irecv, came[1], after, tag=2),
    ]  # fmt: skip
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return came


def part_join(place: RankLocation) -> list[Tensor]:
    """Each rank has one batch more than the one before it."""
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        train(model, optimizer, place.rank, steps=2 + place.rank)
    return values(model.parameters())
