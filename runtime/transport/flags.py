"""Flags of endpoints, and the waiter that reports which are on: for a transport whose news come over a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradbus.runtime import forks
from gradbus.runtime.errors import BusError
from gradbus.runtime.transport.api import WOKEN
from gradbus.runtime.transport.schedule import NetworkSchedule


class ChangeFlag:
    """What a waiter waits for: on from a change until somebody has looked."""

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.is_on = False


class FlagWaiter:
    """Reports which flags are on.

    Attributes:
        on_news: called, with the lock, when a wait would end; a driver that does not wait sets it.
        is_waiting: a thread is in a wait, and looks when the schedule notifies.
    """

    def __init__(self, schedule: NetworkSchedule, node: Any = None, look: Callable[[], object] | None = None) -> None:
        """Make a waiter without flags.

        Args:
            node: the process that waits, as the schedule knows it.
            look: called with the lock before each look at the flags, and may set them.
        """
        self._node = node
        self._schedule = schedule
        self._look = look
        self._attached: dict[int, ChangeFlag] = {}
        self._is_woken = False
        self.is_waiting = False
        self._made_in = forks.generation
        self.on_news: Callable[[], None] = schedule.notify

    def attach(self, trigger: ChangeFlag, number: int) -> None:
        """See :meth:`.api.Waiter.attach`."""
        with self._schedule.lock:
            self._attached[number] = trigger
            if trigger.is_on:
                self.on_news()

    def detach(self, trigger: ChangeFlag) -> None:
        """See :meth:`.api.Waiter.detach`."""
        with self._schedule.lock:
            self._attached = {number: one for number, one in self._attached.items() if one is not trigger}

    def wait(self, timeout_s: float) -> list[int]:
        """See :meth:`.api.Waiter.wait`."""
        with self._schedule.lock:
            numbers = self._numbers()
            if not numbers and timeout_s > 0.0:
                self.is_waiting = True
                try:
                    self._schedule.wait(self._node, lambda: bool(self._numbers()), timeout_s)
                except BusError as error:
                    raise OSError(str(error)) from error
                finally:
                    self.is_waiting = False
                numbers = self._numbers()
            self._is_woken = False
            return numbers

    def _numbers(self) -> list[int]:
        if self._look is not None:
            self._look()
        numbers = [WOKEN] if self._is_woken else []
        return numbers + [number for number, one in self._attached.items() if one.is_on]

    def wake(self) -> None:
        """See :meth:`.api.Waiter.wake`."""
        if self._made_in == forks.generation:
            with self._schedule.lock:
                self._is_woken = True
                self.on_news()
