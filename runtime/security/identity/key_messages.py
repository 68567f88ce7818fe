"""Messages about group keys, encrypted with the pairwise keys of the controller and one member. docs/wire.md documents
every byte."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security.envelope import SESSION_BYTES
from gradbus.runtime.security.identity.allow_list import MAX_RANGES, Ids
from gradbus.runtime.transport.api import PEER_ID_BYTES, PeerId

COMMANDS, MODELS, CONTROL = "train/train_cmd", "train/model_blob", "train/control/clients"
TOPICS = (COMMANDS, MODELS, CONTROL)  # on which the controller sends to all
MAX_REMOVED = 2048  # sessions in one message: two for each rank that a group can have
VERSION = 2
_GRANT_KIND, _ACK_KIND, _RANK_GRANT_KIND = 1, 2, 3
# version, kind, reserved, epoch, and of the first two the fields of the messages
_GRANT = struct.Struct("<BBHI32sQQQQQ12s")
_ACK = struct.Struct("<BBHI12s")
_RANK_GRANT = struct.Struct("<BBHI32sHH")  # secret, numbers of ranges and of sessions that follow
_RANGE = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class KeyGrant:
    """Controller to one member: the group key of an epoch.

    Attributes:
        epoch, secret: of the key.
        floors: by topic, the counter up to which envelopes under the key are older than the grant.
        signed: numbers of the signed broadcasts up to which they are older, of commands and of all topics.
        peer_id: what the controller's transport calls itself, whose readers are a member's.
    """

    epoch: int
    secret: bytes = field(repr=False)
    floors: tuple[int, int, int]
    signed: tuple[int, int]
    peer_id: PeerId = bytes(PEER_ID_BYTES)


@dataclass(frozen=True, slots=True)
class RankKeyGrant:
    """Key issuer to one process of a job of ranks: the group key of an epoch.

    Attributes:
        epoch, secret: of the key.
        ids: ranks that this node may be.
        removed: sessions of removed processes, the newest last; their envelopes are rejected.
    """

    epoch: int
    secret: bytes = field(repr=False)
    ids: Ids
    removed: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KeyAck:
    """Member to controller: acknowledges the key of an epoch. ``peer_id``: what its transport calls itself."""

    epoch: int
    peer_id: PeerId = bytes(PEER_ID_BYTES)


KeyMessage = KeyGrant | RankKeyGrant | KeyAck


def pack(message: KeyMessage) -> bytes:
    """Return the bytes of a key message."""
    if isinstance(message, KeyAck):
        return _ACK.pack(VERSION, _ACK_KIND, 0, message.epoch, message.peer_id)
    if isinstance(message, KeyGrant):
        numbers = (*message.floors, *message.signed)
        return _GRANT.pack(VERSION, _GRANT_KIND, 0, message.epoch, message.secret, *numbers, message.peer_id)
    ids, removed = message.ids, message.removed[-MAX_REMOVED:]
    head = _RANK_GRANT.pack(VERSION, _RANK_GRANT_KIND, 0, message.epoch, message.secret, len(ids), len(removed))
    return b"".join((head, *(_RANGE.pack(*one) for one in ids), *removed))


def parse(data: memoryview) -> KeyMessage:
    """Parse a key message. Raises FrameError ``join``: its size, kind or version is unknown."""
    head = bytes(data[:4])
    if head == bytes((VERSION, _GRANT_KIND, 0, 0)) and len(data) == _GRANT.size:
        _, _, _, epoch, secret, *numbers, peer_id = _GRANT.unpack(data)
        commands, models, controls, command, other = numbers
        return KeyGrant(epoch, secret, (commands, models, controls), (command, other), peer_id)
    if head == bytes((VERSION, _ACK_KIND, 0, 0)) and len(data) == _ACK.size:
        _, _, _, epoch, peer_id = _ACK.unpack(data)
        return KeyAck(epoch, peer_id)
    if head == bytes((VERSION, _RANK_GRANT_KIND, 0, 0)) and len(data) >= _RANK_GRANT.size:
        _, _, _, epoch, secret, ranges, count = _RANK_GRANT.unpack_from(data)
        ids_end = _RANK_GRANT.size + ranges * _RANGE.size
        end = ids_end + count * SESSION_BYTES
        if ranges <= MAX_RANGES and count <= MAX_REMOVED and len(data) == end:
            ids = tuple(_RANGE.iter_unpack(data[_RANK_GRANT.size : ids_end]))
            removed = tuple(bytes(data[at : at + SESSION_BYTES]) for at in range(ids_end, end, SESSION_BYTES))
            return RankKeyGrant(epoch, secret, ids, removed)
    raise FrameError("join", f"{len(data)} bytes that are no key message of version {VERSION}")
