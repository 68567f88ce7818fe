"""The status that a rank publishes once a second while its group works, and its report of stalled collectives.

A collective that waits too long gets one line in the log, which names the ranks it waits for; the next one after twice
the time, and so on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.collectives.engine import Engine
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.errors import BusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import MAX_SEQS, RankStatus, rank_status_period_s
from gradbus.runtime.wire.messages import Identity

MAX_LINES = 20  # of one look; how many more there are is logged in one line

log = get_logger("group")


def called_and_missing(operations: Sequence[Operation], rank: int) -> tuple[list[int], list[int]]:
    """Ranks that have made the call, and ranks that this rank waits for and that have not, as far as it knows.

    That something of a rank is outstanding does not mean that it has not called: in all_reduce by shards a rank's sum
    comes when all others have called. A rank that has sent anything at all has called. Of the others only those are
    missing that this rank waits for: a receiver of a broadcast knows nothing of the other receivers.
    """
    called = {rank}.union(*(tuple(operation.called) for operation in operations))
    outstanding = {other for operation in operations if not operation.done for other in operation.missing}
    return sorted(called), sorted(outstanding - called)


class StallLog:
    """The stall report of one rank of one group. It is asked now and then, and never waits."""

    def __init__(self, group: str, rank: int, world: int, warning_s: float) -> None:
        """``warning_s``: a collective that has waited for so long gets a line. 0: none does. May be changed."""
        self.warning_s = warning_s
        self._group = group
        self._rank = rank
        self._world = world
        self._next_lines: WeakKeyDictionary[Operation, tuple[float, float]] = (
            WeakKeyDictionary()
        )  # next line, time between

    def look(self, pending: Sequence[Operation], now_s: float | None = None) -> None:
        """Write lines for what waits too long. ``now_s``: ``time.perf_counter``."""
        if not self.warning_s:
            return
        now_s = time.perf_counter() if now_s is None else now_s
        late = []
        for operation in pending:
            due_s, every_s = self._next_lines.get(operation, (operation.started_s + self.warning_s, self.warning_s))
            if now_s >= due_s and not operation.done:
                self._next_lines[operation] = (now_s + 2 * every_s, 2 * every_s)
                late.append(operation)
        for operation in late[:MAX_LINES]:  # all have their next time by now, also if a line cannot be written
            self._warn(operation, now_s)
        if len(late) > MAX_LINES:
            log.warning("stalled", more_collectives=len(late) - MAX_LINES, group=self._group, rank=self._rank)

    def _warn(self, operation: Operation, now_s: float) -> None:
        ready, missing = called_and_missing([operation], self._rank)
        unknown = sorted(set(range(self._world)) - {*ready, *missing})
        log.warning(
            "stalled",
            collective=operation.label or operation.key.name,
            round=operation.key.round_id,
            call_no=operation.key.call,
            what=operation.signature,
            ready=ready,
            missing=missing,
            waiting_s=round(now_s - operation.started_s, 1),
            group=self._group,
            rank=self._rank,
            **({"unknown": unknown} if unknown else {}),
        )


@dataclass(slots=True)
class TrainingPosition:
    """Step and epoch of the worker of a group, which writes them. -1: there is no worker. ``mean_ranks``: as in
    RankStatus."""

    step: int = -1
    epoch: int = -1
    mean_ranks: float = 0.0


class StatusReporter:
    """Publishes the status of one rank of one group."""

    def __init__(self, bus: Bus, identity: Identity, engine: Engine, host: str, *, stall_warning_s: float) -> None:
        self._bus = bus
        self._identity = identity
        self._engine = engine
        self._host = host
        self._stalls = StallLog(engine.group, engine.rank, engine.world, stall_warning_s)
        self._formed_s = self._last_s = time.perf_counter()
        self._last_step = -1
        self.position = TrainingPosition()

    async def run(self) -> None:
        """Publish until cancelled. Nothing that goes wrong here concerns the group."""
        while True:
            await asyncio.sleep(rank_status_period_s(self._engine.world))
            try:
                self._stalls.look(self._engine.waiting)
                with contextlib.suppress(BusError):
                    await self._bus.publish(self._identity, self.now(time.perf_counter()))
            except Exception:
                log.exception("rank status failed", group=self._engine.group)

    def now(self, now_s: float) -> RankStatus:
        """The status message. ``now_s``: ``time.perf_counter``."""
        engine, position = self._engine, self.position
        step, span_s = position.step, now_s - self._last_s
        rate = (step - self._last_step) / span_s if 0 <= self._last_step <= step and span_s > 0 else 0.0
        self._last_step, self._last_s = step, now_s
        waiting = engine.waiting
        oldest = min(waiting, key=lambda operation: operation.started_s, default=None)
        missing = [] if oldest is None else called_and_missing([oldest], engine.rank)[1]
        return RankStatus(
            engine.group,
            engine.world,
            self._host[:256],
            max(0.0, now_s - self._formed_s),
            step=step,
            epoch=position.epoch,
            steps_per_s=rate,
            bytes_out=engine.traffic.sent_bytes,
            bytes_in=engine.traffic.received_bytes,
            pending=len(waiting),
            oldest="" if oldest is None else oldest.key.name,
            oldest_s=0.0 if oldest is None else max(0.0, now_s - oldest.started_s),
            missing=missing[:MAX_SEQS],
            lost=sorted(engine.dead)[:MAX_SEQS],
            dropped={reason[:64]: count for reason, count in engine.dropped.most_common(16)},
            mean_ranks=position.mean_ranks,
        )
