"""Run the programs of all ranks on a model of a network: what they return in a group, and the time that they take.

A discrete-event model on SimPy: the extra ``simulate``. A message occupies each link of its
route for ``overhead + bytes / rate`` and is on the next one after the link's latency; its first bytes go on before its
last ones have come (virtual cut-through), and messages that meet at a link pass it one after the other, in the order in
which they came. So a message that is alone on its links takes ``latency + bytes / rate``, with the sum of the latencies
of its route and the smallest rate, which is what the usual formulas count.

On a link with loss a message is cut into frames; those that are lost are sent again, as often as it takes, each time
``resend_s`` later. Which ones is drawn from the seed.

Where programs are given tensors without values (:func:`.sizes.size_only`) only their sizes count: nothing is added up,
and 1,024 ranks need no memory for theirs. A program that looks at values cannot be run so.

What is not a rank program, as an actor on a switch, runs on the same links: it sends with :meth:`NetworkModel.send`,
from and to any node of the topology, or with :meth:`NetworkModel.multicast` what may be lost, and waits with the timers
and processes of :attr:`NetworkModel.env`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from gradbus.commands.simulate.rank_programs import Deadlock, Mismatch, reduced
from gradbus.commands.simulate.sizes import has_values
from gradbus.commands.simulate.topology import LinkUse, NetworkTopology, Node
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
from gradbus.runtime.collectives.reductions import choose
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.needs import how_to_install

try:
    import simpy
except ModuleNotFoundError:
    raise ConfigError(
        f"the model of a network needs simpy, which is not installed. {how_to_install('simpy')}"
    ) from None

R = TypeVar("R")
_Key = tuple[int, int, str, int]  # sender, receiver, name, how often it was used between these before


class NetworkModel:
    """The ranks of a topology, with a clock of their own.

    Attributes:
        env: SimPy's environment: ``env.now`` is the time in seconds, ``env.timeout(s)`` a wait.
        bytes_out: that each rank has sent, without those that were sent again.
        lost: packets of :meth:`multicast` that a link has lost.
        running: programs that have not ended yet.
        arrived, awaited: tensors that no program has asked for yet, and what waits for one that has not arrived.
    """

    def __init__(
        self, topology: NetworkTopology, *, seed: int = 0, frame_bytes: int = 64 * 1024, resend_s: float = 0.01
    ) -> None:
        """
        Args:
            seed: of what is lost. frame_bytes: what is lost at once. resend_s: until it is sent again.
        """
        self.topology = topology
        self.env = simpy.Environment()
        self.bytes_out = [0] * topology.world
        self._frame_bytes = frame_bytes
        self._resend_s = resend_s
        self._random = np.random.default_rng(seed)
        self.arrived: dict[_Key, Tensor] = {}
        self.awaited: dict[_Key, _Exchange] = {}
        self.running: dict[_Run, None] = {}
        self._branches: dict[tuple[Node, tuple[Node, ...]], list[_Branch]] = {}
        self.lost = 0

    def run(self, programs: Sequence[Program[R]], name: str = "") -> list[R]:
        """Run one program on each rank, all from now on, to their ends. Returns what they return.

        Raises:
            Deadlock: they wait for each other. Mismatch: their requests do not fit. And what a program raises.
        """
        if len(programs) != self.topology.world:
            raise ValueError(f"expected {self.topology.world} programs, one for each rank, got {len(programs)}")
        ended = [self.launch(rank, program, name) for rank, program in enumerate(programs)]
        self.run_all()
        return [cast(R, event.value) for event in ended]

    def launch(self, rank: int, program: Program[Any], name: str) -> simpy.Event:
        """Start a program on one rank, now. Several may run at once, with different names.

        Returns:
            What a SimPy process can wait for: the end of the program, with what it returns as value.
        """
        ended = simpy.Event(self.env)
        run = _Run(self, rank, program, name, ended.succeed)
        run.advance(None)
        return ended

    def run_all(self) -> None:
        """Let time pass until nothing is left to happen. Raises as :meth:`run` does."""
        self.run_until(None)
        if self.running:
            raise Deadlock("; ".join(run.describe() for run in self.running))
        if self.arrived:
            sender, receiver, name, _ = min(self.arrived)
            raise Mismatch(f"rank {receiver} never received {name!r}, which rank {sender} sent")

    def run_until(self, time_s: float | None) -> None:
        """Let time pass until this time of the clock; None: until nothing is left to happen."""
        with _no_garbage_collection():
            self.env.run(time_s)

    def send(self, source: Node, target: Node, size_bytes: int, deliver: Callable[[], object]) -> float:
        """Send a message of this size from one node to another; ``deliver`` is called when all of it has come.

        Returns:
            When its last byte leaves the source, in seconds of the clock.
        """
        now_s = self.env.now
        route = self.topology.route(source, target)
        if not route:
            self.call_at(now_s, deliver)
            return now_s
        size_bytes, late_s = self._with_losses(route, size_bytes)
        return self._pass_on(route, 0, size_bytes, 0.0, late_s, deliver)

    def multicast(
        self, source: Node, targets: tuple[Node, ...], size_bytes: int, deliver: Callable[[Sequence[Node]], object]
    ) -> None:
        """Send a packet from one node to others. A link that several of their ways have in common carries it once.

        On a link with loss it is lost as a whole, and nobody sends it again. ``deliver`` is called with the nodes that
        it reaches, at each time at which it reaches some.
        """
        branches = self._branches.get((source, targets))
        if branches is None:
            branches = self._branches[source, targets] = _branches_of(
                [(target, self.topology.route(source, target)) for target in targets]
            )
        self._spread(branches, size_bytes, 0.0, deliver)

    def _spread(
        self, branches: list[_Branch], size_bytes: int, tail_s: float, deliver: Callable[[Sequence[Node]], object]
    ) -> None:
        """The first byte of a packet is at the beginning of some links now, the last one not before ``tail_s``."""
        reached: dict[float, list[Node]] = {}
        for branch in branches:
            spec = branch.link.spec
            start_s, there_s = self._carry(branch.link, size_bytes, tail_s)
            if spec.loss and self._random.random() < spec.loss:
                self.lost += 1
                continue
            if branch.ends:
                reached.setdefault(there_s, []).extend(branch.ends)
            if branch.further:
                self.call_at(
                    start_s + spec.overhead_s + spec.latency_s,
                    lambda further=branch.further, there_s=there_s: self._spread(  # type: ignore[misc]
                        further, size_bytes, there_s, deliver
                    ),
                )
        for there_s, nodes in reached.items():
            self.call_at(there_s, lambda nodes=nodes: deliver(nodes))  # type: ignore[misc]

    def _carry(self, link: LinkUse, size_bytes: int, tail_s: float) -> tuple[float, float]:
        """A message is at the beginning of a link now. Returns when the link begins to carry it, and when all of it is
        at the other end: not before ``tail_s``, when its last byte is at this one, and the latency."""
        spec = link.spec
        start_s = max(self.env.now, link.free_s)
        takes_s = spec.overhead_s + size_bytes / spec.rate_bytes_s
        link.free_s = start_s + takes_s  # what waits for a slower link before this one leaves room for others
        link.busy_s += takes_s
        link.bytes_carried += size_bytes
        link.messages += 1
        return start_s, max(link.free_s, tail_s) + spec.latency_s

    def _pass_on(
        self,
        route: list[LinkUse],
        hop: int,
        size_bytes: int,
        tail_s: float,
        late_s: float,
        deliver: Callable[[], object],
    ) -> float:
        """The first byte of a message is at a link now, the last one not before ``tail_s``. Returns when it leaves."""
        spec = route[hop].spec
        start_s, there_s = self._carry(route[hop], size_bytes, tail_s)
        if hop + 1 == len(route):
            self.call_at(there_s + late_s, deliver)
        else:
            self.call_at(
                start_s + spec.overhead_s + spec.latency_s,
                lambda: self._pass_on(route, hop + 1, size_bytes, there_s, late_s, deliver),
            )
        return there_s - spec.latency_s

    def call_at(self, time_s: float, action: Callable[[], object]) -> None:
        """Do something at a time of the clock."""
        timeout = self.env.timeout(time_s - self.env.now)
        assert timeout.callbacks is not None
        timeout.callbacks.append(lambda _: action())  # type: ignore[arg-type]

    def _with_losses(self, route: list[LinkUse], size_bytes: int) -> tuple[int, float]:
        """The bytes of a message with those that are sent again, and the seconds that these come later."""
        if not self.topology.loses:
            return size_bytes, 0.0
        arrives = math.prod(1.0 - link.spec.loss for link in route)
        left = lost = math.ceil(size_bytes / self._frame_bytes)
        rounds, again = -1, -lost
        while left:
            again += left
            left = int(self._random.binomial(left, 1.0 - arrives))
            rounds += 1
        return size_bytes + min(size_bytes, self._frame_bytes) * again, self._resend_s * max(0, rounds)

    def receive(self, key: _Key, tensor: Tensor) -> None:
        """A tensor has arrived: it goes to what waits for it, or is kept until something does."""
        exchange = self.awaited.pop(key, None)
        if exchange is None:
            self.arrived[key] = tensor
        else:
            exchange.receive(key[0], tensor)


@dataclass(slots=True, eq=False)
class _Branch:
    """A link on the ways of a packet to several nodes.

    Attributes:
        ends: those that are at its end. further: links from there on.
    """

    link: LinkUse
    ends: list[Node]
    further: list[_Branch]


def _branches_of(ways: Sequence[tuple[Node, list[LinkUse]]], hop: int = 0) -> list[_Branch]:
    """Put together what the ways have in common. Raises ValueError: one of them is from a node to itself."""
    by_link: dict[str, list[tuple[Node, list[LinkUse]]]] = {}
    for target, route in ways:
        if not route:
            raise ValueError(f"node {target!r} sends a packet to itself")
        by_link.setdefault(route[hop].name, []).append((target, route))
    return [
        _Branch(
            shared[0][1][hop],
            [target for target, route in shared if len(route) == hop + 1],
            _branches_of([(target, route) for target, route in shared if len(route) > hop + 1], hop + 1),
        )
        for shared in by_link.values()
    ]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage meanwhile: what waits is a million small objects without cycles, and to look at them again and
    again took half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(slots=True, eq=False)
class _Exchange:
    """Holds what one simple request waits for, on one rank.

    Attributes:
        finish: makes the result of the request of what came, by the rank that sent it.
    """

    run: _Run
    index: int
    finish: Callable[[dict[int, Tensor]], Any]
    left_s: float
    missing: int = 0
    came: dict[int, Tensor] = field(default_factory=dict)

    def receive(self, sender: int, tensor: Tensor) -> None:
        self.came[sender] = tensor
        self.missing -= 1
        if not self.missing:
            self.end_when_sent()

    def end_when_sent(self) -> None:
        network = self.run.network
        if self.left_s > network.env.now:
            network.call_at(self.left_s, self._end)
        else:
            self._end()

    def _end(self) -> None:
        self.run.complete(self.index, self.finish(self.came))


class _Run:
    """A program on one rank."""

    def __init__(
        self, network: NetworkModel, rank: int, program: Program[Any], name: str, end: Callable[[Any], object]
    ) -> None:
        self.network = network
        self.rank = rank
        self._program = program
        self._name = name
        self._end = end
        self._request: Request | None = None
        self._results: list[Any] = []
        self._open: dict[int, Request] = {}  # simple requests that have no result yet, by their place
        self._is_asking = False
        self._counts: dict[tuple[str, int, int], int] = {}  # of a name, or of messages of a name, by sender, receiver
        network.running[self] = None

    def advance(self, answer: Any) -> None:
        """Resume the program, again and again while it waits for nothing."""
        while True:
            try:
                self._request = self._program.send(answer)
            except StopIteration as end:
                del self.network.running[self]
                self._end(end.value)
                return
            simple = simple_requests(self._request)
            self._results = [None] * len(simple)
            self._open = dict(enumerate(simple))
            self._is_asking = True
            for index, request in enumerate(simple):
                self._ask(index, request)
            self._is_asking = False
            if self._open:
                return
            answer = joined_results(self._request, self._results)

    def complete(self, index: int, result: Any) -> None:
        """One of the requests has its result."""
        self._results[index] = result
        del self._open[index]
        if not self._open and not self._is_asking:
            assert self._request is not None
            self.advance(joined_results(self._request, self._results))

    def describe(self) -> str:
        waits = [
            f"{type(request).__name__} {request.name!r}"  # type: ignore[union-attr]
            + (f" from {sorted(request.receive)}" if isinstance(request, Swap) else "")
            for request in self._open.values()
        ]
        return f"rank {self.rank} waits for {', '.join(waits)}"

    def _ask(self, index: int, request: Request) -> None:
        rank, world = self.rank, self.network.topology.world
        if isinstance(request, Swap):
            self._exchange(index, request.name, request.send, request.receive, lambda came: _into(request, rank, came))
            return
        others = _others(rank, world)
        match request:
            case AllGather(name, payload):
                own = _copied(payload)
                self._exchange(
                    index,
                    self._once(name),
                    dict.fromkeys(others, payload),
                    others,
                    lambda came: _in_order(rank, own, came),
                )
            case Broadcast(name, tensor, root) if rank == root:
                self._exchange(index, self._once(name), dict.fromkeys(others, tensor), (), lambda _: tensor)
            case Broadcast(name, tensor, root):
                self._exchange(index, self._once(name), {}, [root], lambda came: _copy_into(tensor, came[root]))
            case ReduceScatter(name, tensor, op):
                parts = tensor.detach().tensor_split(world)
                own = _copied(parts[rank])
                self._exchange(
                    index,
                    self._once(name),
                    {peer: parts[peer] for peer in others},
                    others,
                    lambda came: _reduced(_in_order(rank, own, came), op, None),
                )
            case AllReduce(name):
                program = _all_reduce(request, rank, world)
                full_name = f"{self._name}/{self._once(name)}"
                _Run(self.network, rank, program, full_name, lambda total: self.complete(index, total)).advance(None)
            case _:
                raise AssertionError(f"no simple request: {request}")

    def _once(self, name: str) -> str:
        """A name that no other request of this program has, equal on all ranks, which all make it."""
        return f"{name}#{self._count(name, -1, -1)}"

    def _count(self, name: str, sender: int, receiver: int) -> int:
        key = (name, sender, receiver)
        count = self._counts.get(key, 0)
        self._counts[key] = count + 1
        return count

    def _exchange(
        self,
        index: int,
        name: str,
        send: Mapping[int, Tensor],
        sources: Iterable[int],
        finish: Callable[[dict[int, Tensor]], Any],
    ) -> None:
        """Send these tensors, and wait for one of each source."""
        network, rank, full_name = self.network, self.rank, f"{self._name}/{name}"
        left_s = network.env.now
        for peer, tensor in send.items():
            if not 0 <= peer < network.topology.world or peer == rank:
                raise Mismatch(f"rank {rank} sends {name!r} to rank {peer} in a world of {network.topology.world}")
            size_bytes, key = tensor.nbytes, (rank, peer, full_name, self._count(name, rank, peer))
            network.bytes_out[rank] += size_bytes
            copy = _copied(tensor)
            left_s = network.send(rank, peer, size_bytes, lambda key=key, copy=copy: network.receive(key, copy))  # type: ignore[misc]
        exchange = _Exchange(self, index, finish, left_s)
        for source in sources:
            key = (source, rank, full_name, self._count(name, source, rank))
            tensor_there = network.arrived.pop(key, None)
            if tensor_there is None:
                network.awaited[key] = exchange
                exchange.missing += 1
            else:
                exchange.came[source] = tensor_there
        if not exchange.missing:
            exchange.end_when_sent()


def _all_reduce(request: AllReduce, rank: int, world: int) -> Program[Tensor]:
    """As the bus does it: whole tensors to everybody, or reduce-scatter and gather, by its own rule."""
    x, op, divisor = request.tensor.detach(), request.op, request.divisor
    others = _others(rank, world)
    flat = x.reshape(-1)
    if choose("auto" if request.route == "in-network" else request.route, world, x.nbytes) == "direct":
        came = yield Swap("all", dict.fromkeys(others, flat), {peer: torch.empty_like(flat) for peer in others})
        total = _reduced(_in_order(rank, flat, came), op, divisor)
    else:
        parts = flat.tensor_split(world)
        came = yield Swap(
            "scatter", {peer: parts[peer] for peer in others}, {peer: torch.empty_like(parts[rank]) for peer in others}
        )
        own = _reduced(_in_order(rank, parts[rank], came), op, divisor or world)
        came = yield Swap(
            "gather", dict.fromkeys(others, own), {peer: torch.empty_like(parts[peer]) for peer in others}
        )
        total = torch.cat(_in_order(rank, own, came))
    total = total.view(x.shape)
    return total if request.out is None else _copy_into(request.out, total)


def _others(rank: int, world: int) -> list[int]:
    """All other ranks, beginning with the next one: where all began with rank 0, its link would be the bottleneck."""
    return [(rank + distance) % world for distance in range(1, world)]


def _in_order(rank: int, own: Tensor, came: Mapping[int, Tensor]) -> list[Tensor]:
    """Return what came, with the own tensor at its place, in rank order."""
    return [own if peer == rank else came[peer] for peer in range(len(came) + 1)]


def _reduced(tensors: Sequence[Tensor], op: Any, divisor: int | None) -> Tensor:
    return reduced(tensors, op, divisor) if has_values(tensors[0]) else tensors[0]


def _copied(tensor: Tensor) -> Tensor:
    """The tensor as it is now: its owner may change it when it has left, and it comes later."""
    return tensor.detach().clone() if has_values(tensor) else tensor


def _copy_into(memory: Tensor, tensor: Tensor) -> Tensor:
    if (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
        raise Mismatch(f"memory of {tuple(memory.shape)} {memory.dtype} for {tuple(tensor.shape)} {tensor.dtype}")
    return memory.copy_(tensor) if has_values(tensor) else tensor


def _into(request: Swap, rank: int, came: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Copy what came into the memory of the request."""
    found = {}
    for peer, memory in request.receive.items():
        tensor = came[peer]
        if memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            raise Mismatch(
                f"rank {rank} expects {tuple(memory.shape)} of {memory.dtype} by {request.name!r} from rank {peer}, "
                f"got {tuple(tensor.shape)} of {tensor.dtype}"
            )
        found[peer] = memory.copy_(tensor) if has_values(tensor) else tensor
    return found
