"""Epochs: the key that the controller shares with all its members, and how long it is used.

Every epoch has a random key of its own. A new one begins with every start of the controller, when a member is taken off
the list, after a day, and before the counters of the one before could come near their end. Ranks count for themselves:
there a stream goes on with its next key.
"""

from __future__ import annotations

import secrets
import struct
import time
from typing import NamedTuple

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.identity.allow_list import MAX_RANGES, Ids
from gradbus.runtime.security.identity.shared_keys import SECRET_BYTES, SharedKey

EPOCH_S = 24 * 3600.0
EPOCH_FRAMES = 1 << 32
GRACE_S = 10.0  # what was sealed with a member's former keys may still be on its way for so long
VERSION = 2
_KEYS, _HAVE, _RANK_KEYS = 1, 2, 3
COMMANDS, MODELS, CONTROL = "train/train_cmd", "train/model_blob", "train/control"
TOPICS = (COMMANDS, MODELS, CONTROL)  # on which the controller talks to all
_KEYS_BODY = struct.Struct("<BBHI32sQQQQQ12s")
_HAVE_BODY = struct.Struct("<BBHI12s")
PARTICIPANT_BYTES = 12  # what the GUIDs of a DDS participant begin with
_RANK_HEAD = struct.Struct("<BBHI32sHH")
_RANGE = struct.Struct("<II")
MAX_REMOVED = 2048  # sessions of one line: two for each rank that a group can have


class KeyGrant(NamedTuple):
    """Controller to one member, under their own key: the key of an epoch.

    Attributes:
        epoch, secret: of the key.
        floors: by topic, the counter up to which envelopes under it are from before.
        said: numbers up to which what the controller signed is from before, of commands and of all else.
        participant: what the GUIDs of the controller's DDS participant begin with: its readers are a member's.
    """

    epoch: int
    secret: bytes
    floors: tuple[int, int, int]
    said: tuple[int, int]
    participant: bytes = bytes(PARTICIPANT_BYTES)

    def __repr__(self) -> str:
        return f"KeyGrant(epoch={self.epoch}, floors={self.floors}, said={self.said})"


class RankKeyGrant(NamedTuple):
    """Giver of the keys to one process of a job of ranks, under their own key: the key of an epoch.

    Attributes:
        epoch, secret: of the key.
        ids: ranks that this node may be.
        removed: sessions of those that were taken off the list, the newest last: nothing of them counts any more.
    """

    epoch: int
    secret: bytes
    ids: Ids
    removed: tuple[bytes, ...]

    def __repr__(self) -> str:
        return f"RankKeyGrant(epoch={self.epoch}, ids={self.ids})"


class KeyAck(NamedTuple):
    """Member to controller, under their own key: I have the key of that epoch. ``participant``: what the GUIDs of the
    member's DDS participant begin with."""

    epoch: int
    participant: bytes = bytes(PARTICIPANT_BYTES)


KeyMessage = KeyGrant | RankKeyGrant | KeyAck


def pack(word: KeyMessage) -> bytes:
    """Bytes of what is said about keys."""
    if isinstance(word, KeyAck):
        return _HAVE_BODY.pack(VERSION, _HAVE, 0, word.epoch, word.participant)
    if isinstance(word, RankKeyGrant):
        removed = word.removed[-MAX_REMOVED:]
        head = _RANK_HEAD.pack(VERSION, _RANK_KEYS, 0, word.epoch, word.secret, len(word.ids), len(removed))
        return b"".join((head, *(_RANGE.pack(*one) for one in word.ids), *removed))
    return _KEYS_BODY.pack(
        VERSION, _KEYS, 0, word.epoch, word.secret, *word.floors, *word.said, word.participant
    )  # fmt: skip


def parse(data: memoryview) -> KeyMessage:
    """What is said about keys. Raises FrameError: ``join``."""
    if len(data) >= _RANK_HEAD.size and data[1] == _RANK_KEYS:
        return _parse_for_ranks(data)
    if len(data) == _HAVE_BODY.size:
        version, kind, reserved, epoch, participant = _HAVE_BODY.unpack(data)
        if (version, kind, reserved) == (VERSION, _HAVE, 0):
            return KeyAck(epoch, participant)
    if len(data) == _KEYS_BODY.size:
        version, kind, reserved, epoch, secret, a, b, c, command, other, participant = _KEYS_BODY.unpack(data)
        if (version, kind, reserved) == (VERSION, _KEYS, 0):
            return KeyGrant(epoch, secret, (a, b, c), (command, other), participant)
    raise FrameError("join", f"{len(data)} bytes that say nothing about keys, or in another version")


def _parse_for_ranks(data: memoryview) -> RankKeyGrant:
    version, _, reserved, epoch, secret, ranges, count = _RANK_HEAD.unpack_from(data)
    ids_end = _RANK_HEAD.size + ranges * _RANGE.size
    end = ids_end + count * envelope.SESSION_BYTES
    if version != VERSION or reserved or ranges > MAX_RANGES or count > MAX_REMOVED or len(data) != end:
        raise FrameError("join", f"{len(data)} bytes with a key for ranks, of version {version}, of {end} bytes")
    ids = tuple(_RANGE.iter_unpack(data[_RANK_HEAD.size : ids_end]))
    sessions = range(ids_end, end, envelope.SESSION_BYTES)
    return RankKeyGrant(epoch, secret, ids, tuple(bytes(data[at : at + envelope.SESSION_BYTES]) for at in sessions))


def first_epoch() -> int:
    """Number of a controller's first epoch: higher than those of its starts before, if the clock was not set back.
    Nothing depends on that but what people read; a key is known by its id."""
    return int(time.time()) & 0x7FFF_FFFF


def new_epoch(job: str, epoch: int) -> SharedKey:
    """The key of an epoch, random."""
    return SharedKey(job, envelope.GROUP, epoch, secrets.token_bytes(SECRET_BYTES))
