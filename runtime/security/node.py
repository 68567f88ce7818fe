"""DDS participant of a job that shares a group key: its writers encrypt, its readers decrypt."""

from __future__ import annotations

from typing import TypeVar, overload

from gradbus.runtime.dds.network import NetworkConfig
from gradbus.runtime.dds.participant import IoThread, Node
from gradbus.runtime.dds.topics import Topic
from gradbus.runtime.security.encryption import SessionCipher
from gradbus.runtime.security.endpoints import SealedReader, SealedWriter, wire_topic
from gradbus.runtime.security.foreign_readers import ForeignReaders
from gradbus.runtime.security.liveness_challenge import SESSION_TOPIC, ChallengeReader, LivenessChallenge

SomeReader = TypeVar("SomeReader", bound=SealedReader)


class SealedNode(Node):
    """A participant whose writers seal and whose readers open."""

    def __init__(
        self, *, domain_id: int, partition: str, network: NetworkConfig, fast: bool | None = None, seal: SessionCipher
    ) -> None:
        """See :class:`~gradbus.runtime.dds.participant.Node`."""
        super().__init__(domain_id=domain_id, partition=partition, network=network, fast=fast)
        self.seal = seal
        self.needs_crc = False  # the tag of the envelope tells as well, and a checksum takes longer than sealing

    def start(self, thread: IoThread) -> None:
        """Start the liveness challenge, and watch for readers of no member."""
        self.start_liveness_challenge(thread)
        ForeignReaders(self, thread, self.members)

    def start_liveness_challenge(self, thread: IoThread) -> LivenessChallenge:
        """Open the topic of the liveness challenge."""
        reader = self.topic_reader(SESSION_TOPIC, ChallengeReader)
        return LivenessChallenge(self.seal, self.prefix, reader, self.topic_writer(SESSION_TOPIC), thread)

    def members(self) -> set[bytes] | None:
        """See :class:`.foreign_readers.Members`."""
        return self.seal.peers.participants if self.seal.keys.is_in else None

    def topic_writer(self, topic: Topic, *, retained_samples: int = 1) -> SealedWriter:
        """See :meth:`.dds.Node.topic_writer`."""
        wire = super().topic_writer(wire_topic(topic), retained_samples=retained_samples)
        if topic.retained:
            self.seal.encryptor(topic.name).retain(1 if topic.keep_last else retained_samples)
        return SealedWriter(topic, wire, self.fast, self.seal.encryptor(topic.name), self.seal.keys)

    @overload
    def topic_reader(self, topic: Topic) -> SealedReader: ...

    @overload
    def topic_reader(self, topic: Topic, kind: type[SomeReader]) -> SomeReader: ...

    def topic_reader(self, topic: Topic, kind: type[SealedReader] = SealedReader) -> SealedReader:
        """See :meth:`.dds.Node.topic_reader`."""
        wire = super().topic_reader(wire_topic(topic))
        return kind(topic, wire, self.seal, self.seal.decryptor(topic.name, ignores_own=topic.ignore_local))
