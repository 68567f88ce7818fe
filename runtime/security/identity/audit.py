"""What a person should know of those who come to a controller. Strangers can make up names: so not all of it, and not
all the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gradbus.runtime.security.token_bucket import TokenBucket

TOLD_S = 10.0  # how often at most to say of a name that it was refused
TOLD_PER_S, TOLD_AT_ONCE = 1, 20  # of all names, and as many of those whose keys are known
_MAX_TOLD = 256


@dataclass(slots=True)
class AuditEvents:
    """By default nobody is told.

    Attributes:
        joined: gets name and role. refused: name, and why. rotated: number of the new epoch, and why.
    """

    joined: Callable[[str, str], None] = field(default=lambda name, role: None)
    refused: Callable[[str, str], None] = field(default=lambda name, why: None)
    rotated: Callable[[int, str], None] = field(default=lambda epoch, why: None)
    _told: dict[str, float] = field(default_factory=dict)
    _tellings: dict[bool, TokenBucket] = field(
        default_factory=lambda: {known: TokenBucket(TOLD_PER_S, TOLD_AT_ONCE) for known in (False, True)}
    )

    def refused_limited(self, name: str, why: str, *, known: bool, now_s: float) -> None:
        """One was refused that may come again and again. ``known``: its key is."""
        told_s = self._told.get(name, float("-inf"))
        if now_s - told_s <= TOLD_S or not self._tellings[known].take(now_s):
            return
        if len(self._told) >= _MAX_TOLD:
            del self._told[next(iter(self._told))]
        self._told.pop(name, None)
        self._told[name] = now_s
        self.refused(name, why)
