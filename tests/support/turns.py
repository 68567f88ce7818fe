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

    def enter(self) -> None:
        """Wait until no other test has the machine for itself or waits for it."""
        self.leave()
        fcntl.flock(self._queue, fcntl.LOCK_EX)
        fcntl.flock(self._room, fcntl.LOCK_SH)
        fcntl.flock(self._queue, fcntl.LOCK_UN)

    def enter_alone(self, within_s: float) -> None:
        """Wait until all other tests have finished, and have the others wait. After ``within_s``, go on beside them.

        The queue is held meanwhile, so that none begins anew.
        """
        if self._is_alone:
            return
        self.leave()
        until_s = time.monotonic() + within_s
        is_first = _locked(self._queue, until_s)
        self._is_alone = is_first and _locked(self._room, until_s)
        if not self._is_alone:
            fcntl.flock(self._room, fcntl.LOCK_SH)
        fcntl.flock(self._queue, fcntl.LOCK_UN)

    def leave(self) -> None:
        """Let others run."""
        self._is_alone = False
        fcntl.flock(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close its files, at the end of the run."""
        self._queue.close()
        self._room.close()


def _locked(file: TextIO, until_s: float) -> bool:
    """Try to get the only lock until then: there is none with a deadline."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
            time.sleep(_LOOK_S)


of_this_worker: Turns | None = None  # where pytest-xdist runs the tests


def have_the_machine() -> None:
    """From here to its end, the test that runs has the machine for itself, if the others finish soon."""
    if of_this_worker is not None:
        of_this_worker.enter_alone(WITHIN_S)
