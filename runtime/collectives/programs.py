"""Rank programs on a group: every request becomes handles of collectives.

A :class:`ProgramRun` is resumed on whatever thread computes; between two requests it is only awaited. So an event loop
does not compute, and several programs run at once: those of one step are :class:`ProgramRuns`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from gradbus.runtime.algorithms.requests import (
    AllGather,
    AllReduce,
    Broadcast,
    Program,
    ReduceScatter,
    Request,
    Swap,
    Together,
    joined_results,
    simple_requests,
)
from gradbus.runtime.collectives.group import Group
from gradbus.runtime.collectives.handle import CollectiveHandle
from gradbus.runtime.errors import CollectiveError

R = TypeVar("R")


class ProgramRun(Generic[R]):
    """One run of a program on this rank. :meth:`resume` is for one thread at a time.

    Attributes:
        handles: what the program waits for; empty when it has ended. To be awaited, each one; then resume.
        value: what the program has returned, once ``handles`` is empty.
    """

    handles: Sequence[CollectiveHandle[Any]]
    value: R

    def __init__(
        self, group: Group, program: Program[R], name: str, *, round_id: int = 0, timeout_s: float | None = None
    ) -> None:
        """
        Args:
            name: of the exchange, equal on all ranks; each request's name comes behind it.
            round_id: as for any collective. timeout_s: of each request; None: that of the group.
        """
        self._group = group
        self._program = program
        self._name = name
        self._options: dict[str, Any] = {"round_id": round_id, "timeout_s": timeout_s}
        self._request: Request | None = None
        self._is_cancelled = False
        self.handles = ()

    def start(self) -> bool:
        """Run to the first request. Returns whether there is one. Raises what the program raises."""
        return self._advance(None)

    def resume(self, results: Sequence[Any]) -> bool:
        """Go on to the next request. Returns whether there is one.

        Args:
            results: of ``handles``, in their order.
        """
        request, left = self._request, list(results)
        assert request is not None
        if not isinstance(request, Together):
            return self._advance(self._result(request, left))
        answers = [self._result(one, left) for one in simple_requests(request)]
        return self._advance(joined_results(request, answers))

    def cancel(self) -> None:
        """Give up: buffers are given back, what has ended stays as it is. A phase that is being computed starts no
        more requests."""
        self._is_cancelled = True
        for handle in self.handles:
            handle.cancel()
        if not getattr(self._program, "gi_running", False):  # of a generator, not of all that act like one
            self._program.close()

    def _advance(self, answer: Any) -> bool:
        self.handles = ()
        try:
            self._request = self._program.send(answer)
        except StopIteration as end:
            self.value = end.value
            return False
        if self._is_cancelled:
            return False
        started: list[CollectiveHandle[Any]] = []
        try:
            request = self._request
            for one in simple_requests(request) if isinstance(request, Together) else (request,):
                started += self._start(one)
        except BaseException:
            for handle in started:
                handle.cancel()
            raise
        self.handles = started
        return self._is_under_way()

    def _is_under_way(self) -> bool:
        """Whether the handles are to be awaited. False: another thread has cancelled, and did not see them."""
        if self._is_cancelled:
            self.cancel()
        return not self._is_cancelled

    def _start(self, request: Request) -> list[CollectiveHandle[Any]]:
        group, options = self._group, self._options
        match request:
            case AllReduce(name, tensor, _, out, _, "in-network") if group.in_network is not None:
                return [group.in_network.start(self._called(name), tensor, out)]
            case AllReduce(name, tensor, op, out, divisor, route):
                route = "auto" if route == "in-network" else route
                options = {**options, "divisor": divisor, "algorithm": route}
                return [group.all_reduce(self._called(name), tensor, op=op, out=out, **options)]
            case ReduceScatter(name, tensor, op):
                return [group.reduce_scatter(self._called(name), tensor, op=op, **options)]
            case AllGather(name, payload):
                return [group.all_gather(self._called(name), payload, **options)]
            case Broadcast(name, tensor, root):
                return [group.broadcast(self._called(name), tensor, root=root, **options)]
            case Swap(name, send, receive):
                # Named by the pair: ranks may sit a swap out, so how often a name was used is equal for a pair alone.
                sends = [group.send(self._called(name, group.rank, to), t, to=to, **options) for to, t in send.items()]
                return sends + [group.recv(self._called(name, by, group.rank), source=by, **options) for by in receive]
        raise AssertionError(f"no simple request: {request}")

    def _called(self, name: str, *ranks: int) -> str:
        return "/".join((self._name, name, *map(str, ranks)))

    def _result(self, request: Request, results: list[Any]) -> Any:
        if not isinstance(request, Swap):
            return results.pop(0)
        del results[: len(request.send)]
        for source, memory in request.receive.items():
            came = results.pop(0)
            if not isinstance(came, Tensor) or (came.shape, came.dtype) != (memory.shape, memory.dtype):
                what = f"{came.dtype} {tuple(came.shape)}" if isinstance(came, Tensor) else type(came).__name__
                raise CollectiveError(
                    f"{self._called(request.name)}: expected {memory.dtype} {tuple(memory.shape)} from rank {source}, "
                    f"got {what}"
                )
            memory.copy_(came)
        return dict(request.receive)


class ProgramRuns:
    """Runs several programs that go from phase to phase together. One thread at a time starts and resumes them:

        runs.start(...)                     # one or more; may be called by a hook, in the midst of a backward pass
        while runs.goes_on:
            runs.resume([await handle for handle in runs.handles])

    Attributes:
        waits: of each of these phases the time, by ``time.perf_counter``,
            when nothing was left to compute, and when the last handle ended.
    """

    __slots__ = (
        "_ended",
        "_group",
        "_is_cancelled",
        "_round_id",
        "_runs",
        "_sent_s",
        "_timeout_s",
        "_waiting",
        "waits",
    )

    def __init__(self, group: Group, *, round_id: int, timeout_s: float) -> None:
        """``timeout_s``: of each request."""
        self._group = group
        self._round_id = round_id
        self._timeout_s = timeout_s
        self._runs: list[ProgramRun[Any]] = []
        self._waiting: list[ProgramRun[Any]] = []
        self._ended: deque[CollectiveHandle[Any]] = deque()
        self.waits: deque[tuple[float, float]] = deque()
        self._sent_s = 0.0
        self._is_cancelled = False

    def start(self, name: str, program: Program[Any]) -> None:
        """Run a program to its first request. ``name``: equal on all ranks, and of no other program of this round.

        After :meth:`cancel` nothing is started, whatever thread this is called on.
        """
        run = ProgramRun(self._group, program, name, round_id=self._round_id, timeout_s=self._timeout_s)
        self._runs.append(run)
        if self._is_cancelled:  # asked when cancel() can see the run: one of the two finds the other
            run.cancel()
        elif run.start():
            self._waiting.append(run)

    @property
    def goes_on(self) -> bool:
        """Return whether a program waits for a request."""
        return bool(self._waiting)

    @property
    def handles(self) -> list[CollectiveHandle[Any]]:
        """Handles of the requests under way; may be empty although a program waits."""
        return [handle for run in self._waiting for handle in run.handles]

    def all_sent(self) -> None:
        """Nothing is left to compute in this phase: from here on a rank waits."""
        self._sent_s = time.perf_counter()

    def resume(self, results: Sequence[Any]) -> bool:
        """Go on to the next phase. Returns whether there is one. ``results``: of ``handles``, in their order."""
        handles = self.handles
        ended_s = [self._sent_s if handle.finished_s is None else handle.finished_s for handle in handles]
        self.waits.append((self._sent_s, max([self._sent_s, *ended_s])))
        self._ended += handles
        waiting, self._waiting = self._waiting, []
        start = 0
        for run in waiting:
            count = len(run.handles)
            if run.resume(results[start : start + count]):
                self._waiting.append(run)
            start += count
        self.all_sent()
        return bool(self._waiting)

    def take_waits(self) -> list[tuple[float, float]]:
        """Return ``waits``, each once, as :meth:`take_ended`."""
        return [self.waits.popleft() for _ in range(len(self.waits))]

    def take_ended(self) -> list[CollectiveHandle[Any]]:
        """Return handles of the phases that are over, each once. Another phase may end on another thread meanwhile."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def cancel(self) -> None:
        """Give up: buffers are given back, what has ended stays as it is."""
        self._is_cancelled = True
        for run in self._runs:
            run.cancel()


async def run_program(
    group: Group,
    program: Program[R],
    name: str,
    *,
    round_id: int = 0,
    timeout_s: float | None = None,
    compute: Callable[..., Any] | None = None,
) -> R:
    """Run a program on this rank of a group to its end. Returns what it returns.

    Args:
        compute: runs a function on another thread and returns an awaitable, as ``ComputeThread.run`` does. None: the
            program computes on the event loop, which is for small tensors.

    Raises:
        What the collectives and the program raise.
    """
    run = ProgramRun(group, program, name, round_id=round_id, timeout_s=timeout_s)

    async def call(function: Callable[..., bool], *arguments: Any) -> bool:
        return bool(await compute(function, *arguments)) if compute is not None else function(*arguments)

    try:
        goes_on = await call(run.start)
        while goes_on:
            goes_on = await call(run.resume, [await handle for handle in run.handles])
    except BaseException:
        run.cancel()
        raise
    return run.value
