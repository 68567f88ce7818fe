"""A cheap proof of who sends a message: a short tag under a secret that the keys of two nodes share.

It proves nothing that a signature does not prove better, but checking it takes some microseconds in place of a hundred:
so a flood of messages in the names of others costs a receiver little, and takes nothing away from those who have these
names. The secret is the X25519 exchange of the two long-term keys, taken as keys of Curve25519. Whoever gets hold of
one of these keys can make stamps, and thereby causes work; the signature under the stamp still has to be right.
"""

from __future__ import annotations

import hmac

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.identity.join_messages import STAMP_BYTES, SignedMessage
from gradbus.runtime.security.identity.key import NodeKey
from gradbus.runtime.security.job_key import derive

_MOST_KEYS = 8192  # that are remembered, of 32 bytes; an allow list has up to 4096 nodes


class Stamps:
    """Of one node: makes its own stamps and checks those of others. Remembers the secret that it shares with each."""

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
        """A message with its stamp behind it.

        Args:
            data: the message with its signature. to: public key of the receiver.
            answers: the Hello that a Welcome answers: its stamp is worth nothing as an answer to another one.

        Raises:
            FrameError: ``join``: with such a key nobody shares a secret.
        """
        return data + self._stamp(to, data, b"" if answers is None else answers.whole)

    def check(self, signed: SignedMessage, by: bytes, answers: SignedMessage | None = None) -> None:
        """Raises FrameError: ``stamp``: it was not made for this node by the holder of the key ``by``."""
        expected = self._stamp(by, signed.whole, b"" if answers is None else answers.whole)
        if not hmac.compare_digest(expected, signed.stamp):
            kind = type(signed.message).__name__
            raise FrameError("stamp", f"a {kind} that was not made with the key that its sender must have")
