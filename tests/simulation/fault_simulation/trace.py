"""The trace of a run: its digest, and its last events in words."""

from __future__ import annotations

import hashlib
from collections import deque

from fault_simulation.kernel import START_S, now_s

SHOWN = 50


class Trace:
    """Everything that happens in a run, in order. Two runs are the same if their digests are."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=1)
        self._shown: deque[str] = deque(maxlen=SHOWN)
        self._digest = hashlib.sha256()

    def keep_all(self) -> None:
        """Keep all lines from now on, not the last one only."""
        self.lines = deque(self.lines)

    def add(self, text: str, *, is_shown: bool = True) -> None:
        """Add an event. ``is_shown``: it is of interest for a person who looks at the last events."""
        line = f"{now_s() - START_S:.9f} {text}"
        self._digest.update(line.encode())
        self.lines.append(line)
        if is_shown:
            self._shown.append(line)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of all events so far."""
        return self._digest.hexdigest()

    def last(self) -> list[str]:
        """Return the last events, for a person."""
        return [_readable(line) for line in self._shown]


def _readable(line: str) -> str:
    at_s, _, text = line.partition(" ")
    return f"{float(at_s):10.4f} s  {text[:300]}"
