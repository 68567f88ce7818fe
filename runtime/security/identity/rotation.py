"""From one epoch to the next: the new key is handed out first, and used when all have it, or when they have had time.

So nobody gets what is sealed with a key that is still on its way to him. Pure; the time is told.
"""

from __future__ import annotations

from gradbus.runtime.security.identity import key_epoch
from gradbus.runtime.security.identity.key_epoch import EPOCH_FRAMES, EPOCH_S
from gradbus.runtime.security.identity.shared_keys import OutboundStreams

SWITCH_S = 2.0  # so long is waited for members that do not say that they have the new key
REPEAT_S = 0.25


class KeyRotation:
    """The epochs of one start of a controller.

    Attributes:
        current: what is sealed with. switched: number and reason of an epoch that has just begun, until it is taken.
    """

    def __init__(self, job: str, session: bytes, now_s: float) -> None:
        self._job = job
        self._session = session
        self.current = OutboundStreams(key_epoch.new_epoch(job, key_epoch.first_epoch()), session)
        self.switched: tuple[int, str] | None = None
        self._next: OutboundStreams | None = None
        self._began_s = now_s
        self._why = ""
        self._again = ""  # somebody else was removed while the next key was handed out
        self._pending: set[str] = set()
        self._until_s = self._said_s = 0.0

    @property
    def is_running(self) -> bool:
        """Whether a new key is being handed out."""
        return self._next is not None

    @property
    def next(self) -> OutboundStreams | None:
        """The key that is being handed out."""
        return self._next

    def keys_for(self, name: str) -> list[OutboundStreams]:
        """What a member that has just come needs."""
        if self._next is None:
            return [self.current]
        self._pending.add(name)
        return [self.current, self._next]

    def begin(self, members: set[str], now_s: float, why: str) -> None:
        """Go to a new epoch. Those who are no members any more must not have been handed its key: if one is on its way
        already, one more comes after it."""
        if self._next is not None:
            self._again = why
            return
        self._next = OutboundStreams(key_epoch.new_epoch(self._job, self.current.key.epoch + 1), self._session)
        self._why, self._pending = why, set(members)
        self._until_s, self._said_s = now_s + SWITCH_S, float("-inf")

    def has(self, name: str, number: int) -> None:
        """A member has the key of this epoch."""
        if self._next is not None and number == self._next.key.epoch:
            self._pending.discard(name)

    def tick(self, members: set[str], now_s: float) -> list[tuple[str, OutboundStreams]]:
        """Who is to be handed which key now."""
        if self._next is None:
            if now_s - self._began_s > EPOCH_S:
                self.begin(members, now_s, "a day is over")
            elif self.current.sealed >= EPOCH_FRAMES:
                self.begin(members, now_s, "its counters are used up")
        if self._next is None:
            return []
        self._pending &= members
        if not self._pending or now_s > self._until_s:
            self.current, self._next = self._next, None
            self._began_s, self.switched = now_s, (self.current.key.epoch, self._why)
            if self._again:
                why, self._again = self._again, ""
                self.begin(members, now_s, why)
            return self.tick(members, now_s) if self._next is not None else []
        if now_s - self._said_s < REPEAT_S:
            return []
        self._said_s = now_s
        return [(name, self._next) for name in sorted(self._pending)]
