"""What a profile has added up so far. Not safe for threads: ``Profile`` sees to that."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradbus.runtime.profiling.chrome_trace import Event
from gradbus.runtime.profiling.summary import (
    FORMAT,
    Amounts,
    LineFile,
    ProfileSummary,
    Tally,
    WindowStats,
    add_amounts,
    plain,
)

_MAX_NAMES = 64  # of spans and counters; what comes under further ones is put together as "more"
_MAX_LINES = 1000  # lines of steps that wait for the end of their window

Report = tuple[bool, str | None, float, Event | None]
"""Whether the amount belongs to a step, its name, the amount, what the trace shows of it. No name: the trace alone."""


class Ledger:
    """Sums of the open step, of the open window, of all steps, and of what lies between them; the newest events.

    Attributes:
        events: of the trace. dropped_events: that were pushed out by newer ones.
    """

    def __init__(
        self, rank: int, window_steps: int, jsonl: Path | None, *, jsonl_steps: bool, max_events: int,
        max_windows: int, on_window: Callable[[WindowStats], object],
    ) -> None:  # fmt: skip
        """An empty one; the arguments are those of ``Profile``."""
        if min(window_steps, max_events, max_windows) < 1:
            sizes = f"{window_steps}, {max_events}, {max_windows}"
            raise ValueError(f"window_steps, max_events and max_windows must be >= 1, got {sizes}")
        self._rank = rank
        self._window_steps = window_steps
        self._file = None if jsonl is None else LineFile(jsonl)
        self._jsonl_steps = jsonl_steps and jsonl is not None
        self._on_window = on_window
        start = {"kind": "start", "format": FORMAT, "rank": rank, "unix_s": time.time(), "window_steps": window_steps}
        self._lines: list[dict[str, Any]] = [start]
        self._in_step: Amounts = {}
        self._outside: Amounts = {}
        self._names: set[str] = set()
        self._window, self._totals = Tally(), Tally()
        self._windows: deque[WindowStats] = deque(maxlen=max_windows)
        self._failed_steps = 0
        self.events: deque[Event] = deque(maxlen=max_events)
        self.dropped_events = 0

    def take(self, inbox: deque[Report]) -> None:
        """Add up what has come. What belongs to a step, and came after its end, goes to the one that ends next."""
        names = self._names
        for _ in range(len(inbox)):  # not until it is empty: other threads may fill it as fast
            in_step, name, amount, event = inbox.popleft()
            if event is not None:
                self._keep(event)
            if name is None:
                continue
            if name not in names:
                if len(names) < _MAX_NAMES:
                    names.add(name)
                else:
                    name = "more_s" if name.endswith("_s") else "more"
            amounts = self._in_step if in_step else self._outside
            amounts[name] = amounts.get(name, 0.0) + amount

    def end_step(self, number: int, start_s: float, end_s: float, error: str | None) -> None:
        """All of the step has been taken. ``error``: the name of the exception that it ended with."""
        amounts, self._in_step = self._in_step, {}
        spans_s = sum(amount for name, amount in amounts.items() if name.endswith("_s"))
        args: dict[str, Any] = {"step": number} if error is None else {"step": number, "error": error}
        args |= plain({name: amounts[name] for name in ("bytes_out", "bytes_in") if name in amounts})
        self._keep(("step", f"step {number}", start_s, end_s, args))
        amounts["step_s"] = end_s - start_s
        amounts["other_s"] = max(0.0, end_s - start_s - spans_s)
        if self._jsonl_steps:
            line = {"kind": "step", "rank": self._rank, "step": number, **plain(amounts)}
            self._lines.append(line if error is None else line | {"error": error})
            if len(self._lines) >= _MAX_LINES:
                self._write()
        if error is not None:  # a wait for somebody who never comes would say nothing about the network
            self._failed_steps += 1
            return
        self._window.add_step(number, amounts)
        if self._window.steps >= self._window_steps:
            self._end_window()

    def summary(self, *, step_is_open: bool) -> ProfileSummary:
        """All steps that have ended."""
        tally = Tally()
        tally.add(self._totals)
        tally.add(self._window)
        if not step_is_open:
            add_amounts(tally.sums, self._in_step)  # came after the end of the last step
        return ProfileSummary(
            rank=self._rank, steps=tally.steps, failed_steps=self._failed_steps, first_step=tally.first_step,
            last_step=tally.last_step, mean=tally.mean, max=tally.maxima, total=tally.sums, outside=dict(self._outside),
            dropped_events=self.dropped_events, windows=tuple(self._windows),
        )  # fmt: skip

    def close(self) -> None:
        """Write the steps since the last window, and the summary; nothing is written after that."""
        if self._window.steps:
            self._end_window()
        if self._file is not None:
            summary = self.summary(step_is_open=False).to_json()
            self._lines.append({"kind": "summary", "unix_s": time.time(), **summary})
            self._write()
        self._file, self._jsonl_steps = None, False

    def _keep(self, event: Event) -> None:
        if len(self.events) == self.events.maxlen:
            self.dropped_events += 1
        self.events.append(event)

    def _end_window(self) -> None:
        window = self._window.window()
        self._totals.add(self._window)
        self._window = Tally()
        self._windows.append(window)
        self._lines.append({"kind": "window", "rank": self._rank, "unix_s": time.time(), **window.to_json()})
        self._write()
        self._on_window(window)

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        if self._file is not None:
            self._file.append(lines)
