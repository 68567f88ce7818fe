"""Limits on what an inlet may make an outlet repeat.

Anybody on the relay can ask in its name, with a few bytes for megabytes.
"""

from __future__ import annotations

import math

FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 4.0  # between two matches that begin again


class RepeatLimit:
    """Limits how often the samples and the match of one inlet are repeated. Times are of the schedule, in seconds."""

    __slots__ = ("_began_s", "_pause_s", "_sent_s")

    def __init__(self) -> None:
        self._sent_s: dict[int, float] = {}  # by number, in the order of time
        self._began_s = -math.inf
        self._pause_s = FIRST_PAUSE_S

    def allows(self, number: int, now_s: float, interval_s: float) -> bool:
        """Return whether a sample was not sent again within the interval."""
        return now_s >= self._sent_s.get(number, -math.inf) + interval_s

    def note_sent(self, number: int, now_s: float, interval_s: float) -> None:
        """Take note that a sample was sent again, and forget those for which the interval is over."""
        self._sent_s.pop(number, None)
        self._sent_s[number] = now_s
        while self._sent_s[first := next(iter(self._sent_s))] + interval_s < now_s:
            del self._sent_s[first]

    def begins_again(self, now_s: float) -> bool:
        """Return whether a match may begin again now, and if so, wait longer for the next time."""
        if now_s < self._began_s + self._pause_s:
            return False
        was_long_ago = now_s >= self._began_s + 2 * MAX_PAUSE_S
        self._pause_s = FIRST_PAUSE_S if was_long_ago else min(2 * self._pause_s, MAX_PAUSE_S)
        self._began_s = now_s
        return True
