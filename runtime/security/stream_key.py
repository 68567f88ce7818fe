"""AES-256-GCM with the key of one stream of envelopes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from gradbus.runtime import forks
from gradbus.runtime.security import envelope
from gradbus.runtime.security.job_key import derive


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
