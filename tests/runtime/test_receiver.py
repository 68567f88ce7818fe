"""How a thread that waits does the receive thread's work."""

from __future__ import annotations

import os
import time
from typing import Any, cast

import pytest

from gradbus.runtime import receiver as receiver_module
from gradbus.runtime.receiver import Receiver


class Looks:
    """Stands in for the wait set: there are news at one of the looks."""

    def __init__(self, news_at: int) -> None:
        self.count = 0
        self._news_at = news_at

    def wait(self, timeout_s: float) -> list[int]:
        self.count += 1
        return [1] if self.count == self._news_at else []


def test_who_waits_gives_its_core_to_others_until_what_it_waits_for_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, yields = Looks(news_at=3), list[int]()
    monkeypatch.setattr(receiver_module, "SPIN_S", 60.0)
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(looks.count))
    receiver = Receiver(cast("Any", looks), cast("Any", None), lambda: None)

    receiver.pump(lambda: looks.count == 3, time.monotonic() + 60.0)

    assert looks.count == 3
    assert yields == [1, 2]
