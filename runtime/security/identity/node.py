"""DDS participant of a federated run whose nodes have keys of their own, with a pairwise key for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradbus.runtime.dds.access_policy import NO_RANKS, Standing
from gradbus.runtime.dds.network import NetworkConfig
from gradbus.runtime.dds.participant import IoThread, Node
from gradbus.runtime.dds.topics import TOPICS, Topic
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.security.endpoints import wire_topic
from gradbus.runtime.security.foreign_readers import ForeignReaders
from gradbus.runtime.security.identity import controller_signatures
from gradbus.runtime.security.identity.admission import Admission
from gradbus.runtime.security.identity.endpoints import (
    ControllerCipher,
    IdentityCipher,
    IdentityReader,
    IdentityWriter,
    MemberCipher,
)
from gradbus.runtime.security.identity.join_client import JoinClient
from gradbus.runtime.wire.frames import FrameKey

_NAMES = frozenset(topic.name for topic in TOPICS.values())


class ControllerStanding(Standing):
    """Access policy of the controller, which signs every model."""

    role = "controller"
    signs_models = True

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    @property
    def refusal(self) -> str:
        return self._admission.refusal

    def sign_model(self, key: FrameKey, flags: int, payload: Any) -> str:
        admission = self._admission
        epoch = admission.group.key.epoch
        return controller_signatures.sign_model(
            admission.job, admission.key, admission.session, epoch, key, flags, payload
        )


class MemberStanding(Standing):
    """Access policy of clients and observers, which check the signatures of models."""

    def __init__(self, client: JoinClient) -> None:
        self.role = client.role
        self._client = client

    @property
    def refusal(self) -> str:
        return self._client.refusal

    def check_model(self, key: FrameKey, flags: int, total_bytes: int) -> None:
        keys, client = self._client.keys, self._client
        controller, newest = (b"", 0) if keys is None else (keys.controller, keys.epoch)
        controller_signatures.check_model(client.job, client.pinned, controller, newest, key, flags, total_bytes)


class IdentityNode(Node):
    """DDS participant at security level ``identity`` for clients, observers and their controller."""

    def __init__(
        self, *, domain_id: int, partition: str, network: NetworkConfig, fast: bool | None = None,
        party: Admission | JoinClient, start: Callable[[IdentityNode, IoThread], None],
    ) -> None:  # fmt: skip
        """See ``dds.Node``. ``start`` begins joining once there is a receive thread."""
        super().__init__(domain_id=domain_id, partition=partition, network=network, fast=fast)
        self.needs_crc = False  # the tag of the envelope tells as well
        self.party = party
        party.participant = self.prefix
        self._start = start
        self._retained: dict[str, int] = {}
        self._cipher: IdentityCipher
        if isinstance(party, Admission):
            self.standing, self._cipher = ControllerStanding(party), ControllerCipher(party)
            party.retained = lambda topic: self._retained.get(topic, 0)
        else:
            self.standing, self._cipher = MemberStanding(party), MemberCipher(party)

    def start(self, thread: IoThread) -> None:
        """Start the join protocol, and watch for readers of no member."""
        self._start(self, thread)
        ForeignReaders(self, thread, self.members, knows_all=isinstance(self.party, Admission))

    def members(self) -> set[bytes] | None:
        """See ``foreign_readers.Members``. A client knows the controller alone, and sends nothing to others: slow
        readers of other clients are excluded for a while."""
        if isinstance(self.party, Admission):
            return self.party.participants
        known = self.party.controller_participant
        return {known} if known else None

    def refused(self) -> None:
        """Do nothing: actors get the error from their next write."""

    def topic_writer(self, topic: Topic, *, retained_samples: int = 1) -> IdentityWriter:
        """See :meth:`.dds.Node.topic_writer`."""
        _check_topic(topic)
        wire = super().topic_writer(wire_topic(topic), retained_samples=retained_samples)
        if topic.retained:
            self._retained[topic.name] = 1 if topic.keep_last else retained_samples
        return IdentityWriter(topic, wire, self.fast, self._cipher)

    def topic_reader(self, topic: Topic) -> IdentityReader:
        """See :meth:`.dds.Node.topic_reader`."""
        _check_topic(topic)
        return IdentityReader(topic, super().topic_reader(wire_topic(topic)), self._cipher)

    def plain_writer(self, topic: Topic) -> Any:
        """Return a writer of unencrypted samples."""
        return super().topic_writer(topic)

    def plain_reader(self, topic: Topic) -> Any:
        """Return a reader of unencrypted samples."""
        return super().topic_reader(topic)


def _check_topic(topic: Topic) -> None:
    if topic.name not in _NAMES:
        raise ConfigError(NO_RANKS)
