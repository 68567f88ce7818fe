"""Deadlines of collectives whose event loop is closed."""

from __future__ import annotations

import asyncio

from gradbus.runtime.collectives.handle import DeadlineTimer, collective_timeout
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.errors import BusClosed


def test_without_an_event_loop_every_collective_ends_with_an_error_at_once() -> None:
    loop = asyncio.new_event_loop()
    clock = DeadlineTimer(loop, lambda: None)
    loop.close()
    for _ in range(3):
        operation = Operation("barrier", 0, 2)
        clock.watch(operation, 60.0, collective_timeout, on_loop=False)
        assert isinstance(operation.error, BusClosed)
