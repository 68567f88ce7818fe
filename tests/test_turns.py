"""Which tests run beside others, and which have the machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import turns
from patience import soonest, until
from turns import Turns

SOON_S = 20.0


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Turns]]:
    made = [Turns(tmp_path) for _ in range(3)]
    yield made
    for worker in made:
        worker.close()


def begun(work: Callable[[], object]) -> threading.Event:
    """Set once it has been done, in a thread of its own."""
    done = threading.Event()
    threading.Thread(target=lambda: (work(), done.set()), daemon=True).start()
    return done


def test_a_test_alone_waits_for_those_that_run_and_others_wait_for_it(workers: list[Turns]) -> None:
    first, second, third = workers
    first.enter()
    second.enter()
    alone = begun(lambda: third.enter_alone(SOON_S))
    first.leave()
    assert not alone.wait(0.05)
    second.leave()
    assert alone.wait(SOON_S)
    beside = begun(lambda: first.enter())
    assert not beside.wait(0.05)
    third.leave()
    assert beside.wait(SOON_S)


def test_what_takes_too_long_beside_others_is_tried_again_alone(
    workers: list[Turns], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, other, third = workers
    monkeypatch.setattr(turns, "of_this_worker", here)
    here.enter()
    other.enter()
    entered: list[threading.Event] = []

    def attempt() -> float:
        if not entered:  # beside the other one, which then ends
            other.leave()
            entered.append(threading.Event())
            return 2.0
        entered.append(begun(lambda: third.enter()))
        assert not entered[-1].wait(0.05)
        return 0.5

    assert soonest(attempt, 1.0) == 0.5
    here.leave()
    assert entered[-1].wait(SOON_S)


def test_who_cannot_have_the_machine_in_time_goes_on_beside_others(workers: list[Turns]) -> None:
    first, second, third = workers
    for worker in (first, second):
        worker.enter()
    first.enter_alone(0.05)
    third.enter()  # the queue is free again
    second.leave()
    third.leave()
    waiting = begun(lambda: second.enter_alone(SOON_S))
    assert not waiting.wait(0.05)
    first.leave()
    assert waiting.wait(SOON_S)


def test_two_tests_that_both_want_the_machine_have_it_one_after_the_other(workers: list[Turns]) -> None:
    first, second, _ = workers
    for worker in (first, second):
        worker.enter()
    waiting = {worker: begun(lambda worker=worker: worker.enter_alone(2 * SOON_S)) for worker in (first, second)}  # type: ignore[misc]
    until(lambda: any(done.is_set() for done in waiting.values()))
    (one,), (other,) = ([worker for worker, done in waiting.items() if done.is_set() is so] for so in (True, False))
    one.leave()
    assert waiting[other].wait(SOON_S)
