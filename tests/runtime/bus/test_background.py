"""The bus in a thread of its own, for programs without asyncio."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gradbus.runtime.bus import background
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.errors import BusError


def test_a_bus_that_does_not_open_is_an_error_after_the_deadline_and_one_that_opens_later_closes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_open, closed = threading.Event(), threading.Event()

    @contextlib.asynccontextmanager
    async def connect(*_: Any, **__: Any) -> AsyncIterator[object]:
        may_open.wait(10.0)  # it holds up the thread, as a disk that does not answer
        yield object()
        closed.set()

    monkeypatch.setattr(background, "connect", connect)
    monkeypatch.setattr(background, "OPEN_S", 0.05)
    with pytest.raises(BusError, match=r"the bus of job 'late' was not open after 0.05 s, domain 3 on lo\. See what"):
        background.acquire("late", BusSettings(domain=3), 0)
    may_open.set()
    assert closed.wait(10.0)
    assert not [key for key in background.jobs if key[1] == "late"]


def test_a_bus_that_does_not_open_yet_holds_up_the_other_jobs_of_its_process_neither_at_their_begin_nor_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opens, may_open = threading.Event(), threading.Event()

    @contextlib.asynccontextmanager
    async def connect(job: str, **_: Any) -> AsyncIterator[object]:
        if job == "slow":
            opens.set()
            assert may_open.wait(10.0)
        yield object()

    monkeypatch.setattr(background, "connect", connect)
    monkeypatch.setattr(background, "jobs", {})  # none of other tests, which may end later
    before = background.acquire("before", BusSettings(domain=3), 0)
    with ThreadPoolExecutor(2) as others:
        try:
            slow = [others.submit(background.acquire, "slow", BusSettings(domain=3), 0) for _ in range(2)]
            assert opens.wait(10.0)
            background.release(background.acquire("quick", BusSettings(domain=3), 0))
            background.release(before)
            assert not any(one.done() for one in slow)
        finally:
            may_open.set()
        first, second = (one.result(10.0) for one in slow)
    assert first is second
    background.release(first)
    assert [key[1] for key in background.jobs] == ["slow"]
    background.release(second)
    assert not background.jobs
