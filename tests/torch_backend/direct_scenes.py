"""Collectives on the short way past torch's dispatcher, and on the long one, which others look on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_node import RankLocation

from gradbus.torch.work import DdsWork


class LooksOn(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Own(Tensor):
    """A class of tensors that somebody else has made."""


def who_is_told(place: RankLocation) -> dict[str, Any]:
    """Whether a call goes the short way, by what is different from a plain call."""
    place.start()
    found: dict[str, Any] = {}

    def short(tensor: Tensor) -> bool:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        return isinstance(work, DdsWork)

    found["plain"] = short(torch.ones(3))
    found["parameter"] = short(torch.nn.Parameter(torch.ones(3), requires_grad=False))
    found["gradients"] = short(torch.ones(3, requires_grad=True))
    with torch.no_grad():
        found["gradients, switched off"] = short(torch.ones(3, requires_grad=True))
    found["class of its own"] = short(torch.ones(3).as_subclass(Own))
    with torch.profiler.profile() as profile:
        found["profiler"] = short(torch.ones(3))
    found["profiled"] = sorted({event.name for event in profile.events() if event.name.startswith("c10d::")})
    with LooksOn():
        found["mode"] = short(torch.ones(3))
    dist.barrier()
    return found


def other_ways_to_call(place: RankLocation) -> dict[str, Any]:
    """The process group's own methods, with the arguments that torch.distributed does not use."""
    place.start()
    group = dist.group.WORLD
    assert group is not None
    rank, world = place.rank, place.world
    one, listed, largest, named = (torch.full((2,), float(rank + 1)) for _ in range(4))
    group.allreduce(one).wait()
    group.allreduce([listed]).wait()
    group.allreduce([largest], op=dist.ReduceOp.MAX).wait()
    group.allreduce(tensors=[named]).wait()
    rooted = torch.full((2,), float(rank))
    group.broadcast(rooted, root=1).wait()
    gathered = [torch.zeros(2) for _ in range(world)]
    group.allgather(gathered, torch.full((2,), float(rank))).wait()
    part = torch.zeros(1)
    group.reduce_scatter(part, [torch.full((1,), float(rank + r)) for r in range(world)]).wait()
    group.barrier().wait()
    dist.barrier()
    return {
        "sums": [t.tolist() for t in (one, listed, named)],
        "largest": largest.tolist(),
        "rooted": rooted.tolist(),
        "gathered": [t.tolist() for t in gathered],
        "part": part.tolist(),
    }
