"""The decisions of a parameter server: whose gradient is awaited, when it is applied, and who may go on. No I/O.

A worker's clock is the number of gradients that it has pushed. In synchronous mode a version is made of one gradient
of every worker. In asynchronous mode each is applied on its arrival, and a worker goes on only while it is at most
``staleness`` clocks ahead of the slowest one: Ho et al., "More effective distributed ML via a stale synchronous
parallel parameter server", NIPS 2013, section 3.

Workers also meet: at the start and the end, and where the weights must be equal for all (evaluations, checkpoints).
Nobody is answered then before all have asked, so between the servers nothing has to be agreed on: each has the same
gradients at a meeting.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["start", "push", "meet", "save", "end"]

MAX_COUNTED_STALENESS = 1024  # larger ones are counted as this


@dataclass(frozen=True, slots=True)
class Decision:
    """Tells what follows from an event.

    Attributes:
        apply: workers whose gradients are applied now, in rank order. count: one over the factor of their sum.
        release: workers that are answered afterwards, in rank order.
        wants_end: some worker wants the run to end, and all learn it with this answer.
    """

    apply: tuple[int, ...] = ()
    count: int = 1
    release: tuple[int, ...] = ()
    wants_end: bool = False


@dataclass(frozen=True, slots=True)
class _Request:
    kind: Kind
    clock: int
    has_gradient: bool
    meets: bool

    def __str__(self) -> str:
        return f"{self.kind} at step {self.clock}"


@dataclass(slots=True)
class _Worker:
    clock: int
    seen: int  # updates that are in the weights it has
    request: _Request | None = None


class ProtocolError(ValueError):
    """A worker asks for what cannot be asked for now; the text says what was expected and what came."""


@dataclass(slots=True)
class Clocks:
    """The workers of a run, as one server sees them.

    Attributes:
        updates: how often the weights were changed. staleness_counts: gradients that were applied, by the number of
            updates since the worker got the weights that it computed them with. refused: pushes without a gradient, as
            it was not finite.
    """

    workers: int
    staleness: int | None  # None: synchronous
    needed: int = 1
    start: int = 0
    updates: int = 0
    refused: int = 0
    staleness_counts: Counter[int] = field(default_factory=Counter)
    _live: dict[int, _Worker] = field(init=False)
    _wants_end: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._live = {rank: _Worker(self.start, self.updates) for rank in range(self.workers)}

    @property
    def live(self) -> tuple[int, ...]:
        """Workers that have not been lost, in rank order."""
        return tuple(self._live)

    @property
    def has_enough(self) -> bool:
        """Whether the run can go on with those that are left."""
        return len(self._live) >= self.needed

    @property
    def slowest(self) -> int:
        """The smallest clock of those that are left; the start's if none is."""
        return min((worker.clock for worker in self._live.values()), default=self.start)

    def push(
        self,
        rank: int,
        clock: int,
        *,
        has_gradient: bool = True,
        is_refused: bool = False,
        meets: bool = False,
        wants_end: bool = False,
    ) -> Decision:
        """A gradient has arrived.

        Args:
            clock: the number of gradients that the worker had pushed before.
            has_gradient: False: it has no data in this step, or the gradient is not finite, which ``is_refused`` says.
            meets: it goes on only when all have pushed this one.

        Raises:
            ProtocolError: another one was expected, or all wait for different things.
        """
        worker = self._expect(rank, _Request("push", clock, has_gradient, meets or self.staleness is None))
        worker.clock += 1
        self.refused += is_refused
        self._wants_end |= wants_end
        if self.staleness is None or not has_gradient:
            return self._decide()
        self._count(self.updates - worker.seen)
        self.updates += 1
        return self._decide((rank,), count=len(self._live))

    def ask(self, rank: int, kind: Kind, clock: int) -> Decision:
        """A worker has come to a meeting. Raises ProtocolError, as above."""
        self._expect(rank, _Request(kind, clock, has_gradient=False, meets=True))
        return self._decide()

    def lose(self, rank: int) -> Decision:
        """A worker has died. What it has pushed for a version that is not complete is left out."""
        self._live.pop(rank, None)
        return self._decide()

    def _expect(self, rank: int, request: _Request) -> _Worker:
        worker = self._live.get(rank)
        if worker is None:
            raise ProtocolError(f"worker {rank} has been dropped, or is none of {self.workers}")
        if worker.request is not None:
            raise ProtocolError(f"worker {rank} sent {request}, while {worker.request} has not been answered")
        if request.clock != worker.clock:
            raise ProtocolError(f"worker {rank} sent {request}, expected step {worker.clock}")
        worker.request = request
        return worker

    def _count(self, staleness: int) -> None:
        self.staleness_counts[min(staleness, MAX_COUNTED_STALENESS)] += 1

    def _decide(self, apply: tuple[int, ...] = (), count: int = 1) -> Decision:
        waiting = {rank: worker.request for rank, worker in self._live.items() if worker.request is not None}
        if len(waiting) == len(self._live) and len(waiting) > 0 and all(r.meets for r in waiting.values()):
            return self._complete(waiting, apply, count)
        slowest = self.slowest
        release = tuple(
            rank
            for rank, request in waiting.items()
            if not request.meets and self._live[rank].clock - slowest <= (self.staleness or 0)
        )
        if len(waiting) == len(self._live) and waiting and not release:
            raise ProtocolError(f"the workers wait for different things: {self._text(waiting)}")
        return self._released(Decision(apply, count, release))

    def _complete(self, waiting: dict[int, _Request], apply: tuple[int, ...], count: int) -> Decision:
        """All have met."""
        if len({(request.kind, request.clock) for request in waiting.values()}) > 1:
            raise ProtocolError(f"the workers wait for different things: {self._text(waiting)}")
        is_push = next(iter(waiting.values())).kind == "push"
        if self.staleness is None and is_push:
            apply = tuple(rank for rank, request in waiting.items() if request.has_gradient)
            count = max(1, len(apply))
            self.updates += bool(apply)
            for _ in apply:
                self._count(0)
        return self._released(Decision(apply, count, tuple(waiting), is_push and self._wants_end))

    def _released(self, decision: Decision) -> Decision:
        for rank in decision.release:
            self._live[rank].request = None
            self._live[rank].seen = self.updates
        return decision

    @staticmethod
    def _text(waiting: dict[int, _Request]) -> str:
        return ", ".join(f"worker {rank} sent {request}" for rank, request in waiting.items())
