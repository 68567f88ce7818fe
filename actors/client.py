"""A client of a federated run. It reacts: to what the controller says, and to what it holds itself.

It needs no restart when the controller dies: it waits, is welcomed again, and goes on. What it should do next follows
from its state (newest command, newest model, last round done), never from the order in which messages came.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import traceback
from typing import Any

from torch import Tensor

from gradbus.actors.delivery import REPEAT_AFTER_S, Delivery
from gradbus.actors.flat_model import FlatModel
from gradbus.actors.local_training import LocalTraining
from gradbus.actors.model_copy import ModelCopy
from gradbus.actors.model_memory import ModelMemory
from gradbus.actors.report import ClientSummary
from gradbus.actors.residuals import Residuals
from gradbus.actors.task import FederatedTask
from gradbus.runtime.bus import Bus, Subscription
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.control import (
    PROTOCOL,
    Bye,
    Failed,
    Grant,
    Hello,
    Leave,
    ModelHere,
    NeedModel,
    NeedUpdate,
    Receipt,
    Refused,
    Status,
    Welcome,
)
from gradbus.runtime.errors import BarrierTimeout, BusClosed, BusError, GradbusError, JoinRefused
from gradbus.runtime.frames import CONTROLLER, FrameKey
from gradbus.runtime.logs import get_logger
from gradbus.runtime.messages import (
    ClientUpdate,
    Control,
    Identity,
    Message,
    ModelBlob,
    PeerGone,
    TrainCmd,
    new_incarnation,
)
from gradbus.runtime.settings import ClientConfig
from gradbus.runtime.tasks import single_error

ASK_AFTER_S = 0.25  # without a frame of the model that is needed, ask for it
OLD_SESSION_S = 3.0  # a controller with a lower incarnation is believed when the known one is silent for so long

log = get_logger("client")


class Client:
    """Trains on its own data when told to, and sends what it learnt."""

    def __init__(self, bus: Bus, task: FederatedTask, *, client_id: int, config: ClientConfig | None = None) -> None:
        """A client that has not started.

        Args:
            bus: joined to the job.
            task: model, data and training.
            client_id: 0 or more, one for each client of the job.
            config: settings.
        """
        if not 0 <= client_id < 0x7FFF_FFFF:
            raise ValueError(f"client_id must be within 0 .. 2^31 - 2, got {client_id}")
        self.client_id = client_id
        self._bus = bus
        self._task = task
        self._config = config or ClientConfig()
        self._identity = Identity(client_id, new_incarnation())
        self._compute = ComputeThread(f"client-{client_id}")
        self._decode = ComputeThread(f"client-{client_id}-decode")  # a model may come while the old one still trains
        self._changed = asyncio.Event()
        self._welcome: Welcome | None = None
        self._command: TrainCmd | None = None
        self._commanded_s = 0.0  # when it was heard, by perf_counter
        self._prepared = False  # the task has loaded its data
        self._handled = False  # the command has been answered, without success
        self._ended: Bye | None = None
        self._left = False  # it has said Leave, or is about to
        self._session = 0  # incarnation of the controller that has welcomed this client last
        self._session_heard_s = 0.0
        self._run_id = 0
        self._failure: Failed | None = None  # said again with each heartbeat, until the next command
        self._counted_round = 0  # the last round in which an update of ours counted, in this session
        self._phase = "idle"
        self._transfers = 0
        self._heard_s = time.monotonic()
        self._delivery = Delivery(bus, self._identity)
        self._rounds = self._refused = 0

    @property
    def from_round(self) -> int | None:
        """The first round that it takes part in, as the controller said last; None before it is welcomed."""
        return None if self._welcome is None else self._welcome.next_round

    def _open(self) -> None:
        """Off the loop: building a model and reading residuals take their time."""
        self._model = FlatModel(self._task.build_model())
        residuals = Residuals(self._config.state_dir, self.client_id)
        self._training = LocalTraining(self._task, self._identity, self._model, residuals, self._bus.memory)
        # The longest message is a sparse one with raw indices: 8 bytes an element, and a header.
        self._copy = ModelCopy(self._model.dim, max_bytes=8 * self._model.dim + 4096)
        self._memory = ModelMemory(self._bus.memory, self._copy, self._decode, self.client_id)

    async def run(self) -> ClientSummary:
        """Take part until the controller says that all rounds are done.

        Raises:
            JoinRefused: the controller does not want this client; the text says why.
            BarrierTimeout: no controller was heard for ``controller_timeout_s``.
        """
        try:
            await self._compute.run(self._open)
            self._heard_s = time.monotonic()
            with self._bus.subscribe(TrainCmd, ModelBlob, Control, only=self._concerns) as inbox:
                self._bus.open_writer(ClientUpdate)
                async with asyncio.TaskGroup() as group:
                    helpers = [
                        group.create_task(self._listen(inbox, group), name=f"client-{self.client_id}-listen"),
                        group.create_task(self._beat(), name=f"client-{self.client_id}-heartbeat"),
                    ]
                    try:
                        await self._work()
                        await self._memory.settle()
                    finally:
                        self._left = True
                        with contextlib.suppress(BusError):
                            await self._bus.publish(self._identity, Leave("done" if self._ended else "stopped"))
                        for helper in helpers:
                            helper.cancel()
        except BaseExceptionGroup as errors:
            raise single_error(errors) from None
        finally:
            self._compute.close()
            self._decode.close()
            if hasattr(self, "_training"):
                self._training.close()
        return ClientSummary(self._rounds, self._refused, self._delivery.bytes_up, self._training.train_s)

    # What it hears

    async def _listen(self, inbox: Subscription, group: asyncio.TaskGroup) -> None:
        while True:
            try:
                message = await inbox.get()
            except BusClosed:
                raise BusClosed("the bus was closed under a running client: stop the client first") from None
            try:
                self._handle(message, group)
            except JoinRefused:
                raise
            except GradbusError as error:
                log.warning("message not handled", kind=type(message).__name__, reason=str(error))

    def _concerns(self, message: Message) -> bool:
        """Not what the others say, nor what the controller says to one of them."""
        if isinstance(message, Control):
            return message.sender == CONTROLLER and getattr(message.body, "to", self.client_id) == self.client_id
        return not isinstance(message, PeerGone)

    def _handle(self, message: Message, group: asyncio.TaskGroup) -> None:
        match message:
            case TrainCmd():
                if message != self._command:
                    self._compute.stop_current()  # what is being trained now is no longer wanted
                if message != self._command or self._handled:
                    self._commanded_s = time.perf_counter()
                self._command, self._handled, self._failure = message, False, None
                self._delivery.interrupt()
            case ModelBlob():
                complete = self._copy.feed(message)
                if complete is not None:
                    group.create_task(self._take_model(*complete), name=f"client-{self.client_id}-model")
                return
            case Control(sender=sender, incarnation=session, body=body) if sender == CONTROLLER:
                now_s = time.monotonic()
                if session < self._session and now_s - self._session_heard_s < OLD_SESSION_S:
                    return  # the last words of a controller that has been replaced
                self._heard_s = now_s
                if session == self._session:
                    self._session_heard_s = now_s
                self._hear_controller(session, body, group)
            case _:
                return
        self._changed.set()

    def _start_session(self, session: int, welcome: Welcome) -> None:
        """Another controller, or another start of it: what the one before said counts no longer.

        A controller that died before it had committed a round does that round again, from the same model.
        """
        self._session, self._session_heard_s, self._run_id = session, time.monotonic(), welcome.run_id
        self._command, self._counted_round, self._failure = None, 0, None
        self._delivery.interrupt()
        self._copy.start(welcome.run_id)
        self._memory.start()
        self._compute.stop_current()
        log.info("welcomed", client=self.client_id, run=f"{welcome.run_id:016x}", from_round=welcome.next_round)

    def _hear_controller(self, session: int, body: Any, group: asyncio.TaskGroup) -> None:
        me = (self.client_id, self._identity.incarnation)
        match body:
            case Welcome() if (body.to, body.incarnation) == me:
                if self._welcome is None or session != self._session:
                    self._start_session(session, body)
                self._welcome = body
                group.create_task(self._hello(), name=f"client-{self.client_id}-hello")
            case Refused() if (body.to, body.incarnation) == me:
                raise JoinRefused(body.why)
            case Status() if session != self._session and self._welcome is not None:
                self._welcome = None  # another start of the controller: be welcomed anew
                group.create_task(self._hello(), name=f"client-{self.client_id}-hello")
            case Grant() | NeedUpdate() | Receipt() if (body.to, body.incarnation) == me:
                self._delivery.on_answer(body, group)
            case ModelHere() if session == self._session and (key := self._memory.expect(session, body)) is not None:
                name = f"client-{self.client_id}-model"
                self._memory.note(group.create_task(self._read_model(key, body), name=name))
            case Bye() if body.run_id == self._run_id and body.ok:
                self._ended = body
                self._memory.end()
                self._compute.stop_current()
                self._delivery.interrupt()
            case _:
                pass

    async def _take_model(self, key: FrameKey, payload: memoryview) -> None:
        if self._copy.adopt(key, await self._decode.run(self._copy.decode, key, payload)):
            self._changed.set()

    async def _read_model(self, key: FrameKey, said: ModelHere) -> None:
        payload = await self._memory.read(key, said)
        if payload is not None:
            await self._take_model(key, payload)
            return
        if not self._memory.here:
            await self._hello()  # so that it is not counted on
        self._changed.set()

    # What it says

    async def _hello(self) -> None:
        if self._left:
            return  # the controller would take it for one that has come back
        ready = self._prepared and self._bus.matched_readers(ClientUpdate) > 0
        ready = ready and min(self._bus.matched_writers(kind) for kind in (TrainCmd, ModelBlob)) > 0
        session = self._session if self._welcome is not None else 0
        round_id = self._command.round_id if self._command is not None else -1
        phase = self._phase if self._delivery.phase == "idle" else self._delivery.phase
        hello = Hello(
            protocol=PROTOCOL, dim=self._model.dim, layout=self._model.layout, ready=ready, session=session,
            phase=phase, round_id=round_id, model_round=self._copy.round_id,
            host=f"{socket.gethostname()}:{os.getpid()}", next_round=-1 if self.from_round is None else self.from_round,
            memory=self._memory.here,
        )  # fmt: skip
        with contextlib.suppress(BusError):  # said again with the next heartbeat
            await self._bus.publish(self._identity, hello)
            if self._failure is not None:
                await self._bus.publish(self._identity, self._failure)

    async def _beat(self) -> None:
        """Say that this client lives, at once when something about the matching changes."""
        while True:
            await self._hello()
            heartbeat_s = self._welcome.heartbeat_s if self._welcome is not None else REPEAT_AFTER_S
            seen = self._matching()
            with contextlib.suppress(BarrierTimeout):
                await self._bus.matched(lambda: self._matching() != seen, timeout_s=heartbeat_s)  # noqa: B023 - awaited here

    def _matching(self) -> tuple[int, ...]:
        bus = self._bus
        return bus.matched_readers(ClientUpdate), *map(bus.matched_writers, (TrainCmd, ModelBlob, Control))

    # What it does

    async def _work(self) -> None:
        while True:
            self._changed.clear()
            if self._ended is not None:
                return
            welcome, command = self._welcome, self._command
            if welcome is not None and not self._prepared:
                self._phase = "preparing"
                await self._compute.run(self._training.prepare, welcome.num_clients)
                self._phase, self._prepared = "idle", True
                await self._hello()  # ready only now: loading data is not part of the first round
                continue
            if welcome is None or command is None or not self._wanted(welcome, command):
                await self._wait(self._config.controller_timeout_s)
            elif self._copy.round_id == command.round_id - 1 and self._copy.vector is not None:
                await self._train_and_send(welcome, command, self._copy.vector)
            elif self._copy.round_id >= command.round_id:
                await self._wait(REPEAT_AFTER_S)  # a command that is older than our model: its successor will come
            else:
                await self._fetch(welcome, command)

    def _wanted(self, welcome: Welcome, command: TrainCmd) -> bool:
        """Whether to train: DDS may repeat a command, and the controller may give one again."""
        return not self._handled and command.round_id > self._counted_round and command.round_id >= welcome.next_round

    async def _fetch(self, welcome: Welcome, command: TrainCmd) -> None:
        """Wait for the model that the command builds on; ask for it while it does not come."""
        self._phase = "fetching"
        asked_s = time.monotonic()
        while self._copy.round_id < command.round_id - 1 and not self._superseded(command):
            self._changed.clear()
            ask_at_s = max(asked_s, self._copy.progressed_s) + ASK_AFTER_S
            if time.monotonic() >= ask_at_s:
                asked_s = time.monotonic()
                transfer, seqs = self._copy.missing(command.round_id - 1)
                need = NeedModel(welcome.run_id, command.round_id - 1, transfer, seqs)
                with contextlib.suppress(BusError):
                    await self._bus.publish(self._identity, need)
            else:
                await self._wait(ask_at_s - time.monotonic())
        self._phase = "idle"

    async def _wait(self, timeout_s: float) -> None:
        """Until something was heard, or the time is over. Raises BarrierTimeout: no controller for too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        self._check_controller()

    def _check_controller(self) -> None:
        limit_s = self._config.controller_timeout_s
        if time.monotonic() - self._heard_s > limit_s:
            raise BarrierTimeout("controller", missing=(), ready=0, needed=1, timeout_s=limit_s)

    async def _train_and_send(self, welcome: Welcome, command: TrainCmd, base: Tensor) -> None:
        round_id, session = command.round_id, self._session
        failure: Exception | None = None
        self._phase = "training"
        try:
            self._transfers += 1
            update = await self._compute.run(
                self._training.train, welcome, command, base, self._transfers, self._compute.should_stop,
                self._commanded_s,
            )  # fmt: skip
        except Exception as error:
            failure = error
        finally:
            self._phase = "idle"
        # Called off is called off, also if the same command has been given again meanwhile: by a controller that has
        # been restarted, say. Whatever training gave then, whole, half or an exception, is not the answer to it.
        if session != self._session or self._superseded(command) or self._compute.should_stop():
            log.info("training given up", round=round_id, newer=self._command.round_id if self._command else None)
            return
        if failure is not None:
            await self._report_failure(welcome, command, failure)
            return
        receipt = await self._delivery.deliver(update, check=lambda: self._same_session(session))
        if receipt is None:
            return
        if receipt.accepted:
            self._rounds += 1
            self._counted_round = round_id
            await self._compute.run(self._training.accepted, update)
        else:
            self._refused += 1
            self._mark_handled(command)
            log.warning("update refused", client=self.client_id, round=round_id, reason=receipt.reason)

    def _same_session(self, session: int) -> bool:
        """Whether the controller is still this one. Raises BarrierTimeout: there is none any more."""
        self._check_controller()
        return self._session == session and self._welcome is not None and self._ended is None

    def _superseded(self, command: TrainCmd) -> bool:
        """Whether the result of this command is no longer wanted."""
        return self._command != command or self._ended is not None or self._welcome is None

    def _mark_handled(self, command: TrainCmd) -> None:
        """Nothing more is to be done for this command, unless it is given again."""
        if self._command is command:  # and not an equal one that came later
            self._handled = True

    async def _report_failure(self, welcome: Welcome, command: TrainCmd, error: Exception) -> None:
        self._mark_handled(command)
        text = "".join(traceback.format_exception(error))
        log.error("training failed", client=self.client_id, round=command.round_id, error=str(error), traceback=text)
        sent = text[-8000:] if self._config.report_failures else type(error).__name__
        if self._command is command:
            self._failure = Failed(welcome.run_id, command.round_id, sent)
            await self._hello()
