"""How much an outlet sends to one inlet before it hears of it: a window that grows while nothing is lost.

A relay that finds the link to a peer full drops messages rather than hold up others (``zenoh/relay_settings.py``). So
what is lost says that too much was on its way, as for TCP: the window is halved, once for all that was on its way then.
It doubles with each round trip until the first loss, and grows slowly after it.

A link that loses packets stands still for a moment now and then, which costs a message, and says nothing about the
window. So a loss never takes it below what such a link carries while a message goes there and back: twice the rate at
which samples have arrived lately, times the round trip (as in TCP Westwood, Mascolo et al. 2001). Nor does it take
anything from a window that was less than half used.
"""

from __future__ import annotations

from collections import deque

from gradbus.runtime.transport.channels import WINDOW_BYTES

FIRST_BYTES = 4 << 20  # four of the largest frames: of 100 Mbit/s and 300 ms
LEAST_BYTES = 256 << 10
STEP_BYTES = 512 << 10  # by which the window grows in a round trip, after the first loss
RATE_S = 5.0  # how long a rate counts at least, and twice as long at most


class FlightWindow:
    """The samples that were sent to an inlet, and not acknowledged."""

    __slots__ = (
        "_arrived_bytes",
        "_flight",
        "_had_loss",
        "_rates",
        "_rates_since_s",
        "_recovered_at",
        "num_bytes",
        "window_bytes",
    )

    def __init__(self) -> None:
        self._flight: deque[tuple[int, int, int, float]] = deque()  # number, bytes; what had arrived by then, and when
        self._had_loss = False
        self._recovered_at = 0  # losses of samples up to this number have been answered
        self._arrived_bytes = 0
        self._rates = (0.0, 0.0)  # bytes/s, the highest of the last interval, and of the one before it
        self._rates_since_s = 0.0
        self.num_bytes = 0
        self.window_bytes = FIRST_BYTES

    def has_room(self, num_bytes: int) -> bool:
        """Return whether so many more may be sent. One sample may always be on its way, however large it is."""
        return not self._flight or self.num_bytes + num_bytes <= self.window_bytes

    def note_sent(self, number: int, num_bytes: int, now_s: float) -> None:
        """Take note of a sample that was sent for the first time."""
        self._flight.append((number, num_bytes, self._arrived_bytes, now_s))
        self.num_bytes += num_bytes

    def note_acknowledged(self, number: int, now_s: float) -> None:
        """Take note that all samples up to this one have arrived."""
        arrived = 0
        last = None
        while self._flight and self._flight[0][0] <= number:
            last = self._flight.popleft()
            arrived += last[1]
        if last is None:
            return
        self.num_bytes -= arrived
        self._arrived_bytes += arrived
        self._note_rate((self._arrived_bytes - last[2]) / max(now_s - last[3], 1e-3), now_s)
        growth = arrived * STEP_BYTES // self.window_bytes if self._had_loss else arrived
        self.window_bytes = min(WINDOW_BYTES, self.window_bytes + growth)

    def _note_rate(self, rate: float, now_s: float) -> None:
        if now_s >= self._rates_since_s + RATE_S:
            self._rates, self._rates_since_s = (0.0, self._rates[0]), now_s
        self._rates = (max(rate, self._rates[0]), self._rates[1])

    def note_lost(self, number: int, round_trip_s: float) -> None:
        """Take note that a sample was lost. ``round_trip_s``: of a short message."""
        if number > self._recovered_at and self._flight:
            self._recovered_at = self._flight[-1][0]
            self._had_loss = True
            if 2 * self.num_bytes >= self.window_bytes:
                carried = min(2 * max(self._rates) * round_trip_s, self.window_bytes)
                self.window_bytes = max(LEAST_BYTES, int(carried), self.window_bytes // 2)

    def clear(self) -> None:
        """Forget what is on its way: a match begins. What is known of the way stays."""
        self._flight.clear()
        self.num_bytes = 0
