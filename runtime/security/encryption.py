"""Encrypts outgoing samples and decrypts incoming ones.

AES-256-GCM. Every stream, that is one topic of one session, has a key of its own, and counts its envelopes from 1: no
nonce is ever used twice, and nothing has to be remembered over a restart. After 2**32 envelopes a stream goes on with
its next key.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from gradbus.runtime import forks
from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.envelope import HEADER_BYTES, OVERHEAD_BYTES, EnvelopeHeader
from gradbus.runtime.security.inbound_stream import (
    GENERATION_BITS,
    Derives,
    InboundStream,
    StreamKey,
    open_into,
    open_small,
    salt_of,
    stream_key,
)
from gradbus.runtime.security.job_key import JobKey
from gradbus.runtime.security.peers import Peer, Peers

_SMALL_BYTES = 4096
# Memory of NumPy begins at a multiple of 16. So much later, payload of collectives lies at one, as in an envelope
# that is opened where it came.
_PAD_BYTES = 4


class Key(Derives, Protocol):
    """A secret that stream keys derive from."""

    @property
    def level(self) -> int:
        """PSK, GROUP or MEMBER."""

    @property
    def epoch(self) -> int:
        """Its number among those of its kind."""

    @property
    def key_id(self) -> bytes:
        """Public identifier of the key."""


class SealingKeys(Protocol):
    """The key to encrypt with."""

    @property
    def current(self) -> Key:
        """Read once for each envelope: any thread may exchange it meanwhile."""


class Keys(SealingKeys, Protocol):
    """Source of the stream keys, which is what the security levels differ in."""

    @property
    def is_in(self) -> bool:
        """Whether there is a key to encrypt with."""

    def of(self, header: EnvelopeHeader) -> Key:
        """Return the key of an envelope. Raises FrameError: this process has none."""

    def has(self, key_id: bytes) -> bool:
        """Whether envelopes under this key are accepted."""

    def admits(self, key: Key) -> bool:
        """Whether an unknown session may appear with this key."""

    def heard(self, key: Key, session: bytes) -> None:
        """Note that another process has encrypted with a key that is not the current one here."""


class PskKeys:
    """Derives all stream keys from the job key, whose holders trust each other."""

    level = envelope.PSK
    epoch = 0  # a new key has a new id
    is_in = True

    def __init__(self, job: str, key: JobKey, origin: str = "") -> None:
        """``origin``: where the key is from, for people; empty: it is in the settings."""
        self.key_id = key.id
        self._secret = key.secret
        self._salt = salt_of(job)
        self._origin = f", from {origin}" * bool(origin)

    @property
    def current(self) -> PskKeys:
        return self

    def of(self, header: EnvelopeHeader) -> PskKeys:
        if header.level != self.level:
            raise FrameError("other level", "an envelope of another level of security: all members must use the same")
        if header.key_id != self.key_id or header.epoch != self.epoch:
            raise FrameError(
                "other key",
                f"a process of this job has another job key: its id is {header.key_id.hex()}, here it is "
                f"{self.key_id.hex()}{self._origin}. Compare 'gradbus keys show' where each of them runs. "
                f"Processes of two users, as with sudo or in a container, have two keys by default: give both the same "
                f"one with GRADBUS_KEY_FILE or bus.key_file",
            )
        return self

    def has(self, key_id: bytes) -> bool:
        return key_id == self.key_id

    def admits(self, key: Key) -> bool:
        return True

    def heard(self, key: Key, session: bytes) -> None:
        raise AssertionError("there is one key")

    def stream_key(self, session: bytes, topic: str, generation: int) -> StreamKey:
        return stream_key(self._secret, self._salt, self.epoch, session, topic, generation)


class OutboundEnvelope:
    """One envelope to be written. Implements ``participant.Envelope``."""

    __slots__ = ("_context", "_encryptor", "_key", "_plain", "counter", "header", "size")

    def __init__(
        self, encryptor: StreamEncryptor, counter: int, key: StreamKey, header: bytes, plain: tuple[Any, ...], size: int
    ):
        self._encryptor = encryptor
        self._key = key
        self._context = header + encryptor.context
        self.counter = counter
        self.header = header
        self._plain = plain
        self.size = size

    def seal_into(self, room: memoryview) -> None:
        """See ``participant.Envelope``. The GIL is free meanwhile."""
        # What is small before the payload goes in one piece: each has a price of its own.
        parts = self._plain if len(self._plain) < 3 else (b"".join(self._plain[:-1]), self._plain[-1])
        self._key.encrypt_parts_into(envelope.nonce(self.counter), parts, self._context, room)

    def octets(self) -> bytes:
        """See ``participant.Envelope``."""
        sealed = self._key.encrypt(envelope.nonce(self.counter), b"".join(self._plain), self._context)
        return self.header + sealed

    def written(self) -> None:
        """See ``participant.Envelope``."""
        self._encryptor.note_written(self.counter)


class StreamEncryptor:
    """Encrypts one stream: a topic of a session. Thread-safe."""

    def __init__(
        self, keys: SealingKeys, job: str, session: bytes, topic: str, *, start: int = 1, began_s: float | None = None
    ) -> None:
        """``began_s``: when the session did, by the monotonic clock; None: now."""
        self.context = envelope.associated(job, topic)
        self._last = 0  # counter of the newest envelope
        self._retained: deque[int] | None = None
        self._began_s = time.monotonic() if began_s is None else began_s
        self._keys = keys
        self._session = session
        self._topic = topic
        self._made_in = forks.generation
        self._counter = itertools.count(start)  # its next() is one step for the interpreter: no thread gets another's
        self._key = (-1, b"", StreamKey(bytes(32)))

    def envelope(self, plain: tuple[Any, ...]) -> OutboundEnvelope:
        """Return the next envelope, around the concatenated parts of ``plain``.

        Raises:
            ForkedProcess: in a child by fork, whose counter would go on as that of its parent, with the same nonces.
        """
        forks.check(self._made_in, f"the session that seals topic {self._topic!r}")
        self._last = counter = next(self._counter)
        moment = int(time.monotonic() - self._began_s)
        key = self._keys.current
        generation, key_id, aead = self._key
        if generation != counter >> GENERATION_BITS or key_id != key.key_id:
            generation, key_id = counter >> GENERATION_BITS, key.key_id
            aead = key.stream_key(self._session, self._topic, generation)
            self._key = (generation, key_id, aead)
        size = sum(map(len, plain))
        header = envelope.head(key.level, key.epoch, size, counter, self._session, key_id, moment)
        return OutboundEnvelope(self, counter, aead, header, plain, size + OVERHEAD_BYTES)

    def seal(self, parts: Sequence[Any]) -> bytes:
        """Return the bytes of the next envelope."""
        return self.envelope(tuple(parts)).octets()

    def retain(self, samples: int) -> None:
        """Note that DDS keeps so many of the newest envelopes for who comes later."""
        self._retained = deque(self._retained or (), samples)

    def note_written(self, counter: int) -> None:
        """DDS has taken an envelope. Those that it refuses are not among what it keeps."""
        if self._retained is not None:
            self._retained.append(counter)

    @property
    def oldest(self) -> int | None:
        """The oldest counter that DDS may still have; None: it keeps none."""
        retained = self._retained
        if retained is None:
            return None
        # Not the first: threads may have their envelopes taken in another order. If none was taken yet, the newest may
        # be on its way.
        return min(tuple(retained), default=max(1, self._last))


class Opened(NamedTuple):
    """A decrypted envelope: its sender, header and sample."""

    peer: Peer
    header: EnvelopeHeader
    data: memoryview


class SessionCipher:
    """Encryption state of one bus: its session, its keys, a counter per topic, and its peers."""

    def __init__(self, job: str, keys: Keys, session: bytes | None = None) -> None:
        """``session``: of this process, random; None: a new one."""
        self.job = job
        self.keys = keys
        self.session = session or secrets.token_bytes(envelope.SESSION_BYTES)
        self.peers = Peers(self.session)
        self._made_in = forks.generation
        self._began_s = time.monotonic()
        self._encryptors: dict[str, StreamEncryptor] = {}

    def encryptor(self, topic: str) -> StreamEncryptor:
        """The sealer of a topic; the same for all its writers, so that they share its counter."""
        forks.check(self._made_in, f"the session that seals topic {topic!r}")
        made = StreamEncryptor(self.keys, self.job, self.session, topic, began_s=self._began_s)
        return self._encryptors.setdefault(topic, made)  # one step: whoever comes second takes the first one's

    @property
    def moment(self) -> int:
        """Whole seconds since this session began."""
        return int(time.monotonic() - self._began_s)

    @property
    def retained(self) -> dict[str, int]:
        """The oldest counter that DDS may still have, of each topic that it retains."""
        encryptors = self._encryptors.copy()  # makes no object for each item: other threads may add one
        oldest = {name: encryptor.oldest for name, encryptor in encryptors.items()}
        return {name: counter for name, counter in oldest.items() if counter is not None}

    def decryptor(self, topic: str, *, ignores_own: bool) -> StreamDecryptor:
        """Return a decryptor of a topic."""
        return StreamDecryptor(self, topic, ignores_own=ignores_own)


class StreamDecryptor:
    """Decrypts the envelopes of one topic. Only the receive thread uses it."""

    def __init__(self, seal: SessionCipher, topic: str, *, ignores_own: bool) -> None:
        self._keys = seal.keys
        self._peers = seal.peers
        self._topic = topic
        self._context = envelope.associated(seal.job, topic)
        self._own = seal.session if ignores_own else b""

    def open(self, data: Any, *, in_place: bool = False) -> Opened:
        """Check and open an envelope. What costs little comes first; nothing is remembered before the tag is right.

        Args:
            in_place: what is in it takes the place of what is sealed; else it gets memory of its own. In place only
                half as much memory has to be in the processor's caches.

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
        if peer is None and not self._keys.admits(key):
            raise FrameError("old", "a process shows up with a key of an epoch that is over")
        stream = None if peer is None else peer.streams.get((self._topic, key.key_id))
        if peer is not None and peer.is_old(self._topic, header):
            raise FrameError("old", f"an envelope on {self._topic} is from before its sender had heard of this process")
        is_known = stream is not None
        stream = stream or InboundStream(key, header.session, self._topic)
        aead = stream.key_for(header.counter)
        if header.size <= _SMALL_BYTES and not in_place:
            plain = memoryview(open_small(aead, header, view, self._context, self._topic))
        else:
            size = header.size
            if in_place:
                plain = view[HEADER_BYTES : HEADER_BYTES + size]
            else:
                plain = np.empty(_PAD_BYTES + size, np.uint8).data[_PAD_BYTES:]
            open_into(plain, aead, header, view, self._context, self._topic)
        if peer is None:
            peer = self._peers.add(header.session)
        if not is_known:
            self._keep(peer, key, stream)
        stream.note(header.counter, aead)
        self._peers.note(peer)
        if key is not self._keys.current:
            self._keys.heard(key, header.session)
        return Opened(peer, header, plain)

    def _keep(self, peer: Peer, key: Key, stream: InboundStream) -> None:
        """The first envelope of this topic with this key. Of keys with which nothing is opened any more, none stays."""
        over = [one for one in peer.streams if one[0] == self._topic and not self._keys.has(one[1])]
        for one in over:
            del peer.streams[one]
        peer.streams[self._topic, key.key_id] = stream


__all__ = [
    "Key",
    "Keys",
    "Opened",
    "OutboundEnvelope",
    "PskKeys",
    "SealingKeys",
    "SessionCipher",
    "StreamDecryptor",
    "StreamEncryptor",
]
