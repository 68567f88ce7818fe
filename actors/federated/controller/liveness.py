"""The controller's heartbeat, the liveness of its clients, and the claim that it is the only controller of its job.

Before it sends anything, a controller looks for another one of its job: that has a writer of commands, and publishes
its status with every heartbeat. A dead one has neither, so that its successor need not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from gradbus.actors.federated.controller.clients import ClientRegistry
from gradbus.actors.federated.controller.replaced_controller import replaced
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.errors import BusError, ControllerReplaced, GradbusError, JobInUse, WriteTimeout
from gradbus.runtime.logs import get_logger, process_name
from gradbus.runtime.plain_text import plain_line
from gradbus.runtime.transport.channels import ToClients
from gradbus.runtime.wire.control import RunEnded, Status
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import Control, Identity, Message, ModelBlob, TrainCmd, new_incarnation

if TYPE_CHECKING:  # these load torch, which the hub of an app without it is spared
    from gradbus.actors.federated.controller.current_round import CurrentRound
    from gradbus.actors.federated.controller.report import Progress
    from gradbus.actors.federated.controller.rounds import Round
    from gradbus.actors.federated.controller.run_membership import RunMembership
    from gradbus.actors.federated.controller.state import RunContext

MAX_NAMED = 64  # clients of each list, and half as many reasons: it is sent twice a second


def make_status(
    progress: Progress,
    round_: Round | None,
    members: ClientRegistry,
    dropped: Mapping[str, int],
    *,
    run_id: int,
    host: str,
    now_s: float,
) -> Status:
    """The status to publish. ``round_``: the open one; ``dropped``: since the last report; ``now_s``: monotonic."""
    awaited = [] if round_ is None else sorted(round_.open)[:MAX_NAMED]
    last = progress.reports[-1] if progress.reports else None
    total = Counter(progress.dropped) + Counter(dropped)
    return Status(
        run_id,
        progress.round_id,
        progress.phase,
        progress.ready,
        progress.expected,
        host,
        minimum=progress.minimum,
        rounds=progress.rounds,
        clients=len(members),
        round_s=0.0 if round_ is None else max(0.0, now_s - round_.opened_at_s),
        remaining_s=0.0 if round_ is None else max(0.0, round_.deadline_at_s - now_s),
        awaited=awaited,
        silent_s=[_silent_s(members, client_id, now_s) for client_id in awaited],
        quarantined=sorted(progress.out)[:MAX_NAMED],
        dropped={reason[:64]: count for reason, count in total.most_common(MAX_NAMED // 2)},
        last_s=0.0 if last is None else last.seconds,
        bytes_up=0 if last is None else last.bytes_up,
        bytes_down=0 if last is None else last.bytes_down,
        accuracy=-1.0 if progress.accuracy is None else progress.accuracy,
        metrics=_finite(progress.metrics),
        epsilon=-1.0 if progress.epsilon is None else progress.epsilon,
        epsilon_budget=-1.0 if progress.epsilon_budget is None else progress.epsilon_budget,
    )


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The first metrics that a message has room for."""
    known = {name[:64]: value for name, value in metrics.items() if math.isfinite(value)}
    return dict(list(known.items())[: MAX_NAMED // 4])


def _silent_s(members: ClientRegistry, client_id: int, now_s: float) -> float:
    seen_s = members.last_seen_at_s(client_id)
    return 0.0 if seen_s is None else max(0.0, now_s - seen_s)


LISTEN_S = 0.25  # where no writer of commands is seen: discovery takes some tens of milliseconds
HEARTBEATS = 3.5  # of our own, at least, where there is a silent one
_TICK_S = 0.05  # of listening at a time: one that takes longer, as this process stands still, counts as no more
_TIMES = 2  # one message may be the last of a controller that is gone
_BEFORE_ROUNDS = ("starting", "waiting", "done", "stopped", "failed")  # phases of one that may yet give way, or ends


class DuplicateControllers:
    """Finds another controller of the job by its messages. Pure: no bus, no clock.

    Attributes:
        replaced: incarnations of controllers that were heard and had been replaced before: they end when they hear of
            this one.
    """

    def __init__(self, job: str, identity: Identity, *, run_id: int = 0, last_start: int = 0) -> None:
        """``run_id``: the run that this controller continues. ``last_start``: incarnation of the newest start of that
        run before this one, by its state: those before that one have been replaced. 0: there was none."""
        self._job = job
        self._identity = identity
        self._run_id = run_id
        self._last_start = last_start
        self._statuses: dict[int, int] = {}
        self.replaced: set[int] = set()

    def observe(self, message: Message) -> JobInUse | None:
        """The error that names the holder of the job, once another controller is certain."""
        if not isinstance(message, Control) or message.sender != CONTROLLER:
            return None
        other = message.incarnation
        if other == self._identity.incarnation:
            return None
        if isinstance(message.body, RunEnded):
            self._statuses.pop(other, None)
        if not isinstance(message.body, Status):
            return None
        if message.body.run_id == self._run_id and other < self._last_start:
            self.replaced.add(other)
            return None
        self._statuses = {other: self._statuses.get(other, 0) + 1}
        if self._statuses[other] < _TIMES:
            return None
        status = message.body
        return JobInUse(
            f"job {self._job!r} has a controller already: {status.host or 'of an unknown host'}, {status.phase}, round "
            f"{status.round_id} of run {status.run_id:016x}. Stop that one first, or choose another job (bus.job)"
        )

    def observe_running(self, message: Message, run_id: int, *, has_begun: bool) -> GradbusError | None:
        """Return why a controller of ``run_id`` that has the job must give way; None: it need not.

        A later start of its own run has its state, and clients that have heard of it follow no earlier one: so one
        message decides. Of two runs that wait for clients the controller that began first goes on; where the later one
        has begun its rounds, that one does, as the earlier one was silent for long.

        Args:
            has_begun: clients follow this controller.
        """
        if not isinstance(message, Control) or message.sender != CONTROLLER:
            return None
        other, own = message.incarnation, self._identity.incarnation
        status = message.body if isinstance(message.body, Status) else None
        of_run = getattr(message.body, "run_id", None)
        if of_run == run_id:
            return self._replaced_by(message, run_id, run_id) if other > own else None
        if other < own:
            return None if has_begun else self.observe(message)
        if status is None or status.phase in _BEFORE_ROUNDS or self.observe(message) is None:
            return None
        return self._replaced_by(message, run_id, status.run_id)

    @staticmethod
    def _replaced_by(message: Control, own_run: int, run_id: int) -> ControllerReplaced:
        body = message.body
        host, state = (body.host, f"{body.phase}, round {body.round_id}") if isinstance(body, Status) else ("", "")
        return replaced(own_run, run_id, message.incarnation, host, state)


async def claim_job(
    bus: Bus,
    identity: Identity,
    heartbeat_s: float,
    *,
    hangs_after_s: float = 0.0,
    run_id: int = 0,
    last_start: int = 0,
) -> None:
    """Make sure that there is no other controller of this job.

    Args:
        run_id, last_start: see :class:`DuplicateControllers`.
        heartbeat_s: how often a controller publishes its status.
        hangs_after_s: a live one that is silent for so long hangs, and its job is taken over. An evaluation in one call
            into C may hold its interpreter for seconds.

    Raises:
        JobInUse: there is one.
        ConfigError: this process may not be the controller, by its key.
    """
    duplicates = DuplicateControllers(bus.job, identity, run_id=run_id, last_start=last_start)
    own = int(bus.writes(TrainCmd))  # of an earlier controller on this bus
    looked_s = time.monotonic()
    listened_s = 0.0  # for how long this process has listened
    until_s, longest_s = LISTEN_S, max(LISTEN_S, HEARTBEATS * heartbeat_s, hangs_after_s)
    # One of PROTOCOL 3 or older sends its status to all peers of the job.
    with bus.subscribe(ToClients, Control, TrainCmd) as inbox:
        while True:
            bus.access_policy.check_controller()
            now_s = time.monotonic()
            listened_s, looked_s = listened_s + min(now_s - looked_s, _TICK_S), now_s
            if listened_s >= until_s:  # also where clients talk without a pause
                if listened_s >= longest_s or bus.matched_writers(TrainCmd) <= own + len(duplicates.replaced):
                    return
                until_s = min(longest_s, listened_s + LISTEN_S)  # for one that has died it is over when DDS knows
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(until_s - listened_s, _TICK_S)):
                    if (taken := duplicates.observe(await inbox.get())) is not None:
                        raise taken


BYE_S = 3.0  # how long the end waits for clients to leave: longer than they wait for last answers
LAST_MODEL_S = 30.0  # and for those of them that fetch the last model, since its last progress

log = get_logger("controller")


@contextlib.contextmanager
def tolerate_write_timeout(what: str, round_id: int) -> Iterator[None]:
    """Go on where a client does not take a message: the others have it, or request what they miss."""
    try:
        yield
    except WriteTimeout as error:
        log.warning("not taken by all", what=what, round=round_id, reason=str(error))


async def announce_run_ended(bus: Bus, run_id: int, *, after: int, heartbeat_s: float) -> None:
    """Announce for a while that all rounds of this run are done, to clients that missed it. ``after``: the incarnation
    of the start that has committed the last round. Raises JobInUse: the job has another controller by now."""
    identity = Identity(CONTROLLER, max(new_incarnation(), after + 1))
    await claim_job(bus, identity, heartbeat_s)
    until_s = time.monotonic() + BYE_S
    while time.monotonic() < until_s:
        with contextlib.suppress(BusError):
            await bus.publish(identity, RunEnded(run_id, True, "all rounds are done"))
        await asyncio.sleep(min(heartbeat_s, BYE_S / 4))


class BeatClock:
    """Knows by its own beats whether this process stands still: stopped, or without processor time."""

    def __init__(self, heartbeat_s: float) -> None:
        """``heartbeat_s``: from beat to beat."""
        self._heartbeat_s = heartbeat_s
        self._beaten_s = time.monotonic()
        self._stalled_until_s = float("-inf")

    def is_stalled(self) -> bool:
        """Whether this process stood still until a moment ago: leases that DDS reports as expired then mean nothing."""
        now_s = time.monotonic()
        return now_s < self._stalled_until_s or now_s - self._beaten_s > 2 * self._heartbeat_s

    def start(self) -> None:
        """The first beat is about to come."""
        self._beaten_s = time.monotonic()

    def note_beat(self, now_s: float, registry: ClientRegistry) -> None:
        """Note a beat. One that is far too late excuses the silence of clients.

        Their messages of that time may be handled after this timer, so the time counts as one heartbeat of silence. Not
        as none: where every beat is late, a client that hangs is still found.
        """
        if now_s - self._beaten_s > 2 * self._heartbeat_s:
            registry.excuse_silence(now_s - self._beaten_s - self._heartbeat_s, now_s)
            self._stalled_until_s = now_s + 2 * self._heartbeat_s
        self._beaten_s = now_s


class LivenessMonitor:
    """Publishes the controller's heartbeat, and watches those of the clients."""

    def __init__(
        self,
        context: RunContext,
        registry: ClientRegistry,
        progress: Progress,
        current_round: CurrentRound,
        membership: RunMembership,
    ) -> None:
        self._context = context
        self._registry = registry
        self._progress = progress
        self._current_round = current_round
        self._membership = membership
        self._clock = BeatClock(context.config.clients.heartbeat_s)

    def is_stalled(self) -> bool:
        """As :meth:`BeatClock.is_stalled`."""
        return self._clock.is_stalled()

    async def run(self) -> None:
        """Send heartbeats, and find silent clients, until cancelled."""
        host, heartbeat_s, registry = process_name(), self._context.config.clients.heartbeat_s, self._registry
        self._clock.start()
        while True:
            status = make_status(
                self._progress,
                self._current_round.round,
                registry,
                self._context.dropped,
                run_id=self._context.run_id,
                host=host,
                now_s=time.monotonic(),
            )
            with contextlib.suppress(BusError):  # the next one will do
                await self._context.publish(status)
            now_s = time.monotonic()
            self._clock.note_beat(now_s, registry)
            silent = registry.mark_silent(now_s)
            for client in silent:
                log.warning(
                    "client silent",
                    **self._context.client_facts(client.client_id),
                    host=client.hello.host,
                    phase=client.hello.phase,
                    seconds=round(client.silent_for_s(now_s), 1),
                    effect="not waited for until it sends again",
                )
            if silent:
                self._membership.follow_registry()
            await asyncio.sleep(heartbeat_s)

    async def announce_end(self, *, ok: bool, reason: str, final: bool = False, linger: bool = False) -> None:
        """Announce the end of the run to the clients.

        If all is done, or ``final``, it is repeated until they have left, as a client that misses it would go on
        waiting. Each client has BYE_S for that from its first message after the end began, so that one that comes only
        now, or was cut off, hears of it, too. Clients that still fetch the last model have LAST_MODEL_S for it, from
        its last progress on. Else it is sent once: they are to wait.

        With ``linger`` it is repeated for a while also without known clients, for a controller that has just started:
        those that come meanwhile get their Welcome, and then this. That is over once as many clients as are expected
        have been here and have left. Clients may be matched and have yet to join, which takes seconds over a lossy
        link: it waits for them as long as for a client that is silent.
        """
        now_s = time.monotonic()
        bye_s, fetching = BYE_S if ok or final else 0.0, _Delivery(self._context.bus, now_s)
        goodbyes = _Goodbyes(self._registry, now_s, bye_s, self._context.bus.remote_lease_s or 0.0)
        expected, reached = self._context.config.clients.num, set[int]()
        while True:
            reached.update(client_id for client_id, _ in self._registry.live_seen_s())
            with contextlib.suppress(BusError, JobInUse):  # a job with another controller has not ended
                await self._context.publish(RunEnded(self._context.run_id, ok, plain_line(reason[:4096]), final))
            are_all_reached = expected is not None and len(reached) >= expected
            if not self._registry.count_live() and (are_all_reached or not linger):
                return
            is_fetched = ok and self._registry.has_fetching
            wait_until_s = fetching.until_s(time.monotonic()) if is_fetched else goodbyes.until_s()
            if linger and self._context.bus.matched_readers(ModelBlob):  # clients that are here, and still join
                wait_until_s = max(wait_until_s, goodbyes.silent_until_s)
            if time.monotonic() >= wait_until_s:
                return
            left_s = max(0.0, wait_until_s - time.monotonic())
            await self._membership.wait_for_change(min(self._context.config.clients.heartbeat_s, left_s))


class _Delivery:
    """Tells for how long the end of a run waits for clients that fetch the last model: for LAST_MODEL_S from the moment
    on at which the transport has last taken something of it, or delivered something. What clients may request again is
    bounded for each, and so is this."""

    def __init__(self, bus: Bus, began_s: float) -> None:
        self._bus = bus
        self._since_s = began_s
        self._last: tuple[int, int] | None = None

    def until_s(self, now_s: float) -> float:
        """Return when the wait is over, by ``time.monotonic``, as it looks now."""
        progress = self._bus.delivery_progress(ModelBlob)
        if self._last is not None and progress != self._last:
            self._since_s = now_s
        self._last = progress
        return self._since_s + LAST_MODEL_S


class _Goodbyes:
    """Tells for how long the end of a run waits for its clients to leave."""

    def __init__(self, registry: ClientRegistry, began_s: float, bye_s: float, lease_s: float) -> None:
        """Args:
        bye_s: for each client, from its first message since ``began_s``; 0: nobody is waited for.
        lease_s: after so long a silence two machines lose each other, and as long they may take to meet again.
        """
        self._registry = registry
        self._began_s = began_s
        self._bye_s = bye_s
        self._latest_s = began_s + max(bye_s, LAST_MODEL_S)
        self.silent_until_s = min(began_s + bye_s + lease_s, self._latest_s)
        self._heard_s: dict[int, float] = {}

    def until_s(self) -> float:
        """Return when the wait is over, by ``time.monotonic``, as it looks now."""
        until_s = self._began_s + self._bye_s
        for client_id, seen_s in self._registry.live_seen_s() if self._bye_s else ():
            if seen_s > self._began_s:
                until_s = max(until_s, self._heard_s.setdefault(client_id, seen_s) + self._bye_s)
            else:
                until_s = max(until_s, self.silent_until_s)
        return min(until_s, self._latest_s)
