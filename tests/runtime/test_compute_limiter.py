"""Threads of one process take turns, so that its event loop has one as well."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from gradbus.runtime.compute_limiter import Turns


def test_no_more_than_so_many_are_inside_at_a_time_and_all_get_their_turn() -> None:
    turns, inside, most = Turns(3, stall_s=60.0), 0, 0
    lock, three = threading.Lock(), threading.Barrier(3, timeout=20.0)

    def work(number: int) -> int:
        nonlocal inside, most
        with turns.take(lambda: False):
            with lock:
                inside += 1
                most = max(most, inside)
            three.wait()  # also breaks if fewer get in
            with lock:
                inside -= 1
        return number

    with ThreadPoolExecutor(20) as pool:
        assert sorted(pool.map(work, range(60))) == list(range(60))
    assert most == 3


def test_who_is_not_wanted_any_more_does_not_wait() -> None:
    turns, came = Turns(1, stall_s=60.0), threading.Event()

    def unwanted() -> None:
        with turns.take(lambda: True):
            came.set()

    with turns.take(lambda: False):
        threading.Thread(target=unwanted, daemon=True).start()
        assert came.wait(20.0)  # of the 60 after which anybody goes in


def test_those_inside_that_wait_for_somebody_outside_get_it_in() -> None:
    turns, came = Turns(2, stall_s=0.1), threading.Event()

    def waits() -> bool:
        with turns.take(lambda: False):
            return came.wait(10.0)

    def comes() -> None:
        with turns.take(lambda: False):
            came.set()

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(waits), pool.submit(waits)]
        pool.submit(comes)
        assert [one.result() for one in waiting] == [True, True]
