"""For a busy machine, on which a process may stand still for seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from turns import have_the_machine

T = TypeVar("T")

PATIENT_S = 20.0
"""For a silence that is no death, where a test is not about deaths."""

_EVERY_S = 0.005

PATIENT = {"GRADBUS_BUS__LEASE_S": f"{PATIENT_S:g}", "GRADBUS_FEDERATED__CLIENTS__DEAD_AFTER_S": f"{PATIENT_S:g}"}
"""The same in the environment of commands."""


def soonest(attempt: Callable[[], float], limit_s: float) -> float:
    """How long something takes at best, of three attempts at most; one that is within the limit is enough.

    A machine that stands still makes single attempts longer, never shorter. So the first one is beside the tests of
    other workers, and those after it have the machine. What else an attempt checks must hold in each of them.
    """
    taken_s = attempt()
    for _ in range(2):
        if taken_s >= limit_s:
            have_the_machine()
            taken_s = min(taken_s, attempt())
    return taken_s


def until(condition: Callable[[], object], timeout_s: float = PATIENT_S) -> None:
    """For what no event tells of: a process has written it and not said, or it lies in another thread."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "it did not come to pass"
        time.sleep(_EVERY_S)


async def eventually(condition: Callable[[], object], timeout_s: float = 50.0) -> None:
    """The same on an event loop, which goes on meanwhile."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "it did not come to pass"
        await asyncio.sleep(_EVERY_S)


def run(main: Coroutine[Any, Any, T], limit_s: float = 60.0) -> T:
    """Run it on an event loop to its end, which is to come within this time."""

    async def bounded() -> T:
        async with asyncio.timeout(limit_s):
            return await main

    return asyncio.run(bounded())
