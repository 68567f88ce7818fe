"""The agreement on generations, on networks that lose, delay, repeat and cut off, with processes that die and come
again: thousands of schedules, each from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from gradbus.runtime.collectives.agreement import GenerationAgreement, MemberId, TwoMemberships
from gradbus.runtime.wire.control import GroupView

TRAITS = {"model": 1, "settings": 2}


def make(
    number: int,
    start: int = 1,
    *,
    founders: int = 0,
    kind: type[GenerationAgreement] = GenerationAgreement,
    **options: Any,
) -> Any:
    limits = {"min_world": 1, "max_world": 4, "traits": TRAITS} | options
    return kind("world", MemberId(number, start), founders=founders, **limits)


@dataclass
class Network:
    """Processes and what is on its way between them. Time goes on in steps; all that happens follows from the seed."""

    seed: int = 0
    kind: type[GenerationAgreement] = GenerationAgreement
    loss: float = 0.0
    max_delay: int = 3
    min_world: int = 1
    max_world: int = 4
    now: int = 0
    alive: dict[MemberId, GenerationAgreement] = field(default_factory=dict)
    dead: set[MemberId] = field(default_factory=set)
    chosen: dict[int, tuple[MemberId, ...]] = field(default_factory=dict)
    committed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.messages: list[tuple[int, MemberId, MemberId, GroupView]] = []
        self.sides: dict[MemberId, int] = {}  # of a partition
        self.starts = 0

    def start(self, number: int, *, founders: int = 0, **options: Any) -> GenerationAgreement:
        self.starts += 1
        limits = {"min_world": self.min_world, "max_world": self.max_world} | options
        process: GenerationAgreement = make(number, self.starts, founders=founders, kind=self.kind, **limits)
        self.alive[process.me] = process
        return process

    def kill(self, member: MemberId) -> None:
        del self.alive[member]
        self.dead.add(member)

    def linked(self, one: MemberId, other: MemberId) -> bool:
        return self.sides.get(one, 0) == self.sides.get(other, 0)

    def step(self) -> None:
        """A tenth of a second."""
        self.now += 1
        for process in list(self.alive.values()):
            process.tick(self.now / 10)
            view = process.next_view()
            for other in self.alive:
                if other != process.me and self.random.random() >= self.loss:
                    for _ in range(1 + (self.random.random() < 0.1)):
                        delay = self.random.randint(1, self.max_delay)
                        self.messages.append((self.now + delay, process.me, other, view))
        due = [message for message in self.messages if message[0] <= self.now]
        self.messages = [message for message in self.messages if message[0] > self.now]
        self.random.shuffle(due)
        for _, sender, receiver, view in due:
            if receiver in self.alive and self.linked(sender, receiver):
                process = self.alive[receiver]
                before = process.generation, process.members
                process.receive(sender, view)
                if (process.generation, process.members) != before:  # all that is checked
                    self.check()
        self.check()

    def check(self) -> None:
        """One list for each number, and no step of a generation after one of a later generation."""
        for process in self.alive.values():
            if process.generation:
                first = self.chosen.setdefault(process.generation, process.members)
                assert first == process.members, f"two memberships of generation {process.generation}"
        for generation, members in list(self.chosen.items()):
            here = [self.alive.get(member) for member in members]
            if all(process is not None and process.generation == generation for process in here):
                assert generation >= self.committed, f"generation {generation} goes on beside {self.committed}"
                self.committed = generation

    def run(self, until: Callable[[], bool], *, steps: int = 300) -> None:
        for _ in range(steps):
            if until():
                return
            self.step()
        pytest.fail(f"not within {steps} steps: {[process.waits_for for process in self.alive.values()]}")

    def notice(self) -> None:
        """All processes learn which others are dead, and which they do not reach."""
        for process in self.alive.values():
            for member in self.dead:
                process.lost(member, certain=True)

    def agree(self, *processes: GenerationAgreement) -> bool:
        """Whether these are exactly the members of the newest generation of all of them."""
        want = {process.me for process in processes}
        return all(set(p.members) == want and p.generation == max(self.chosen) for p in processes)


def founded(count: int = 3, **options: Any) -> tuple[Network, list[GenerationAgreement]]:
    network = Network(**options)
    processes = [network.start(number, founders=count) for number in range(count)]
    network.run(lambda: network.agree(*processes))
    return network, processes


def test_founders_make_the_first_generation_once_all_are_there() -> None:
    network = Network()
    first = [network.start(number, founders=3) for number in (0, 1)]
    for _ in range(30):
        network.step()
    assert not first[0].generation
    assert first[0].waits_for == "the processes [2] of 3"
    last = network.start(2, founders=3)
    network.run(lambda: network.agree(*first, last))
    assert [process.rank for process in (*first, last)] == [0, 1, 2]
    assert network.chosen.keys() == {1}


def test_one_that_joins_takes_the_place_of_a_founder_that_dies_before_the_first_generation() -> None:
    network = Network(min_world=3)
    first, lost = (network.start(number, founders=3) for number in (0, 1))
    for _ in range(10):
        network.step()
    network.kill(lost.me)
    network.notice()
    again, last = network.start(1), network.start(2, founders=3)
    network.run(lambda: network.agree(first, again, last))
    assert [process.rank for process in (first, again, last)] == [0, 1, 2]


def test_founders_are_waited_for_until_the_last_call_once_min_world_are_there_and_join_later() -> None:
    network = Network(min_world=2)
    first = network.start(0, founders=3)
    first.last_call_s = 2.0
    for _ in range(50):  # of a tenth of a second
        network.step()
    second = network.start(1, founders=3)
    for _ in range(15):
        network.step()
    assert not first.generation
    network.run(lambda: network.agree(first, second))
    last = network.start(2, founders=3)  # it was not lost, as nobody had seen it
    for process in (first, second):
        process.resting = True
    network.run(lambda: network.agree(first, second, last))
    assert network.chosen.keys() == {1, 2}


@pytest.mark.parametrize("certain", [True, False], ids=["dead", "not reached"])
def test_founders_go_on_without_one_that_is_lost_before_the_first_generation_if_min_world_are_left(
    certain: bool,
) -> None:
    network = Network(min_world=2)
    first, lost = (network.start(number, founders=3) for number in (0, 1))
    for _ in range(10):
        network.step()
    network.kill(lost.me)
    for _ in range(10):
        network.step()
    assert first.waits_for == "the processes [2] of 3"
    first.lost(lost.me, certain=certain)
    assert first.waits_for == "the processes [1, 2] of 3"  # alone it is one too few
    last = network.start(2, founders=3)
    network.run(lambda: network.agree(first, last))
    assert network.chosen.keys() == {1}
    again = network.start(1)
    for process in (first, last):
        process.resting = True
    network.run(lambda: network.agree(first, last, again))


def test_a_founder_that_comes_back_before_the_first_generation_is_in_it() -> None:
    network = Network()
    first, second = (network.start(number, founders=3) for number in (0, 1))
    for _ in range(10):
        network.step()
    first.lost(second.me, certain=False)
    for _ in range(10):
        network.step()
    last = network.start(2, founders=3)
    network.run(lambda: network.agree(first, second, last))
    assert network.chosen.keys() == {1}


def test_founders_whose_first_one_dies_before_the_first_generation_know_that_none_will_come() -> None:
    network = Network()
    first, second = (network.start(number, founders=3) for number in (0, 1))
    for _ in range(10):
        network.step()
    network.kill(first.me)
    network.notice()
    third = network.start(2, founders=3)
    third.lost(first.me, certain=True)
    assert second.founder_has_died
    assert third.founder_has_died
    assert second.waits_for.startswith("process 0, which alone makes the first generation")
    again = network.start(0, founders=3)  # started again as a founder it can make one
    network.run(lambda: network.agree(again, second, third))
    assert not second.founder_has_died


def test_survivors_of_a_death_agree_on_the_next_generation_and_keep_their_order() -> None:
    network, (a, b, c) = founded()
    network.kill(a.me)
    network.notice()
    network.run(lambda: network.agree(b, c), steps=15)
    assert (b.generation, b.rank, c.rank) == (2, 0, 1)


def test_the_last_of_two_goes_on_alone_only_if_the_other_is_certainly_dead() -> None:
    network, (a, b) = founded(2)
    network.kill(a.me)
    for step in range(50):
        if step == 5:  # what it had sent has come
            b.lost(a.me, certain=False)
        network.step()
    assert b.generation == 1
    assert b.waits_for == "a majority: it reaches 1 of the 2 members of generation 1"
    network.notice()
    network.run(lambda: network.agree(b))


def test_more_than_half_dead_at_once_leave_a_minority_that_waits() -> None:
    network, (a, b, c) = founded()
    network.kill(a.me)
    network.kill(b.me)
    network.notice()
    for _ in range(50):
        network.step()
    assert c.generation == 1
    assert "majority" in c.waits_for


def test_below_min_world_the_survivors_wait_for_one_more() -> None:
    network, (a, b) = founded(2, min_world=2)
    network.kill(b.me)
    network.notice()
    for _ in range(30):
        network.step()
    assert a.generation == 1
    assert a.waits_for == "1 more to join: at least 2 members are needed"
    again = network.start(1)
    network.run(lambda: network.agree(a, again))
    assert a.rank == 0


def test_a_process_joins_when_the_members_rest_and_not_before() -> None:
    network, members = founded(2)
    joiner = network.start(5)
    network.run(lambda: members[0].change_is_wanted)
    for _ in range(20):
        network.step()
    assert members[0].generation == 1
    for member in members:
        member.resting = True
    network.run(lambda: network.agree(*members, joiner))
    assert joiner.rank == 2
    assert not any(member.resting or member.change_is_wanted for member in members)


def test_members_that_rest_go_on_in_a_next_generation_although_nobody_joins() -> None:
    network, members = founded(2)
    for member in members:
        member.resting = True
    network.run(lambda: all(member.generation == 2 for member in members))
    assert network.agree(*members)


def test_one_beyond_max_world_is_a_spare_and_takes_the_place_of_one_that_dies() -> None:
    network, members = founded(2, max_world=2)
    spare = network.start(2)
    network.run(lambda: members[0].waiting == 1)
    assert not members[0].change_is_wanted
    assert "a place" in spare.waits_for
    network.kill(members[1].me)
    network.notice()
    network.run(lambda: network.agree(members[0], spare))


def test_a_member_that_leaves_is_not_in_the_next_generation_and_does_not_join_again() -> None:
    network, (a, b, c) = founded()
    a.leaving = True
    network.run(lambda: b.change_is_wanted)
    for member in (a, b, c):
        member.resting = True
    network.run(lambda: network.agree(b, c) and not a.is_member)
    for _ in range(20):
        network.step()
    assert b.generation == 2


@pytest.mark.parametrize("max_world", [2, 4], ids=["a spare", "one that joins"])
def test_members_that_all_leave_may_go_although_somebody_waits_for_a_place(max_world: int) -> None:
    network, members = founded(2, max_world=max_world)
    network.start(2)
    network.run(lambda: all(member.waiting == 1 for member in members))
    for member in members:
        member.leaving = member.resting = True
    network.run(lambda: all(member.waits_for for member in members))  # who leaves, and waits, may go
    assert members[0].waits_for == "1 more to join: at least 1 members are needed"
    for _ in range(20):
        network.step()
    assert {member.generation for member in members} == {1}


def test_an_older_view_that_comes_late_is_not_taken_for_the_newer_one() -> None:
    _, (one, two, _) = founded()
    older = two.next_view()
    two.leaving = True
    one.receive(two.me, two.next_view())
    assert one.change_is_wanted
    one.receive(two.me, older)
    assert one.change_is_wanted


def test_one_that_does_not_fit_stays_outside_and_knows_why() -> None:
    network, members = founded(2)
    stranger = network.start(2, traits={**TRAITS, "model": 9})
    said = [stranger.waits_for]

    def is_refused() -> bool:
        said.append(stranger.waits_for)
        return bool(stranger.misfit)

    network.run(is_refused)
    assert stranger.misfit == "model"
    assert set(said) == {"a group that it can join", ""}  # and no place, which it never gets
    for _ in range(10):
        network.step()
    assert not members[0].change_is_wanted


def test_one_that_is_suspected_wrongly_is_left_out_and_joins_again() -> None:
    network, (a, b, c) = founded()
    a.suspect([2])
    b.suspect([2])
    network.run(lambda: network.agree(a, b))
    network.run(lambda: a.change_is_wanted)
    for member in (a, b):
        member.resting = True
    network.run(lambda: network.agree(a, b, c))


def test_of_two_partitions_only_the_larger_goes_on_and_the_other_joins_when_they_meet_again() -> None:
    network, (a, b, c) = founded()
    network.sides = {c.me: 1}
    for one, other in ((a, c), (b, c), (c, a), (c, b)):
        one.lost(other.me, certain=False)
    network.run(lambda: network.agree(a, b))
    assert c.generation == 1
    assert "majority" in c.waits_for
    network.sides = {}
    network.run(lambda: a.change_is_wanted)
    assert not c.is_member
    a.resting = b.resting = True
    network.run(lambda: network.agree(a, b, c))


def test_a_process_that_is_started_again_never_founds_a_second_group() -> None:
    network, (a, b) = founded(2)
    network.kill(a.me)
    again = network.start(0, founders=2)
    other = network.start(3, founders=0)
    network.sides = {again.me: 1, other.me: 1}
    for _ in range(100):
        network.step()
    assert not again.generation
    network.sides = {}
    network.run(lambda: again.generation == 1 and not again.is_member)
    assert b.generation == 1


def test_two_groups_of_one_name_are_an_error_of_both() -> None:
    one, other = make(0, 1, founders=1), make(0, 2, founders=1)
    one.tick(0.0)
    other.tick(0.0)
    with pytest.raises(TwoMemberships, match="two groups of this name"):
        one.receive(other.me, other.next_view())


def play(seed: int, kind: type[GenerationAgreement] = GenerationAgreement) -> Network:
    """Half a minute in which anything may happen, then one in which nothing does."""
    chance = random.Random(seed)
    count = chance.randint(2, 5)
    network = Network(
        seed,
        kind,
        loss=chance.choice([0.0, 0.2, 0.5]),
        max_delay=chance.choice([1, 4, 12]),
        max_world=chance.randint(count, 6),
    )
    for number in range(count):
        network.start(number, founders=count)
    for _ in range(chance.randint(100, 300)):
        members = sorted(network.alive)
        one = network.alive[chance.choice(members)]
        match chance.randint(0, 40):
            case 0 if len(network.alive) > 2:
                network.kill(one.me)
            case 1 if len(network.alive) < 8:
                network.start(chance.randint(0, 9))
            case 2:
                network.sides = {member: chance.randint(0, 1) for member in members}
            case 3:
                network.sides = {}
            case 4 if one.is_member:
                one.resting = True
            case 5 if len(network.alive) > 3:
                one.leaving = True
            case 6 | 7 if one.is_member:
                one.suspect([chance.randrange(len(one.members))])
            case 8 | 9 | 10:
                other = chance.choice([*members, *sorted(network.dead)])
                one.lost(other, certain=other in network.dead)
            case 11 if network.dead:
                network.notice()
        network.step()
    network.sides, network.loss = {}, 0.0
    return network


def settle(network: Network) -> None:
    """Where most members of the newest generation that a process knows are alive, all that live come to one."""
    for process in network.alive.values():
        process.leaving = False
    for _ in range(400):
        newest = max(network.alive.values(), key=lambda process: process.generation).members
        if 2 * sum(member in network.alive for member in newest) <= len(newest):
            return  # it was decided before most of its members died: those that are left have to wait
        network.notice()
        for process in network.alive.values():
            process.resting = process.is_member and (process.change_is_wanted or process.resting)
        network.step()
        generations = {process.generation for process in network.alive.values()}
        want = min(len(network.alive), network.max_world)
        if len(generations) == 1 and len(newest) == want and all(member in network.alive for member in newest):
            return
    pytest.fail(f"no progress: {[(p.me, p.generation, p.members, p.waits_for) for p in network.alive.values()]}")


@pytest.mark.parametrize("block", [0, 1, 2, *(pytest.param(block, marks=pytest.mark.nightly) for block in (3, 4))])
def test_whatever_happens_there_is_one_membership_a_generation_and_the_living_go_on(block: int) -> None:
    generations = 0
    for seed in range(100 * block, 100 * block + 100):
        network = play(seed)
        settle(network)
        generations += max(network.chosen, default=0)
    assert generations > 200  # else nothing was tried


class HalfDecides(GenerationAgreement):
    def _is_quorum(self, of: Any) -> bool:
        return 2 * sum(member in of for member in self.members) >= len(self.members)


class TheDeadAgree(GenerationAgreement):
    def _is_quorum(self, of: Any) -> bool:
        return all(member in of or member in self._gone for member in self.members)


class ForgetsWhatWasAccepted(GenerationAgreement):
    def _value(self, promised: Any) -> Any:
        return self._target()


class ProposesWithoutPromises(GenerationAgreement):
    def _advance(self) -> None:
        if self._ballot and self._accepted != self._ballot and self._target() is not None:
            self._accepted, self._proposal = self._ballot, self._target() or ()
        super()._advance()


class FoundsAtOnce(GenerationAgreement):
    def _found(self, now_s: float) -> None:
        if self._fresh or not self._founders:
            self._adopt(1, (self.me, *self._fresh))


@pytest.mark.parametrize(
    ("kind", "first"),  # with the seed from which on to look: the first that finds it is not far
    [
        (HalfDecides, 0),
        (TheDeadAgree, 0),
        (ForgetsWhatWasAccepted, 320),
        (ProposesWithoutPromises, 40),
        (FoundsAtOnce, 0),
    ],
)
def test_the_schedules_find_what_is_wrong_with_an_agreement(kind: type[GenerationAgreement], first: int) -> None:
    def look() -> None:
        for seed in range(first, first + 60):
            play(seed, kind)

    with pytest.raises((AssertionError, TwoMemberships)):
        look()


def test_a_spare_hears_members_only_while_one_of_them_tells_its_own_view() -> None:
    member, spare, other = make(0, founders=1), make(1, 2), make(2, 3)
    member.tick(0.0)
    assert member.generation == 1
    other.receive(member.me, member.next_view())
    assert other.hears_members
    spare.receive(other.me, other.next_view())
    assert (spare.generation, spare.hears_members) == (1, False), "it knows of the members by hearsay"
    spare.receive(member.me, member.next_view())
    assert spare.hears_members
    spare.lost(member.me, certain=False)
    assert not spare.hears_members
