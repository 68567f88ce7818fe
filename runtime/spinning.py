"""Whether a thread that waits for another process looks again and again for a short time before it sleeps.

To sleep and to be woken takes about 50 us, as long as a small collective, so looking pays where there is a core for it.
Where there is none it costs much: the other process, or a thread of this one, waits for the core meanwhile, and a
thread that has used up its share gets the next one milliseconds later. So a thread that finds, while it looks, that it
was not running for a while makes all threads of this process sleep at once for some time.
"""

from __future__ import annotations

import os
import time

from gradbus.runtime.cores import usable_cores

STALL_S = 1e-3  # between two looks: more than what is done in between takes, less than another program's turn
REST_STALLS = 4  # a rest is so many times as long as the stall
LONGEST_REST_S = 0.2  # with stalls of 3 ms, one after each rest, they take less than a fiftieth of the time
_SOON_S = 0.02  # a stall that comes so soon after a rest doubles the next one


MOST_SKIPPED = 63  # waits that sleep at once after several that have polled in vain


class PollHistory:
    """Decides whether the next of many waits begins with polling: as long as that finds what is waited for. After a
    poll in vain the next wait sleeps at once, after one more the next three, and so on."""

    def __init__(self) -> None:
        self._skip = self._skipped = 0

    def next_polls(self) -> bool:
        """Whether the wait that begins now polls."""
        if self._skipped < self._skip:
            self._skipped += 1
            return False
        self._skipped = 0
        return True

    def note_poll(self, *, found: bool) -> None:
        """Count a poll."""
        self._skip = 0 if found else min(2 * self._skip + 1, MOST_SKIPPED)


class Spinning:
    """The state of one process. From any thread: what a race may lose is a rest that is not taken."""

    def __init__(self, cores: int) -> None:
        self._rests_until_s = 0.0 if cores > 1 else float("inf")
        self._rest_s = 0.0

    def budget_s(self, now_s: float, budget_s: float) -> float:
        """How long to spin now: the budget, or 0 during a rest. ``now_s``: ``time.monotonic``."""
        return budget_s if now_s >= self._rests_until_s else 0.0

    def yield_core(self) -> bool:
        """Let another thread have this core if one waits for it. False: it was gone for long, so sleep now. That what
        this thread waits for has come meanwhile is no reason to spin again: it would have been woken for that earlier.
        """
        began_s = time.monotonic()
        os.sched_yield()
        now_s = time.monotonic()
        return not self.was_stalled(now_s - began_s, now_s)

    def was_stalled(self, gap_s: float, now_s: float) -> bool:
        """Tell that so much time has passed between two looks. True: there is no core; sleep now."""
        if gap_s < STALL_S:
            return False
        is_soon = now_s - gap_s < self._rests_until_s + _SOON_S
        self._rest_s = min(max(REST_STALLS * gap_s, 2 * self._rest_s if is_soon else 0.0), LONGEST_REST_S)
        self._rests_until_s = now_s + self._rest_s
        return True


SPINNING = Spinning(usable_cores())
