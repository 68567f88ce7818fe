"""What nodes say to each other before they share a key: bytes only, no keys. docs/wire.md shows every byte.

All but the tag of a Confirm can be read by everybody, and everybody can send such bytes: sizes and limits are checked
here, signatures in :mod:`.handshake`.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security.identity.allow_list import ROLES
from gradbus.runtime.security.identity.key import MAX_NAME_BYTES, SIGNATURE_BYTES

JOIN_TOPIC = "train/join"
MAGIC = b"GBJ\0"
VERSION = 2
MAX_WHY_BYTES = 255
STAMP_BYTES = 16
MAX_MESSAGE_BYTES = 1024
_HEAD = struct.Struct("<4sBBH")  # magic, version, kind, bytes of the text


class JoinKind(IntEnum):
    """Of messages."""

    BEACON = 1
    HELLO = 2
    WELCOME = 3
    CONFIRM = 4
    REFUSAL = 5


class Beacon(NamedTuple):
    """Controller to all, kept by DDS for who comes later: I am here.

    Attributes:
        session: this start of it, random. start: number of this start; a later one has a higher number.
        public: its key.
    """

    session: bytes
    start: int
    public: bytes


class JoinHello(NamedTuple):
    """Node to controller: I want to take part.

    Attributes:
        session: this start of the node, random. controller: session of the controller that is meant.
        start: number of this start. attempt: number of this Hello among those of this start.
        nonce: random. ephemeral: X25519 key of this attempt. public: the node's own key.
        pinned: the key that it expects the controller to have.
        role: number of its role. name: as the allow list has it.
    """

    session: bytes
    controller: bytes
    start: int
    attempt: int
    nonce: bytes
    ephemeral: bytes
    public: bytes
    pinned: bytes
    role: int
    name: str


class JoinWelcome(NamedTuple):
    """Controller to one node: prove that it is you. Its signature is over the whole of this and of the Hello."""

    to: bytes
    session: bytes
    start: int
    epoch: int
    nonce: bytes
    ephemeral: bytes


class JoinConfirm(NamedTuple):
    """Node to controller: its signature is over all before, and ``tag`` shows that it has the keys."""

    controller: bytes
    session: bytes
    tag: bytes


class JoinRefusal(NamedTuple):
    """Controller to one node: no, and why. ``hello``: SHA-256 of what is answered."""

    to: bytes
    session: bytes
    hello: bytes
    why: str


Message = Beacon | JoinHello | JoinWelcome | JoinConfirm | JoinRefusal
_BODIES: dict[JoinKind, tuple[type[Message], struct.Struct]] = {
    JoinKind.BEACON: (Beacon, struct.Struct("<16sQ32s")),
    JoinKind.HELLO: (JoinHello, struct.Struct("<16s16sQI32s32s32s32sB")),
    JoinKind.WELCOME: (JoinWelcome, struct.Struct("<16s16sQI32s32s")),
    JoinKind.CONFIRM: (JoinConfirm, struct.Struct("<16s16s32s")),
    JoinKind.REFUSAL: (JoinRefusal, struct.Struct("<16s16s32s")),
}
_TEXTS = {JoinKind.HELLO: MAX_NAME_BYTES, JoinKind.REFUSAL: MAX_WHY_BYTES}  # kinds that end with a text
_STAMPED = (JoinKind.HELLO, JoinKind.WELCOME, JoinKind.REFUSAL)  # messages from one to one
_KINDS = {body: kind for kind, (body, _) in _BODIES.items()}


class SignedMessage(NamedTuple):
    """A message as it came.

    Attributes:
        said: the bytes that its signature is over, together with more.
        stamp: what shows cheaply that it comes from whom it says, see :mod:`.stamp`; empty in kinds that have none.
    """

    message: Message
    said: bytes
    signature: bytes
    stamp: bytes = b""

    @property
    def whole(self) -> bytes:
        """All its bytes but the stamp."""
        return self.said + self.signature


def pack(message: Message) -> bytes:
    """Bytes of a message, without signature and stamp."""
    kind = _KINDS[type(message)]
    fields: tuple[object, ...] = tuple(message)
    text = b""
    if kind in _TEXTS:
        text = str(fields[-1]).encode("ascii", "replace")[: _TEXTS[kind]]
        fields = fields[:-1]
    return _HEAD.pack(MAGIC, VERSION, kind, len(text)) + _BODIES[kind][1].pack(*fields) + text


def parse(data: memoryview) -> SignedMessage:
    """The message in ``data``. Its signature and its stamp are not looked at.

    Raises:
        FrameError: with ``reason`` one of short, not sealed, version, join.
    """
    if len(data) < _HEAD.size or len(data) > MAX_MESSAGE_BYTES:
        raise FrameError("short", f"message of {len(data)} bytes on its way in, expected up to {MAX_MESSAGE_BYTES}")
    magic, version, number, text_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise FrameError("not sealed", "a process of this job uses another level of security: set it alike for all")
    if version != VERSION or number not in _KINDS.values():
        raise FrameError("version", f"join message of version {version}, kind {number}; this program knows {VERSION}")
    kind = JoinKind(number)
    body, layout = _BODIES[kind]
    end = _HEAD.size + layout.size + text_bytes
    signed = end + SIGNATURE_BYTES
    if text_bytes > _TEXTS.get(kind, 0) or len(data) != signed + (STAMP_BYTES if kind in _STAMPED else 0):
        raise FrameError("join", f"{kind.name} of {len(data)} bytes says that {text_bytes} of them are text")
    fields = layout.unpack_from(data, _HEAD.size)
    if kind in _TEXTS:
        text = bytes(data[end - text_bytes : end])
        if not text.isascii() or not text.decode("ascii").isprintable():
            raise FrameError("join", f"{kind.name} with a text that is not one")
        fields = (*fields, text.decode("ascii"))
    message = body(*fields)
    if isinstance(message, JoinHello) and message.role >= len(ROLES):
        raise FrameError("join", f"HELLO with role {message.role}, of {len(ROLES)}")
    return SignedMessage(message, bytes(data[:end]), bytes(data[end:signed]), bytes(data[signed:]))
