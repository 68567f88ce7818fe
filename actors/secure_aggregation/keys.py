"""What the members of an attempt agree on: its name, their public keys, and what is derived from them.

Keys are made anew for each attempt at a round, and everything that is derived from them is bound to the job, the run,
the round, the attempt and the whole roster. So nothing of one attempt is of use in another one, and two clients that
were told different rosters have no key in common.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from gradbus.actors.aggregation.common_grid import EXACT, MAX_ADDENDS, CommonGrid, limit_for
from gradbus.actors.secure_aggregation.shamir import MAX_POINTS, SHARE_BYTES

KEY_BYTES = 32
KEYS_BYTES = 3 * KEY_BYTES  # of one member
MAX_MEMBERS = min(MAX_POINTS, MAX_ADDENDS)
DIGEST_BYTES = 16  # of a share: as long as no other one can be found with the same
CIPHERTEXT_BYTES = 2 * SHARE_BYTES + 16  # two shares and the tag of the AEAD
SEALED_BYTES = CIPHERTEXT_BYTES + 2 * DIGEST_BYTES
MIN_MEMBERS = 2  # the sum of one update would be that update

_ENTRY = struct.Struct(f"<I{KEYS_BYTES}s")
ENTRY_BYTES = _ENTRY.size
_NAME = struct.Struct("<QQII")
_ROUND = struct.Struct("<QI")
_DITHER = struct.Struct("<QII")
_TERMS = struct.Struct("<IQ")
_GRID = struct.Struct("<QQ")


class NotInProtocol(ValueError):
    """A message that does not belong to this attempt, or that no honest peer sends. It changes nothing."""


class Dishonest(NotInProtocol):
    """A message that shows by itself that its sender does not keep to the protocol."""


class NotMember(NotInProtocol):
    """An attempt goes on without this client, as it came too late or sits the round out."""


class TooFewMembers(ValueError):
    """Fewer clients than the threshold are left in a phase: the attempt has failed, and nothing of it is revealed."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The name of an attempt at a round, which all its keys are bound to.

    Attributes:
        session: which start of the Controller: one that was started again does not repeat an attempt.
        number: among those of that start, from 1.
    """

    job: str
    run_id: int
    session: int
    round_id: int
    number: int

    def to_bytes(self) -> bytes:
        """Different for each attempt."""
        return _NAME.pack(self.run_id, self.session, self.round_id, self.number) + self.job.encode()


def default_threshold(members: int, share: float) -> int:
    """Shares that reveal a secret, where this share of the members is enough: always more than half of them."""
    return max(MIN_MEMBERS, members // 2 + 1, math.ceil(share * members - 1e-9))


@dataclass(frozen=True)
class RosterEntry:
    """A client in a roster.

    Attributes:
        sealing: X25519 public key, for what clients seal for each other. masking: that of its pair masks.
        commitment: SHA-256 of the seed of its own mask.
    """

    client_id: int
    sealing: bytes
    masking: bytes
    commitment: bytes

    @classmethod
    def of(cls, client_id: int, keys: bytes) -> RosterEntry:
        """Of the bytes that a client advertises. Raises Dishonest: another length, or a key repeated."""
        if len(keys) != KEYS_BYTES:
            raise Dishonest(f"keys of {len(keys)} bytes: expected {KEYS_BYTES}")
        sealing, masking, commitment = (keys[at : at + KEY_BYTES] for at in range(0, KEYS_BYTES, KEY_BYTES))
        if sealing == masking:
            raise Dishonest(f"client {client_id} has one key for two purposes")
        return cls(client_id, sealing, masking, commitment)


@dataclass(frozen=True)
class Roster:
    """The members of an attempt, by ascending client id, and how many of them it takes to unmask.

    Attributes:
        threshold: shares that reveal a secret: more than half of the members, so that no server can collect enough of
            both kinds, whatever it tells to whom.
        cap: samples that an update of more counts as; 0: each counts as its own. It is the same for all members, and
            part of what their keys are bound to: with a weight of its own for each, a server could tell updates apart
            in the bits of their sum.
        grid: to whose steps and at which positions all members round. The same for all of them, and part of what their
            keys are bound to, for the same reason.
    """

    attempt: Attempt
    threshold: int
    members: tuple[RosterEntry, ...]
    cap: int = 0
    grid: CommonGrid = EXACT

    def positions(self, dim: int) -> NDArray[np.int64] | None:
        """Where the values of an update are in a model of ``dim``, int64, ascending; None: everywhere. The same in all
        attempts at a round."""
        return self.grid.positions(
            dim, b"gradbus positions 1" + _ROUND.pack(self.attempt.run_id, self.attempt.round_id)
        )

    def dither_seed(self, client_id: int) -> bytes:
        """Of what a client rounds with. The same in all attempts at a round: its update has the same bits in each."""
        return b"gradbus dither 1" + _DITHER.pack(self.attempt.run_id, self.attempt.round_id, client_id)

    @property
    def limit(self) -> int:
        """The largest integer of a member; 0: there is none but the room in the sum."""
        return limit_for(len(self.members)) if self.grid.is_small else 0

    @property
    def terms(self) -> Hashable:
        """Return what the integers of an update depend on, beside the update."""
        return self.cap, self.grid, self.limit

    def weight(self, num_samples: int) -> int:
        """Return the weight of an update of so many samples."""
        return min(num_samples, self.cap) if self.cap else num_samples

    def __post_init__(self) -> None:
        """Raises NotInProtocol: too few or too many members, not ascending, keys that repeat, a threshold too low."""
        count, ids = len(self.members), self.ids
        if not MIN_MEMBERS <= count <= MAX_MEMBERS:
            raise NotInProtocol(f"a roster of {count} members: expected {MIN_MEMBERS} to {MAX_MEMBERS}")
        if any(before >= after for before, after in itertools.pairwise(ids)):
            raise NotInProtocol("a roster whose client ids do not ascend")
        if len({key for one in self.members for key in (one.sealing, one.masking)}) != 2 * count:
            raise NotInProtocol("a roster in which two members have the same key")
        if not max(MIN_MEMBERS, count // 2 + 1) <= self.threshold <= count:
            raise NotInProtocol(
                f"a threshold of {self.threshold} with {count} members: expected more than half of them, at most all"
            )

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Client ids, ascending."""
        return tuple(member.client_id for member in self.members)

    @cached_property
    def points(self) -> dict[int, int]:
        """The point of each client's shares."""
        return {client_id: point for point, client_id in enumerate(self.ids, 1)}

    def entry_of(self, client_id: int) -> RosterEntry:
        """The member of that id."""
        return self.members[self.points[client_id] - 1]

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over all of it. Without a grid it is as before there were any."""
        terms, named = _TERMS.pack(self.threshold, self.cap), self.to_bytes() + self.attempt.to_bytes()
        if self.grid == EXACT:
            return hashlib.sha256(b"gradbus roster 1" + terms + named).digest()
        grid = _GRID.pack(self.grid.sent, self.grid.block_elems) + hashlib.sha256(self.grid.exponents).digest()
        return hashlib.sha256(b"gradbus roster 2" + terms + grid + named).digest()

    def to_bytes(self) -> bytes:
        """The members; :meth:`parse` reads it."""
        entries = ((one.client_id, one.sealing + one.masking + one.commitment) for one in self.members)
        return b"".join(_ENTRY.pack(*entry) for entry in entries)

    @classmethod
    def parse(cls, attempt: Attempt, threshold: int, data: bytes, cap: int = 0, grid: CommonGrid = EXACT) -> Roster:
        """Raises NotInProtocol: the length, or what :meth:`__post_init__` checks, is wrong."""
        if len(data) % _ENTRY.size or len(data) > MAX_MEMBERS * _ENTRY.size:
            raise NotInProtocol(f"a roster of {len(data)} bytes: expected at most {MAX_MEMBERS} x {_ENTRY.size}")
        return cls(attempt, threshold, tuple(RosterEntry.of(*entry) for entry in _ENTRY.iter_unpack(data)), cap, grid)


def derived(secret: bytes, purpose: bytes, roster: Roster, ids: Iterable[int]) -> bytes:
    """32 bytes by HKDF-SHA256 (RFC 5869), bound to the purpose, the roster with its attempt, and ids in order."""
    info = b"gradbus secure aggregation 1 " + purpose + b"".join(one.to_bytes(4, "little") for one in ids)
    return HKDF(hashes.SHA256(), 32, roster.digest, info).derive(secret)


def agreed(private: X25519PrivateKey, public: bytes) -> bytes:
    """The shared secret of two keys (RFC 7748). Raises Dishonest: the public key is a point of small order."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise Dishonest(f"a public key that cannot be used: {error}") from None


def pair_seed(private: X25519PrivateKey, own_id: int, other: RosterEntry, roster: Roster) -> bytes:
    """The seed of the mask that two members share: equal from both sides."""
    return derived(agreed(private, other.masking), b"mask", roster, sorted((own_id, other.client_id)))


def commitment(seed: bytes) -> bytes:
    """Return what a client advertises of the seed of its own mask."""
    return hashlib.sha256(b"gradbus own mask 1" + seed).digest()


def share_digest(roster: Roster, kind: bytes, sender: int, receiver: int, share: bytes) -> bytes:
    """Return what a sender fixes a share by, in clear. It shows nothing of the share, one of 2^257, and lets whoever
    reads the share later see whether it is that one. ``kind``: ``b"seed"`` or ``b"key"``."""
    ids = sender.to_bytes(4, "little") + receiver.to_bytes(4, "little")
    return hashlib.sha256(b"gradbus share 1 " + kind + roster.digest + ids + share).digest()[:DIGEST_BYTES]


def share_digests(roster: Roster, sender: int, receiver: int, shares: tuple[bytes, bytes]) -> bytes:
    """Return the digests of a share of the own seed, and of one of the masking key, as they follow what is sealed."""
    kinds = zip((b"seed", b"key"), shares, strict=True)
    return b"".join(share_digest(roster, kind, sender, receiver, share) for kind, share in kinds)
