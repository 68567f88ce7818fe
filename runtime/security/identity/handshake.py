"""The handshake between a node and the controller, which authenticates both and derives their pairwise keys.

A signed Diffie-Hellman exchange of three messages: Hello, Welcome, Confirm. Both signatures cover both names, both
public keys, the role and the job, so neither side can be tricked into sharing a key with another peer than it
believes. The keys are ephemeral: a private key of a node that leaks later does not decrypt recorded traffic.

:class:`Stamps` are cheap authenticators in front of the signatures: a short tag under a secret that the long-term
keys of two nodes share (X25519). A check takes microseconds where a signature takes a hundred, so a flood of forged
messages costs a receiver little. Whoever holds one of the two keys can make stamps; the signature must be valid as
well.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.identity.join_messages import (
    STAMP_BYTES,
    Beacon,
    JoinConfirm,
    JoinHello,
    JoinRefusal,
    JoinWelcome,
    Message,
    SignedMessage,
    pack,
)
from gradbus.runtime.security.identity.key import NodeKey, verified
from gradbus.runtime.security.job_key import derive

NONCE_BYTES = 32
_KINDS: dict[type[Message], bytes] = {
    Beacon: b"beacon",
    JoinHello: b"hello",
    JoinWelcome: b"welcome",
    JoinConfirm: b"confirm",
    JoinRefusal: b"refusal",
}


class Secrets(NamedTuple):
    """The shared secrets of one handshake.

    Attributes:
        up, down: secrets of the pairwise keys, from the node to the controller and back.
        confirm: key of the tag in the Confirm.
        transcript: SHA-256 over Hello and Welcome.
    """

    up: bytes
    down: bytes
    confirm: bytes
    transcript: bytes

    def __repr__(self) -> str:
        return "Secrets(...)"  # keeps secrets out of logs

    @property
    def tag(self) -> bytes:
        """The tag of the Confirm, 32 bytes."""
        return hmac.digest(self.confirm, self.transcript, "sha256")


def _text(job: str, kind: type[Message], body: bytes) -> bytes:
    """Return the signed text: protocol, kind of message, job, and the message or transcript."""
    return b"gradbus/1 join " + _KINDS[kind] + b"\0" + envelope.associated(job, "") + body


def signed(job: str, key: NodeKey, message: Message, text: bytes | None = None) -> bytes:
    """Return a message with its signature, which covers ``text`` if given, else the message."""
    packed = pack(message)
    return packed + key.sign(_text(job, type(message), packed if text is None else text))


def check(job: str, one: SignedMessage, public: bytes, text: bytes | None = None) -> None:
    """Raise FrameError ``signature`` unless the message was signed with this key for this job."""
    if not verified(public, one.signature, _text(job, type(one.message), one.body if text is None else text)):
        kind = _KINDS[type(one.message)].decode()
        raise FrameError("signature", f"a {kind} was changed, or not signed with the key that its sender must have")


def _transcript(hello: SignedMessage, welcome_body: bytes) -> bytes:
    size = len(hello.whole).to_bytes(4, "little")
    return hashlib.sha256(b"gradbus/1 join\0" + size + hello.whole + welcome_body).digest()


def _secrets(private: X25519PrivateKey, public: bytes, transcript: bytes) -> Secrets:
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a point of small order: the result would be known to everybody
        raise FrameError("join", "an ephemeral key that gives no secret") from None
    up, down, confirm = (
        derive(shared, transcript, b"gradbus/1 join key " + what) for what in (b"up", b"down", b"confirm")
    )
    return Secrets(up, down, confirm, transcript)


def answer(
    job: str, key: NodeKey, hello: SignedMessage, *, session: bytes, start: int, epoch: int, nonce: bytes
) -> tuple[bytes, Secrets]:
    """Return the controller's Welcome to a verified Hello, and the shared secrets.

    Raises:
        FrameError: ``join``: the ephemeral key is invalid.
    """
    asked = hello.message
    assert isinstance(asked, JoinHello)
    private = X25519PrivateKey.generate()
    welcome = JoinWelcome(asked.session, session, start, epoch, nonce, private.public_key().public_bytes_raw())
    transcript = _transcript(hello, pack(welcome))
    secrets = _secrets(private, asked.ephemeral, transcript)
    return signed(job, key, welcome, transcript), secrets


def accept(
    job: str, key: NodeKey, hello: SignedMessage, private: X25519PrivateKey, welcome: SignedMessage
) -> tuple[bytes, Secrets]:
    """Return the node's Confirm to the Welcome that answers its Hello, and the shared secrets.

    Args:
        private: the ephemeral key of that Hello.

    Raises:
        FrameError: ``signature``: it is not from the controller whose key is pinned, or answers another Hello.
    """
    asked, answered = hello.message, welcome.message
    assert isinstance(asked, JoinHello)
    assert isinstance(answered, JoinWelcome)
    transcript = _transcript(hello, welcome.body)
    check(job, welcome, asked.pinned, transcript)
    secrets = _secrets(private, answered.ephemeral, transcript)
    confirm = JoinConfirm(answered.session, asked.session, secrets.tag)
    return signed(job, key, confirm, transcript + welcome.signature + secrets.tag), secrets


def check_confirm(
    job: str, confirm: SignedMessage, hello: SignedMessage, secrets: Secrets, welcome_signature: bytes
) -> None:
    """Raise FrameError ``signature`` unless the Confirm is from the node of this Hello, and answers this Welcome."""
    answered, asked = confirm.message, hello.message
    assert isinstance(answered, JoinConfirm)
    assert isinstance(asked, JoinHello)
    if not hmac.compare_digest(answered.tag, secrets.tag):
        raise FrameError("signature", f"a confirm of {asked.name} that was made without the keys of this exchange")
    check(job, confirm, asked.public, secrets.transcript + welcome_signature + secrets.tag)


_MOST_KEYS = 8192  # cached secrets of 32 bytes; an allow list has up to 4096 nodes


class Stamps:
    """Makes the stamps of one node and checks those of others; caches the secret shared with each key."""

    def __init__(self, job: str, key: NodeKey) -> None:
        self._key = key
        self._salt = envelope.associated(job, "")
        self._secrets: dict[bytes, bytes] = {}

    def _secret(self, public: bytes) -> bytes:
        secret = self._secrets.get(public)
        if secret is None:
            try:
                secret = derive(self._key.exchange(public), self._salt, b"gradbus/1 join stamp")
            except ValueError:
                raise FrameError("join", "a public key that no stamp can be made for") from None
            if len(self._secrets) >= _MOST_KEYS:
                self._secrets.clear()
            self._secrets[public] = secret
        return secret

    def _stamp(self, public: bytes, data: bytes, answers: bytes) -> bytes:
        return hmac.digest(self._secret(public), answers + data, "sha256")[:STAMP_BYTES]

    def stamped(self, data: bytes, to: bytes, answers: SignedMessage | None = None) -> bytes:
        """Return a message with its stamp appended.

        Args:
            data: the message with its signature. to: public key of the receiver.
            answers: the Hello that a Welcome answers; the stamp is bound to it.

        Raises:
            FrameError: ``join``: the key is of small order.
        """
        return data + self._stamp(to, data, b"" if answers is None else answers.whole)

    def check(self, signed: SignedMessage, by: bytes, answers: SignedMessage | None = None) -> None:
        """Raise FrameError ``stamp`` unless the holder of the key ``by`` has made the stamp for this node."""
        expected = self._stamp(by, signed.whole, b"" if answers is None else answers.whole)
        if not hmac.compare_digest(expected, signed.stamp):
            kind = type(signed.message).__name__
            raise FrameError("stamp", f"a {kind} that was not made with the key that its sender must have")
