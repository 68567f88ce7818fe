"""How a node and the controller come to share keys, and each to know who the other is.

A signed Diffie-Hellman exchange of three messages: Hello, Welcome, Confirm. Both names, both public keys, the role and
the job are in what both sign, so neither side can be led to share a key with another than it thinks. The keys are of
this exchange alone: who gets hold of a node's private key later cannot read what was said before. Pure functions.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.identity.join_messages import (
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
_WORDS: dict[type[Message], bytes] = {
    Beacon: b"beacon", JoinHello: b"hello", JoinWelcome: b"welcome", JoinConfirm: b"confirm", JoinRefusal: b"refusal"
}  # fmt: skip


class Secrets(NamedTuple):
    """What both sides have after the exchange.

    Attributes:
        up: what the node's envelopes are sealed from; down: the controller's to it.
        confirm: of the tag in the Confirm.
        transcript: SHA-256 over all that was said.
    """

    up: bytes
    down: bytes
    confirm: bytes
    transcript: bytes

    def __repr__(self) -> str:
        return "Secrets(...)"  # of what holds them, too: nothing that is logged may have them in it

    @property
    def tag(self) -> bytes:
        """Of the Confirm, 32 bytes."""
        return hmac.digest(self.confirm, self.transcript, "sha256")


def _text(job: str, kind: type[Message], said: bytes) -> bytes:
    """What is signed: the protocol, what kind of message it is, the job, and the message or transcript."""
    return b"gradbus/1 join " + _WORDS[kind] + b"\0" + envelope.associated(job, "") + said


def signed(job: str, key: NodeKey, message: Message, said: bytes | None = None) -> bytes:
    """A message with its signature, which is over ``said`` where that is given."""
    packed = pack(message)
    return packed + key.sign(_text(job, type(message), packed if said is None else said))


def check(job: str, one: SignedMessage, public: bytes, said: bytes | None = None) -> None:
    """Raises FrameError: ``signature``: it was not signed with this key, for this job."""
    if not verified(public, one.signature, _text(job, type(one.message), one.said if said is None else said)):
        kind = _WORDS[type(one.message)].decode()
        raise FrameError("signature", f"a {kind} was changed, or not signed with the key that its sender must have")


def _secrets(shared: bytes, transcript: bytes) -> Secrets:
    def key(what: bytes) -> bytes:
        return derive(shared, transcript, b"gradbus/1 join key " + what)

    return Secrets(key(b"up"), key(b"down"), key(b"confirm"), transcript)


def _exchange(private: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a point of small order: the result would be known to everybody
        raise FrameError("join", "an ephemeral key that gives no secret") from None


def _transcript(hello: SignedMessage, welcome_said: bytes) -> bytes:
    whole = hello.whole
    return hashlib.sha256(b"gradbus/1 join\0" + len(whole).to_bytes(4, "little") + whole + welcome_said).digest()


def answer(
    job: str, key: NodeKey, hello: SignedMessage, *, session: bytes, start: int, epoch: int, nonce: bytes
) -> tuple[bytes, Secrets]:
    """The controller's Welcome to a Hello that was checked, and what both will share.

    Raises:
        FrameError: ``join``: its ephemeral key is none.
    """
    said = hello.message
    assert isinstance(said, JoinHello)
    private = X25519PrivateKey.generate()
    shared = _exchange(private, said.ephemeral)
    welcome = JoinWelcome(said.session, session, start, epoch, nonce, private.public_key().public_bytes_raw())
    transcript = _transcript(hello, pack(welcome))
    return signed(job, key, welcome, transcript), _secrets(shared, transcript)


def accept(
    job: str, key: NodeKey, hello: SignedMessage, private: X25519PrivateKey, welcome: SignedMessage
) -> tuple[bytes, Secrets]:
    """The node's Confirm to the Welcome that answers its own Hello, and what both share.

    Args:
        private: the ephemeral key of that Hello.

    Raises:
        FrameError: ``signature``: it is not from the controller whose key is pinned, or answers another Hello.
    """
    asked, said = hello.message, welcome.message
    assert isinstance(asked, JoinHello)
    assert isinstance(said, JoinWelcome)
    transcript = _transcript(hello, welcome.said)
    check(job, welcome, asked.pinned, transcript)
    secrets = _secrets(_exchange(private, said.ephemeral), transcript)
    confirm = JoinConfirm(said.session, asked.session, secrets.tag)
    return signed(job, key, confirm, transcript + welcome.signature + secrets.tag), secrets


def check_confirm(
    job: str, confirm: SignedMessage, hello: SignedMessage, secrets: Secrets, welcome_signature: bytes
) -> None:
    """Raises FrameError: ``signature``: it is not from the node that said this Hello and heard this Welcome."""
    said, asked = confirm.message, hello.message
    assert isinstance(said, JoinConfirm)
    assert isinstance(asked, JoinHello)
    if not hmac.compare_digest(said.tag, secrets.tag):
        raise FrameError("signature", f"a confirm of {asked.name} that was made without the keys of this exchange")
    check(job, confirm, asked.public, secrets.transcript + welcome_signature + secrets.tag)
