"""A task that wants to run every millisecond, and how late it came: what an event loop does to its host.

torch is not loaded here: a process that measures its own start imports this file first.
"""

from __future__ import annotations

import asyncio
import faulthandler
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TextIO

TICK_S = 0.001
_REARM_S = 0.01  # to set the alarm costs a thread, so not every tick does


@asynccontextmanager
async def loop_gaps(
    wanted: bool = True, *, stacks: TextIO | None = None, late_s: float = 0.05
) -> AsyncIterator[list[float]]:
    """Seconds by which a task that wants to run every millisecond came late, as long as the block runs.

    It costs processor time itself (1,000 wake-ups a second), so it runs only where it is ``wanted``.

    Args:
        stacks: file for the stacks of all threads, written whenever the loop is ``late_s`` late: by a thread of C,
            which sees also who holds the GIL.
    """
    gaps: list[float] = []

    async def tick() -> None:
        last = armed = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            gaps.append(max(0.0, now - last - TICK_S))
            if stacks is not None:
                if gaps[-1] > late_s:
                    print(f"-- the loop was {1e3 * gaps[-1]:.0f} ms late\n", file=stacks, flush=True)
                if now > armed + _REARM_S:
                    faulthandler.dump_traceback_later(late_s, file=stacks)
                    armed = now
            last = now

    task = asyncio.create_task(tick(), name="tick") if wanted else None
    try:
        yield gaps
    finally:
        if stacks is not None:
            faulthandler.cancel_dump_traceback_later()
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
