"""Frames that came before the local call: kept within a bound, for a limited time."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from gradbus.runtime.collectives.operation import OperationKey
from gradbus.runtime.wire.frames import Frame

MAX_FRAMES = 131_072  # half of them, at the default size, may be of what is sent without asking; the others are offers
_MAX_REFUSED = 4096  # keys remembered that something was dropped of


@dataclass(slots=True)
class UnexpectedFrame:
    """A frame and what its name field says."""

    frame: Frame
    signature: str
    meta: str


@dataclass(slots=True)
class _UnexpectedMessage:
    since_s: float
    envelopes: list[UnexpectedFrame] = field(default_factory=list)


class UnexpectedQueue:
    """Not thread-safe: its owner holds a lock."""

    def __init__(self, max_bytes: int, max_age_s: float) -> None:
        """
        Args:
            max_bytes: of payload, of all frames together.
            max_age_s: what is older is of no use to anybody: its senders have given up.
        """
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._slots: OrderedDict[OperationKey, _UnexpectedMessage] = OrderedDict()
        self._refused: OrderedDict[OperationKey, None] = OrderedDict()
        self._frames = 0
        self.bytes = 0
        self.too_old = 0  # frames that were dropped because nobody called for them in time

    def __len__(self) -> int:
        return self._frames

    def __contains__(self, key: OperationKey) -> bool:
        return key in self._slots

    def keep(self, key: OperationKey, envelope: UnexpectedFrame) -> bool:
        """Keep a frame. False: there is no room, even without what has become too old."""
        size = len(envelope.frame.data)
        if not self._fits(size):
            self._drop_old()
            if not self._fits(size):
                self._refuse(key)
                return False
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = _UnexpectedMessage(time.monotonic())
        slot.envelopes.append(envelope)
        self.bytes += size
        self._frames += 1
        return True

    def take(self, key: OperationKey) -> list[UnexpectedFrame]:
        """The frames of a collective, which are then no longer kept."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return []
        self._forget(slot)
        return slot.envelopes

    def was_refused(self, key: OperationKey) -> bool:
        """Whether frames of it had to be dropped. Said once."""
        return self._refused.pop(key, False) is None

    def clear(self) -> None:
        """Keep nothing more of what there is."""
        self._slots.clear()
        self._refused.clear()
        self.bytes = self._frames = 0

    def _refuse(self, key: OperationKey) -> None:
        self._refused[key] = None
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)

    def _fits(self, size: int) -> bool:
        return self.bytes + size <= self._max_bytes and self._frames < MAX_FRAMES

    def _drop_old(self) -> None:
        limit_s = time.monotonic() - self._max_age_s
        while self._slots and next(iter(self._slots.values())).since_s < limit_s:
            key, slot = self._slots.popitem(last=False)
            self._forget(slot)
            self._refuse(key)
            self.too_old += len(slot.envelopes)

    def _forget(self, slot: _UnexpectedMessage) -> None:
        self._frames -= len(slot.envelopes)
        self.bytes -= sum(len(envelope.frame.data) for envelope in slot.envelopes)
