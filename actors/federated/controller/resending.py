"""What is sent again to processes that miss frames of a model, or of an instruction.

Which frames: what clients request is merged, each within a quota. And whether what a process requests is on its way to
it already: then it is not sent a second time. A process that sees no frame for a while requests it, also if the link is
slow and the frame on its way. What is sent again goes to all, and holds up the others. So nothing is sent again to a
process that was there when it was sent while the transport has not delivered it yet, unless that takes too long; a
process that lacks it still will request it again.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from gradbus.actors.federated.protocol import ON_THE_WAY_S
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.wire.messages import ModelBlob

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


class OnTheWay:
    """Follows what is sent of one model, or of one instruction."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._addressed: dict[int, int] = {}
        self._is_sending = False
        self._sent_s = float("-inf")

    @contextlib.contextmanager
    def sending(self, addressed: Mapping[int, int]) -> Iterator[None]:
        """Take note that all of it is being sent. ``addressed``: processes that it will reach, as they are there now:
        their ids and incarnations."""
        self._addressed = dict(addressed)
        self._is_sending = True
        try:
            yield
        finally:
            self._is_sending = False
            self.note_sent()

    def note_sent(self) -> None:
        """Take note that frames of it, perhaps some only, were handed to the transport."""
        self._sent_s = time.monotonic()

    def is_on_the_way_to(self, client_id: int, incarnation: int | None) -> bool:
        """Return whether the transport is to deliver it to this start of a process, and has not yet."""
        if incarnation is None or self._addressed.get(client_id) != incarnation:
            return False  # it has come later: what was sent before may not be for it
        if self._is_sending:
            return True
        return time.monotonic() < self._sent_s + ON_THE_WAY_S and not self._bus.is_delivered(ModelBlob)
