"""How ranks become a group, decision by decision: who is heard, who is linked, when all is formed."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Collection

import pytest

from gradbus.runtime.collectives.formation import Formation, Member
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.wire.control import GroupHello

OPTIONS = 5


def member(rank: int, incarnation: int = 100) -> Member:
    return Member(rank, incarnation + rank, f"host{rank} (process {rank})")


def formation(rank: int, world: int, incarnation: int = 100, former: Collection[int] = ()) -> Formation:
    return Formation("world", member(rank, incarnation), world, OPTIONS, former)


def tell(said_by: Formation, hears: Formation) -> bool:
    return hears.take_hello(said_by.me.rank, said_by.me.incarnation, said_by.hello_now())


def probe(sent_by: Formation, reaches: Formation) -> None:
    for topic in (0, 1):
        reaches.probe(sent_by.me.rank, topic, sent_by.digest)


def exchange(ranks: list[Formation]) -> None:
    """All say hello to all, and their probes reach all."""
    for one, other in itertools.permutations(ranks, 2):
        tell(one, other)
        if one.digest:
            probe(one, other)


def test_a_rank_alone_is_a_group_at_once() -> None:
    alone = formation(0, 1)
    assert alone.linked
    assert alone.formed
    assert alone.members == (member(0),)
    assert alone.digest != 0


def test_it_takes_hellos_then_probes_then_the_word_of_all_that_they_are_linked() -> None:
    one, other = formation(0, 2), formation(1, 2)
    assert one.digest == 0
    assert one.missing == (1,)
    tell(other, one)
    assert one.missing == ()
    assert one.digest != 0
    assert not one.linked
    tell(one, other)
    assert other.digest == one.digest
    one.probe(1, 0, one.digest)
    assert not one.linked  # one of two topics
    one.probe(1, 1, one.digest)
    assert one.linked
    assert not one.formed  # the other has not said so yet
    assert one.hello_now().linked
    probe(one, other)
    tell(one, other)
    assert other.formed
    tell(other, one)
    assert one.formed
    assert one.members == other.members == (member(0), member(1))


@pytest.mark.parametrize("seed", range(30))
def test_hellos_and_probes_in_any_order_form_one_group_with_one_hash(seed: int) -> None:
    rng = random.Random(seed)
    world = rng.randrange(2, 6)
    ranks = [formation(rank, world) for rank in range(world)]
    steps = 0
    while not all(rank.formed for rank in ranks):
        one, other = rng.sample(ranks, 2)
        if rng.random() < 0.5:
            tell(one, other)
        else:
            other.probe(one.me.rank, rng.randrange(2), one.digest)
        for rank in ranks:
            if rank.formed:  # never before everybody is linked to everybody
                assert all(linked.linked and linked.digest == rank.digest for linked in ranks)
        steps += 1
        assert steps < 5000
    assert len({rank.digest for rank in ranks}) == 1


def test_a_probe_that_comes_before_the_hello_does_not_count_until_it_is_repeated() -> None:
    one, other = formation(0, 2), formation(1, 2)
    tell(one, other)
    assert other.digest != 0
    probe(other, one)  # which does not know yet what the hash stands for
    tell(other, one)
    assert not one.linked
    probe(other, one)
    assert one.linked


def test_a_probe_is_new_once() -> None:
    one, other = formation(0, 2), formation(1, 2)
    exchange([one, other])
    exchange([one, other])
    assert one.probe(1, 0, one.digest) is False
    assert one.probe(1, 0, one.digest + 2) is False
    assert one.probe(1, 0, 0) is False


def test_a_rank_that_is_linked_among_other_members_does_not_count_as_linked() -> None:
    one, other = formation(0, 2), formation(1, 2)
    for _ in range(2):
        exchange([one, other])
    former = formation(0, 2)
    former.take_hello(1, other.me.incarnation, dataclasses.replace(other.hello_now(), members=other.digest ^ 2))
    probe(other, former)
    assert former.linked
    assert not former.formed
    tell(other, former)
    assert former.formed


def test_a_rank_that_has_left_the_formed_group_in_order_has_shown_that_all_were_linked() -> None:
    one, other = formation(0, 2), formation(1, 2)
    tell(other, one)
    assert not one.formed
    one.confirm_linked(1)
    assert one.formed


def test_a_hello_is_news_only_if_it_says_something_new() -> None:
    one, other = formation(0, 2), formation(1, 2)
    assert tell(other, one)
    assert not tell(other, one)
    tell(one, other)
    assert tell(other, one)  # it knows the members now


def test_a_rank_that_starts_again_takes_the_place_of_its_former_start_and_all_is_proven_anew() -> None:
    ranks = [formation(rank, 3) for rank in range(3)]
    for _ in range(3):
        exchange(ranks)
    assert all(rank.formed for rank in ranks)
    before = ranks[0].digest
    again = formation(2, 3, incarnation=500)
    assert tell(again, ranks[0])
    assert ranks[0].members[2].incarnation == 502
    assert ranks[0].digest not in (before, 0)
    assert not ranks[0].linked
    assert not ranks[0].formed
    probe(ranks[1], ranks[0])  # still for the former members
    assert not ranks[0].linked
    for _ in range(3):
        exchange([*ranks[:2], again])
    assert ranks[0].formed
    assert again.formed
    assert ranks[0].digest == again.digest


def test_last_words_of_a_former_start_are_not_heard() -> None:
    here, former, now = formation(0, 2), formation(1, 2, 100), formation(1, 2, 500)
    tell(now, here)
    assert tell(former, here) is False
    assert here.members[1].incarnation == 501


def test_a_rank_that_is_gone_is_waited_for_until_it_starts_again_but_not_if_it_has_already() -> None:
    here, former, now = formation(0, 2), formation(1, 2, 100), formation(1, 2, 500)
    assert here.missing == (1,)
    tell(former, here)
    here.gone(1, former.me.incarnation, "was stopped")
    assert (here.missing, here.departed) == ((), {1: "was stopped"})  # it was here
    assert here.digest == 0
    tell(now, here)
    here.gone(1, former.me.incarnation, "its process is gone")  # DDS notices the death later than the new start
    here.gone(0, here.me.incarnation, "its process is gone")
    assert (here.missing, here.departed) == ((), {})
    assert here.digest != 0


def test_a_rank_that_is_back_on_its_bus_is_not_frightened_by_its_own_former_words() -> None:
    before, stranger, now = formation(1, 2, 100), formation(1, 2, 200), formation(1, 2, 500, former=(101,))
    assert tell(before, now) is False
    assert now.missing == (0,)
    with pytest.raises(ConfigError, match="rank 1 is taken"):
        tell(stranger, now)


def test_the_later_one_of_two_processes_with_one_rank_gives_up_and_names_the_other() -> None:
    first, second = formation(1, 2, 100), formation(1, 2, 500)
    assert tell(second, first) is False
    with pytest.raises(ConfigError, match=r"rank 1 is taken by host1 \(process 1\)"):
        tell(first, second)
    assert tell(first, first) is False  # its own words


def test_a_rank_of_another_world_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 on host1 .* says world 3, this process \(rank 0\) says 2"):
        tell(formation(1, 3), formation(0, 2))


def test_a_rank_out_of_range_is_told_of_the_world_and_never_becomes_a_member() -> None:
    here = formation(0, 2)
    with pytest.raises(ConfigError, match="world 3"):
        tell(formation(2, 3), here)
    stranger = dataclasses.replace(formation(1, 2).hello_now())
    assert here.take_hello(7, 1, stranger) is False
    assert here.missing == (1,)


def test_a_rank_with_other_options_is_refused() -> None:
    other = Formation("world", member(1), 2, OPTIONS + 1)
    with pytest.raises(ConfigError, match="another version"):
        tell(other, formation(0, 2))


def test_other_groups_of_the_same_job_do_not_matter() -> None:
    other = Formation("another", member(0), 5, 9)
    here = formation(0, 2)
    assert tell(other, here) is False
    assert here.members == (member(0),)


def test_the_hash_depends_on_group_world_and_every_start() -> None:
    def digest(group: str, world: int, incarnations: list[int]) -> int:
        made = Formation(group, Member(0, incarnations[0], "h"), world, OPTIONS)
        for rank, incarnation in enumerate(incarnations[1:], 1):
            made.take_hello(rank, incarnation, GroupHello(group, world, 0, False, False, OPTIONS, "h", "", []))
        return made.digest

    digests = [
        digest("a", 2, [1, 2]),
        digest("b", 2, [1, 2]),
        digest("a", 2, [1, 3]),
        digest("a", 2, [2, 2]),
        digest("a", 3, [1, 2, 3]),
        digest("a", 2, [11, 2]),
        digest("a", 2, [1, 12]),
    ]
    assert len({*digests}) == len(digests)
    assert all(0 < value < 1 << 64 for value in digests)
    assert digest("a", 3, [1, 2]) == 0  # one is missing


def test_who_was_heard_but_is_not_linked_is_named() -> None:
    ranks = [formation(rank, 3) for rank in range(3)]
    here = ranks[0]
    assert here.unlinked == ()
    exchange(ranks)
    for one, other in itertools.permutations(ranks, 2):
        tell(one, other)
    probe(ranks[1], here)
    tell(ranks[1], here)
    assert here.missing == ()
    assert 2 in here.unlinked


def test_a_hello_fits_its_schema_whatever_the_host_is_called() -> None:
    said = Formation("g", Member(0, 1, "h" * 5000), 1, OPTIONS).hello_now()
    assert len(said.host) == 256
