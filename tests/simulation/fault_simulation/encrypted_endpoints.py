"""Endpoints of the network in memory for security level ``identity``: the shipped membership above simulated DDS.

Handshakes, key epochs, signatures, and the encryption of every sample are those that are shipped. What is missing is
the exclusion of foreign readers, which works on DDS itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from fault_simulation.endpoints import MemoryParticipant, MemoryReader, MemoryWriter
from gradbus.runtime.dds.participant import IDL_TYPES, IoThread
from gradbus.runtime.dds.spdp import PREFIX_BYTES
from gradbus.runtime.dds.topics import Topic
from gradbus.runtime.security.endpoints import CLEAR, EncryptedReader, EncryptedWriter, JobMembership, wire_topic
from gradbus.runtime.security.identity.join_transport import JoinReader


class MemoryEncryptedWriter(EncryptedWriter):
    """Encrypts every sample, and writes it with a writer in memory."""

    def __init__(self, topic: Topic, wire: MemoryWriter, membership: JobMembership, own_prefix: bytes) -> None:
        self._membership = membership
        self._own_prefix = own_prefix
        self._readers = {}
        self.topic = topic
        self.entity = wire.entity
        self.idl_type = IDL_TYPES[topic.idl_type]
        self.matched = 0
        self.has_new_readers = False
        self._wire = wire
        self._clear = CLEAR[wire.topic.idl_type]
        self.unsent = 0

    def refresh(self) -> bool:
        """See :meth:`Writer.refresh`."""
        is_new = self._wire.refresh()
        if is_new:
            self.matched, self.has_new_readers = self._wire.matched, True
        return is_new

    @property
    def throttled_s(self) -> float:
        """Return 0: no write waits."""
        return 0.0

    @property
    def is_acknowledged(self) -> bool:
        """Return whether nothing waits for a reader."""
        return self._wire.is_acknowledged


class MemoryEncryptedReader(EncryptedReader):
    """Decrypts every sample of a reader in memory."""

    def __init__(self, topic: Topic, wire: Any, membership: JobMembership) -> None:
        self._membership = membership
        self.topic = topic
        self.entity, self.condition = wire.entity, wire.condition
        self.idl_type = IDL_TYPES[topic.idl_type]
        self.matched = 0
        self._wire = wire
        self._decrypt = membership.decryptor(topic)
        self._released: deque[tuple[Any, int]] = deque()

    def refresh(self) -> bool:
        """See ``Reader.refresh``."""
        is_new = bool(self._wire.refresh())
        if is_new:
            self.matched = self._wire.matched
        return is_new

    def sources(self) -> set[int]:
        """Return the handles of the writers that it knows."""
        return set(self._wire.sources())


class MemoryJoinReader(JoinReader):
    """Passes the samples of a reader in memory to the join protocol."""

    def __init__(self, wire: Any, transport: Any) -> None:
        self.topic = wire.topic
        self.entity, self.condition = wire.entity, wire.condition
        self._wire = wire
        self._transport = transport

    # mypy: the real one has an attribute
    @property
    def matched(self) -> int:  # type: ignore[override]
        """Return the number of writers that it knows."""
        return int(self._wire.matched)

    def refresh(self) -> bool:
        """See ``Reader.refresh``."""
        return bool(self._wire.refresh())

    def sources(self) -> set[int]:
        """Return the handles of the writers that it knows."""
        return set(self._wire.sources())

    def delete(self) -> None:
        """Take it out of the network."""
        self._wire.delete()


class MemoryEncryptedParticipant(MemoryParticipant):
    """Stands in for ``EncryptedParticipant``: the endpoints of one bus of a process with a membership."""

    def __init__(self, *, membership: Callable[[], JobMembership], **place: Any) -> None:
        self.membership = membership()
        super().__init__(**place)
        number = len(self.network.participants)
        self.prefix = self.process.pid.to_bytes(PREFIX_BYTES - 1, "big") + bytes([number % 256])
        self.access_policy = self.membership
        self.needs_crc = False

    def start(self, thread: IoThread) -> None:
        """Start the join protocol."""
        self.membership.start(self, thread)  # type: ignore[arg-type]

    def topic_writer(self, topic: Topic, *, retained_samples: int = 1) -> Any:
        """Make a writer that encrypts."""
        self.membership.check_topic(topic)
        wire = super().topic_writer(wire_topic(topic), retained_samples=retained_samples)
        if topic.retained:
            self.membership.retain(topic.name, 1 if topic.keep_last else retained_samples)
        return MemoryEncryptedWriter(topic, wire, self.membership, self.prefix)

    def topic_reader(self, topic: Topic) -> Any:
        """Make a reader that decrypts."""
        self.membership.check_topic(topic)
        return MemoryEncryptedReader(topic, super().topic_reader(wire_topic(topic)), self.membership)

    def plain_writer(self, topic: Topic) -> MemoryWriter:
        """Make a writer of samples that are not encrypted, for the join protocol."""
        return super().topic_writer(topic)

    def plain_reader(self, topic: Topic) -> MemoryReader:
        """Make a reader of samples that are not encrypted, for the join protocol."""
        return super().topic_reader(topic)
