"""How a process group is held open on the event loop: what goes wrong there neither ends it nor passes unseen."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from structlog.testing import capture_logs
from torch.distributed import HashStore

from gradbus.runtime.errors import BusError
from gradbus.torch import groups
from gradbus.torch.formation import Rendezvous
from gradbus.torch.groups import GroupMembership


class NoLog:
    """A log whose reader is gone."""

    def exception(self, *_: object, **__: object) -> None:
        raise BrokenPipeError


class LoopThread:
    """The event loop of a bus on a thread of its own, without the bus.

    Attributes:
        held: what it runs for a group.
    """

    bus = None

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.held: Future[Any] = Future()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        self.held = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return self.held

    def call(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        self.call(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()


@pytest.fixture
def bus_thread() -> Iterator[Any]:
    made = LoopThread()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def watch_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "WATCH_S", 0.001)


def begun(membership: GroupMembership, monkeypatch: pytest.MonkeyPatch, *, error: Exception | None = None) -> list[str]:
    """Form a group that ends with the error when it is left. Returns what it was left with, once it has been."""
    left_with: list[str] = []

    @contextlib.asynccontextmanager
    async def join_group(*_: object, **__: object) -> AsyncIterator[object]:
        try:
            yield object()
        except Exception as last_word:
            left_with.append(str(last_word))
            raise
        if error is not None:
            raise error

    monkeypatch.setattr(groups, "join_group", join_group)
    membership.begin(Rendezvous(HashStore(), 0, 2, "g", 1.0, job_rank=0), "g", lambda: None)
    return left_with


@pytest.mark.parametrize("broken_log", [False, True])
def test_a_watch_that_fails_is_called_again_and_logged_once(
    bus_thread: Any, broken_log: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken_log:
        monkeypatch.setattr(groups, "log", NoLog())
    calls, goes_on = [], threading.Event()

    def watch(now_s: float) -> None:
        calls.append(now_s)
        if len(calls) < 3:
            raise KeyError("a callback of somebody's")
        goes_on.set()

    membership = GroupMembership(bus_thread)
    membership.watch_with(watch)
    with capture_logs() as lines:
        begun(membership, monkeypatch)
        assert goes_on.wait(60.0)
        membership.end("", abruptly=False, keep_bus=True)
    assert [line["event"] for line in lines] == ([] if broken_log else ["watch failed"])


@pytest.mark.parametrize(
    ("error", "reason", "left_with", "events"),
    [
        (BusError("the network is down"), "", [], ["left group"]),
        (None, "a hook failed", ["a hook failed"], []),
        (None, "", [], []),
    ],
    ids=["fails", "for a reason", "gracefully"],
)
def test_what_ends_a_group_that_has_formed_is_logged_and_the_reason_for_leaving_is_for_the_others_and_no_fault(
    bus_thread: Any,
    error: Exception | None,
    reason: str,
    left_with: list[str],
    events: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    membership = GroupMembership(bus_thread)
    with capture_logs() as lines:
        found = begun(membership, monkeypatch, error=error)
        membership.end(reason, abruptly=True, keep_bus=True)
    assert found == left_with
    assert [(line["event"], line["group"]) for line in lines] == [(event, "g") for event in events]


def test_a_group_whose_loop_has_been_ended_can_be_left(bus_thread: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    membership = GroupMembership(bus_thread)
    begun(membership, monkeypatch)
    assert bus_thread.held.cancel()
    membership.end("", abruptly=False, keep_bus=True)
