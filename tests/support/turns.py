"""Which tests run while the other workers of pytest-xdist run none."""

from __future__ import annotations

import fcntl
from pathlib import Path


class Turns:
    """Any number of tests run at once, or one of them alone.

    Args:
        folder: the same for all workers of a run.
    """

    def __init__(self, folder: Path) -> None:
        self._queue, self._room = (open(folder / name, "w") for name in ("queue", "room"))  # noqa: SIM115
        self._is_alone = False

    def enter(self, *, alone: bool) -> None:
        """Wait until a test may run. Who waits for all others to finish keeps the queue, so that none begins anew."""
        if self._is_alone and alone:
            return
        self.leave()
        fcntl.flock(self._queue, fcntl.LOCK_EX)
        fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self._queue, fcntl.LOCK_UN)
        self._is_alone = alone

    def leave(self) -> None:
        """Let others run."""
        self._is_alone = False
        fcntl.flock(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        """At the end of the run."""
        self._queue.close()
        self._room.close()


of_this_worker: Turns | None = None  # where pytest-xdist runs the tests


def have_the_machine() -> None:
    """From here to its end, the test that runs has the machine for itself. It waits until the others have finished."""
    if of_this_worker is not None:
        of_this_worker.enter(alone=True)
