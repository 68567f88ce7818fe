"""A DDS participant whose writers encrypt and whose readers decrypt what the membership of the process has keys for.

An envelope holds a whole sample: the fields of its DDS type as well as its octets. The fields that DDS carries beside
the envelope are zero and ignored. A TrainCmd has no octets, so encrypted ones have a topic of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

from gradbus.runtime.security.peers import Release
from gradbus.runtime.security.streams import OutboundEnvelope
from gradbus.runtime.transport.access_policy import AccessPolicy
from gradbus.runtime.transport.api import IoThread
from gradbus.runtime.transport.channels import Channel
from gradbus.runtime.transport.dds import libddsc
from gradbus.runtime.transport.dds.foreign_readers import ForeignReaders
from gradbus.runtime.transport.dds.libddsc import MatchedReader
from gradbus.runtime.transport.dds.network import NetworkConfig
from gradbus.runtime.transport.dds.participant import Participant, Reader, Writer
from gradbus.runtime.transport.dds.spdp import PREFIX_BYTES

# Fields beside the octets, by DDS type.
CLEAR: dict[str, tuple[int, ...]] = {"ClientUpdate": (0, 0, 0), "ModelBlob": (0,), "Frame": ()}


def wire_channel(channel: Channel) -> Channel:
    """Return the topic that carries the envelopes of a topic's samples."""
    if channel.sample_type in CLEAR:
        return channel
    return replace(channel, name=f"{channel.name}_sealed", sample_type="Frame")


class Decrypted(Protocol):
    """A decrypted envelope."""

    @property
    def data(self) -> memoryview:
        """The sample."""


class Decrypt(Protocol):
    """Decrypts the envelopes of one topic. Only the receive thread calls it."""

    def __call__(self, octets: Any, /) -> Decrypted | None:
        """Return the content; None: it is for another process. Raises FrameError: the envelope is rejected."""


class JobMembership(AccessPolicy, ABC):
    """Tells what a process may do and read in its job, and has the keys for it: in this alone security levels differ.

    Attributes:
        knows_all: whether this process knows the participants of all members.
    """

    knows_all = True

    @property
    @abstractmethod
    def has_key(self) -> bool:
        """Whether this process has a key to encrypt with; until then its endpoints count as not matched."""

    @abstractmethod
    def participants(self) -> set[bytes] | None:
        """GUID prefixes of the members' DDS participants; None: this process is not a member yet, and cannot tell."""

    def authenticated(self) -> Collection[bytes] | None:
        """GUID prefixes of the DDS participants of other members that have proved to be alive, and have got the same
        proof of this process; None: this membership asks for no such proof. Thread-safe."""
        return None

    @abstractmethod
    def start(self, node: EncryptedParticipant, thread: IoThread) -> None:
        """Start the protocols of this membership on the receive thread."""

    @abstractmethod
    def encrypt(self, topic: str, sample: tuple[Any, ...]) -> OutboundEnvelope | None:
        """Return the envelope of a sample; None: it has no recipient, and actors repeat it once it has.

        Raises:
            JoinRefused: the controller refuses this process, or has removed it.
            JobInUse: this process is a controller, and another one holds the job.
        """

    @abstractmethod
    def decryptor(self, channel: Channel) -> Decrypt:
        """Return what decrypts the envelopes of a topic."""

    @abstractmethod
    def accepts(self, channel: Channel, opened: Any, sample: Any, source: int, release: Release) -> bool:
        """Whether to hand over a decrypted sample now.

        Args:
            opened: as the decryptor of the topic has returned it. source: handle of the DDS writer.
            release: hands over a sample that was held back until its sender is authenticated.

        Raises:
            FrameError: the sender may not send it.
        """

    def retain(self, topic: str, samples: int) -> None:
        """Note that DDS retains so many of the newest samples of a topic for late readers."""

    def check_channel(self, channel: Channel) -> None:
        """Raise ConfigError: members of this kind do not use the topic."""


class _MatchedWithKey:
    """Reports an endpoint as unmatched while the process has no key."""

    _membership: JobMembership
    _matched: int

    @property
    def matched(self) -> int:
        return self._matched if self._membership.has_key else 0

    @matched.setter
    def matched(self, count: int) -> None:
        self._matched = count


class EncryptedWriter(_MatchedWithKey, Writer):
    """Encrypts every sample for its recipients.

    Attributes:
        unsent: number of samples that had no recipient.
    """

    def __init__(
        self, channel: Channel, wire: Writer, fast: bool, membership: JobMembership, own_prefix: bytes
    ) -> None:
        """``own_prefix``: GUID prefix of the participant of this bus."""
        self._membership = membership
        self._own_prefix = own_prefix
        self._readers: dict[int, MatchedReader] = {}
        super().__init__(channel, wire.entity, fast)
        self._wire = wire
        self._clear = CLEAR[wire.channel.sample_type]
        self.unsent = 0

    def write(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        """See :meth:`.dds.Writer.write`. A sample that is written again gets a new envelope."""
        if parts:
            sample: tuple[Any, ...] = (self.idl_type.prefix(*fields, sum(map(len, parts))), *parts)
        else:
            sample = (self.idl_type(*fields).serialize(),)
        envelope = self._membership.encrypt(self.channel.name, sample)
        if envelope is None:
            self.unsent += 1
            return True
        return self._wire.write_sealed(self._clear, fields, parts, lambda fields, parts: envelope)

    def refresh(self) -> bool:
        """See :meth:`.dds.Writer.refresh`."""
        is_new = super().refresh()
        if is_new:
            self._readers = super().readers(self._readers)
        return is_new

    def readers(self, known: Mapping[int, MatchedReader]) -> dict[int, MatchedReader]:
        """See :meth:`.dds.Writer.readers`: as of the last refresh."""
        return self._readers

    @property
    def matched(self) -> int:
        """Return the number of readers whose processes know that this one is alive, and no recording. Those of others
        would hold few of its samples, and drop the rest.

        Where the membership asks for no proof, or libddsc does not tell whose readers they are, all of them count. So
        does at once a bus that is opened again in a process whose DDS participant another bus has kept.
        """
        members = self._membership.authenticated()
        count = super().matched
        if members is None or not count or not libddsc.tells_readers():
            return count
        prefixes = [reader.participant[:PREFIX_BYTES] for reader in self._readers.values()]
        return min(count, sum(one in members or one == self._own_prefix for one in prefixes))

    @matched.setter
    def matched(self, count: int) -> None:
        self._matched = count

    @property
    def refused_since_s(self) -> float:
        """See :attr:`.dds.Writer.refused_since_s`."""
        return self._wire.refused_since_s

    @property
    def awaited_since_s(self) -> float:
        """See :attr:`.dds.Writer.awaited_since_s`."""
        return self._wire.awaited_since_s

    def wait_for_acks(self, timeout_s: float) -> bool:
        """See :meth:`.dds.Writer.wait_for_acks`: the writer below knows what is late."""
        return self._wire.wait_for_acks(timeout_s)

    @property
    def is_writing(self) -> bool:
        """See :attr:`.dds.Writer.is_writing`."""
        return self._wire.is_writing

    def close(self) -> None:
        """See :meth:`.dds.Writer.close`: the writer below has the same entity, and late faults of its own to stop."""
        self._wire.close()


class EncryptedReader(_MatchedWithKey, Reader):
    """Decrypts every envelope, and hands over the samples that this process accepts from their senders."""

    def __init__(self, channel: Channel, wire: Reader, membership: JobMembership) -> None:
        self._membership = membership
        super().__init__(channel, wire.entity, fast=False)
        self._wire = wire
        self._decrypt = membership.decryptor(channel)
        self._released: deque[tuple[Any, int]] = deque()

    def close(self) -> None:
        """See :meth:`.dds.Reader.close`: the reader below has the same entity."""
        self._wire.close()

    def take(self, limit: int) -> list[tuple[Any, int]]:
        """See :meth:`.dds.Reader.take`: samples that were held back until now, then envelopes as they came. Fewer than
        ``limit`` say that DDS has no more, here as well."""
        taken = [self._released.popleft() for _ in range(min(limit, len(self._released)))]
        if len(taken) < limit:
            taken += [((raw, source), source) for raw, source in self._wire.take(limit - len(taken))]
        return taken

    def decode(self, raw: Any) -> Any:
        """See :meth:`.dds.Reader.decode`. Each envelope is decrypted just before its use, in the processor's caches.

        Raises:
            FrameError: the envelope or its sender is rejected.
        """
        if not isinstance(raw, tuple):
            return raw
        wire, source = raw
        opened = self._decrypt(self._wire.octets(wire))
        if opened is None:
            return None
        sample = self.idl_type.deserialize(opened.data)
        return sample if self._membership.accepts(self.channel, opened, sample, source, self._release) else None

    def _release(self, sample: Any, source: int) -> None:
        self._released.append((sample, source))


class EncryptedParticipant(Participant):
    """DDS participant of a process with a membership."""

    def __init__(
        self,
        *,
        domain_id: int,
        partition: str,
        network: NetworkConfig,
        fast: bool | None = None,
        membership: Callable[[], JobMembership],
    ) -> None:
        """See :class:`.dds.participant.Participant`. ``membership``: makes that of this process."""
        self.membership = membership()
        super().__init__(domain_id=domain_id, partition=partition, network=network, fast=fast)
        self.access_policy = self.membership
        # The tag of the envelope replaces the checksum, which takes longer than encryption.
        self.traits = replace(self.traits, needs_crc=False)

    def start(self, thread: IoThread) -> None:
        """Start the protocols of the membership, and watch for foreign readers."""
        self.membership.start(self, thread)
        ForeignReaders(self, thread, self.membership.participants, knows_all=self.membership.knows_all)

    def outlet(self, channel: Channel, *, retained_samples: int = 1) -> EncryptedWriter:
        """See :meth:`.dds.Participant.outlet`."""
        self.membership.check_channel(channel)
        wire = super().outlet(wire_channel(channel), retained_samples=retained_samples)
        if channel.retained:
            self.membership.retain(channel.name, 1 if channel.keep_last else retained_samples)
        return EncryptedWriter(channel, wire, self.fast, self.membership, self.prefix)

    def inlet(self, channel: Channel) -> EncryptedReader:
        """See :meth:`.dds.Participant.inlet`."""
        self.membership.check_channel(channel)
        return EncryptedReader(channel, super().inlet(wire_channel(channel)), self.membership)

    def plain_outlet(self, channel: Channel) -> Writer:
        """Return a writer of unencrypted samples, for the join protocol."""
        return super().outlet(channel)

    def plain_inlet(self, channel: Channel) -> Reader:
        """Return a reader of unencrypted samples, for the join protocol."""
        return super().inlet(channel)
