"""Works and the thread of their callbacks: what they leave behind, what their errors say, logs that take no line."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from memory_link import MemoryNet

from gradbus.runtime.errors import CollectiveTimeout, WriteTimeout
from gradbus.torch import work as work_module
from gradbus.torch.calls import CollectiveCalls
from gradbus.torch.work import DdsWork, WorkQueue


class Pair:
    """A queue of rank 0, and a rank 1, in memory."""

    def __init__(self) -> None:
        self.net = MemoryNet(2, inline=1.0)
        self.queue = WorkQueue()
        self.queue.engine = self.net.engines[0]

    def barrier(self) -> DdsWork:
        return DdsWork(self.queue, CollectiveCalls(0, 2).barrier(), "c", 60.0, ordered=True)

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
    assert pair.queue._open == set()


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
    assert (pair.queue.running, pair.queue._open) == (0, set())


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
