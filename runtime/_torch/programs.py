"""Rank programs on ``torch.distributed``: any backend, "dds" and gloo among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradbus.runtime.algorithms.requests import (
    AllGather,
    AllReduce,
    Broadcast,
    Program,
    ReduceScatter,
    Request,
    Swap,
    joined_results,
    simple_requests,
)

R = TypeVar("R")
Finish = Callable[[], Any]  # waits, and returns the result of a request

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def run_program(program: Program[R], group: dist.ProcessGroup | None = None) -> R:
    """Run a program on this rank to its end, in this thread. Returns what it returns.

    All ranks of the group call this with programs that make the same requests in the same order: backends such as gloo
    match collectives by their order alone. Sums on "dds" are taken in rank order, as everywhere in gradbus; other
    backends have an order of their own, and differ from it by roundings.

    Args:
        group: the process group; None: the default one.

    Raises:
        What the backend and the program raise.
    """
    answer: Any = None
    while True:
        try:
            request = program.send(answer)
        except StopIteration as end:
            value: R = end.value
            return value
        pending = [_start(simple, group) for simple in simple_requests(request)]
        answer = joined_results(request, [finish() for finish in pending])


def _start(request: Request, group: dist.ProcessGroup | None) -> Finish:
    match request:
        case AllReduce():
            return _all_reduce(request, group)
        case ReduceScatter(name, tensor, op):
            reduced = _all_reduce(AllReduce(name, tensor, op), group)
            return lambda: reduced().tensor_split(dist.get_world_size(group))[dist.get_rank(group)].clone()
        case AllGather(_, payload):
            return _all_gather(payload, group)
        case Broadcast(_, tensor, root):
            work = dist.broadcast(tensor, group=group, group_src=root, async_op=True)
            return _after([work], lambda: tensor)
        case Swap():
            return _swap(request, group)
    raise AssertionError(f"no simple request: {request}")


def _after(works: Sequence[Any], result: Callable[[], Any]) -> Finish:
    def finish() -> Any:
        for work in works:
            if work is not None:
                work.wait()
        return result()

    return finish


def _all_reduce(request: AllReduce, group: dist.ProcessGroup | None) -> Finish:
    """Half precision is added in float32, as gradbus does: other backends round after each addition."""
    tensor = request.tensor.detach()
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    total = tensor.float() if is_half else tensor.clone(memory_format=torch.contiguous_format)
    if request.out is tensor is request.tensor and not is_half and tensor.is_contiguous():
        total = tensor
    work = dist.all_reduce(total, op=_OPS[request.op], group=group, async_op=True)

    def result() -> Tensor:
        if request.op == "mean":
            total.mul_(1 / (request.divisor or dist.get_world_size(group)))
        if request.out is None:
            return total.to(tensor.dtype)
        return request.out if request.out is total else request.out.copy_(total)

    return _after([work], result)


def _all_gather(payload: Tensor, group: dist.ProcessGroup | None) -> Finish:
    """Sizes may differ: they are gathered first, then payloads as long as the longest one."""
    payload = payload.detach().contiguous()
    world = dist.get_world_size(group)
    shape = torch.tensor(payload.shape, dtype=torch.int64)
    shapes = [torch.empty_like(shape) for _ in range(world)]
    dist.all_gather(shapes, shape, group=group)
    sizes = [int(one.prod()) for one in shapes]
    sent = torch.zeros(max(sizes), dtype=payload.dtype)
    sent[: payload.numel()] = payload.reshape(-1)
    parts = [torch.empty_like(sent) for _ in range(world)]
    work = dist.all_gather(parts, sent, group=group, async_op=True)
    return _after(
        [work],
        lambda: [part[:size].view(one.tolist()) for part, size, one in zip(parts, sizes, shapes, strict=True)],
    )


def _swap(request: Swap, group: dist.ProcessGroup | None) -> Finish:
    operations = [
        *(dist.P2POp(dist.irecv, memory, group=group, group_peer=peer) for peer, memory in request.receive.items()),
        *(dist.P2POp(dist.isend, t.contiguous(), group=group, group_peer=peer) for peer, t in request.send.items()),
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return _after(works, lambda: dict(request.receive))
