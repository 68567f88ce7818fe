"""Which tests run while the other workers of pytest-xdist run none."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import TextIO

_LOOK_S = 0.05
WITHIN_S = 60.0  # half of what a test may take


class Turns:
    """Any number of tests run at once, or one of them alone. What a test that runs already has started goes on while it
    waits for that, beside another one that is alone.

    Args:
        folder: the same for all workers of a run.
    """

    def __init__(self, folder: Path) -> None:
        self._queue, self._room = (open(folder / name, "w") for name in ("queue", "room"))  # noqa: SIM115 - close() does
        self._is_alone = False

    def enter(self, *, alone: bool, within_s: float | None = None) -> None:
        """Wait until a test may run. Who waits for all others to finish keeps the queue, so that none begins anew.

        ``within_s``: who has not got the machine for itself by then goes on beside others. None: there is no limit.
        """
        if self._is_alone and alone:
            return
        self.leave()
        until_s = None if within_s is None else time.monotonic() + within_s
        is_first = _lock(self._queue, fcntl.LOCK_EX, until_s)
        self._is_alone = alone and is_first and _lock(self._room, fcntl.LOCK_EX, until_s)
        if not self._is_alone:
            fcntl.flock(self._room, fcntl.LOCK_SH)
        fcntl.flock(self._queue, fcntl.LOCK_UN)

    def leave(self) -> None:
        """Let others run."""
        self._is_alone = False
        fcntl.flock(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        """At the end of the run."""
        self._queue.close()
        self._room.close()


def _lock(file: TextIO, kind: int, until_s: float | None) -> bool:
    if until_s is None:
        fcntl.flock(file, kind)
        return True
    while True:  # there is no lock with a deadline
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
            time.sleep(_LOOK_S)


of_this_worker: Turns | None = None  # where pytest-xdist runs the tests


def have_the_machine() -> None:
    """From here to its end, the test that runs has the machine for itself, if the others finish soon."""
    if of_this_worker is not None:
        of_this_worker.enter(alone=True, within_s=WITHIN_S)
