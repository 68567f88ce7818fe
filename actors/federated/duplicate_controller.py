"""One controller to a job: a second one finds the first and stays away.

Two controllers would pull the clients to and fro. So a controller listens before it says its first word: whoever
commands this job already has a writer of commands, and says where it stands with every heartbeat. A controller that has
died has neither, so that its successor need not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.errors import JobTaken
from gradbus.runtime.wire.control import Bye, Status
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import Control, Identity, Message, TrainCmd

LISTEN_S = 0.25  # with nobody there: discovery takes some tens of milliseconds
HEARTBEATS = 3.5  # of ours, at least, with somebody there who says nothing
_TICK_S = 0.05  # of listening at a time: however long one takes where this process stands still, it counts as no more
_TIMES = 2  # heard once may be the last word of one that is gone


class Rivals:
    """Which other controllers are heard, as a pure object."""

    def __init__(self, job: str, identity: Identity) -> None:
        self._job = job
        self._identity = identity
        self._heard: dict[int, int] = {}

    def hear(self, message: Message) -> JobTaken | None:
        """What another controller's word means: the error that says who holds the job, if that is sure."""
        if not isinstance(message, Control) or message.sender != CONTROLLER:
            return None
        other = message.incarnation
        if other == self._identity.incarnation:
            return None
        if isinstance(message.body, Bye):
            self._heard.pop(other, None)
        if not isinstance(message.body, Status):
            return None
        self._heard = {other: self._heard.get(other, 0) + 1}
        if self._heard[other] < _TIMES:
            return None
        status = message.body
        return JobTaken(
            f"job {self._job!r} has a controller already: {status.host or 'of an unknown host'}, {status.phase}, round "
            f"{status.round_id} of run {status.run_id:016x}. Stop that one first, or choose another job (bus.job)"
        )

    def hear_early(self, message: Message) -> JobTaken | None:
        """The same while two that began together both wait for clients: the one that began first goes on."""
        earlier = isinstance(message, Control) and message.incarnation < self._identity.incarnation
        return self.hear(message) if earlier else None


async def claim_job(bus: Bus, identity: Identity, heartbeat_s: float, *, hangs_after_s: float = 0.0) -> None:
    """Make sure that nobody else commands this job.

    Args:
        heartbeat_s: how often a controller says where it stands.
        hangs_after_s: one that lives and has said nothing for so long hangs, and its job is taken over. An evaluation
            in one call into C may hold its interpreter for seconds.

    Raises:
        JobTaken: somebody does.
        ConfigError: this process is not the controller, as its key says.
    """
    rivals = Rivals(bus.job, identity)
    own = int(bus.writes(TrainCmd))  # of an earlier controller on this bus
    looked_s = time.monotonic()
    heard_s = 0.0  # for how long this process has listened
    until_s, longest_s = LISTEN_S, max(LISTEN_S, HEARTBEATS * heartbeat_s, hangs_after_s)
    with bus.subscribe(Control, TrainCmd) as inbox:
        while True:
            bus.standing.check_controller()
            now_s = time.monotonic()
            heard_s, looked_s = heard_s + min(now_s - looked_s, _TICK_S), now_s
            if heard_s >= until_s:  # also where clients talk without a pause
                if heard_s >= longest_s or bus.matched_writers(TrainCmd) <= own:
                    return
                until_s = min(longest_s, heard_s + LISTEN_S)  # for one that has died it is over when DDS knows
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(until_s - heard_s, _TICK_S)):
                    if (taken := rivals.hear(await inbox.get())) is not None:
                        raise taken
