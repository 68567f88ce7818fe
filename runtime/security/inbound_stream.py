"""One stream of envelopes: its key (AES-256-GCM), and on its way in which envelopes are opened, each of them once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from gradbus.runtime import forks
from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.envelope import HEADER_BYTES, EnvelopeHeader
from gradbus.runtime.security.job_key import derive

GENERATION_BITS = 32  # a key seals less than 2**32 envelopes


class Derives(Protocol):
    """A secret that keys of streams come from."""

    def stream_key(self, session: bytes, topic: str, generation: int) -> StreamKey:
        """The key of a stream."""


class InboundStream:
    """Of one session, on one topic, under one secret.

    Two steps, so that a forgery changes nothing: :meth:`key_for` before the tag is checked, :meth:`note` after.
    """

    __slots__ = ("_before", "_generation", "_key", "_secret", "_session", "_topic", "_window")

    def __init__(self, secret: Derives, session: bytes, topic: str) -> None:
        self._secret = secret
        self._session = session
        self._topic = topic
        self._window = ReplayWindow()
        self._generation = -1  # nothing was opened yet
        self._key: StreamKey | None = None
        self._before: StreamKey | None = None  # of the generation before: its last envelopes may be on their way

    def key_for(self, counter: int) -> StreamKey:
        """What opens an envelope.

        Raises:
            FrameError: ``replay``: it was opened before, or is old. ``counter``: it is too far ahead.
        """
        if not self._window.is_new(counter):
            raise FrameError("replay", f"envelope {counter} of {self._topic} was opened before, or is old")
        generation = counter >> GENERATION_BITS
        if generation == self._generation and self._key is not None:
            return self._key
        if generation == self._generation - 1 and self._before is not None:
            return self._before
        if self._key is None or generation == self._generation + 1:
            return self._secret.stream_key(self._session, self._topic, generation)
        raise FrameError(
            "counter", f"an envelope on {self._topic} is {1 << GENERATION_BITS} or more ahead of the others"
        )

    def note(self, counter: int, key: StreamKey) -> None:
        """It has been opened, with this key."""
        generation = counter >> GENERATION_BITS
        if generation > self._generation:
            self._before, self._key, self._generation = self._key, key, generation
        self._window.note(counter)


def open_into(plain: Any, key: StreamKey, header: EnvelopeHeader, view: memoryview, context: bytes, topic: str) -> None:
    """Put there what is in an envelope. Raises FrameError: ``tag``."""
    try:
        key.decrypt_into(
            envelope.nonce(header.counter), view[HEADER_BYTES:], bytes(view[:HEADER_BYTES]) + context, plain
        )
    except InvalidTag:
        raise _changed(topic) from None


def open_small(key: StreamKey, header: EnvelopeHeader, view: memoryview, context: bytes, topic: str) -> bytes:
    """What is in an envelope, in memory that the cipher makes. Raises FrameError: ``tag``."""
    try:
        return key.decrypt(envelope.nonce(header.counter), view[HEADER_BYTES:], bytes(view[:HEADER_BYTES]) + context)
    except InvalidTag:
        raise _changed(topic) from None


def _changed(topic: str) -> FrameError:
    return FrameError("tag", f"an envelope on {topic} was changed, or made without the key")


WINDOW = 4096
_MASK = (1 << WINDOW) - 1


class ReplayWindow:
    """The counters that have been seen: the highest one, and which of the 4096 up to it. What is older counts as seen.

    Two steps, so that a forgery changes nothing: :meth:`is_new` before the tag is checked, :meth:`note` after.
    """

    __slots__ = ("_bits", "_mark", "highest")

    def __init__(self) -> None:
        self.highest = 0
        # Of those from ``_mark`` on, all up to the highest were seen. They come in order, as a rule: then there is
        # nothing to do but to count, and the bits, half a kilobyte that each change makes anew, are left as they are.
        self._mark = 0
        self._bits = 0  # bit n: counter ``_mark - n`` was seen

    def is_new(self, counter: int) -> bool:
        """Whether an envelope with this counter may still be opened."""
        if counter > self.highest:
            return True
        return self.highest - counter < WINDOW and counter <= self._mark and not self._bits >> self._mark - counter & 1

    def note(self, counter: int) -> None:
        """It has been opened."""
        ahead = counter - self.highest
        if ahead == 1:
            self.highest = counter
            return
        in_order = min(self.highest - self._mark, WINDOW)
        self._bits = (self._bits << in_order | (1 << in_order) - 1) & _MASK
        if ahead > 0:
            self._bits = (self._bits << min(ahead, WINDOW) | 1) & _MASK
            self.highest = counter
        else:
            self._bits |= 1 << -ahead
        self._mark = self.highest


class StreamKey:
    """A key at work. Any thread may use it; the GIL is free while bytes are sealed and opened. A process that was
    forked from this one seals nothing with it: it would use the nonces that this one uses.

    Attributes:
        decrypt, decrypt_into: as those of :class:`AESGCM`.
    """

    __slots__ = ("_algorithm", "_encrypt", "_made_in", "decrypt", "decrypt_into")

    def __init__(self, secret: bytes) -> None:
        """``secret``: 32 octets."""
        aead = AESGCM(secret)
        self._made_in = forks.generation
        self._encrypt = aead.encrypt
        self.decrypt = aead.decrypt
        self.decrypt_into = aead.decrypt_into
        self._algorithm = AES(secret)

    def encrypt(self, nonce: bytes, data: bytes, context: bytes) -> bytes:
        """As that of :class:`AESGCM`. Raises ForkedProcess: in a child by fork."""
        forks.check(self._made_in, "a key")
        return self._encrypt(nonce, data, context)

    def encrypt_parts_into(self, nonce: bytes, parts: Sequence[Any], context: bytes, room: memoryview) -> None:
        """Seal what lies apart: each part is read where it lies and is written once, as it has to be in the end.

        Args:
            nonce: 12 octets. parts: contiguous. context: is authenticated with them.
            room: of the size of all parts together and a tag of 16 octets, which come here.

        Raises:
            ForkedProcess: in a child by fork.
        """
        forks.check(self._made_in, "a key")
        encryptor = Cipher(self._algorithm, GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(context)
        at = 0
        for part in parts:
            at += encryptor.update_into(part, room[at:])
        encryptor.finalize()
        room[at:] = encryptor.tag


def salt_of(job: str) -> bytes:
    """What :func:`stream_key` wants to know of a job."""
    return envelope.associated(job, "")


def stream_key(secret: bytes, salt: bytes, epoch: int, session: bytes, topic: str, generation: int) -> StreamKey:
    """The key of one topic of one session. ``generation``: how often its counter has come to the end of a key."""
    numbers = epoch.to_bytes(4, "little") + session + generation.to_bytes(4, "little")
    return StreamKey(derive(secret, salt, b"gradbus/1 frame\0" + numbers + topic.encode()))
