"""A client of a federated run.

Its next action follows from its state (newest command, newest model, last round done), never from the order in which
messages came. So it needs no restart when the controller dies: it waits, is welcomed again, and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import operator
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from gradbus.actors.federated.chosen_codecs import check_allowed, own_codecs
from gradbus.actors.federated.client.client_models import ClientModels, FrozenParameters
from gradbus.actors.federated.client.client_observer import MAX_REPORTS, ClientObserver
from gradbus.actors.federated.client.client_report import CALLED_OFF, ClientReport, ClientSummary
from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.client.early_failures import EarlyFailures
from gradbus.actors.federated.client.evaluation_answers import EvaluationAnswers
from gradbus.actors.federated.client.id_request import request_id
from gradbus.actors.federated.client.local_evaluation import LocalEvaluation
from gradbus.actors.federated.client.local_training import (
    Allowed,
    LocalTraining,
    NothingToTrain,
    RoundInputs,
    reason_of,
)
from gradbus.actors.federated.client.pacing import TrainingBudget
from gradbus.actors.federated.client.packets_out import PacketRoute, PacketSender
from gradbus.actors.federated.client.session import (
    ClientContext,
    ClientHeartbeat,
    ClientStatus,
    ControllerSession,
    listen,
)
from gradbus.actors.federated.client.update_masks import ClientMasking
from gradbus.actors.federated.client.updates_out import ANSWERS, EncodedUpdate, UpdateSender
from gradbus.actors.federated.client_names import MAX_CLIENT_ID
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.named_model import NamedModel
from gradbus.actors.federated.model.own_tensors import PERSONAL, part_of
from gradbus.actors.federated.model.sharing import Shape, Sharing, check_buffers_sent, check_kept, layout_of
from gradbus.actors.federated.protocol import PAUSED, REPEAT_AFTER_S, SAT_OUT
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.privacy.client import privacy_of
from gradbus.actors.secure_aggregation.keys import Attempt
from gradbus.actors.secure_aggregation.masked_values import TooLarge
from gradbus.runtime.built_model import build_model
from gradbus.runtime.bus.bus import Bus, check_bus
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.federated import ClientConfig
from gradbus.runtime.dds.missing_peers import EVERY_S, WaitLog
from gradbus.runtime.errors import (
    BarrierTimeout,
    ConfigError,
    JoinDeclined,
    JoinRefused,
    OutOfTurn,
    RunAborted,
    TrainingFailed,
)
from gradbus.runtime.logs import get_logger, process_name
from gradbus.runtime.misuse import awaited, check_task
from gradbus.runtime.names import check_name
from gradbus.runtime.plain_text import plain_line, plain_text
from gradbus.runtime.tasks import TaskGroup, items_of, single_error
from gradbus.runtime.testing.instrumentation import Probe
from gradbus.runtime.user_errors import traceback_with_place, user_error
from gradbus.runtime.wire.control import (
    FAILED,
    NOT_WELCOMED,
    PROTOCOL,
    EvaluationRequest,
    Hello,
    LocalModelRequest,
    MaskRoster,
    MaskShares,
    MaskSurvivors,
    ModelAvailable,
    PacketRequest,
    PacketsMissing,
    Receipt,
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

NO_ROOM = "its update has no room in the sum of all members: see its log"

NO_ID = -1
LAST_MODEL_S = 30.0  # for which the end waits for the model after the last round
CONTROLLER_GONE_S = 1.0  # and without a controller: one that has just started is found topic by topic

log = get_logger("client")


def checked_id(client_id: Any) -> int:
    """Return a client id, which may be any integer as of NumPy.

    Raises:
        TypeError: it is no integer. ValueError: it is out of range.
    """
    if isinstance(client_id, str):
        raise TypeError(f"client_id is a number, got {client_id[:80]!r}: a name is given as name={client_id[:80]!r}")
    try:
        number = operator.index(client_id)
    except TypeError:
        raise TypeError(f"client_id is an integer, got {type(client_id).__name__}") from None
    if not 0 <= number <= MAX_CLIENT_ID:
        raise ValueError(f"client_id must be within 0 .. 2^31 - 2, got {number}")
    return number


class Client:
    """Trains on its own data when commanded, and sends the update.

    Attributes:
        client_id: its id; -1 until the controller has assigned it. name: empty: it has none.
    """

    _codecs_setting: ClassVar[str] = "client.codecs"  # which names the codecs that a controller may choose
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
        self._changed = asyncio.Event()
        self._session = ControllerSession(self._config.controller_timeout_s)
        self._status = ClientStatus()
        self._transfers = itertools.count(1)  # numbers of uploads
        self._shape = Shape(0, 0, 0)  # of what the present run exchanges
        self._route: Callable[[], PacketRoute] | None = None  # opens the way for packets of the training
        self._take_identity(Identity(UNASSIGNED if self.client_id == NO_ID else self.client_id, new_incarnation()))
        self._answered_by = 0  # the start of the controller that has answered last about an update
        self._rounds = self._refused = 0
        self._prepared = False  # the task has loaded its data: from then on the client may be ready
        self._failure = ""  # of the training here, the newest one
        self._leaving = "stopped"  # why it leaves, unless the run has ended
        self._shown = NamedModel(lambda: self._model)
        self._observer = ClientObserver(callbacks, self._config.callbacks, self._shown, self._changed)
        self._budget = self._budget_kind(self._config.budget, wait=lambda seconds: self._compute.rest(seconds))
        self._paused_in: TrainCmd | None = None  # the command whose training a pause has called off
        self._group: TaskGroup | None = None  # of the tasks of a run
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None  # thread and event loop of the run
        self._declined: tuple[JoinDeclined, int] | None = None  # why it does not take part in a run, and in which
        self._context: ClientContext  # made by _open, as are models and answers
        self._models: ClientModels
        self._answers: EvaluationAnswers
        self._opened = contextlib.ExitStack()  # what _open has made

    def _take_identity(self, identity: Identity) -> None:
        """Make what sends as this client, and what is called after it."""
        shown = "new" if identity.sender == UNASSIGNED else str(self.client_id)
        self._identity = identity
        self._compute = ComputeThread(f"client-{shown}")
        self._probe = Probe(f"client-{shown}", self._config.history.dir)
        self._sender = UpdateSender(self._bus, identity, self._probe)
        self._early_packets = UpdateSender(self._bus, identity, self._probe)
        self._packets = PacketSender(self._early_packets, self._sender, self._transfers, self._probe)
        self._masking = ClientMasking(self._bus, identity, least_members=self._config.least_members)
        unassigned = self.name if identity.sender == UNASSIGNED else ""
        self._early_failures = EarlyFailures(self._bus, identity, self._config, unassigned)
        self._waiting = WaitLog(log, self._bus.reach, **self._facts)

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
        train_s = self._training.train_s if hasattr(self, "_training") else 0.0
        return ClientSummary(self._rounds, self._refused, self._uploaded_bytes, train_s)

    @property
    def _uploaded_bytes(self) -> int:
        """Bytes of updates that it has sent so far."""
        return self._sender.bytes_up + self._early_packets.bytes_up

    def _build(self) -> None:
        """Build the model, off the loop: the Hello says what it is."""
        self._budget.enter()
        self._bus.access_policy.check_client()
        self._model = self._flat_model()

    async def _request_id(self) -> None:
        """Have the controller assign an id, and become the client with that."""
        hello = Hello(
            protocol=PROTOCOL,
            dim=self._model.everything[0],
            layout=self._model.everything[1],
            ready=False,
            session=0,
            phase="idle",
            round_id=-1,
            model_round=-1,
            host=process_name(),
            next_round=-1,
            masks=True,
            grids=True,
            trained_dim=self._model.trained[0],
            trained_layout=self._model.trained[1],
            name=self.name,
        )
        incarnation = self._identity.incarnation
        self.client_id, self.name = await request_id(self._bus, incarnation, hello, self._session, self._check_waiting)
        self._compute.close()
        self._masking.close()
        self._take_identity(Identity(self.client_id, incarnation))
        log.info("id assigned", **self._facts)

    def _open(self) -> None:
        """Open the directory of the state, and make the parts of this client, off the loop."""
        self._budget.enter()  # on another thread, where the id was assigned
        kept = ClientStateStore(self._config.state_dir, self.client_id)
        self._training = LocalTraining(
            self._task,
            self._identity,
            self._model,
            kept,
            self._bus.memory,
            self._probe,
            Allowed(self._config.rule, self._config.codecs),
        )
        self._training.keeps_local_model = self._config.share_model
        self._opened.callback(self._training.close)
        evaluation = LocalEvaluation(
            self._task, self._model, self.client_id, kept, tells_errors=self._config.report_failures
        )
        self._open_parts(self._training)
        self._answers = EvaluationAnswers(
            self._context, self._models, evaluation, self._training, self._sender, self._transfers
        )

    def _flat_model(self) -> FlatModel:
        """Build the model and lay it out."""
        return FlatModel(build_model(self._task), rebuild=partial(build_model, self._task))

    def _open_parts(self, frozen: FrozenParameters) -> None:
        """Make the parts of every client, also of one that has others train. ``frozen``: takes what no round changes.

        Raises:
            ConfigError: it is to keep tensors that the model does not have.
        """
        check_kept(self._model.specs, None, self._config.keep_personal)
        own = own_codecs(self._config.codecs, self._codecs_setting)
        self._heartbeat = ClientHeartbeat(self._bus, self._identity, self._session, self._describe)
        self._context = ClientContext(
            client_id=self.client_id,
            bus=self._bus,
            identity=self._identity,
            config=self._config,
            session=self._session,
            status=self._status,
            heartbeat=self._heartbeat,
            changed=self._changed,
            compute=self._compute,
            probe=self._probe,
        )
        self._models = ClientModels(
            self._context,
            self._model.dim,
            self._model.frozen_dim,
            frozen,
            own,
            wait=lambda timeout_s: self._wait(timeout_s),
            follower=self._observer,
        )
        self._opened.callback(self._models.close)

    def _describe(self, matched: bool) -> Hello:
        """The Hello of this client as it is now."""
        current, (phase, phase_s) = self._session, self._status.reported(self._sender.phase)
        is_chosen = current.welcome is not None and bool(current.welcome.include)
        return Hello(
            protocol=PROTOCOL,
            dim=self._model.everything[0],
            layout=self._model.everything[1],
            ready=self._prepared and matched,
            session=current.incarnation if current.welcome is not None else 0,
            phase=phase,
            phase_s=phase_s,
            round_id=current.command.round_id if current.command is not None else -1,
            model_round=self._models.replica.round_id,
            host=process_name(),
            memory=self._models.memory_here,
            next_round=-1 if current.from_round is None else current.from_round,
            masks=True,
            grids=True,
            trained_dim=self._model.trained[0],
            trained_layout=self._model.trained[1],
            shared_dim=self._shape.dim if is_chosen else 0,
            shared_layout=self._shape.layout if is_chosen else 0,
            name=self.name,
        )

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
        self._on_loop(self._pause)

    def resume(self) -> None:
        """Take part again, from the next round on; in asynchronous runs at once. May be called on any thread."""
        self._on_loop(self._resume)

    def _on_loop(self, call: Callable[[], None]) -> None:
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
            self._status.is_paused = True
            if not self._status.is_delivering:
                self._paused_in = self._session.command
                self._compute.stop_current()
            self._announce_pause()

    def _resume(self) -> None:
        if self._status.is_paused:
            self._status.is_paused = False
            self._forget_pause()
            self._announce_pause()

    def _forget_pause(self) -> None:
        """Report no more that the newest round is sat out: the controller may begin another attempt at it."""
        failure = self._session.failure
        if failure is not None and failure.reason == PAUSED:
            self._session.failure = None

    def _announce_pause(self) -> None:
        log.info("paused" if self._status.is_paused else "resumed", **self._facts)
        self._changed.set()
        if self._group is not None:
            hello = self._heartbeat.send_hello()
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
        try:
            await self._do_or_report(self._build)
            self._session.begin()
            if self.client_id == NO_ID:
                await self._request_id()
            await self._do_or_report(self._open)
            self._session.begin()
            with self._bus.subscribe(TrainCmd, Control, only=self._concerns) as inbox:
                self._bus.open_writer(ClientUpdate)
                async with TaskGroup() as group:
                    self._models.begin(group)
                    listening = listen(inbox, lambda message: self._handle(message, group))
                    helpers = [
                        group.create_task(listening, name=f"client-{self.client_id}-listen"),
                        group.create_task(self._heartbeat.run(), name=f"client-{self.client_id}-heartbeat"),
                        group.create_task(self._show_models(), name=f"client-{self.client_id}-show-models"),
                    ]
                    self._group = group
                    try:
                        await self._work(group)
                        await self._models.settle()
                        await self._end_well()
                    except Exception as error:
                        self._leaving = f"{FAILED}{self._early_failures.summary(error)}"
                        raise
                    finally:
                        self._group = None
                        self._models.receive(False)
                        if self._declined is not None:
                            await self._early_failures.report(*self._declined)
                        await self._heartbeat.leave("done" if self._session.ended else self._leaving)
                        for helper in helpers:
                            helper.cancel()
        except BaseExceptionGroup as errors:
            raise single_error(errors) from None
        finally:
            self._compute.close()
            self._masking.close()
            self._observer.close()
            self._opened.close()
            self._probe.end(rounds=self._rounds, refused=self._refused, rejected=dict(self._bus.rejected))
        return self.summary

    async def _show_models(self) -> None:
        try:
            await self._observer.show_models()
        except Exception as error:  # it ends this client, whose work is cancelled
            self._leaving = f"{FAILED}{self._early_failures.summary(error)}"
            raise

    async def _end_well(self) -> None:
        """Give the program the model after the last round, and the end of the run, if that has ended well."""
        if self._session.ended is not None:
            await self._take_last_model()
            await self._observer.show_newest()
            await self._observer.run_ended(self.summary)

    async def _take_last_model(self) -> None:
        """Wait until the model after the last round is here, at most LAST_MODEL_S. Its controller waits as long."""
        current, replica, is_over, last = self._session, self._models.replica, self._last_model_deadline(), 0
        with contextlib.suppress(BarrierTimeout):
            while current.run_id and not is_over():  # else no controller has welcomed this client
                self._changed.clear()
                welcome = current.welcome
                if welcome is None:  # a later start of the controller was heard, and its Welcome is on its way
                    await self._wait(EVERY_S)
                    continue
                if not self._wants_last_model(welcome):
                    return
                # Whom a start has welcomed that found all rounds done has no command of it.
                last = welcome.next_round - 1 if current.command is None else current.command.round_id
                self._status.is_paused = False
                await self._models.fetch_round(welcome, last, partial(self._is_too_late, welcome, is_over))
                if replica.round_id >= last:
                    return
        if last:
            log.warning("last model not received", **self._facts, round=last, held=replica.round_id)

    def _is_too_late(self, welcome: Welcome, is_over: Callable[[], bool]) -> bool:
        return is_over() or self._session.welcome is not welcome

    def _last_model_deadline(self) -> Callable[[], bool]:
        """Return a function that returns whether to give up the model after the last round: LAST_MODEL_S are over, or
        the controller has been gone for CONTROLLER_GONE_S."""
        seen_s = began_s = time.monotonic()

        def is_over() -> bool:
            nonlocal seen_s
            now_s = time.monotonic()
            if self._bus.matched_writers(TrainCmd):
                seen_s = now_s
            return now_s >= began_s + LAST_MODEL_S or now_s >= seen_s + CONTROLLER_GONE_S

        return is_over

    def _wants_last_model(self, welcome: Welcome) -> bool:
        return self._models.receives_all(welcome)

    async def _do_or_report(self, step: Callable[[], None]) -> None:
        try:
            await self._compute.run(step)
        except Exception as error:
            await self._report_unprepared(error, NOT_WELCOMED)
            raise

    async def _report_unprepared(self, error: Exception, run_id: int) -> None:
        """Report what this client ends with before its first round of this run."""
        if run_id == NOT_WELCOMED:
            await self._early_failures.report_unwelcomed(error)
        else:
            await self._early_failures.report(error, run_id)

    # Messages

    def _concerns(self, message: Message) -> bool:
        """Whether a message is for this client: neither of other clients, nor of the controller to one of them."""
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

    def _accept_welcome(self, session: int, welcome: Welcome) -> None:
        """Follow the controller. Raises JoinDeclined: it asks for what this client does not give."""
        current = self._session
        try:
            self._check_terms(welcome)  # before anything is sent
            if current.welcome is None or session != current.incarnation:
                self._start_session(session, welcome)
        except JoinDeclined as error:
            self._declined = error, welcome.run_id
            self._leaving = f"{FAILED}{self._early_failures.summary(error)}"
            raise
        current.welcome = welcome
        self.name = welcome.name or self.name  # with identities the allow list's
        self._interrupt_sending()  # a controller that had taken this client for dead holds nothing of its update

    def _start_session(self, session: int, welcome: Welcome) -> None:
        """Follow another controller, or another start of it: work for the one before is of no use."""
        if welcome.run_id != self._session.run_id:
            self._observer.personal = {}  # training begins with what was built, too
        self._session.start_session(session, welcome)
        self._masking.forget()
        self._interrupt_sending()
        self._shape = self._shape_for(welcome)
        self._models.start(welcome, self._shape, layout_of(self._model.specs, Sharing.of_welcome(welcome)).max_bytes)
        self._compute.stop_current()
        named = {"name": welcome.name} if welcome.name else {}
        self._probe.note(
            "welcomed", **named, run=f"{welcome.run_id:016x}", session=session, from_round=welcome.next_round
        )
        log.info("welcomed", **self._facts, run=f"{welcome.run_id:016x}", from_round=welcome.next_round)

    def _shape_for(self, welcome: Welcome) -> Shape:
        """Return the shape of what a run exchanges of this model. Raises JoinDeclined: its patterns do not fit it."""
        sharing = Sharing.of_welcome(welcome)
        try:
            return self._model.shape_of(sharing)
        except ConfigError as error:
            raise JoinDeclined(str(error)) from None

    def _interrupt_sending(self) -> None:
        """Have the sender check whether its update, sent or waiting for masks, is still wanted."""
        self._sender.interrupt()
        self._early_packets.interrupt()
        self._masking.interrupt()

    def _check_terms(self, welcome: Welcome) -> None:
        """Raises JoinDeclined: the controller asks for less noise than this client insists on, for updates that are not
        masked where it insists on that, for tensors that it keeps, or for a codec that it does not allow."""
        if self._config.least_members and not welcome.masked:
            raise JoinDeclined(
                f"the controller takes updates that are not masked, and client.least_members is "
                f"{self._config.least_members}: nothing is sent. Set federated.secure_aggregation.enabled on the "
                f"controller"
            )
        try:
            check_allowed(welcome, self._config.codecs, self._codecs_setting)
            privacy = privacy_of(welcome.options, least_noise=self._config.least_noise)
            check_kept(self._model.specs, Sharing.of_welcome(welcome), self._config.keep_personal)
            insists = bool(self._config.least_members)
            check_buffers_sent(self._model.specs, welcome, is_private=privacy is not None, insists_on_masks=insists)
        except ConfigError as error:
            raise JoinDeclined(str(error)) from None

    def _on_controller(self, session: int, body: Any, group: TaskGroup) -> None:
        current, me = self._session, (self._identity.sender, self._identity.incarnation)
        match body:
            case Welcome() if (body.to, body.incarnation) == me:
                self._accept_welcome(session, body)
                group.create_task(self._heartbeat.send_hello(), name=f"client-{self.client_id}-hello")
            case Refused() if (body.to, body.incarnation) == me:
                raise JoinRefused(body.why)
            case Status() if session != current.incarnation and current.welcome is not None:
                current.welcome = None  # another start of the controller: be welcomed anew
                group.create_task(self._heartbeat.send_hello(), name=f"client-{self.client_id}-hello")
            case _ if isinstance(body, (*ANSWERS, PacketsMissing)) and (body.to, body.incarnation) == me:
                self._answered_by = session
                self._on_answer(body, group)
            case RoundTerms() | RepeatedCommand() if body.run_id == current.run_id and session == current.incarnation:
                self._take_round(body, group)
            case EvaluationRequest() | LocalModelRequest() if session == current.incarnation:
                self._take_request(body)
            case MaskRoster() | MaskShares() | MaskSurvivors() if session == current.incarnation and current.welcome:
                self._masking.on_request(body, current.welcome, self._shape.dim, group)
            case ModelAvailable() if session == current.incarnation:
                self._models.on_notice(session, body)
            case RunEnded() if body.run_id == current.run_id and body.ok:
                current.ended = body
                self._observer.run_has_ended()
                self._models.end()
                self._compute.stop_current()
                self._interrupt_sending()
            case RunEnded() if body.run_id == current.run_id and body.final:
                raise self._ended_by_failure(body)
            case _:
                pass

    def _on_answer(self, body: Any, group: TaskGroup) -> None:
        """The controller has answered about an update, or a packet of one."""
        if isinstance(body, PacketsMissing):
            self._packets.on_missing(body)
        elif not self._sender.on_answer(body, group):
            self._early_packets.on_answer(body, group)

    def _take_round(self, message: RoundTerms | RepeatedCommand, group: TaskGroup) -> None:
        """Take what the controller repeats of the open round."""
        if isinstance(message, RoundTerms):
            self._take_terms(message, group)
            return
        before, is_other = self._session.attempt, self._session.take_repeated(message)
        if is_other or self._session.attempt != before:
            self._on_command(is_other=is_other)

    def _take_terms(self, terms: RoundTerms, group: TaskGroup) -> None:
        current = self._session
        if current.terms is not None and (terms.round_id, terms.attempt) < (
            current.terms.round_id,
            current.terms.attempt,
        ):
            return
        before, current.terms = current.terms, terms
        if terms.attempt and terms != before:
            self._interrupt_sending()  # of the attempt before
        if terms.attempt and has_id(parse_ids(terms.participants), self.client_id):
            self._masking.begin(terms.run_id, current.incarnation, terms.round_id, terms.attempt, group)
        if current.command is not None and not current.takes_part(self.client_id, current.command):
            self._compute.stop_current()  # others were faster: its update is not needed
            self._interrupt_sending()

    def _take_request(self, request: EvaluationRequest | LocalModelRequest) -> None:
        current, me = self._session, (self._identity.sender, self._identity.incarnation)
        if request.run_id != current.run_id:
            return
        if isinstance(request, LocalModelRequest):
            if (request.to, request.incarnation) == me:
                current.model_request = request
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
                self._leaving = self._observer.ending
                return
            welcome, command = current.welcome, current.command
            if welcome is not None and await self._completes_shown(welcome):
                continue
            if welcome is not None and not self._prepared:
                await self._get_ready(welcome, group)
                continue
            if self._status.is_paused or (command is not None and command is self._paused_in):
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
        await self._heartbeat.send_hello()
        try:
            await self._prepare(welcome, group)
        except Exception as error:
            await self._report_unprepared(error, welcome.run_id)
            raise
        self._status.set("idle")
        self._prepared = True
        await self._heartbeat.send_hello()  # ready only now: loading data is not part of the first round

    async def _sit_out(self, welcome: Welcome | None, command: TrainCmd | None) -> None:
        """Report that the round of a command has no update of this client, which is paused, or was in its midst; then
        wait while it is. Asynchronous rounds go on with it whenever it is back."""
        current = self._session
        is_asked = welcome is not None and command is not None and current.is_for(self.client_id, welcome, command)
        if is_asked and command is not None and current.repeats is None:
            current.mark_handled(command)
            current.failure = TrainingFailure(current.run_id, command.round_id, PAUSED, PAUSED, attempt=current.attempt)
            await self._heartbeat.send_hello()
        self._paused_in = None
        if self._status.is_paused:
            await self._wait(self._config.controller_timeout_s)
        else:
            self._forget_pause()

    async def _prepare(self, welcome: Welcome, group: TaskGroup) -> None:
        """Do what has to be done once, before this client is ready; tasks that it starts belong to ``group``."""
        await self._compute.run(self._training.prepare, welcome.num_clients)
        self._observer.personal = await self._compute.run(self._training.kept_personal, welcome)

    async def _make_update(self, welcome: Welcome, command: TrainCmd, base: Tensor) -> EncodedUpdate:
        """Do what the command asks for, from ``base``, and encode it. Whatever is raised is reported as a failure."""
        inputs = RoundInputs(
            welcome=welcome,
            command=command,
            base=base,
            broadcast=self._models.replica.broadcast,
            buffers=self._models.replica.buffers,
            terms=self._session.terms,
            commanded_s=self._session.commanded_s,
            spent=self._masking.turn_to(welcome.run_id, command.round_id),
            route=self._route,
            pacer=self._budget.pacer,
        )
        return await self._compute.run(self._training.train, inputs, next(self._transfers), self._compute.should_stop)

    def _is_called_off(self) -> bool:
        """Whether the newest :meth:`_make_update` was asked to stop."""
        return self._compute.should_stop()

    async def _fetch_for(self, welcome: Welcome, command: TrainCmd) -> None:
        """Fetch the model that a command starts from, until it is here or no longer wanted."""
        current = self._session

        def superseded() -> bool:
            return current.is_older(command) or not current.takes_part(self.client_id, command)

        await self._models.fetch_round(welcome, command.round_id - 1, superseded)

    async def _wait(self, timeout_s: float) -> None:
        """Wait for a message, at most for so long. Raises BarrierTimeout: no controller for too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, EVERY_S)):
                await self._changed.wait()
        self._check_waiting()

    def _check_waiting(self) -> None:
        """Log who is waited for, if that takes long. Raises BarrierTimeout: no controller for too long."""
        misconfiguration = self._bus.misconfiguration
        self._session.check_controller(misconfiguration, partial(self._bus.reach.advice, one=True))
        self._waiting.look(
            f"the controller of job {self._bus.job!r}", began_s=self._session.seen_s, misconfiguration=misconfiguration
        )

    async def _answered(self, welcome: Welcome, group: TaskGroup) -> bool:
        """Do what is asked beside training; whether there was anything."""
        if (request := self._session.model_request) is not None:
            await self._answers.show_model(welcome, request)
            if self._session.model_request is request:
                self._session.model_request = None
            return True
        if (asked := self._session.evaluation) is not None:
            await self._evaluate(welcome, asked, group)
            if self._session.evaluation is asked:
                self._session.evaluation = None
            return True
        return False

    async def _evaluate(self, welcome: Welcome, request: EvaluationRequest, group: TaskGroup) -> None:
        """Evaluate a model on the data of this client, and send the result. A request that is repeated gets the same
        result again."""
        await self._answers.evaluate(welcome, request, group)

    async def _train_and_send(self, welcome: Welcome, command: TrainCmd, base: Tensor, group: TaskGroup) -> None:
        began_s, sent_before = time.monotonic(), self._uploaded_bytes
        if not await self._may_begin(command):
            return
        update, reason = await self._train_update(welcome, command, base, group)
        if update is not None:
            self._status.is_delivering = True
            try:
                update, reason = await self._deliver_update(welcome, command, base, update)
            finally:
                self._status.is_delivering = False
        seconds, sent_bytes = time.monotonic() - began_s, self._uploaded_bytes - sent_before
        if update is None:
            report = ClientReport(
                round_id=command.round_id, counted=False, reason=reason, seconds=seconds, bytes_up=sent_bytes
            )
        else:
            report = ClientReport.of_update(update.request, reason, bytes_up=sent_bytes, seconds=seconds)
        if report.counted:
            log.info(
                "round done",
                **self._facts,
                round=report.round_id,
                samples=report.num_samples,
                loss=None if report.loss is None else round(report.loss, 6),
                seconds=round(seconds, 3),
                bytes=sent_bytes,
            )
        if self._status.is_paused:  # while it was sent: this is said only now
            await self._heartbeat.send_hello()
        await self._observer.round_done(report)

    async def _may_begin(self, command: TrainCmd) -> bool:
        """Call the callbacks before a round; whether to train in it after that: not where it was paused meanwhile, also
        if it goes on already."""
        await self._observer.round_begins(command.round_id)
        has_paused = self._status.is_paused or self._paused_in is command
        return not (self._observer.ending or has_paused)

    async def _train_update(
        self, welcome: Welcome, command: TrainCmd, base: Tensor, group: TaskGroup
    ) -> tuple[EncodedUpdate | None, str]:
        """Make the update of a round; None: there is none, and why."""
        current, session = self._session, self._session.incarnation
        failure: Exception | None = None
        self._status.set("training")
        # It goes out as training starts: a later one may come late, as training may hold the interpreter.
        group.create_task(self._heartbeat.send_hello(), name=f"client-{self.client_id}-hello")
        self._route = partial(
            self._packets.begin, asyncio.get_running_loop(), group, partial(self._context.is_same_session, session)
        )
        update: EncodedUpdate | None = None
        try:
            update = await self._make_update(welcome, command, base)
        except Exception as error:
            failure = error
            self._models.check_frozen_again()
        finally:
            self._status.set("idle")
        # Training that was called off may have ended half way: its result is not used, also where the same command has
        # been repeated meanwhile, as by a restarted controller.
        is_called_off = session != current.incarnation or current.superseded(command) or self._is_called_off()
        if is_called_off or failure is not None:
            await self._packets.stop()
        if is_called_off:
            newer = current.command.round_id if current.command else None
            log.info("training given up", round=command.round_id, newer=newer)
            return None, PAUSED if self._paused_in is command else CALLED_OFF
        if failure is not None:
            return None, await self._report_failure(welcome, command, failure)
        return update, ""

    async def _deliver_update(
        self, welcome: Welcome, command: TrainCmd, base: Tensor, update: EncodedUpdate
    ) -> tuple[EncodedUpdate | None, str]:
        """Send an update. Returns it as it was sent, and why it does not count; None: no answer has come for it."""
        current = self._session
        try:
            delivered = await self._send_update(welcome, command, base, update)
        except TooLarge as error:
            return None, await self._report_failure(welcome, command, error)
        if delivered is None:
            return None, CALLED_OFF
        update, receipt = delivered
        if receipt.accepted:
            self._rounds += 1
            self._observer.personal = part_of(update.state, PERSONAL)  # before the model of this round comes
            current.counted(command.round_id, self._answered_by)
        else:
            self._refused += 1
            current.mark_handled(command)
            log.warning("update refused", **self._facts, round=command.round_id, reason=receipt.reason)
        await self._compute.run(self._training.on_receipt, update, receipt)
        return update, "" if receipt.accepted else f"refused: {plain_line(receipt.reason)}"

    async def _send_update(
        self, welcome: Welcome, command: TrainCmd, base: Tensor, update: EncodedUpdate
    ) -> tuple[EncodedUpdate, Receipt] | None:
        """Send an update, masked where the controller asks for that, and anew in each attempt at its round, until there
        is a receipt for what was sent; None: there will be none.

        Raises:
            TooLarge: it has no room in the sum of all members.
        """
        current, session = self._session, self._session.incarnation
        if not welcome.masked:
            in_packets = isinstance(update.request, PacketRequest)
            deliver = self._packets.deliver if in_packets else self._sender.deliver
            # Another start of the controller is asked, too. It knows whether the update counts, as the residual must.
            receipt = await deliver(
                update, check=lambda: self._context.is_same_run(welcome.run_id), is_held=current.is_held(command)
            )
            return None if receipt is None else (update, receipt)

        def is_wanted() -> bool:
            part = current.takes_part(self.client_id, command)
            return part and self._context.is_same_session(session) and not current.superseded(command)

        while (masks := await self._masking.take(command.round_id, is_wanted)) is not None:
            sent = await self._compute.run(self._training.mask, update, base, masks, next(self._transfers))
            attempt = masks.roster.attempt
            if not self._masking.is_open(attempt):  # it has failed meanwhile, or goes on without this client
                if sent.sealed is not None:
                    sent.sealed.hide()
                continue
            receipt = await self._sender.deliver(
                sent,
                check=lambda: self._context.is_same_session(session) and not self._is_failed(attempt),  # noqa: B023 - awaited here
            )
            if receipt is not None:
                return sent, receipt
        return None

    def _is_failed(self, attempt: Attempt) -> bool:
        """Whether there is a later attempt at the same round, so that this one has come to nothing."""
        newest = self._masking.attempt
        return newest is None or (newest.round_id == attempt.round_id and newest != attempt)

    async def _report_failure(self, welcome: Welcome, command: TrainCmd, error: Exception) -> str:
        """Report to the controller why there is no update. Returns it, in one line."""
        current = self._session
        current.mark_handled(command)
        if isinstance(error, NothingToTrain):
            log.info("nothing to train", **self._facts, round=command.round_id)
            if current.command is command:
                current.failure = TrainingFailure(welcome.run_id, command.round_id, SAT_OUT, SAT_OUT)
                await self._heartbeat.send_hello()
            return SAT_OUT
        text = plain_text(traceback_with_place(error, full=self._config.full_traceback))
        summary = plain_line(str(user_error(error)))
        facts = {**self._facts, "round": command.round_id, "error": summary}
        if summary == self._failure:  # in the next attempt, or in the next round
            log.info("training failed again", **facts)
        else:
            log.error("training failed", **facts, traceback=text)
        self._failure = summary
        sent = text[-8000:] if self._config.report_failures else type(error).__name__
        if welcome.masked and isinstance(error, TooLarge):  # its text says how large
            sent = NO_ROOM
        if current.command is command:
            current.failure = TrainingFailure(welcome.run_id, command.round_id, sent, reason_of(error))
            await self._heartbeat.send_hello()
        return summary

    def _ended_by_failure(self, end: RunEnded) -> TrainingFailed:
        if not self._failure:
            return RunAborted(f"the run has ended: {plain_line(end.reason)}")
        return TrainingFailed(
            f"training failed here: {self._failure}. That has ended the run. Mend it, start the clients and then the "
            f"controller again: the run goes on from the last committed model",
            [self.client_id],
        )
