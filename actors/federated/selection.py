"""Who takes part in a round: clients that are matched both ways, were welcomed, and are not kept out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Collection

from gradbus.actors.federated.clients import Members
from gradbus.actors.federated.quarantine import FOR_GOOD, Conduct, Strike
from gradbus.actors.federated.report import Progress
from gradbus.actors.federated.start_condition import Gathering
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.dds.missing_peers import WaitLog
from gradbus.runtime.errors import BusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import Refused
from gradbus.runtime.wire.messages import ClientUpdate, Identity, TrainCmd

_SHOWN = 20  # clients that a line names

log = get_logger("controller")


class Attendance:
    """Waits for clients, and keeps those out whose conduct asks for it."""

    def __init__(
        self, bus: Bus, identity: Identity, members: Members, conduct: Conduct, config: FederatedConfig,
        progress: Progress, *, sleep_until: Callable[[float], Awaitable[None]], changed: Callable[[], None],
    ) -> None:  # fmt: skip
        """``sleep_until``: waits until something happened, or until that time by ``time.monotonic``. ``changed``: the
        table of members did."""
        self._bus = bus
        self._identity = identity
        self._members = members
        self._conduct = conduct
        self._config = config
        self._progress = progress
        self._sleep_until = sleep_until
        self._changed = changed

    async def gather(self, round_id: int, accepted: Collection[int] = ()) -> None:
        """The subscription barrier: enough clients are matched both ways and have been welcomed.

        ``accepted``: clients that need not be there, for their updates count already.

        Raises:
            BarrierTimeout: they were not, for too long.
        """
        config, out = self._config, self._conduct.out(round_id)
        self._progress.phase = "waiting"
        kept_out = f" (kept out: {', '.join(map(str, list(out)[:20]))})" if out else ""
        gathering = Gathering(
            minimum=config.min_clients, expected=config.num_clients, now_s=time.monotonic(),
            timeout_s=config.start_timeout_s, grace_s=config.start_grace_s,
            what=f"round {round_id} cannot start{kept_out}: clients", excused=out,
            doubt=lambda: self._bus.doubt, hint=self._bus.reach.advice,
        )  # fmt: skip
        waiting = WaitLog(log, self._bus.reach, job=self._bus.job, round=round_id)
        while not gathering.may_start(ready := sorted({*accepted, *self.ready(round_id)}), time.monotonic()):
            waiting.look(self._absent(gathering.missing(ready)), doubt=self._bus.doubt)
            # Nothing tells when our own side has matched, which may be after the client's last word.
            await self._sleep_until(min(gathering.next_check_s(), time.monotonic() + config.heartbeat_s))
        if len(ready) < (config.num_clients or 0) - len(out):
            log.warning("starting without all clients", ready=ready, expected=config.num_clients)

    def _absent(self, missing: Collection[int]) -> list[str]:
        """Clients that are waited for, for a line; one that has come and loads its data is no stranger."""
        here = {member.client_id for member in self._members}
        named = [f"client {number}{' (is here, not ready yet)' * (number in here)}" for number in missing]
        return named[:_SHOWN] or ["some client"]

    def ready(self, round_id: int) -> list[int]:
        """Clients that said they are ready, as far as our own side is matched as well."""
        ready = self._members.ready(round_id)
        # Several clients may share a process and so a reader: this holds back only while DDS sees nobody at all.
        return ready if self._bus.matched_readers(TrainCmd) and self._bus.matched_writers(ClientUpdate) else []

    async def on_strike(self, strike: Strike) -> None:
        """A client has sent a bad update."""
        facts = {"client": strike.client_id, "round": strike.round_id, "reason": strike.reason, "strikes": strike.count}
        if not strike.out_until:
            log.warning("strike", **facts)
            return
        until = "for good" if strike.out_until == FOR_GOOD else f"until round {strike.out_until}"
        log.error("client in quarantine", **facts, out=until, detail=strike.detail)
        self._members.keep_out(strike.client_id, strike.out_until)
        incarnation = self._members.incarnation_of(strike.client_id)
        if strike.out_until == FOR_GOOD and incarnation is not None:
            self._members.remove(strike.client_id, incarnation)
            with contextlib.suppress(BusError):  # its next Hello is refused as well
                await self._bus.publish(self._identity, Refused(strike.client_id, incarnation, strike.sentence))
        self._changed()
