"""What a rank says of itself while its group works: once a second, for whoever looks on, and for its own log."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.collectives.engine import Engine
from gradbus.runtime.collectives.stalls import Stalls, who
from gradbus.runtime.errors import BusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import MAX_SEQS, Pulse
from gradbus.runtime.wire.messages import Identity

EVERY_S = 1.0
RANKS_PER_S = 64  # that say so, all together: every rank hears all of it

log = get_logger("group")


def period_s(world: int) -> float:
    """How often each rank of such a group says where it stands."""
    return max(EVERY_S, world / RANKS_PER_S)


@dataclass(slots=True)
class Place:
    """Where the worker of a group is: written by it, read here. -1: there is no worker."""

    step: int = -1
    epoch: int = -1


class Pulses:
    """Tells of one rank of one group."""

    def __init__(self, bus: Bus, identity: Identity, engine: Engine, host: str, *, stall_warning_s: float) -> None:
        self._bus = bus
        self._identity = identity
        self._engine = engine
        self._host = host
        self._stalls = Stalls(engine.group, engine.rank, engine.world, stall_warning_s)
        self._formed_s = self._last_s = time.perf_counter()
        self._last_step = -1
        self.place = Place()

    async def run(self) -> None:
        """Tell until cancelled. Nothing that goes wrong here concerns the group."""
        while True:
            await asyncio.sleep(period_s(self._engine.world))
            try:
                self._stalls.look(self._engine.waiting)
                with contextlib.suppress(BusError):
                    await self._bus.publish(self._identity, self.now(time.perf_counter()))
            except Exception:
                log.exception("pulse failed", group=self._engine.group)

    def now(self, now_s: float) -> Pulse:
        """The message. ``now_s``: ``time.perf_counter``."""
        engine, place = self._engine, self.place
        step, span_s = place.step, now_s - self._last_s
        rate = (step - self._last_step) / span_s if 0 <= self._last_step <= step and span_s > 0 else 0.0
        self._last_step, self._last_s = step, now_s
        waiting = engine.waiting
        oldest = min(waiting, key=lambda operation: operation.started_s, default=None)
        missing = [] if oldest is None else who([oldest], engine.rank)[1]
        return Pulse(
            engine.group, engine.world, self._host[:256], max(0.0, now_s - self._formed_s), step=step,
            epoch=place.epoch, steps_per_s=rate, bytes_out=engine.bytes_out, bytes_in=engine.bytes_in,
            pending=len(waiting), oldest="" if oldest is None else oldest.key.name,
            oldest_s=0.0 if oldest is None else max(0.0, now_s - oldest.started_s), missing=missing[:MAX_SEQS],
            lost=sorted(engine.dead)[:MAX_SEQS],
            dropped={reason[:64]: count for reason, count in engine.dropped.most_common(16)},
        )  # fmt: skip
