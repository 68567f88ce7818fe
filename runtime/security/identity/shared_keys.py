"""Keys that the controller shares with its members: one with each of them and direction, and one with all, by epoch.

Envelopes are as they are with a job key; only where the secret comes from differs, and who has it.
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
    """A secret, and the keys of streams that come from it: what :class:`.encryption.StreamEncryptor` seals with.

    Attributes:
        level: GROUP or MEMBER.
        epoch: its number; 0 with MEMBER.
        key_id: says which key is meant. No secret.
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
        """Itself: what :class:`.encryption.StreamEncryptor` asks for."""
        return self

    def check(self, header: EnvelopeHeader) -> None:
        """Raise FrameError: ``other key``: the envelope is of another key, or says another level or epoch."""
        if (header.level, header.epoch, header.key_id) != (self.level, self.epoch, self.key_id):
            raise FrameError("other key", f"an envelope of key {header.key_id.hex()}, here it is {self.key_id.hex()}")

    def stream_key(self, session: bytes, topic: str, generation: int) -> StreamKey:
        """The key of a stream, as with a job key."""
        return stream_key(self.secret, salt_of(self.job), self.epoch, session, topic, generation)


class OutboundStreams:
    """Seals with one key. Any thread may."""

    def __init__(self, key: SharedKey, session: bytes) -> None:
        """``session``: of this process."""
        self.key = key
        self._session = session
        self._encryptors: dict[str, StreamEncryptor] = {}
        self._last: dict[str, int] = {}

    def envelope(self, topic: str, plain: Sequence[Any]) -> OutboundEnvelope:
        """The next one of a topic, for what ``plain`` make together."""
        made = self.encryptor(topic).envelope(tuple(plain))
        self._last[topic] = max(self.last(topic), made.counter)
        return made

    def seal(self, topic: str, plain: Sequence[Any]) -> bytes:
        """Its octets."""
        return self.envelope(topic, plain).octets()

    def encryptor(self, topic: str) -> StreamEncryptor:
        """Of a topic, the same one each time."""
        known = self._encryptors.get(topic)
        if known is None:  # whoever comes second takes the first one's
            known = self._encryptors.setdefault(topic, StreamEncryptor(self.key, self.key.job, self._session, topic))
        return known

    def last(self, topic: str) -> int:
        """Counter of the newest envelope of a topic; 0: there is none."""
        return self._last.get(topic, 0)

    @property
    def sealed(self) -> int:
        """Envelopes of the topic that has most."""
        return max(list(self._last.values()), default=0)


class InboundStreams:
    """Opens what one other process seals with one key. Only the receive thread does."""

    def __init__(self, key: SharedKey, session: bytes, *, remembers: bool = True) -> None:
        """``session``: of that process; the key is for nobody else's envelopes. ``remembers``: which of them were
        opened. Not where others have the key, too: one of theirs with a high counter would keep out all that follow."""
        self.key = key
        self.session = session
        self._remembers = remembers
        self._fixed: dict[tuple[str, int], StreamKey] = {}
        self._streams: dict[str, InboundStream] = {}
        self._floors: dict[str, int] = {}

    def start_above(self, topic: str, floor: int) -> None:
        """Take no envelope of a topic up to this counter: they are from before this process had the key."""
        self._floors[topic] = floor

    def open(self, topic: str, header: EnvelopeHeader, view: memoryview) -> memoryview:
        """What is in an envelope of this key, in memory of its own. Nothing is remembered before the tag is right.

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
    """Header and bytes of an envelope. Raises FrameError: see :func:`.envelope.parse`."""
    view = memoryview(data).cast("B")
    return envelope.parse(view), view
