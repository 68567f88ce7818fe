"""Encryption between a bus and any transport: outlets encrypt, and inlets decrypt, what the membership of the process
has keys for.

An envelope holds a whole sample: its fields as well as its octets, as
:mod:`~gradbus.runtime.transport.sample_layout` lays them out. The fields that the transport carries beside the envelope
are zero and ignored. A TrainCmd has no octets, so encrypted ones have a channel of their own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security.job_membership import JobMembership
from gradbus.runtime.transport.api import Inlet, IoThread, JobMembers, Outlet, Peer, Transport
from gradbus.runtime.transport.channels import Channel
from gradbus.runtime.transport.sample_layout import LAYOUTS
from gradbus.runtime.transport.wrappers import InletWrapper, OutletWrapper, TransportWrapper

# Fields beside the envelope, by type of sample.
_CLEAR: dict[str, tuple[int, ...]] = {"ClientUpdate": (0, 0, 0), "ModelBlob": (0,), "Frame": ()}


def wire_channel(channel: Channel) -> Channel:
    """Return the channel that carries the envelopes of a channel's samples."""
    if channel.sample_type in _CLEAR:
        return channel
    return replace(channel, name=f"{channel.name}_sealed", sample_type="Frame")


class SealedOutlet(OutletWrapper):
    """Encrypts every sample for its recipients. One that has none is not sent."""

    def __init__(self, channel: Channel, below: Outlet, transport: Transport, membership: JobMembership) -> None:
        """``transport``: that of ``below``."""
        super().__init__(channel, below)
        self._own = transport.own
        self._membership = membership
        self._encrypt = membership.encryptor(channel.name)
        self._parts = LAYOUTS[channel.sample_type].parts
        self._clear = _CLEAR[below.channel.sample_type]

    def write(self, fields: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
        """See :meth:`.api.Outlet.write`. A sample that is written again gets a new envelope."""
        envelope = self._encrypt(self._parts(fields, parts))
        if envelope is None:
            return True
        accepted = self.below.write_made(self._clear, envelope)
        if accepted:
            envelope.note_written()
        return accepted

    @property
    def matched(self) -> int:
        """Return the number of inlets whose processes know that this one is alive, and no recording. Those of others
        would hold few of its samples, and drop the rest.

        Where the membership asks for no proof, or the transport cannot tell whose inlets they are, all of them count.
        So does at once a bus that is opened again in a process whose transport has the same name as before.
        """
        if not self._membership.has_key:
            return 0
        count = self.below.matched
        members = self._membership.authenticated()
        if members is None or not count:
            return count
        receivers = self.below.receivers()
        if receivers is None:
            return count
        return min(count, sum(one in members or one == self._own for one in receivers))


class SealedInlet(InletWrapper):
    """Decrypts every envelope, and hands over the samples that this process accepts from their senders."""

    def __init__(self, channel: Channel, below: Inlet, membership: JobMembership) -> None:
        super().__init__(channel, below)
        self._membership = membership
        self._decrypt = membership.decryptor(channel)
        self._decode = LAYOUTS[channel.sample_type].decode
        self._released: deque[tuple[Any, Peer]] = deque()

    @property
    def matched(self) -> int:
        """Return the number of outlets; 0 while this process has no key."""
        return self.below.matched if self._membership.has_key else 0

    def take(self, limit: int) -> list[tuple[Any, Peer]]:
        """See :meth:`.api.Inlet.take`: samples that were held back until now, then envelopes as they came. Fewer than
        ``limit`` say that the transport has no more, here as well."""
        taken = [self._released.popleft() for _ in range(min(limit, len(self._released)))]
        if len(taken) < limit:
            taken += [((raw, source), source) for raw, source in self.below.take(limit - len(taken))]
        return taken

    def decode(self, raw: Any) -> Any:
        """See :meth:`.api.Inlet.decode`. Each envelope is decrypted just before its use, in the processor's caches.

        Raises:
            FrameError: the envelope or its sender is rejected.
        """
        if type(raw) is not tuple:  # a sample that was held back: a record, of a class of its own
            return raw
        envelope, source = raw
        opened = self._decrypt(self.below.octets(envelope))
        if opened is None:
            return None
        sample = self._decode(opened.data)
        return sample if self._membership.accepts(self.channel, opened, sample, source, self._release) else None

    def octets(self, raw: Any) -> Any:
        """See :meth:`.api.Inlet.octets`. Raises as :meth:`decode`; FrameError also where it is for another process."""
        sample = self.decode(raw)
        if sample is None:
            raise FrameError("not for it", f"a sample of {self.channel.name} that is not for this process, or not yet")
        return sample.data

    def _release(self, sample: Any, source: Peer) -> None:
        self._released.append((sample, source))


class Sealed(TransportWrapper):
    """The transport of a process with a membership, above one that carries envelopes."""

    def __init__(self, below: Transport, membership: JobMembership) -> None:
        super().__init__(below)
        self.membership = membership
        self.access_policy = membership
        # The tag of the envelope replaces the checksum, which takes longer than encryption.
        self.traits = replace(below.traits, needs_crc=False)

    def start(self, thread: IoThread, members: JobMembers | None = None) -> None:
        """Start the protocols of the membership, which says who belongs to the job."""
        self.below.start(thread, self.membership)
        self.membership.start(self.below, self, thread)

    def outlet(self, channel: Channel, *, retained_samples: int = 1) -> SealedOutlet:
        """See :meth:`.api.Transport.outlet`."""
        self.membership.check_channel(channel)
        below = self.below.outlet(wire_channel(channel), retained_samples=retained_samples)
        if channel.retained:
            self.membership.retain(channel.name, 1 if channel.keep_last else retained_samples)
        return SealedOutlet(channel, below, self.below, self.membership)

    def inlet(self, channel: Channel) -> SealedInlet:
        """See :meth:`.api.Transport.inlet`."""
        self.membership.check_channel(channel)
        return SealedInlet(channel, self.below.inlet(wire_channel(channel)), self.membership)
