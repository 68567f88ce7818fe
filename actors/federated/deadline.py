"""The deadline of a round by how long the last rounds took. Pure: no clock.

A round takes until the last update that counted, also where it then went on to its deadline: a client that never
answers would else make each deadline longer than the one before.
"""

from __future__ import annotations

import statistics
from collections import deque

LAST_ROUNDS = 5  # whose median counts
FIRST_ROUNDS = 3  # so many have to be known: until then the fixed deadline holds
LEAST_S = 1.0  # below, a deadline would measure the machine and not the clients


class RoundDeadline:
    """``times_median`` times the median of the last rounds, at most ``most_s``."""

    def __init__(self, times_median: float | None, most_s: float) -> None:
        """``times_median``: None: always ``most_s`` seconds."""
        self._times_median = times_median
        self._most_s = most_s
        self._last: deque[float] = deque(maxlen=LAST_ROUNDS)

    def round_done(self, answered_s: float) -> None:
        """Note a committed round: seconds from its command to the last update that counted."""
        self._last.append(answered_s)

    def seconds(self, attempt: int = 1) -> float:
        """The deadline of the next round, after its command. Another ``attempt`` at a round has all the time: the first
        may have been cut too short."""
        if self._times_median is None or attempt > 1 or len(self._last) < FIRST_ROUNDS:
            return self._most_s
        return min(self._most_s, max(LEAST_S, self._times_median * statistics.median(self._last)))
