"""Virtual time: the clock jumps, a killed process runs no more, a paused one goes on where it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fault_simulation import virtual_loop
from fault_simulation.kernel import CLOCK, START_S, VirtualProcess
from fault_simulation.virtual_loop import Deadlock, Livelock, VirtualLoop


class Observed:
    """Takes note of what a loop reports, and injects at a callback what a test wants."""

    def __init__(self) -> None:
        self.errors: list[Any] = []
        self.at: dict[int, Callable[[], None]] = {}

    def before_step(self, steps: int) -> None:
        self.at.pop(steps, lambda: None)()

    def on_loop_error(self, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception"))


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> VirtualLoop:
    monkeypatch.setattr(CLOCK, "now_s", START_S)
    return VirtualLoop(Observed())


def process_of(loop: VirtualLoop) -> VirtualProcess:
    world: Any = SimpleNamespace(seed=0, loop=loop)
    return VirtualProcess(world, "client-0", 1, machine=0, pid=1001)


def start(loop: VirtualLoop, process: VirtualProcess, coroutine: Any) -> asyncio.Task[Any]:
    return process.context.run(lambda: loop.create_task(coroutine, context=process.context))


def test_an_hour_passes_at_once_and_timeouts_end_in_their_order(loop: VirtualLoop) -> None:
    ended: list[str] = []

    async def wait(name: str, seconds: float) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await loop.create_future()
        ended.append(name)

    process = process_of(loop)
    tasks = [start(loop, process, wait("late", 3600.0)), start(loop, process, wait("early", 1.0))]
    assert loop.run_until(lambda: all(task.done() for task in tasks), START_S + 4000.0)
    assert ended == ["early", "late"]
    assert 3600.0 <= loop.time() - START_S < 3600.1


def test_a_wait_for_nothing_is_a_deadlock_and_endless_callbacks_are_a_livelock(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = process_of(loop)

    async def forever() -> None:
        await loop.create_future()

    waiting = start(loop, process, forever())
    with pytest.raises(Deadlock):
        loop.run_until(lambda: False, START_S + 1.0)
    waiting.cancel()
    assert loop.run_until(waiting.done, START_S + 1.0)
    monkeypatch.setattr(virtual_loop, "MAX_READY", 100)

    def again() -> None:
        loop.call_soon(again)

    again()
    with pytest.raises(Livelock):
        loop.run_until(lambda: False, START_S + 1.0)


def test_nothing_of_a_dead_process_runs_not_even_its_finally(loop: VirtualLoop) -> None:
    said: list[str] = []
    process = process_of(loop)

    async def work() -> None:
        try:
            await asyncio.sleep(1.0)
            said.append("went on")
        finally:
            said.append("goodbye")

    task = start(loop, process, work())
    loop.call_later(0.5, lambda: setattr(process, "dead", True))
    loop.call_later(2.0, lambda: None)
    assert not loop.run_until(lambda: False, START_S + 1.5)
    assert said == []
    assert not task.done()
    process.dead = False
    task.cancel()
    loop.run_until(task.done, START_S + 1.9)


def test_a_callback_that_a_fault_at_its_step_cancels_does_not_run(loop: VirtualLoop) -> None:
    ran: list[str] = []
    observed: Any = loop._observer  # noqa: SLF001 - the fixture's
    handle = loop.call_soon(ran.append, "cancelled")
    loop.call_soon(ran.append, "next")
    observed.at[1] = handle.cancel
    assert loop.run_until(lambda: bool(ran), START_S + 1.0)
    assert ran == ["next"]
    assert observed.errors == []


def test_a_paused_process_goes_on_with_what_was_due_meanwhile(loop: VirtualLoop) -> None:
    process, times = process_of(loop), list[float]()

    async def work() -> None:
        for _ in range(2):
            await asyncio.sleep(1.0)
            times.append(round(loop.time() - START_S, 3))

    task = start(loop, process, work())
    loop.call_later(0.5, lambda: setattr(process, "paused", True))

    def resume() -> None:
        process.paused = False
        loop.resume(process)

    loop.call_later(10.0, resume)
    assert loop.run_until(task.done, START_S + 20.0)
    assert times == [10.0, 11.0]


def test_sets_of_tasks_have_the_order_in_which_they_were_made(loop: VirtualLoop) -> None:
    async def nothing() -> None:
        pass

    process = process_of(loop)
    tasks = [start(loop, process, nothing()) for _ in range(40)]
    assert list(set(tasks)) == tasks
    assert loop.run_until(lambda: all(task.done() for task in tasks), START_S + 1.0)


def test_an_error_of_a_callback_is_reported_and_the_loop_goes_on(loop: VirtualLoop) -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("of a callback")

    loop.call_soon(fail)
    loop.call_soon(done.append, 1)
    assert loop.run_until(lambda: bool(done), START_S + 1.0)
    observed: Any = loop._observer  # noqa: SLF001 - made by the fixture
    assert [str(error) for error in observed.errors] == ["of a callback"]
