"""Threads of torch that one thread has started: their processor time and their cores, and nobody else's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import until

from gradbus.runtime import native_threads
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.native_threads import ThreadFamily, cpu_time_of

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no sched_setaffinity")


def multiply(threads: int) -> None:
    """An operation that torch spreads over so many threads."""
    torch.set_num_threads(threads)
    torch.randn(600, 600, generator=torch.Generator().manual_seed(1)).exp().sum()


def cores_of(thread: int) -> set[int]:
    """The cores of a thread; none: it has ended."""
    try:
        return os.sched_getaffinity(thread)
    except ProcessLookupError:
        return set()


def on_a_thread(do: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(do).result()


@pytest.fixture(autouse=True)
def threads_as_before() -> Any:
    before = torch.get_num_threads()
    yield
    on_a_thread(lambda: torch.set_num_threads(before))
    torch.set_num_threads(before)


def test_workers_of_torch_belong_to_the_thread_that_computes_and_run_where_it_does() -> None:
    multiply(2)  # workers of this thread, which are to stay as they are
    core, before = max(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    family, is_done, ready = ThreadFamily(), threading.Event(), threading.Event()

    def compute() -> None:
        family.enter([core])
        multiply(2)
        ready.set()
        is_done.wait(20.0)

    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(compute)
        assert ready.wait(20.0)
        ours = family.threads
        where = {thread: cores for thread in map(int, os.listdir("/proc/self/task")) if (cores := cores_of(thread))}
        is_done.set()
        running.result()
    assert len(ours) == 2, "the thread itself, and one worker"
    assert all(where[thread] == {core} for thread in ours)
    assert all(cores == before for thread, cores in where.items() if thread not in ours)
    assert os.sched_getaffinity(0) == before


def test_processor_time_is_that_of_the_thread_and_its_workers_alone_also_when_they_have_ended() -> None:
    family, is_burnt, may_end = ThreadFamily(), threading.Event(), threading.Event()

    def work() -> None:
        burn(0.2)
        is_burnt.set()
        may_end.wait(20.0)

    def compute() -> tuple[float, float, float]:
        family.enter()
        began_s = time.thread_time()
        before_s = family.cpu_s()
        worker = threading.Thread(target=work)
        worker.start()
        assert is_burnt.wait(20.0)
        found_s = family.cpu_s() - before_s
        may_end.set()
        worker.join()
        return found_s, family.cpu_s() - before_s, time.thread_time() - began_s

    other = threading.Thread(target=burn, args=(0.3,))
    other.start()
    found_s, later_s, own_s = on_a_thread(compute)
    other.join()
    assert 0.2 <= found_s <= 0.25 + own_s, "with the worker, and without the other thread"
    assert later_s >= found_s, "what has ended stays"


@pytest.mark.parametrize("name", [b"\xd0\xba\xd0", b"two\nlines", b""], ids=["half a character", "two lines", "none"])
def test_threads_of_the_program_may_have_any_name(name: bytes) -> None:
    family, is_named, may_end = ThreadFamily(), threading.Event(), threading.Event()

    def odd() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_bytes(name)
        is_named.set()
        may_end.wait(20.0)

    def compute() -> bool:
        family.enter()
        return family.threads == [threading.get_native_id()]

    other = threading.Thread(target=odd)
    other.start()
    try:
        assert is_named.wait(20.0)
        assert on_a_thread(compute)
    finally:
        may_end.set()
        other.join()


def test_threads_that_have_ended_are_forgotten_but_for_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_threads, "_LOOK_S", 0.0)  # each time
    family = ThreadFamily()

    def compute() -> tuple[float, int]:
        family.enter()
        for _ in range(8):
            is_burnt, may_end = threading.Event(), threading.Event()

            def work(is_burnt: threading.Event = is_burnt, may_end: threading.Event = may_end) -> None:
                burn(0.01)
                is_burnt.set()
                may_end.wait(20.0)

            worker = threading.Thread(target=work)
            worker.start()
            assert is_burnt.wait(20.0)
            family.cpu_s()
            may_end.set()
            worker.join()
        # The system may have a thread a moment longer than Python.
        until(lambda: len(family.threads) == 1)
        return family.cpu_s(), len(family._cpu_s)  # noqa: SLF001 - what is kept of them

    cpu_s, kept = on_a_thread(compute)
    assert cpu_s >= 8 * 0.01
    assert kept == 1, "the first one"


def test_where_threads_cannot_be_named_the_process_stands_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native_threads, "_TASKS", tmp_path)  # none of the files in it
    family = ThreadFamily()
    on_a_thread(family.enter)
    assert family.cpu_s() == pytest.approx(time.process_time(), abs=0.5)


def burn(cpu_s: float) -> None:
    """Use so much processor time on this thread."""
    until_s = time.thread_time() + cpu_s
    while time.thread_time() < until_s:
        pass


def test_the_clock_of_a_thread_is_that_of_its_processor_time() -> None:
    burn(0.05)
    assert cpu_time_of(threading.get_native_id()) == pytest.approx(time.thread_time(), abs=0.05)


def test_a_core_that_there_is_not_is_refused_and_the_thread_stays_where_it_was() -> None:
    before = os.sched_getaffinity(0)
    for cores in ([4095], [max(before), 4095]):
        with pytest.raises(ConfigError, match=r"client\.budget\.cores is \[.*4095\]"):
            on_a_thread(lambda cores=cores: ThreadFamily().enter(cores))
    assert os.sched_getaffinity(0) == before
