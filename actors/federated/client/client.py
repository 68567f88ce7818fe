"""A client of a federated run.

Its next action follows from its state (newest command, newest model, last round done), never from the order in which
messages came. So it needs no restart when the controller dies: it waits, is welcomed again, and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from gradbus.actors.federated.chosen_codecs import CLIENT_SETTING, own_codecs
from gradbus.actors.federated.client.client_models import ClientModels
from gradbus.actors.federated.client.client_observer import MAX_REPORTS, ClientObserver, ClientReport, ClientSummary
from gradbus.actors.federated.client.client_parts import ClientParts, LocalParts, Prepared, hello_of
from gradbus.actors.federated.client.client_rounds import ClientRounds, Outbox, UpdateMaking
from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.client.evaluation_answers import EvaluationAnswers
from gradbus.actors.federated.client.failures import ClientFailures
from gradbus.actors.federated.client.id_request import request_id
from gradbus.actors.federated.client.last_model import fetch_last_model
from gradbus.actors.federated.client.local_evaluation import LocalEvaluation
from gradbus.actors.federated.client.local_training import LocalTraining
from gradbus.actors.federated.client.older_controllers import ask_older_controller
from gradbus.actors.federated.client.pacing import TrainingBudget
from gradbus.actors.federated.client.round_inputs import RoundInputs
from gradbus.actors.federated.client.run_terms import Allowed, RunChoices, RunTerms, check_run
from gradbus.actors.federated.client.session import (
    ClientContext,
    ClientHeartbeat,
    ClientStatus,
    ControllerSession,
    listen,
)
from gradbus.actors.federated.client.updates_out import ANSWERS, EncodedUpdate
from gradbus.actors.federated.client_names import checked_id
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.named_model import NamedModel
from gradbus.actors.federated.model.sharing import Sharing, check_kept, layout_of
from gradbus.actors.federated.protocol import PAUSED, REPEAT_AFTER_S
from gradbus.actors.federated.task import FederatedTask
from gradbus.codecs import Codec
from gradbus.runtime.built_model import build_model
from gradbus.runtime.bus.bus import Bus, check_bus
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.federated import ClientConfig
from gradbus.runtime.errors import ConfigError, JoinDeclined, JoinRefused, OutOfTurn
from gradbus.runtime.logs import get_logger
from gradbus.runtime.misuse import awaited, check_task
from gradbus.runtime.names import check_name
from gradbus.runtime.tasks import TaskGroup, items_of, single_error
from gradbus.runtime.testing.journal import Probe
from gradbus.runtime.transport.channels import Inbox, ToClients
from gradbus.runtime.transport.wait_log import EVERY_S, WaitLog
from gradbus.runtime.wire.control import (
    NOT_WELCOMED,
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
from gradbus.runtime.wire.frames import CONTROLLER, UNASSIGNED
from gradbus.runtime.wire.id_ranges import has_id, parse_ids
from gradbus.runtime.wire.messages import (
    ClientUpdate,
    Control,
    Identity,
    Message,
    PeerGone,
    TrainCmd,
    new_incarnation,
)

T = TypeVar("T")

NO_ID = -1

log = get_logger("client")


class Client:
    """Trains on its own data when commanded, and sends the update.

    Attributes:
        client_id: its id; -1 until the controller has assigned it. name: empty: it has none.
    """

    _codecs_setting: ClassVar[str] = CLIENT_SETTING  # which names the codecs that a controller may choose
    _budget_kind: ClassVar[type[TrainingBudget]] = TrainingBudget
    _task_methods: ClassVar[tuple[str, ...]] = ("build_model", "prepare", "train")  # that are called here

    def __init__(
        self,
        bus: Bus,
        task: FederatedTask,
        *,
        client_id: int | None = None,
        name: str = "",
        config: ClientConfig | None = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        """A client that has not started.

        Args:
            bus: joined to the job.
            task: model, data and training.
            client_id: 0 or more, one for each client of the job; None: the controller assigns one to the name.
            name: one for each client of the job: letters, digits and ``. _ -``, 64 at most. With security that knows
                single nodes it is that of the node, or begins with it and a dot, and may be left out.
            config: settings.
            callbacks: objects as :mod:`.client_observer` describes them, beside those that ``config.callbacks`` names.

        Raises:
            TypeError: there is neither an id nor a name, the id is not a number, or the config no ClientConfig.
            ValueError: the id is out of range.
            ConfigError: bus or task is another kind of thing, the bus is closed, the name is not one, or a callback is
                none.
        """
        call = f"{type(self).__name__}(bus, task, ...)"
        check_bus(call, "bus", bus)
        check_task(call, task, self._task_methods, "gradbus.actors.FederatedTask")
        self.client_id = NO_ID if client_id is None else checked_id(client_id)
        self.name = check_name(name) if name else ""
        if self.client_id == NO_ID and not name and not bus.access_policy.role:
            raise TypeError("a client needs client_id= or name=, as in Client(bus, task, name='site-1')")
        self._bus = bus
        self._task = task
        self._config = ClientConfig.expect(config)
        allowed = Allowed(self._config.rule, self._config.codecs, self._config.share_model)
        self._choices = RunChoices(allowed, setting=self._codecs_setting, least_noise=self._config.least_noise)
        self._changed = asyncio.Event()
        self._session = self._make_session()
        self._status = ClientStatus()
        self._failures = ClientFailures(bus, self._config)
        self._take_identity(new_incarnation())
        self._compute = ComputeThread(f"client-{self.name or 'new' if client_id is None else self.client_id}")
        self._budget = self._budget_kind(self._config.budget, wait=self._compute.rest)
        self._prepared = False  # the task has loaded its data: from then on the client may be ready
        self._shown = NamedModel(lambda: self._model)
        self._observer = ClientObserver(callbacks, self._config.callbacks, self._shown, self._changed)
        self._group: TaskGroup | None = None  # of the tasks of a run
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None  # thread and event loop of the run
        self._running: ClientParts | None = None  # from when its model is built and its id known

    def _make_session(self) -> ControllerSession:
        return ControllerSession(self._config.controller_timeout_s)

    def _take_identity(self, incarnation: int) -> None:
        """Make what sends under the id of this client: once, and again where the controller has assigned it."""
        self._identity = Identity(self._sender_id, incarnation)
        self._probe = Probe(f"client-{self._shown_id}", self._config.history.dir)
        self._outbox = Outbox(self._bus, self._identity, self._probe, least_members=self._config.least_members)
        self._waiting = WaitLog(log, self._bus.reach, **self._facts)

    @property
    def _sender_id(self) -> int:
        """The id under which it sends."""
        return UNASSIGNED if self.client_id == NO_ID else self.client_id

    @property
    def _shown_id(self) -> str:
        return "new" if self.client_id == NO_ID else str(self.client_id)

    @property
    def _facts(self) -> dict[str, Any]:
        """Return id and name for a log event."""
        own = {} if self.client_id == NO_ID else {"client": self.client_id}
        return {**own, "name": self.name} if self.name else own

    @property
    def from_round(self) -> int | None:
        """The first round that it takes part in; None before it is welcomed."""
        return self._session.from_round

    @property
    def summary(self) -> ClientSummary:
        """Return what it did so far."""
        local = None if self._running is None else self._running.local
        if local is None:
            return ClientSummary(0, 0, self._outbox.bytes_up, 0.0)
        return ClientSummary(local.rounds.counted, local.rounds.refused, self._outbox.bytes_up, local.training.train_s)

    # The program around it

    @property
    def is_paused(self) -> bool:
        """Whether :meth:`pause` was called, and :meth:`resume` not yet."""
        return self._status.is_paused

    def pause(self) -> None:
        """Take part in no round until :meth:`resume`; the controller learns of it at once, and does not wait.

        A training that is under way is called off between two batches. An update that is made already is still sent,
        and with secure aggregation this client goes on helping to unmask the sum that it is in. Models still arrive.
        May be called on any thread, such as that of a callback; on another one than the event loop's it takes effect
        as soon as the loop gets to it. Once the run has ended it does nothing.
        """
        self._call_on_loop(self._pause)

    def resume(self) -> None:
        """Take part again, from the next round on; in asynchronous runs at once. May be called on any thread."""
        self._call_on_loop(self._resume)

    def _call_on_loop(self, call: Callable[[], None]) -> None:
        """Call this on the event loop of the run: now, where that runs on this thread, or there is none."""
        if self._home is None or self._home[0] == threading.get_ident():
            call()
        else:
            with contextlib.suppress(RuntimeError):  # the loop has closed just now
                self._home[1].call_soon_threadsafe(call)

    def _pause(self) -> None:
        if self._session.ended is not None:  # it may still wait for the last model, which is announced
            return
        if not self._status.is_paused:
            if self._status.pause(self._session.command):
                self._compute.stop_current()
            self._announce_pause()

    def _resume(self) -> None:
        if self._status.is_paused:
            self._status.resume()
            self._session.withdraw(PAUSED)  # the controller may begin another attempt at the round
            self._announce_pause()

    def _announce_pause(self) -> None:
        log.info("paused" if self._status.is_paused else "resumed", **self._facts)
        self._changed.set()
        if self._group is not None and self._running is not None:
            hello = self._running.context.heartbeat.send_hello()
            try:
                self._group.create_task(hello, name=f"client-{self.client_id}-hello")
            except RuntimeError:  # something has ended this client, which only waits for its training to let go
                hello.close()

    async def state_dict(self) -> dict[str, Any]:
        """Return the newest global model that has arrived: tensors by name, for ``model.load_state_dict``.

        They are copies on the CPU, made off the event loop, at any time, also while this client trains and after the
        end. What stays at this client is its own, as its newest update that counts has left it.

        Raises:
            RuntimeError: no model has arrived yet.
        """
        return await self._observer.state_dict()

    def rounds(self) -> AsyncGenerator[ClientReport, None]:
        """Take part as by :meth:`run`, and yield a report of each round that this client was asked for.

        The client goes on meanwhile, whatever the caller does: of more than 1024 reports that wait the oldest are
        dropped. Closing the iterator ends the client gracefully.

        Raises:
            As :meth:`run`.
        """
        return items_of(self._serve, name="client", most=MAX_REPORTS)

    async def _serve(self, on_report: Callable[[ClientReport], object]) -> None:
        self._observer.report_to(on_report)
        await self.run()

    @awaited("client.run()")
    async def run(self) -> ClientSummary:
        """Take part until all rounds are done.

        Raises:
            JoinRefused: the controller has refused this client; the text has the reason. JoinDeclined: the controller
                asks for what this client does not give.
            ConfigError: its settings do not fit the model.
            BarrierTimeout: no controller was received for ``controller_timeout_s``.
            TrainingFailed: the run has ended because training failed here. RunAborted: because it failed on the other
                clients, or a setting of the controller is wrong. CallbackFailed: a callback has raised. OutOfTurn: this
            client has run before, or runs. CallbackTimeout: the run has ended, and a callback does not return.
        """
        if self._home is not None:
            raise OutOfTurn(
                "this client has run before, or runs now: a client takes part once, by one run() or one rounds(). To "
                "take part again, make another gradbus.Client"
            )
        self._home = threading.get_ident(), asyncio.get_running_loop()
        opened = contextlib.ExitStack()  # closes what this makes
        try:
            model = await self._compute_or_report(self._build)
            self._session.begin()
            if self.client_id == NO_ID:
                await self._request_id(model)
            prepared = await self._compute_or_report(lambda: self._open(model, opened))
            self._session.begin()
            await self._take_part(model, prepared, opened)
        except BaseExceptionGroup as errors:
            raise single_error(errors) from None
        finally:
            self._compute.close()
            self._outbox.close()
            self._observer.close()
            opened.close()
            summary = self.summary
            self._probe.end(rounds=summary.rounds, refused=summary.refused, rejected=dict(self._bus.rejected))
        return self.summary

    async def _take_part(self, model: FlatModel, prepared: Prepared, opened: contextlib.ExitStack) -> None:
        """Take part with the parts that are made here. ``opened``: closes them."""
        # The inbox last: what arrives there shows that the controller has found the other readers, too.
        kinds = (TrainCmd, ToClients, Inbox(self._identity.incarnation))
        with self._bus.subscribe(*kinds, only=self._concerns) as inbox:
            self._bus.open_writer(ClientUpdate)
            async with TaskGroup() as group:
                running = self._running = self._make_parts(model, prepared, group)
                opened.callback(running.models.close)
                running.models.receive(True)
                self._group = group
                helpers = [
                    group.create_task(work, name=f"client-{self.client_id}-{name}")
                    for name, work in (
                        ("listen", listen(inbox, lambda message: self._handle(message, group))),
                        ("heartbeat", running.context.heartbeat.run()),
                        ("older-controller", self._ask_older_controller(running.context.heartbeat, group)),
                        ("show-models", self._show_models()),
                    )
                ]
                try:
                    await self._work(group)
                    await running.models.settle()
                    await self._end_well()
                except Exception as error:
                    self._failures.leave_with(error)
                    raise
                finally:
                    self._group = None
                    running.models.receive(False)
                    await self._failures.report_declined(Identity(self.client_id, self._identity.incarnation))
                    await running.context.heartbeat.leave("done" if self._session.ended else self._failures.leaving)
                    for helper in helpers:
                        helper.cancel()

    async def _ask_older_controller(self, heartbeat: ClientHeartbeat, group: TaskGroup) -> None:
        await ask_older_controller(
            self._bus, self._identity, heartbeat.make_hello, lambda message: self._handle(message, group)
        )

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
        await fetch_last_model(self._context, self._models, self._wait, self._wants_last_model)

    def _wants_last_model(self, welcome: Welcome) -> bool:
        return self._models.receives_all(welcome)

    # Its parts

    def _build(self) -> FlatModel:
        """Build the model and lay it out, off the loop: the Hello says what it is."""
        self._budget.enter()
        self._bus.access_policy.check_client()
        return self._make_model()

    def _make_model(self) -> FlatModel:
        return FlatModel(build_model(self._task), rebuild=partial(build_model, self._task))

    async def _request_id(self, model: FlatModel) -> None:
        """Have the controller assign an id, and become the client with that."""
        incarnation, hello = self._identity.incarnation, hello_of(model, self.name)
        self.client_id, self.name = await request_id(self._bus, incarnation, hello, self._session, self._check_waiting)
        self._outbox.close()
        self._take_identity(incarnation)
        log.info("id assigned", **self._facts)

    def _open(self, model: FlatModel, opened: contextlib.ExitStack) -> Prepared:
        """Open the directory of the state, and prepare to train, off the loop. ``opened``: closes what this opens.

        Raises:
            ConfigError: it is to keep tensors that the model does not have, or a codec cannot be imported.
        """
        kept = ClientStateStore(self._config.state_dir, self.client_id)
        training = LocalTraining(self._task, self._identity, model, kept, self._bus.memory, self._probe, self._choices)
        opened.callback(training.close)
        tells_errors = self._config.report_failures
        evaluation = LocalEvaluation(self._task, model, self.client_id, kept, tells_errors, self._choices)
        return Prepared(training, self._own_codecs(model), training, evaluation)

    def _own_codecs(self, model: FlatModel) -> tuple[type[Codec], ...]:
        """The codecs of the user's own. Raises ConfigError: as :meth:`_open`."""
        check_kept(model.specs, None, self._config.keep_personal)
        return own_codecs(self._config.codecs, self._codecs_setting)

    def _make_parts(self, model: FlatModel, prepared: Prepared, group: TaskGroup) -> ClientParts:
        context = ClientContext(
            client_id=self.client_id,
            bus=self._bus,
            identity=self._identity,
            config=self._config,
            session=self._session,
            status=self._status,
            heartbeat=ClientHeartbeat(self._bus, self._identity, self._session, self._describe),
            changed=self._changed,
            compute=self._compute,
            probe=self._probe,
            choices=self._choices,
            facts=lambda: self._facts,
        )
        models = ClientModels(
            context, model, prepared.frozen, prepared.own, group, wait=self._wait, follower=self._observer
        )
        local = None
        if prepared.training is not None and prepared.evaluation is not None:
            making = UpdateMaking(self._make_update, self._is_called_off)
            training = prepared.training
            local = LocalParts(
                training=training,
                rounds=ClientRounds(context, self._outbox, training, models, self._observer, self._failures, making),
                answers=EvaluationAnswers(context, models, prepared.evaluation, training, self._outbox),
            )
        return ClientParts(model=model, context=context, models=models, local=local)

    @property
    def _parts(self) -> ClientParts:
        assert self._running is not None, "they are made by run()"
        return self._running

    @property
    def _local(self) -> LocalParts:
        assert self._parts.local is not None, "who has others train overrides what needs it"
        return self._parts.local

    @property
    def _model(self) -> FlatModel:
        return self._parts.model

    @property
    def _models(self) -> ClientModels:
        return self._parts.models

    @property
    def _context(self) -> ClientContext:
        return self._parts.context

    def _describe(self, matched: bool) -> Hello:
        """The Hello of this client as it is now."""
        current, (phase, phase_s) = self._session, self._status.report(self._outbox.updates.phase)
        is_chosen, shape = current.welcome is not None and bool(current.welcome.include), self._models.shape
        return replace(
            hello_of(self._model, self.name),
            ready=self._prepared and matched,
            session=current.incarnation if current.welcome is not None else 0,
            phase=phase,
            phase_s=phase_s,
            round_id=current.command.round_id if current.command is not None else -1,
            model_round=self._models.replica.round_id,
            memory=self._models.memory_here,
            next_round=-1 if current.from_round is None else current.from_round,
            shared_dim=shape.dim if is_chosen else 0,
            shared_layout=shape.layout if is_chosen else 0,
        )

    async def _compute_or_report(self, step: Callable[[], T]) -> T:
        """Compute a step before the Welcome, off the loop. What it fails with is reported."""
        try:
            return await self._compute.run(step)
        except Exception as error:
            await self._report_unprepared(error, NOT_WELCOMED)
            raise

    async def _report_unprepared(self, error: Exception, run_id: int) -> None:
        """Report what this client ends with before its first round of this run."""
        own_id, name = (UNASSIGNED, self.name) if self.client_id == NO_ID else (self.client_id, "")
        identity = Identity(own_id, self._identity.incarnation)  # of a host: of its first client
        if run_id == NOT_WELCOMED:
            await self._failures.report_unwelcomed(identity, name, error)
        else:
            await self._failures.report(identity, name, error, run_id)

    # Messages

    def _concerns(self, message: Message) -> bool:
        """Whether a message is for this client: from the controller, to all clients or to this one."""
        if isinstance(message, Control):
            return message.sender == CONTROLLER and getattr(message.body, "to", self.client_id) == self.client_id
        return not isinstance(message, PeerGone)

    def _handle(self, message: Message, group: TaskGroup) -> None:
        match message:
            case TrainCmd() if self._session.names_commands:
                return
            case TrainCmd():
                self._on_command(is_other=self._session.take(message))
            case Control(sender=sender, incarnation=session, body=body) if sender == CONTROLLER:
                if not self._session.accepts_session(session, body):
                    return
                self._on_controller(session, body, group)
            case _:
                return
        self._changed.set()

    def _on_command(self, *, is_other: bool) -> None:
        """Stop what the newest command makes superfluous."""
        if is_other and self._session.repeats is None:
            self._compute.stop_current()  # what is being trained now is no longer wanted
        self._interrupt_sending()

    def _on_controller(self, session: int, body: Any, group: TaskGroup) -> None:
        current, me = self._session, (self._identity.sender, self._identity.incarnation)
        match body:
            case Welcome() if (body.to, body.incarnation) == me:
                self._accept_welcome(session, body)
                group.create_task(self._context.heartbeat.send_hello(), name=f"client-{self.client_id}-hello")
            case Refused() if (body.to, body.incarnation) == me:
                raise JoinRefused(body.why)
            case Status() if session != current.incarnation and current.welcome is not None:
                current.await_welcome()
                group.create_task(self._context.heartbeat.send_hello(), name=f"client-{self.client_id}-hello")
            case _ if isinstance(body, (*ANSWERS, PacketsMissing)) and (body.to, body.incarnation) == me:
                self._outbox.on_answer(session, body, group)
            case RoundTerms() | RepeatedCommand() if body.run_id == current.run_id and session == current.incarnation:
                self._take_round(body, group)
            case EvaluationRequest() | LocalModelRequest() if session == current.incarnation:
                self._take_request(body)
            case MaskRoster() | MaskShares() | MaskSurvivors() if session == current.incarnation and current.welcome:
                self._outbox.masking.on_request(body, current.welcome, self._models.shape.dim, group)
            case ModelAvailable() if session == current.incarnation:
                self._models.on_notice(session, body)
            case RunEnded() if body.run_id == current.run_id and body.ok:
                current.end(body)
                self._observer.run_has_ended()
                self._models.end()
                self._compute.stop_current()
                self._interrupt_sending()
            case RunEnded() if body.run_id == current.run_id and body.final:
                raise self._failures.make_error(body, self.client_id)
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
        self.name = welcome.name or self.name  # with identities the allow list's
        self._interrupt_sending()  # a controller that had taken this client for dead holds nothing of its update

    def _read_terms(self, welcome: Welcome) -> RunTerms:
        """Read what the controller asks for. Raises JoinDeclined: it is what this client does not give."""
        try:
            run = self._choices.read(welcome)
            check_run(run, self._config, self._model.specs)
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
            shape = self._model.shape_of(run.sharing)
        except ConfigError as error:
            raise JoinDeclined(str(error)) from None
        self._models.start(welcome, shape, layout_of(self._model.specs, run.sharing).max_bytes)
        self._compute.stop_current()
        named = {"name": welcome.name} if welcome.name else {}
        self._probe.note(
            "welcomed", **named, run=f"{welcome.run_id:016x}", session=session, from_round=welcome.next_round
        )
        log.info("welcomed", **self._facts, run=f"{welcome.run_id:016x}", from_round=welcome.next_round)

    def _interrupt_sending(self) -> None:
        """Have the sender check whether its update, sent or waiting for masks, is still wanted."""
        self._outbox.interrupt()

    def _take_round(self, message: RoundTerms | RepeatedCommand, group: TaskGroup) -> None:
        """Take what the controller repeats of the open round."""
        if isinstance(message, RoundTerms):
            self._take_terms(message, group)
            return
        before, is_other = self._session.attempt, self._session.take_repeated(message)
        if is_other or self._session.attempt != before:
            self._on_command(is_other=is_other)

    def _take_terms(self, terms: RoundTerms, group: TaskGroup) -> None:
        current, before = self._session, self._session.terms
        if not current.take_terms(terms):
            return
        if terms.attempt and terms != before:
            self._interrupt_sending()  # of the attempt before
        if terms.attempt and has_id(parse_ids(terms.participants), self.client_id):
            self._outbox.masking.begin(terms.run_id, current.incarnation, terms.round_id, terms.attempt, group)
        if current.command is not None and not current.takes_part(self.client_id, current.command):
            self._compute.stop_current()  # others were faster: its update is not needed
            self._interrupt_sending()

    def _take_request(self, request: EvaluationRequest | LocalModelRequest) -> None:
        current, me = self._session, (self._identity.sender, self._identity.incarnation)
        if request.run_id != current.run_id:
            return
        if isinstance(request, LocalModelRequest):
            if (request.to, request.incarnation) == me:
                current.take_model_request(request)
        elif current.take_evaluation(self.client_id, request):
            self._compute.stop_current()  # a training of a round that is over, as with a quorum
            self._interrupt_sending()

    # Work

    async def _work(self, group: TaskGroup) -> None:
        current, replica = self._session, self._models.replica
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
            if welcome is not None and not self._prepared:
                await self._get_ready(welcome, group)
                continue
            if self._status.holds_back(command):
                await self._sit_out(welcome, command)
                continue
            if welcome is None or command is None or not current.is_for(self.client_id, welcome, command):
                if welcome is None or not await self._answered(welcome, group):
                    await self._wait(self._config.controller_timeout_s)
            elif await self._models.lacks_frozen(welcome):
                await self._models.fetch_frozen(welcome)
            elif replica.round_id == command.round_id - 1 and replica.vector is not None:
                await self._train_and_send(welcome, command, replica.vector, group)
            elif replica.round_id >= command.round_id:
                await self._wait(REPEAT_AFTER_S)  # a command that is older than our model: its successor will come
            else:
                await self._fetch_for(welcome, command)

    async def _completes_shown(self, welcome: Welcome) -> bool:
        """Get what a model of this run needs beside what arrives in each round: its layout and, if the program follows
        models, its frozen parameters. Returns whether something was missing."""
        # A client that follows nothing is laid out as it prepares itself. Later that is for state_dict().
        if self._shown.is_complete(welcome) or not (self._observer.follows_models or self._prepared):
            return False
        if not self._shown.is_laid_out(welcome):
            await self._compute.run(self._lay_out, welcome)
        elif self._observer.follows_models and self._prepared and await self._models.lacks_frozen(welcome):
            await self._models.fetch_frozen(welcome)
        else:
            return False
        self._observer.look_again()
        return True

    def _lay_out(self, welcome: Welcome) -> None:
        """Lay the model out for what this run exchanges. A module that training has changed is built again."""
        self._model.repair()
        self._model.arrange(Sharing.of_welcome(welcome))

    async def _get_ready(self, welcome: Welcome, group: TaskGroup) -> None:
        """Do what has to be done once, and say so. What it fails with is reported."""
        self._status.set("preparing")
        await self._context.heartbeat.send_hello()
        try:
            await self._prepare(welcome, group)
        except Exception as error:
            await self._report_unprepared(error, welcome.run_id)
            raise
        self._status.set("idle")
        self._prepared = True
        await self._context.heartbeat.send_hello()  # ready only now: loading data is not part of the first round

    async def _prepare(self, welcome: Welcome, group: TaskGroup) -> None:
        """Do what has to be done once, before this client is ready; tasks that it starts belong to ``group``."""
        training = self._local.training
        await self._compute.run(training.load_data, welcome.num_clients)
        self._observer.keep_personal(await self._compute.run(training.read_personal, welcome))

    async def _sit_out(self, welcome: Welcome | None, command: TrainCmd | None) -> None:
        """Report that the round of a command has no update of this client, which is paused, or was in its midst; then
        wait while it is. Asynchronous rounds go on with it whenever it is back."""
        current = self._session
        is_asked = welcome is not None and command is not None and current.is_for(self.client_id, welcome, command)
        if is_asked and command is not None and current.repeats is None:
            current.mark_handled(command)
            current.report(TrainingFailure(current.run_id, command.round_id, PAUSED, PAUSED, attempt=current.attempt))
            await self._context.heartbeat.send_hello()
        self._status.sit_out()
        if self._status.is_paused:
            await self._wait(self._config.controller_timeout_s)
        else:
            current.withdraw(PAUSED)

    async def _fetch_for(self, welcome: Welcome, command: TrainCmd) -> None:
        """Fetch the model that a command starts from, until it is here or no longer wanted."""
        current = self._session

        def superseded() -> bool:
            return current.is_older(command) or not current.takes_part(self.client_id, command)

        await self._models.fetch_round(welcome, command.round_id - 1, superseded)

    async def _train_and_send(self, welcome: Welcome, command: TrainCmd, base: Tensor, group: TaskGroup) -> None:
        """Take part in the round of a command, from ``base``."""
        await self._local.rounds.take_part(welcome, command, base, group)

    async def _make_update(self, welcome: Welcome, command: TrainCmd, base: Tensor) -> EncodedUpdate:
        """Do what the command asks for, from ``base``, and encode it. Whatever is raised is reported as a failure."""
        assert self._group is not None, "it trains while it runs"
        is_same_session = partial(self._context.is_same_session, self._session.incarnation)
        inputs = RoundInputs(
            welcome=welcome,
            command=command,
            base=base,
            broadcast=self._models.replica.broadcast,
            buffers=self._models.replica.buffers,
            terms=self._session.terms,
            commanded_s=self._session.commanded_s,
            spent=self._outbox.masking.begin_round(welcome.run_id, command.round_id),
            route=partial(self._outbox.packets.begin, asyncio.get_running_loop(), self._group, is_same_session),
            pacer=self._budget.pacer,
        )
        transfer = next(self._outbox.transfers)
        return await self._compute.run(self._local.training.train, inputs, transfer, self._compute.should_stop)

    def _is_called_off(self) -> bool:
        """Whether the newest :meth:`_make_update` was asked to stop."""
        return self._compute.should_stop()

    async def _answered(self, welcome: Welcome, group: TaskGroup) -> bool:
        """Do what is asked beside training; whether there was anything."""
        if (request := self._session.model_request) is not None:
            await self._local.answers.show_model(welcome, request)
            self._session.drop(request)
            return True
        if (asked := self._session.evaluation) is not None:
            await self._evaluate(welcome, asked, group)
            self._session.drop(asked)
            return True
        return False

    async def _evaluate(self, welcome: Welcome, request: EvaluationRequest, group: TaskGroup) -> None:
        """Evaluate a model on the data of this client, and send the result. A request that is repeated gets the same
        result again."""
        await self._local.answers.evaluate(welcome, request, group)

    async def _wait(self, timeout_s: float) -> None:
        """Wait for a message, at most for so long. Raises BarrierTimeout: no controller for too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, EVERY_S)):
                await self._changed.wait()
        self._check_waiting()

    def _check_waiting(self) -> None:
        """Log who is waited for, if that takes long. Raises BarrierTimeout: no controller for too long."""
        bus = self._bus
        self._session.check_controller(lambda: bus.misconfiguration, partial(bus.reach.advice, one=True))
        self._waiting.look(
            f"the controller of job {bus.job!r}", began_s=self._session.seen_s, misconfiguration=bus.misconfiguration
        )
