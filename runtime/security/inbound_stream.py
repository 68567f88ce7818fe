"""One stream of envelopes on its way in: which of them are opened, and with which key."""

from __future__ import annotations

from typing import Any, Protocol

from cryptography.exceptions import InvalidTag

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.envelope import HEADER_BYTES, Header
from gradbus.runtime.security.replay import ReplayWindow
from gradbus.runtime.security.stream_key import StreamKey

GENERATION_BITS = 32  # a key seals less than 2**32 envelopes


class Derives(Protocol):
    """A secret that keys of streams come from."""

    def stream_key(self, session: bytes, topic: str, generation: int) -> StreamKey:
        """The key of a stream."""


class Incoming:
    """Of one session, on one topic, under one secret.

    Two steps, so that a forgery changes nothing: :meth:`key_for` before the tag is checked, :meth:`note` after.
    """

    __slots__ = ("_before", "_generation", "_key", "_secret", "_session", "_topic", "_window")

    def __init__(self, secret: Derives, session: bytes, topic: str) -> None:
        self._secret = secret
        self._session = session
        self._topic = topic
        self._window = ReplayWindow()
        self._generation = -1  # nothing was opened yet
        self._key: StreamKey | None = None
        self._before: StreamKey | None = None  # of the generation before: its last envelopes may be on their way

    def key_for(self, counter: int) -> StreamKey:
        """What opens an envelope.

        Raises:
            FrameError: ``replay``: it was opened before, or is old. ``counter``: it is too far ahead.
        """
        if not self._window.is_new(counter):
            raise FrameError("replay", f"envelope {counter} of {self._topic} was opened before, or is old")
        generation = counter >> GENERATION_BITS
        if generation == self._generation and self._key is not None:
            return self._key
        if generation == self._generation - 1 and self._before is not None:
            return self._before
        if self._key is None or generation == self._generation + 1:
            return self._secret.stream_key(self._session, self._topic, generation)
        raise FrameError(
            "counter", f"an envelope on {self._topic} is {1 << GENERATION_BITS} or more ahead of the others"
        )

    def note(self, counter: int, key: StreamKey) -> None:
        """It has been opened, with this key."""
        generation = counter >> GENERATION_BITS
        if generation > self._generation:
            self._before, self._key, self._generation = self._key, key, generation
        self._window.note(counter)


def open_into(plain: Any, key: StreamKey, header: Header, view: memoryview, context: bytes, topic: str) -> None:
    """Put there what is in an envelope. Raises FrameError: ``tag``."""
    try:
        key.decrypt_into(
            envelope.nonce(header.counter), view[HEADER_BYTES:], bytes(view[:HEADER_BYTES]) + context, plain
        )
    except InvalidTag:
        raise _changed(topic) from None


def open_small(key: StreamKey, header: Header, view: memoryview, context: bytes, topic: str) -> bytes:
    """What is in an envelope, in memory that the cipher makes. Raises FrameError: ``tag``."""
    try:
        return key.decrypt(envelope.nonce(header.counter), view[HEADER_BYTES:], bytes(view[:HEADER_BYTES]) + context)
    except InvalidTag:
        raise _changed(topic) from None


def _changed(topic: str) -> FrameError:
    return FrameError("tag", f"an envelope on {topic} was changed, or made without the key")
