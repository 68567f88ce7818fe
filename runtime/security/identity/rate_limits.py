"""Limits for the work and the log events that unknown peers can cause: a token bucket, and audit events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


class TokenBucket:
    """A token bucket: a rate per second and a burst. The caller passes the time, in seconds of a monotonic clock."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = float(burst)
        self._left = float(burst)
        self._at_s = float("-inf")

    def take(self, now_s: float) -> bool:
        """Take one token; returns whether there was one."""
        if now_s > self._at_s:
            gained = self._burst if self._at_s == float("-inf") else (now_s - self._at_s) * self._per_s
            self._left = min(self._burst, self._left + gained)
            self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


TOLD_S = 10.0  # shortest interval of log events on one refused name
TOLD_PER_S, TOLD_AT_ONCE = 1, 20  # over all names with unknown keys, and as many with known ones
_MAX_TOLD = 256


@dataclass(slots=True)
class AuditEvents:
    """Callbacks for admissions, refusals and key rotations; the defaults do nothing.

    Attributes:
        joined: gets name and role. refused: name and reason. rotated: number and reason of the new key epoch.
    """

    joined: Callable[[str, str], None] = field(default=lambda name, role: None)
    refused: Callable[[str, str], None] = field(default=lambda name, why: None)
    rotated: Callable[[int, str], None] = field(default=lambda epoch, why: None)
    _told: dict[str, float] = field(default_factory=dict)
    _tellings: dict[bool, TokenBucket] = field(
        default_factory=lambda: {known: TokenBucket(TOLD_PER_S, TOLD_AT_ONCE) for known in (False, True)}
    )

    def refused_limited(self, name: str, why: str, *, known: bool, now_s: float) -> None:
        """Report a refusal, within the rate limits. ``known``: whether the node's key is on the allow list."""
        told_s = self._told.get(name, float("-inf"))
        if now_s - told_s <= TOLD_S or not self._tellings[known].take(now_s):
            return
        if len(self._told) >= _MAX_TOLD:
            del self._told[next(iter(self._told))]
        self._told.pop(name, None)
        self._told[name] = now_s
        self.refused(name, why)
