"""What a host knows of the processes that train its clients and evaluate with them, wherever they run: one that is idle
is borrowed, gets one client at a time, and is replaced if it dies.

What is asked and answered is here, and at the other end in `client_trainer.py`. `local_pool.py` carries it to processes
of this machine, `ray_pool.py` to those of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from safetensors.torch import load
from torch import Tensor

from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.client.local_evaluation import MAX_FAILURE_CHARS, state_for
from gradbus.actors.federated.client.round_inputs import RoundInputs
from gradbus.actors.federated.client.updates_out import EncodedUpdate
from gradbus.actors.federated.model.own_tensors import PERSONAL
from gradbus.actors.virtual.channel import Parcel
from gradbus.actors.virtual.client_trainer import EVALUATE, MODEL, ROUND, TRAIN, vector_bytes
from gradbus.runtime.errors import TrainingFailed
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire import control
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import Identity

MAX_PROCESSES = 1024
STUCK_AFTER_S = 30.0  # after it was told that its work is not wanted, a process is killed that still does it

log = get_logger("host")


class ProcessDied(Exception):
    """A training process has ended while it trained or evaluated."""


class ClientFailed(Exception):
    """The training of a client raised, or what it keeps cannot be read or written. ``reason``, ``text``: of its
    TrainingFailure. The error's own text has one line."""

    def __init__(self, summary: str, reason: str, text: str) -> None:
        super().__init__(summary)
        self.reason = reason
        self.text = text


class PoolWork(ABC):
    """Holds what the answers for many clients have in common, as training processes get it.

    Attributes:
        number: the later one is higher. run_id, round_id: of the run and the round.
        dim: of the vector. parcel: for a :meth:`.client_trainer.ClientTrainer.begin`.
    """

    number: int
    run_id: int
    round_id: int
    dim: int
    parcel: Parcel

    @abstractmethod
    def needs(self, kept: ClientStateStore) -> Mapping[str, Tensor]:
        """Return which of the tensors that a client keeps are needed, where it has to be brought to its process."""


class RoundWork(PoolWork):
    """Is the work of trainings, in one attempt at a round.

    Attributes:
        inputs: of all of them.
    """

    def __init__(self, number: int, inputs: RoundInputs, frozen: Any = b"") -> None:
        self.number = number
        self.inputs = inputs
        self.run_id, self.round_id = inputs.welcome.run_id, inputs.command.round_id
        self.dim = inputs.base.numel()
        terms = b"" if inputs.terms is None else control.encode(inputs.terms)
        self.parcel = Parcel(
            {"do": ROUND, "work": number, "command": asdict(inputs.command)},
            [
                vector_bytes(inputs.base),
                frozen,
                control.encode(inputs.welcome),
                vector_bytes(inputs.broadcast),
                terms,
                inputs.buffers,
            ],
        )

    def needs(self, kept: ClientStateStore) -> Mapping[str, Tensor]:
        return kept.before(self.round_id)


class EvaluationWork(PoolWork):
    """Is the work of evaluations of one model.

    Attributes:
        request: that is answered.
    """

    def __init__(
        self,
        number: int,
        welcome: control.Welcome,
        request: control.EvaluationRequest,
        vector: Tensor,
        frozen: Any = b"",
        buffers: bytes = b"",
    ) -> None:
        self.number = number
        self.request = request
        self.run_id, self.round_id, self.dim = welcome.run_id, request.round_id, vector.numel()
        self.parcel = Parcel(
            {"do": MODEL, "work": number},
            [
                vector_bytes(vector),
                frozen,
                control.encode(welcome),
                control.encode(request),
                buffers,
            ],
        )

    def needs(self, kept: ClientStateStore) -> Mapping[str, Tensor]:
        return {name: one for name, one in state_for(kept, self.round_id).items() if name.startswith(PERSONAL)}


class TrainingProcess(ABC):
    """One of them. It trains one client at a time, or evaluates with one."""

    async def train(self, work: RoundWork, client: Identity, transfer: int) -> EncodedUpdate | None:
        """The update of a client; None: it was stopped.

        Raises:
            ClientFailed: its training raised. ProcessDied: this process is of no more use.
        """
        await self._begin(work)
        answer = await self._ask(
            work,
            TRAIN,
            {
                "client_id": client.sender,
                "incarnation": client.incarnation,
                "transfer": transfer,
                "waited_s": time.perf_counter() - work.inputs.commanded_s,
            },
        )
        match answer.head["is"]:
            case "failed":
                raise ClientFailed(answer.head["summary"], answer.head["reason"], answer.head["text"])
            case "stopped":
                return None
        request, payload, state, released = answer.parts
        request = control.decode(request)
        assert isinstance(request, control.UploadRequest)
        key = FrameKey(Kind.UPDATE, request.run_id, request.round_id, client.sender, client.incarnation, transfer)
        update = EncodedUpdate(key, request, payload, load(bytes(state)) if state else {})
        return await self._take(work, update, released)

    async def evaluate(
        self, work: EvaluationWork, client_id: int, *, tells_errors: bool
    ) -> control.EvaluationResult | None:
        """The result of a client; None: it was stopped. ``tells_errors``: as of a LocalEvaluation.

        Raises:
            ProcessDied: this process is of no more use.
        """
        await self._begin(work)
        try:
            answer = await self._ask(work, EVALUATE, {"client_id": client_id, "tells_errors": tells_errors})
        except ClientFailed as error:
            why = str(error) if tells_errors else error.reason
            return control.EvaluationResult(work.run_id, work.round_id, 0, {}, why[:MAX_FAILURE_CHARS], 0.0)
        if answer.head["is"] == "stopped":
            return None
        result = control.decode(answer.parts[0])
        assert isinstance(result, control.EvaluationResult)
        return result

    @abstractmethod
    async def _begin(self, work: PoolWork) -> None:
        """Bring it this work, unless it has it. Raises ProcessDied."""

    @abstractmethod
    async def _ask(self, work: PoolWork, do: str, given: Mapping[str, Any]) -> Parcel:
        """Return its answer for one client, as a :meth:`.client_trainer.ClientTrainer.answer`.

        Raises:
            ClientFailed: what the client keeps cannot be read. ProcessDied: this process is of no more use.
        """

    @abstractmethod
    async def _take(self, work: RoundWork, update: EncodedUpdate, released: Any) -> EncodedUpdate:
        """Return the same update, with its payload where it may stay until it has its answer.

        Args:
            released: with local privacy what is to be kept before the update leaves, as bytes; empty: it is, or there
                is nothing.

        Raises:
            ClientFailed: that cannot be kept.
        """

    @abstractmethod
    def is_read(self, update: EncodedUpdate) -> None:
        """An update is no longer needed where it was made."""

    @abstractmethod
    def close(self) -> None:
        """End it, at the latest when it has done what it does. Does not wait."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, whatever it does: whoever waits for its answer gets ProcessDied."""


P = TypeVar("P", bound=TrainingProcess)


class TrainingPool(ABC, Generic[P]):
    """Training processes.

    Attributes:
        size: how many there are. replaced: how many have died.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.replaced = 0
        self._idle: asyncio.Queue[P] = asyncio.Queue(MAX_PROCESSES)
        self._all: set[P] = set()
        self._busy: dict[P, int] = {}  # those that are borrowed, and the number of the work that they do
        self._work = 0
        self._stopped = 0  # the number of the last work that is not wanted

    @abstractmethod
    async def open(self, client_id: int, num_clients: int) -> None:
        """Load the data and start all processes; with those that there are already, start what is missing.

        Raises:
            TrainingFailed: the task cannot be prepared, or a process does not start.
        """

    @abstractmethod
    async def _start(self) -> P:
        """One more process. Raises TrainingFailed."""

    @abstractmethod
    def _stop(self, number: int) -> None:
        """Tell all processes that work up to this number is no longer wanted. Does not wait."""

    @abstractmethod
    async def close(self) -> None:
        """End all of them. Returns when they have."""

    def new_work(self, inputs: RoundInputs, frozen: Any = b"") -> RoundWork:
        """Return what is to be trained next."""
        self._work += 1
        return RoundWork(self._work, inputs, frozen)

    def new_evaluation(
        self,
        welcome: control.Welcome,
        request: control.EvaluationRequest,
        vector: Tensor,
        frozen: Any = b"",
        buffers: bytes = b"",
    ) -> EvaluationWork:
        """Return the work of evaluating this model."""
        self._work += 1
        return EvaluationWork(self._work, welcome, request, vector, frozen, buffers)

    def stop(self, work: PoolWork) -> None:
        """Answers to this work, and of what came before, give up at the next batch. A process that does not is killed
        after STUCK_AFTER_S: a client whose code hangs must not keep the others from the next round."""
        if work.number > self._stopped:
            self._stopped = work.number
            self._stop(work.number)
            asyncio.get_running_loop().call_later(STUCK_AFTER_S, self._kill_stuck, work.number)

    def _kill_stuck(self, number: int) -> None:
        for process, its in list(self._busy.items()):
            if its <= number:
                log.warning("training process does not stop", seconds=STUCK_AFTER_S, effect="it is killed and replaced")
                process.kill()

    def is_stopped(self, work: PoolWork) -> bool:
        """Whether it is no longer wanted."""
        return self._stopped >= work.number

    @contextlib.asynccontextmanager
    async def borrow(self, work: PoolWork) -> AsyncIterator[P]:
        """A process that is idle, waited for, to do this work; another one takes its place if it dies."""
        found = await self._idle.get()
        self._busy[found] = work.number
        try:
            yield found
        except BaseException as error:
            if not isinstance(error, ClientFailed):
                self._busy.pop(found, None)
                self._all.discard(found)
                found.close()
                if isinstance(error, ProcessDied):
                    await self._replace()
            raise
        finally:
            self._busy.pop(found, None)
            if found in self._all:
                self._idle.put_nowait(found)

    async def _replace(self) -> None:
        self.replaced += 1
        self._add(await self._start())

    def _add(self, process: P) -> None:
        self._all.add(process)
        self._idle.put_nowait(process)


def check_prepared(found: dict[str, str]) -> None:
    """Raises TrainingFailed: :func:`.client_trainer.prepare_task` has failed."""
    if found:
        log.error("the data cannot be loaded", error=found["failed"], traceback=found["text"])
        raise TrainingFailed(f"preparing the task failed: {found['failed']}")
