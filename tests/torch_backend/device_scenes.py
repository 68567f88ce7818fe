"""Tensors that are not on the CPU: on a GPU, or on a device made of Python that has memory nobody else can reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch_node import RankLocation

Make = Callable[[Tensor], Tensor]


class ToyTensor(Tensor):
    """A tensor of the device "toy". ``data_ptr`` is 0: what takes its memory for the CPU's is found out."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> ToyTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), dtype=values.dtype, device=torch.device("toy:0")
        )
        made.values = values
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        plain, named = tree_map(lambda one: one.values if isinstance(one, cls) else one, given)
        result = func(*plain, **named)
        if func._schema.name.endswith("_"):  # in place, also from one device to the other
            return args[0]
        return tree_map(lambda one: cls(one) if isinstance(one, Tensor) else one, result)


def toy() -> Make:
    """Make the device, which lacks one thing alone: pinned memory."""
    _setup_privateuseone_for_python_backend("toy")
    empty = torch.empty
    torch.empty = lambda *shape, pin_memory=False, **options: empty(*shape, **options)  # type: ignore[assignment]
    return lambda values: ToyTensor(values.clone())


def gpu() -> Make:
    """Both ranks have the first one."""
    return lambda values: values.to("cuda:0")


def collectives(place: RankLocation) -> dict[str, list[Tensor]]:
    """What every collective gives on a device, then on the CPU; past c10d, which would ask the toy's class."""
    make = {"toy": toy, "gpu": gpu}[place.options["device"]]()
    place.start()
    group: Any = dist.group.WORLD
    found: dict[str, list[Tensor]] = {}
    for name, call in _calls(place.rank, place.world).items():
        for on in (make, Tensor.clone):
            results = call(group.dds, on)
            assert all(result.device == on(torch.ones(1)).device for result in results), name
            found[name] = [*found.get(name, []), *(_to_cpu(result) for result in results)]
    return found


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.values if isinstance(tensor, ToyTensor) else tensor.cpu()


def _calls(rank: int, world: int) -> dict[str, Callable[[Any, Make], list[Tensor]]]:
    """Each makes its tensors, makes a call, and returns what that has filled."""
    numbers = torch.arange(6.0).view(2, 3) * (rank + 1)
    whole = torch.arange(4, dtype=torch.int64) * (rank + 3)

    def outputs(make: Make, count: int = world, like: Tensor = numbers) -> list[Tensor]:
        return [make(torch.zeros_like(like)) for _ in range(count)]

    def in_place(method: str, options: Any, *values: Tensor) -> Callable[[Any, Make], list[Tensor]]:
        def call(backend: Any, make: Make) -> list[Tensor]:
            tensors = [make(one) for one in values]
            getattr(backend, method)(tensors, options).wait()
            return tensors

        return call

    def into(method: str, options: Any, fill: Callable[[Make], Any], given: Callable[[Make], Any]) -> Any:
        def call(backend: Any, make: Make) -> list[Tensor]:
            filled = fill(make)
            getattr(backend, method)(filled, given(make), options).wait()
            flat = filled if isinstance(filled, list) else [filled]
            return [one for part in flat for one in (part if isinstance(part, list) else [part])]

        return call

    def exchange(backend: Any, make: Make) -> list[Tensor]:
        received = make(torch.zeros(3))
        other = (rank + 1) % world
        works = [backend.send([make(numbers[0])], other), backend.recv([received], (rank - 1) % world)]
        for work in works:
            work.wait()
        return [received]

    mean, rooted = AllreduceOptions(), ReduceOptions()
    mean.reduceOp, rooted.rootRank = dist.ReduceOp.AVG, 1
    scatter = [[numbers + part for part in range(world)]] if rank == 0 else []
    return {
        "all_reduce": in_place("allreduce", AllreduceOptions(), numbers),
        "all_reduce, mean": in_place("allreduce", mean, whole),
        "all_reduce, strided": in_place("allreduce", AllreduceOptions(), numbers.t()),
        "all_reduce, coalesced": in_place("allreduce_coalesced", AllreduceOptions(), numbers, whole, numbers[0]),
        "broadcast": in_place("broadcast", BroadcastOptions(), numbers),
        "reduce": lambda backend, make: in_place("reduce", rooted, numbers)(backend, make) if rank == 1 else (
            in_place("reduce", rooted, numbers)(backend, make)[:0]
        ),
        "all_gather": into("allgather", AllgatherOptions(), lambda make: [outputs(make)], lambda make: [make(numbers)]),
        "all_gather_single": into(
            "all_gather_single", AllgatherOptions(), lambda make: make(torch.zeros(2 * world, 3)), lambda m: m(numbers)
        ),
        "gather": into(
            "gather", GatherOptions(), lambda make: [outputs(make)] if rank == 0 else [], lambda make: [make(numbers)]
        ),
        "scatter": into(
            "scatter", ScatterOptions(), lambda make: outputs(make, 1),
            lambda make: [[make(part) for part in parts] for parts in scatter],
        ),
        "reduce_scatter": into(
            "reduce_scatter", ReduceScatterOptions(), lambda make: outputs(make, 1),
            lambda make: [[make(numbers + part) for part in range(world)]],
        ),
        "reduce_scatter_single": into(
            "reduce_scatter_single", ReduceScatterOptions(), lambda make: make(torch.zeros(3)),
            lambda make: make(numbers),
        ),
        "all_to_all": into(
            "alltoall", AllToAllOptions(), outputs, lambda make: [make(numbers + part) for part in range(world)]
        ),
        "send": exchange,
    }  # fmt: skip


def training(place: RankLocation) -> dict[str, list[Tensor]]:
    """Weights after some steps of DDP on a GPU, on a stream of the user's own, and on the CPU."""
    place.start()
    found: dict[str, list[Tensor]] = {}
    for device in ("cuda:0", "cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)  # several buckets
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        random = torch.Generator().manual_seed(place.rank)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(4):
                inputs = torch.randn(16, 64, generator=random).to(device)
                optimizer.zero_grad()
                (ddp(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
            torch.cuda.synchronize()
        found[device] = [parameter.detach().cpu() for parameter in model.parameters()]
    return found
