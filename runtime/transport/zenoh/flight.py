"""How much an outlet sends to one inlet before it hears of it: a window that grows while nothing is lost.

A relay that finds the link to a peer full drops messages rather than hold up others (:mod:`.relay_settings`). So what
is lost says that too much was on its way, as for TCP: the window is halved, once for all that was on its way then. It
doubles with each round trip until the first loss, and grows slowly after it.
"""

from __future__ import annotations

from collections import deque

from gradbus.runtime.transport.channels import WINDOW_BYTES

FIRST_BYTES = 4 << 20  # four of the largest frames: of 100 Mbit/s and 300 ms
LEAST_BYTES = 256 << 10
STEP_BYTES = 512 << 10  # by which the window grows in a round trip, after the first loss


class FlightWindow:
    """The samples that were sent to an inlet, and not acknowledged."""

    __slots__ = ("_flight", "_had_loss", "_recovered_at", "num_bytes", "window_bytes")

    def __init__(self) -> None:
        self._flight: deque[tuple[int, int]] = deque()  # number, bytes
        self._had_loss = False
        self._recovered_at = 0  # losses of samples up to this number have been answered
        self.num_bytes = 0
        self.window_bytes = FIRST_BYTES

    def has_room(self, num_bytes: int) -> bool:
        """Return whether so many more may be sent. One sample may always be on its way, however large it is."""
        return not self._flight or self.num_bytes + num_bytes <= self.window_bytes

    def note_sent(self, number: int, num_bytes: int) -> None:
        """Take note of a sample that was sent for the first time."""
        self._flight.append((number, num_bytes))
        self.num_bytes += num_bytes

    def note_acknowledged(self, number: int) -> None:
        """Take note that all samples up to this one have arrived."""
        arrived = 0
        while self._flight and self._flight[0][0] <= number:
            arrived += self._flight.popleft()[1]
        self.num_bytes -= arrived
        growth = arrived * STEP_BYTES // self.window_bytes if self._had_loss else arrived
        self.window_bytes = min(WINDOW_BYTES, self.window_bytes + growth)

    def note_lost(self, number: int) -> None:
        """Take note that a sample was lost."""
        if number > self._recovered_at and self._flight:
            self._recovered_at = self._flight[-1][0]
            self._had_loss = True
            self.window_bytes = max(LEAST_BYTES, self.window_bytes // 2)

    def clear(self) -> None:
        """Forget what is on its way: a match begins. What is known of the way stays."""
        self._flight.clear()
        self.num_bytes = 0
