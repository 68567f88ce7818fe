"""When a rank sends a hello, and what a large group costs until it has formed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter

import pytest

from gradbus.runtime.collectives.formation import MAX_REPEAT_S, NEWS_S, REPEAT_S, Formation, HelloScheduler, Member
from gradbus.runtime.wire.control import GroupHello

HELLO = GroupHello("world", 4, 0, False, False, 5, "host (process 1)", "", [])
NEWS = GroupHello("world", 4, 77, False, False, 5, "host (process 1)", "", [])


def test_the_first_hello_is_said_at_once_and_repeated_less_and_less_often() -> None:
    scheduler, now_s = HelloScheduler(4), 10.0
    assert scheduler.is_due(HELLO, now_s)
    for pauses in (2, 4, 8, 16, REPEAT_S / 4 / NEWS_S, REPEAT_S / 4 / NEWS_S):
        pause_s = pauses * 4 * NEWS_S
        assert not scheduler.is_due(HELLO, now_s + 0.9 * pause_s)
        assert scheduler.wait_s(HELLO, now_s + 0.9 * pause_s) == pytest.approx(0.1 * pause_s)
        now_s += 1.0001 * pause_s
        assert scheduler.is_due(HELLO, now_s)


def test_news_wait_for_more_news_and_no_longer() -> None:
    scheduler = HelloScheduler(4)
    assert scheduler.is_due(HELLO, 10.0)
    assert not scheduler.is_due(NEWS, 10.0 + NEWS_S)
    assert scheduler.wait_s(NEWS, 10.0 + NEWS_S) == pytest.approx(3 * NEWS_S)
    assert scheduler.is_due(NEWS, 10.0 + 4.001 * NEWS_S)
    assert not scheduler.is_due(NEWS, 10.0 + 9 * NEWS_S)
    assert scheduler.is_due(NEWS, 10.0 + 12.1 * NEWS_S)


def test_ranks_that_have_news_all_the_time_wait_longer_and_longer_for_more_of_it() -> None:
    """As while many processes start on few cores: what they say to each other must leave them the cores to start."""
    heard_s = 200e-6  # to decode a hello that lists who is linked, and to note it
    for world in (16, 24, 48):
        scheduler, now_s, said = HelloScheduler(world), 0.0, 0
        while now_s < 60.0:
            news = GroupHello("world", world, 77, False, False, said, "host (process 1)", "", [])
            now_s += max(1e-6, scheduler.wait_s(news, now_s))
            said += scheduler.is_due(news, now_s)
        assert said * world * (world - 1) * heard_s / 60.0 < 0.6  # of one core
    scheduler.is_due(NEWS, 1000.0)  # after a while without any the next one goes out soon
    assert scheduler.wait_s(HELLO, 1000.0) == pytest.approx(world * NEWS_S)


def test_who_was_met_hears_what_is_not_new() -> None:
    scheduler = HelloScheduler(4)
    assert scheduler.is_due(HELLO, 10.0)
    scheduler.met = True
    assert scheduler.is_due(HELLO, 10.0 + 4.001 * NEWS_S)
    assert not scheduler.met


def test_news_never_wait_longer_than_what_is_said_again() -> None:
    scheduler = HelloScheduler(1024)
    assert scheduler.is_due(HELLO, 10.0)
    assert scheduler.is_due(NEWS, 10.0 + MAX_REPEAT_S)


def test_many_ranks_that_wait_say_it_again_so_seldom_that_hearing_it_takes_a_fifth_of_one_core() -> None:
    heard_s = 70e-6
    for world in (16, 24, 48):
        scheduler, now_s, said = HelloScheduler(world), 0.0, 0
        while now_s < 60.0:
            now_s += max(1e-6, scheduler.wait_s(HELLO, now_s))
            said += scheduler.is_due(HELLO, now_s)
        assert said * world * (world - 1) * heard_s / 60.0 < 0.2
        assert said > 60.0 / MAX_REPEAT_S


def test_each_rank_gets_a_probe_when_it_knows_the_members_and_again_from_time_to_time() -> None:
    scheduler = HelloScheduler(4)
    assert scheduler.probes(7, [1], all_know=False, now_s=10.0) == ([1], False)
    assert scheduler.probes(7, [1], all_know=False, now_s=10.01) == ([], False)
    assert scheduler.probes(7, [1, 2, 3], all_know=True, now_s=10.02) == ([2, 3], True)
    assert scheduler.probes(7, [1, 2, 3], all_know=True, now_s=10.03) == ([], False)
    assert scheduler.probes(7, [2], all_know=True, now_s=10.0 + REPEAT_S) == ([2], True)
    assert scheduler.probes(7, [], all_know=True, now_s=11.0) == ([], False)


def test_a_rank_that_says_again_that_it_is_not_linked_gets_another_probe_but_not_at_once() -> None:
    scheduler = HelloScheduler(4)
    assert scheduler.probes(7, [1, 2, 3], all_know=True, now_s=10.0) == ([1, 2, 3], True)
    assert not scheduler.probe_again(1, 10.0 + NEWS_S)
    assert scheduler.probe_again(1, 10.0 + 4.001 * NEWS_S)
    assert not scheduler.probe_again(1, 10.0 + 9 * NEWS_S)  # it is due, and needs no reminding
    assert scheduler.probes(7, [1, 2, 3], all_know=True, now_s=10.0 + 9 * NEWS_S) == ([1], True)


def test_many_that_say_again_that_they_are_not_linked_get_a_probe_each_and_share_the_one_to_all() -> None:
    world, now_s = 25, 10.0
    scheduler, others = HelloScheduler(world), range(1, world)
    scheduler.probes(7, others, all_know=True, now_s=now_s)
    sent, to_all = Counter[int](), 0
    for rank in others:  # one after the other, within 0.096 s, as of ranks that wait for one that is late
        now_s += 4 * NEWS_S
        if scheduler.probe_again(rank, now_s):
            ranks, is_to_all = scheduler.probes(7, others, all_know=True, now_s=now_s)
            sent.update(ranks)
            to_all += is_to_all
    assert sent == {rank: 1 for rank in others if 4 * rank >= world}
    assert to_all == 3  # with one for each of them, ranks that wait would cost N^3 scheduler


def test_probes_for_other_members_are_sent_anew_at_once() -> None:
    scheduler = HelloScheduler(3)
    assert scheduler.probes(7, [1, 2], all_know=True, now_s=10.0) == ([1, 2], True)
    assert scheduler.probes(9, [1, 2], all_know=True, now_s=10.001) == ([1, 2], True)


class Hall:
    """Ranks that hear each other after random times; every hello may wake its hearers, as in a process of its own."""

    def __init__(self, world: int, seed: int, loss: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.loss = loss
        self.ranks = [Formation("world", Member(r, 100 + r, f"host{r}"), world, 5) for r in range(world)]
        self.scheduler = [HelloScheduler(world) for _ in range(world)]
        self.count: Counter[str] = Counter()
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, tuple[int, ...], GroupHello | None]] = []

    def later(self, at_s: float, what: str, who: tuple[int, ...], hello: GroupHello | None = None) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), what, who, hello))

    def send(self, now_s: float, what: str, who: tuple[int, ...], hello: GroupHello | None = None) -> None:
        self.count[what] += 1
        if self.rng.random() >= self.loss:
            self.later(now_s + self.rng.uniform(0.0002, 0.003), what, who, hello)

    def run(self) -> float:
        """Seconds until all have formed the group."""
        for rank in range(len(self.ranks)):
            self.later(self.rng.uniform(0.0, 0.3), "wake", (rank,))
        formed: set[int] = set()
        while len(formed) < len(self.ranks):
            now_s, _, what, who, hello = heapq.heappop(self._events)
            rank, said_by = who[0], self.ranks[who[-1]]
            here = self.ranks[rank]
            if what == "hello":
                assert hello is not None
                was_known = here.knows(who[-1], said_by.me.incarnation)
                if here.take_hello(who[-1], said_by.me.incarnation, hello):
                    self.scheduler[rank].met |= not was_known
                elif hello.linked or not self.scheduler[rank].probe_again(who[-1], now_s):
                    continue
            elif what == "probe" and not here.probe(who[-1], who[1], said_by.digest):
                continue
            self.speak(rank, now_s)
            if here.formed and rank not in formed:
                formed.add(rank)
                self.publish(rank, now_s)
        return now_s

    def publish(self, rank: int, now_s: float) -> None:
        for other in range(len(self.ranks)):
            if other != rank:
                self.send(now_s, "hello", (other, rank), self.ranks[rank].hello_now())

    def speak(self, rank: int, now_s: float) -> None:
        here, scheduler = self.ranks[rank], self.scheduler[rank]
        hello = here.hello_now()
        if scheduler.is_due(hello, now_s):
            self.publish(rank, now_s)
        ranks, to_all = scheduler.probes(here.digest, here.awaiting_probes, all_know=here.all_know, now_s=now_s)
        for other in range(len(self.ranks)):
            for topic, gets_one in ((0, to_all and other != rank), (1, other in ranks)):
                if gets_one:
                    self.send(now_s, "probe", (other, topic, rank))
        self.later(now_s + scheduler.wait_s(hello, now_s) + 1e-9, "wake", (rank,))


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_start_in_any_order_form_a_group_though_words_are_lost(seed: int) -> None:
    assert Hall(2 + seed % 7, seed, loss=0.1).run() < 3.0


@pytest.mark.parametrize("world", [8, 24])
def test_a_large_group_forms_with_a_number_of_words_that_grows_with_its_pairs(world: int) -> None:
    """12 hellos in 0.3 s of starting and some more for news, and two probes, for each pair and direction."""
    hall = Hall(world, seed=1)
    assert hall.run() < 1.0
    pairs = world * (world - 1)
    assert hall.count["probe"] <= 4 * pairs
    assert hall.count["hello"] <= 30 * pairs
