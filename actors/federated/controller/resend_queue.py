"""Which frames of a model are sent again to clients that miss some, within a quota for each client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

# What one client may have resent of a round's model, as it goes to all: so many times the model, of a small one so many
# frames. A client that loses a third of all frames needs the model one and a half times.
RESEND_TIMES, RESEND_FRAMES = 8, 256


class ResendQueue:
    """Requests of clients that miss frames, merged, each client within a quota. Pure: no bus, no clock.

    Attributes:
        asked: frames of this round's model that each client has had resent.
    """

    def __init__(self) -> None:
        self._wanted: dict[int, set[int]] = {}  # transfer -> missing frames
        self._sending: tuple[int, set[int]] = 0, set()
        self.asked: Counter[int] = Counter()

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def clear(self) -> None:
        """Forget all requests and quotas, for a new model."""
        self._wanted.clear()
        self.asked.clear()

    def want(self, transfer: int, seqs: Collection[int]) -> None:
        """Send these frames, without a quota."""
        self._wanted.setdefault(transfer, set()).update(seqs)

    def request(self, client_id: int, transfer: int, seqs: Collection[int], quota: int) -> bool:
        """A client misses these frames; those being sent are not sent twice. False: its quota is used up."""
        again = self._sending[1] if self._sending[0] == transfer else set()
        missing = set(seqs) - again - self._wanted.get(transfer, set())
        if self.asked[client_id] + len(missing) > quota:
            return False
        self.asked[client_id] += len(missing)
        if missing:
            self.want(transfer, missing)
        return True

    def mark_exhausted(self, client_id: int, quota: int) -> int | None:
        """Mark a client's quota as used up. Returns the frames that it has had; None: it was marked before."""
        had = self.asked[client_id]
        self.asked[client_id] = max(had, quota)
        return had if had < quota else None

    def begin(self) -> tuple[int, set[int]]:
        """Take the frames of a transfer, which count as being sent until :meth:`done`."""
        self._sending = self._wanted.popitem()
        return self._sending

    def done(self) -> None:
        """The frames have been sent."""
        self._sending = 0, set()
