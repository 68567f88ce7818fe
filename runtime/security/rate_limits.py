"""Limits for the work and the log events that unknown peers can cause: token buckets, and audit events."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field


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


REFUSED_NAME_S = 10.0  # shortest interval of log events on one refused name
REFUSED_PER_S, REFUSED_AT_ONCE = 1, 20  # over all names with unknown keys, and as many with known ones
_MAX_NAMES = 256


@dataclass(slots=True)
class AuditEvents:
    """Callbacks for admissions, refusals and key rotations; the defaults do nothing.

    Attributes:
        joined: gets name and role. refused: name and reason. rotated: number and reason of the new key epoch.
    """

    joined: Callable[[str, str], None] = field(default=lambda name, role: None)
    refused: Callable[[str, str], None] = field(default=lambda name, why: None)
    rotated: Callable[[int, str], None] = field(default=lambda epoch, why: None)
    _names: TokenBuckets = field(default_factory=lambda: TokenBuckets(1 / REFUSED_NAME_S, 1, _MAX_NAMES))
    _totals: TokenBuckets = field(default_factory=lambda: TokenBuckets(REFUSED_PER_S, REFUSED_AT_ONCE, 2))

    def refused_limited(self, name: str, why: str, *, known: bool, now_s: float) -> bool:
        """Report a refusal, within the rate limits. ``known``: whether the node's key is on the allow list.

        Returns:
            Whether it was reported.
        """
        is_due = self._names.of(name).take(now_s) and self._totals.of(known).take(now_s)
        if is_due:
            self.refused(name, why)
        return is_due
