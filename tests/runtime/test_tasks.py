"""Task groups: whatever ends them, what their callers hold goes with the callers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import traceback
import weakref
from collections.abc import Awaitable, Callable, Iterator

import pytest

from gradbus.runtime.tasks import TaskGroup


class Payload:
    """Stands for memory that a caller holds."""


@pytest.fixture(autouse=True)
def _no_garbage_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def _cancelled_body() -> None:
    async with TaskGroup() as group:
        group.create_task(asyncio.sleep(60))
        await asyncio.sleep(60)


async def _cancelled_exit() -> None:
    async with TaskGroup() as group:
        group.create_task(asyncio.sleep(60))


async def _failing_body() -> None:
    async with TaskGroup():
        raise ValueError("of the body")


async def _failing_task() -> None:
    async with TaskGroup() as group:
        group.create_task(_failing_body())


@pytest.mark.parametrize("run", [_cancelled_body, _cancelled_exit, _failing_body, _failing_task])
def test_what_a_caller_holds_goes_when_the_group_has_ended(run: Callable[[], Awaitable[None]]) -> None:
    held: list[weakref.ref[Payload]] = []

    async def caller() -> None:
        payload, task = Payload(), asyncio.current_task()
        assert task is not None
        held.append(weakref.ref(payload))
        asyncio.get_running_loop().call_later(0.01, task.cancel)  # after the others have failed by themselves
        with contextlib.suppress(asyncio.CancelledError, ExceptionGroup):
            await run()
        task.uncancel()

    asyncio.run(caller())
    assert held[0]() is None


def test_the_traceback_names_the_line_that_failed_and_the_groups() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(_failing_task())
    text = "".join(traceback.format_exception(raised.value))
    assert 'raise ValueError("of the body")' in text
    assert "in _failing_task" in text
