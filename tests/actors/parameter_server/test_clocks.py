"""Who may go on: on thousands of random schedules, in which workers are slow, meet, and die."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from gradbus.actors.parameter_server.clocks import Clocks, Decision, ProtocolError

STEPS, MEETS_EVERY = 12, 5


def meets(step: int) -> bool:
    """Whether all wait for all after this step, from 0."""
    return (step + 1) % MEETS_EVERY == 0 or step + 1 == STEPS


class Run:
    """A server and its workers, whose messages arrive in any order. Each step of a worker is checked."""

    def __init__(self, seed: int, *, deaths: bool) -> None:
        self.random = random.Random(seed)
        self.staleness = self.random.choice([None, 0, 1, 4])
        workers = self.random.randint(1, 5)
        self.clocks = Clocks(workers, self.staleness)
        self.step = dict.fromkeys(range(workers), 0)
        self.running = set(range(workers))
        self.pushed: dict[int, tuple[int, bool]] = {}  # by worker, what the server has not applied
        self.applied: Counter[tuple[int, int]] = Counter()
        self.sent: set[tuple[int, int]] = set()
        self.deaths = deaths

    def play(self) -> None:
        while any(step < STEPS for step in self.step.values()):
            assert self.running, f"nobody goes on: {self.step}"
            rank = self.random.choice(sorted(self.running))
            if self.deaths and len(self.step) > 1 and self.random.random() < 0.03:
                self.running.discard(rank)
                del self.step[rank]
                self.pushed.pop(rank, None)
                self.take(self.clocks.lose(rank))
            elif self.step[rank] < STEPS:
                self.push(rank)
            else:
                self.running.discard(rank)

    def push(self, rank: int) -> None:
        step, has_gradient = self.step[rank], self.random.random() < 0.9
        if self.staleness is not None:
            assert step - min(self.step.values()) <= self.staleness
        self.running.discard(rank)
        self.pushed[rank] = (step, has_gradient)
        if has_gradient:
            self.sent.add((rank, step))
        self.step[rank] += 1
        self.take(self.clocks.push(rank, step, has_gradient=has_gradient, meets=meets(step)), by=rank)

    def take(self, decision: Decision, by: int | None = None) -> None:
        assert list(decision.apply) == sorted(decision.apply)
        for rank in decision.apply:
            step, has_gradient = self.pushed.pop(rank)
            assert has_gradient
            self.applied[rank, step] += 1
        if self.staleness is None and decision.release:
            assert set(decision.release) == set(self.step), "a version is for all"
            assert len(set(self.step.values())) == 1
        if self.staleness is not None and by is not None and self.sent & {(by, self.step[by] - 1)}:
            assert decision.apply == (by,), "applied on arrival"
        for rank in decision.release:
            if meets(self.step[rank] - 1):
                assert len(set(self.step.values())) == 1, "all have met"
            self.running.add(rank)


@pytest.mark.parametrize("deaths", [False, True])
def test_nobody_waits_for_ever_or_runs_ahead_and_each_gradient_counts_once(deaths: bool) -> None:
    for seed in range(1500):
        run = Run(seed, deaths=deaths)
        run.play()
        assert set(run.applied.values()) <= {1}
        lived = {(rank, step) for rank, step in run.sent if rank in run.step}
        assert lived <= set(run.applied), "every gradient of a worker that lived to the end"
        assert run.clocks.slowest == STEPS
        assert run.clocks.staleness_counts.total() == run.applied.total()


def test_the_run_goes_on_down_to_the_smallest_number_of_workers() -> None:
    clocks = Clocks(3, 4, needed=2)
    clocks.lose(0)
    assert clocks.has_enough
    clocks.lose(2)
    assert not clocks.has_enough
    assert clocks.live == (1,)


def test_a_lost_worker_lets_those_go_on_that_waited_for_it() -> None:
    clocks = Clocks(3, None)
    assert clocks.push(2, 0) == clocks.push(0, 0) == Decision()
    decision = clocks.lose(1)
    assert (decision.apply, decision.count, decision.release) == ((0, 2), 2, (0, 2))


def test_staleness_is_the_updates_that_the_weights_of_a_gradient_lack() -> None:
    clocks = Clocks(2, 4)
    for step in range(3):
        clocks.push(0, step)
    clocks.push(1, 0)  # its weights are those of the start
    assert clocks.staleness_counts == {0: 3, 3: 1}


def test_what_cannot_come_now_is_refused_with_both_values() -> None:
    clocks = Clocks(2, None)
    with pytest.raises(ProtocolError, match="worker 0 sent push at step 3, expected step 0"):
        clocks.push(0, 3)
    clocks.push(0, 0)
    with pytest.raises(ProtocolError, match="while push at step 0 has not been answered"):
        clocks.push(0, 1)
    with pytest.raises(ProtocolError, match="none of 2"):
        clocks.push(2, 0)
    with pytest.raises(ProtocolError, match="different things: worker 0 sent push at step 0, worker 1 sent save"):
        clocks.ask(1, "save", 0)


def test_all_learn_of_the_wish_to_end_at_the_same_step() -> None:
    for staleness in (None, 4):
        clocks = Clocks(2, staleness)
        assert not clocks.push(0, 0, wants_end=True, meets=True).wants_end
        decision = clocks.push(1, 0, meets=True)
        assert decision.release == (0, 1)
        assert decision.wants_end
