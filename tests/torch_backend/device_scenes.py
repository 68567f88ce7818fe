"""Tensors that are not on the CPU: on a GPU, or on a device made of Python that has memory nobody else can reach."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

from gradbus.runtime.algorithms.base import Place, Step, TensorBucket, bucket_of, make_algorithm
from gradbus.runtime.algorithms.live_weights import apply_result
from gradbus.runtime.choices import ALGORITHMS
from gradbus.runtime.collectives.staging import exchange_of
from gradbus.torch import AlgorithmHook, algorithm_hook
from gradbus.torch.programs import run_program

Make = Callable[[Tensor], Tensor]


class ToyTensor(Tensor):
    """A tensor of the device "toy". ``data_ptr`` is 0: what takes its memory for the CPU's is found out."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> ToyTensor:
        made = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch has no public name for it
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
        if func.overloadpacket.__name__.endswith("_"):  # in place, also from one device to the other
            return args[0]
        if named.get("device") == torch.device("cpu"):
            return result
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
        "reduce": lambda backend, make: (
            in_place("reduce", rooted, numbers)(backend, make)
            if rank == 1
            else (in_place("reduce", rooted, numbers)(backend, make)[:0])
        ),
        "all_gather": into("allgather", AllgatherOptions(), lambda make: [outputs(make)], lambda make: [make(numbers)]),
        "all_gather_single": into(
            "all_gather_single", AllgatherOptions(), lambda make: make(torch.zeros(2 * world, 3)), lambda m: m(numbers)
        ),
        "gather": into(
            "gather", GatherOptions(), lambda make: [outputs(make)] if rank == 0 else [], lambda make: [make(numbers)]
        ),
        "scatter": into(
            "scatter",
            ScatterOptions(),
            lambda make: outputs(make, 1),
            lambda make: [[make(part) for part in parts] for parts in scatter],
        ),
        "reduce_scatter": into(
            "reduce_scatter",
            ReduceScatterOptions(),
            lambda make: outputs(make, 1),
            lambda make: [[make(numbers + part) for part in range(world)]],
        ),
        "reduce_scatter_single": into(
            "reduce_scatter_single",
            ReduceScatterOptions(),
            lambda make: make(torch.zeros(3)),
            lambda make: make(numbers),
        ),
        "all_to_all": into(
            "alltoall", AllToAllOptions(), outputs, lambda make: [make(numbers + part) for part in range(world)]
        ),
        "send": exchange,
    }


@dataclass
class Bucket:
    """Gradients as DDP hands them to a communication hook; it has none of the toy device."""

    flat: Tensor
    named: Mapping[str, Tensor]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> Tensor:
        return self.flat

    def parameters(self) -> list[Tensor]:
        return list(self.named.values())

    gradients = parameters


class ToyFuture:
    """What is given to DDP. torch's own one asks the device for a pool of streams, which the toy has not."""

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self._made: concurrent.futures.Future[Tensor] = concurrent.futures.Future()
        self.set_result, self.set_exception = self._made.set_result, self._made.set_exception
        self.wait = self._made.result

    def then(self, callback: Any) -> ToyFuture:
        return self


SHAPES = {"weight": (24, 20), "bias": (24,)}


def programs(place: RankLocation) -> dict[str, list[Tensor]]:
    """Gradients, or weights, after some exchanges, by case: of a device, then of the CPU."""
    make = {"toy": toy, "gpu": gpu}[place.options["device"]]()
    place.start()
    if place.options["device"] == "toy":
        algorithm_hook.Gradient = ToyFuture  # type: ignore[misc, assignment]
    found: dict[str, list[Tensor]] = {}
    for name in ALGORITHMS.table:
        for on in (make, Tensor.clone):
            if ALGORITHMS.table[name].scope == "weights":
                case = f"{name}, weights"
                found[case] = [*found.get(case, []), *_by_weights(place, name, on)]
                continue
            for delay_steps in (0, 1):
                case = f"{name}, hook, delay {delay_steps}"
                found[case] = [*found.get(case, []), *_by_hook(place, name, on, delay_steps)]
            if name not in ("dense", "fixed-point"):  # whose requests are of tensors on the device, see above
                case = f"{name}, program"
                found[case] = [*found.get(case, []), *_by_program(place, name, on)]
    return found


def _gradients(rank: int, step: int) -> Tensor:
    return torch.randn(24 * 20 + 24, generator=torch.Generator().manual_seed(100 * rank + step))


def _by_hook(place: RankLocation, name: str, on: Make, delay_steps: int) -> list[Tensor]:
    parameters = {key: on(torch.zeros(shape)).requires_grad_() for key, shape in SHAPES.items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    options = {"warmup": "none"} if name == "dgc" else {}
    hook = AlgorithmHook(parameters.items(), name, options, optimizers=[optimizer], delay_steps=delay_steps)
    found = []
    for step in range(4):
        flat = on(_gradients(place.rank, step))
        hook.report_loss(1 / (1 + step))
        given = hook.exchange(Bucket(flat, parameters))  # type: ignore[arg-type]
        assert given.wait() is flat or on is not Tensor.clone
        found.append(_to_cpu(flat).clone())
        for parameter in parameters.values():
            parameter.grad = None
        optimizer.step()
    while hook.drain():
        gradients = [parameter.grad for parameter in parameters.values()]
        assert all(one is not None and one.device == on(torch.ones(1)).device for one in gradients)
        found += [_to_cpu(one) for one in gradients if one is not None]
    hook.close()
    return found


def _by_program(place: RankLocation, name: str, on: Make) -> list[Tensor]:
    algorithm, found = make_algorithm(name, Place(place.rank, place.world)), []
    for step in range(3):
        flat = on(_gradients(place.rank, step))
        parts = flat.split_with_sizes([24 * 20, 24])
        bucket = TensorBucket(
            0, flat, {key: part.view(shape) for (key, shape), part in zip(SHAPES.items(), parts, strict=True)}
        )
        run_program(exchange_of(algorithm, bucket, Step(step, active=place.world)))
        algorithm.commit()
        found.append(_to_cpu(flat))
    return found


@torch.no_grad()
def _by_weights(place: RankLocation, name: str, on: Make) -> list[Tensor]:
    options = {key: 1 for key in ("steps", "every_steps") if key in ALGORITHMS.table[name].Options.model_fields}
    algorithm, found = make_algorithm(name, Place(place.rank, place.world), options), []
    live = {key: on(torch.ones(shape)) for key, shape in SHAPES.items()}
    algorithm.begin(bucket_of(live))
    for number in range(3):
        step, trained = Step(number, active=place.world), _gradients(place.rank, number)
        for (key, tensor), part in zip(live.items(), trained.split_with_sizes([24 * 20, 24]), strict=True):
            tensor.add_(on(part.view(SHAPES[key])))
        bucket = bucket_of(live)
        run_program(algorithm.exchange(bucket, step))
        algorithm.commit()
        apply_result(live, algorithm, step, bucket.flat, None)
        found += [_to_cpu(one).clone() for one in live.values()]
    return found


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
