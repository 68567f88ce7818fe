"""A line in the log while processes wait for others.

Processes that wait for others (a rank for the others of its group, a controller for its clients, a client for its
controller, a store for those who join) say so every ten seconds, and an error at the end of the wait says the same. Who
can be met at all is for the transport to say (:class:`.api.Reachable`).
"""

from __future__ import annotations

import time
from typing import Any

from gradbus.runtime.transport.api import Reachable

EVERY_S = 10.0


class WaitLog:
    """Writes a line for each ten seconds that somebody waits for others."""

    def __init__(self, log: Any, reach: Reachable, **facts: Any) -> None:
        """``facts``: who waits, for the line."""
        self._log = log
        self._reach = reach
        self._facts = facts
        self._began_s = time.monotonic()
        self._next_s = self._began_s + EVERY_S

    def look(
        self,
        missing: Any,
        *,
        began_s: float | None = None,
        elsewhere: bool | None = None,
        reason: str = "",
        misconfiguration: str = "",
        hint: str = "",
    ) -> None:
        """Write the line if it is time.

        Args:
            missing: who. began_s: when the wait began, by ``time.monotonic``, where that changes.
            elsewhere: as for :meth:`Reachable.advice`. reason: what is known of why.
            misconfiguration: what is known of others that are set up in another way, see ``Bus.misconfiguration``.
            hint: what to do, where it is known; else it is as :meth:`Reachable.hint` says.
        """
        if began_s is not None and began_s != self._began_s:
            self._began_s, self._next_s = began_s, began_s + EVERY_S
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        known = [text for text in (reason, f"Likely reason: {misconfiguration}" if misconfiguration else "") if text]
        one = isinstance(missing, str) or len(missing) == 1
        self._log.warning(
            "still waiting",
            **self._facts,
            missing=missing,
            waited_s=round(now_s - self._began_s),
            hint=". ".join([*known, hint or self._reach.hint(elsewhere=elsewhere, one=one)]),
        )
