"""How much a rank may send ahead of those that have not made the call yet: the eager protocol's flow control.

What comes before its call is kept by the receiver, within a bound. Each sender has a share of half of that, and counts
itself what it has there: from a message on until its receiver is heard to have made the call. When the share is used
up, messages of any size are offered first and sent when they are asked for (rendezvous), so nothing is ever dropped for
want of room. The other half is for these offers, which have no payload, and for ranks that count otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

# What a kept frame counts for beside its payload: its header, its fields and its place in the table take half as much.
FRAME_BYTES = 2048


class Credit:
    """Of one rank with all others of its group. Any thread may use it."""

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

    def give_back(self, rank: int, size: int) -> None:
        """A rank has made the call that so many bytes were for, or will get no more for it."""
        with self._lock:
            self._used[rank] -= size

    @property
    def used_bytes(self) -> tuple[int, ...]:
        """By rank."""
        return tuple(self._used)
