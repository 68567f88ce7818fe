"""Endpoints of the network in memory for security level ``identity``: the shipped membership above simulated DDS.

Handshakes, key epochs, signatures, and the encryption of every sample are those that are shipped. What is missing is
the exclusion of foreign readers, which works on DDS itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fault_simulation.kernel import running
from gradbus.runtime.security.endpoints import CLEAR, EncryptedReader, EncryptedWriter, JobMembership, wire_channel
from gradbus.runtime.security.identity.join_transport import JoinReader
from gradbus.runtime.transport.api import IoThread
from gradbus.runtime.transport.channels import Channel
from gradbus.runtime.transport.dds.participant import IDL_TYPES, Seals
from gradbus.runtime.transport.dds.spdp import PREFIX_BYTES
from gradbus.runtime.transport.memory.endpoints import MemoryInlet, MemoryOutlet
from gradbus.runtime.transport.memory.transport import MemoryTransport


class EnvelopeOutlet(MemoryOutlet):
    """Has what the shipped encryption asks of the DDS writer below it."""

    awaited_since_s = 0.0

    def write_sealed(
        self, clear: tuple[Any, ...], fields: tuple[Any, ...], parts: tuple[Any, ...], seals: Seals
    ) -> bool:
        """See ``Writer.write_sealed``."""
        envelope = seals(fields, parts)
        taken = self.write(clear, (envelope.octets(),))
        if taken:
            envelope.written()
        return taken


class EnvelopeInlet(MemoryInlet):
    """Has what the shipped decryption asks of the DDS reader below it."""

    def octets(self, raw: Any) -> Any:
        """Return the octets of a sample."""
        return raw.data


class MemoryEncryptedWriter(EncryptedWriter):
    """Encrypts every sample, and writes it with a writer in memory."""

    def __init__(self, channel: Channel, wire: Any, membership: JobMembership, own_prefix: bytes) -> None:
        self._membership = membership
        self._own_prefix = own_prefix
        self._readers = {}
        self.channel = channel
        self.changes = wire.changes
        self.idl_type = IDL_TYPES[channel.sample_type]
        self.matched = 0
        self.has_new_readers = False
        self._wire = wire
        self._clear = CLEAR[wire.channel.sample_type]
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

    def __init__(self, channel: Channel, wire: Any, membership: JobMembership) -> None:
        self._membership = membership
        self.channel = channel
        self.changes, self.arrivals = wire.changes, wire.arrivals
        self.idl_type = IDL_TYPES[channel.sample_type]
        self.matched = 0
        self._wire = wire
        self._decrypt = membership.decryptor(channel)
        self._released: deque[tuple[Any, int]] = deque()

    def refresh(self) -> bool:
        """See ``Reader.refresh``."""
        is_new = bool(self._wire.refresh())
        if is_new:
            self.matched = self._wire.matched
        return is_new

    def peers(self) -> set[int]:
        """Return the handles of the writers that it knows."""
        return set(self._wire.peers())


class MemoryJoinReader(JoinReader):
    """Passes the samples of a reader in memory to the join protocol."""

    def __init__(self, wire: Any, transport: Any) -> None:
        self.channel = wire.channel
        self.changes, self.arrivals = wire.changes, wire.arrivals
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

    def peers(self) -> set[int]:
        """Return the handles of the writers that it knows."""
        return set(self._wire.peers())

    def close(self) -> None:
        """Take it out of the network."""
        self._wire.close()


class MemoryEncryptedParticipant(MemoryTransport):
    """Stands in for ``EncryptedParticipant``: the endpoints of one bus of a process with a membership."""

    outlet_kind, inlet_kind = EnvelopeOutlet, EnvelopeInlet

    def __init__(self, *, membership: Callable[[], JobMembership], partition: str, **_: Any) -> None:
        self.membership = membership()
        process = running()
        super().__init__(process.world.network, process, partition)
        number = len(self.network.participants)
        self.prefix = process.pid.to_bytes(PREFIX_BYTES - 1, "big") + bytes([number % 256])
        self.access_policy = self.membership
        self.traits = replace(self.traits, needs_crc=False)

    def start(self, thread: IoThread) -> None:
        """Start the join protocol."""
        self.membership.start(self, thread)  # type: ignore[arg-type]

    # mypy: these endpoints are those of the shipped encryption, with endpoints in memory below
    def outlet(self, channel: Channel, *, retained_samples: int = 1) -> Any:
        """Make a writer that encrypts."""
        self.membership.check_channel(channel)
        wire = super().outlet(wire_channel(channel), retained_samples=retained_samples)
        if channel.retained:
            self.membership.retain(channel.name, 1 if channel.keep_last else retained_samples)
        return MemoryEncryptedWriter(channel, wire, self.membership, self.prefix)

    def inlet(self, channel: Channel) -> Any:
        """Make a reader that decrypts."""
        self.membership.check_channel(channel)
        return MemoryEncryptedReader(channel, super().inlet(wire_channel(channel)), self.membership)

    def plain_outlet(self, channel: Channel) -> MemoryOutlet:
        """Make a writer of samples that are not encrypted, for the join protocol."""
        return super().outlet(channel)

    def plain_inlet(self, channel: Channel) -> MemoryInlet:
        """Make a reader of samples that are not encrypted, for the join protocol."""
        return super().inlet(channel)
