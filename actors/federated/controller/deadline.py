"""The deadline of a round by how long the last rounds took. Pure: no clock.

A round takes until the last update that counted, also where it then went on to its deadline: a client that never
answers would else make each deadline longer than the one before. A round that asks for more work than those before,
such as more epochs, gets as many times more; one that asks for work of another kind is not compared with them.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

LAST_ROUNDS = 5  # whose median counts
FIRST_ROUNDS = 3  # so many have to be known: until then the fixed deadline holds
LEAST_S = 1.0  # below, a deadline would measure the machine and not the clients


class AskedWork(NamedTuple):
    """The most that a round asks of a client.

    Attributes:
        unit: "steps", "samples", or "epochs" where each client has its own number of samples. amount: so many.
    """

    unit: str
    amount: int


def work_of(epochs: int, steps: int, subset_size: int) -> AskedWork:
    """Return the work of a training of so many epochs of ``subset_size`` samples, 0: of all; or of so many steps, if
    that is not 0."""
    if steps:
        return AskedWork("steps", steps)
    return AskedWork("samples", epochs * subset_size) if subset_size else AskedWork("epochs", epochs)


class RoundDeadline:
    """``times_median`` times the median of the last rounds, at most ``most_s``."""

    def __init__(self, times_median: float, most_s: float) -> None:
        self._times_median = times_median
        self._most_s = most_s
        self._last: deque[tuple[float, AskedWork | None]] = deque(maxlen=LAST_ROUNDS)

    def note_round(self, answered_s: float, work: AskedWork | None) -> None:
        """Note a committed round: seconds from its command to the last update that counted, and its work; None: it
        cannot be compared."""
        self._last.append((answered_s, work))

    def seconds(self, work: AskedWork | None, attempt: int = 1) -> float:
        """Return the deadline of the next round, after its command. Another ``attempt`` at a round has all the time:
        the first may have been cut too short."""
        if attempt > 1 or work is None:
            return self._most_s
        # Less work is not scaled down: a part of a round does not depend on it.
        known = [
            answered_s * max(1.0, work.amount / before.amount)
            for answered_s, before in self._last
            if before is not None and before.unit == work.unit
        ]
        if len(known) < FIRST_ROUNDS:
            return self._most_s
        return min(self._most_s, max(LEAST_S, self._times_median * statistics.median(known)))
