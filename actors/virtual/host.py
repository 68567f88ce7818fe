"""A host: one actor that speaks for many clients.

To its controller it is many clients with one heartbeat: its Hello names their ids, and RoundTerms those that are asked.
Their updates go out as those of any client do, each under its own id. They are trained by a few processes, one client
after the other, and only where they are asked: a client that sits out costs nothing but its entry in the tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from gradbus.actors.federated.client.client import Client
from gradbus.actors.federated.client.client_observer import ClientObserver, ClientSummary
from gradbus.actors.federated.client.client_optimizer import split_terms
from gradbus.actors.federated.client.client_rounds import Outbox
from gradbus.actors.federated.client.client_run import ClientRun, Prepared
from gradbus.actors.federated.client.local_evaluation import DECLINED, HOSTED
from gradbus.actors.federated.client.round_inputs import RoundInputs
from gradbus.actors.federated.client.session import ClientContext, ControllerSession
from gradbus.actors.federated.client.updates_out import ANSWERS, EncodedUpdate, UpdateSender, note_receipt
from gradbus.actors.federated.controller.clients import FIRST_HOST
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing, layout_of
from gradbus.actors.federated.protocol import SAT_OUT, TRAINING_FAILED
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.virtual.client_trainer import open_state, vector_bytes
from gradbus.actors.virtual.pool import (
    ClientFailed,
    EvaluationWork,
    ProcessDied,
    RoundWork,
    TrainingPool,
    TrainingProcess,
)
from gradbus.runtime.built_model import build_model
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.config.federated import ClientConfig
from gradbus.runtime.errors import BusError, ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.plain_text import plain_line, plain_text
from gradbus.runtime.tasks import TaskGroup
from gradbus.runtime.wire.control import (
    EvaluationRequest,
    EvaluationResult,
    Hello,
    LocalModelRequest,
    Refused,
    RoundTerms,
    TrainingFailure,
    Welcome,
)
from gradbus.runtime.wire.frames import CONTROLLER, UNASSIGNED
from gradbus.runtime.wire.id_ranges import common_ids, format_ids, has_id, parse_ids
from gradbus.runtime.wire.messages import Control, Identity, Message, PeerGone, TrainCmd

MAX_DEATHS = 3  # of training processes, in one client's training
# Updates that wait for their receipts: where clients may lie, the controller adds none before all are announced.
WAITING_UPDATES = 2  # for each training process, however large they are
WAITING_BYTES = 1 << 30
REPEATED_FAILURES = 64  # that go out with one heartbeat

log = get_logger("host")


def check_room(asked: int, update_bytes: int) -> None:
    """Raises ConfigError: the updates of so many clients, which wait until all are announced, do not fit."""
    if asked * update_bytes > WAITING_BYTES:
        raise ConfigError(
            f"federated.limits.trust=adversarial: no update of a round is added before all are announced, and "
            f"{asked:,} updates of {update_bytes:,} bytes are more than the {WAITING_BYTES:,} bytes that may wait in "
            f"one process. On the controller, set it to cooperative, or ask fewer clients in a round; or spread the "
            f"clients over more hosts"
        )


def check_config(config: ClientConfig) -> None:
    """Raises ConfigError: it has what is of single clients."""
    if config.budget.is_set or config.callbacks:
        raise ConfigError(
            f"client.{'budget' if config.budget.is_set else 'callbacks'} is of a client that is a process, or a "
            f"Client, of its own: leave it out for virtual clients"
        )


class HostSession(ControllerSession):
    """Is the session of many clients: a command is for those that its terms name, and have not answered it.

    Attributes:
        counted_ids: clients whose update counts in the round of the newest command. refused_ids: those without success.
    """

    def __init__(self, controller_timeout_s: float, ids: tuple[range, ...]) -> None:
        super().__init__(controller_timeout_s)
        self._ids = ids
        self.counted_ids: set[int] = set()
        self.refused_ids: set[int] = set()
        self._asked: tuple[RoundTerms, frozenset[int]] | None = None

    def asked(self, command: TrainCmd) -> frozenset[int]:
        """Ids of those that are asked to take part in the round of this command."""
        terms = self.terms
        if terms is None or terms.round_id != command.round_id:
            return frozenset()
        if self._asked is None or self._asked[0] is not terms:
            named = parse_ids(terms.participants) if terms.participants else self._ids
            self._asked = terms, frozenset(common_ids(self._ids, named))
        return self._asked[1]

    def to_train(self, command: TrainCmd) -> frozenset[int]:
        """Return those of them that have not answered."""
        return self.asked(command) - self.counted_ids - self.refused_ids

    def take(self, command: TrainCmd) -> bool:
        other = super().take(command)
        if self.command is command:
            self.refused_ids.clear()  # given again: those that failed try again
        if other:
            self.counted_ids.clear()
        return other

    def start_session(self, session: int, welcome: Welcome) -> None:
        if session != self.incarnation:
            self.counted_ids.clear()
            self.refused_ids.clear()
        super().start_session(session, welcome)

    def is_for(self, client_id: int, welcome: Welcome, command: TrainCmd) -> bool:
        is_open = command.round_id >= welcome.next_round and not self._is_over(command)
        return is_open and self.has_terms and bool(self.to_train(command))

    def evaluates(self, client_id: int, request: EvaluationRequest) -> bool:
        return next(common_ids(self._ids, parse_ids(request.participants)), None) is not None

    def to_evaluate(self, request: EvaluationRequest) -> list[int]:
        """Return those of its clients that a request names."""
        return list(common_ids(self._ids, parse_ids(request.participants)))

    def may_take_part(self, client_id: int, command: TrainCmd) -> bool:
        terms = self.terms
        return terms is None or terms.round_id != command.round_id or bool(self.to_train(command))


class ClientHost(Client):
    """Trains its clients when commanded, and sends their updates."""

    _task_methods = ("build_model",)  # the processes of the pool train
    _session: HostSession

    def __init__(
        self,
        bus: Bus,
        task: FederatedTask,
        *,
        ids: Iterable[int],
        pool: TrainingPool[Any],
        state_dir: Path,
        config: ClientConfig | None = None,
        name: str = "",
    ) -> None:
        """A host that has not started.

        Args:
            bus: joined to the job.
            task: gives the model; the processes of the pool train with it.
            ids: of the clients. No other process of the job may have one of them.
            pool: closed by whoever has made it.
            state_dir: where the clients keep what they need from round to round, that of the pool.
            config: of all clients.
            name: of all of them: client 7 of ``lab`` is shown as ``lab.7``.
        """
        self._text = format_ids(ids)
        self._ids = parse_ids(self._text)
        if not self._ids:
            raise ValueError("ids: expected at least one client")
        if FIRST_HOST | self._ids[0].start >= UNASSIGNED:
            raise ValueError("ids: expected the lowest one of a host to be at most 2^31 - 3")
        check_config(config or ClientConfig())
        super().__init__(bus, task, client_id=self._ids[0].start, name=name, config=config)
        self._pool = pool
        self._state_dir = state_dir

    def _make_session(self) -> HostSession:
        return HostSession(self._config.controller_timeout_s, self._ids)

    def _make_run(self, context: ClientContext, prepared: Prepared) -> HostRun:
        clients = HostedClients(self._ids, self._pool, self._state_dir)
        return HostRun(context, prepared, self._outbox, self._observer, clients)

    @property
    def _sender_id(self) -> int:
        return FIRST_HOST | self.client_id

    def _build(self) -> FlatModel:
        self._bus.access_policy.check_host()
        return FlatModel(build_model(self._task))

    def _open(self, model: FlatModel, opened: contextlib.ExitStack) -> Prepared:
        self._probe.note("started", incarnation=self._identity.incarnation, ids=self._text)
        return Prepared(model, self._introduction(model), ModelOfHost(model), self._own_codecs(model))

    def _introduction(self, model: FlatModel) -> Hello:
        return replace(super()._introduction(model), ids=self._text, masks=False, grids=False)

    def pause(self) -> NoReturn:
        """Raises TypeError: the clients of a host cannot be paused."""
        raise TypeError(
            "virtual clients cannot be paused: a client that is to pause is a process, or a Client, of its own"
        )


class ModelOfHost:
    """The model of a host, for its frozen parameters. Both methods are called on the compute thread."""

    def __init__(self, model: FlatModel) -> None:
        self._model = model

    def lacks_frozen(self, welcome: Welcome) -> bool:
        """Return whether it lacks the controller's frozen parameters."""
        self._model.arrange(Sharing.of_welcome(welcome))
        return self._model.frozen != welcome.frozen

    def take_frozen(self, welcome: Welcome, vector: Tensor) -> None:
        """Put them into the model, for the processes of the pool."""
        self._model.arrange(Sharing.of_welcome(welcome))
        self._model.write_frozen(vector)


class HostedClients(NamedTuple):
    """Holds what a host's part in a run needs of the host itself: the ids of its clients, what trains them, and where
    they keep what they need from round to round."""

    ids: tuple[range, ...]
    pool: TrainingPool[Any]
    state_dir: Path


class HostRun(ClientRun):
    """The part of a host's clients in a run."""

    _session: HostSession

    def __init__(
        self,
        context: ClientContext,
        prepared: Prepared,
        outbox: Outbox,
        observer: ClientObserver,
        clients: HostedClients,
    ) -> None:
        super().__init__(context, prepared, outbox, observer)
        self._ids, self._pool, self._state_dir = clients
        self._sending: dict[int, UpdateSender] = {}  # by client
        self._reported: dict[int, TrainingFailure] = {}  # of the newest command, by client
        self._work_now: RoundWork | None = None
        self._evaluating: EvaluationWork | None = None
        self._evaluating_session = 0
        # Of the model that was evaluated last: its session and round, and the results by client.
        self._results: tuple[tuple[int, int], dict[int, EvaluationResult]] = (0, 0), {}
        self._repeating: asyncio.Task[None] | None = None
        self._counted = self._refused = 0  # updates of its clients
        self._trained_s = 0.0
        self._bytes_up = 0

    @property
    def summary(self) -> ClientSummary:
        """Return what its clients did so far, in sum."""
        return ClientSummary(self._counted, self._refused, self._bytes_up, self._trained_s)

    async def _take_last_model(self) -> None:
        """Do nothing: no program follows the models of a host."""

    # Messages

    def concerns(self, message: Message) -> bool:
        if not isinstance(message, Control):
            return not isinstance(message, PeerGone)
        own = self._context.identity.sender
        to = getattr(message.body, "to", own)
        return message.sender == CONTROLLER and (to == own or has_id(self._ids, to))

    def handle(self, message: Message) -> None:
        super().handle(message)
        work = self._evaluating
        if work is not None and not self._session.wants_result(work.request, self._evaluating_session):
            self._pool.stop(work)
        if self._work_now is None or (isinstance(message, Control) and isinstance(message.body, ANSWERS)):
            return
        if not self._is_wanted():
            self._pool.stop(self._work_now)
            self._interrupt_sending()

    def _interrupt_sending(self) -> None:
        super()._interrupt_sending()
        for sender in self._sending.values():
            sender.interrupt()

    def _on_controller(self, session: int, body: Any) -> None:
        if isinstance(body, ANSWERS):
            sender = self._sending.get(body.to)
            if sender is not None and body.incarnation == self._context.identity.incarnation:
                sender.on_answer(body, self._group)
        elif isinstance(body, LocalModelRequest) and body.incarnation == self._context.identity.incarnation:
            self._group.create_task(self._refuse_model(body), name="host-no-model")
        elif isinstance(body, Refused) and body.to != self._context.identity.sender:
            log.error("client refused", client=body.to, reason=body.why)
        else:
            super()._on_controller(session, body)

    # RoundWork

    async def _prepare(self, welcome: Welcome) -> None:
        await self._pool.open(self._context.client_id, welcome.num_clients)
        self._repeating = self._group.create_task(self._repeat_failures(welcome.heartbeat_s), name="host-failures")

    async def _work(self) -> None:
        try:
            await super()._work()
        finally:
            if self._repeating is not None:
                self._repeating.cancel()

    def _is_wanted(self) -> bool:
        """Whether what is being trained is still asked for by somebody."""
        current, (command, session) = self._session, self._commanded
        is_superseded = session != current.incarnation or current.is_superseded(command)
        return not is_superseded and bool(current.to_train(command))

    async def _train_and_send(self, welcome: Welcome, command: TrainCmd, base: Tensor) -> None:
        current = self._session
        self._commanded = command, current.incarnation
        order = sorted(current.to_train(command))
        # Where a round ends before all have trained, as with over_select, no id is always among the last.
        random.Random(f"{command.seed} {command.round_id}").shuffle(order)
        queue = deque((client_id, 0) for client_id in order)
        inputs = RoundInputs(
            welcome=welcome,
            command=command,
            base=base,
            broadcast=self.models.replica.broadcast,
            buffers=self.models.replica.buffers,
            terms=current.terms,
            commanded_s=current.commanded_s,
        )
        frozen = vector_bytes(self.model.read_frozen()) if welcome.frozen else b""
        work = self._work_now = self._pool.new_work(inputs, frozen)
        began_s, asked, before = time.monotonic(), len(queue), self._counted
        self._status.set("training")
        self._group.create_task(self._context.heartbeat.send_hello(), name="host-hello")
        buffers = layout_of(self.model.specs, Sharing.of_welcome(welcome))
        codec = self._context.choices.read(welcome).codec_in(split_terms(inputs.options())[1])
        largest = codec.max_bytes(self.models.shape.dim) + buffers.max_bytes
        if current.is_held(command):
            check_room(asked, largest)
        room = asyncio.Semaphore(max(WAITING_UPDATES * self._pool.size, WAITING_BYTES // largest))
        try:
            async with TaskGroup() as trainings:
                for number in range(min(self._pool.size, asked)):
                    trainings.create_task(self._train_some(work, queue, room, trainings), name=f"host-train-{number}")
        finally:
            self._work_now = None
            self._status.set("idle")
        log.info(
            "round done",
            round=command.round_id,
            clients=asked,
            counted=self._counted - before,
            seconds=round(time.monotonic() - began_s, 3),
        )

    async def _train_some(
        self, work: RoundWork, queue: deque[tuple[int, int]], room: asyncio.Semaphore, group: TaskGroup
    ) -> None:
        """Train clients of the queue until there are none. Each comes with the number of processes that have died in
        its training."""
        while queue and not self._pool.is_stopped(work):
            client_id, deaths = queue.popleft()
            update: EncodedUpdate | None = None
            if client_id not in self._session.asked(self._commanded[0]):
                continue  # others were faster
            await room.acquire()
            sent = False
            try:
                async with self._pool.borrow(work) as process:
                    if not self._pool.is_stopped(work):  # while it waited for a process
                        update = await process.train(
                            work, Identity(client_id, self._context.identity.incarnation), next(self._outbox.transfers)
                        )
                if update is not None:
                    group.create_task(self._deliver(update, process, room), name=f"host-send-{client_id}")
                    sent = True
            except ProcessDied:
                if deaths + 1 < MAX_DEATHS:
                    queue.append((client_id, deaths + 1))
                else:
                    text = f"its training process has died {MAX_DEATHS} times: out of memory, or a crash in native code"
                    await self._fail(client_id, ClientFailed(text, TRAINING_FAILED, text))
            except ClientFailed as error:
                await self._fail(client_id, error)
            finally:
                if not sent:
                    room.release()

    async def _deliver(self, update: EncodedUpdate, process: TrainingProcess, room: asyncio.Semaphore) -> None:
        """Send an update until there is an answer, and keep what its client keeps if it counts."""
        current, (command, session) = self._session, self._commanded
        client_id, request = update.key.sender, update.request
        sender = self._sending[client_id] = UpdateSender(
            self._context.bus, Identity(client_id, self._context.identity.incarnation), self._context.probe
        )
        try:
            receipt = await sender.deliver(
                update, check=lambda: self._context.is_same_session(session), is_held=current.is_held(command)
            )
        finally:
            del self._sending[client_id]
            self._bytes_up += sender.bytes_up
            process.is_read(update)
            room.release()
        self._trained_s += request.train_s
        if receipt is None:
            return
        if self._context.probe.history.on:
            await self._compute.run(note_receipt, self._context.probe, receipt, client=client_id)
        if not receipt.accepted:
            self._refused += 1
            is_same = session == current.incarnation and request.round_id == command.round_id
            if is_same and current.command is command:  # no later one, nor an equal one: there the client trains
                current.refused_ids.add(client_id)
            log.warning("update refused", client=client_id, round=request.round_id, reason=receipt.reason)
            return
        self._counted += 1
        if session == current.incarnation and current.command == command:
            current.counted_ids.add(client_id)
        if update.state:
            await self._compute.run(self._keep, update)

    def _keep(self, update: EncodedUpdate) -> None:
        """Save the state of a client whose update counts."""
        kept = open_state(self._state_dir, update.key.sender, to_write=True)
        try:
            kept.start_run(update.key.job, self.models.shape.dim)
            kept.keep(update.key.round_id, update.state)
        finally:
            kept.close()

    # Evaluation

    async def _evaluate(self, welcome: Welcome, request: EvaluationRequest) -> None:
        """Have the processes evaluate a model on the data of each client that is named, and send the results as they
        come. Those that are there already are sent again."""
        session = self._session.incarnation
        if self._results[0] != (session, request.round_id):
            self._results = (session, request.round_id), {}
        results, named = self._results[1], self._session.to_evaluate(request)
        if not self._context.config.evaluates:
            declined = EvaluationResult(request.run_id, request.round_id, 0, {}, DECLINED, 0.0)
            results.update(dict.fromkeys(named, declined))
        for client_id in named:
            if client_id in results:
                await self._send(client_id, results[client_id])
        queue = deque((client_id, 0) for client_id in named if client_id not in results)
        if not queue or (vector := await self.models.fetch_evaluated(welcome, request)) is None:
            return
        frozen = vector_bytes(self.model.read_frozen()) if welcome.frozen else b""
        work = self._evaluating = self._pool.new_evaluation(
            welcome, request, vector, frozen, self.models.replica.buffers
        )
        self._evaluating_session = session
        self._status.set("evaluating")
        self._group.create_task(self._context.heartbeat.send_hello(), name="host-hello")
        left_s = max(0.0, self._session.evaluation_until_s - time.monotonic())
        deadline = asyncio.get_running_loop().call_later(left_s, self._pool.stop, work)
        try:
            async with TaskGroup() as evaluations:
                for number in range(min(self._pool.size, len(queue))):
                    name = f"host-evaluate-{number}"
                    evaluations.create_task(self._evaluate_some(work, queue, results), name=name)
        finally:
            deadline.cancel()
            self._evaluating = None
            self._status.set("idle")

    async def _evaluate_some(
        self, work: EvaluationWork, queue: deque[tuple[int, int]], results: dict[int, EvaluationResult]
    ) -> None:
        """Evaluate on the data of clients of the queue until there are none. Each comes with the number of processes
        that have died meanwhile."""
        request = work.request
        while queue and not self._pool.is_stopped(work):
            client_id, deaths = queue.popleft()
            result: EvaluationResult | None = None
            with contextlib.suppress(ProcessDied):
                async with self._pool.borrow(work) as process:
                    if self._pool.is_stopped(work):  # while it waited for a process
                        return
                    result = await process.evaluate(work, client_id, tells_errors=self._context.config.report_failures)
                if result is None:
                    return  # stopped
            if result is None and deaths + 1 < MAX_DEATHS:
                queue.append((client_id, deaths + 1))
                continue
            if result is None:
                why = f"its process has died {MAX_DEATHS} times"
                result = EvaluationResult(request.run_id, request.round_id, 0, {}, why, 0.0)
            results[client_id] = result
            await self._send(client_id, result)

    async def _send(self, client_id: int, body: EvaluationResult | TrainingFailure) -> None:
        with contextlib.suppress(BusError):  # a result is requested again, a failure sent again with the next heartbeat
            await self._context.bus.publish(Identity(client_id, self._context.identity.incarnation), body)

    async def _refuse_model(self, request: LocalModelRequest) -> None:
        await self._send(request.to, EvaluationResult(request.run_id, request.round_id, 0, {}, HOSTED, 0.0))

    async def _fail(self, client_id: int, error: ClientFailed) -> None:
        """Report that the training of a client failed."""
        current, (command, session) = self._session, self._commanded
        if error.reason == SAT_OUT:
            log.info("nothing to train", client=client_id, round=command.round_id)
        else:
            log.error("training failed", client=client_id, round=command.round_id, error=str(error))
            self._failures.note_failed_client(plain_line(f"{error} (client {client_id})"))
        if session != current.incarnation or current.is_superseded(command):
            return
        current.refused_ids.add(client_id)
        text = plain_text(error.text) if self._context.config.report_failures else "training failed"
        sent = TrainingFailure(current.run_id, command.round_id, text, error.reason)
        self._reported = {one: before for one, before in self._reported.items() if before.round_id == sent.round_id}
        self._reported[client_id] = sent
        await self._send(client_id, sent)

    async def _repeat_failures(self, heartbeat_s: float) -> None:
        """Send failures of the newest command with each heartbeat, a part of them each time. Runs until cancelled."""
        while True:
            await asyncio.sleep(heartbeat_s)
            command = self._session.command
            for client_id in list(self._reported)[:REPEATED_FAILURES]:
                sent = self._reported.pop(client_id)
                if command is not None and sent.round_id == command.round_id and client_id in self._session.refused_ids:
                    self._reported[client_id] = sent  # at the end of the line
                    await self._send(client_id, sent)
