"""Collectives that wait too long, and for whom: one log line for each, again after twice the time, and so on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.logs import get_logger

MAX_LINES = 20  # of one look; how many more there are is said in one line

log = get_logger("group")


def who(operations: Sequence[Operation], rank: int) -> tuple[list[int], list[int]]:
    """Ranks that have made the call, and ranks that this rank waits for and that have not, as far as it knows.

    That something is owed by a rank does not mean that it has not called: in all_reduce by shards a rank's sum comes
    when all others have called. Who has sent anything at all has called. Of the others only those are missing that this
    rank waits for: a receiver of a broadcast knows nothing of the other receivers.
    """
    heard = {rank}.union(*(tuple(operation.heard) for operation in operations))
    owing = {other for operation in operations if not operation.done for other in operation.missing}
    return sorted(heard), sorted(owing - heard)


class Stalls:
    """The stall report of one rank of one group. It is asked now and then, and never waits."""

    def __init__(self, group: str, rank: int, world: int, warning_s: float) -> None:
        """``warning_s``: a collective that has waited for so long gets a line. 0: none does."""
        self._group = group
        self._rank = rank
        self._world = world
        self._warning_s = warning_s
        self._told: WeakKeyDictionary[Operation, tuple[float, float]] = WeakKeyDictionary()  # next line, time between

    def look(self, pending: Sequence[Operation], now_s: float | None = None) -> None:
        """Write lines for what waits too long. ``now_s``: ``time.perf_counter``."""
        if not self._warning_s:
            return
        now_s = time.perf_counter() if now_s is None else now_s
        lines = 0
        for operation in pending:
            due_s, every_s = self._told.get(operation, (operation.started_s + self._warning_s, self._warning_s))
            if now_s < due_s or operation.done:
                continue
            self._told[operation] = (now_s + 2 * every_s, 2 * every_s)
            lines += 1
            if lines <= MAX_LINES:
                self._tell(operation, now_s)
        if lines > MAX_LINES:
            log.warning("stalled", more_collectives=lines - MAX_LINES, group=self._group, rank=self._rank)

    def _tell(self, operation: Operation, now_s: float) -> None:
        ready, missing = who([operation], self._rank)
        unknown = sorted(set(range(self._world)) - {*ready, *missing})
        log.warning(
            "stalled", collective=operation.key.name, round=operation.key.round_id, call_no=operation.key.call,
            what=operation.signature, ready=ready, missing=missing, **({"unknown": unknown} if unknown else {}),
            waiting_s=round(now_s - operation.started_s, 1), group=self._group, rank=self._rank,
        )  # fmt: skip
