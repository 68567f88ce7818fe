"""DDS writers and readers of a bus whose nodes have keys of their own.

The sender named in a sample is bound to the key that encrypted it: a node may send for the clients that the allow list
assigns to it, and for no others.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from gradbus.runtime.dds.access_policy import job_taken
from gradbus.runtime.dds.participant import Reader, Writer
from gradbus.runtime.dds.topics import TOPICS, Topic
from gradbus.runtime.errors import FrameError, JoinRefused
from gradbus.runtime.security.encryption import OutboundEnvelope, SessionCipher, StreamDecryptor
from gradbus.runtime.security.endpoints import CLEAR, MatchedWhileIn
from gradbus.runtime.security.identity.admission import Admission
from gradbus.runtime.security.identity.allow_list import Entry
from gradbus.runtime.security.identity.join_client import JoinClient
from gradbus.runtime.wire import control, frames
from gradbus.runtime.wire.messages import ClientUpdate, Control, TrainCmd

_CONTROL, _COMMANDS = TOPICS[Control].name, TOPICS[TrainCmd].name
_FROM_MEMBERS = frozenset({_CONTROL, TOPICS[ClientUpdate].name})


class IdentityCipher(Protocol):
    """Encrypts and decrypts the samples of a bus, on the controller's side or on a member's."""

    @property
    def is_in(self) -> bool:
        """Whether this process has a key to send with."""

    def seal(self, topic: str, parts: Sequence[Any]) -> OutboundEnvelope | None:
        """Return the envelope of a sample; None: it has no recipient.

        Raises:
            JoinRefused: the controller refuses this process, or has removed it.
            JobTaken: this process is a controller, and another one holds the job.
        """

    def open(self, topic: str, data: Any) -> memoryview | None:
        """Return the sample in an envelope; None: it is for another process. Raises FrameError: it is invalid."""

    def check(self, topic: str, sample: Any) -> None:
        """Raise FrameError ``identity`` if the node that encrypted the last sample may not send it."""


class ControllerCipher:
    """The cipher of the controller."""

    is_in = True

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._entry: Entry | None = None

    def seal(self, topic: str, parts: Sequence[Any]) -> OutboundEnvelope | None:
        """Return the envelope of a sample; a message to one client is encrypted for that node alone."""
        if self._admission.refusal:
            raise job_taken(self._admission.refusal)
        # Of a control message the last part is its body, which this process has made.
        to = control.addressee(parts[-1]) if topic == _CONTROL else None
        return self._admission.seal(topic, parts, to)

    def open(self, topic: str, data: Any) -> memoryview | None:
        opened = self._admission.open(topic, data, time.monotonic())
        if opened is None:
            return None
        plain, self._entry = opened
        if topic not in _FROM_MEMBERS:
            raise FrameError("identity", f"{self._entry.name}, a {self._entry.role}, sends on {topic}")
        return plain

    def check(self, topic: str, sample: Any) -> None:
        sender = frames.sender_of(sample.data)
        if self._entry is None or not self._entry.may_be(sender):
            name = self._entry and self._entry.name
            raise FrameError("identity", f"{name} speaks for client {sender}, which the allow list does not give it")


class MemberCipher:
    """The cipher of a client or an observer."""

    def __init__(self, client: JoinClient) -> None:
        self._client = client
        self._seal = SessionCipher(client.job, client.ranks, client.session)
        self._decryptors: dict[str, StreamDecryptor] = {}  # by topic
        client.on_removed = self._remove

    def _remove(self, sessions: Collection[bytes]) -> None:
        for session in sessions:
            self._seal.peers.remove(session)

    @property
    def is_in(self) -> bool:
        return self._client.keys is not None

    def seal(self, topic: str, parts: Sequence[Any]) -> OutboundEnvelope | None:
        if self._client.refusal:
            raise JoinRefused(self._client.refusal)
        return self._client.seal(topic, parts) if topic in _FROM_MEMBERS else None

    def open(self, topic: str, data: Any) -> memoryview | None:
        if not self._client.ranks.is_in:
            return self._client.open(topic, data, time.monotonic())
        decryptor = self._decryptors.get(topic)  # an observer of ranks requires no liveness challenge
        if decryptor is None:
            decryptor = self._decryptors[topic] = self._seal.decryptor(topic, ignores_own=True)
        return decryptor.open(data).data

    def check(self, topic: str, sample: Any) -> None:
        if self._client.ranks.is_in:
            return
        if topic != _COMMANDS and frames.sender_of(sample.data) != frames.CONTROLLER:
            raise FrameError("identity", "the controller sends in the name of another")


class IdentityWriter(MatchedWhileIn, Writer):
    """Encrypts every sample for its recipients. It counts as not matched while this process has not joined."""

    def __init__(self, topic: Topic, wire: Writer, fast: bool, cipher: IdentityCipher) -> None:
        super().__init__(topic, wire.entity, fast)
        self._wire = wire
        self._clear = CLEAR[wire.topic.idl_type]
        self._key_gate = self._cipher = cipher
        self.unsent = 0  # samples without a recipient

    def write(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        """See :meth:`.dds.Writer.write`. A sample without a recipient is dropped: actors repeat it once joined."""
        if parts:
            sample: tuple[Any, ...] = (self.idl_type.prefix(*fields, sum(map(len, parts))), *parts)
        else:
            sample = (self.idl_type(*fields).serialize(),)
        sealed = self._cipher.seal(self.topic.name, sample)
        if sealed is None:
            self.unsent += 1
            return True
        return self._wire.write_sealed(self._clear, fields, parts, lambda fields, parts: sealed)

    @property
    def refused_since_s(self) -> float:
        """See :attr:`.dds.Writer.refused_since_s`."""
        return self._wire.refused_since_s

    def delete(self) -> None:
        """See :meth:`.endpoints.SealedWriter.delete`."""
        self._wire.delete()


class IdentityReader(MatchedWhileIn, Reader):
    """Decrypts the samples for this process."""

    def __init__(self, topic: Topic, wire: Reader, cipher: IdentityCipher) -> None:
        super().__init__(topic, wire.entity, fast=False)
        self._wire = wire
        self._key_gate = self._cipher = cipher

    def delete(self) -> None:
        """See :meth:`.endpoints.SealedReader.delete`."""
        self._wire.delete()

    def take(self, limit: int) -> list[tuple[Any, int]]:
        """See :meth:`.dds.Reader.take`: envelopes as they came."""
        return self._wire.take(limit)

    def decode(self, raw: Any) -> Any:
        """See :meth:`.dds.Reader.decode`. Each is opened just before its use, in the processor's caches.

        Raises:
            FrameError: as :meth:`IdentityCipher.open` and :meth:`IdentityCipher.check`.
        """
        plain = self._cipher.open(self.topic.name, self._wire.octets(raw))
        if plain is None:
            return None
        sample = self.idl_type.deserialize(plain)
        self._cipher.check(self.topic.name, sample)
        return sample
