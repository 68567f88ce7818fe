"""Encrypts the outgoing samples of one bus and decrypts the incoming ones, where all members share a key."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.envelope import EnvelopeHeader
from gradbus.runtime.security.job_key import JobKey
from gradbus.runtime.security.peers import Peer, Peers
from gradbus.runtime.security.streams import EncryptionKeys, InboundStream, OutboundStreams, SharedKey


class Keys(ABC):
    """The shared keys of a bus, which is what the security levels differ in. The defaults are those of a single key.

    Attributes:
        job: the job that they belong to.
    """

    job: str

    @property
    @abstractmethod
    def current(self) -> SharedKey:
        """See :class:`.streams.EncryptionKeys`."""

    @property
    def outbound(self) -> EncryptionKeys:
        """Return what gives the key to encrypt with."""
        return self

    @abstractmethod
    def of(self, header: EnvelopeHeader) -> SharedKey:
        """Return the key of an envelope. Raises FrameError: this process has none."""

    @property
    def has_key(self) -> bool:
        """Whether there is a key to encrypt with."""
        return True

    def accepts(self, key_id: bytes) -> bool:
        """Whether envelopes under this key are accepted."""
        return key_id == self.current.key_id

    def accepts_new_session(self, key: SharedKey) -> bool:
        """Whether a session that was unknown so far is accepted with this key."""
        return True

    @abstractmethod
    def note_use(self, key: SharedKey, session: bytes) -> None:
        """Note that another process has encrypted with a key that is not the current one here."""


class PskKeys(Keys):
    """The job key, whose holders trust each other."""

    def __init__(self, job: str, key: JobKey, origin: str = "") -> None:
        """``origin``: where the key is from, for error messages; empty: the settings."""
        self.job = job
        self._key = SharedKey(job, envelope.PSK, 0, key.secret)  # epoch 0: another job key has another id
        self._origin = f", from {origin}" * bool(origin)

    @property
    def current(self) -> SharedKey:
        """The job key."""
        return self._key

    @property
    def outbound(self) -> SharedKey:
        """The job key, which is always the one to encrypt with."""
        return self._key

    def of(self, header: EnvelopeHeader) -> SharedKey:
        """See :meth:`Keys.of`. Raises FrameError: ``other level``, ``other key``."""
        key = self._key
        if header.level != key.level:
            raise envelope.other_level()
        if header.key_id != key.key_id or header.epoch != key.epoch:
            raise FrameError(
                "other key",
                f"a process of this job has another job key: its id is {header.key_id.hex()}, here it is "
                f"{key.key_id.hex()}{self._origin}. Compare 'gradbus keys show' where each of them runs. "
                f"Processes of two users, as with sudo or in a container, have two keys by default: give both the same "
                f"one with GRADBUS_KEY_FILE or bus.key_file",
            )
        return key

    def note_use(self, key: SharedKey, session: bytes) -> None:
        raise AssertionError("there is one key")


class Opened(NamedTuple):
    """A decrypted envelope: its sender, header and sample."""

    peer: Peer
    header: EnvelopeHeader
    data: memoryview


class SessionCipher(OutboundStreams):
    """Encryption state of one bus: its session, the streams of its topics, and its peers."""

    def __init__(self, keys: Keys, session: bytes | None = None) -> None:
        """``session``: random id of this start of this process; None: a new one."""
        super().__init__(keys.outbound, session or secrets.token_bytes(envelope.SESSION_BYTES))
        self.keys = keys
        self.peers = Peers(self.session)

    def decryptor(self, topic: str, *, ignores_own: bool) -> StreamDecryptor:
        """Return a decryptor of a topic. ``ignores_own``: reject envelopes of this session."""
        return StreamDecryptor(self, topic, ignores_own=ignores_own)


class StreamDecryptor:
    """Decrypts the envelopes of one topic. Only the receive thread uses it."""

    def __init__(self, cipher: SessionCipher, topic: str, *, ignores_own: bool) -> None:
        self._keys = cipher.keys
        self._peers = cipher.peers
        self._topic = topic
        self._context = envelope.associated(cipher.job, topic)
        self._own = cipher.session if ignores_own else b""

    def open(self, data: Any) -> Opened:
        """Check and decrypt an envelope into new memory. Cheap checks come first; nothing is remembered before the tag
        is verified.

        Raises:
            FrameError: with ``reason`` one of short, not sealed, version, limits, other level, other key, no key, own,
                removed, old, replay, counter, tag.
        """
        view = memoryview(data).cast("B")
        header = envelope.parse(view)
        key = self._keys.of(header)
        if header.session == self._own:
            raise FrameError("own", "an envelope of this process on a topic that it does not hear itself on")
        if header.session in self._peers.removed:
            raise FrameError("removed", "an envelope of a process whose node was taken off the list")
        peer = self._peers.get(header.session)
        if peer is None and not self._keys.accepts_new_session(key):
            raise FrameError("old", "a process shows up with a key of an epoch that is over")
        if peer is not None and peer.is_old(self._topic, header):
            raise FrameError("old", f"an envelope on {self._topic} is older than what its sender knows of this process")
        known = None if peer is None else peer.streams.get((self._topic, key.key_id))
        stream = known or InboundStream(key, header.session, self._topic, self._context)
        plain = stream.open(header, view)
        if peer is None:
            peer = self._peers.add(header.session)
        if known is None:
            self._keep(peer, key, stream)
        self._peers.mark_seen(peer)
        if key is not self._keys.current:
            self._keys.note_use(key, header.session)
        return Opened(peer, header, plain)

    def _keep(self, peer: Peer, key: SharedKey, stream: InboundStream) -> None:
        """Keep a new stream, and drop those of this topic whose keys are not accepted any more."""
        over = [one for one in peer.streams if one[0] == self._topic and not self._keys.accepts(one[1])]
        for one in over:
            del peer.streams[one]
        peer.streams[self._topic, key.key_id] = stream
