"""When the network in memory acts, in real time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gradbus.runtime.errors import BusError
from gradbus.runtime.transport.schedule import ThreadSchedule

PATIENCE_S = 30.0


@pytest.fixture
def schedule() -> Iterator[ThreadSchedule]:
    made = ThreadSchedule("the network in memory", thread_name="test-schedule")
    yield made
    made.close()


def test_functions_are_called_at_their_time_and_those_of_one_time_in_their_order(schedule: ThreadSchedule) -> None:
    called: list[int] = []
    now_s = schedule.now_s()
    for number, delay_s in enumerate((0.02, 0.01, 0.01)):
        schedule.at(now_s + delay_s, called.append, number)
    with schedule.lock:
        assert schedule.wait(None, lambda: len(called) == 3, PATIENCE_S)
    assert called == [1, 2, 0]
    assert time.monotonic() >= now_s + 0.02


def test_a_wait_ends_in_time_where_nothing_happens(schedule: ThreadSchedule) -> None:
    with schedule.lock:
        assert not schedule.wait(None, lambda: False, 0.01)


def test_waits_fail_once_a_function_has_raised(schedule: ThreadSchedule) -> None:
    def fail() -> None:
        raise ValueError("no such pair")

    schedule.at(schedule.now_s(), fail)
    with schedule.lock, pytest.raises(BusError, match="no such pair"):
        schedule.wait(None, lambda: False, PATIENCE_S)


def test_nothing_is_called_after_the_end() -> None:
    schedule, called = ThreadSchedule("the network in memory", thread_name="test-schedule"), list[int]()
    schedule.at(schedule.now_s() + 0.01, called.append, 1)
    schedule.close()
    schedule.at(schedule.now_s(), called.append, 2)
    with schedule.lock:
        assert not schedule.wait(None, lambda: bool(called), 0.05)
