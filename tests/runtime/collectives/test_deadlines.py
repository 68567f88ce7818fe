"""Deadlines of collectives that are started beside the event loop: when it wakes for them, and when it is closed."""

from __future__ import annotations

import asyncio
from typing import Any

from gradbus.runtime.collectives.handle import DeadlineTimer, collective_timeout
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.errors import BusClosed, CollectiveTimeout


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts how often another thread wakes it."""

    wakes = 0

    def call_soon_threadsafe(self, *arguments: Any, **options: Any) -> asyncio.Handle:
        self.wakes += 1
        return super().call_soon_threadsafe(*arguments, **options)


def test_calls_of_other_threads_do_not_wake_the_loop_while_an_earlier_timer_is_set() -> None:
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, CountingLoop)
        timer = DeadlineTimer(loop, lambda: None)
        operations = [Operation("barrier", 0, 2) for _ in range(10)]

        async def ended(operation: Operation) -> None:
            end = loop.create_future()
            operation.when_settled(lambda _: end.set_result(None))
            await end

        async def run() -> None:
            timer.watch(operations[0], 60.0, collective_timeout, on_loop=False)
            await asyncio.sleep(0)  # the timer is set
            for operation in operations[1:]:
                timer.watch(operation, 61.0, collective_timeout, on_loop=False)
            assert loop.wakes == 1
            timer.watch(operations[0], 30.0, collective_timeout, on_loop=False)
            assert loop.wakes == 2  # it comes before the timer
            for operation in operations:
                timer.watch(operation, 0.01, collective_timeout, on_loop=False)
            for operation in operations:
                await ended(operation)

        runner.run(asyncio.wait_for(run(), 10.0))
        assert all(isinstance(operation.error, CollectiveTimeout) for operation in operations)


def test_the_loop_is_woken_before_many_calls_of_other_threads_have_piled_up() -> None:
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, CountingLoop)
        timer = DeadlineTimer(loop, lambda: None)

        async def run() -> None:
            timer.watch(Operation("barrier", 0, 2), 60.0, collective_timeout, on_loop=False)
            kept = [Operation("barrier", 0, 2) for _ in range(200)]
            timer.watch(kept[0], 60.0, collective_timeout, on_loop=False)
            for operation in kept:
                await asyncio.sleep(0)
                timer.watch(operation, 60.0, collective_timeout, on_loop=False)
            await asyncio.sleep(0)
            assert len(timer._new) < 64  # noqa: SLF001 - what has piled up for the loop shows nowhere else
            assert loop.wakes < 10

        runner.run(run())


def test_without_an_event_loop_every_collective_ends_with_an_error_at_once() -> None:
    loop = asyncio.new_event_loop()
    clock = DeadlineTimer(loop, lambda: None)
    loop.close()
    for _ in range(3):
        operation = Operation("barrier", 0, 2)
        clock.watch(operation, 60.0, collective_timeout, on_loop=False)
        assert isinstance(operation.error, BusClosed)
