"""Key epochs: the group key that the controller shares with all members, its messages on the wire, and its rotation.

Every epoch has a random key. A new one begins with every start of the controller, when a member is removed from the
allow list, after a day, and before the counters of the epoch could run out. Ranks use the next key of each stream
instead of a new epoch when their counters run out.
"""

from __future__ import annotations

import secrets
import struct
import time
from typing import NamedTuple

from gradbus.runtime.errors import FrameError
from gradbus.runtime.security import envelope
from gradbus.runtime.security.identity.allow_list import MAX_RANGES, Ids
from gradbus.runtime.security.job_key import KEY_BYTES
from gradbus.runtime.security.streams import OutboundStreams, SharedKey

EPOCH_S = 24 * 3600.0
EPOCH_FRAMES = 1 << 32
GRACE_S = 10.0  # envelopes under a member's former pairwise keys are accepted for so long
VERSION = 2
_KEYS, _HAVE, _RANK_KEYS = 1, 2, 3
COMMANDS, MODELS, CONTROL = "train/train_cmd", "train/model_blob", "train/control"
TOPICS = (COMMANDS, MODELS, CONTROL)  # on which the controller sends to all
_KEYS_BODY = struct.Struct("<BBHI32sQQQQQ12s")
_HAVE_BODY = struct.Struct("<BBHI12s")
PARTICIPANT_BYTES = 12  # GUID prefix of a DDS participant
_RANK_HEAD = struct.Struct("<BBHI32sHH")
_RANGE = struct.Struct("<II")
MAX_REMOVED = 2048  # sessions of one line: two for each rank that a group can have


class KeyGrant(NamedTuple):
    """Controller to one member, under their pairwise key: the group key of an epoch.

    Attributes:
        epoch, secret: of the key.
        floors: by topic, the counter up to which envelopes under the key are older than the grant.
        said: signed broadcast numbers up to which broadcasts are older, of commands and of all else.
        participant: GUID prefix of the controller's DDS participant, whose readers are a member's.
    """

    epoch: int
    secret: bytes
    floors: tuple[int, int, int]
    said: tuple[int, int]
    participant: bytes = bytes(PARTICIPANT_BYTES)

    def __repr__(self) -> str:
        return f"KeyGrant(epoch={self.epoch}, floors={self.floors}, said={self.said})"


class RankKeyGrant(NamedTuple):
    """Key issuer to one process of a job of ranks, under their pairwise key: the group key of an epoch.

    Attributes:
        epoch, secret: of the key.
        ids: ranks that this node may be.
        removed: sessions of removed processes, the newest last; their envelopes are rejected.
    """

    epoch: int
    secret: bytes
    ids: Ids
    removed: tuple[bytes, ...]

    def __repr__(self) -> str:
        return f"RankKeyGrant(epoch={self.epoch}, ids={self.ids})"


class KeyAck(NamedTuple):
    """Member to controller, under their pairwise key: acknowledges the key of an epoch. ``participant``: GUID prefix of
    the member's DDS participant."""

    epoch: int
    participant: bytes = bytes(PARTICIPANT_BYTES)


KeyMessage = KeyGrant | RankKeyGrant | KeyAck


def pack(word: KeyMessage) -> bytes:
    """Return the bytes of a key message."""
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
    """Parse a key message. Raises FrameError ``join``: its size, kind or version is unknown."""
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
    raise FrameError("join", f"{len(data)} bytes that are no key message of version {VERSION}")


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
    """Return the number of a controller's first epoch, from the clock so that it grows with each start.

    Only people read it; keys are identified by their id.
    """
    return int(time.time()) & 0x7FFF_FFFF


def new_epoch(job: str, epoch: int) -> SharedKey:
    """Return a new random group key."""
    return SharedKey(job, envelope.GROUP, epoch, secrets.token_bytes(KEY_BYTES))


SWITCH_S = 2.0  # longest wait for the acknowledgements of a new key
REPEAT_S = 0.25


class KeyRotation:
    """Rotates the group key of one start of a controller.

    Attributes:
        current: the streams to encrypt with. switched: number and reason of an epoch that has just begun, until read.
    """

    def __init__(self, job: str, session: bytes, now_s: float) -> None:
        self._job = job
        self._session = session
        self.current = OutboundStreams(new_epoch(job, first_epoch()), session)
        self.switched: tuple[int, str] | None = None
        self._next: OutboundStreams | None = None
        self._began_s = now_s
        self._why = ""
        self._again = ""  # reason of another rotation that was requested meanwhile
        self._pending: set[str] = set()
        self._until_s = self._said_s = 0.0

    @property
    def is_running(self) -> bool:
        """Whether a new key is being distributed."""
        return self._next is not None

    @property
    def next(self) -> OutboundStreams | None:
        """The streams under the key that is being distributed; None: there is none."""
        return self._next

    def keys_for(self, name: str) -> list[OutboundStreams]:
        """Return the keys that a new member needs."""
        if self._next is None:
            return [self.current]
        self._pending.add(name)
        return [self.current, self._next]

    def begin(self, members: set[str], now_s: float, why: str) -> None:
        """Begin a new epoch. If a rotation is running, another one follows it, as removed nodes may have its key."""
        if self._next is not None:
            self._again = why
            return
        self._next = OutboundStreams(new_epoch(self._job, self.current.key.epoch + 1), self._session)
        self._why, self._pending = why, set(members)
        self._until_s, self._said_s = now_s + SWITCH_S, float("-inf")

    def acknowledge(self, name: str, number: int) -> None:
        """Note that a member has acknowledged the key of an epoch."""
        if self._next is not None and number == self._next.key.epoch:
            self._pending.discard(name)

    def tick(self, members: set[str], now_s: float) -> list[tuple[str, OutboundStreams]]:
        """Advance timers; returns the members to send a key grant to, with the key."""
        if self._next is None:
            if now_s - self._began_s > EPOCH_S:
                self.begin(members, now_s, "a day is over")
            elif max(self.current.last.values(), default=0) >= EPOCH_FRAMES:
                self.begin(members, now_s, "its counters are used up")
        if self._next is None:
            return []
        self._pending &= members
        if not self._pending or now_s > self._until_s:
            self.current, self._next = self._next, None
            self._began_s, self.switched = now_s, (self.current.key.epoch, self._why)
            if self._again:
                why, self._again = self._again, ""
                self.begin(members, now_s, why)
            return self.tick(members, now_s) if self._next is not None else []
        if now_s - self._said_s < REPEAT_S:
            return []
        self._said_s = now_s
        return [(name, self._next) for name in sorted(self._pending)]
