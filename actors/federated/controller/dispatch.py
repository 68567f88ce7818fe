"""The controller's messages, answered or passed on. None ends the controller: unusable ones are counted and dropped."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import NamedTuple

from gradbus.actors.federated.controller.client_evaluation import ClientEvaluator
from gradbus.actors.federated.controller.clients import FIRST_HOST, ClientRegistry, HostedClient
from gradbus.actors.federated.controller.cross_site import NOT_WANTED, LocalModelReceiver
from gradbus.actors.federated.controller.current_round import CurrentRound
from gradbus.actors.federated.controller.joining import ClientJoining
from gradbus.actors.federated.controller.liveness import DuplicateControllers, LivenessMonitor
from gradbus.actors.federated.controller.masked_rounds import MaskedRounds
from gradbus.actors.federated.controller.publish import ModelPublisher
from gradbus.actors.federated.controller.round_losses import RoundLosses
from gradbus.actors.federated.controller.run_membership import RunMembership
from gradbus.actors.federated.controller.selection import ParticipantSelection
from gradbus.actors.federated.controller.state import RunContext
from gradbus.actors.federated.controller.updates_in import UpdateReceiver
from gradbus.actors.federated.controller.uploads import RequestedUpload
from gradbus.runtime.bus.bus import Subscription
from gradbus.runtime.errors import BusClosed, ControllerReplaced, GradbusError, JobInUse
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
    TrainingFailure,
    UploadRequest,
)
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, Message, PeerDisconnected, PeerGone

log = get_logger("controller")


class Recipients(NamedTuple):
    """Holds the parts that take what clients send.

    Attributes:
        joining: Hellos. updates: uploads of updates.
        local_models: of models that clients show others; None: they show none.
        publisher: requests of models. evaluator: results of evaluations; None: there are none.
        masked: answers of secure aggregation; None: the run has none.
        losses: failures in rounds. selection: failures before the first round, and who has left.
    """

    joining: ClientJoining
    updates: UpdateReceiver
    local_models: LocalModelReceiver | None
    publisher: ModelPublisher
    evaluator: ClientEvaluator | None
    masked: MaskedRounds | None
    losses: RoundLosses
    selection: ParticipantSelection


class Dispatcher:
    """Gives each message to the part that takes it."""

    def __init__(
        self,
        context: RunContext,
        registry: ClientRegistry,
        membership: RunMembership,
        monitor: LivenessMonitor,
        current_round: CurrentRound,
        recipients: Recipients,
    ) -> None:
        self._context = context
        self._registry = registry
        self._membership = membership
        self._monitor = monitor
        self._current_round = current_round
        self._to = recipients
        self._duplicates = DuplicateControllers(context.bus.job, context.identity)
        self._has_begun = False

    def run_has_begun(self) -> None:
        """Expect from now on that a controller of another run which starts stays away: the clients follow this one."""
        self._has_begun = True

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
                self._context.dropped["handler failed"] += 1
                with contextlib.suppress(Exception):  # the log itself may be what failed: its stream is the host's
                    log.exception("message not handled", kind=type(message).__name__)

    async def _handle(self, message: Message, group: asyncio.TaskGroup) -> None:
        match message:
            case ClientUpdate():
                self._membership.mark_alive(message.client_id, message.frame.key.incarnation)
                if message.frame.key.round_id not in CANDIDATE_ROUNDS:
                    await self._to.updates.on_frame(message)
                elif self._to.local_models is not None:
                    await self._to.local_models.on_frame(message)
            case Control(sender=sender, incarnation=incarnation) if sender != CONTROLLER:
                if isinstance(message.body, Hello):
                    await self._to.joining.on_hello(Identity(sender, incarnation), message.body, message.number)
                    return
                if isinstance(message.body, TrainingFailure) and message.body.run_id == NOT_WELCOMED:
                    self._failed_unwelcomed(Identity(sender, incarnation), message.body)
                    return
                client_id = self._to.joining.id_of(sender, incarnation)
                if self._membership.mark_alive(client_id, incarnation) and (
                    sender == client_id or isinstance(message.body, Leave)
                ):  # else its Hello will come
                    await self._on_client(client_id, incarnation, message.body, group)
            case PeerGone(sender=sender, incarnation=incarnation, why="") if self._monitor.is_stalled():
                self._registry.put_in_doubt(self._to.joining.id_of(sender, incarnation), incarnation, time.monotonic())
            case PeerGone(sender=sender, incarnation=incarnation, why=why):
                ended = f"is shut out: {why}" if why else "is gone: its process has ended, or cannot be reached"
                self._gone(self._to.joining.id_of(sender, incarnation), incarnation, ended)
            case PeerDisconnected(sender=sender, incarnation=incarnation):
                self._membership.mark_disconnected(self._to.joining.id_of(sender, incarnation), incarnation)
            case Control(incarnation=incarnation) if incarnation == self._context.identity.incarnation:
                pass  # one of our own
            case _:
                self._check_duplicates(message)

    def _check_duplicates(self, message: Message) -> None:
        """Raise JobInUse or ControllerReplaced: a message of another controller says that this one must give way."""
        taken = self._duplicates.observe_running(message, self._context.run_id, has_begun=self._has_begun)
        if isinstance(taken, ControllerReplaced):
            self._context.state.give_way(taken)  # what is being committed now is not saved any more
        if taken is not None:
            raise taken

    def _failed_unwelcomed(self, sender: Identity, report: TrainingFailure) -> None:
        """A client that has not joined reports why it cannot."""
        client = self._to.joining.failed_client(sender, report.name)
        is_here = isinstance(client, int) and self._registry.incarnation_of(client) is not None  # then another process
        if report.round_id == BEFORE_FIRST_ROUND and client != "" and not is_here:
            self._note_unprepared(client, report)

    def _note_unprepared(self, client: int | str, report: TrainingFailure) -> None:
        """Note what a client failed with before its first round. ``client``: its id, or the name of one without."""
        shown = client if isinstance(client, str) else client & ~FIRST_HOST  # of a host, the first of its clients
        self._to.selection.note_unprepared(shown, self._to.losses.note_unprepared(shown, report))

    def _note_failure(self, client_id: int, report: TrainingFailure) -> None:
        """Note that the training of a client failed, or what it does before its first round."""
        current_round = self._current_round
        if report.round_id == BEFORE_FIRST_ROUND:
            self._note_unprepared(client_id, report)
        elif self._to.losses.note_failure(current_round.round, client_id, report, attempt=current_round.attempt):
            current_round.notify()

    async def _on_client(self, client_id: int, incarnation: int, body: Body, group: asyncio.TaskGroup) -> None:
        match body:
            case UploadRequest() if body.round_id in CANDIDATE_ROUNDS:
                await self._on_local_model(client_id, incarnation, body)
            case UploadRequest():
                if body.run_id == self._context.run_id:
                    self._registry.note_model(client_id, incarnation, body.round_id - 1)  # its base
                await self._to.updates.on_request(client_id, incarnation, body)
            case ModelRequest():
                self._to.publisher.on_request(client_id, body, group)
            case EvaluationResult():
                if self._to.local_models is not None:
                    self._to.local_models.on_result(client_id, body)
                if self._to.evaluator is not None:
                    self._to.evaluator.on_result(client_id, body)
            case TrainingFailure() if body.run_id == self._context.run_id:
                self._note_failure(client_id, body)
            case MaskAnswer() if self._to.masked is not None:
                self._to.masked.on_answer(client_id, incarnation, body)
            case Leave():
                write = log.warning if body.reason.startswith(FAILED) else log.info
                write("client left", **self._context.client_facts(client_id), reason=body.reason)
                self._gone(client_id, incarnation, f"has left: {body.reason}")
            case _:
                pass  # for a controller only

    async def _on_local_model(self, client_id: int, incarnation: int, request: UploadRequest) -> None:
        """Pass on what a client offers others of its model. One that a start before this one has asked for may come
        where none is wanted."""
        if self._to.local_models is not None:
            await self._to.local_models.on_request(client_id, incarnation, request)
        else:
            await self._context.publish(RequestedUpload(client_id, incarnation, request).receipt(NOT_WANTED))

    def _gone(self, client_id: int, incarnation: int, why: str) -> None:
        if isinstance(self._registry.get(client_id, incarnation), HostedClient):
            return  # its host goes with all of its clients, or with none
        of_host = self._registry.clients_of(client_id, incarnation)
        for one in (client_id, *of_host):
            self._to.updates.forget(one, incarnation)
        if self._registry.remove(client_id, incarnation):
            self._context.bus.close_inbox(incarnation)
            for one in of_host or [client_id]:
                self._to.selection.remember_departure(one, why)
            self._membership.follow_registry()
