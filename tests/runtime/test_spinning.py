"""When threads that wait look again and again before they sleep, and when they leave the cores to others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gradbus.runtime import spinning as module
from gradbus.runtime.spinning import LONGEST_REST_S, MOST_SKIPPED, STALL_S, PollHistory, Spinning


def test_looking_pays_until_a_turn_was_lost() -> None:
    spinning = Spinning(cores=2)
    assert spinning.budget_s(0.0, 1.0)
    assert not spinning.was_stalled(STALL_S / 2, 1.0)
    assert spinning.budget_s(1.0, 1.0)
    assert spinning.was_stalled(3e-3, 2.0)
    assert not spinning.budget_s(2.005, 1.0)
    assert spinning.budget_s(2.0 + LONGEST_REST_S, 1.0)


def test_where_every_look_is_stalled_rests_become_long_and_short_again_afterwards() -> None:
    spinning, now_s, stalled_s = Spinning(cores=2), 0.0, 0.0
    while now_s < 10.0:
        if spinning.budget_s(now_s, 1.0):
            now_s += 3e-3
            stalled_s += 3e-3
            assert spinning.was_stalled(3e-3, now_s)
        now_s += 1e-3
    assert stalled_s < 0.03 * now_s
    now_s += 1.0
    spinning.was_stalled(2e-3, now_s)
    assert spinning.budget_s(now_s + 0.02, 1.0)


def test_on_a_single_core_nobody_looks() -> None:
    assert not Spinning(cores=1).budget_s(1e9, 1.0)


def test_a_yield_that_takes_long_is_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has come meanwhile: a thread that sleeps would have been woken for it."""
    times = iter([1.0, 1.0 + STALL_S / 2, 2.0, 2.0 + 3 * STALL_S])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(module, "os", SimpleNamespace(sched_yield=lambda: None))
    spinning = Spinning(cores=2)
    assert spinning.yield_core()
    assert not spinning.yield_core()
    assert spinning.budget_s(2.0 + 4 * STALL_S, 1.0) == 0.0


def sleeps_between_polls(history: PollHistory, polls: int) -> list[int]:
    """How many waits sleep at once before each of these polls, which are all in vain."""
    slept = []
    for _ in range(polls):
        slept.append(0)
        while not history.next_polls():
            slept[-1] += 1
        history.note_poll(found=False)
    return slept


def test_waits_poll_as_long_as_that_finds_something_and_ever_less_often_where_it_is_in_vain() -> None:
    history = PollHistory()
    for _ in range(5):
        assert history.next_polls()
        history.note_poll(found=True)
    assert sleeps_between_polls(history, 9) == [0, 1, 3, 7, 15, 31, MOST_SKIPPED, MOST_SKIPPED, MOST_SKIPPED]
