"""Which payloads of a collective leave at once (eager), and which wait until their receivers have called (rendezvous).

A receiver keeps what comes before its call, within a bound. So a payload that is large, or more than a receiver has
room for, is announced with an RTS; the receiver answers with a CTS when it has made the call, and then the payload
leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from gradbus.runtime.wire.frames import CHUNK_BYTES, chunk_count

# Parts of empty messages about the payloads of a collective.
ACK = 0xFFFF  # all of the payload has arrived
CTS = 0xFFFE  # clear to send: the receiver has made the call
RTS = 0xFFFD  # request to send: a payload waits for the receiver's call

# What is larger waits for its receiver's call, as that would have to keep it without a place for it. That costs one
# round trip, a small part of the time that so many bytes take.
RENDEZVOUS_BYTES = 8 << 20
# What a kept frame counts for beside its payload: its header, its fields and its place in the table take half as much.
FRAME_BYTES = 2048


class Credit:
    """Bytes that one rank may send ahead of the calls of the others: flow control of eager payloads. Thread-safe.

    Each sender has a share of half of what a receiver keeps, and counts what it has there: from a message on until the
    receiver is known to have made the call. When the share is used up, payloads of any size are announced first, so
    nothing is ever dropped for want of room. The other half is for these RTS frames, which have no payload, and for
    ranks that count otherwise.
    """

    def __init__(self, world: int, early_bytes: int) -> None:
        """``early_bytes``: what each rank keeps for calls that it has not made yet, from all others together."""
        self.share_bytes = early_bytes // (2 * max(1, world - 1))
        self._used = [0] * world
        self._lock = threading.Lock()

    def take(self, ranks: Sequence[int], size: int) -> bool:
        """Whether so many bytes may go to these ranks, all of them; then they count as used there."""
        used, room = self._used, self.share_bytes - size
        with self._lock:
            for rank in ranks:  # no any(): this is in the way of every small collective
                if used[rank] > room:
                    return False
            for rank in ranks:
                used[rank] += size
            return True

    def restore(self, rank: int, size: int) -> None:
        """Count bytes as unused again: the rank has made their call, or gets no more for it."""
        with self._lock:
            self._used[rank] -= size

    @property
    def used_bytes(self) -> tuple[int, ...]:
        """Bytes in use, by rank."""
        return tuple(self._used)


class RendezvousProtocol:
    """The handshakes of one collective on one rank. Its operation holds its lock.

    Attributes:
        limit_bytes: payloads that are larger wait. credit: what may be sent ahead of ranks that have not called.
        called: ranks that have made the call, as far as anything of theirs for it has come.
    """

    __slots__ = ("_ahead", "_announced", "_cts", "_others", "_waiting", "called", "credit", "limit_bytes")

    def __init__(self, others: tuple[int, ...]) -> None:
        self._others = others
        self.limit_bytes = RENDEZVOUS_BYTES
        self.credit: Credit | None = None
        self.called: set[int] = set()
        self._cts: set[int] = set()  # ranks that have confirmed their call
        self._announced: set[int | None] = set()  # receivers that have an RTS
        self._ahead: dict[int, int] = {}  # credit used, by rank that has not called yet
        self._waiting: list[tuple[int | None, Callable[[], None]]] = []

    def must_wait(self, to: int | None, size: int, only: Sequence[int] | None) -> bool:
        """Whether a payload waits for the call of its receivers. If not, it counts as sent.

        Args:
            to: the receiver, None: all others. size: of the payload, bytes. only: numbers of its chunks, None: all.
        """
        if not size or self._is_clear(to):
            return False
        if size > self.limit_bytes or to in self._announced:
            return True
        credit, called = self.credit, self.called
        ranks = [rank for rank in (self._others if to is None else (to,)) if rank not in called]
        if credit is None or not ranks:
            return False
        chunks = chunk_count(size) if only is None else len(only)
        cost = min(size, chunks * CHUNK_BYTES) + chunks * FRAME_BYTES
        if not credit.take(ranks, cost):
            return True
        for rank in ranks:
            self._ahead[rank] = self._ahead.get(rank, 0) + cost
        return False

    def wait(self, to: int | None, send: Callable[[], None]) -> bool:
        """Have ``send`` called when all receivers are ready. Returns whether they need an RTS."""
        self._waiting.append((to, send))
        is_new = to not in self._announced
        self._announced.add(to)
        return is_new

    def note_called(self, rank: int) -> None:
        """A rank has made the call: it keeps nothing of this one any more that it was sent ahead."""
        self.called.add(rank)
        ahead = self._ahead.pop(rank, 0)
        if ahead and self.credit is not None:
            self.credit.restore(rank, ahead)

    def on_cts(self, rank: int) -> None:
        """A rank is ready: send what has waited for it last."""
        self._cts.add(rank)
        waiting, self._waiting = self._waiting, []
        self._waiting = [(to, send) for to, send in waiting if not self._is_clear(to)]
        for to, send in waiting:
            if self._is_clear(to):
                send()

    @property
    def awaited(self) -> Iterable[int]:
        """Ranks that a payload waits for."""
        return {rank for to, _ in self._waiting for rank in (self._others if to is None else (to,))} - self._cts

    def end(self) -> None:
        """The collective has ended: nothing waits any more, and nothing of it is used that was sent ahead."""
        self._waiting = []
        for rank in tuple(self._ahead):
            self.note_called(rank)

    def _is_clear(self, to: int | None) -> bool:
        return to in self._cts if to is not None else len(self._cts) == len(self._others)
