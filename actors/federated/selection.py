"""The start condition of a round, and its participants: clients matched both ways, welcomed, and not in quarantine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Sequence

from gradbus.actors.federated.clients import ClientRegistry
from gradbus.actors.federated.participation import FOR_GOOD, Strike
from gradbus.actors.federated.report import Progress
from gradbus.actors.federated.state import RunContext
from gradbus.runtime.dds.missing_peers import WaitLog
from gradbus.runtime.errors import BarrierTimeout, BusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import Refused
from gradbus.runtime.wire.messages import ClientUpdate, TrainCmd

_SHOWN = 20  # clients that a line names

log = get_logger("controller")


class StartCondition:
    """Allows the start at once when all expected clients are ready, with at least ``minimum`` of them ``grace_s``
    later, and gives up ``timeout_s`` after ``now_s``. A pure decision."""

    def __init__(
        self, *, minimum: int, expected: int | None, now_s: float, timeout_s: float, grace_s: float,
        excused: Collection[int] = (), describe: Callable[[], tuple[str, str, str]] = lambda: ("start", "", ""),
    ) -> None:  # fmt: skip
        """Begin to wait.

        Args:
            minimum: clients that suffice after the grace. expected: their number, if it is known.
            excused: ids of expected clients that are not waited for.
            describe: gives for the error what cannot start, a likely misconfiguration, and a hint.
        """
        self._minimum = minimum
        self._expected = expected
        self._excused = excused
        self._wanted = max((expected or 0) - sum(i < (expected or 0) for i in excused), minimum)
        self._timeout_s = timeout_s
        self._deadline_at_s = now_s + timeout_s
        self._grace_s = grace_s
        self._grace_until_s: float | None = None
        self._describe = describe

    def may_start(self, ready: Sequence[int], now_s: float) -> bool:
        """Whether to start with these clients now.

        Raises:
            BarrierTimeout: the deadline has passed with fewer than ``minimum``; it names the missing clients.
        """
        if len(ready) >= self._wanted:
            return True
        if len(ready) >= self._minimum:
            if self._grace_until_s is None:
                self._grace_until_s = now_s + self._grace_s
            return now_s >= self._grace_until_s
        self._grace_until_s = None
        if now_s >= self._deadline_at_s:
            what, misconfiguration, hint = self._describe()
            raise BarrierTimeout(
                what, missing=self.missing(ready), ready=len(ready), needed=self._minimum, timeout_s=self._timeout_s,
                misconfiguration=misconfiguration, hint=hint,
            )  # fmt: skip
        return False

    def missing(self, ready: Sequence[int]) -> list[int]:
        """Ids of expected clients that are not among these."""
        here = {*ready, *self._excused}
        return [number for number in range(self._expected or 0) if number not in here]

    def next_check_s(self) -> float:
        """The time at which the answer may change without an event."""
        return self._deadline_at_s if self._grace_until_s is None else self._grace_until_s


class ParticipantSelection:
    """Waits for clients, and puts those with too many strikes in quarantine."""

    def __init__(
        self, context: RunContext, registry: ClientRegistry, progress: Progress, *,
        sleep_until: Callable[[float], Awaitable[None]], changed: Callable[[], None],
    ) -> None:  # fmt: skip
        """``sleep_until`` waits for an event, or until that time by ``time.monotonic``. ``changed`` is called when the
        registry has changed."""
        self._context = context
        self._registry = registry
        self._progress = progress
        self._sleep_until = sleep_until
        self._changed = changed

    async def wait_for_start(self, round_id: int, accepted: Collection[int] = (), *, timeout_s: float) -> None:
        """Wait until enough clients are matched both ways and welcomed. Those in ``accepted`` need not be there, as
        their updates count already. Raises BarrierTimeout: they were not, for so long."""
        config, bus, out = self._context.config, self._context.bus, self._context.state.quarantine.excluded(round_id)
        self._progress.phase = "waiting"
        kept_out = f" (kept out: {', '.join(map(str, list(out)[:20]))})" if out else ""
        condition = StartCondition(
            minimum=config.clients.min, expected=config.clients.num, now_s=time.monotonic(),
            timeout_s=timeout_s, grace_s=config.clients.start_grace_s, excused=out,
            describe=lambda: (
                f"round {round_id} cannot start{kept_out}: clients", bus.misconfiguration, bus.reach.advice()
            ),
        )  # fmt: skip
        waiting = WaitLog(log, bus.reach, job=bus.job, round=round_id)
        while not condition.may_start(ready := sorted({*accepted, *self.ready(round_id)}), time.monotonic()):
            waiting.look(self._absent(condition.missing(ready)), misconfiguration=bus.misconfiguration)
            # There is no event for the matching of this side, which may come after the client's last message.
            await self._sleep_until(min(condition.next_check_s(), time.monotonic() + config.clients.heartbeat_s))
        if len(ready) < (config.clients.num or 0) - len(out):
            log.warning("starting without all clients", ready=ready, expected=config.clients.num)

    def _absent(self, missing: Collection[int]) -> list[str]:
        """Names of missing clients, for the log."""
        here = {client.client_id for client in self._registry}
        named = [f"client {number}{' (is here, not ready yet)' * (number in here)}" for number in missing]
        return named[:_SHOWN] or ["some client"]

    def ready(self, round_id: int) -> list[int]:
        """Clients that are ready, as far as this side is matched as well."""
        ready, bus = self._registry.ready(round_id), self._context.bus
        # Several clients may share a process and so a reader: this holds back only while DDS sees nobody at all.
        return ready if bus.matched_readers(TrainCmd) and bus.matched_writers(ClientUpdate) else []

    async def on_strike(self, strike: Strike) -> None:
        """Log a bad update, and put its client in quarantine where that follows."""
        facts = {"client": strike.client_id, "round": strike.round_id, "reason": strike.reason, "strikes": strike.count}
        if not strike.out_until:
            log.warning("strike", **facts)
            return
        until = "for good" if strike.out_until == FOR_GOOD else f"until round {strike.out_until}"
        log.error("client in quarantine", **facts, out=until, detail=strike.detail)
        self._registry.exclude(strike.client_id, strike.out_until)
        incarnation = self._registry.incarnation_of(strike.client_id)
        if strike.out_until == FOR_GOOD and incarnation is not None:
            self._registry.remove(strike.client_id, incarnation)
            with contextlib.suppress(BusError):  # its next Hello is refused as well
                await self._context.publish(Refused(strike.client_id, incarnation, strike.sentence))
        self._changed()
