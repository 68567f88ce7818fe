"""What a host knows of the processes that train its clients, wherever they run: one that is idle is borrowed, gets one
client at a time, and is replaced if it dies. `local_pool.py` has those of this machine, `ray_pool.py` those of a
cluster."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from safetensors.torch import load

from gradbus.actors.federated.local_training import EncodedUpdate, RoundInputs
from gradbus.actors.virtual.channel import Parcel
from gradbus.actors.virtual.client_trainer import vector_bytes
from gradbus.runtime.errors import TrainingFailed
from gradbus.runtime.logs import get_logger
from gradbus.runtime.wire import control
from gradbus.runtime.wire.frames import FrameKey, Kind
from gradbus.runtime.wire.messages import Identity

MAX_PROCESSES = 1024

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
        self.inputs = inputs
        head = {
            "do": "round", "work": number, "command": asdict(inputs.command), "commanded_s": inputs.commanded_s,
        }  # fmt: skip
        terms = b"" if inputs.terms is None else control.encode(inputs.terms)
        self.parcel = Parcel(head, [
            vector_bytes(inputs.base), vector_bytes(inputs.broadcast), frozen, control.encode(inputs.welcome), terms,
        ])  # fmt: skip


class TrainingProcess(ABC):
    """One of them. It trains one client at a time."""

    @abstractmethod
    async def train(self, work: RoundWork, client: Identity, transfer: int) -> EncodedUpdate | None:
        """The update of a client; None: it was stopped.

        Raises:
            ClientFailed: its training raised. ProcessDied: this process is of no more use.
        """

    @abstractmethod
    def is_read(self, update: EncodedUpdate) -> None:
        """An update is no longer needed where it was made."""

    @abstractmethod
    def close(self) -> None:
        """End it. Does not wait."""


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
        """What is to be trained next."""
        self._work += 1
        return RoundWork(self._work, inputs, frozen)

    def stop(self, work: RoundWork) -> None:
        """Trainings of this work, and of what came before, give up at the next batch."""
        if work.number > self._stopped:
            self._stopped = work.number
            self._stop(work.number)

    def is_stopped(self, work: RoundWork) -> bool:
        """Whether it is no longer wanted."""
        return self._stopped >= work.number

    @contextlib.asynccontextmanager
    async def borrow(self) -> AsyncIterator[P]:
        """A process that is idle, waited for; another one takes its place if it dies."""
        found = await self._idle.get()
        try:
            yield found
        except BaseException as error:
            if not isinstance(error, ClientFailed):
                self._all.discard(found)
                found.close()
                if isinstance(error, ProcessDied):
                    await self._replace()
            raise
        finally:
            if found in self._all:
                self._idle.put_nowait(found)

    async def _replace(self) -> None:
        self.replaced += 1
        self._add(await self._start())

    def _add(self, process: P) -> None:
        self._all.add(process)
        self._idle.put_nowait(process)


def update_of(answer: Parcel, client: Identity, transfer: int) -> EncodedUpdate | None:
    """What a training process has answered; None: it was stopped. An update that lies in that process's memory has no
    payload yet. Raises ClientFailed."""
    match answer.head["is"]:
        case "failed":
            raise ClientFailed(answer.head["summary"], answer.head["reason"], answer.head["text"])
        case "stopped":
            return None
    request, payload, state = answer.parts
    request = control.decode(request)
    assert isinstance(request, control.UploadRequest)
    key = FrameKey(Kind.UPDATE, request.run_id, request.round_id, client.sender, client.incarnation, transfer)
    return EncodedUpdate(key, request, payload, load(bytes(state)) if state else {})


def check_prepared(found: dict[str, str]) -> None:
    """Raises TrainingFailed: :func:`.client_trainer.prepare_task` has failed."""
    if found:
        log.error("the data cannot be loaded", error=found["failed"], traceback=found["text"])
        raise TrainingFailed(f"preparing the task failed: {found['failed']}")
