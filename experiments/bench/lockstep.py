"""Run the programs of all ranks in one process, one step of each after the other; count what they send.

For tests and studies, as an oracle, and for worlds that no machine here has room for. Sums are taken in rank order with
the arithmetic of the bus, so results are bit-equal to those of a :class:`~gradbus.Group`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from gradbus.commands.simulate.rank_programs import Deadlock, Mismatch, reduced
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


@dataclass(slots=True)
class Cost:
    """Holds what the ranks have sent.

    Attributes:
        bytes_out: of each rank, as the shortest way of each request needs: 2 (N - 1) / N of a tensor that is reduced
            (reduce-scatter and gather), a payload once to each rank that gets it.
        messages: of each rank. phases: how often each rank waited for others.
        rounds: of each rank, the most messages that had to follow one another until it had what it has: what is sent
            comes after all that its sender had received. A tensor that is reduced takes two (reduce-scatter and
            gather), other collectives one.
    """

    bytes_out: list[int]
    messages: list[int]
    phases: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Rank:
    program: Program[Any]
    request: Request | None = None
    waiting: list[Request] = field(default_factory=list)  # simple ones
    results: list[Any] = field(default_factory=list)  # theirs
    done: list[bool] = field(default_factory=list)
    keys: list[tuple[str, int]] = field(default_factory=list)  # name, and how often it was used before
    counts: dict[str, int] = field(default_factory=dict)
    value: Any = None
    ended: bool = False


class Lockstep:
    """The ranks of one group. It may run several programs after each other.

    Attributes:
        cost: of all of them.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.cost = Cost([0] * world, [0] * world, [0] * world, [0] * world)
        self._posted: dict[
            tuple[int, int, str], deque[tuple[Tensor, int]]
        ] = {}  # sender, receiver, name; with its round

    def run(self, programs: Sequence[Program[R]]) -> list[R]:
        """Run one program on each rank to its end. Returns what they return.

        Raises:
            Deadlock: they wait for each other. Mismatch: their requests do not fit. And what a program raises.
        """
        if len(programs) != self.world:
            raise ValueError(f"expected {self.world} programs, one for each rank, got {len(programs)}")
        ranks = [_Rank(program) for program in programs]
        self._posted.clear()
        for number, rank in enumerate(ranks):
            self._resume(number, rank, None)
        while not all(rank.ended for rank in ranks):
            if not self._serve(ranks):
                raise Deadlock("; ".join(self._describe(number, rank) for number, rank in enumerate(ranks)))
            for number, rank in enumerate(ranks):
                if not rank.ended and all(rank.done):
                    assert rank.request is not None
                    self.cost.phases[number] += 1
                    self._resume(number, rank, joined_results(rank.request, list(rank.results)))
        left = sorted(key for key, queue in self._posted.items() if queue)
        if left:
            sender, receiver, name = left[0]
            raise Mismatch(f"rank {receiver} never received {name!r}, which rank {sender} sent")
        return [rank.value for rank in ranks]

    def _resume(self, number: int, rank: _Rank, answer: Any) -> None:
        try:
            rank.request = rank.program.send(answer)
        except StopIteration as end:
            rank.ended, rank.value = True, end.value
            return
        rank.waiting = simple_requests(rank.request)
        rank.results = [None] * len(rank.waiting)
        rank.done = [False] * len(rank.waiting)
        rank.keys = []
        for request in rank.waiting:
            if isinstance(request, Swap):
                rank.keys.append((request.name, -1))
                self._post(number, request)
            else:
                rank.counts[request.name] = count = rank.counts.get(request.name, 0) + 1  # type: ignore[union-attr]
                rank.keys.append((request.name, count))  # type: ignore[union-attr]

    def _post(self, number: int, request: Swap) -> None:
        for peer, tensor in request.send.items():
            if not 0 <= peer < self.world or peer == number:
                raise Mismatch(f"rank {number} sends {request.name!r} to rank {peer} in a world of {self.world}")
            self._posted.setdefault((number, peer, request.name), deque()).append(
                (tensor.detach().clone(), self.cost.rounds[number] + 1)
            )
            self._count(number, tensor.numel() * tensor.element_size(), 1)

    def _count(self, rank: int, size: int, messages: int) -> None:
        self.cost.bytes_out[rank] += size
        self.cost.messages[rank] += messages

    def _serve(self, ranks: Sequence[_Rank]) -> bool:
        """Answer all requests that can be answered. Returns whether there was one."""
        progress = False
        gathered: dict[tuple[str, int], list[tuple[int, int]]] = {}  # of each rank that asks, and the number there
        for number, rank in enumerate(ranks):
            for index, request in enumerate(rank.waiting if not rank.ended else ()):
                if rank.done[index]:
                    continue
                if isinstance(request, Swap):
                    progress |= self._receive(number, rank, index, request)
                else:
                    gathered.setdefault(rank.keys[index], []).append((number, index))
        for askers in gathered.values():
            if len(askers) == self.world:
                requests = [ranks[number].waiting[index] for number, index in askers]
                for (number, index), result in zip(askers, self._combined(requests), strict=True):
                    ranks[number].results[index], ranks[number].done[index] = result, True
                progress = True
        return progress

    def _receive(self, number: int, rank: _Rank, index: int, request: Swap) -> bool:
        queues = {peer: self._posted.get((peer, number, request.name)) for peer in request.receive}
        if not all(queues.values()):
            return False
        found: dict[int, Tensor] = {}
        for peer, queue in queues.items():
            assert queue is not None
            (came, at), memory = queue.popleft(), request.receive[peer]
            self.cost.rounds[number] = max(self.cost.rounds[number], at)
            if came.shape != memory.shape or came.dtype != memory.dtype:
                raise Mismatch(
                    f"rank {number} expects {tuple(memory.shape)} of {memory.dtype} by {request.name!r} from rank "
                    f"{peer}, got {tuple(came.shape)} of {came.dtype}"
                )
            memory.copy_(came)
            found[peer] = memory
        rank.results[index], rank.done[index] = found, True
        return True

    def _combined(self, requests: Sequence[Request]) -> list[Any]:
        """The results of one collective request that all ranks have made, rank by rank."""
        kinds = {type(request) for request in requests}
        if len(kinds) > 1:
            names = sorted(kind.__name__ for kind in kinds)
            raise Mismatch(f"{requests[0].name!r}: the ranks ask for {', '.join(names)}")  # type: ignore[union-attr]
        combine: dict[type, Any] = {
            AllReduce: self._all_reduce, ReduceScatter: self._reduce_scatter, AllGather: self._all_gather,
            Broadcast: self._broadcast,
        }  # fmt: skip
        results: list[Any] = combine[type(requests[0])](requests)
        more = 2 if isinstance(requests[0], AllReduce) else 1
        self.cost.rounds = [max(self.cost.rounds) + (more if self.world > 1 else 0)] * self.world
        return results

    def _all_reduce(self, requests: Sequence[AllReduce]) -> list[Tensor]:
        first = requests[0]
        total = self._reduced(requests, first.divisor)
        size = total.numel() * total.element_size()
        for rank in range(self.world):
            self._count(rank, 2 * (self.world - 1) * size // self.world, 2 * (self.world - 1))
        for rank, one in enumerate(requests):
            if one.out is not None and (one.out.shape, one.out.dtype) != (total.shape, total.dtype):
                raise Mismatch(f"{first.name!r}: out of rank {rank} does not fit the tensor")
        return [total.clone() if one.out is None else one.out.copy_(total) for one in requests]

    def _reduce_scatter(self, requests: Sequence[ReduceScatter]) -> list[Tensor]:
        total = self._reduced(requests, None)
        size = total.numel() * total.element_size()
        for rank in range(self.world):
            self._count(rank, (self.world - 1) * size // self.world, self.world - 1)
        return [part.clone() for part in total.tensor_split(self.world)]

    def _reduced(self, requests: Sequence[AllReduce | ReduceScatter], divisor: int | None) -> Tensor:
        first = requests[0]
        for rank, one in enumerate(requests):
            if getattr(one, "divisor", None) != getattr(first, "divisor", None):
                raise Mismatch(f"{first.name!r}: the ranks divide by different numbers")
            if (one.op, one.tensor.shape, one.tensor.dtype) != (first.op, first.tensor.shape, first.tensor.dtype):
                raise Mismatch(
                    f"{first.name!r}: rank 0 asks for {first.op} of {tuple(first.tensor.shape)} {first.tensor.dtype}, "
                    f"rank {rank} for {one.op} of {tuple(one.tensor.shape)} {one.tensor.dtype}"
                )
        return reduced([one.tensor for one in requests], first.op, divisor)

    def _all_gather(self, requests: Sequence[AllGather]) -> list[list[Tensor]]:
        for rank, one in enumerate(requests):
            self._count(rank, one.payload.numel() * one.payload.element_size() * (self.world - 1), self.world - 1)
        return [[one.payload.detach().clone() for one in requests] for _ in requests]

    def _broadcast(self, requests: Sequence[Broadcast]) -> list[Tensor]:
        root, first = requests[0].root, requests[0].tensor
        for one in requests:
            if (one.root, one.tensor.shape, one.tensor.dtype) != (root, first.shape, first.dtype):
                raise Mismatch(f"{one.name!r}: the ranks differ in root, shape or dtype")
        source = requests[root].tensor.detach().clone()
        self._count(root, source.numel() * source.element_size() * (self.world - 1), self.world - 1)
        for one in requests:
            one.tensor.copy_(source)
        return [one.tensor for one in requests]

    def _describe(self, number: int, rank: _Rank) -> str:
        if rank.ended:
            return f"rank {number} has ended"
        waits = [
            f"{type(request).__name__} {request.name!r}"  # type: ignore[union-attr]
            + (f" from {sorted(request.receive)}" if isinstance(request, Swap) else "")
            for request, done in zip(rank.waiting, rank.done, strict=True)
            if not done
        ]
        return f"rank {number} waits for {', '.join(waits)}"
