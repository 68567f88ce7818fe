"""The error of a controller whose place a later one has taken: which one, since when, and what to do."""

from __future__ import annotations

import datetime

from gradbus.runtime.errors import ControllerReplaced
from gradbus.runtime.plain_text import plain_line

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def replaced(own_run: int, run_id: int, incarnation: int, host: str, state: str = "") -> ControllerReplaced:
    """Return the error of a controller of ``own_run``.

    Args:
        run_id, incarnation: of the controller in its place. host: host name and process id of that one; empty: not
            known.
        state: its phase and round, in words; empty: not known.
    """
    which = "a later start of it" if run_id == own_run else f"a controller of another run, {run_id:016x},"
    where, standing = plain_line(host) or "on a host that is not known", f", {plain_line(state)}" if state else ""
    return ControllerReplaced(
        f"run {own_run:016x}: {which} has taken the place of this controller: {where}, started "
        f"{started_at(incarnation)}{standing}. This one was paused or cut off meanwhile, and commits nothing more. "
        f"Training goes on there: do not start this one again. If you want this one instead, stop the other one first; "
        f"a start with this state directory then goes on from the last round that is committed in it",
        run_id,
        incarnation,
        host,
    )


def started_at(incarnation: int) -> str:
    """Return when a controller started, by the clock of its machine: UTC, to the second."""
    seconds = (incarnation >> 11) // 1_000_000  # its upper bits are microseconds since 1970
    return (_EPOCH + datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%d %H:%M:%S UTC")
