"""The Controller's side of one attempt: pure. It keeps what clients send, and what is still to come.

Each phase is open until it is closed by its caller, who knows the time; with fewer clients than the threshold that
raises, and the attempt has failed.
"""

from __future__ import annotations

import functools
import hmac
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from gradbus.actors.aggregation.common_grid import EXACT, CommonGrid
from gradbus.actors.secure_aggregation.complaints import Judgement, judge
from gradbus.actors.secure_aggregation.keys import (
    CIPHERTEXT_BYTES,
    DIGEST_BYTES,
    MAX_MEMBERS,
    MIN_MEMBERS,
    SEALED_BYTES,
    Attempt,
    Dishonest,
    NotInProtocol,
    Roster,
    RosterEntry,
    TooFewMembers,
    agreed,
    commitment,
    default_threshold,
    derived,
    pair_seed,
    share_digest,
)
from gradbus.actors.secure_aggregation.masking_client import NO_SHARE
from gradbus.actors.secure_aggregation.masks import Stopped, Words, add_masks
from gradbus.actors.secure_aggregation.shamir import SHARE_BYTES, BadShares, Interpolation
from gradbus.runtime.cores import usable_cores

MAX_THREADS = 4  # that take masks off: more would wait for memory
# Answers that come too late are on the bus all the same.
_NO_SUM = (
    "The sum was not made. A client does not answer where the sums of a round's attempts together would show too few "
    "clients, which its log says: start those again that were in the earlier attempt"
)


class WrongSecrets(ValueError):
    """Members have shared other secrets than they have advertised.

    Attributes:
        clients: their ids, ascending.
    """

    def __init__(self, clients: Sequence[int]) -> None:
        super().__init__(
            f"the shares that clients {list(clients)} have sealed for the others do not give what they have advertised"
        )
        self.clients = tuple(clients)


class MaskingServer:
    """One attempt.

    Attributes:
        attempt: which. roster: set by :meth:`close_keys`. senders: members that have shared, by :meth:`close_shares`.
        survivors: members whose masked values are in the sum, by :meth:`close_inputs`.
    """

    def __init__(
        self,
        attempt: Attempt,
        threshold: int | float,
        *,
        cap: int = 0,
        grid: CommonGrid = EXACT,
        least_members: int = MIN_MEMBERS,
    ) -> None:
        """An attempt that has not begun.

        Args:
            threshold: a number of clients, or, as a float, a share of those that have advertised keys. More than half
                of them are needed in any case, and ``least_members``.
            cap, grid: of the roster.
        """
        self.attempt = attempt
        self._least = max(MIN_MEMBERS, least_members)
        self._cap, self._grid = cap, grid
        self._threshold = threshold
        self._tried = X25519PrivateKey.generate()  # of no other use
        self._keys: dict[int, bytes] = {}
        self._sealed: dict[int, dict[int, bytes]] = {}
        self._complaints: dict[int, frozenset[int]] = {}  # by client: whose shares it cannot use
        self._shares: dict[int, list[bytes]] = {}  # of unmasking, by client, in the order in which they came
        self.roster: Roster | None = None
        self.senders: tuple[int, ...] = ()
        self.survivors: tuple[int, ...] = ()

    # Phase 0

    def add_keys(self, client_id: int, keys: bytes) -> None:
        """Keys that a client advertises. Raises NotInProtocol: too late, or others than before; Dishonest: of no
        use."""
        if self._keys.get(client_id) == keys:
            return
        if self.roster is not None or client_id in self._keys:
            raise NotInProtocol(f"keys of client {client_id} after the roster, or other ones than before")
        if len(self._keys) >= MAX_MEMBERS:
            raise NotInProtocol(f"keys of more than {MAX_MEMBERS} clients")
        member = RosterEntry.of(client_id, keys)
        known = {key for other in self._keys for key in (self._keys[other][:32], self._keys[other][32:64])}
        if {member.sealing, member.masking} & known:
            raise NotInProtocol(f"client {client_id} advertises the key of another client")
        for public in (member.sealing, member.masking):
            agreed(self._tried, public)  # else one client with a bad key would keep all others from taking part
        self._keys[client_id] = keys

    @property
    def advertised(self) -> Collection[int]:
        """Clients whose keys have come."""
        return self._keys.keys()

    def close_keys(self, without: Collection[int] = ()) -> Roster:
        """The roster of those that have advertised, ``without`` some of them. Raises TooFewMembers: fewer than the
        threshold."""
        for client_id in without:
            self._keys.pop(client_id, None)
        count, limit = len(self._keys), self._threshold
        needed = default_threshold(count, limit) if isinstance(limit, float) else max(count // 2 + 1, limit)
        needed = max(needed, self._least)
        self._check_enough(self._keys, needed, "advertised keys")
        members = tuple(RosterEntry.of(one, self._keys[one]) for one in sorted(self._keys))
        self.roster = Roster(self.attempt, needed, members, self._cap, self._grid)
        return self.roster

    # Phase 1

    def add_shares(self, client_id: int, sealed: Sequence[bytes]) -> None:
        """What a member has sealed for each other one. Raises NotInProtocol: not in this phase; Dishonest: a wrong
        length."""
        roster = self._entered()
        if client_id not in roster.points or self.senders or client_id in self._sealed:
            raise NotInProtocol(f"shares of client {client_id}: not in this attempt, too late, or a second time")
        others = [one for one in roster.ids if one != client_id]
        if len(sealed) != len(others) or any(len(one) != SEALED_BYTES for one in sealed):
            raise Dishonest(f"{len(sealed)} shares: expected {len(others)}, each of {SEALED_BYTES} bytes")
        self._sealed[client_id] = dict(zip(others, sealed, strict=True))

    @property
    def shared(self) -> Collection[int]:
        """Members whose shares have come."""
        return self._sealed.keys()

    def close_shares(self) -> tuple[int, ...]:
        """The members that have shared, ascending. Raises TooFewMembers: fewer than the threshold."""
        self._check_enough(self._sealed, self._entered().threshold, "shared their secrets")
        self.senders = tuple(sorted(self._sealed))
        return self.senders

    def sealed_for(self, client_id: int) -> list[bytes]:
        """Return what the other senders have sealed for this one, in their order."""
        return [self._sealed[sender][client_id] for sender in self.senders if sender != client_id]

    # Phase 2 and 3

    def add_complaints(self, client_id: int, about: Sequence[int]) -> None:
        """The members whose shares a member cannot use. Raises NotInProtocol: not in this phase; Dishonest: they do not
        ascend, are no others, or differ from before."""
        if client_id not in self.senders:
            raise NotInProtocol(f"complaints of client {client_id}: not in this phase")
        ascend = all(before < after for before, after in itertools.pairwise(about))
        if not ascend or not set(about) <= set(self.senders) - {client_id}:
            raise Dishonest("complaints about clients that do not ascend, or that have sealed nothing for it")
        if self._complaints.setdefault(client_id, frozenset(about)) != frozenset(about):
            raise Dishonest("other complaints than before")

    @property
    def has_complaints(self) -> bool:
        """Whether a member cannot use the shares of another one, or says so."""
        return any(self._complaints.values())

    def judge(self) -> Judgement:
        """Return what follows from the complaints that have come."""
        return judge(self.senders, self._entered().threshold, self._complaints)

    def complaints_about(self, client_id: int) -> set[int]:
        """Return the members that cannot use the shares of this one, or say so."""
        return {by for by, about in self._complaints.items() if client_id in about}

    def close_inputs(self, survivors: Collection[int]) -> tuple[int, ...]:
        """Fix the members whose masked values are in the sum. Raises TooFewMembers: fewer than the threshold."""
        if not set(survivors) <= set(self.senders):
            raise NotInProtocol("masked values of a client that has not shared its secrets")
        self._check_enough(survivors, self._entered().threshold, "sent masked values")
        self.survivors = tuple(sorted(survivors))
        return self.survivors

    def add_unmasking(self, client_id: int, shares: Sequence[bytes]) -> None:
        """A member's answer to the survivors. A share that is not there is a complaint.

        Raises:
            NotInProtocol: not in this phase. Dishonest: a wrong length, or a share that is not the one which its sender
                has fixed, and about which this member has not complained. Nothing of the answer is used.
        """
        if not self.survivors or client_id not in self.senders or client_id in self._shares:
            raise NotInProtocol(f"unmasking shares of client {client_id}: not asked for, or a second time")
        if len(shares) != len(self.senders) or any(len(one) != SHARE_BYTES for one in shares):
            raise Dishonest(f"{len(shares)} shares: expected {len(self.senders)}, each of {SHARE_BYTES} bytes")
        lacking = {sender for sender, share in zip(self.senders, shares, strict=True) if share == NO_SHARE}
        lacking |= self._complaints.get(client_id, frozenset())
        for sender, share in zip(self.senders, shares, strict=True):
            if sender not in lacking and sender != client_id:
                self._check_share(sender, client_id, share)
        self._complaints[client_id] = frozenset(lacking)
        self._shares[client_id] = list(shares)

    def _check_share(self, sender: int, receiver: int, share: bytes) -> None:
        at = CIPHERTEXT_BYTES + (0 if sender in self.survivors else DIGEST_BYTES)
        fixed = self._sealed[sender][receiver][at : at + DIGEST_BYTES]
        kind = b"seed" if sender in self.survivors else b"key"
        if not hmac.compare_digest(fixed, share_digest(self._entered(), kind, sender, receiver, share)):
            raise Dishonest(f"it gives a wrong share of client {sender}'s secret to unmask")

    @property
    def answered(self) -> Collection[int]:
        """Members whose unmasking shares have come."""
        return self._shares.keys()

    @property
    def can_unmask(self) -> bool:
        """Whether enough have answered, with shares of each member."""
        return len(self._shares) >= self._entered().threshold and not self.lacking

    @property
    def lacking(self) -> list[int]:
        """Members of whose secret too few shares have come, ascending."""
        threshold = self._entered().threshold
        if not self.has_complaints:
            return list(self.senders) if len(self._shares) < threshold else []
        return [one for one in self.senders if len(self._holders(one)) < threshold]

    def _holders(self, sender: int) -> list[int]:
        """Members that have answered with a share of this one's secret."""
        return [one for one in self._shares if sender not in self._complaints[one]]

    def unmask(self, total: Words, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Take all masks off the sum of the survivors' masked values, in place, modulo 2^64 or 2^16.

        Raises:
            Stopped: ``should_stop`` was true. The sum is then unusable.
            TooFewMembers: fewer answers than the threshold. WrongSecrets: of some member they give another secret than
                it has advertised. The sum is then as it was.
        """
        self._check_enough(self._shares, self._entered().threshold, "sent their shares to unmask", _NO_SUM)
        if lacking := self.lacking:
            raise TooFewMembers(
                f"secure aggregation: of client {lacking[0]}'s secret {len(self._holders(lacking[0]))} shares have "
                f"come, the threshold is {self._entered().threshold}. {_NO_SUM}"
            )
        threads = min(MAX_THREADS, usable_cores())  # the clients wait for this, with nothing to do
        add_masks(total, self._seeds(self._checked_secrets(should_stop)), should_stop, threads=threads)

    def _checked_secrets(self, should_stop: Callable[[], bool]) -> list[bytes]:
        """Return for each sender the seed of its own mask, or its masking key, as it has advertised them.

        The shares are those that the sender has fixed, but for its own, which it gives itself. So where they give
        something else, the sender is to blame, and nobody else.
        """
        roster = self._entered()
        interpolation = functools.cache(Interpolation)
        secrets, wrong = [], []
        for place, sender in enumerate(self.senders):
            if should_stop():
                raise Stopped
            holders = self._holders(sender)[: roster.threshold]
            shares = {roster.points[one]: self._shares[one][place] for one in holders}
            secret = self._secret_of(sender, interpolation(tuple(shares)), shares)
            secrets.append(secret or b"")
            wrong += [] if secret else [sender]
        if wrong:
            raise WrongSecrets(wrong)
        return secrets

    def _secret_of(self, sender: int, interpolation: Interpolation, shares: Mapping[int, bytes]) -> bytes | None:
        """The secret of a sender; None: the shares are of another one than it has advertised."""
        try:
            secret = interpolation.secret(shares)
        except BadShares:
            return None
        member = self._entered().entry_of(sender)
        if sender in self.survivors:
            is_right = hmac.compare_digest(commitment(secret), member.commitment)
        else:
            is_right = _masking_key(secret).public_key().public_bytes_raw() == member.masking
        return secret if is_right else None

    def _seeds(self, secrets: Sequence[bytes]) -> Iterator[tuple[bytes, bool]]:
        """Yield the seed of each mask that is left in the sum, and whether it is to be taken off, one by one: there are
        many where many clients have dropped out."""
        roster, alive = self._entered(), frozenset(self.survivors)
        for sender, secret in zip(self.senders, secrets, strict=True):
            if sender in alive:
                yield derived(secret, b"own", roster, (sender,)), True
                continue
            key = _masking_key(secret)
            for survivor in self.survivors:  # each has added or taken off what it shares with the one that is missing
                yield pair_seed(key, sender, roster.entry_of(survivor), roster), survivor < sender

    def _entered(self) -> Roster:
        if self.roster is None:
            raise NotInProtocol("there is no roster yet")
        return self.roster

    def _check_enough(self, found: Collection[int], needed: int, did: str, end: str = "Nothing was revealed") -> None:
        if len(found) < needed:
            raise TooFewMembers(
                f"secure aggregation: {len(found)} clients have {did}, the threshold is {needed}. {end}"
            )


def _masking_key(secret: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(secret)
