"""The host's side of its training processes: starts them, gives them work, and replaces those that die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

from safetensors.torch import load
from torch import Tensor

from gradbus.actors.federated.local_training import EncodedUpdate, RoundInputs
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.virtual.channel import ChannelClosed, Parcel, receive_soon, send_soon
from gradbus.actors.virtual.training_process import PoolSettings, StopFlag, run_template, vector_bytes
from gradbus.runtime.errors import ConfigError, TrainingFailed
from gradbus.runtime.logs import get_logger
from gradbus.runtime.shm.shared_payload import read
from gradbus.runtime.wire import control
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import Identity

START_S = 60.0  # a fork and a model; the data are loaded by then
END_S = 5.0

log = get_logger("host")


class ProcessDied(Exception):
    """A training process has ended while it trained."""


class ClientFailed(Exception):
    """The training of a client raised. ``reason``, ``text``: of its TrainingFailure. The error's own text has one
    line."""

    def __init__(self, summary: str, reason: str, text: str) -> None:
        super().__init__(summary)
        self.reason = reason
        self.text = text


class RoundWork:
    """What the trainings of one attempt at a round have in common, as training processes get it.

    Attributes:
        number: the later one is higher.
    """

    def __init__(self, number: int, inputs: RoundInputs, frozen: Any = b"") -> None:
        self.number = number
        head = {
            "do": "round", "work": number, "command": asdict(inputs.command), "commanded_s": inputs.commanded_s,
        }  # fmt: skip
        terms = b"" if inputs.terms is None else control.encode(inputs.terms)
        self.parcel = Parcel(head, [
            vector_bytes(inputs.base), vector_bytes(inputs.broadcast), frozen, control.encode(inputs.welcome), terms,
        ])  # fmt: skip


class EvaluationWork:
    """A model that clients are to evaluate, as training processes get it.

    Attributes:
        number: of the same count as that of a :class:`RoundWork`. request: that is answered.
    """

    def __init__(
        self, number: int, welcome: control.Welcome, request: control.EvaluationRequest, vector: Tensor,
        frozen: Any = b"",
    ) -> None:  # fmt: skip
        self.number = number
        self.request = request
        self.parcel = Parcel({"do": "model", "work": number}, [
            vector_bytes(vector), frozen, control.encode(welcome), control.encode(request),
        ])  # fmt: skip


class TrainingProcess:
    """One of them. It trains one client at a time.

    Attributes:
        process: its number.
    """

    def __init__(self, end: socket.socket, process: int) -> None:
        self._end = end
        self.process = process
        self._work = 0
        self._read: list[int] = []

    async def train(self, work: RoundWork, client: Identity, transfer: int) -> EncodedUpdate | None:
        """The update of a client; None: it was stopped.

        Raises:
            ClientFailed: its training raised. ProcessDied: this process is of no more use.
        """
        given = {"client_id": client.sender, "incarnation": client.incarnation, "transfer": transfer}
        answer = await self._answer(work, "train", given)
        match answer.head["is"]:
            case "failed":
                raise ClientFailed(answer.head["summary"], answer.head["reason"], answer.head["text"])
            case "stopped":
                return None
        request, payload, state = answer.parts
        request = control.decode(request)
        assert isinstance(request, control.UploadRequest)
        if request.memory:
            # It stays here, too, should that process end before the controller has read it.
            payload = await asyncio.to_thread(read, request.memory, request.total_bytes)
        key = FrameKey(Kind.UPDATE, request.run_id, request.round_id, client.sender, client.incarnation, transfer)
        return EncodedUpdate(key, request, payload, load(bytes(state)) if state else {})

    async def evaluate(
        self, work: EvaluationWork, client_id: int, *, tells_errors: bool
    ) -> control.EvaluationResult | None:
        """The result of a client; None: it was stopped. ``tells_errors``: as of a LocalEvaluation.

        Raises:
            ProcessDied: this process is of no more use.
        """
        given = {"client_id": client_id, "tells_errors": tells_errors}
        answer = await self._answer(work, "evaluate", given)
        if answer.head["is"] == "stopped":
            return None
        result = control.decode(answer.parts[0])
        assert isinstance(result, control.EvaluationResult)
        return result

    async def _answer(self, work: RoundWork | EvaluationWork, do: str, given: dict[str, Any]) -> Parcel:
        """What the process says to one client's part of this work. Raises ProcessDied."""
        done, self._read = self._read, []
        try:
            if self._work != work.number:
                await send_soon(self._end, work.parcel)
                self._work = work.number
            await send_soon(self._end, Parcel({"do": do, "with": given, "read": done}))
            return await receive_soon(self._end)
        except ChannelClosed:
            self.close()
            raise ProcessDied from None
        except BaseException:  # half a message is left in the channel
            self.close()
            raise

    def is_read(self, update: EncodedUpdate) -> None:
        """An update is no longer needed where it was made. That process hears it with its next training."""
        if update.request.memory:
            self._read.append(update.request.transfer)

    def close(self) -> None:
        """It ends by itself, once it has trained what it trains."""
        self._end.close()


class TrainingPool:
    """Training processes of this machine.

    Attributes:
        size: how many there are. replaced: how many have died.
    """

    def __init__(self, task: FederatedTask, settings: PoolSettings, *, size: int) -> None:
        """Fork the process that they are forked from: before this process has DDS, and while few threads run in it.

        Raises:
            ConfigError: this system has no fork.
        """
        if not hasattr(os, "fork") or not hasattr(socket, "send_fds"):
            raise ConfigError("virtual clients are trained in forked processes, and this system has no fork: use Linux")
        self.size = size
        self.replaced = 0
        self._stop = StopFlag()
        self._settings = settings
        self._work = 0
        self._turn = asyncio.Lock()
        own, other = socket.socketpair()
        self._template = os.fork()
        if not self._template:
            own.close()
            run_template(task, settings, self._stop, other)
        other.close()
        own.setblocking(False)
        self._control = own
        self._idle: asyncio.Queue[TrainingProcess] = asyncio.Queue(size)
        self._all: set[TrainingProcess] = set()

    async def open(self, client_id: int, num_clients: int) -> None:
        """Load the data and start all processes.

        Raises:
            TrainingFailed: the task cannot be prepared, or a process does not start.
        """
        async with self._turn:
            loop = asyncio.get_running_loop()
            try:
                await loop.sock_sendall(self._control, b"p")
                await send_soon(self._control, Parcel({"client_id": client_id, "num_clients": num_clients}))
                answer = await receive_soon(self._control)
            except (ChannelClosed, OSError):
                raise TrainingFailed("the process that loads the data has ended: is there enough memory?") from None
        if "failed" in answer.head:
            log.error("the data cannot be loaded", error=answer.head["failed"], traceback=answer.head["text"])
            raise TrainingFailed(f"preparing the task failed: {answer.head['failed']}")
        while len(self._all) < self.size:
            self._idle.put_nowait(await self._start())

    async def _start(self) -> TrainingProcess:
        own, other = socket.socketpair()
        own.setblocking(False)
        try:
            async with self._turn, asyncio.timeout(START_S):
                socket.send_fds(self._control, [b"f"], [other.fileno()])
                answer = await receive_soon(self._control)
        except (ChannelClosed, OSError, TimeoutError):
            own.close()
            raise TrainingFailed("no training process can be started any more: is there enough memory?") from None
        finally:
            other.close()
        for process, code in answer.head["ended"].items():
            end = f"signal {-code}" if code < 0 else f"exit code {code}"
            log.warning("training process died", process=int(process), end=end, effect="replaced")
        found = TrainingProcess(own, answer.head["process"])
        self._all.add(found)
        return found

    @property
    def processes(self) -> Sequence[int]:
        """Their numbers."""
        return sorted(one.process for one in self._all)

    def new_work(self, inputs: RoundInputs, frozen: Any = b"") -> RoundWork:
        """What is to be trained next."""
        self._work += 1
        return RoundWork(self._work, inputs, frozen)

    def new_evaluation(
        self, welcome: control.Welcome, request: control.EvaluationRequest, vector: Tensor, frozen: Any = b""
    ) -> EvaluationWork:
        """What is to be evaluated next."""
        self._work += 1
        return EvaluationWork(self._work, welcome, request, vector, frozen)

    def stop(self, work: RoundWork | EvaluationWork) -> None:
        """Trainings of this work, and of what came before, give up at the next batch."""
        self._stop.up_to = max(self._stop.up_to, work.number)

    def is_stopped(self, work: RoundWork | EvaluationWork) -> bool:
        """Whether it is no longer wanted."""
        return self._stop.up_to >= work.number

    @contextlib.asynccontextmanager
    async def borrow(self) -> AsyncIterator[TrainingProcess]:
        """A process that is idle, waited for; another one takes its place if it dies."""
        found = await self._idle.get()
        try:
            yield found
        except BaseException as error:
            if not isinstance(error, ClientFailed):
                self._all.discard(found)
                found.close()
                if isinstance(error, ProcessDied):
                    self.replaced += 1
                    found = await self._start()
            raise
        finally:
            if found in self._all:
                self._idle.put_nowait(found)

    async def close(self) -> None:
        """End all of them. Returns when they have."""
        for one in self._all:
            one.close()
        self._control.close()
        try:
            async with asyncio.timeout(END_S):
                await asyncio.to_thread(os.waitpid, self._template, 0)
        except (TimeoutError, ChildProcessError):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._template, signal.SIGKILL)
