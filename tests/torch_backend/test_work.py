"""Works and the thread of their callbacks: what they leave behind, what their errors say, logs that take no line."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_link import MemoryNet
from torch.distributed import DistBackendError

from gradbus.runtime.errors import BusClosed, CollectiveTimeout, WriteTimeout
from gradbus.torch import work as work_module
from gradbus.torch.calls import CollectiveCall, CollectiveCalls, together
from gradbus.torch.observed import Observed
from gradbus.torch.work import CoalescedWork, DdsWork, WorkQueue


class Pair:
    """A queue of rank 0, and a rank 1, in memory."""

    def __init__(self) -> None:
        self.net = MemoryNet(2, inline=1.0)
        self.queue = WorkQueue(self.net.engines[0])

    def work(self, call: CollectiveCall) -> DdsWork:
        return DdsWork(self.queue, call, "c", 60.0, ordered=True)

    def barrier(self) -> DdsWork:
        return self.work(CollectiveCalls(0, 2).barrier())

    def watched(self) -> set[DdsWork]:
        """Works whose deadlines are watched."""
        return self.queue._open  # noqa: SLF001 - one that stays there shows in the memory of the process alone

    def barrier_of_rank_1(self) -> None:
        self.net.start(CollectiveCalls(1, 2).barrier().operations[0], "c")


class NoLog:
    """A log whose reader is gone, until it has one again. Its lines go there."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.broken = True

    def _write(self, event: str, **facts: Any) -> None:
        if self.broken:
            raise BrokenPipeError
        self.lines.append(event)

    warning = error = exception = _write


def test_a_future_asked_for_while_its_work_ends_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    work = pair.barrier()

    def another_thread_asks() -> None:
        with monkeypatch.context() as slow:
            slow.setattr(work, "deliver", lambda: None)  # it gets no further for now
            work.get_future()

    pair.queue.engine.progress = SimpleNamespace(wake_inline=another_thread_asks)  # type: ignore[assignment]
    pair.queue.submit(work)
    pair.barrier_of_rank_1()
    pair.net.settle()
    assert work.ended
    work.deliver()
    assert work.get_future().done()
    pair.queue.watch(time.monotonic())
    assert pair.watched() == set()


class Flickering(Observed):
    """An observer that another thread takes away after some looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.names: list[str] = []

    @property
    def observer(self) -> Any:  # type: ignore[override]
        self.looks -= 1
        return self if self.looks >= 0 else None

    def exchanged(self, what: str, started_s: float, ended_s: float) -> None:
        self.names.append(what)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def test_a_profile_that_ends_while_a_collective_does_harms_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, flickering = Pair(), Flickering(2)  # when it starts, and when it ends
    monkeypatch.setattr(work_module, "observed", flickering)
    work = pair.barrier()
    pair.queue.submit(work)
    pair.barrier_of_rank_1()
    pair.net.settle()
    assert work.ended
    assert len(flickering.names) == 1
    assert Flickering(1).while_waiting(lambda: "waited") == "waited"


def test_who_waits_while_another_thread_polls_has_the_thread_of_the_bus_go_on() -> None:
    pair, asked = Pair(), list[bool]()

    def wake_io_thread() -> None:
        asked.append(True)
        pair.barrier_of_rank_1()
        pair.net.settle()

    pair.queue.engine.progress = SimpleNamespace(  # type: ignore[assignment]
        poll_inline=lambda done, until_s: None, wake_io_thread=wake_io_thread, wake_inline=lambda: None
    )
    call = CollectiveCalls(0, 2).barrier()
    assert pair.queue.submit(DdsWork(pair.queue, call, "c", 5.0, ordered=True)).wait()
    assert asked


def test_callbacks_go_on_after_one_that_fails_and_a_log_that_takes_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_module, "log", NoLog())
    pair = Pair()
    first, second = pair.barrier(), pair.barrier()
    all_is_here, called = threading.Event(), threading.Event()

    def fail() -> None:
        assert all_is_here.wait(10.0)
        raise ValueError("of a callback")

    monkeypatch.setattr(first, "deliver", fail)
    for work in (first, second):  # which waits for the first one's callbacks
        pair.queue.submit(work).get_future().add_done_callback(lambda _: called.set())
    for _ in range(2):
        pair.barrier_of_rank_1()
    pair.net.settle()
    assert not called.is_set()
    all_is_here.set()
    assert called.wait(10.0)
    pair.queue.close()
    assert (pair.queue.running, pair.watched()) == (0, set())


def test_a_call_of_several_operations_ends_when_the_first_has_failed_before_the_others_were_started() -> None:
    pair, calls = Pair(), CollectiveCalls(0, 2)
    engine = pair.queue.engine
    engine.close(BusClosed("destroyed"))  # then there is no event loop either to fail the others later
    work = pair.queue.submit(pair.work(together([calls.barrier(), calls.barrier()])))
    with pytest.raises(DistBackendError, match="barrier_coalesced failed: destroyed"):
        work.wait(timedelta(seconds=1))
    assert (engine.pending, pair.watched()) == (0, set())
    after = pair.queue.submit(pair.barrier()).call.operations[0]
    assert after.key.call == 2  # each of them is counted, as on the other ranks


def test_a_call_of_no_operations_ends_in_its_turn_and_holds_up_those_after_it_until_its_callbacks_have_run() -> None:
    pair = Pair()
    assert pair.queue.submit(pair.work(together([]))).wait(timedelta(seconds=1))
    first, empty, last = pair.barrier(), pair.work(together([])), pair.barrier()
    noted: list[bool] = []
    called = threading.Event()
    for work in (first, empty):
        pair.queue.submit(work).get_future()
    pair.queue.submit(last)
    assert not empty.is_completed()

    def note(_: object) -> None:
        noted.extend(work.call.operations[0].key.name == "c" for work in (first, last))  # whether it was started
        called.set()

    empty.get_future().add_done_callback(note)
    for _ in range(2):
        pair.barrier_of_rank_1()
    pair.net.settle()
    assert called.wait(10.0)
    assert noted == [True, False]
    assert last.wait(timedelta(seconds=10))
    pair.queue.close()
    assert (pair.queue.running, pair.watched()) == (0, set())


def test_a_call_given_up_before_its_turn_neither_sends_nor_fills_its_buffers_but_is_counted() -> None:
    pair = Pair()
    outputs, theirs = [torch.zeros(3), torch.zeros(3)], [torch.zeros(3), torch.zeros(3)]
    other = pair.net.start(CollectiveCalls(1, 2).all_gather(theirs, torch.ones(3)).operations[0], "c")
    pair.net.settle()
    work = pair.work(CollectiveCalls(0, 2).all_gather(outputs, torch.ones(3)))
    pair.queue.note(work)
    work.expire()
    work.begin()  # when it is its turn
    pair.net.settle()
    assert [output.tolist() for output in outputs] == [[0.0] * 3] * 2
    assert (other.done, theirs[0].tolist(), other.missing) == (False, [0.0] * 3, (0,))
    assert (pair.queue.engine.pending, pair.watched()) == (0, set())
    assert pair.queue.submit(pair.barrier()).call.operations[0].key.call == 1
    with pytest.raises(DistBackendError, match="all_gather Timed out"):
        work.wait()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (CollectiveTimeout("c", [1], 60.0), "[Rank 0] barrier Timed out after 60 s: 'c': still waiting for ranks [1]"),
        (WriteTimeout("train/x", 2.0), "[Rank 0] barrier failed: topic 'train/x': no progress for 2 s"),
    ],
)
def test_only_its_own_deadline_is_told_as_that(error: Exception, told: str) -> None:
    work = Pair().barrier()
    assert work.end(error)
    assert str(work.exception()).startswith(told)
    assert work.exception().__cause__ is error  # type: ignore[union-attr]


def test_works_that_are_waited_for_as_one_share_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, waits = [100.0], list[tuple[float, float]]()
    monkeypatch.setattr(work_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    class Late:
        def wait_within(self, left_s: float, limit_s: float) -> bool:
            waits.append((left_s, limit_s))
            now_s[0] += 2.0
            return True

    assert CoalescedWork([Late(), Late(), Late()]).wait(timedelta(seconds=3.0))  # type: ignore[list-item]
    assert waits[:2] == [(3.0, 3.0), (1.0, 3.0)]
    assert 0 < waits[2][0] < 0.001  # 0 would be no limit
