"""How much work strangers may cause."""

from __future__ import annotations


class TokenBucket:
    """So much a second, and so much at once. The time is told, in seconds of any clock that goes forward."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = float(burst)
        self._left = float(burst)
        self._at_s = float("-inf")

    def take(self, now_s: float) -> bool:
        """Whether there is something left, of which one is then gone."""
        if now_s > self._at_s:
            gained = self._burst if self._at_s == float("-inf") else (now_s - self._at_s) * self._per_s
            self._left = min(self._burst, self._left + gained)
            self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True
