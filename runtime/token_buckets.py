"""Token buckets: limits for the work and the log events that unknown peers can cause."""

from __future__ import annotations

from collections.abc import Hashable


class TokenBucket:
    """A token bucket: a rate per second and a burst. The caller passes the time, in seconds of a monotonic clock."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = float(burst)
        self._left = float(burst)
        self._at_s: float | None = None

    def take(self, now_s: float) -> bool:
        """Take one token; returns whether there was one."""
        if self._at_s is None or now_s > self._at_s:
            gained = 0.0 if self._at_s is None else (now_s - self._at_s) * self._per_s
            self._left = min(self._burst, self._left + gained)
            self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


class TokenBuckets:
    """A token bucket for each of many keys; the one that was used longest ago makes room for another."""

    def __init__(self, per_s: float, burst: int, most: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._most = most
        self._buckets: dict[Hashable, TokenBucket] = {}

    def of(self, key: Hashable, count: int = 1) -> TokenBucket:
        """Return the bucket of a key. ``count``: a new one has so many times the rate and the burst."""
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            bucket = TokenBucket(self._per_s * count, self._burst * count)
            if len(self._buckets) >= self._most:
                del self._buckets[next(iter(self._buckets))]
        self._buckets[key] = bucket
        return bucket

    def clear(self) -> None:
        """Start with full buckets."""
        self._buckets.clear()
