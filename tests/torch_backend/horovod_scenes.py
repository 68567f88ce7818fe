"""A script of Horovod's with the import changed: reductions, compression and places, on real ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch_node import RankLocation

import gradbus.torch as hvd


def values_of(rank: int) -> Tensor:
    """Numbers of a rank, of which some are no halves."""
    return torch.randn(33, generator=torch.Generator().manual_seed(31 + rank))


def gradients_of(rank: int) -> Tensor:
    """The gradient that a rank gives to the weight of the model of :func:`one_gradient`."""
    return values_of(rank) * 100.0


def one_gradient(rank: int, **options: Any) -> Tensor:
    """The gradient of a weight after ``synchronize``, and what a step with it changes."""
    model = nn.Linear(33, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
    optimizer.zero_grad()
    model(gradients_of(rank)).sum().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.detach(), -model.weight.grad)
    return model.weight.grad.flatten()


def as_horovod_has_it(place: RankLocation) -> dict[str, Any]:
    """Every constant and option, with what a rank gives."""
    results: dict[str, Any] = {"before": hvd.is_initialized()}
    place.start()
    hvd.init()
    rank, mine = place.rank, values_of(place.rank)
    ops = {"Average": hvd.Average, "Sum": hvd.Sum, "Min": hvd.Min, "Max": hvd.Max, "Product": hvd.Product}
    results["reductions"] = {name: hvd.allreduce(mine, name=name, op=op) for name, op in ops.items()}
    results["reductions"]["no op"] = hvd.allreduce(mine, op=None)
    results["whole numbers"] = hvd.allreduce(torch.tensor([rank + 2, 5]), op=hvd.Product).tolist()
    results["fp16"] = hvd.allreduce(mine, name="half", compression=hvd.Compression.fp16)
    results["none"] = hvd.allreduce(mine, name="whole", compression=hvd.Compression.none)
    results["scaled"] = hvd.allreduce(mine, name="scaled", op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    in_place = mine.clone()
    hvd.synchronize(hvd.allreduce_async_(in_place, name="in place", op=hvd.Sum, prescale_factor=2.0))
    results["in place"] = in_place
    results["kept"] = torch.equal(mine, values_of(rank))
    results["gradients"] = {
        "average": one_gradient(rank),
        "sum": one_gradient(rank, op=hvd.Sum),
        "predivided": one_gradient(rank, op=hvd.Average, gradient_predivide_factor=4.0),
        "predivided by 3": one_gradient(rank, gradient_predivide_factor=3.0),
        "fp16": one_gradient(rank, compression=hvd.Compression.fp16),
        "fp16 predivided": one_gradient(rank, compression=hvd.Compression.fp16, gradient_predivide_factor=2.0),
    }
    results["errors"] = [
        said(lambda: one_gradient(rank, op=hvd.Sum, gradient_predivide_factor=2.0)),
        said(lambda: one_gradient(rank, gradient_predivide_factor=0.0)),
        said(lambda: hvd.allreduce(torch.ones(2, dtype=torch.int64), prescale_factor=0.5)),
    ]
    results["initialized"] = hvd.is_initialized()
    results["places"] = places(rank, place.world)
    hvd.shutdown()
    results["after"] = hvd.is_initialized()
    return results


def places(rank: int, world: int) -> list[Any]:
    """The numbers on and of machines, with what launchers say: one machine, as many as ranks, and nonsense."""
    found: list[Any] = []
    for local_rank, local_size in ((rank, world), (0, 1)):
        os.environ.update({"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_size)})
        found.append([hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()])
    os.environ["LOCAL_RANK"] = "1"
    try:
        hvd.cross_rank()
    except RuntimeError as error:
        found.append(str(error))
    os.environ.update({"GROUP_RANK": "4", "GROUP_WORLD_SIZE": "7"})  # of torchrun, which knows
    return [*found, [hvd.cross_rank(), hvd.cross_size()]]


def said(function: Any) -> str:
    """The text of the ValueError that a call raises."""
    try:
        function()
    except ValueError as error:
        return str(error)
    return "nothing"
