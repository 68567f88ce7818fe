"""What the tests of the bus share: a place of their own on the bus, and loops to run on."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

_numbers = itertools.count()
_LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def place(domain: int) -> dict[str, Any]:
    """Job and domain that nobody else uses."""
    return {"job": f"test-{os.getpid()}-{next(_numbers)}", "domain": domain}


@pytest.fixture(params=["asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]:
    """Runs a test's coroutine with a deadline. Parametrised with ``indirect``, on uvloop, too."""

    def runner(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(60):
                return await main()

        with asyncio.Runner(loop_factory=_LOOPS[request.param]) as loop:
            return loop.run(bounded())

    return runner
