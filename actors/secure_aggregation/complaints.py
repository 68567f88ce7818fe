"""Judge complaints: a client reports that it cannot use the shares which another one has sealed for it.

A complaint reveals nothing, and proves nothing: either the sender has sealed something else, or the receiver lies. To
open the share in question would not be safe, as a Controller that damages shares on their way would be shown them all.
But each complaint is about two clients of which at least one lies (a dispute, as in Beerliova-Trubiniova and Hirt,
TCC 2006), and an honest client is in dispute with liars alone. So two rules name liars:

    1. More than half of the members complain about it. That is sound while at most half of the members lie.
    2. It is in dispute with more of the others than there may be liars. This is the first rule of Buss for vertex
       covers, and sound while at most ``max(1, members - threshold)`` lie. More silent ones end an attempt anyway.

With more liars than that, rule 2 contradicts itself and names none. A complaint that names none is no harm as long as
the threshold of members can use the shares: then the sum is made without the share in question.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Judgement(NamedTuple):
    """Holds what follows from the complaints of an attempt.

    Attributes:
        liars: the members that lie, or whose software is broken, each with the reason.
        disputed: members of which some lie, and nobody knows which: the attempt cannot go on with all of them.
        is_blocked: too few members can use the shares of some member. The attempt has failed.
    """

    liars: Mapping[int, str]
    disputed: frozenset[int]
    is_blocked: bool


def judge(members: Collection[int], threshold: int, complaints: Mapping[int, Collection[int]]) -> Judgement:
    """Judge the complaints of an attempt.

    Args:
        members: client ids of those that have shared. threshold: shares that reveal a secret.
        complaints: for a member the others whose shares it cannot use.
    """
    about = {one: {by for by, senders in complaints.items() if one in senders} for one in members}
    liars = {
        one: f"{len(by)} of {len(members) - 1} other clients cannot use the shares that it has sealed for them"
        for one, by in about.items()
        if 2 * len(by) > len(members)
    }
    liars |= _by_disputes(about, liars, max(1, len(members) - threshold) - len(liars))
    left = set(members).difference(liars)
    blocked = [one for one, by in about.items() if len(left - by) < threshold]
    disputed = {each for one in blocked if one in left and (by := about[one] & left) for each in (one, *by)}
    return Judgement(liars, frozenset(disputed), bool(blocked))


def _by_disputes(about: Mapping[int, set[int]], known: Collection[int], most_liars: int) -> dict[int, str]:
    """Name members by rule 2, of which at most ``most_liars`` lie beside the ``known`` ones."""
    found: dict[int, str] = {}
    while most_liars > len(found):
        left = about.keys() - known - found.keys()
        with_whom = {one: {other for other in left if other in about[one] or one in about[other]} for one in left}
        new = {one for one, others in with_whom.items() if len(others) > most_liars - len(found)}
        if len(new) > most_liars - len(found):
            return {}
        if not new:
            break
        for one in sorted(new):
            by = len(about[one] & left)
            found[one] = (
                f"it is in dispute with {len(with_whom[one])} of {len(about) - 1} other clients: {by} cannot use its "
                f"shares, and it says so of {len(with_whom[one] - about[one])} more"
            )
    return found
