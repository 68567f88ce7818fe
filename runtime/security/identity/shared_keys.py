"""Keys that the controller shares with its members: a pairwise key per member and direction, a group key per epoch.

The envelopes are those of a job key; only the origin of the secret and its holders differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.encryption import OutboundEnvelope, StreamEncryptor
from gradbus.runtime.security.envelope import EnvelopeHeader
from gradbus.runtime.security.inbound_stream import (
    GENERATION_BITS,
    InboundStream,
    StreamKey,
    open_into,
    salt_of,
    stream_key,
)
from gradbus.runtime.security.job_key import derive

SECRET_BYTES = 32
_LAST_GENERATION = 1  # of a key that is shared with all: its epoch ends after 2**32 envelopes, or soon after


@dataclass(slots=True, eq=False)
class SharedKey:
    """A secret that stream keys derive from, as ``encryption.StreamEncryptor`` needs it.

    Attributes:
        level: GROUP or MEMBER.
        epoch: its number; 0 with MEMBER.
        key_id: public identifier of the key.
    """

    job: str
    level: int
    epoch: int
    secret: bytes = field(repr=False)
    key_id: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.key_id = derive(self.secret, b"", b"gradbus/1 key id", envelope.KEY_ID_BYTES)

    @property
    def current(self) -> SharedKey:
        """This key itself, see ``encryption.SealingKeys``."""
        return self

    def check(self, header: EnvelopeHeader) -> None:
        """Raise FrameError ``other key`` unless level, epoch and id of the envelope are those of this key."""
        if (header.level, header.epoch, header.key_id) != (self.level, self.epoch, self.key_id):
            raise FrameError("other key", f"an envelope of key {header.key_id.hex()}, here it is {self.key_id.hex()}")

    def stream_key(self, session: bytes, topic: str, generation: int) -> StreamKey:
        """Derive the key of one stream, as with a job key."""
        return stream_key(self.secret, salt_of(self.job), self.epoch, session, topic, generation)


class OutboundStreams:
    """Encrypts all topics with one key. Thread-safe."""

    def __init__(self, key: SharedKey, session: bytes) -> None:
        """``session``: of this process."""
        self.key = key
        self._session = session
        self._encryptors: dict[str, StreamEncryptor] = {}
        self._last: dict[str, int] = {}

    def envelope(self, topic: str, plain: Sequence[Any]) -> OutboundEnvelope:
        """Return the next envelope of a topic, around the concatenated parts of ``plain``."""
        made = self.encryptor(topic).envelope(tuple(plain))
        self._last[topic] = max(self.last(topic), made.counter)
        return made

    def seal(self, topic: str, plain: Sequence[Any]) -> bytes:
        """Return the bytes of the next envelope of a topic."""
        return self.envelope(topic, plain).octets()

    def encryptor(self, topic: str) -> StreamEncryptor:
        """Return the encryptor of a topic; all callers share it and its counter."""
        known = self._encryptors.get(topic)
        if known is None:  # whoever comes second takes the first one's
            known = self._encryptors.setdefault(topic, StreamEncryptor(self.key, self.key.job, self._session, topic))
        return known

    def last(self, topic: str) -> int:
        """Return the counter of the newest envelope of a topic; 0: there is none."""
        return self._last.get(topic, 0)

    @property
    def sealed(self) -> int:
        """Number of envelopes of the busiest topic."""
        return max(list(self._last.values()), default=0)


class InboundStreams:
    """Decrypts the envelopes of one other process under one key. Only the receive thread uses it."""

    def __init__(self, key: SharedKey, session: bytes, *, remembers: bool = True) -> None:
        """``session``: of the only process whose envelopes are accepted. ``remembers``: keep a replay window; not for a
        group key, as a member could forge an envelope with a high counter and so block all that follow."""
        self.key = key
        self.session = session
        self._remembers = remembers
        self._fixed: dict[tuple[str, int], StreamKey] = {}
        self._streams: dict[str, InboundStream] = {}
        self._floors: dict[str, int] = {}

    def start_above(self, topic: str, floor: int) -> None:
        """Reject envelopes of a topic up to this counter: they are older than the key grant of this process."""
        self._floors[topic] = floor

    def open(self, topic: str, header: EnvelopeHeader, view: memoryview) -> memoryview:
        """Decrypt an envelope into new memory. No state changes before the tag is verified.

        Raises:
            FrameError: with ``reason`` one of other key, unknown sender, replay, counter, tag. Without a memory,
                ``replay`` is only what is from before.
        """
        self.key.check(header)
        if header.session != self.session:
            raise FrameError("unknown sender", "an envelope of another start of the process that the key is of")
        if header.counter <= self._floors.get(topic, 0):
            raise FrameError("replay", f"envelope {header.counter} of {topic} is from before this process had the key")
        stream = None
        if self._remembers:
            stream = self._streams.get(topic) or InboundStream(self.key, self.session, topic)
        aead = self._fixed_key(topic, header.counter) if stream is None else stream.key_for(header.counter)
        plain = np.empty(header.size, np.uint8)
        open_into(plain.data, aead, header, view, envelope.associated(self.key.job, topic), topic)
        if stream is not None:
            self._streams[topic] = stream
            stream.note(header.counter, aead)
        return plain.data

    def _fixed_key(self, topic: str, counter: int) -> StreamKey:
        generation = counter >> GENERATION_BITS
        if generation > _LAST_GENERATION:
            raise FrameError("counter", f"an envelope on {topic} counts further than one key is used")
        known = self._fixed.get((topic, generation))
        if known is None:
            known = self._fixed[topic, generation] = self.key.stream_key(self.session, topic, generation)
        return known


def opened_header(data: Any) -> tuple[EnvelopeHeader, memoryview]:
    """Return header and bytes of an envelope. Raises FrameError: see ``envelope.parse``."""
    view = memoryview(data).cast("B")
    return envelope.parse(view), view
