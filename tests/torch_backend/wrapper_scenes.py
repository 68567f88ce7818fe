"""The functions for those who come from Horovod: what they give, whatever the order of the calls."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_node import RankLocation

import gradbus.torch as dds

LATE = 2  # the rank that comes too late, and then dies
WAIT_S = 30.0


def current() -> Any:
    """The backend of the process group. A late import, as another scene checks that the package makes these."""
    from gradbus.torch import functions

    return functions.current()


def drawn(rank: int, *shape: int) -> Tensor:
    """Numbers of a rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7 + rank))


# Any order


def any_order(place: RankLocation) -> dict[str, Any]:
    """Every rank makes the same calls in an order of its own; c10d's collectives go on in between."""
    results: dict[str, Any] = {"light": "gradbus.torch.functions" not in sys.modules}
    place.start()
    rank, world = place.rank, place.world
    calls: dict[str, Callable[[], Any]] = {}
    for number in range(12):
        calls[f"mean {number}"] = lambda number=number: dds.allreduce_async(drawn(rank, number, 3), f"mean {number}")
    for op in ("sum", "min", "max", "product"):
        calls[op] = lambda op=op: dds.allreduce_async(drawn(rank, 9), op, op=op)
    calls["a name" * 40] = lambda: dds.allreduce_async_(drawn(rank, 70_000).view(7, -1).t(), "a name" * 40)  # shards
    calls["ints"] = lambda: dds.allreduce_async(torch.full((3,), rank), "ints", op="sum")
    calls["sparse"] = lambda: dds.allreduce_async(torch.eye(3)[[rank % 3]].to_sparse() * 6, "sparse", op="mean")
    calls["ragged"] = lambda: dds.allgather_async(drawn(rank, rank, 2), "ragged")
    calls["scalars"] = lambda: dds.allgather_async(torch.tensor(rank), "scalars")
    for root in range(world):
        calls[f"root {root}"] = lambda root=root: dds.broadcast_async_(drawn(rank, 5), root, f"root {root}")
    order = list(calls)
    random.Random(rank).shuffle(order)
    handles = {}
    for position, name in enumerate(order):
        handles[name] = calls[name]()
        if position % 10 == 0:
            dist.all_reduce(torch.ones(2))
    random.Random(rank + 50).shuffle(order)
    values = {name: dds.synchronize(handles[name]) for name in order}
    results["polled"] = all(dds.poll(handle) for handle in handles.values())
    results["values"] = {name: value.to_dense() for name, value in values.items()}
    results["same twice"] = dds.synchronize(handles["ragged"]) is values["ragged"]
    unnamed = [torch.ones(2), torch.ones(3)]
    sums = [dds.allreduce_async(t * (1 + rank), op="sum") for t in (unnamed if rank else unnamed[::-1])]
    results["unnamed"] = [handle.wait().tolist() for handle in (sums if rank else sums[::-1])]
    mine = drawn(rank, 4)
    results["broadcast"] = [dds.broadcast(mine, world - 1).tolist(), mine.tolist()]
    results["object"] = dds.broadcast_object({"rank": rank, "lr": (0.1, None)}, world - 1)
    results["objects"] = dds.allgather_object(rank * 2)
    results["who"] = [dds.rank(), dds.size()]
    if place.options.get("more"):
        results["ahead"] = far_ahead(place)
        results["states"] = states(place)
        results["errors"] = misuse(place)
        results["made anew"] = made_anew(place)
    engine = current().group.engine
    results["left over"] = [engine.pending, engine.credit.used_bytes]
    return results


def far_ahead(place: RankLocation) -> dict[str, Any]:
    """Rank 0 calls for more than the other one keeps for it; that has not called for anything yet."""
    tensors = [torch.full((1_800_000,), float(number)) for number in range(10)]  # of 7 MiB
    trailing = torch.zeros(2_500_000)
    kept_bytes = 0
    engine = current().group.engine
    share_bytes, engine.credit.share_bytes = engine.credit.share_bytes, 64 << 20
    if place.rank == 1:
        dist.recv(trailing, 0)  # is written in turn with the others, and ends last
        kept_bytes = engine.early_bytes
    handles = [dds.allreduce_async_(tensor, f"ahead {number}") for number, tensor in enumerate(tensors)]
    if place.rank == 0:
        dist.send(trailing, 1)
    values = [handle.wait() for handle in handles]
    right = all(value.eq(float(number)).all() for number, value in enumerate(values))
    engine.credit.share_bytes = share_bytes
    return {"kept_bytes": kept_bytes, "right": right}


# State


def states(place: RankLocation) -> dict[str, Any]:
    """Rank 0 has trained, the others have just been started."""
    results: dict[str, Any] = {}
    for kind, options in KINDS.items():
        torch.manual_seed(place.rank)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
        if place.rank == 0:
            some_steps(model, optimizer, 3)
            for group in optimizer.param_groups:
                group["lr"] = 0.03125
        dds.broadcast_parameters(model.state_dict(), root_rank=0)
        dds.broadcast_optimizer_state(optimizer, root_rank=0)
        shared = flat(optimizer.state_dict())
        some_steps(model, optimizer, 2)
        results[kind] = {"shared": shared, "later": [*flat(optimizer.state_dict()), *map(text_of, model.parameters())]}
    fresh = torch.optim.Adam(nn.Linear(2, 2).parameters())
    if place.rank:
        for parameter in fresh.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        fresh.step()
    dds.broadcast_optimizer_state(fresh)
    results["of one that has none"] = len(fresh.state)
    return results


KINDS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 0.1, "weight_decay": 0.01, "amsgrad": True},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "LBFGS": {"lr": 0.1, "max_iter": 3},
}


def some_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(drawn(step, 8, 3)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def flat(value: Any, path: str = "") -> list[str]:
    """The leaves of a tree, as text."""
    if isinstance(value, dict):
        return [line for key, one in value.items() for line in flat(one, f"{path}.{key}")]
    if isinstance(value, list | tuple):
        leaves = [line for i, one in enumerate(value) for line in flat(one, f"{path}.{i}")]
        return [f"{path} {type(value).__name__}", *leaves]
    return [f"{path} {text_of(value)}"]


def text_of(value: Any) -> str:
    """With all bits of a tensor."""
    return f"{value.dtype} {value.tolist()}" if isinstance(value, Tensor) else repr(value)


# What is wrong


def raised(function: Callable[[], Any]) -> str:
    """The error of a call, with its kind."""
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def misuse(place: RankLocation) -> dict[str, str]:
    rank = place.rank
    model = nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    results = {
        "two shapes": raised(lambda: dds.allreduce(torch.ones(2 + rank, 4), "loss")),
        "two kinds": raised(lambda: (dds.allgather if rank else dds.allreduce)(torch.ones(2), "metric")),
        "op": raised(lambda: dds.allreduce(torch.ones(1), op="average")),
        "device": raised(lambda: dds.allreduce(torch.ones(1, device="meta"), "far")),
        "root": raised(lambda: dds.broadcast(torch.ones(1), 2)),
        "average": raised(lambda: dds.allreduce(torch.ones(1), False)),
        "number": raised(lambda: dds.allreduce_(3.0)) + raised(lambda: dds.broadcast_(3.0, 0)),
        "objects": raised(lambda: dds.allgather_object(object() if rank else 1)),
        "models": raised(lambda: dds.broadcast_parameters({"w": torch.ones(3), "b": torch.ones(1 + rank)})),
        "no tensor": raised(lambda: dds.broadcast_parameters({"steps": 3})),
        "object": raised(lambda: dds.broadcast_object(object(), 0)),
        "state": raised(lambda: dds.broadcast_optimizer_state(with_a_set())),
        "again": raised(lambda: dds.init(world_size=2)),
        "compression": raised(lambda: dds.DistributedOptimizer(plain, compression="int3")),
        "unnamed": raised(lambda: dds.DistributedOptimizer(plain, [("weight", model.weight)])),
        "one name": raised(lambda: dds.DistributedOptimizer(plain, [("p", p) for p in model.parameters()])),
    }
    dist.barrier()
    optimizer = dds.DistributedOptimizer(plain, model.named_parameters())
    results["twice"] = raised(lambda: dds.DistributedOptimizer(optimizer))
    model(torch.ones(1, 3)).sum().backward()
    results["zero_grad"] = raised(optimizer.zero_grad)
    results["one pass more"] = raised(lambda: model(torch.ones(1, 3)).sum().backward())
    results["after it"] = raised(optimizer.synchronize)
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    results["changed"] = raised(optimizer.step)
    dds.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))  # nobody keeps it
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    other = dds.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    results["two owners"] = raised(lambda: model(torch.ones(1, 3)).sum().backward())
    del other
    return results


def made_anew(place: RankLocation) -> list[float]:
    """An optimizer goes on in another process group; one rank has made more of them before."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizers = [dds.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5)) for _ in range(1 + place.rank)]
    optimizer = optimizers[-1]
    del optimizers
    dds.shutdown()
    place.start(prefix="again")
    model(torch.full((1, 2), 1.0 + place.rank)).sum().backward()
    optimizer.step()
    return model.weight.flatten().tolist()


def with_a_set() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    optimizer.param_groups[0]["frozen"] = {1, 2}
    return optimizer


# Too late, and dead


class Lines:
    """Catches what is logged."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self._changed = threading.Condition()

    def __call__(self, logger: Any, method: str, event: Any) -> Any:
        with self._changed:
            self.seen.append({"level": method, **event})
            self._changed.notify_all()
        raise structlog.DropEvent

    def wait_for(self, what: Callable[[list[dict[str, Any]]], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: what(self.seen), WAIT_S)


def late_then_dead(place: RankLocation) -> dict[str, Any]:
    """Rank 2 calls when the others have complained, and then dies in the middle of a training."""
    lines = Lines()
    structlog.configure(processors=[lines], wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    os.environ["GRADBUS_STALL_WARNING_S"] = "0.1"
    place.start()
    dist.barrier()
    store = place.store
    if place.rank == LATE:
        store.wait([f"rank {rank} has complained" for rank in range(place.world) if rank != LATE])
    stall = current().stalls
    warning_s, stall.warning_s = stall.warning_s, 0.0  # until all are called: then they are due at one time
    handles = [
        dds.allreduce_async(torch.ones(3), "small"),
        dds.allreduce_async(torch.ones(90_000), "in shards"),
        dds.allgather_async(torch.ones(9 << 18), "large"),
        dds.broadcast_async_(torch.ones(3), LATE, "from the late one"),
        *[dds.allreduce_async(torch.ones(1), f"one of many {number}") for number in range(30)],
    ]
    stall.warning_s = warning_s
    result: dict[str, Any] = {}
    if place.rank != LATE:
        both_wait = {"ready": [0, 1], "missing": [LATE]}
        result["complained"] = lines.wait_for(
            lambda seen: (
                all(
                    any(line.get("collective") == name and line.items() >= both_wait.items() for line in seen)
                    for name in ("small", "in shards", "large")
                )
                and sum(line.get("collective") == "small" for line in seen) >= 4
            )
        )
        store.set(f"rank {place.rank} has complained", "1")
    values = [handle.wait() for handle in handles]
    result["right"] = [value.flatten()[-1].item() for value in values[:4]]
    result["lines"] = [{**line, "event": str(line["event"])} for line in lines.seen]
    return {**result, **killed_in_training(place)}


def killed_in_training(place: RankLocation) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = dds.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    dds.broadcast_parameters(model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        if step == 2 and place.rank == LATE:
            place.say("dies")
            os.kill(os.getpid(), signal.SIGKILL)
        model(drawn(place.rank, 5, 4)).sum().backward()
        error = raised(optimizer.step)
    place.say("failed as it should")
    return {"error": error, "cleared": raised(optimizer.zero_grad) == ""}
