"""What comes before a bus: whoever is cancelled while a participant is opened leaves none behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from bus_helpers import Run
from patience import eventually

from gradbus.runtime.bus.transport_factory import closed_on_error, open_transport


class SlowParticipant:
    """Takes until it is told so to open and to close."""

    fast_path_fault = None

    def __init__(self) -> None:
        self.began: list[str] = []
        self.ended: list[str] = []
        self.may_open, self.may_close = threading.Event(), threading.Event()

    def open(self) -> Any:
        self._do("open", self.may_open)
        return self

    def close(self) -> None:
        self._do("close", self.may_close)

    def _do(self, what: str, may_end: threading.Event) -> None:
        self.began.append(what)
        assert may_end.wait(30)
        self.ended.append(what)

    async def began_to(self, what: str) -> None:
        await eventually(lambda: what in self.began)


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel it, and let it take note."""
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)


async def is_cancelled(task: asyncio.Task[Any]) -> None:
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_participant_whose_opening_is_cancelled_twice_is_closed(run: Run) -> None:
    async def main() -> None:
        participant = SlowParticipant()
        participant.may_close.set()
        opening = asyncio.create_task(open_transport(lambda: participant.open))
        await participant.began_to("open")
        await cancel(opening)
        await cancel(opening)
        participant.may_open.set()
        await is_cancelled(opening)
        assert participant.ended == ["open", "close"]

    run(main)


def test_an_opening_that_is_cancelled_again_while_it_closes_ends_after_the_close(run: Run) -> None:
    async def main() -> None:
        participant = SlowParticipant()
        opening = asyncio.create_task(open_transport(lambda: participant.open))
        await participant.began_to("open")
        await cancel(opening)
        participant.may_open.set()
        await participant.began_to("close")
        await cancel(opening)
        assert not opening.done()
        participant.may_close.set()
        await is_cancelled(opening)
        assert participant.ended == ["open", "close"]

    run(main)


def test_a_cancelled_opening_that_fails_is_cancelled(run: Run) -> None:
    async def main() -> None:
        participant = SlowParticipant()

        def fail() -> Any:
            participant.open()
            raise ZeroDivisionError

        opening = asyncio.create_task(open_transport(lambda: fail))
        await participant.began_to("open")
        await cancel(opening)
        participant.may_open.set()
        await is_cancelled(opening)
        assert participant.began == ["open"]

    run(main)


def test_a_participant_without_a_bus_is_closed_before_a_cancel_gets_through(run: Run) -> None:
    async def main() -> None:
        participant: Any = SlowParticipant()

        async def fail() -> None:
            async with closed_on_error(participant):
                raise ZeroDivisionError

        failing = asyncio.create_task(fail())
        await participant.began_to("close")
        await cancel(failing)
        assert not failing.done()
        participant.may_close.set()
        await is_cancelled(failing)
        assert participant.ended == ["close"]

    run(main)
