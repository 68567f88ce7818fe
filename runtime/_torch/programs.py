"""Rank programs on ``torch.distributed``: any backend, "dds" and gloo among them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

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
from gradbus.runtime.collectives.data_movement import AllGatherOperation
from gradbus.runtime.errors import CollectiveError
from gradbus.torch.backend import DdsBackend
from gradbus.torch.calls import CollectiveCall
from gradbus.torch.functions import start
from gradbus.torch.observed import observed
from gradbus.torch.process_group import DdsProcessGroup, cpu_backend, group_beside

R = TypeVar("R")
Finish = Callable[[], Any]  # waits, and returns the result of a request

MAX_PAYLOAD_BYTES = 1 << 32  # of one rank, of those that are gathered

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class ProgramQueue:
    """Programs of the ranks of a process group, one after the other, on a thread of their own: backends such as gloo
    need one order of calls on all ranks. They have a group of their own, as DDP has calls in the midst of a backward
    pass. All ranks queue the same programs in the same order.
    """

    def __init__(self, parent: dist.ProcessGroup | None) -> None:
        """On all ranks of ``parent``, the group of the ranks; None: the default one."""
        whole: Any = parent or dist.group.WORLD
        ranks = dist.get_process_group_ranks(whole)
        self._group = group_beside(whole, ranks)
        self.rank, self.world = sorted(ranks).index(dist.get_rank()), len(ranks)  # as torch sorts them
        threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "gradbus-algorithm", partial(torch.set_num_threads, threads))

    def submit(self, function: Callable[..., R], *arguments: Any) -> Future[R]:
        """Call a function on that thread, after all that was queued before."""
        return self._thread.submit(function, *arguments)

    def run(self, program: Program[R], on_request: Callable[[Request], object] = lambda request: None) -> R:
        """Run a program. For that thread."""
        return run_program(program, self._group, on_request)


_queues: WeakKeyDictionary[dist.ProcessGroup, ProgramQueue] = WeakKeyDictionary()


def queue_of(group: dist.ProcessGroup | None) -> ProgramQueue:
    """That of a process group; all ranks of it call this for the first time together. None: the default group.

    Raises:
        ValueError: this process is in no such group. RuntimeError: there is no default group yet.
    """
    if group is None and not dist.is_initialized():
        raise RuntimeError("there is no process group yet: call torch.distributed.init_process_group() before")
    key = group or dist.group.WORLD
    if not isinstance(key, dist.ProcessGroup):
        raise ValueError(f"process_group must be a group that this rank is in, got {group!r}")
    if key not in _queues:
        _queues[key] = ProgramQueue(group)
    return _queues[key]


def run_program(
    program: Program[R],
    group: dist.ProcessGroup | None = None,
    on_request: Callable[[Request], object] = lambda request: None,
) -> R:
    """Run a program on this rank to its end, in this thread. Returns what it returns.

    All ranks of the group call this with programs that make the same requests in the same order: backends such as gloo
    match collectives by their order alone. Sums on "dds" are taken in rank order, as everywhere in gradbus; other
    backends have an order of their own, and differ from it by roundings.

    Args:
        group: the process group; None: the default one.
        on_request: called with each request, before it is made.

    Raises:
        What the backend and the program raise.
    """
    answer: Any = None
    while True:
        began_s = time.perf_counter()
        try:
            request = program.send(answer)
        except StopIteration as end:
            value: R = end.value
            return value
        finally:
            if (observer := observed.observer) is not None:
                observer.computed(time.perf_counter() - began_s)
        on_request(request)
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


def _dds_of(group: dist.ProcessGroup | None, tensor: Tensor) -> DdsBackend | None:
    """The backend that a group has for this tensor, if that is "dds": those on a GPU may have another one."""
    whole: Any = group or dist.group.WORLD
    if isinstance(whole, DdsProcessGroup):
        return whole.dds
    backend = cpu_backend(whole) if tensor.is_cpu else None
    return backend if isinstance(backend, DdsBackend) else None


def _after(works: Sequence[Any], result: Callable[[], Any]) -> Finish:
    def finish() -> Any:
        for work in works:
            if work is not None:
                work.wait()
        return result()

    return finish


def _all_reduce(request: AllReduce, group: dist.ProcessGroup | None) -> Finish:
    """Half precision travels as such on "dds", which adds it in float32. Other backends would round after each
    addition: there it travels in float32."""
    tensor, is_dds = request.tensor.detach(), _dds_of(group, request.tensor) is not None
    widens = tensor.dtype in (torch.float16, torch.bfloat16) and not is_dds
    if request.out is request.tensor and tensor.is_contiguous() and not widens:
        total = tensor
    else:
        total = tensor.float() if widens else tensor.clone(memory_format=torch.contiguous_format)
    world = dist.get_world_size(group)
    divides = request.op == "mean" and is_dds and request.divisor in (None, world)  # rounds once, at the end
    op = dist.ReduceOp.AVG if divides else _OPS[request.op]
    work = dist.all_reduce(total, op=op, group=group, async_op=True)

    def result() -> Tensor:
        if request.op == "mean" and not divides:
            total.mul_(1 / (request.divisor or world))
        if request.out is None:
            return total.to(tensor.dtype)
        return request.out if total is tensor else request.out.copy_(total)

    return _after([work], result)


def _all_gather(payload: Tensor, group: dist.ProcessGroup | None) -> Finish:
    """Sizes may differ. "dds" takes them as they come; else they are gathered first, then payloads as long as the
    longest one."""
    payload = payload.detach().contiguous()
    dds = _dds_of(group, payload)
    if dds is not None:
        gather = AllGatherOperation(payload, dds.rank(), dds.size(), MAX_PAYLOAD_BYTES)
        call = CollectiveCall("all_gather of a program", [gather])
        return _after([start(dds, call, "program", "all_gather")], lambda: gather.value)
    world = dist.get_world_size(group)
    shape = torch.tensor(payload.shape, dtype=torch.int64, device=payload.device)
    shapes = [torch.empty_like(shape) for _ in range(world)]
    dist.all_gather(shapes, shape, group=group)
    if any(int(one.min()) < 0 for one in shapes if one.numel()):
        raise CollectiveError(f"all_gather: ranks announce the shapes {[one.tolist() for one in shapes]}")
    sizes = [math.prod(one.tolist()) for one in shapes]
    if max(sizes) * payload.element_size() > MAX_PAYLOAD_BYTES:
        raise CollectiveError(f"all_gather: a rank announces {max(sizes)} entries, at most {MAX_PAYLOAD_BYTES} bytes")
    sent = torch.zeros(max(sizes), dtype=payload.dtype, device=payload.device)
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
