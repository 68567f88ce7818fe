"""What a process may do and read in its job, and the keys for it: in this alone the security levels differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol, TypeAlias

from gradbus.runtime.security.peers import Release
from gradbus.runtime.security.streams import OutboundEnvelope
from gradbus.runtime.transport import api
from gradbus.runtime.transport.access_policy import AccessPolicy
from gradbus.runtime.transport.api import IoThread, PeerId, Transport
from gradbus.runtime.transport.channels import Channel


class Decrypted(Protocol):
    """A decrypted envelope."""

    @property
    def data(self) -> memoryview:
        """The sample."""


class Decrypt(Protocol):
    """Decrypts the envelopes of one channel. Only the receive thread calls it."""

    def __call__(self, octets: Any, /) -> Decrypted | None:
        """Return the content; None: it is for another process. Raises FrameError: the envelope is rejected."""


Encrypt: TypeAlias = Callable[[tuple[Any, ...]], OutboundEnvelope | None]
"""Encrypts the samples of one channel, as :meth:`JobMembership.encrypt`."""


class JobMembership(AccessPolicy, ABC):
    """The membership of one process in its job. Implements :class:`~gradbus.runtime.transport.api.JobMembers`."""

    knows_all = True

    @property
    @abstractmethod
    def has_key(self) -> bool:
        """Whether this process has a key to encrypt with; until then its endpoints count as not matched."""

    @abstractmethod
    def known(self) -> Collection[PeerId] | None:
        """See :meth:`~gradbus.runtime.transport.api.JobMembers.known`."""

    def authenticated(self) -> Collection[PeerId] | None:
        """Return other members that have proved to be alive, and have got the same proof of this process; None: this
        membership asks for no such proof. Thread-safe."""
        return None

    @abstractmethod
    def start(self, below: Transport, sealed: Transport, thread: IoThread) -> None:
        """Start the protocols of this membership on the receive thread.

        Args:
            below: carries messages that are not encrypted, or in another way. sealed: encrypts with this membership.
        """

    @abstractmethod
    def encrypt(self, topic: str, sample: tuple[Any, ...]) -> OutboundEnvelope | None:
        """Return the envelope of a sample; None: it has no recipient, and actors repeat it once it has.

        Raises:
            JoinRefused: the controller refuses this process, or has removed it.
            JobInUse: this process is a controller, and another one holds the job.
        """

    def encryptor(self, topic: str) -> Encrypt:
        """Return what encrypts the samples of a channel."""
        return partial(self.encrypt, topic)

    @abstractmethod
    def decryptor(self, channel: Channel) -> Decrypt:
        """Return what decrypts the envelopes of a channel."""

    @abstractmethod
    def accepts(self, channel: Channel, opened: Any, sample: Any, source: api.Peer, release: Release) -> bool:
        """Whether to hand over a decrypted sample now.

        Args:
            opened: as the decryptor of the channel has returned it. source: the outlet that it came from.
            release: hands over a sample that was held back until its sender is authenticated.

        Raises:
            FrameError: the sender may not send it.
        """

    def retain(self, topic: str, samples: int) -> None:
        """Note that the transport retains so many of the newest samples of a channel for late inlets."""

    def check_channel(self, channel: Channel) -> None:
        """Raise ConfigError: members of this kind do not use the channel."""
