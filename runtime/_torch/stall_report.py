"""Which tensors wait for whom: one log line for each that waits too long, again after twice the time, and so on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradbus.runtime.collectives.status import MAX_LINES, called_and_missing
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.torch.calls import CollectiveCall

VARIABLE = "GRADBUS_STALL_WARNING_S"
WARNING_S = 60.0

log = get_logger("torch")


def warning_from_environment(environment: Mapping[str, str] = os.environ) -> float:
    """After how many seconds a tensor is reported. Raises ConfigError."""
    text = environment.get(VARIABLE, "")
    try:
        return checked_warning_s(float(text)) if text else WARNING_S
    except ValueError:
        raise ConfigError(f"{VARIABLE}: expected seconds, 0 for no report, got {text!r}") from None


def checked_warning_s(warning_s: float) -> float:
    """The same. Raises ValueError: no time that can be waited for."""
    if not 0 <= warning_s < float("inf"):
        raise ValueError(f"stall_warning_s must be a number of seconds, 0 for no report, got {warning_s}")
    return warning_s


@dataclass(slots=True, eq=False)
class Waiting:
    """A call that has not ended.

    Attributes:
        size_bytes: that it may have sent ahead of the others.
        left: operations that have not ended.
        due_s: ``time.monotonic`` of its next line, and ``every_s`` how long after the last one. 0: there was none yet.
    """

    name: str
    call: CollectiveCall
    size_bytes: int
    left: int
    since_s: float
    due_s: float = 0.0
    every_s: float = 0.0


class StallReport:
    """Of one rank of one group. Calls come and go on any thread; it looks at them on one, which must not wait."""

    def __init__(self, group: str, rank: int, world: int, warning_s: float) -> None:
        """``warning_s``: when a call has waited for so long there is a line. 0: never. May be set anew at any time."""
        self.warning_s = warning_s
        self._group = group
        self._rank = rank
        self._world = world
        self._waiting: dict[Waiting, None] = {}

    def add(self, waiting: Waiting) -> None:
        """A call begins."""
        self._waiting[waiting] = None

    def remove(self, waiting: Waiting) -> None:
        """It has ended."""
        self._waiting.pop(waiting, None)

    def look(self, now_s: float) -> None:
        """Write lines for what has waited too long. ``now_s``: ``time.monotonic``."""
        try:
            self._look(now_s)
        except Exception:  # whoever calls this has more to do than that
            with contextlib.suppress(Exception):  # a log that takes no line
                log.exception("stall report failed", group=self._group)

    def _look(self, now_s: float) -> None:
        if not self.warning_s:
            return
        late = [waiting for waiting in list(self._waiting) if self._is_due(waiting, now_s)]
        for waiting in late:  # before any line: one that cannot be written must not come again at once
            waiting.every_s = max(self.warning_s, 2 * waiting.every_s)
            waiting.due_s = now_s + waiting.every_s
        late = [waiting for waiting in late if waiting.left]
        for waiting in late[:MAX_LINES]:
            log.warning("stalled", **self._facts(waiting, now_s))
        if len(late) > MAX_LINES:
            log.warning("stalled", more_tensors=len(late) - MAX_LINES, group=self._group, rank=self._rank)

    def _is_due(self, waiting: Waiting, now_s: float) -> bool:
        return now_s >= (waiting.due_s or waiting.since_s + self.warning_s)

    def _facts(self, waiting: Waiting, now_s: float) -> dict[str, Any]:
        operations = waiting.call.operations
        ready, missing = called_and_missing(operations, self._rank)
        unknown = sorted(set(range(self._world)) - {*ready, *missing})
        return {
            "tensor": waiting.name, "ready": ready, "missing": missing, **({"unknown": unknown} if unknown else {}),
            "waiting_s": round(now_s - waiting.since_s, 1), "call_no": operations[0].key.call,
            "what": waiting.call.what, "group": self._group, "rank": self._rank,
        }  # fmt: skip


def begins(name: str, call: CollectiveCall, size_bytes: int) -> Waiting:
    """A call that begins now."""
    return Waiting(name, call, size_bytes, len(call.operations), time.monotonic())
