"""Which rank is to blame when a launch fails: the first one whose end is not the consequence of another's."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from gradbus.experiments.cli.exit_codes import ExitCode


@dataclass(frozen=True, slots=True)
class End:
    """How a rank ended.

    Attributes:
        code: exit code; minus the number of the signal that killed it.
        asked: it had been told to end before.
        has_traceback: among the last lines that it wrote.
    """

    rank: int
    code: int
    asked: bool = False
    has_traceback: bool = False

    @property
    def exit_code(self) -> int:
        """As a shell gives it: 128 + n for signal n; that of an error where the signal only ended what was left."""
        if self._was_left_over:
            return ExitCode.UNEXPECTED
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def is_consequence(self) -> bool:
        """Whether another rank, or the launcher, may have caused it. A rank with a traceback failed by itself, also
        where it had to be ended, because a thread of its own kept it alive."""
        return not self.has_traceback and (self.code == ExitCode.RANK_LOST or self._was_ended)

    @property
    def _was_ended(self) -> bool:
        return self.asked and self.code in (-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM)

    @property
    def _was_left_over(self) -> bool:
        return self.has_traceback and self._was_ended

    @property
    def explains_silence(self) -> bool:
        """Whether others may have waited for this rank in vain: it has a traceback, or a signal of nobody here."""
        return self.has_traceback or (self.code < 0 and not self.asked)

    def __str__(self) -> str:
        if self._was_left_over:
            return "failed, and had to be ended"
        if self.code >= 0:
            stopped = f" (stopped by {_name(self.code - 128)})" if self.code in (129, 130, 143) else ""
            return f"failed with exit code {self.code}{stopped}"
        name = _name(-self.code)
        hint = " (was there not enough memory?)" if self.code == -signal.SIGKILL else ""
        return f"was killed by {name}{hint}"


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def culprit(ends: Sequence[End]) -> End | None:
    """The first failure, in the order of time, that is nobody else's doing; the first of all if there is none such.

    A rank that fails takes leave of the others while it ends: they, who have less to clean up, may be gone first.
    """
    failures = [end for end in ends if end.code != 0]
    own = [end for end in failures if not end.is_consequence]
    if any(end.explains_silence for end in own):  # they did come, and then did not
        own = [end for end in own if end.code != ExitCode.NOBODY_CAME or end.has_traceback]
    return next(iter(own or failures), None)
