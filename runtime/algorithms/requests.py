"""What a rank program may ask of its driver: plain data, no I/O.

A program is a generator. It yields a request, is suspended, and goes on with the result::

    def mean_and_largest(x: Tensor) -> Program[tuple[Tensor, Tensor]]:
        mean = yield AllReduce("mean", x, op="mean")
        parts = yield AllGather("largest", x.max().reshape(1))
        return mean, torch.cat(parts).max()

It knows no event loop, network, clock or thread, so the same program runs on a :class:`~gradbus.Group`, on any backend
of ``torch.distributed``, on all ranks in one process, and on a model of a network. ``yield from`` makes one program of
several, one after the other; :func:`side_by_side` runs several at once.

A request has a ``name``. On all ranks that take part the same requests have equal names; a driver tells two requests of
one name between the same ranks apart by how many there were before. Ranks that are not named by a request need not make
it: two ranks may exchange something while a third one waits for what comes next.

Tensors of a request belong to the driver until the program goes on. A program does not change them meanwhile, nor does
it change results that it passes on.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar, cast

from torch import Tensor

R = TypeVar("R")

ReduceOp: TypeAlias = Literal["sum", "mean", "min", "max"]


@dataclass(frozen=True, slots=True, eq=False)
class AllReduce:
    """Combine tensors of equal shape and dtype elementwise, in rank order. The result is bit-equal on all ranks.

    Attributes:
        op: ``mean`` is the sum, multiplied by 1 / divisor once. float16 and bfloat16 are added in float32.
        out: memory for the result, of the same shape and dtype; may be ``tensor``. None: new memory.
        divisor: of the mean; None: the number of ranks.
        route: how a driver that has the choice has parts travel; all of them add in rank order, to the same bits.
            ``direct``: everybody to everybody; ``shards``: each rank adds up a part, and sends it to all;
            ``in-network``: of int32 and op ``sum`` alone, through the aggregator that the driver has joined; without
            one, as ``auto``. All ranks make such requests in the same order.
    """

    name: str
    tensor: Tensor
    op: ReduceOp = "sum"
    out: Tensor | None = None
    divisor: int | None = None
    route: Literal["auto", "direct", "shards", "in-network"] = "auto"


@dataclass(frozen=True, slots=True, eq=False)
class ReduceScatter:
    """As :class:`AllReduce`, but the result on rank r is part r of ``tensor.tensor_split(world)``."""

    name: str
    tensor: Tensor
    op: ReduceOp = "sum"


@dataclass(frozen=True, slots=True, eq=False)
class AllGather:
    """The payloads of all ranks, in rank order: a list of tensors. Their sizes may differ, dtype and dimensions not."""

    name: str
    payload: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """The root's tensor on all ranks. ``tensor``: of equal shape and dtype elsewhere, overwritten and returned."""

    name: str
    tensor: Tensor
    root: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Swap:
    """Send a tensor to some ranks, and receive one from some, which swap with this one.

    The result: what came, by rank. The others send to those that receive from them, tensors of the announced shape.

    Attributes:
        send: by the rank that gets it. receive: memory for what comes, by the rank that sends it; it is overwritten.
    """

    name: str
    send: Mapping[int, Tensor] = field(default_factory=dict)
    receive: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Together:
    """Several requests at once. The result: a tuple of theirs."""

    requests: tuple[Request, ...]


Request: TypeAlias = AllReduce | ReduceScatter | AllGather | Broadcast | Swap | Together
Program: TypeAlias = Generator[Request, Any, R]


def side_by_side(*programs: Program[Any]) -> Program[tuple[Any, ...]]:
    """Run several programs at once, in as many phases as the longest has. Returns their results, in their order.

    Whether a program goes on must be equal on all ranks that it exchanges something with, as always.
    """
    results: list[Any] = [None] * len(programs)
    answers: dict[int, Any] = dict.fromkeys(range(len(programs)))
    while answers:
        asked: dict[int, Request] = {}
        for number, answer in answers.items():
            try:
                asked[number] = programs[number].send(answer)
            except StopIteration as end:
                results[number] = end.value
        if not asked:
            break
        got = yield Together(tuple(asked.values()))
        answers = dict(zip(asked, cast("Sequence[Any]", got), strict=True))
    return tuple(results)


def bytes_out(request: Request, rank: int, world: int) -> int:
    """Bytes that a rank sends for a request, as the shortest way needs: 2 (N - 1) / N of a tensor that is reduced, a
    payload once to each rank that gets it."""
    match request:
        case AllReduce(tensor=tensor):
            return 2 * (world - 1) * tensor.nbytes // world
        case ReduceScatter(tensor=tensor):
            return (world - 1) * tensor.nbytes // world
        case AllGather(payload=payload):
            return (world - 1) * payload.nbytes
        case Broadcast(tensor=tensor, root=root):
            return (world - 1) * tensor.nbytes if rank == root else 0
        case Swap(send=send):
            return sum(tensor.nbytes for tensor in send.values())
        case Together(requests):
            return sum(bytes_out(inner, rank, world) for inner in requests)


def simple_requests(request: Request) -> list[Request]:
    """The requests that this one is made of, without any :class:`Together`, in their order."""
    if not isinstance(request, Together):
        return [request]
    return [simple for inner in request.requests for simple in simple_requests(inner)]


def joined_results(request: Request, results: list[Any]) -> Any:
    """The inverse for their results, which are taken from the front of the list."""
    if not isinstance(request, Together):
        return results.pop(0)
    return tuple(joined_results(inner, results) for inner in request.requests)
