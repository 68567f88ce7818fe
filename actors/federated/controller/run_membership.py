"""What it means for a run that a client comes, goes, falls silent, pauses, or is put in quarantine."""

from __future__ import annotations

import asyncio
import contextlib
import time

from gradbus.actors.federated.controller.client_evaluation import ClientEvaluator
from gradbus.actors.federated.controller.clients import ClientRegistry, HostedClient
from gradbus.actors.federated.controller.current_round import CurrentRound
from gradbus.actors.federated.controller.participation import FOR_GOOD
from gradbus.actors.federated.controller.report import Progress
from gradbus.actors.federated.controller.round_losses import RoundLosses
from gradbus.actors.federated.controller.state import RunContext
from gradbus.actors.federated.controller.update_admission import Strike
from gradbus.runtime.errors import BusError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import Refused

log = get_logger("controller")


class RunMembership:
    """Has what is under way follow the registry, whoever has changed that."""

    def __init__(
        self,
        context: RunContext,
        registry: ClientRegistry,
        progress: Progress,
        current_round: CurrentRound,
        losses: RoundLosses,
        evaluator: ClientEvaluator | None,
    ) -> None:
        """A membership as of the registry. ``losses``: of the open round.

        ``evaluator``: awaits clients as well; None: there is none."""
        self._context = context
        self._registry = registry
        self._progress = progress
        self._current_round = current_round
        self._losses = losses
        self._evaluator = evaluator
        self._changed = asyncio.Event()

    def follow_registry(self) -> None:
        """Draw the consequences of a change of the registry: for the open round, an evaluation, and the display."""
        current_round, state, progress = self._current_round, self._context.state, self._progress
        if current_round.round is not None:
            self._losses.follow_registry(current_round.round, self._registry)
            if current_round.masked is not None:
                current_round.masked.keep_to_members()
        progress.clients = tuple(sorted(member.client_id for member in self._registry if not member.silent))
        progress.out = state.quarantine.excluded(state.round_id + 1)
        self._changed.set()
        if self._evaluator is not None:
            self._evaluator.follow_registry()
        current_round.notify()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until the registry changes, for so long at most."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def mark_alive(self, client_id: int, incarnation: int) -> bool:
        """Note that a client is alive; False: it is not registered. If it was silent it is waited for again, before its
        message is handled: an update counts if its round is still open."""
        client = self._registry.get(client_id, incarnation)
        if client is None:
            return False
        was_silent, silent_for_s = client.silent or client.quiet, client.silent_for_s(time.monotonic())
        client.observe(time.monotonic())
        if was_silent:
            facts = self._context.client_facts(client_id)
            log.info("client responds again", **facts, seconds=round(silent_for_s, 1))
            self.follow_registry()
        return True

    def mark_disconnected(self, client_id: int, incarnation: int) -> None:
        """Note that the host of a client has closed its connection, as it does when its process ends: what is under way
        goes on without it. If it lives, it is waited for again from its next message on; else it is removed when the
        transport is certain."""
        if self._registry.stop_waiting_for(client_id, incarnation):
            log.warning(
                "client disconnected",
                **self._context.client_facts(client_id),
                effect="not waited for until it sends again",
            )
            self.follow_registry()

    async def punish(self, strike: Strike) -> None:
        """Log a bad update, and put its client in quarantine where that follows."""
        of_round = {"round": strike.round_id, "reason": strike.reason, "strikes": strike.count}
        facts = {**self._context.client_facts(strike.client_id), **of_round}
        if not strike.out_until:
            log.warning("strike", **facts)
            return
        until = "for good" if strike.out_until == FOR_GOOD else f"until round {strike.out_until}"
        log.error("client in quarantine", **facts, out=until, detail=strike.detail)
        self._registry.exclude(strike.client_id, strike.out_until)
        incarnation = self._registry.incarnation_of(strike.client_id)
        if strike.out_until == FOR_GOOD and incarnation is not None:
            is_hosted = isinstance(self._registry.get(strike.client_id, incarnation), HostedClient)
            self._registry.remove(strike.client_id, incarnation)
            if not is_hosted:  # else others share it
                self._context.bus.close_inbox(incarnation)
            with contextlib.suppress(BusError):  # its next Hello is refused as well
                await self._context.publish(Refused(strike.client_id, incarnation, strike.sentence))
        self.follow_registry()
