"""Messages between two ranks: matched by sender, receiver and tag, in the order of the calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from torch import Tensor

from gradbus.runtime.collectives.engine import Engine
from gradbus.runtime.collectives.operation import channel_of
from gradbus.runtime.errors import CollectiveError, PeerLost
from gradbus.torch.call import CollectiveCall
from gradbus.torch.calls import CollectiveCalls
from gradbus.torch.groups import TorchGroup
from gradbus.torch.shapes import check, described, in_words
from gradbus.torch.work import DdsWork, WorkQueue


def message_name(source: int, to: int, tag: int) -> str:
    """Name of the messages of one sender to one receiver with one tag."""
    return f"message {source} {to} {tag}"


class Messages:
    """Sends and receives of one rank of one group. From whatever thread, also from callbacks."""

    def __init__(self, group: TorchGroup, queue: WorkQueue, moves: CollectiveCalls) -> None:
        self._group = group
        self._queue = queue
        self._moves = moves
        self._lock = threading.Lock()
        self._from_anyone: deque[tuple[DdsWork, Tensor, int]] = deque()  # receives, their tensors and tags
        group.engine.on_change = self._look
        self._to_self: dict[int, deque[tuple[DdsWork, Tensor]]] = {}  # by tag
        self._of_self: dict[int, deque[tuple[DdsWork, Tensor]]] = {}

    def send(self, tensor: Tensor, to: int, tag: int, timeout_s: float) -> DdsWork:
        """Send a tensor to a rank."""
        check(tensor)
        if to == self._group.rank:
            return self._with_self(tensor, tag, timeout_s, self._to_self, self._of_self)
        task = self._moves.send(tensor, to)
        return self._queue.start(self._work(task, message_name(self._group.rank, to, tag), timeout_s))

    def receive(self, tensor: Tensor, source: int, tag: int, timeout_s: float) -> DdsWork:
        """Fill a tensor with what a rank sends."""
        check(tensor)
        if source == self._group.rank:
            return self._with_self(tensor, tag, timeout_s, self._of_self, self._to_self)
        work = self._work(
            self._moves.receive(tensor, source), message_name(source, self._group.rank, tag), timeout_s, source
        )
        return self._queue.start(work)

    def receive_from_anyone(self, tensor: Tensor, tag: int, timeout_s: float) -> DdsWork:
        """Fill a tensor with what comes first from any other rank.

        A receive from a certain rank that is called later takes precedence for what that rank sends.
        """
        check(tensor)
        work = self._work(CollectiveCall("receive from any rank", [], [tensor]), "", timeout_s)
        self._queue.note(work)
        with self._lock:
            self._from_anyone.append((work, tensor, tag))
        self._look()
        return work

    def _work(self, task: CollectiveCall, name: str, timeout_s: float, source: int = -1) -> DdsWork:
        return DdsWork(self._queue, task, name, timeout_s, ordered=False, source=source)

    # From anyone

    def _look(self) -> None:
        """Give messages that are here to those that wait for them. On any thread."""
        if not self._from_anyone:
            return
        with self._lock:
            # Not empty meanwhile: what comes behind this look must not pass by those that wait.
            self._from_anyone = deque(one for one in self._from_anyone if not one[0].ended and not self._match(*one))

    def _match(self, work: DdsWork, tensor: Tensor, tag: int) -> bool:
        engine, rank = self._group.engine, self._group.rank
        for source in self._others():
            name = message_name(source, rank, tag)
            if engine.has_come(name, 0, channel_of(f"send {source} {rank}")):
                work.task, work.name, work.source = self._moves.receive(tensor, source), name, source
                work.begin()
                return True
        error = why_nobody(engine)
        return error is not None and work.end(error)

    def _others(self) -> Iterator[int]:
        world = self._group.world
        return ((self._group.rank + step) % world for step in range(1, world))

    # To oneself

    def _with_self(
        self, tensor: Tensor, tag: int, timeout_s: float, mine: dict[int, deque[tuple[DdsWork, Tensor]]],
        other: dict[int, deque[tuple[DdsWork, Tensor]]],
    ) -> DdsWork:  # fmt: skip
        """A send or a receive; ``mine`` are those of the same kind that wait, ``other`` those of the other kind."""
        rank = self._group.rank
        work = self._work(CollectiveCall(f"message of rank {rank} to itself", [], [tensor]), "", timeout_s, rank)
        self._queue.note(work)
        with self._lock:
            waiting = other.get(tag)
            while waiting and waiting[0][0].ended:  # its time is over
                waiting.popleft()
            if not waiting:
                mine.setdefault(tag, deque()).append((work, tensor))
                return work
            counterpart, its_tensor = waiting.popleft()
        into, source = (its_tensor, tensor) if mine is self._to_self else (tensor, its_tensor)
        error = None
        if into.numel() == source.numel() and into.dtype == source.dtype:
            into.detach().copy_(source.detach().view(into.shape))
        else:
            given, room = (in_words(described(t.dtype, t.shape)) for t in (source, into))
            error = CollectiveError(f"rank {rank} sends itself {given} where this rank has room for {room}")
        counterpart.end(error)
        work.end(error)
        return work


def why_nobody(engine: Engine) -> BaseException | None:
    """Why no message from whomever may be waited for: one rank is dead, and it may have been that one's."""
    if engine.closed is not None:
        return engine.closed
    gone = engine.dead or (engine.gone if len(engine.gone) == engine.world - 1 else {})
    return PeerLost(engine.group, gone) if gone else None
