"""What a client has helped to unmask: the sums of a round's attempts are of the same updates, and can be combined.

The sum of clients A, B, C and D less that of A, B and C is the update of D. Each sum by itself was one that may be
known, in an attempt of its own. So a client remembers the survivors for whom it has answered, and answers for no others
where some combination of these sums would be of fewer clients than it asks for. This goes beyond the protocol of
Bonawitz et al. (CCS 2017), in which each update is masked once.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

from gradbus.actors.secure_aggregation.keys import MIN_MEMBERS, NotInProtocol

MAX_SETS = 4  # of one round: up to here the coefficients below give every combination of fewest clients
_COEFFICIENTS = (-2, -1, 0, 1, 2)
_MAX_ROUNDS = 64


def fewest_clients(sets: Sequence[Collection[int]]) -> int:
    """The least number of clients in a combination, with any factors, of the sums over these sets, at most 4.

    A combination is without the clients of as many patterns of membership as its factors let vanish. One of fewest
    clients lets those of a hyperplane vanish that is spanned by vectors of zeros and ones; the factors are then
    determinants of a matrix of zeros and ones, with at most 3 rows: within -2 and 2 (Hadamard).
    """
    assert len(sets) <= MAX_SETS, "with more sets larger coefficients are needed"
    patterns = Counter(tuple(one in found for found in sets) for one in set().union(*sets))
    counts = (
        sum(count for pattern, count in patterns.items() if sum(itertools.compress(factors, pattern)))
        for factors in itertools.product(_COEFFICIENTS, repeat=len(sets))
    )
    return min(count for count in counts if count)


@dataclass(slots=True)
class _Answered:
    """Holds the sets of one round. ``terms``: of the roster: with others the same updates have other weights, other
    roundings, or another limit, and many of these would show how single ones lie."""

    terms: Hashable
    sets: list[frozenset[int]] = field(default_factory=list)


class AnsweredSets:
    """The survivors for whom one client has answered, by round, for as long as its process runs."""

    def __init__(self, least_members: int = MIN_MEMBERS) -> None:
        """``least_members``: no combination of sums may be of fewer."""
        self._least = max(MIN_MEMBERS, least_members)
        self._rounds: OrderedDict[Hashable, _Answered] = OrderedDict()

    def check(self, name: Hashable, terms: Hashable, survivors: Collection[int]) -> None:
        """Raises NotInProtocol: with what was answered before in the round of this name, that shows too much.
        ``terms``: of the roster of the attempt."""
        answered, found = self._rounds.get(name), frozenset(survivors)
        if answered is None:
            return
        if answered.terms != terms:
            raise NotInProtocol(
                "a sum with another cap on samples, or in other steps, after one of the same round: both would show "
                "single updates. Start this client again if the round has to go on with others"
            )
        if found in answered.sets:
            return
        count = 0 if len(answered.sets) == MAX_SETS else fewest_clients([*answered.sets, found])
        if count < self._least:
            raise NotInProtocol(
                f"the sum of {len(found)} clients, with {len(answered.sets)} sums of the same round that this client "
                f"has helped to unmask, would show that of {count or 'fewer'}: it asks for {self._least}"
            )

    def note(self, name: Hashable, terms: Hashable, survivors: Collection[int]) -> None:
        """An answer for these survivors goes out. It has been checked."""
        answered, found = self._rounds.setdefault(name, _Answered(terms)), frozenset(survivors)
        if found not in answered.sets:
            answered.sets.append(found)
        while len(self._rounds) > _MAX_ROUNDS:
            self._rounds.popitem(last=False)
