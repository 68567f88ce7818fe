"""The controller's voice: that it lives, where it stands, and that it is over."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from gradbus.actors.federated.clients import Members
from gradbus.actors.federated.controller_status import status_of
from gradbus.actors.federated.duplicate_controller import claim_job
from gradbus.actors.federated.report import Progress
from gradbus.actors.federated.rounds import Round
from gradbus.actors.federated.update_receiver import Intake
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.errors import BusError, JobTaken, WriteTimeout
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import Bye
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import Identity, new_incarnation, process_name

BYE_S = 2.0  # how long clients are waited for at the end

log = get_logger("controller")


@contextlib.contextmanager
def unless_taken(what: str, round_id: int) -> Iterator[None]:
    """Send something that some client may not take. The others have it, or ask for what they miss: the run goes on."""
    try:
        yield
    except WriteTimeout as error:
        log.warning("not taken by all", what=what, round=round_id, reason=str(error))


async def say_ended(bus: Bus, run_id: int, *, heartbeat_s: float) -> None:
    """Say for a while that all rounds of this run are done, to clients that have not heard it. Raises JobTaken: the job
    is another controller's by now."""
    identity = Identity(CONTROLLER, new_incarnation())
    await claim_job(bus, identity, heartbeat_s)
    until_s = time.monotonic() + BYE_S
    while time.monotonic() < until_s:
        with contextlib.suppress(BusError):
            await bus.publish(identity, Bye(run_id, True, "all rounds are done"))
        await asyncio.sleep(min(heartbeat_s, BYE_S / 4))


class Presence:
    """Heartbeats out, and those of the clients watched."""

    def __init__(
        self, bus: Bus, identity: Identity, members: Members, intake: Intake, progress: Progress, *, run_id: int,
        heartbeat_s: float, changed: Callable[[], None], open_round: Callable[[], Round | None],
    ) -> None:  # fmt: skip
        """``changed``: called when clients have fallen silent. ``open_round``: the round that is open."""
        self._bus = bus
        self._identity = identity
        self._members = members
        self._intake = intake
        self._progress = progress
        self._run_id = run_id
        self._heartbeat_s = heartbeat_s
        self._changed = changed
        self._open_round = open_round
        self._left = asyncio.Event()
        self._beaten_s = time.monotonic()
        self._doubt_until_s = float("-inf")

    def in_doubt(self) -> bool:
        """Whether this process stood still just now, or until a moment ago: what DDS says of others then, that it has
        not heard them for longer than their lease, is true and tells nothing."""
        now_s = time.monotonic()
        return now_s < self._doubt_until_s or now_s - self._beaten_s > 2 * self._heartbeat_s

    async def beat(self) -> None:
        """Say that the controller lives, and notice clients that do not. Runs until cancelled.

        A beat that comes far too late tells of this process: it was stopped, or had no turn. What its clients said
        meanwhile is still to be handled, and may be so after this timer, so that time counts as one heartbeat. And not
        as none: on a machine on which every beat is late, who hangs is still noticed, after so many more.
        """
        host = process_name()
        self._beaten_s = time.monotonic()
        while True:
            status = status_of(
                self._progress, self._open_round(), self._members, self._intake.dropped, run_id=self._run_id,
                host=host, now_s=time.monotonic(),
            )  # fmt: skip
            with contextlib.suppress(BusError):  # the next one will do
                await self._bus.publish(self._identity, status)
            now_s = time.monotonic()
            if now_s - self._beaten_s > 2 * self._heartbeat_s:
                self._members.could_not_hear(now_s - self._beaten_s - self._heartbeat_s, now_s)
                self._doubt_until_s = now_s + 2 * self._heartbeat_s
            self._beaten_s = now_s
            silent = self._members.find_silent(now_s)
            for member in silent:
                log.warning(
                    "client silent", client=member.client_id, host=member.hello.host, phase=member.hello.phase,
                    seconds=round(member.quiet_s(now_s), 1), effect="it is not waited for until it is heard again",
                )  # fmt: skip
            if silent:
                self._changed()
            await asyncio.sleep(self._heartbeat_s)

    async def bye(self, *, ok: bool, reason: str, final: bool = False, linger: bool = False) -> None:
        """Tell the clients that this is the end.

        If all is done, or ``final``, it is said until they have left, for a client that does not hear it would go on
        waiting. If not, once: they are to wait. With ``linger`` it is said for a while to whoever may be there: a
        controller that has only just started does not know its clients yet.
        """
        until_s = time.monotonic() + (BYE_S if ok or final else 0.0)
        while True:
            with contextlib.suppress(BusError, JobTaken):  # of a job that is another's it is not the end
                await self._bus.publish(self._identity, Bye(self._run_id, ok, reason[:4096], final))
            if (not self._members.heard_from() and not linger) or time.monotonic() >= until_s:
                return
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self._heartbeat_s, max(0.0, until_s - time.monotonic()))):
                    await self._left.wait()

    def on_left(self) -> None:
        """Some client has gone."""
        self._left.set()
