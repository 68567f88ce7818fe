"""How many threads of one process compute at the same time: so few that its event loop gets a turn, too.

Every client has a thread of its own. With two hundred of them in one process all would train at once, and fight for the
interpreter: the loop then waits a tenth of a second for each of its turns, heartbeats come too late, and clients that
are well are taken for dead.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

_LOOK_S = 0.5  # how often who waits asks whether it is still wanted
STALL_S = 5.0


class Turns:
    """Lets so many in at a time. Who has waited while nobody came or went for ``stall_s`` goes in all the same: those
    inside may be waiting for it."""

    def __init__(self, at_once: int, *, stall_s: float = STALL_S) -> None:
        self._at_once = at_once
        self._stall_s = stall_s
        self._changed = threading.Condition()
        self._inside = 0
        self._moved_s = time.monotonic()

    @contextlib.contextmanager
    def take(self, should_stop: Callable[[], bool]) -> Iterator[None]:
        """Wait for a turn, on this thread, and have it until the block ends. ``should_stop``: it is not wanted any
        more; then there is nothing to wait for."""
        with self._changed:
            while self._inside >= self._at_once and not should_stop():
                left_s = self._moved_s + self._stall_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(min(left_s, _LOOK_S))
            self._inside += 1
            self._moved_s = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._moved_s = time.monotonic()
                self._changed.notify()


# A few more than cores: some wait for data, or for a device.
TRAINING = Turns(max(4, 2 * (os.cpu_count() or 1)))
