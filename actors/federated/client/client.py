"""A client of a federated run, as a program has it: its id and settings, what the program asks of it, how it begins and
ends. What it does in between is in ``client_run.py``.

It needs no restart when the controller dies: it waits, is welcomed again, and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from gradbus.actors.federated.chosen_codecs import CLIENT_SETTING, own_codecs
from gradbus.actors.federated.client.client_observer import MAX_REPORTS, ClientObserver, ClientReport, ClientSummary
from gradbus.actors.federated.client.client_rounds import Outbox
from gradbus.actors.federated.client.client_run import ClientRun, Prepared, hello_of
from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.client.failures import ClientFailures
from gradbus.actors.federated.client.id_request import request_id
from gradbus.actors.federated.client.local_evaluation import LocalEvaluation
from gradbus.actors.federated.client.local_training import LocalTraining
from gradbus.actors.federated.client.pacing import TrainingBudget
from gradbus.actors.federated.client.run_terms import Allowed, RunChoices
from gradbus.actors.federated.client.session import (
    ClientContext,
    ClientHeartbeat,
    ClientStatus,
    ControllerSession,
    check_waiting,
    client_facts,
)
from gradbus.actors.federated.client_names import checked_id
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.named_model import NamedModel
from gradbus.actors.federated.model.sharing import check_kept
from gradbus.actors.federated.protocol import PAUSED
from gradbus.actors.federated.task import FederatedTask
from gradbus.codecs import Codec
from gradbus.runtime.built_model import build_model
from gradbus.runtime.bus.bus import Bus, check_bus
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.federated import ClientConfig
from gradbus.runtime.errors import OutOfTurn
from gradbus.runtime.logs import get_logger
from gradbus.runtime.misuse import awaited, check_task
from gradbus.runtime.names import check_name
from gradbus.runtime.tasks import TaskGroup, items_of, single_error
from gradbus.runtime.testing.journal import Probe
from gradbus.runtime.transport.wait_log import WaitLog
from gradbus.runtime.wire.control import (
    Hello,
)
from gradbus.runtime.wire.frames import UNASSIGNED
from gradbus.runtime.wire.messages import (
    Identity,
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
        self._name = check_name(name) if name else ""
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
        models = NamedModel(lambda: self._run.model)
        self._observer = ClientObserver(callbacks, self._config.callbacks, models, self._changed)
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None  # thread and event loop of the run
        self._running: ClientRun | None = None  # from when its model is built and its id known

    def _make_session(self) -> ControllerSession:
        return ControllerSession(self._config.controller_timeout_s)

    def _take_identity(self, incarnation: int) -> None:
        """Make what sends under the id of this client: once, and again where the controller has assigned it."""
        self._identity = Identity(self._sender_id, incarnation)
        self._probe = Probe(f"client-{self._shown_id}", self._config.history.dir)
        self._outbox = Outbox(self._bus, self._identity, self._probe, least_members=self._config.least_members)

    @property
    def name(self) -> str:
        """Return its name; empty: it has none. Once the controller has welcomed it, this is the name given there."""
        return self._session.name or self._name

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
        return client_facts(self.client_id, self.name)

    @property
    def from_round(self) -> int | None:
        """The first round that it takes part in; None before it is welcomed."""
        return self._session.from_round

    @property
    def summary(self) -> ClientSummary:
        """Return what it did so far."""
        if self._running is None:
            return ClientSummary(0, 0, self._outbox.bytes_up, 0.0)
        return self._running.summary

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
        if self._running is not None:
            self._running.announce()

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
            await self._take_part(prepared, opened)
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

    async def _take_part(self, prepared: Prepared, opened: contextlib.ExitStack) -> None:
        """Take part with what is prepared. ``opened``: closes what this makes."""
        async with TaskGroup() as group:
            running = self._running = self._make_run(self._make_context(group), prepared)
            opened.callback(running.models.close)
            await running.take_part()

    def _make_run(self, context: ClientContext, prepared: Prepared) -> ClientRun:
        return ClientRun(context, prepared, self._outbox, self._observer)

    def _make_context(self, group: asyncio.TaskGroup) -> ClientContext:
        return ClientContext(
            client_id=self.client_id,
            name=self._name,
            bus=self._bus,
            identity=self._identity,
            config=self._config,
            session=self._session,
            status=self._status,
            heartbeat=ClientHeartbeat(
                self._bus, self._identity, self._session, lambda matched: self._run.describe(matched)
            ),
            changed=self._changed,
            compute=self._compute,
            probe=self._probe,
            choices=self._choices,
            failures=self._failures,
            group=group,
        )

    @property
    def _run(self) -> ClientRun:
        assert self._running is not None, "it is made by run()"
        return self._running

    # Its parts

    def _build(self) -> FlatModel:
        """Build the model and lay it out, off the loop: the Hello says what it is."""
        self._budget.enter()
        self._bus.access_policy.check_client()
        return self._make_model()

    def _make_model(self) -> FlatModel:
        return FlatModel(build_model(self._task), rebuild=partial(build_model, self._task))

    def _introduction(self, model: FlatModel) -> Hello:
        """Return the first Hello of its run: what its model is, and what it can do."""
        return hello_of(model, self.name)

    async def _request_id(self, model: FlatModel) -> None:
        """Have the controller assign an id, and become the client with that."""
        incarnation, hello = self._identity.incarnation, hello_of(model, self.name)
        waiting = WaitLog(log, self._bus.reach, **self._facts)
        check = partial(check_waiting, self._bus, self._session, waiting)
        self.client_id, self._name = await request_id(self._bus, incarnation, hello, self._session, check)
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
        own, hello = self._own_codecs(model), self._introduction(model)
        return Prepared(model, hello, training, own, training, evaluation, self._budget.pacer)

    def _own_codecs(self, model: FlatModel) -> tuple[type[Codec], ...]:
        """The codecs of the user's own. Raises ConfigError: as :meth:`_open`."""
        check_kept(model.specs, None, self._config.keep_personal)
        return own_codecs(self._config.codecs, self._codecs_setting)

    async def _compute_or_report(self, step: Callable[[], T]) -> T:
        """Compute a step before the Welcome, off the loop. What it fails with is reported."""
        try:
            return await self._compute.run(step)
        except Exception as error:
            await self._report_unwelcomed(error)
            raise

    async def _report_unwelcomed(self, error: Exception) -> None:
        """Report what this client ends with before it has met a controller."""
        own_id, name = (UNASSIGNED, self.name) if self.client_id == NO_ID else (self.client_id, "")
        identity = Identity(own_id, self._identity.incarnation)  # of a host: of its first client
        await self._failures.report_unwelcomed(identity, name, error)
