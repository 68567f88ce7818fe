"""Which rank failed first: the first one whose exit is not the consequence of another's."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from gradbus.commands.exit_codes import ExitCode


@dataclass(frozen=True, slots=True)
class RankExit:
    """The end of a rank: its exit code, or minus the number of the signal that killed it.

    ``was_asked``: the launcher had sent it a signal before. ``has_traceback``: its last lines hold one.
    """

    rank: int
    code: int
    was_asked: bool = False
    has_traceback: bool = False

    @property
    def _ended_by_launcher(self) -> bool:
        return self.was_asked and self.code in (-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM)

    @property
    def exit_code(self) -> int:
        """As in a shell: 128 + n for signal n; 1 where the signal only ended a rank that had failed before."""
        if self.has_traceback and self._ended_by_launcher:
            return ExitCode.UNEXPECTED
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def is_consequence(self) -> bool:
        """Whether another rank, or the launcher, may have caused it. A rank with a traceback failed by itself, even
        where it had to be ended because a thread of its own kept it alive."""
        return not self.has_traceback and (self.code == ExitCode.RANK_LOST or self._ended_by_launcher)

    def __str__(self) -> str:
        if self.has_traceback and self._ended_by_launcher:
            return "failed, and had to be ended"
        if self.code >= 0:
            stopped = f" (stopped by {_signal_name(self.code - 128)})" if self.code in (129, 130, 143) else ""
            return f"failed with exit code {self.code}{stopped}"
        hint = " (was there not enough memory?)" if self.code == -signal.SIGKILL else ""
        return f"was killed by {_signal_name(-self.code)}{hint}"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def first_failure(exits: Sequence[RankExit]) -> RankExit | None:
    """The first failure in time that no other rank has caused; the first of all where there is none such.

    A rank that fails tells the others while it ends: they have less to clean up, and may exit first.
    """
    failures = [end for end in exits if end.code != 0]
    own = [end for end in failures if not end.is_consequence]
    # Where a rank crashed or was killed from outside, others may have waited for it at the start, in vain.
    if any(end.has_traceback or (end.code < 0 and not end.was_asked) for end in own):
        own = [end for end in own if end.code != ExitCode.NOBODY_CAME or end.has_traceback]
    return next(iter(own or failures), None)
