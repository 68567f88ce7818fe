"""Whether the machine gave processes their turns: where it did not, a lease that has ended proves nothing."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import ParamSpec

import pytest

LONG_S = 0.8  # leases of such tests are 1 s, and were renewed a moment before
_EVERY_S = 0.05
_TRIES = 2

P = ParamSpec("P")

noted: list[str] = []  # who stood still since the test began
wrong: list[str] = []  # what is wrong whoever stood still


class TriedAgain(UserWarning):
    """A test has failed and is run again."""


@contextlib.contextmanager
def whoever_stands_still() -> Iterator[None]:
    """What is asserted in here has nothing to do with time: a test that fails here is not run again."""
    try:
        yield
    except AssertionError as error:
        wrong.append(f"{error}")
        raise


class Watch:
    """A thread that tells each time when it was late, until it is stopped.

    Only time in which its process had no processor counts: one that computes and lets none of its threads run does
    that itself.
    """

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._stop = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Watch no more."""
        self._stop.set()

    def _run(self) -> None:
        while True:
            before_s, used_before_s = time.monotonic(), time.process_time()
            if self._stop.wait(_EVERY_S):
                return
            used_s = time.process_time() - used_before_s
            late_s = time.monotonic() - before_s - _EVERY_S - used_s
            if late_s > LONG_S:
                self._tell(late_s)


def again_where_somebody_stood_still(test: Callable[P, None]) -> Callable[P, None]:
    """A test that fails is run once more if one of its processes had no turn for a while: the one of pytest, or another
    one that was noted. A warning tells of it. Where all had their turns, or a value was wrong, it has failed."""

    @pytest.mark.filterwarnings("always::stillness.TriedAgain")  # others are errors
    @functools.wraps(test)
    def watched(*arguments: P.args, **named: P.kwargs) -> None:
        for left in reversed(range(_TRIES)):
            noted.clear()
            wrong.clear()
            watch = Watch(lambda late_s: noted.append(f"pytest, for {late_s:.1f} s"))
            try:
                return test(*arguments, **named)
            except AssertionError as error:
                error.add_note(f"who stood still: {noted}; what is wrong nevertheless: {wrong}")
                if not left or not noted or wrong:
                    raise
                warnings.warn(TriedAgain(f"{test.__name__} is run again: {noted} stood still; {error}"), stacklevel=2)
            finally:
                watch.stop()

    return watched
