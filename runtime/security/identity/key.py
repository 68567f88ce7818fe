"""The key of a node: an Ed25519 pair with a name. The private half stays in a file that is its owner's alone."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.names import MAX_NAME_CHARS, check_name
from gradbus.runtime.security.job_key import key_file, read_secret_file
from gradbus.runtime.security.settings import KEY_FILE_VARIABLE

PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64
MAX_NAME_BYTES = MAX_NAME_CHARS  # they are ASCII
_FIELD = 2**255 - 19  # of Curve25519
_PREFIX = "gradbus-identity-1"
_LINE = re.compile(rf"{_PREFIX} (\S+) ([0-9a-f]{{64}})\s*")
_PUBLIC = re.compile(r"ed25519:([0-9a-f]{64})")

# Points of small order, in every way to write them but for the bit of the sign: their orders are 1, 2, 4, 8 and 8, and
# in the last two lines are the first and the third once more, as numbers beyond the field. They have no private half,
# and a signature that anybody can write down is right for one in eight texts at least; OpenSSL takes it.
_SMALL_ORDER = frozenset(
    bytes.fromhex(text)
    for text in (
        "01" + "00" * 31,
        "ec" + "ff" * 30 + "7f",
        "00" * 32,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ee" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
    )
)


def is_identity(text: str) -> bool:
    """Whether a key file holds the key of a node, and not that of a job."""
    return text.startswith(_PREFIX)


def public_text(public: bytes) -> str:
    """Return a public key as lists and settings hold it."""
    return f"ed25519:{public.hex()}"


def parse_public(text: str, where: str) -> bytes:
    """Parse a public key. Raises ConfigError."""
    match = _PUBLIC.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{where}: expected a public key, 'ed25519:' and 64 hexadecimal digits as 'gradbus keys show FILE' prints "
            f"it, got {text[:24]!r}{'...' if len(text) > 24 else ''}"
        )
    public = bytes.fromhex(match[1])
    if _is_of_small_order(public):
        raise ConfigError(f"{where}: {text.strip()} is nobody's key: everybody could sign with it")
    return public


def _is_of_small_order(public: bytes) -> bool:
    return public[:-1] + bytes([public[-1] & 0x7F]) in _SMALL_ORDER


def verified(public: bytes, signature: bytes, data: bytes) -> bool:
    """Whether the holder of the private half has signed ``data``; False for a key without a private half."""
    if len(public) != PUBLIC_BYTES or _is_of_small_order(public):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class NodeKey:
    """The key of this node. ``name``: as in the allow list of the controller."""

    name: str
    private: Ed25519PrivateKey = field(repr=False)

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self.private.public_key().public_bytes_raw()

    @property
    def text(self) -> str:
        """Content of a key file."""
        return f"{_PREFIX} {self.name} {self.private.private_bytes_raw().hex()}\n"

    def sign(self, data: bytes) -> bytes:
        """Return a signature of 64 bytes."""
        return self.private.sign(data)

    def exchange(self, public: bytes) -> bytes:
        """Return the secret of 32 bytes that this node shares with the holder of another key.

        Both keys are taken to the Montgomery form of their curve (RFC 7748, section 4.1; the scalar of the private half
        by RFC 8032, section 5.1.5). The secret never changes, so it encrypts nothing that must stay secret.

        Raises:
            ValueError: there is none with that key.
        """
        scalar = hashlib.sha512(self.private.private_bytes_raw()).digest()[:32]
        y = int.from_bytes(public, "little") & (1 << 255) - 1
        u = (1 + y) * pow(1 - y, -1, _FIELD) % _FIELD
        other = X25519PublicKey.from_public_bytes(u.to_bytes(32, "little"))
        return X25519PrivateKey.from_private_bytes(scalar).exchange(other)


def new_node_key(name: str) -> NodeKey:
    """Return a random key. Raises ConfigError: the name is invalid."""
    return NodeKey(check_name(name), Ed25519PrivateKey.generate())


def parse_node_key(text: str, where: str) -> NodeKey:
    """Parse the key of a node. Raises ConfigError, which never repeats the text."""
    match = _LINE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{where} holds no key of a node: expected one line '{_PREFIX} NAME' and 64 hexadecimal digits, got "
            f"{len(text)} characters. Make one with: gradbus keys new --identity NAME FILE"
        )
    return NodeKey(check_name(match[1]), Ed25519PrivateKey.from_private_bytes(bytes.fromhex(match[2])))


def load_node_key(path: Path | None) -> NodeKey:
    """Return the key of this node, from :func:`gradbus.runtime.security.job_key.key_file`.

    Raises:
        ConfigError: there is none, or it is not one, or its file is open to others.
    """
    path = key_file(path)
    if path is None:
        raise ConfigError(
            f"security 'identity' needs the key of this node: name its file in bus.key_file or {KEY_FILE_VARIABLE}. "
            f"Make one with 'gradbus keys new --identity NAME FILE'"
        )
    return parse_node_key(read_secret_file(path, "key file"), f"key file {path}")
