"""Membership in a job whose members share a key: encryption with that key, and proof that each sender is alive."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gradbus.runtime.security.encryption import Opened, PskKeys, SessionCipher
from gradbus.runtime.security.job_membership import Decrypt, Encrypt, JobMembership
from gradbus.runtime.security.liveness_challenge import SESSION_TOPIC, LivenessChallenge
from gradbus.runtime.security.peers import MAX_SOURCES, Release
from gradbus.runtime.security.streams import OutboundEnvelope
from gradbus.runtime.transport import api
from gradbus.runtime.transport.api import IoThread, PeerId, Transport
from gradbus.runtime.transport.channels import Channel, is_inbox_name


class SharedKeyMembership(JobMembership):
    """Membership of every process that has the shared key.

    Attributes:
        cipher: encrypts and decrypts for this process.
    """

    def __init__(self, cipher: SessionCipher) -> None:
        self.cipher = cipher
        self.liveness: LivenessChallenge | None = None

    @property
    def has_key(self) -> bool:
        return self.cipher.keys.has_key

    def known(self) -> Collection[PeerId] | None:
        return self.cipher.peers.peer_ids if self.has_key else None

    def authenticated(self) -> Collection[PeerId]:
        return () if self.liveness is None else self.liveness.proven

    def start(self, below: Transport, sealed: Transport, thread: IoThread) -> None:
        inlet, outlet = sealed.inlet(SESSION_TOPIC), sealed.outlet(SESSION_TOPIC)
        self.liveness = LivenessChallenge(self.cipher, sealed.own, outlet, thread)
        thread.add_reader(inlet)

    def encrypt(self, topic: str, sample: tuple[Any, ...]) -> OutboundEnvelope | None:
        return self.cipher.encryptor(topic).envelope(sample) if self.has_key else None

    def encryptor(self, topic: str) -> Encrypt:
        if isinstance(self.cipher.keys, PskKeys):  # its key is there from the start
            return self.cipher.encryptor(topic).envelope
        return super().encryptor(topic)

    def decryptor(self, channel: Channel) -> Decrypt:
        return self.cipher.decryptor(channel.name, ignores_own=channel.ignore_local).open

    def accepts(self, channel: Channel, opened: Opened, sample: Any, source: api.Peer, release: Release) -> bool:
        """Accept the samples of authenticated sessions; hold those of others until they are authenticated."""
        peer = opened.peer
        if len(peer.sources) < MAX_SOURCES:
            peer.sources.add(source)
        if channel is SESSION_TOPIC:
            if self.liveness is not None:
                self.liveness.receive(peer, sample.data)
            return False
        if not peer.authenticated:
            self.cipher.peers.hold(peer, channel.name, opened.header, sample, source, release)
        return peer.authenticated

    def retain(self, topic: str, samples: int) -> None:
        if not is_inbox_name(topic):  # its stream may be made again, and no announcement says what is retained there
            self.cipher.encryptor(topic).retain(samples)
