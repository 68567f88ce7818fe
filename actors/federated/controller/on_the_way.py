"""Whether frames that a process requests are on their way to it already: then they are not sent a second time.

A process that sees no frame for a while requests it, also if the link is slow and the frame on its way. What is sent
again goes to all, and holds up the others. So nothing is sent again to a process that was there when it was sent while
the transport has not delivered it yet, unless that takes too long; a process that lacks it still will request it again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from gradbus.actors.federated.protocol import ON_THE_WAY_S
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.wire.messages import ModelBlob


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
