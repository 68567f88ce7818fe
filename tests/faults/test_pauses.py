"""No live process is taken for dead, and a death is known at once; ``make bench PART=pauses`` has more."""

from __future__ import annotations

import time

import pytest
from patience import soonest, until
from pauses import (
    Disturbance,
    GroupKind,
    crashes,
    forge_goodbyes,
    groups,
    hold_gil,
    starve_one,
    stop_all,
    stop_one,
    survive,
)

pytestmark = [pytest.mark.slow, pytest.mark.faults]

KEY = "gradbus-key-1 " + "6b" * 32
KINDS = (GroupKind(2, False), GroupKind(3, True, KEY))
DISTURBANCES: tuple[Disturbance, ...] = (
    stop_one(1.2),
    stop_all(1.5),
    hold_gil(2.0),
    starve_one(2.0, burner_nice=10),  # the tests of other workers go on
    forge_goodbyes(2, 0.5),
)


def test_ranks_that_are_stopped_starved_or_said_to_be_gone_are_waited_for_and_all_go_on(domain: int) -> None:
    with groups(KINDS, domain) as made:
        for disturb in DISTURBANCES:
            assert list(survive(made, disturb, recover_s=30.0).values()) == [""] * len(made)


def test_the_others_miss_a_killed_rank_at_once_whatever_the_lease_is_also_while_they_wait_for_it(domain: int) -> None:
    assert soonest(lambda: one_of_each_is_killed(domain), 2.0) < 2.0  # 0.3 s on a machine that does nothing else


def one_of_each_is_killed(domain: int) -> float:
    """Seconds until all others know."""
    with groups(KINDS, domain) as made:
        for group in made:
            stop_one(0.0)([group])
            group.ranks[-1].process.kill()
        killed_s = time.monotonic()
        for group in made:
            others = group.ranks[:-1]
            until(lambda group=group, others=others: group.trouble and all(rank.failed for rank in others))  # type: ignore[misc]
            assert all(rank.failed.startswith("PeerLost") for rank in others)
        return max(rank.failed_s for group in made for rank in group.ranks[:-1]) - killed_s


def test_processes_that_are_stopped_while_they_find_each_other_do_not_crash(domain: int) -> None:
    assert crashes(24, domain, None, buses=6, for_s=0.5) == 0
