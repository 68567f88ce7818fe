"""Clients that join: who each of them is, whether it may take part, and its Welcome or the reason of a refusal."""

from __future__ import annotations

import math
import time
from typing import Any

from gradbus.actors.federated.controller.client_terms import ClientTerms
from gradbus.actors.federated.controller.clients import ClientRegistry, HelloAnswer, Member, duplicate_after_s
from gradbus.actors.federated.controller.current_round import CurrentRound
from gradbus.actors.federated.controller.liveness import LivenessMonitor
from gradbus.actors.federated.controller.naming import ClientNaming, NamedSender
from gradbus.actors.federated.controller.participation import FOR_GOOD
from gradbus.actors.federated.controller.run_membership import RunMembership
from gradbus.actors.federated.controller.state import RunContext
from gradbus.actors.federated.controller.updates_in import UpdateReceiver
from gradbus.runtime.choices import CODECS
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import LAST_ON_CONTROL, Hello, Refused
from gradbus.runtime.wire.frames import UNASSIGNED
from gradbus.runtime.wire.messages import Control, Identity

_OTHER_KIND = {
    "clients": "it is the Controller of a site, and this one takes clients: set its clients.kind to sites",
    "sites": "it is a client, and this Controller takes sites (clients.kind): let it join the Controller of its site",
}
_HOST_AND_ASYNCHRONOUS = (
    "it speaks for several clients, and with federated.mode=asynchronous each client takes the newest model by itself: "
    "use mode=synchronous, or clients that are processes of their own"
)
_MASKS_NOTHING = (
    "with federated.secure_aggregation updates are masked before they leave their client, which it does not do: a host "
    "knows those of many clients, and older versions of gradbus know no masks. Use clients that are processes of their "
    "own, of this version"
)
_ROUNDS_TO_NO_GRID = (
    "with federated.secure_aggregation and the codec {codec} all clients round to a common grid, which its version of "
    "gradbus cannot do: update it, or use the codec fp32"
)

log = get_logger("controller")


class ClientJoining:
    """Answers the Hellos of clients.

    Attributes:
        is_over: the run is.
    """

    def __init__(
        self,
        context: RunContext,
        registry: ClientRegistry,
        membership: RunMembership,
        updates: UpdateReceiver,
        terms: ClientTerms,
        monitor: LivenessMonitor,
        current_round: CurrentRound,
    ) -> None:
        """``updates``: forgets what an earlier start of a client has begun to send."""
        self._context = context
        self._registry = registry
        self._membership = membership
        self._updates = updates
        self._terms = terms
        self._monitor = monitor
        self._current_round = current_round
        self.is_over = False
        config, state = context.config, context.state
        self._naming = ClientNaming(
            state.names,
            num_clients=config.clients.num,
            is_taken=self._is_taken,
            node_of=context.bus.access_policy.node_of,
            assigns_from_s=time.monotonic() + duplicate_after_s(config.clients.heartbeat_s),
            is_site=terms.above is not None,
        )

    def run_is_over(self) -> None:
        """Give a new name its id at once from now on, so that its client learns that the run is over."""
        self.is_over = True

    def next_round(self) -> int:
        """Return the first round that a client which comes now takes part in."""
        is_late = self._current_round.round is not None and self._context.config.mode != "asynchronous"
        return self._context.state.round_id + 1 + is_late

    def id_of(self, sender: int, incarnation: int) -> int:
        """Return the id of a sender, which had none before its Welcome."""
        return self._naming.id_of(sender, incarnation)

    def failed_client(self, sender: Identity, name: str) -> int | str:
        """Return who it is that reports a failure before its Welcome: its id, or its name if it has no id yet; an empty
        name: it cannot be known."""
        return self._naming.failed_client(sender, name) if sender.sender == UNASSIGNED else sender.sender

    def _is_taken(self, client_id: int) -> bool:
        """Whether an id is that of a client that is here, or that took part and may come back."""
        known = self._context.state.participation.of(client_id)
        is_known = known.counted or known.missed or self._context.state.quarantine.out_until(client_id)
        return bool(is_known) or self._registry.incarnation_of(client_id) is not None

    async def on_hello(self, sender: Identity, hello: Hello, number: int) -> None:
        """Answer a Hello. ``number``: of the message."""
        now_s = math.inf if self.is_over else time.monotonic()
        incarnation, found = sender.incarnation, self._naming.resolve(sender, hello, now_s)
        if found.waits:
            return
        client_id = sender.sender if found.refusal else found.client_id
        self._membership.mark_alive(client_id, incarnation)
        before, earlier = self._registry.get(client_id, incarnation), self._registry.incarnation_of(client_id)
        was_ready = before is not None and self._is_ready(before)
        was_paused = before is not None and before.is_paused
        was_welcomed = before is not None and self._is_welcomed(before)
        answer, why = self._answer(found, Identity(client_id, incarnation), hello, number)
        if earlier is not None and self._registry.get(client_id, earlier) is None:
            self._updates.forget(client_id, earlier)  # an older start of it, which is gone
            self._context.bus.close_inbox(earlier)
            self._membership.follow_registry()
        if answer is HelloAnswer.REFUSE:
            await self._refuse(sender, found, hello, why)
            return
        client = self._registry.get(client_id, incarnation)
        if client is not None:
            self._naming.keep(sender, hello, found)
        if answer is HelloAnswer.WELCOME and client is not None:
            await self._terms.welcome(client, to=sender.sender)
        if client is not None and self._is_welcomed(client) and (answer is HelloAnswer.WELCOME or not was_welcomed):
            # Not with its first Welcome, which this message, to all clients, may overtake.
            await self._terms.announce_model(client)
        if client is not None and (before is None or was_ready != self._is_ready(client)):
            self._note_pause(client, was_paused)
            if before is None and hello.ids:
                facts = {"name": hello.name} if hello.name else {}
                log.info(
                    "clients joined", clients=hello.ids[:80], host=hello.host, from_round=client.from_round, **facts
                )
            elif before is None:
                facts = self._context.client_facts(client_id)
                log.info("client joined", **facts, host=hello.host, from_round=client.from_round)
            self._membership.follow_registry()

    def _answer(self, found: NamedSender, client: Identity, hello: Hello, number: int) -> tuple[HelloAnswer, str]:
        """The answer to a Hello, and the reason of a refusal."""
        next_round, quarantine = self.next_round(), self._context.state.quarantine
        kind, out_until = self._context.config.clients.kind, quarantine.out_until(client.sender)
        now_s, is_stalled = time.monotonic(), self._monitor.is_stalled()
        if hello.site is not (kind == "sites"):
            return HelloAnswer.REFUSE, _OTHER_KIND[kind]
        if lacks := self._lacks_for_masks(hello):
            return HelloAnswer.REFUSE, lacks
        if hello.ids and self._context.config.mode == "asynchronous":
            return HelloAnswer.REFUSE, _HOST_AND_ASYNCHRONOUS
        if found.refusal:
            return HelloAnswer.REFUSE, found.refusal
        if hello.ids:
            return self._registry.answer_host_hello(
                client,
                hello,
                number,
                now_s=now_s,
                next_round=next_round,
                out_until=quarantine.out_until,
                is_stalled=is_stalled,
            )
        if out_until == FOR_GOOD:
            return HelloAnswer.REFUSE, quarantine.exclusion_reason(client.sender, next_round) or ""
        if next_round > self._context.config.rounds:
            # There is no round to keep it from, and the last model, which it requests, is that before its next round.
            out_until = 0
        return self._registry.answer_hello(
            client, hello, number, now_s=now_s, next_round=next_round, out_until=out_until, is_stalled=is_stalled
        )

    async def _refuse(self, sender: Identity, found: NamedSender, hello: Hello, why: str) -> None:
        is_unassigned = sender.sender == UNASSIGNED
        facts: dict[str, Any] = {} if is_unassigned else {"client": sender.sender}
        if name := hello.name or found.name:
            facts["name"] = name
        log.warning("client refused", **facts, host=hello.host, reason=why)
        if not is_unassigned:
            self._context.state.participation.note_refused(sender.sender, why)
        refused = Refused(sender.sender, sender.incarnation, why)
        if hello.protocol <= LAST_ON_CONTROL:
            await self._context.bus.publish(self._context.identity, refused, on=Control)
        else:
            await self._context.publish(refused)

    def _lacks_for_masks(self, hello: Hello) -> str:
        """Why a client cannot mask as this run asks for; empty: it can, or need not."""
        config = self._context.config
        if not config.secure_aggregation.enabled:
            return ""
        if not hello.masks:
            return _MASKS_NOTHING
        if not hello.grids and not CODECS.find(config.codec.name).lossless:
            return _ROUNDS_TO_NO_GRID.format(codec=config.codec.name)
        return ""

    def _note_pause(self, client: Member, was_paused: bool) -> None:
        """Log that a client pauses, or goes on."""
        if client.is_paused is not was_paused:
            facts = self._context.client_facts(client.client_id)
            log.info("client paused" if client.is_paused else "client resumed", **facts)
        if client.is_paused:
            self._context.state.participation.note_paused(client.client_id)

    def _is_welcomed(self, client: Member) -> bool:
        return client.hello.session == self._context.identity.incarnation

    def _is_ready(self, client: Member) -> bool:
        return client.hello.ready and self._is_welcomed(client) and not client.is_paused
