"""Whether the machine gave processes their turns: where it did not, a lease that has ended proves nothing."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import ParamSpec

LONG_S = 0.3  # leases of such tests are 1 s
_EVERY_S = 0.05
_TRIES = 3

P = ParamSpec("P")

noted: list[str] = []  # who stood still since the test began


class Watch:
    """A thread that tells each time when it was late, until it is stopped."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._stop = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Watch no more."""
        self._stop.set()

    def _run(self) -> None:
        while True:
            before_s = time.monotonic()
            if self._stop.wait(_EVERY_S):
                return
            late_s = time.monotonic() - before_s - _EVERY_S
            if late_s > LONG_S:
                self._tell(late_s)


def again_where_somebody_stood_still(test: Callable[P, None]) -> Callable[P, None]:
    """A test that fails is run again if one of its processes had no turn for a while: the one of pytest, or another one
    that was noted. Where all had their turns, it has failed."""

    @functools.wraps(test)
    def watched(*arguments: P.args, **named: P.kwargs) -> None:
        for left in reversed(range(_TRIES)):
            noted.clear()
            watch = Watch(lambda late_s: noted.append(f"pytest, for {late_s:.1f} s"))
            try:
                return test(*arguments, **named)
            except AssertionError as error:
                error.add_note(f"who stood still: {noted}")
                if not left or not noted:
                    raise
            finally:
                watch.stop()

    return watched
