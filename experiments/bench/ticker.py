"""A task that wants to run every millisecond, and how late it came: what an event loop does to its host.

torch is not loaded here: a process that measures its own start imports this file first.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TextIO

TICK_S = 0.001
_REARM_S = 0.01  # to set the alarm costs a thread, so not every tick does


class RunDelay:
    """Reads how long this thread was ready to run and had no core, as Linux counts it; 0 elsewhere."""

    def __init__(self) -> None:
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1

    def seconds(self) -> float:
        """Return the seconds since the thread began."""
        return 0.0 if self._file < 0 else 1e-9 * int(os.pread(self._file, 100, 0).split()[1])

    def close(self) -> None:
        """Read no more."""
        if self._file >= 0:
            os.close(self._file)


@asynccontextmanager
async def loop_gaps(
    wanted: bool = True, *, stacks: TextIO | None = None, late_s: float = 0.05, held_s: list[float] | None = None
) -> AsyncIterator[list[float]]:
    """Seconds by which a task that wants to run every millisecond came late, as long as the block runs.

    It costs processor time itself (1,000 wake-ups a second), so it runs only where it is ``wanted``.

    Args:
        stacks: file for the stacks of all threads, written whenever the loop is ``late_s`` late: by a thread of C,
            which sees also who holds the GIL. It may crash the process, as it reads stacks that others change.
        held_s: gets the same seconds without those for which the loop's thread had no core: other processes took it.
    """
    gaps: list[float] = []
    delay = RunDelay()

    async def tick() -> None:
        last = armed = time.perf_counter()
        before_s = delay.seconds()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            gaps.append(max(0.0, now - last - TICK_S))
            if held_s is not None:
                delay_s = delay.seconds()
                held_s.append(max(0.0, gaps[-1] - (delay_s - before_s)))
                before_s = delay_s
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
        delay.close()
