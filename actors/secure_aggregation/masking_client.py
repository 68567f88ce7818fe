"""The client's side of one attempt: pure, with all that it is asked to do checked first.

    advertise -> share -> receive -> mask -> unmask        (Bonawitz et al., CCS 2017, figure 4)

An object is of one attempt and holds its secret keys; it is thrown away with it. Each step is done once. What is asked
again gets the answer of the first time where the question is the same, and is refused where it is not.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Collection, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gradbus.actors.secure_aggregation.keys import (
    CIPHERTEXT_BYTES,
    MIN_MEMBERS,
    SEALED_BYTES,
    Attempt,
    NotInProtocol,
    NotMember,
    Roster,
    RosterEntry,
    agreed,
    commitment,
    derived,
    pair_seed,
    share_digests,
)
from gradbus.actors.secure_aggregation.masks import SEED_BYTES, Words, add_masks
from gradbus.actors.secure_aggregation.shamir import SHARE_BYTES, is_share, split

NO_SHARE = bytes(SHARE_BYTES)  # in an answer: of a sender whose shares this client could not use
_NONCE = bytes(12)  # each key seals one message


class MaskingClient:
    """One client in one attempt.

    Attributes:
        attempt: which. roster: its members, once they are known.
        senders: members whose shares have come, itself included; empty before :meth:`receive`.
    """

    def __init__(self, attempt: Attempt, client_id: int, *, least_members: int = MIN_MEMBERS) -> None:
        """``least_members``: refuse to take part where the sum of fewer could be unmasked."""
        self.attempt = attempt
        self._client_id = client_id
        self._least = max(MIN_MEMBERS, least_members)
        self._sealing = X25519PrivateKey.generate()
        self._masking = secrets.token_bytes(SEED_BYTES)  # the private key, as it is shared
        self._masking_key = X25519PrivateKey.from_private_bytes(self._masking)
        self._own_seed = secrets.token_bytes(SEED_BYTES)
        self._sealed: list[bytes] | None = None
        self._shares: dict[int, tuple[bytes, bytes]] = {}  # by sender: of its own seed, of its masking key
        self._is_masked = False
        self._survivors: tuple[int, ...] | None = None
        self.roster: Roster | None = None
        self.senders: tuple[int, ...] = ()

    def advertise(self) -> bytes:
        """Phase 0: the public keys, and the commitment to the own seed; 96 bytes."""
        public = (key.public_key().public_bytes_raw() for key in (self._sealing, self._masking_key))
        return b"".join(public) + commitment(self._own_seed)

    def share(self, roster: Roster) -> list[bytes]:
        """Phase 1: shares of both secrets, sealed for each other member, with their digests, in the order of the
        roster. Given again for the same roster.

        Raises:
            NotInProtocol: the roster is of another attempt, another one than before, or has a threshold that is too low
                or other keys of this client.
        """
        if self._sealed is not None:
            if self.roster is None or roster.digest != self.roster.digest:
                raise NotInProtocol("a second roster for one attempt")
            return self._sealed
        if roster.attempt != self.attempt:
            raise NotInProtocol(f"a roster of {roster.attempt}: this is {self.attempt}")
        if roster.threshold < self._least:
            raise NotInProtocol(
                f"a sum of {roster.threshold} of {len(roster.members)} members can be unmasked: this client asks for "
                f"{self._least}"
            )
        if self._client_id not in roster.points:
            raise NotMember("a roster without this client")
        if roster.entry_of(self._client_id) != RosterEntry.of(self._client_id, self.advertise()):
            raise NotInProtocol("a roster with other keys of this client")
        points = tuple(roster.points.values())
        of_seed = split(self._own_seed, roster.threshold, points)
        of_key = split(self._masking, roster.threshold, points)
        sealed = []
        for other, seed_share, key_share in zip(roster.members, of_seed, of_key, strict=True):
            if other.client_id == self._client_id:
                self._shares[self._client_id] = seed_share, key_share
                continue
            key = self._sealing_key(roster, other, self._client_id, other.client_id)
            ciphertext = AESGCM(key).encrypt(_NONCE, seed_share + key_share, roster.digest)
            sealed.append(ciphertext + share_digests(roster, self._client_id, other.client_id, (seed_share, key_share)))
        self.roster, self._sealed = roster, sealed
        return sealed

    def _sealing_key(self, roster: Roster, other: RosterEntry, sender: int, receiver: int) -> bytes:
        return derived(agreed(self._sealing, other.sealing), b"seal", roster, (sender, receiver))

    def receive(self, senders: Sequence[int], sealed: Sequence[bytes]) -> list[int]:
        """Phase 2 begins: the shares of these members, ascending, of which this client is one; ``sealed`` is without
        its own. Once; a repetition gives the same.

        Returns:
            The members that this client complains about, ascending: they have not sealed shares for it in this attempt
            that are what they say. It goes on without their shares, unless fewer than the threshold are left: then
            there are no :attr:`senders`, and nothing is masked.

        Raises:
            NotInProtocol: not in this phase, fewer members than the threshold, or other members.
        """
        roster, senders = self._entered(), tuple(senders)
        if self.senders:
            if senders != self.senders:
                raise NotInProtocol("a second set of shares for one attempt")
            return [one for one in senders if one not in self._shares]
        self._check_members(senders, roster.ids, roster.threshold)
        if self._client_id not in senders:
            raise NotInProtocol("shares for an attempt that goes on without this client")
        others = [one for one in senders if one != self._client_id]
        if len(sealed) != len(others) or any(len(one) != SEALED_BYTES for one in sealed):
            raise NotInProtocol(f"{len(sealed)} sealed shares of {len(others)} members, each of {SEALED_BYTES} bytes")
        opened = {self._client_id: self._shares[self._client_id]}
        for sender, one in zip(others, sealed, strict=True):
            if (shares := self._opened(roster, sender, one)) is not None:
                opened[sender] = shares
        if len(opened) >= roster.threshold:
            self._shares, self.senders = opened, senders
        return [one for one in senders if one not in opened]

    def _opened(self, roster: Roster, sender: int, sealed: bytes) -> tuple[bytes, bytes] | None:
        """Both shares of a sender; None: they are of no use."""
        key = self._sealing_key(roster, roster.entry_of(sender), sender, self._client_id)
        try:
            both = AESGCM(key).decrypt(_NONCE, sealed[:CIPHERTEXT_BYTES], roster.digest)
        except InvalidTag:
            return None
        shares = both[:SHARE_BYTES], both[SHARE_BYTES:]
        # With other digests than those of its shares a sender could have this client called a liar later.
        is_right = sealed[CIPHERTEXT_BYTES:] == share_digests(roster, sender, self._client_id, shares)
        return shares if is_right and all(map(is_share, shares)) else None

    def mask(self, values: Words, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Phase 2: add the own mask and those of all pairs to the values, in place. Once. Added to zeros, it gives the
        sum of all masks, which may be made before there are values, and is then added to them, once.

        Raises:
            Stopped: ``should_stop`` was true; the values are of no use.
            NotInProtocol: not in this phase, or a second time: the difference of two vectors under the same masks would
                show both.
        """
        roster = self._entered()
        if not self.senders or self._is_masked or self._survivors is not None:
            raise NotInProtocol("values can be masked once, after the shares have come and before unmasking")
        self._is_masked = True
        seeds = [(self._own_mask(roster), False)]
        for other_id in self.senders:
            if other_id != self._client_id:
                seed = pair_seed(self._masking_key, self._client_id, roster.entry_of(other_id), roster)
                seeds.append((seed, other_id < self._client_id))
        add_masks(values, seeds, should_stop)

    def _own_mask(self, roster: Roster) -> bytes:
        return derived(self._own_seed, b"own", roster, (self._client_id,))

    @property
    def has_answered(self) -> bool:
        """Whether this client has given its shares to unmask: nothing is masked any more."""
        return self._survivors is not None

    def unmask(self, survivors: Sequence[int]) -> list[bytes]:
        """Phase 3: one share for each of :attr:`senders`, in their order: of the own seed of a survivor, of the masking
        key of a client that dropped out; :data:`NO_SHARE` of those that it has complained about. Given again for the
        same survivors.

        Raises:
            NotInProtocol: not in this phase, other survivors than before, fewer than the threshold, or none of ours.
        """
        roster, survivors = self._entered(), tuple(survivors)
        if not self.senders:
            raise NotInProtocol("unmasking before the shares have come")
        if self._survivors is not None and survivors != self._survivors:
            raise NotInProtocol("a second set of survivors for one attempt: both shares of a client would be revealed")
        self._check_members(survivors, self.senders, roster.threshold)
        self._survivors = survivors
        alive = frozenset(survivors)
        none = NO_SHARE, NO_SHARE
        return [self._shares.get(sender, none)[0 if sender in alive else 1] for sender in self.senders]

    def _entered(self) -> Roster:
        if self.roster is None:
            raise NotInProtocol("there is no roster yet")
        return self.roster

    @staticmethod
    def _check_members(found: Sequence[int], among: Collection[int], threshold: int) -> None:
        ascend = all(before < after for before, after in itertools.pairwise(found))
        if not ascend or not set(found) <= set(among):
            raise NotInProtocol("clients that do not ascend, or that are not in this attempt")
        if len(found) < threshold:
            raise NotInProtocol(f"{len(found)} clients: the threshold is {threshold}")
