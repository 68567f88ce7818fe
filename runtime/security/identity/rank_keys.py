"""The group keys of a job of ranks: that of the current epoch, and for a while the ones before and after it.

All ranks encrypt with the key of the epoch, and frames of a collective are not repeated. So no rank may encrypt with a
key that others lack: every rank takes in a new key first, and switches when it sees the key issuer use it, or after a
time in which every rank has received it. Envelopes under the key before are accepted for a short while. Pure: the
caller passes the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.envelope import EnvelopeHeader
from gradbus.runtime.security.identity.key_epoch import SWITCH_S
from gradbus.runtime.security.streams import SharedKey

FORMER_S = 5.0  # so long what was sealed with the key of the epoch before may still be on its way
LOOKS = 4  # in that time this process has looked so often at least: what came while it stood still is opened after that
SETTLE_S = 1.0  # the giver of the keys was started anew: all others join it within that time, as they miss it together


@dataclass(slots=True)
class _Next:
    key: SharedKey
    issuer: bytes
    by_word: bool  # used as soon as its issuer is seen to use it
    at_s: float


class RankKeys:
    """The group keys of one bus. Any thread reads them, the receive thread changes them.

    Attributes:
        on_change: called after a switch to another key, the first one included.
        on_lack: called on an envelope under an unknown key.
    """

    def __init__(self, job: str) -> None:
        self.job = job
        self._current: SharedKey | None = None
        self._issuer = b""
        self._next: _Next | None = None
        self._former: dict[bytes, tuple[SharedKey, float]] = {}  # by id, for how long still
        self._ticked_s = 0.0
        self._heard_next = self._is_shut = False
        self.on_change: Callable[[], None] = _nothing
        self.on_lack: Callable[[], None] = _nothing

    @property
    def has_key(self) -> bool:
        """See ``encryption.Keys``."""
        return self._current is not None and not self._is_shut

    def shut(self) -> None:
        """Stop encrypting: this process was refused or removed."""
        self._is_shut = True

    @property
    def current(self) -> SharedKey:
        """See ``streams.EncryptionKeys``. Requires :attr:`has_key`."""
        key = self._current
        if key is None:
            raise RuntimeError("sealed before this process was let in: a writer has been used that is not matched yet")
        return key

    def of(self, header: EnvelopeHeader) -> SharedKey:
        """See ``encryption.Keys``. Raises FrameError: ``other level``, ``no key``, ``other key``."""
        key, following = self._current, self._next
        if key is None or key.key_id != header.key_id:
            if header.level != envelope.GROUP:
                raise FrameError(
                    "other level", "an envelope of another level of security: all members must use the same"
                )
            if following is not None and following.key.key_id == header.key_id:
                key = following.key
            elif header.key_id in self._former:
                key = self._former[header.key_id][0]
            else:
                if key is not None:
                    self.on_lack()
                raise FrameError("no key", "an envelope under a key that this process does not have, or not any more")
        key.check(header)
        return key

    def accepts(self, key_id: bytes) -> bool:
        """See ``encryption.Keys``."""
        known = (self._current, None if self._next is None else self._next.key)
        return key_id in self._former or any(key is not None and key.key_id == key_id for key in known)

    def accepts_new_session(self, key: SharedKey) -> bool:
        """See ``encryption.Keys``. With the newest key alone, as soon as it is here: who was removed has the one
        before, and could come as somebody new."""
        following = self._next
        return key is (self._current if following is None else following.key)

    def note_use(self, key: SharedKey, session: bytes) -> None:
        """See ``encryption.Keys``: if it is the giver with the next one, its time has come."""
        following = self._next
        if following is not None and following.by_word and key is following.key and session == following.issuer:
            self._heard_next = True

    def take(self, key: SharedKey, issuer: bytes, now_s: float) -> None:
        """Take in a granted key. ``issuer``: session of the key issuer. The first key is used at once."""
        following = self._next
        if self._current is not None and key.key_id == self._current.key_id:
            if following is not None and issuer != following.issuer:
                self._set_aside(following)  # back to the giver that this key is of: the others have it, too
            return
        if issuer == self._issuer and key.key_id in self._former:
            return
        if following is not None:
            if key.key_id == following.key.key_id:
                return
            if issuer == following.issuer and key.epoch < following.key.epoch:
                return
            if following.by_word or issuer == following.issuer:
                self._switch(following)  # two in a row: the one between has been told to all
            else:
                self._set_aside(following)
        again = self._current is not None and issuer != self._issuer
        following = _Next(key, issuer, not again, now_s + (SETTLE_S if again else SWITCH_S))
        if self._current is None:
            self._switch(following)
        else:
            self._next, self._heard_next = following, False

    def use(self, key: SharedKey) -> None:
        """Switch to a key: called in the process of the key issuer."""
        if self._next is not None and self._next.key is key:
            self._switch(self._next)

    def tick(self, now_s: float) -> None:
        """Advance timers: switch to the next key when due, and drop expired ones."""
        passed_s, self._ticked_s = min(now_s - self._ticked_s, FORMER_S / LOOKS), now_s
        if self._former:
            left = {key_id: (key, left_s - passed_s) for key_id, (key, left_s) in self._former.items()}
            self._former = {key_id: one for key_id, one in left.items() if one[1] > 0}
        following = self._next
        if following is not None and (self._heard_next or now_s >= following.at_s):
            self._switch(following)

    def _set_aside(self, following: _Next) -> None:
        """Abandon the next key. Other ranks may have switched to it, so its envelopes are accepted for a while."""
        self._former = {**self._former, following.key.key_id: (following.key, FORMER_S)}
        self._next, self._heard_next = None, False

    def _switch(self, following: _Next) -> None:
        former = {key_id: one for key_id, one in self._former.items() if key_id != following.key.key_id}
        if self._current is not None:
            former[self._current.key_id] = (self._current, FORMER_S)
        self._former = former
        self._current, self._issuer, self._next, self._heard_next = following.key, following.issuer, None, False
        self.on_change()


def _nothing() -> None:
    pass
