"""When things of a network happen in a simulation: at a virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from fault_simulation.kernel import VirtualProcess, now_s
from fault_simulation.virtual_loop import VirtualLoop

OUTSIDE = contextvars.Context()  # in which the network itself acts
LOOK_S = 2e-3  # between two looks at whether something has happened that nothing reports


class VirtualSchedule:
    """Calls functions of the network at a virtual time: the :class:`.schedule.NetworkSchedule` of a simulation.
    No two callbacks run at the same time, so there is nothing to lock. Nothing waits; the time of a thread passes."""

    lock: AbstractContextManager[None] = contextlib.nullcontext()

    def __init__(self, loop: VirtualLoop, context: contextvars.Context = OUTSIDE) -> None:
        """``context``: of the process to which the calls belong, which may stand still or be dead."""
        self._loop = loop
        self._context = context

    def now_s(self) -> float:
        """Return the virtual time."""
        return now_s()

    def at(self, when_s: float, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function of the network then."""
        self._loop.call_at(when_s, function, *arguments, context=self._context)

    def wait(self, node: VirtualProcess, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Note that a thread of the process has waited in vain: nothing else runs meanwhile."""
        if not is_over():
            node.blocked_s += timeout_s
        return is_over()

    def check(self) -> None:
        """Do nothing: an exception of the network ends the run."""

    def notify(self) -> None:
        """Do nothing: nobody waits."""

    def close(self) -> None:
        """Do nothing: the loop drops its callbacks itself."""


async def sleep_until(is_over: Callable[[], bool], timeout_s: float) -> bool:
    """Let virtual time pass until something is over, for so long at most. Returns whether it is."""
    until_s = now_s() + timeout_s
    while not is_over():
        if now_s() >= until_s:
            return False
        await asyncio.sleep(LOOK_S)
    return True
