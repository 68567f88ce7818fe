"""Places where a process can be made to die, to test that nothing is lost there.

A fail point is named in the code's own words, ``after_aggregate_before_commit``, and armed with the round in which it
fires: ``after_aggregate_before_commit:3``. Nothing is armed unless somebody asks for it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

ENVIRONMENT = "GRADBUS_FAIL_AT"


def kill_self() -> None:
    """Die at once, as by ``kill -9``: no cleanup, no flush."""
    os.kill(os.getpid(), signal.SIGKILL)


class FailPoint:
    """At most one armed place."""

    def __init__(self, spec: str | None = None, action: Callable[[], None] = kill_self) -> None:
        """``spec`` is ``name:round``, or None for nothing; ``action`` is what happens there."""
        self._armed: tuple[str, int] | None = None
        self._action = action
        if spec:
            name, _, round_id = spec.partition(":")
            if not name or not round_id.isdigit():
                raise ValueError(f"fail point {spec!r}: expected name:round, for example after_command:2")
            self._armed = (name, int(round_id))

    def reached(self, name: str, round_id: int) -> None:
        """The program is at this place in this round."""
        if self._armed == (name, round_id):
            self._armed = None
            self._action()
