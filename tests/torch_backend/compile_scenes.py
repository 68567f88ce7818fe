"""Models that torch.compile has taken apart, with and around DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_node import RankLocation

STEPS = 3
WIDTH = 600  # a layer of more than 1 MiB, which is torch's smallest bucket for models that are compiled


def model() -> nn.Module:
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(24, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
    return nn.Sequential(first, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))


def train(place: RankLocation, module: nn.Module) -> list[Tensor]:
    """Parameters and buffers after some steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        random = torch.Generator().manual_seed(100 * place.rank + step)
        x, y = torch.randn(16, 24, generator=random), torch.randint(0, 4, (16,), generator=random)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    return [tensor.detach().clone() for tensor in (*module.parameters(), *module.buffers())]


def around(module: nn.Module, compiler: str, **options: Any) -> nn.Module:
    """``torch.compile`` around DDP, the way that torch recommends: it splits the graph at the buckets."""
    return torch.compile(DistributedDataParallel(module, bucket_cap_mb=1, **options), backend=compiler)


def collectives_in_a_function(place: RankLocation, compiler: str) -> list[Tensor]:
    """Calls of torch.distributed in what is compiled."""

    @torch.compile(backend=compiler)
    def step(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        dist.broadcast(y, 0)
        return y.sin() + x

    return [step(torch.arange(6.0) + place.rank), step(torch.arange(6.0) - place.rank)]


Results = dict[str, list[Tensor]]


def every_way(place: RankLocation, compiler: str) -> Results:
    """What is compiled may lie within DDP, or DDP within it."""
    return {
        **around_ddp(place, compiler),
        "as views": train(place, around(model(), compiler, gradient_as_bucket_view=True)),
        "within DDP": train(place, DistributedDataParallel(torch.compile(model(), backend=compiler))),
        "functions": collectives_in_a_function(place, compiler),
    }


def around_ddp(place: RankLocation, compiler: str) -> Results:
    """The usual way."""
    return {"around DDP": train(place, around(model(), compiler))}


def quickly(place: RankLocation, compiler: str) -> Results:
    """As little as can be compiled: each kernel takes seconds."""
    torch.manual_seed(3)
    return {"around DDP": train(place, around(nn.Linear(24, 4), compiler))}


WAYS = {"eager": every_way, "aot_eager": around_ddp, "inductor": quickly}


def on_both_backends(place: RankLocation) -> dict[str, Results]:
    """By the compiler and the backend of torch.distributed."""
    found = {}
    for backend in ("dds", "gloo"):
        place.backend = backend
        place.start(prefix=backend, timeout_s=60.0)
        for compiler in place.options["compilers"]:
            torch.compiler.reset()
            found[f"{compiler} {backend}"] = WAYS[compiler](place, compiler)
        dist.barrier()
        dist.destroy_process_group()
    return found
