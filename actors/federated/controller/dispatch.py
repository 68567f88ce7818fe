"""The controller's messages, answered or passed on. None ends the controller: unusable ones are counted and dropped."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

from gradbus.actors.federated.controller.asynchronous import proportional_steps
from gradbus.actors.federated.controller.client_evaluation import ClientEvaluator
from gradbus.actors.federated.controller.clients import (
    FIRST_HOST,
    ClientRegistry,
    HelloAnswer,
    HostedClient,
    Member,
    duplicate_after_s,
)
from gradbus.actors.federated.controller.cross_site import LocalModelReceiver
from gradbus.actors.federated.controller.liveness import DuplicateControllers, LivenessMonitor
from gradbus.actors.federated.controller.naming import ClientNaming, NamedSender
from gradbus.actors.federated.controller.order_book import OrderBook
from gradbus.actors.federated.controller.participation import FOR_GOOD
from gradbus.actors.federated.controller.publish import ModelPublisher
from gradbus.actors.federated.controller.state import RunContext
from gradbus.actors.federated.controller.updates_in import UpdateReceiver
from gradbus.runtime.bus.bus import Subscription
from gradbus.runtime.choices import CODECS
from gradbus.runtime.errors import BusClosed, BusError, ControllerReplaced, GradbusError, JobInUse
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire.control import (
    BEFORE_FIRST_ROUND,
    CANDIDATE_ROUNDS,
    FAILED,
    NOT_WELCOMED,
    Body,
    EvaluationResult,
    Hello,
    Leave,
    MaskAnswer,
    ModelRequest,
    Refused,
    RoundTerms,
    TrainingFailure,
    UploadRequest,
    Welcome,
)
from gradbus.runtime.wire.frames import CONTROLLER, UNASSIGNED
from gradbus.runtime.wire.id_ranges import MAX_CHARS, format_ids
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, Message, PeerGone

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
_SAME_SPEED = 0.2  # a change of the steps by less than this share is none

log = get_logger("controller")


def ids_in_terms(participants: Collection[int], ordered: Collection[int] | None, *, may_name_all: bool) -> str:
    """Return the text that names the participants of a round in its terms; empty: all clients.

    Where it has no room, more are named, and updates of those that may not take part are refused: all that the round is
    ``ordered`` from, an order of which has room, or, without an order, all clients if ``may_name_all``.
    """
    named = format_ids(participants)
    if len(named) > MAX_CHARS and ordered is not None:
        return format_ids(ordered)
    return "" if len(named) > MAX_CHARS and may_name_all else named


class RoundEvents(Protocol):
    """The controller's part in the dispatch of messages."""

    def next_round(self) -> int:
        """The first round that a new client takes part in."""

    def membership_changed(self) -> None:
        """A client has come, gone, fallen silent or become ready."""

    def client_gone(self, client_id: int, why: str) -> None:
        """A client is not here any more. ``why``: in words, such as "has left: stopped"."""

    def client_failed(self, client: int | str, report: TrainingFailure) -> None:
        """A client's training failed, or what it does before its first round. ``client``: its id, or the name of one
        that has none yet."""

    def mask_answered(self, client_id: int, incarnation: int, answer: MaskAnswer) -> None:
        """A client's part in secure aggregation."""


class Dispatcher:
    """Turns messages into events of the controller.

    Attributes:
        has_begun: the clients follow this controller: one that starts now stays away.
        is_ending: the run is over: a new name gets its id at once, so that its client learns that.
        has_terms: each round has terms, as it may be ordered to have settings that its command has no field for.
        names_commands: each command is repeated at once in a message that names this start of the controller.
        fetch_models: not all clients take part in a round, and those that do not are not sent its model.
        evaluator: takes results of evaluations. local_models: takes the models that clients show others.
        terms: how to train and to encode, as the level above has it; None: as this controller's settings have it.
    """

    evaluator: ClientEvaluator
    local_models: LocalModelReceiver

    def __init__(
        self,
        context: RunContext,
        registry: ClientRegistry,
        receiver: UpdateReceiver,
        publisher: ModelPublisher,
        monitor: LivenessMonitor,
        events: RoundEvents,
    ) -> None:
        self._context = context
        self._registry = registry
        self._receiver = receiver
        self._publisher = publisher
        self._monitor = monitor
        self._events = events
        self._duplicates = DuplicateControllers(context.bus.job, context.identity)
        self._speeds: dict[int, float] = {}
        self._steps: dict[int, int] = {}
        self.has_begun = self.is_ending = False
        self.fetch_models = False
        self.has_terms = self.names_commands = False
        self.terms: Welcome | None = None
        config, state = context.config, context.state
        self._naming = ClientNaming(
            state.names,
            num_clients=config.clients.num,
            is_taken=self._is_taken,
            node_of=context.bus.access_policy.node_of,
            assigns_from_s=time.monotonic() + duplicate_after_s(config.clients.heartbeat_s),
            is_site=lambda: self.terms is not None,
        )

    def _is_taken(self, client_id: int) -> bool:
        """Whether an id is that of a client that is here, or that took part and may come back."""
        known = self._context.state.participation.of(client_id)
        is_known = known.counted or known.missed or self._context.state.quarantine.out_until(client_id)
        return bool(is_known) or self._registry.incarnation_of(client_id) is not None

    async def run(self, inbox: Subscription, group: asyncio.TaskGroup) -> None:
        """Handle messages until the bus is closed. Raises JobInUse, ControllerReplaced: another controller has the
        job."""
        while True:
            try:
                message = await inbox.get()
            except BusClosed:
                if inbox.fault:
                    raise
                raise BusClosed("the bus was closed under a running controller: stop the controller first") from None
            try:
                await self._handle(message, group)
            except (JobInUse, ControllerReplaced):
                raise
            except GradbusError as error:
                log.warning("message not handled", kind=type(message).__name__, reason=str(error))
            except Exception:  # our own mistake: one message must not end a run of days
                self._receiver.dropped["handler failed"] += 1
                with contextlib.suppress(Exception):  # the log itself may be what failed: its stream is the host's
                    log.exception("message not handled", kind=type(message).__name__)

    async def _handle(self, message: Message, group: asyncio.TaskGroup) -> None:
        match message:
            case ClientUpdate():
                self._mark_alive(message.client_id, message.frame.key.incarnation)
                is_local_model = message.frame.key.round_id in CANDIDATE_ROUNDS
                await (self.local_models if is_local_model else self._receiver).on_frame(message)
            case Control(sender=sender, incarnation=incarnation) if sender != CONTROLLER:
                if isinstance(message.body, Hello):
                    await self._hello(Identity(sender, incarnation), message.body, message.number)
                    return
                if isinstance(message.body, TrainingFailure) and message.body.run_id == NOT_WELCOMED:
                    self._failed_unwelcomed(Identity(sender, incarnation), message.body)
                    return
                client_id = self._naming.id_of(sender, incarnation)
                if self._mark_alive(client_id, incarnation) and (
                    sender == client_id or isinstance(message.body, Leave)
                ):  # else its Hello will come
                    await self._on_client(client_id, incarnation, message.body, group)
            case PeerGone(sender=sender, incarnation=incarnation, why="") if self._monitor.is_stalled():
                self._registry.wait_for(self._naming.id_of(sender, incarnation), incarnation, time.monotonic())
            case PeerGone(sender=sender, incarnation=incarnation, why=why):
                ended = f"is shut out: {why}" if why else "is gone: its process has ended, or cannot be reached"
                self._gone(self._naming.id_of(sender, incarnation), incarnation, ended)
            case _:
                self._check_duplicates(message)

    def _check_duplicates(self, message: Message) -> None:
        """Raise JobInUse or ControllerReplaced: a message of another controller says that this one must give way."""
        taken = self._duplicates.observe_running(message, self._context.run_id, has_begun=self.has_begun)
        if isinstance(taken, ControllerReplaced):
            self._context.state.replaced = taken  # what is being committed now is not saved any more
        if taken is not None:
            raise taken

    def _failed_unwelcomed(self, sender: Identity, report: TrainingFailure) -> None:
        """A client that has not joined reports why it cannot."""
        client = self._naming.failed_client(sender, report.name) if sender.sender == UNASSIGNED else sender.sender
        is_here = isinstance(client, int) and self._registry.incarnation_of(client) is not None  # then another process
        if report.round_id == BEFORE_FIRST_ROUND and client != "" and not is_here:
            self._events.client_failed(client, report)

    async def _on_client(self, client_id: int, incarnation: int, body: Body, group: asyncio.TaskGroup) -> None:
        match body:
            case UploadRequest() if body.round_id in CANDIDATE_ROUNDS:
                await self.local_models.on_request(client_id, incarnation, body)
            case UploadRequest():
                if body.run_id == self._context.run_id:
                    self._registry.holds(client_id, incarnation, body.round_id - 1)  # its base
                await self._receiver.on_request(client_id, incarnation, body)
            case ModelRequest():
                self._publisher.on_request(client_id, body, group)
            case EvaluationResult():
                self.local_models.on_result(client_id, body)
                self.evaluator.on_result(client_id, body)
            case TrainingFailure() if body.run_id == self._context.run_id:
                self._events.client_failed(client_id, body)
            case MaskAnswer():
                self._events.mask_answered(client_id, incarnation, body)
            case Leave():
                write = log.warning if body.reason.startswith(FAILED) else log.info
                write("client left", **self._context.client_facts(client_id), reason=body.reason)
                self._gone(client_id, incarnation, f"has left: {body.reason}")
            case _:
                pass  # for a controller only

    def _mark_alive(self, client_id: int, incarnation: int) -> bool:
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
            self._events.membership_changed()
        return True

    async def _hello(self, sender: Identity, hello: Hello, number: int) -> None:
        now_s = math.inf if self.is_ending else time.monotonic()
        incarnation, found = sender.incarnation, self._naming.resolve(sender, hello, now_s)
        if found.waits:
            return
        client_id = sender.sender if found.refusal else found.client_id
        self._mark_alive(client_id, incarnation)
        before, earlier = self._registry.get(client_id, incarnation), self._registry.incarnation_of(client_id)
        was_ready = before is not None and self._is_ready(before)
        was_paused = before is not None and before.is_paused
        answer, why = self._answer(found, Identity(client_id, incarnation), hello, number)
        if earlier is not None and self._registry.get(client_id, earlier) is None:
            self._receiver.forget(client_id, earlier)  # an older start of it, which is gone
            self._events.membership_changed()
        if answer is HelloAnswer.REFUSE:
            await self._refuse(sender, found, hello, why)
            return
        client = self._registry.get(client_id, incarnation)
        if client is not None:
            self._naming.keep(sender, hello, found)
        if answer is HelloAnswer.WELCOME and client is not None:
            await self.welcome(client, to=sender.sender)
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
            self._events.membership_changed()

    def _answer(self, found: NamedSender, client: Identity, hello: Hello, number: int) -> tuple[HelloAnswer, str]:
        """The answer to a Hello, and the reason of a refusal."""
        next_round, quarantine = self._events.next_round(), self._context.state.quarantine
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
            return self._registry.host_hello(
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
        return self._registry.hello(
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
        await self._context.publish(Refused(sender.sender, sender.incarnation, why))

    def _lacks_for_masks(self, hello: Hello) -> str:
        """Why a client cannot mask as this run asks for; empty: it can, or need not."""
        config = self._context.config
        if not config.secure_aggregation.enabled:
            return ""
        if not hello.masks:
            return _MASKS_NOTHING
        if not hello.grids and not CODECS.make(config.codec).lossless:
            return _ROUNDS_TO_NO_GRID.format(codec=config.codec.name)
        return ""

    def _note_pause(self, client: Member, was_paused: bool) -> None:
        """Log that a client pauses, or goes on."""
        if client.is_paused is not was_paused:
            facts = self._context.client_facts(client.client_id)
            log.info("client paused" if client.is_paused else "client resumed", **facts)
        if client.is_paused:
            self._context.state.participation.note_paused(client.client_id)

    def _is_ready(self, client: Member) -> bool:
        is_welcomed = client.hello.session == self._context.identity.incarnation
        return client.hello.ready and is_welcomed and not client.is_paused

    async def welcome(self, client: Member, *, to: int | None = None) -> None:
        """Send a client its Welcome. ``to``: as what it sends, where that is not its id."""
        config = self._context.config
        training, sharing = config.training, self._context.state.model.sharing
        masked = config.secure_aggregation.enabled
        is_host = client.client_id >= FIRST_HOST
        welcome = Welcome(
            to=client.client_id if to is None else to,
            incarnation=client.incarnation,
            run_id=self._context.run_id,
            next_round=client.from_round,
            codec=config.codec.name,
            codec_options=CODECS.to_json(config.codec),
            num_clients=config.clients.num or 0,
            heartbeat_s=config.clients.heartbeat_s,
            memory=self._context.bus.memory.here,
            frozen=self._publisher.frozen_hash,
            rule=training.rule.name,
            options=self._options(client.client_id),
            round_s=config.round.timeout_s,
            broadcast=self._publisher.num_broadcast,
            has_terms=self.has_terms or self.fetch_models or is_host or masked,
            fetch_models=self.fetch_models,
            masked=masked,
            include=list(sharing.include) if sharing.has_patterns else [],
            exclude=list(sharing.exclude),
            buffers=dict(sharing.buffers),
            buffer_layout=self._context.state.model.buffers.digest,
            section_codec=config.section_codec.name,
            section_options=CODECS.to_json(config.section_codec),
            downlink_codec=config.downlink_codec.name,
            client_id=-1 if is_host else client.client_id,
            named_commands=self.names_commands,
            name=client.hello.name if is_host else self._context.state.names.own_name_of(client.client_id),
        )
        if (terms := self.terms) is not None:
            welcome = replace(
                welcome,
                codec=terms.codec,
                codec_options=terms.codec_options,
                section_codec=terms.section_codec,
                section_options=terms.section_options,
                rule=terms.rule,
                options=terms.options,
            )
        await self._context.publish(welcome)
        await self._publisher.announce_to(client.client_id)

    def _options(self, client_id: int) -> dict[str, Any]:
        own = {"training.steps": self._steps[client_id]} if client_id in self._steps else {}
        return {**self._context.config.sent_options(), **self._context.state.terms(), **own}

    def round_terms(
        self, round_id: int, participants: Collection[int], book: OrderBook, *, held: bool, attempt: int = 0
    ) -> RoundTerms | None:
        """Return what belongs to the command of a round, and has no field in it; None: there is no such setting.

        Args:
            held: no update is added before those of all are announced.
            attempt: at the round, with secure aggregation.
        """
        names_them = self.fetch_models or self._registry.has_hosts or bool(attempt)
        if not self.has_terms and not names_them:
            return None
        ordered = book.named(round_id)
        named = ""
        if names_them or ordered is not None:
            named = ids_in_terms(participants, ordered, may_name_all=not self.fetch_models)
        return RoundTerms(
            self._context.run_id,
            round_id,
            book.terms_of(round_id),
            named,
            held=held,
            attempt=attempt,
            each=book.each(round_id),
        )

    async def note_speeds(self, speeds: Mapping[int, float]) -> None:
        """Give clients steps in proportion to these, in steps a second: one whose number changes is welcomed anew."""
        here = {client.client_id for client in self._registry}  # one that has left sets no pace
        self._speeds = {one: speed for one, speed in {**self._speeds, **speeds}.items() if one in here}
        for client_id, steps in proportional_steps(self._context.config.training.steps, self._speeds).items():
            before = self._steps.get(client_id, self._context.config.training.steps)
            if abs(steps - before) <= before * _SAME_SPEED:
                continue
            self._steps[client_id] = steps
            incarnation = self._registry.incarnation_of(client_id)
            client = None if incarnation is None else self._registry.get(client_id, incarnation)
            if client is not None:
                with contextlib.suppress(BusError):  # its next Welcome has it
                    await self.welcome(client)

    def _gone(self, client_id: int, incarnation: int, why: str) -> None:
        if isinstance(self._registry.get(client_id, incarnation), HostedClient):
            return  # its host goes with all of its clients, or with none
        of_host = self._registry.clients_of(client_id, incarnation)
        for one in (client_id, *of_host):
            self._receiver.forget(one, incarnation)
        if self._registry.remove(client_id, incarnation):
            for one in of_host or [client_id]:
                self._events.client_gone(one, why)
            self._events.membership_changed()
