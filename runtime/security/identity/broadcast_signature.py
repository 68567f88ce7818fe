"""What the controller says to all, signed: members share the key that it is sealed with, and could make it up.

Behind the sample stand a number and a signature. The number grows with each one, so that nobody who has the key can
say again in an envelope of his own what the controller said once. Models are not signed here but as a whole, see
:mod:`.model_signature`.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.identity.key import SIGNATURE_BYTES, NodeKey, verified
from gradbus.runtime.security.inbound_stream import ReplayWindow

_NUMBER = struct.Struct("<Q")
TRAILER_BYTES = _NUMBER.size + SIGNATURE_BYTES


def _text(job: str, topic: str, session: bytes, number: bytes, sample: bytes) -> bytes:
    return b"gradbus/1 said\0" + envelope.associated(job, topic) + session + number + sample


class BroadcastSigner:
    """Signs what one controller says. Any thread may."""

    def __init__(self, job: str, key: NodeKey, session: bytes) -> None:
        self._job = job
        self._key = key
        self._session = session
        self._numbers = itertools.count(1)
        self.last = 0  # number of the newest one of all topics
        self.last_of: dict[str, int] = {}

    def signed(self, topic: str, parts: Sequence[Any]) -> tuple[Any, ...]:
        """The sample that ``parts`` make, with what stands behind it."""
        self.last = self.last_of[topic] = value = next(self._numbers)
        number = _NUMBER.pack(value)
        sample = b"".join(parts)
        return sample, number, self._key.sign(_text(self._job, topic, self._session, number, sample))


class BroadcastVerifier:
    """Takes what one controller says, each of it once. Only the receive thread does."""

    def __init__(self, job: str, public: bytes, session: bytes) -> None:
        """``public``: the controller's key. ``session``: this start of it."""
        self._job = job
        self._public = public
        self._session = session
        self._windows: dict[str, ReplayWindow] = {}
        self._floors: dict[str, int] = {}

    def start_above(self, topic: str, floor: int) -> None:
        """Take nothing on a topic up to this number: it was said before this process was let in."""
        self._floors[topic] = floor

    def heard(self, topic: str, data: memoryview) -> memoryview:
        """The sample in what was opened. Raises FrameError: ``signature`` or ``replay``."""
        if len(data) < TRAILER_BYTES:
            raise FrameError("signature", f"{len(data)} bytes on {topic} that the controller has not signed")
        at = len(data) - TRAILER_BYTES
        sample, number = data[:at], bytes(data[at : at + _NUMBER.size])
        (value,) = _NUMBER.unpack(number)
        window = self._windows.get(topic) or ReplayWindow()
        if value <= self._floors.get(topic, 0) or not window.is_new(value):
            raise FrameError("replay", f"word {value} of the controller on {topic} was heard before, or is old")
        text = _text(self._job, topic, self._session, number, bytes(sample))
        if not verified(self._public, bytes(data[at + _NUMBER.size :]), text):
            raise FrameError("signature", f"a member has said on {topic} what only the controller may say")
        window.note(value)
        self._windows[topic] = window
        return sample
