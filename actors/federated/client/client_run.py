"""A client's part in a run, once its model is built and its id is known: what it does with each message, and its work.

Its next action follows from its state (newest command, newest model, last round done), never from the order in which
messages came.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from gradbus.actors.federated.client.client_models import ClientModels, FrozenParameters
from gradbus.actors.federated.client.client_observer import ClientObserver, ClientSummary
from gradbus.actors.federated.client.client_rounds import ClientRounds, Outbox, UpdateMaking
from gradbus.actors.federated.client.evaluation_answers import EvaluationAnswers
from gradbus.actors.federated.client.last_model import fetch_last_model
from gradbus.actors.federated.client.local_evaluation import LocalEvaluation
from gradbus.actors.federated.client.local_training import LocalTraining
from gradbus.actors.federated.client.older_controllers import ask_older_controller
from gradbus.actors.federated.client.pacing import Pacer
from gradbus.actors.federated.client.round_inputs import RoundInputs
from gradbus.actors.federated.client.run_terms import RunTerms, check_run
from gradbus.actors.federated.client.session import ClientContext, check_waiting, listen
from gradbus.actors.federated.client.updates_out import ANSWERS, EncodedUpdate
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing, layout_of
from gradbus.actors.federated.protocol import PAUSED, REPEAT_AFTER_S
from gradbus.codecs import Codec
from gradbus.runtime.bus.bus import Subscription
from gradbus.runtime.errors import ConfigError, JoinDeclined, JoinRefused
from gradbus.runtime.logs import get_logger, process_name
from gradbus.runtime.transport.channels import Inbox, ToClients
from gradbus.runtime.transport.wait_log import EVERY_S, WaitLog
from gradbus.runtime.wire.control import (
    PROTOCOL,
    EvaluationRequest,
    Hello,
    LocalModelRequest,
    MaskRoster,
    MaskShares,
    MaskSurvivors,
    ModelAvailable,
    PacketsMissing,
    Refused,
    RepeatedCommand,
    RoundTerms,
    RunEnded,
    Status,
    TrainingFailure,
    Welcome,
)
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.id_ranges import has_id, parse_ids
from gradbus.runtime.wire.messages import ClientUpdate, Control, Identity, Message, PeerGone, TrainCmd

log = get_logger("client")


class Prepared(NamedTuple):
    """Holds what a client has prepared off the loop, before it takes part.

    Attributes:
        model: that is exchanged. hello: its first Hello.
        frozen: takes what no round changes. own: codecs of the user's own.
        training, evaluation: on its own data; None: others train for it. pacer: holds the training to the budget of
            this client; None: there is none.
    """

    model: FlatModel
    hello: Hello
    frozen: FrozenParameters
    own: tuple[type[Codec], ...]
    training: LocalTraining | None = None
    evaluation: LocalEvaluation | None = None
    pacer: Pacer | None = None


class LocalParts(NamedTuple):
    """The parts of a client that trains and evaluates on its own data."""

    training: LocalTraining
    rounds: ClientRounds
    answers: EvaluationAnswers


def hello_of(model: FlatModel, name: str) -> Hello:
    """Return the first Hello of a client: what its model is."""
    return Hello(
        protocol=PROTOCOL,
        dim=model.everything[0],
        layout=model.everything[1],
        ready=False,
        session=0,
        phase="idle",
        round_id=-1,
        model_round=-1,
        host=process_name(),
        next_round=-1,
        masks=True,
        grids=True,
        trained_dim=model.trained[0],
        trained_layout=model.trained[1],
        name=name,
    )


class ClientRun:
    """The part of one client in a run. All methods are called on the loop.

    Attributes:
        model: that is exchanged. models: those that have arrived.
    """

    def __init__(self, context: ClientContext, prepared: Prepared, outbox: Outbox, observer: ClientObserver) -> None:
        """Make all parts; nothing has been sent yet."""
        self.model = prepared.model
        self._context = context
        self._hello = prepared.hello
        self._pacer = prepared.pacer
        self._outbox = outbox
        self._observer = observer
        self._failures = context.failures
        self._session = context.session
        self._status = context.status
        self._changed = context.changed
        self._compute = context.compute
        self._group = context.group
        self._waiting = WaitLog(log, context.bus.reach, **context.facts())
        self._is_ready = False  # the task has loaded its data
        self._is_over = False
        self.models = ClientModels(
            context, prepared.model, prepared.frozen, prepared.own, wait=self._wait, follower=observer
        )
        self._parts: LocalParts | None = None
        if prepared.training is not None and prepared.evaluation is not None:
            making = UpdateMaking(self._make_update, self._is_called_off)
            training = prepared.training
            self._parts = LocalParts(
                training=training,
                rounds=ClientRounds(context, outbox, training, self.models, observer, making),
                answers=EvaluationAnswers(context, self.models, prepared.evaluation, training, outbox),
            )

    @property
    def _local(self) -> LocalParts:
        assert self._parts is not None, "who has others train overrides what needs it"
        return self._parts

    @property
    def summary(self) -> ClientSummary:
        """Return what it did so far."""
        local = self._local
        return ClientSummary(local.rounds.counted, local.rounds.refused, self._outbox.bytes_up, local.training.train_s)

    async def take_part(self) -> None:
        """Take part until all rounds are done.

        Raises:
            As :meth:`.Client.run`, possibly in a group.
        """
        bus = self._context.bus
        # The inbox last: what arrives there shows that the controller has found the other readers, too.
        kinds = (TrainCmd, ToClients, Inbox(self._context.identity.incarnation))
        with bus.subscribe(*kinds, only=self.concerns) as inbox:
            bus.open_writer(ClientUpdate)
            await self._follow(inbox)

    async def _follow(self, inbox: Subscription) -> None:
        context = self._context
        self.models.receive(True)
        helpers = [
            self._group.create_task(work, name=f"client-{context.client_id}-{name}")
            for name, work in (
                ("listen", listen(inbox, self.handle)),
                ("heartbeat", context.heartbeat.run()),
                ("older-controller", self._ask_older_controller()),
                ("show-models", self._show_models()),
            )
        ]
        try:
            await self._work()
            await self.models.settle()
            await self._end_well()
        except Exception as error:
            self._failures.leave_with(error)
            raise
        finally:
            self._is_over = True
            self.models.receive(False)
            await self._failures.report_declined(Identity(context.client_id, context.identity.incarnation))
            await context.heartbeat.leave("done" if self._session.ended else self._failures.leaving)
            for helper in helpers:
                helper.cancel()

    async def _ask_older_controller(self) -> None:
        context = self._context
        await ask_older_controller(context.bus, context.identity, context.heartbeat.make_hello, self.handle)

    async def _show_models(self) -> None:
        try:
            await self._observer.show_models()
        except Exception as error:  # it ends this client, whose work is cancelled
            self._failures.leave_with(error)
            raise

    async def _end_well(self) -> None:
        """Give the program the model after the last round, and the end of the run, if that has ended well."""
        if self._session.ended is not None:
            await self._take_last_model()
            await self._observer.show_newest()
            await self._observer.run_ended(self.summary)

    async def _take_last_model(self) -> None:
        await fetch_last_model(self._context, self.models, self._wait, self._wants_last_model)

    def _wants_last_model(self, welcome: Welcome) -> bool:
        return self.models.receives_all(welcome)

    def describe(self, matched: bool) -> Hello:
        """Return the Hello of this client as it is now. ``matched``: the bus is matched with the controller both
        ways."""
        current, (phase, phase_s) = self._session, self._status.report(self._outbox.updates.phase)
        is_chosen, shape = current.welcome is not None and bool(current.welcome.include), self.models.shape
        return replace(
            self._hello,
            name=self._context.own_name,
            ready=self._is_ready and matched,
            session=current.incarnation if current.welcome is not None else 0,
            phase=phase,
            phase_s=phase_s,
            round_id=current.command.round_id if current.command is not None else -1,
            model_round=self.models.replica.round_id,
            memory=self.models.memory_here,
            next_round=-1 if current.from_round is None else current.from_round,
            shared_dim=shape.dim if is_chosen else 0,
            shared_layout=shape.layout if is_chosen else 0,
        )

    def announce(self) -> None:
        """Send a Hello soon, as something has changed that it reports."""
        if self._is_over:
            return
        hello = self._context.heartbeat.send_hello()
        try:
            self._group.create_task(hello, name=f"client-{self._context.client_id}-hello")
        except RuntimeError:  # something has ended this client, which only waits for its training to let go
            hello.close()

    async def _report_unprepared(self, error: Exception, run_id: int) -> None:
        """Report what this client ends with before its first round of this run."""
        context = self._context
        identity = Identity(context.client_id, context.identity.incarnation)  # of a host: of its first client
        await self._failures.report(identity, "", error, run_id)

    # Messages

    def concerns(self, message: Message) -> bool:
        """Whether a message is for this client: from the controller, to all clients or to this one."""
        if isinstance(message, Control):
            client_id = self._context.client_id
            return message.sender == CONTROLLER and getattr(message.body, "to", client_id) == client_id
        return not isinstance(message, PeerGone)

    def handle(self, message: Message) -> None:
        """Take a message that is for this client. Raises JoinRefused, JoinDeclined, TrainingFailed: it ends its run."""
        match message:
            case TrainCmd() if self._session.names_commands:
                return
            case TrainCmd():
                self._on_command(is_other=self._session.take(message))
            case Control(sender=sender, incarnation=session, body=body) if sender == CONTROLLER:
                if not self._session.accepts_session(session, body):
                    return
                self._on_controller(session, body)
            case _:
                return
        self._changed.set()

    def _on_command(self, *, is_other: bool) -> None:
        """Stop what the newest command makes superfluous."""
        if is_other and self._session.repeats is None:
            self._compute.stop_current()  # what is being trained now is no longer wanted
        self._interrupt_sending()

    def _on_controller(self, session: int, body: Any) -> None:
        current, context = self._session, self._context
        me = (context.identity.sender, context.identity.incarnation)
        match body:
            case Welcome() if (body.to, body.incarnation) == me:
                self._accept_welcome(session, body)
                self.announce()
            case Refused() if (body.to, body.incarnation) == me:
                raise JoinRefused(body.why)
            case Status() if session != current.incarnation and current.welcome is not None:
                current.await_welcome()
                self.announce()
            case _ if isinstance(body, (*ANSWERS, PacketsMissing)) and (body.to, body.incarnation) == me:
                self._outbox.on_answer(session, body, self._group)
            case RoundTerms() | RepeatedCommand() if body.run_id == current.run_id and session == current.incarnation:
                self._take_round(body)
            case EvaluationRequest() | LocalModelRequest() if session == current.incarnation:
                self._take_request(body)
            case MaskRoster() | MaskShares() | MaskSurvivors() if session == current.incarnation and current.welcome:
                self._outbox.masking.on_request(body, current.welcome, self.models.shape.dim, self._group)
            case ModelAvailable() if session == current.incarnation:
                self.models.on_notice(session, body)
            case RunEnded() if body.run_id == current.run_id and body.ok:
                current.end(body)
                self._observer.run_has_ended()
                self.models.end()
                self._compute.stop_current()
                self._interrupt_sending()
            case RunEnded() if body.run_id == current.run_id and body.final:
                raise self._failures.make_error(body, context.client_id)
            case _:
                pass

    def _accept_welcome(self, session: int, welcome: Welcome) -> None:
        """Follow the controller. Raises JoinDeclined: it asks for what this client does not give."""
        current = self._session
        try:
            run = self._read_terms(welcome)  # before anything is sent
            if current.welcome is None or session != current.incarnation:
                self._start_session(session, run)
        except JoinDeclined as error:
            self._failures.decline(error, welcome.run_id)
            raise
        current.accept(welcome)
        self._interrupt_sending()  # a controller that had taken this client for dead holds nothing of its update

    def _read_terms(self, welcome: Welcome) -> RunTerms:
        """Read what the controller asks for. Raises JoinDeclined: it is what this client does not give."""
        try:
            run = self._context.choices.read(welcome)
            check_run(run, self._context.config, self.model.specs)
            return run
        except ConfigError as error:
            raise JoinDeclined(str(error)) from None

    def _start_session(self, session: int, run: RunTerms) -> None:
        """Follow another controller, or another start of it: work for the one before is of no use. Raises JoinDeclined:
        its patterns do not fit the model."""
        welcome = run.welcome
        if welcome.run_id != self._session.run_id:
            self._observer.keep_personal({})  # training begins with what was built, too
        self._session.start_session(session, welcome)
        self._outbox.masking.forget()
        self._interrupt_sending()
        try:
            shape = self.model.shape_of(run.sharing)
        except ConfigError as error:
            raise JoinDeclined(str(error)) from None
        self.models.start(welcome, shape, layout_of(self.model.specs, run.sharing).max_bytes)
        self._compute.stop_current()
        named = {"name": welcome.name} if welcome.name else {}
        self._context.probe.note(
            "welcomed", **named, run=f"{welcome.run_id:016x}", session=session, from_round=welcome.next_round
        )
        log.info("welcomed", **self._context.facts(), run=f"{welcome.run_id:016x}", from_round=welcome.next_round)

    def _interrupt_sending(self) -> None:
        """Have the sender check whether its update, sent or waiting for masks, is still wanted."""
        self._outbox.interrupt()

    def _take_round(self, message: RoundTerms | RepeatedCommand) -> None:
        """Take what the controller repeats of the open round."""
        if isinstance(message, RoundTerms):
            self._take_terms(message)
            return
        before, is_other = self._session.attempt, self._session.take_repeated(message)
        if is_other or self._session.attempt != before:
            self._on_command(is_other=is_other)

    def _take_terms(self, terms: RoundTerms) -> None:
        current, before = self._session, self._session.terms
        if not current.take_terms(terms):
            return
        if terms.attempt and terms != before:
            self._interrupt_sending()  # of the attempt before
        if terms.attempt and has_id(parse_ids(terms.participants), self._context.client_id):
            self._outbox.masking.begin(terms.run_id, current.incarnation, terms.round_id, terms.attempt, self._group)
        if current.command is not None and not current.may_take_part(self._context.client_id, current.command):
            self._compute.stop_current()  # others were faster: its update is not needed
            self._interrupt_sending()

    def _take_request(self, request: EvaluationRequest | LocalModelRequest) -> None:
        current, context = self._session, self._context
        me = (context.identity.sender, context.identity.incarnation)
        if request.run_id != current.run_id:
            return
        if isinstance(request, LocalModelRequest):
            if (request.to, request.incarnation) == me:
                current.take_model_request(request)
        elif current.take_evaluation(context.client_id, request):
            self._compute.stop_current()  # a training of a round that is over, as with a quorum
            self._interrupt_sending()

    # Work

    async def _work(self) -> None:
        current, replica = self._session, self.models.replica
        while True:
            self._changed.clear()
            if current.ended is not None:
                return
            if self._observer.ending:
                self._failures.leave_because(self._observer.ending)
                return
            welcome, command = current.welcome, current.command
            if welcome is not None and await self._completes_shown(welcome):
                continue
            if welcome is not None and not self._is_ready:
                await self._get_ready(welcome)
                continue
            if self._status.holds_back(command):
                await self._sit_out(welcome, command)
                continue
            if welcome is None or command is None or not current.is_for(self._context.client_id, welcome, command):
                if welcome is None or not await self._answered(welcome):
                    await self._wait(self._context.config.controller_timeout_s)
            elif await self.models.lacks_frozen(welcome):
                await self.models.fetch_frozen(welcome)
            elif replica.round_id == command.round_id - 1 and replica.vector is not None:
                await self._train_and_send(welcome, command, replica.vector)
            elif replica.round_id >= command.round_id:
                await self._wait(REPEAT_AFTER_S)  # a command that is older than our model: its successor will come
            else:
                await self._fetch_for(welcome, command)

    async def _completes_shown(self, welcome: Welcome) -> bool:
        """Get what a model of this run needs beside what arrives in each round: its layout and, if the program follows
        models, its frozen parameters. Returns whether something was missing."""
        # A client that follows nothing is laid out as it prepares itself. Later that is for state_dict().
        shown = self._observer.models
        if shown.is_complete(welcome) or not (self._observer.follows_models or self._is_ready):
            return False
        if not shown.is_laid_out(welcome):
            await self._compute.run(self._lay_out, welcome)
        elif self._observer.follows_models and self._is_ready and await self.models.lacks_frozen(welcome):
            await self.models.fetch_frozen(welcome)
        else:
            return False
        self._observer.look_again()
        return True

    def _lay_out(self, welcome: Welcome) -> None:
        """Lay the model out for what this run exchanges. A module that training has changed is built again."""
        self.model.repair()
        self.model.arrange(Sharing.of_welcome(welcome))

    async def _get_ready(self, welcome: Welcome) -> None:
        """Do what has to be done once, and say so. What it fails with is reported."""
        self._status.set("preparing")
        await self._context.heartbeat.send_hello()
        try:
            await self._prepare(welcome)
        except Exception as error:
            await self._report_unprepared(error, welcome.run_id)
            raise
        self._status.set("idle")
        self._is_ready = True
        await self._context.heartbeat.send_hello()  # ready only now: loading data is not part of the first round

    async def _prepare(self, welcome: Welcome) -> None:
        """Do what has to be done once, before this client is ready."""
        training = self._local.training
        await self._compute.run(training.load_data, welcome.num_clients)
        self._observer.keep_personal(await self._compute.run(training.prepare_personal, welcome))

    async def _sit_out(self, welcome: Welcome | None, command: TrainCmd | None) -> None:
        """Report that the round of a command has no update of this client, which is paused, or was in its midst; then
        wait while it is. Asynchronous rounds go on with it whenever it is back."""
        current = self._session
        is_asked = (
            welcome is not None and command is not None and current.is_for(self._context.client_id, welcome, command)
        )
        if is_asked and command is not None and current.repeats is None:
            current.mark_handled(command)
            current.report(TrainingFailure(current.run_id, command.round_id, PAUSED, PAUSED, attempt=current.attempt))
            await self._context.heartbeat.send_hello()
        self._status.sit_out()
        if self._status.is_paused:
            await self._wait(self._context.config.controller_timeout_s)
        else:
            current.withdraw(PAUSED)

    async def _fetch_for(self, welcome: Welcome, command: TrainCmd) -> None:
        """Fetch the model that a command starts from, until it is here or no longer wanted."""
        current = self._session

        def superseded() -> bool:
            return current.is_older(command) or not current.may_take_part(self._context.client_id, command)

        await self.models.fetch_round(welcome, command.round_id - 1, superseded)

    async def _train_and_send(self, welcome: Welcome, command: TrainCmd, base: Tensor) -> None:
        """Take part in the round of a command, from ``base``."""
        await self._local.rounds.take_part(welcome, command, base)

    async def _make_update(self, welcome: Welcome, command: TrainCmd, base: Tensor) -> EncodedUpdate:
        """Do what the command asks for, from ``base``, and encode it. Whatever is raised is reported as a failure."""
        is_same_session = partial(self._context.is_same_session, self._session.incarnation)
        inputs = RoundInputs(
            welcome=welcome,
            command=command,
            base=base,
            broadcast=self.models.replica.broadcast,
            buffers=self.models.replica.buffers,
            terms=self._session.terms,
            commanded_s=self._session.commanded_s,
            spent=self._outbox.masking.begin_round(welcome.run_id, command.round_id),
            route=partial(self._outbox.packets.begin, asyncio.get_running_loop(), self._group, is_same_session),
            pacer=self._pacer,
        )
        transfer = next(self._outbox.transfers)
        return await self._compute.run(self._local.training.train, inputs, transfer, self._compute.should_stop)

    def _is_called_off(self) -> bool:
        """Whether the newest :meth:`_make_update` was asked to stop."""
        return self._compute.should_stop()

    async def _answered(self, welcome: Welcome) -> bool:
        """Do what is asked beside training; whether there was anything."""
        if (request := self._session.model_request) is not None:
            await self._local.answers.show_model(welcome, request)
            self._session.drop(request)
            return True
        if (asked := self._session.evaluation) is not None:
            await self._evaluate(welcome, asked)
            self._session.drop(asked)
            return True
        return False

    async def _evaluate(self, welcome: Welcome, request: EvaluationRequest) -> None:
        """Evaluate a model on the data of this client, and send the result. A request that is repeated gets the same
        result again."""
        await self._local.answers.evaluate(welcome, request)

    async def _wait(self, timeout_s: float) -> None:
        """Wait for a message, at most for so long. Raises BarrierTimeout: no controller for too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, EVERY_S)):
                await self._changed.wait()
        check_waiting(self._context.bus, self._session, self._waiting)
