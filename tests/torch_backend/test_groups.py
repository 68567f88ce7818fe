"""How a process group is held open on the event loop: what goes wrong there neither ends it nor passes unseen."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs
from torch.distributed import HashStore

from gradbus.runtime.errors import BusError
from gradbus.torch import groups
from gradbus.torch.formation import Rendezvous
from gradbus.torch.groups import _Membership

BUS_THREAD: Any = SimpleNamespace(bus=None, call=lambda function: function())


class NoLog:
    """A log whose reader is gone."""

    def exception(self, *_: object, **__: object) -> None:
        raise BrokenPipeError


@pytest.fixture(autouse=True)
def watch_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "WATCH_S", 0.001)


def join_and_leave_with(error: Exception | None, monkeypatch: pytest.MonkeyPatch, reason: str = "") -> list[Any]:
    """What a group writes to the log that forms, is left for a reason and then fails; and how it was left."""
    ends: list[Any] = []

    @contextlib.asynccontextmanager
    async def join_group(*_: object, **__: object) -> AsyncIterator[object]:
        try:
            yield object()
        except Exception as last_word:
            ends.append(str(last_word))
            raise
        if error is not None:
            raise error

    monkeypatch.setattr(groups, "join_group", join_group)

    async def live() -> None:
        membership = _Membership(lambda now_s: membership._leave.set(), BUS_THREAD)
        membership._reason = reason
        await membership._hold(Rendezvous(HashStore(), 0, 2, "g", 1.0, job_rank=0), "g")
        assert membership._joined.done()

    with capture_logs() as lines:
        asyncio.run(live())
    return ends + [(line["event"], line["group"]) for line in lines]


@pytest.mark.parametrize("broken_log", [False, True])
def test_a_watch_that_fails_is_called_again_and_logged_once(broken_log: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken_log:
        monkeypatch.setattr(groups, "log", NoLog())
    calls = []

    def watch(now_s: float) -> None:
        calls.append(now_s)
        if len(calls) < 3:
            raise KeyError("a callback of somebody's")
        membership._leave.set()

    async def hold() -> None:
        await asyncio.wait_for(membership._watch_until_left("g"), 60.0)

    membership = _Membership(watch, BUS_THREAD)
    with capture_logs() as lines:
        asyncio.run(hold())
    assert len(calls) == 3
    assert [line["event"] for line in lines] == ([] if broken_log else ["watch failed"])


def test_what_ends_a_group_that_has_formed_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert join_and_leave_with(BusError("the network is down"), monkeypatch) == [("left group", "g")]


def test_the_reason_for_leaving_is_for_the_others_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert join_and_leave_with(None, monkeypatch, "a hook failed") == ["a hook failed"]
    assert join_and_leave_with(None, monkeypatch) == []


def test_a_group_whose_loop_has_been_ended_can_be_left() -> None:
    membership = _Membership(lambda now_s: None, BUS_THREAD)
    membership._task = groups.Future()
    membership._task.cancel()
    membership.end("", abruptly=False, keep_bus=True)
