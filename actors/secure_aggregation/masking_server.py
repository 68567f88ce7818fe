"""The Controller's side of one attempt: pure. It keeps what clients send, and what is still to come.

Each phase is open until it is closed by its caller, who knows the time; with fewer clients than the threshold that
raises, and the attempt has failed.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
from collections.abc import Callable, Collection, Iterator, Sequence

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from gradbus.actors.aggregation.common_grid import EXACT, CommonGrid
from gradbus.actors.secure_aggregation.keys import (
    MAX_MEMBERS,
    MIN_MEMBERS,
    SEALED_BYTES,
    Attempt,
    NotInProtocol,
    Roster,
    RosterEntry,
    TooFewMembers,
    agreed,
    commitment,
    default_threshold,
    derived,
    pair_seed,
)
from gradbus.actors.secure_aggregation.masks import Stopped, Words, add_masks
from gradbus.actors.secure_aggregation.shamir import SHARE_BYTES, BadShares, Interpolation
from gradbus.runtime.cores import usable_cores

MAX_THREADS = 4  # that take masks off: more would wait for memory
# Answers that come too late are on the bus all the same.
_NO_SUM = (
    "The sum was not made. A client does not answer where the sums of a round's attempts together would show too few "
    "clients, which its log says: start those again that were in the earlier attempt"
)


class MaskingServer:
    """One attempt.

    Attributes:
        attempt: which. roster: set by :meth:`close_keys`. senders: members that have shared, by :meth:`close_shares`.
        survivors: members whose masked values are in the sum, by :meth:`close_inputs`.
    """

    def __init__(
        self, attempt: Attempt, threshold: int | float, *, cap: int = 0, grid: CommonGrid = EXACT,
        least_members: int = MIN_MEMBERS,
    ) -> None:  # fmt: skip
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
        self._shares: dict[int, list[bytes]] = {}  # of unmasking, by client, in the order in which they came
        self._secrets: dict[int, bytes] = {}  # by sender, as far as they are known
        self.roster: Roster | None = None
        self.senders: tuple[int, ...] = ()
        self.survivors: tuple[int, ...] = ()

    # Phase 0

    def add_keys(self, client_id: int, keys: bytes) -> None:
        """Keys that a client advertises. Raises NotInProtocol: too late, others than before, or of no use."""
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

    def close_keys(self) -> Roster:
        """The roster of those that have advertised. Raises TooFewMembers: fewer than the threshold."""
        count, limit = len(self._keys), self._threshold
        needed = default_threshold(count, limit) if isinstance(limit, float) else max(count // 2 + 1, limit)
        needed = max(needed, self._least)
        self._check_enough(self._keys, needed, "advertised keys")
        members = tuple(RosterEntry.of(one, self._keys[one]) for one in sorted(self._keys))
        self.roster = Roster(self.attempt, needed, members, self._cap, self._grid)
        return self.roster

    # Phase 1

    def add_shares(self, client_id: int, sealed: Sequence[bytes]) -> None:
        """What a member has sealed for each other one. Raises NotInProtocol: not in this phase, or a wrong length."""
        roster = self._entered()
        if client_id not in roster.points or self.senders or client_id in self._sealed:
            raise NotInProtocol(f"shares of client {client_id}: not in this attempt, too late, or a second time")
        others = [one for one in roster.ids if one != client_id]
        if len(sealed) != len(others) or any(len(one) != SEALED_BYTES for one in sealed):
            raise NotInProtocol(f"{len(sealed)} shares: expected {len(others)}, each of {SEALED_BYTES} bytes")
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

    def close_inputs(self, survivors: Collection[int]) -> tuple[int, ...]:
        """Fix the members whose masked values are in the sum. Raises TooFewMembers: fewer than the threshold."""
        if not set(survivors) <= set(self.senders):
            raise NotInProtocol("masked values of a client that has not shared its secrets")
        self._check_enough(survivors, self._entered().threshold, "sent masked values")
        self.survivors = tuple(sorted(survivors))
        return self.survivors

    def add_unmasking(self, client_id: int, shares: Sequence[bytes]) -> None:
        """A member's answer to the survivors. Raises NotInProtocol: not in this phase, or a wrong length."""
        if not self.survivors or client_id not in self.senders or client_id in self._shares:
            raise NotInProtocol(f"unmasking shares of client {client_id}: not asked for, or a second time")
        if len(shares) != len(self.senders) or any(len(one) != SHARE_BYTES for one in shares):
            raise NotInProtocol(f"{len(shares)} shares: expected {len(self.senders)}, each of {SHARE_BYTES} bytes")
        self._shares[client_id] = list(shares)

    @property
    def answered(self) -> Collection[int]:
        """Members whose unmasking shares have come."""
        return self._shares.keys()

    @property
    def can_unmask(self) -> bool:
        """Whether enough have answered."""
        return len(self._shares) >= self._entered().threshold

    def unmask(self, total: Words, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Take all masks off the sum of the survivors' masked values, in place, modulo 2^64 or 2^16.

        Raises:
            Stopped: ``should_stop`` was true. The sum is then unusable.
            TooFewMembers: fewer answers than the threshold. BadShares: an answer was wrong, and no others are here to
                do without it. The sum is then as it was, and this may be called again when there is another answer.
        """
        self._check_enough(self._shares, self._entered().threshold, "sent their shares to unmask", _NO_SUM)
        threads = min(MAX_THREADS, usable_cores())  # the clients wait for this, with nothing to do
        add_masks(total, self._seeds(self._checked_secrets(should_stop)), should_stop, threads=threads)

    def _checked_secrets(self, should_stop: Callable[[], bool]) -> list[bytes]:
        """Return for each sender the seed of its own mask, or its masking key, as it has advertised them.

        Where the first answers give something else, each of them in turn gives way to the newest one. Who is to blame
        then is not known: the one that has answered, or the sender, which may have sealed a wrong share for it.
        """
        roster, known = self._entered(), list(self._shares)
        first, newest = known[: roster.threshold], known[roster.threshold :][-1:]
        choices = [first, *([*first[:place], *newest, *first[place + 1 :]] for place in range(len(first)) if newest)]

        @functools.cache
        def interpolation(choice: int) -> Interpolation:
            return Interpolation([roster.points[one] for one in choices[choice]])

        for place, sender in enumerate(self.senders):
            for choice, answered in enumerate(choices):
                if sender in self._secrets:
                    break
                if should_stop():
                    raise Stopped
                shares = {roster.points[one]: self._shares[one][place] for one in answered}
                with contextlib.suppress(BadShares):
                    self._secrets[sender] = self._checked(sender, interpolation(choice).secret(shares))
            else:
                if sender not in self._secrets:
                    raise BadShares(
                        f"{len(known)} clients have answered with shares of client {sender}'s secret that do not give "
                        f"what it has advertised"
                    )
        return [self._secrets[sender] for sender in self.senders]

    def _checked(self, sender: int, secret: bytes) -> bytes:
        """The secret of a sender. Raises BadShares: it is another one."""
        member = self._entered().member(sender)
        if sender in self.survivors:
            is_right = hmac.compare_digest(commitment(secret), member.commitment)
        else:
            is_right = _masking_key(secret).public_key().public_bytes_raw() == member.masking
        if not is_right:
            raise BadShares(f"not what client {sender} has advertised")
        return secret

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
                yield pair_seed(key, sender, roster.member(survivor), roster), survivor < sender

    def _entered(self) -> Roster:
        if self.roster is None:
            raise NotInProtocol("there is no roster yet")
        return self.roster

    def _check_enough(
        self, found: Collection[int], needed: int, did: str, end: str = "Nothing was revealed"
    ) -> None:  # fmt: skip
        if len(found) < needed:
            raise TooFewMembers(
                f"secure aggregation: {len(found)} clients have {did}, the threshold is {needed}. {end}"
            )


def _masking_key(secret: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(secret)
