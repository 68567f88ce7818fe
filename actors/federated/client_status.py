"""What a client is doing, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable


class Phase:
    """Idle, preparing, fetching or training. The phases of a delivery come first, while there is one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._name = "idle"
        self._said = ""
        self._since_s = clock()

    def set(self, name: str) -> None:
        """From now on it is this."""
        self._name = name
        self._note(name)

    def said(self, delivery: str) -> tuple[str, float]:
        """The phase to tell of, and the seconds since it began. ``delivery``: that of the delivery."""
        self._note(self._name if delivery == "idle" else delivery)
        return self._said, self._clock() - self._since_s

    def _note(self, name: str) -> None:
        if name != self._said:
            self._said, self._since_s = name, self._clock()
