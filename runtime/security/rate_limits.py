"""Audit events: what a controller reports of nodes that join, within limits, as unknown peers can cause any number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gradbus.runtime.token_buckets import TokenBuckets

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
