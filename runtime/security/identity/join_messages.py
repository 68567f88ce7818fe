"""Messages of the join protocol as bytes, before two nodes share a key. docs/wire.md documents every byte.

They travel in clear and anybody can send them: sizes and limits are checked here, signatures in :mod:`.handshake`.
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
    """The kinds of join messages, as they stand in the header."""

    BEACON = 1
    HELLO = 2
    WELCOME = 3
    CONFIRM = 4
    REFUSAL = 5


class Beacon(NamedTuple):
    """Controller to all, retained for late readers: announces the controller.

    Attributes:
        session: random id of this start. start: number of this start; a later one has a higher number.
        public: public key of the controller.
    """

    session: bytes
    start: int
    public: bytes


class JoinHello(NamedTuple):
    """Node to controller: asks for admission.

    Attributes:
        session: random id of this start of the node. controller: session of the addressed controller.
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
    """Controller to one node: asks it for a Confirm. The signature covers this message and the Hello."""

    to: bytes
    session: bytes
    start: int
    epoch: int
    nonce: bytes
    ephemeral: bytes


class JoinConfirm(NamedTuple):
    """Node to controller: the signature covers all messages before, and ``tag`` proves possession of the keys."""

    controller: bytes
    session: bytes
    tag: bytes


class JoinRefusal(NamedTuple):
    """Controller to one node: refuses it, with the reason. ``hello``: SHA-256 of the refused Hello."""

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
    """A received message with its signature.

    Attributes:
        body: the message bytes, which the signature covers together with more.
        stamp: cheap authenticator of the sender, see :class:`.handshake.Stamps`; empty in kinds that have none.
    """

    message: Message
    body: bytes
    signature: bytes
    stamp: bytes = b""

    @property
    def whole(self) -> bytes:
        """All bytes except the stamp."""
        return self.body + self.signature


def pack(message: Message) -> bytes:
    """Return the bytes of a message, without signature and stamp."""
    kind = _KINDS[type(message)]
    fields: tuple[object, ...] = tuple(message)
    text = b""
    if kind in _TEXTS:
        text = str(fields[-1]).encode("ascii", "replace")[: _TEXTS[kind]]
        fields = fields[:-1]
    return _HEAD.pack(MAGIC, VERSION, kind, len(text)) + _BODIES[kind][1].pack(*fields) + text


def parse(data: memoryview) -> SignedMessage:
    """Parse a message. Signature and stamp are not checked.

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
        raise FrameError("join", f"{kind.name} of {len(data)} bytes, of which {text_bytes} are to be text")
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
