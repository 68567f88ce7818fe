"""DDS writers and readers that seal and open. To everybody else they are like those of ``dds/participant.py``.

An envelope holds a whole sample: the fields of its DDS type as well as its octets. The fields that DDS carries beside
the envelope are zero and not looked at. A TrainCmd has no octets, so sealed ones have a topic of their own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, Protocol

from gradbus.runtime.dds.participant import Reader, Writer
from gradbus.runtime.dds.topics import Topic
from gradbus.runtime.security.encryption import (
    Keys,
    Opened,
    OutboundEnvelope,
    SessionCipher,
    StreamDecryptor,
    StreamEncryptor,
)
from gradbus.runtime.security.peers import MAX_SOURCES

# Fields beside the octets, by DDS type.
CLEAR: dict[str, tuple[int, ...]] = {"ClientUpdate": (0, 0, 0), "ModelBlob": (0,), "Frame": ()}


def wire_topic(topic: Topic) -> Topic:
    """The topic that carries envelopes of this one's samples."""
    if topic.idl_type in CLEAR:
        return topic
    return replace(topic, name=f"{topic.name}_sealed", idl_type="Frame")


class KeyGate(Protocol):
    """Tells whether a process has a key, and so may communicate."""

    @property
    def is_in(self) -> bool:
        """Whether this process has a key."""


class MatchedWhileIn:
    """Reports an endpoint as unmatched while the process has no key."""

    _key_gate: KeyGate
    _matched: int

    @property
    def matched(self) -> int:
        return self._matched if self._key_gate.is_in else 0

    @matched.setter
    def matched(self, count: int) -> None:
        self._matched = count


class SealedWriter(MatchedWhileIn, Writer):
    """Encrypts every sample. Samples written before there is a key are dropped."""

    def __init__(self, topic: Topic, wire: Writer, fast: bool, encryptor: StreamEncryptor, keys: Keys) -> None:
        self._key_gate = keys
        super().__init__(topic, wire.entity, fast)
        self._wire = wire
        self._clear = CLEAR[wire.topic.idl_type]
        self._encryptor = encryptor

    def write(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        """See :meth:`.dds.Writer.write`. A sample that is written again is sealed again, as a new envelope."""
        return not self._key_gate.is_in or self._wire.write_sealed(self._clear, fields, parts, self._envelope)

    @property
    def refused_since_s(self) -> float:
        """See :attr:`.dds.Writer.refused_since_s`."""
        return self._wire.refused_since_s

    def delete(self) -> None:
        """See :meth:`.dds.Writer.delete`: the writer below has the same entity, and late faults of its own to stop."""
        self._wire.delete()

    def _envelope(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> OutboundEnvelope:
        if not parts:
            return self._encryptor.envelope((self.idl_type(*fields).serialize(),))
        prefix = self.idl_type.prefix(*fields, sum(map(len, parts)))
        return self._encryptor.envelope((prefix, *parts))


class SealedReader(MatchedWhileIn, Reader):
    """Decrypts every envelope, and hands over the samples of authenticated sessions."""

    def __init__(self, topic: Topic, wire: Reader, seal: SessionCipher, decryptor: StreamDecryptor) -> None:
        self._key_gate = seal.keys
        super().__init__(topic, wire.entity, fast=False)
        self._wire = wire
        self._seal = seal
        self._decryptor = decryptor
        self._released: deque[tuple[Any, int]] = deque()

    def delete(self) -> None:
        """See :meth:`.dds.Reader.delete`: the reader below has the same entity."""
        self._wire.delete()

    def take(self, limit: int) -> list[tuple[Any, int]]:
        """See :meth:`.dds.Reader.take`: envelopes as they came, or samples that were held until now."""
        if self._released:
            return [self._released.popleft() for _ in range(min(limit, len(self._released)))]
        return [((raw, source), source) for raw, source in self._wire.take(limit)]

    def decode(self, raw: Any) -> Any:
        """See :meth:`.dds.Reader.decode`. Each is opened just before its use, in the processor's caches.

        Raises:
            FrameError: as :meth:`.StreamDecryptor.open`.
        """
        if not isinstance(raw, tuple):
            return raw
        wire, source = raw
        data = self._wire.octets(wire)
        opened = self._decryptor.open(data, in_place=self._wire.owns(data))
        if len(opened.peer.sources) < MAX_SOURCES:
            opened.peer.sources.add(source)
        sample = self.idl_type.deserialize(opened.data)
        return sample if self._accept(opened, sample, source) else None

    def _accept(self, opened: Opened, sample: Any, source: int) -> bool:
        """Whether the sample is to be handed over now."""
        peer = opened.peer
        if not peer.authenticated:
            self._seal.peers.hold(peer, self.topic.name, opened.header, sample, source, self._release)
        return peer.authenticated

    def _release(self, sample: Any, source: int) -> None:
        self._released.append((sample, source))
