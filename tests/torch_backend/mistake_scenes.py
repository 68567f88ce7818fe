"""Bad use: what each rank is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch_node import RankLocation


def mismatches(place: RankLocation) -> dict[str, Any]:
    """Each call with other tensors on rank 1 than on rank 0; then calls that fit, over the same group."""
    place.start(timeout_s=20.0)
    results = {name: timed(call) for name, call in calls(place.rank).items()}
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.barrier()
    return results | {"afterwards": tensor.tolist()}


def calls(rank: int) -> dict[str, Callable[[], Any]]:
    """By name; the comments in test_mistakes.py say what differs."""

    def mine(zero: Tensor, one: Tensor) -> Tensor:
        return zero if rank == 0 else one

    def two(tensor: Tensor) -> list[Tensor]:
        return [torch.empty_like(tensor) for _ in range(2)]

    f32, i64 = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    four, five = torch.zeros(4), torch.zeros(5)
    ints = torch.zeros(4, dtype=torch.int32)
    op = dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX
    return {
        "all_reduce, shapes": lambda: dist.all_reduce(mine(torch.zeros(2, 3), torch.zeros(3, 2))),
        "all_reduce, dtypes": lambda: dist.all_reduce(mine(f32, i64)),
        "all_reduce, sizes": lambda: dist.all_reduce(mine(four, five)),
        "all_reduce, ops": lambda: dist.all_reduce(four, op),
        "reduce": lambda: dist.reduce(mine(four, five), 0),
        "broadcast, dtypes": lambda: dist.broadcast(mine(f32, i64), 0),
        "broadcast, sizes": lambda: dist.broadcast(mine(four, five), 0),
        "all_gather": lambda: dist.all_gather(two(mine(four, five)), mine(four, five)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(8 + 2 * rank), mine(four, five)),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
            mine(torch.empty(2), torch.empty(3)), mine(four, torch.zeros(6))
        ),
        "gather": lambda: dist.gather(mine(four, five), two(four) if rank == 0 else None),
        "scatter": lambda: dist.scatter(mine(four, five), two(four) if rank == 0 else None),
        "all_to_all_single": lambda: dist.all_to_all_single(mine(four, torch.empty(6)), mine(four, torch.zeros(6))),
        "send and recv": lambda: dist.send(four, 1) if rank == 0 else dist.recv(ints, 0),
        "reduce and broadcast": lambda: dist.reduce(four, 0) if rank == 0 else dist.broadcast(five, 1),
        "other calls": lambda: dist.broadcast(four, 0) if rank == 0 else dist.all_gather(two(five), five),
    }


def own_blocks(place: RankLocation) -> dict[str, Any]:
    """Calls in which what rank 0 has for itself does not fit its own output; all that travels would fit."""
    place.start(timeout_s=30.0)
    first = place.rank == 0
    sizes = ([2, 1], [3, 1]) if first else ([1, 2], [1, 2])
    lists = [torch.empty(2) if first else torch.empty(3), torch.empty(3)], torch.zeros(3)

    def wide(own: int) -> list[Tensor]:
        """For each rank a tensor whose shape has many digits."""
        shapes = [(own if rank == place.rank else 1, 100, 1, 1, 1, 10, 1, 1, 1, 1, 10) for rank in range(2)]
        return [torch.zeros(shape) for shape in shapes]

    calls = {
        "all_to_all_single": lambda: dist.all_to_all_single(
            torch.empty(sum(sizes[0])), torch.zeros(sum(sizes[1])), *sizes
        ),
        "all_to_all": lambda: dist.all_to_all(
            [torch.empty(n) for n in sizes[0]], [torch.zeros(n) for n in sizes[1]]
        ),
        "all_gather": lambda: dist.all_gather(*lists),
        "all_to_all of long shapes": lambda: dist.all_to_all([one[:1] for one in wide(3)], wide(1 + first)),
    }  # fmt: skip
    results = {name: timed(call) for name, call in calls.items()}
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return results | {"afterwards": tensor.tolist()}


def moved(place: RankLocation) -> list[str]:
    """Return what does not arrive as it was sent, of tensors of dtypes that few sums are defined for."""
    place.start()
    rank, other, lost = place.rank, 1 - place.rank, []
    for name in place.options["dtypes"]:
        dtype = getattr(torch, name)

        def made(of: int, dtype: torch.dtype = dtype) -> Tensor:
            bits = torch.arange(1, 1 + 2 * dtype.itemsize, dtype=torch.uint8) + 16 * of
            return bits.view(dtype)

        def compare(what: str, found: Tensor, of: int, name: str = name) -> None:
            if not torch.equal(found.view(torch.uint8), made(of).view(torch.uint8)):
                lost.append(f"{name} {what}")

        gathered = [torch.empty_like(made(0)) for _ in range(2)]
        dist.all_gather(gathered, made(rank))
        for of, one in enumerate(gathered):
            compare("all_gather", one, of)
        whole = torch.empty(4, dtype=dtype)
        dist.all_gather_into_tensor(whole, made(rank))
        compare("all_gather_into_tensor", whole[2:], 1)
        came = made(rank)
        dist.broadcast(came, 1)
        compare("broadcast", came, 1)
        dist.all_to_all_single(whole, torch.empty(4, dtype=dtype).copy_(whole))
        came = torch.empty_like(made(0))
        dist.scatter(came, [made(1), made(0)] if rank == 0 else None, 0)
        compare("scatter", came, other)
        work = dist.isend(made(rank), other)
        came = torch.empty_like(made(0))
        dist.recv(came, other)
        work.wait()
        compare("send and recv", came, other)
        strided = torch.empty(4, dtype=dtype)[::2]
        dist.all_gather([torch.empty_like(made(0)), strided] if rank == 0 else gathered, made(rank))
        if rank == 0:
            compare("all_gather into a strided tensor", strided.contiguous(), 1)
        if dtype.is_complex:  # torch gives the backend their real and imaginary parts
            total = torch.tensor([1 + 2j, 3 - 1j]).to(dtype)
            dist.all_reduce(total)
            if total.to(torch.complex64).tolist() != [2 + 4j, 6 - 2j]:
                lost.append(f"{name} all_reduce")
        elif "no arithmetic for" not in said(lambda: dist.all_reduce(made(rank))):
            lost.append(f"{name} all_reduce is not refused")
    return lost


def refused_here(place: RankLocation) -> dict[str, str]:
    """What is wrong on this rank alone is said before anything is sent."""
    place.start()
    group, meta, floats = dist.group.WORLD, torch.empty(3, device="meta"), torch.ones(3)
    attempts: dict[str, Callable[[], Any]] = {
        "send": lambda: group.send([meta], 0),
        "recv": lambda: group.recv([meta], 0),
        "recv from anyone": lambda: dist.recv(meta),
        "all_reduce": lambda: group.dds.allreduce([meta], dist.AllreduceOptions()),
        "all_gather": lambda: dist.all_gather([meta], floats),
        "broadcast": lambda: group.dds.broadcast([meta], dist.BroadcastOptions()),
        "bits of floats": lambda: dist.all_reduce(floats, dist.ReduceOp.BAND),
        "sparse": lambda: group.dds.broadcast([floats.to_sparse()], dist.BroadcastOptions()),
        "float8": lambda: dist.all_reduce(floats.to(torch.float8_e5m2)),
        "too few outputs": lambda: dist.all_gather([], floats),
        "sizes": lambda: dist.all_gather_into_tensor(torch.empty(5), floats.repeat(3)),
    }
    devices = group._device_types  # noqa: SLF001 - torch has no public name for it
    return {name: said(attempt) for name, attempt in attempts.items()} | {"devices": str(devices)}


def timed(call: Callable[[], Any]) -> dict[str, Any]:
    began_s = time.monotonic()
    return {"text": said(call), "after_s": time.monotonic() - began_s}


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def other_worlds(place: RankLocation) -> str:
    """Every rank says another world, of ``first`` and more."""
    place.world = place.options["first"] + place.rank
    return said(lambda: place.start(timeout_s=10.0))


def the_same_rank(place: RankLocation) -> Any:
    """The last process says that it is rank 1, when the two others have formed their group."""
    place.world -= 1
    store = dist.TCPStore("127.0.0.1", place.port, is_master=False, timeout=timedelta(seconds=30))
    if place.rank == 2:
        store.wait(["formed"])
        place.rank = 1
        text = said(place.start)
        store.set("said", "1")
        return text
    place.start()
    dist.barrier()
    store.set("formed", "1")
    store.wait(["said"])
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def a_rank_that_does_not_exist(place: RankLocation) -> str:
    place.rank = 2
    return said(place.start)


def nobody_else(place: RankLocation) -> str:
    """Rank 1 of 2 starts alone."""
    place.rank, place.world = 1, 2
    return said(lambda: place.start(timeout_s=1.0))
