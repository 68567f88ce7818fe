"""Messages between two ranks: matched by sender, receiver and tag, in the order of the calls.

A barrier made of them names the ranks that do not come: all report to rank 0, which sends them the outcome.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from datetime import timedelta

import torch
from torch import Tensor

from gradbus.runtime.collectives.engine import Engine
from gradbus.runtime.collectives.operation import channel_of
from gradbus.runtime.errors import CollectiveError, PeerLost
from gradbus.torch.calls import CollectiveCall, CollectiveCalls
from gradbus.torch.shapes import check, described, readable
from gradbus.torch.work import DdsWork, WorkQueue

_Local = dict[int, deque[tuple[DdsWork, Tensor]]]  # by tag, of messages of a rank to itself

_REPORT, _OUTCOME = -1, -2  # tags of the barrier; torch's are not negative
_ALL_CAME, _SOME_MISSING = 1, 0
_SLACK_S = 1.0  # how much longer than rank 0 the others wait, which else could give up just before its outcome comes


def message_name(source: int, to: int, tag: int) -> str:
    """Name of the messages of one sender to one receiver with one tag."""
    return f"message {source} {to} {tag}"


class Messages:
    """Sends and receives of one rank of one group. From whatever thread, also from callbacks."""

    def __init__(self, engine: Engine, queue: WorkQueue, calls: CollectiveCalls) -> None:
        self._engine = engine
        self._rank = engine.rank
        self._queue = queue
        self._calls = calls
        self._lock = threading.Lock()
        self._from_anyone: deque[tuple[DdsWork, Tensor, int]] = deque()  # receives, their tensors and tags
        self._sends: _Local = {}
        self._receives: _Local = {}
        engine.on_change = self._look

    def send(self, tensor: Tensor, to: int, tag: int, timeout_s: float) -> DdsWork:
        """Send a tensor to a rank."""
        check(tensor)
        if to == self._rank:
            return self._with_self(tensor, tag, timeout_s, is_send=True)
        return self._queue.start(self._work(self._calls.send(tensor, to), timeout_s, message_name(self._rank, to, tag)))

    def receive(self, tensor: Tensor, source: int, tag: int, timeout_s: float) -> DdsWork:
        """Fill a tensor with what a rank sends."""
        check(tensor)
        if source == self._rank:
            return self._with_self(tensor, tag, timeout_s, is_send=False)
        name = message_name(source, self._rank, tag)
        return self._queue.start(self._work(self._calls.receive(tensor, source), timeout_s, name, source))

    def receive_from_anyone(self, tensor: Tensor, tag: int, timeout_s: float) -> DdsWork:
        """Fill a tensor with what comes first from any other rank.

        A receive from a certain rank that is called later takes precedence for what that rank sends.
        """
        check(tensor)
        work = self._work(CollectiveCall("receive from any rank", [], [tensor]), timeout_s)
        self._queue.note(work)
        with self._lock:
            self._from_anyone.append((work, tensor, tag))
        self._look()
        return work

    def _work(self, call: CollectiveCall, timeout_s: float, name: str = "", source: int = -1) -> DdsWork:
        return DdsWork(self._queue, call, name, timeout_s, ordered=False, source=source)

    # From anyone

    def _look(self) -> None:
        """Give messages that are here to those that wait for them. On any thread."""
        if not self._from_anyone:
            return
        with self._lock:
            # Not empty meanwhile: what comes behind this look must not pass by those that wait.
            self._from_anyone = deque(one for one in self._from_anyone if not one[0].ended and not self._match(*one))

    def _match(self, work: DdsWork, tensor: Tensor, tag: int) -> bool:
        engine, rank = self._engine, self._rank
        for source in ((rank + step) % engine.world for step in range(1, engine.world)):
            name = message_name(source, rank, tag)
            if engine.has_come(name, 0, channel_of(f"send {source} {rank}")):
                work.call, work.name, work.source = self._calls.receive(tensor, source), name, source
                work.begin()
                return True
        error = why_none_comes(engine)
        return error is not None and work.end(error)

    # To oneself

    def _with_self(self, tensor: Tensor, tag: int, timeout_s: float, *, is_send: bool) -> DdsWork:
        """A send or a receive: ends with the next one of the other kind, or waits for it."""
        rank = self._rank
        alike, others = (self._sends, self._receives) if is_send else (self._receives, self._sends)
        call = CollectiveCall(f"message of rank {rank} to itself", [], [tensor])
        work = self._work(call, timeout_s, source=rank)
        self._queue.note(work)
        with self._lock:
            waiting = others.get(tag)
            while waiting and waiting[0][0].ended:  # its time is over
                waiting.popleft()
            if not waiting:
                alike.setdefault(tag, deque()).append((work, tensor))
                return work
            counterpart, its_tensor = waiting.popleft()
        source, into = (tensor, its_tensor) if is_send else (its_tensor, tensor)
        error = None
        if into.numel() == source.numel() and into.dtype == source.dtype:
            into.detach().copy_(source.detach().view(into.shape))
        else:
            given, room = (readable(described(t.dtype, t.shape)) for t in (source, into))
            error = CollectiveError(f"rank {rank} sends itself {given} where this rank has room for {room}")
        counterpart.end(error)
        work.end(error)
        return work


def why_none_comes(engine: Engine) -> BaseException | None:
    """Why no message from any rank may be waited for: one rank is dead, and it may have been that one's."""
    if engine.closed is not None:
        return engine.closed
    gone = engine.dead or (engine.gone if len(engine.gone) == engine.world - 1 else {})
    return PeerLost(engine.group, gone) if gone else None


def monitored_barrier(messages: Messages, rank: int, world: int, timeout_s: float, wait_all_ranks: bool) -> None:
    """Wait for all ranks of a group.

    Args:
        wait_all_ranks: wait for all until the deadline, and name all that are missing; else the first.

    Raises:
        RuntimeError: ranks did not come in time. The text is gloo's: torch's users look for it.
    """
    if timeout_s <= 0:
        raise RuntimeError(f"[Rank {rank}]: Rank {rank} timed out in monitoredBarrier after 0 ms.")
    if rank == 0:
        _collect(messages, world, timeout_s, wait_all_ranks)
    else:
        _report(messages, rank, timeout_s)


def _collect(messages: Messages, world: int, timeout_s: float, wait_all_ranks: bool) -> None:
    until_s = time.monotonic() + timeout_s
    reports = {
        other: messages.receive(torch.empty(1, dtype=torch.uint8), other, _REPORT, timeout_s)
        for other in range(1, world)
    }
    missing: list[int] = []
    for other, report in reports.items():
        if not missing or wait_all_ranks:
            missing += [other] * (not _came(report, until_s))
    outcome = torch.tensor([_SOME_MISSING if missing else _ALL_CAME], dtype=torch.uint8)
    for other, report in reports.items():
        if report.is_success():
            messages.send(outcome, other, _OUTCOME, timeout_s)
        else:
            report.expire()
    if missing:
        late = f"{'Ranks' if wait_all_ranks else 'Rank'} {', '.join(map(str, missing))}"
        raise RuntimeError(f"[Rank 0]: {late} failed to pass monitoredBarrier in {timeout_s * 1000:.0f} ms")


def _came(report: DdsWork, until_s: float) -> bool:
    try:
        return report.wait(timedelta(seconds=max(0.001, until_s - time.monotonic())))
    except RuntimeError:
        return False


def _report(messages: Messages, rank: int, timeout_s: float) -> None:
    outcome = torch.empty(1, dtype=torch.uint8)
    try:
        messages.send(torch.zeros(1, dtype=torch.uint8), 0, _REPORT, timeout_s).wait()
        messages.receive(outcome, 0, _OUTCOME, timeout_s + _SLACK_S).wait()
        why = "" if int(outcome) == _ALL_CAME else "some ranks did not come"
    except RuntimeError as error:
        why = str(error)
    if why:
        raise RuntimeError(
            f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
            f"send/recv from rank 0. Please check rank 0 logs for faulty rank. ({why})"
        )
