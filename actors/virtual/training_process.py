"""What training processes do, and the one that they are forked from.

The *template* is forked from the user's process before that has DDS, so that it has the task without a copy: any
object, from a notebook as well. It loads the data once and forks the training processes, which share that memory. It
has one thread and no DDS: a training process that has died is replaced by another fork of it, at any time.

A training process trains one client after the other. It keeps nothing of a client: what a client keeps from round to
round is on disk, read before its training and written by the host once its update counts; with local privacy the
update itself is, before it leaves.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from gradbus.actors.federated.client_state import ClientStateStore
from gradbus.actors.federated.flat_model import FlatModel
from gradbus.actors.federated.local_evaluation import EvaluationStopped, LocalEvaluation, told
from gradbus.actors.federated.local_training import LocalTraining, NonFiniteResult, RoundInputs
from gradbus.actors.federated.rounds import TRAINING_FAILED
from gradbus.actors.federated.sharing import Sharing
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.privacy.client import privacy_of
from gradbus.actors.virtual.channel import ChannelClosed, Parcel, receive, send
from gradbus.runtime.shm.shared_payload import PayloadMemory, SharedPayload
from gradbus.runtime.testing.instrumentation import no_probe
from gradbus.runtime.user_errors import traceback_with_place, user_error
from gradbus.runtime.wire import control
from gradbus.runtime.wire.messages import Identity, TrainCmd

MAX_SEALED = 128  # updates in shared memory, each with an open file; what comes beyond goes through the host


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """What all training processes of a pool have in common.

    Attributes:
        state_dir: where the clients' states are. rule: of the user's own, that a controller may name.
        threads: of torch, in each process. full_traceback: failures are reported with all lines.
        shared_memory: updates may lie in memory that a controller of this machine reads.
    """

    state_dir: Path
    rule: str = ""
    threads: int = 1
    full_traceback: bool = False
    shared_memory: bool = True


class StopFlag:
    """A number in memory that the host and its training processes share: work up to it is no longer wanted."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    @property
    def up_to(self) -> int:
        """The number of the last work that is not wanted."""
        return int(struct.unpack("<Q", self._memory[:8])[0])

    @up_to.setter
    def up_to(self, number: int) -> None:
        self._memory[:8] = struct.pack("<Q", number)


def vector_bytes(vector: Tensor) -> memoryview:
    """A float32 vector as bytes, without a copy."""
    return vector.contiguous().numpy().data.cast("B")


def _vector(data: bytearray) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.float32)) if data else torch.empty(0)


class _TrainingProcess:
    """Answers the host's messages, one after the other."""

    def __init__(self, task: FederatedTask, settings: PoolSettings, stop: StopFlag, host: socket.socket) -> None:
        self._task = task
        self._settings = settings
        self._stop = stop
        self._host = host
        self._model = FlatModel(task.build_model(), rebuild=task.build_model)
        self._memory = PayloadMemory(switched_on=settings.shared_memory)
        self._no_memory = PayloadMemory(switched_on=False)
        self._probe = no_probe()
        self._prepared: tuple[int, int] | None = None  # client, and number of clients
        self._sealed: dict[int, SharedPayload] = {}  # by transfer: updates that the controller may still read
        self._inputs: RoundInputs
        self._evaluated: tuple[Tensor, control.Welcome, control.EvaluationRequest]
        self._work = 0

    def serve(self) -> None:
        """Until the host closes its end."""
        with contextlib.suppress(ChannelClosed):
            while True:
                parcel = receive(self._host)
                for transfer in parcel.head.get("read", ()):
                    self._sealed.pop(transfer).hide()
                match parcel.head["do"]:
                    case "round":
                        self._begin(parcel)
                    case "train":
                        send(self._host, self._train(**parcel.head["with"]))
                    case "model":
                        self._begin_evaluation(parcel)
                    case "evaluate":
                        send(self._host, self._evaluate(**parcel.head["with"]))

    def _begin(self, parcel: Parcel) -> None:
        """The model that the next trainings start from, and how to train."""
        head, (base, broadcast, frozen, welcome, terms) = parcel.head, parcel.parts
        welcome, terms = control.decode(welcome), control.decode(terms) if terms else None
        assert isinstance(welcome, control.Welcome)
        assert terms is None or isinstance(terms, control.RoundTerms)
        self._work = head["work"]
        self._inputs = RoundInputs(
            welcome=welcome, command=TrainCmd(**head["command"]), base=_vector(base), broadcast=_vector(broadcast),
            terms=terms, commanded_s=head["commanded_s"],
        )  # fmt: skip
        if frozen:
            self._model.arrange(Sharing.of_welcome(welcome))
            self._model.write_frozen(_vector(frozen))

    def _begin_evaluation(self, parcel: Parcel) -> None:
        """The model that is to be evaluated next."""
        vector, frozen, welcome, request = parcel.parts
        welcome, request = control.decode(welcome), control.decode(request)
        assert isinstance(welcome, control.Welcome)
        assert isinstance(request, control.EvaluationRequest)
        self._work = parcel.head["work"]
        if frozen:
            self._model.arrange(Sharing.of_welcome(welcome))
            self._model.write_frozen(_vector(frozen))
        self._evaluated = _vector(vector), welcome, request

    def _evaluate(self, client_id: int, tells_errors: bool) -> Parcel:
        """Evaluate the model on the data of a client: its result."""
        work, (vector, welcome, request) = self._work, self._evaluated

        def should_stop() -> bool:
            return self._stop.up_to >= work

        try:
            self._prepare(client_id, welcome.num_clients)
            with contextlib.closing(open_state(self._settings.state_dir, client_id)) as kept:
                evaluation = LocalEvaluation(self._task, self._model, client_id, kept, tells_errors)
                result = evaluation.evaluate(vector, welcome, request, should_stop)
        except EvaluationStopped:
            return Parcel({"is": "stopped"})
        except Exception as error:  # its data cannot be loaded
            why = told(error, client_id, tells_errors)
            result = control.EvaluationResult(request.run_id, request.round_id, 0, {}, why, 0.0)
        return Parcel({"is": "result"}, [control.encode(result)])

    def _prepare(self, client_id: int, num_clients: int) -> None:
        """Make this client's data ready."""
        if self._prepared != (client_id, num_clients):
            self._prepared = None
            self._task.prepare(client_id, num_clients)
            self._prepared = client_id, num_clients

    def _train(self, client_id: int, incarnation: int, transfer: int) -> Parcel:
        """Train a client: its update, or why there is none."""
        work = self._work
        try:
            return self._update(Identity(client_id, incarnation), transfer, lambda: self._stop.up_to >= work)
        except Exception as error:
            if self._stop.up_to >= work:
                return Parcel({"is": "stopped"})
            reason = error.reason if isinstance(error, NonFiniteResult) else TRAINING_FAILED
            text = traceback_with_place(error, full=self._settings.full_traceback)
            return Parcel({"is": "failed", "reason": reason, "summary": str(user_error(error)), "text": text[-8000:]})

    def _update(self, client: Identity, transfer: int, should_stop: Callable[[], bool]) -> Parcel:
        self._prepare(client.sender, self._inputs.welcome.num_clients)
        privacy = privacy_of(self._inputs.welcome.options)
        releases = privacy is not None and privacy.is_local  # which are kept before they leave
        kept = open_state(self._settings.state_dir, client.sender, to_write=releases)
        try:
            memory = self._memory if len(self._sealed) < MAX_SEALED else self._no_memory
            training = LocalTraining(
                self._task, client, self._model, kept, memory, self._probe, self._settings.rule
            )  # fmt: skip
            update = training.train(self._inputs, transfer, should_stop)
        finally:
            kept.close()
        if should_stop():
            if update.sealed is not None:
                update.sealed.hide()
            return Parcel({"is": "stopped"})
        if update.sealed is not None:
            self._sealed[transfer] = update.sealed
        state_bytes = (
            save({name: one.detach().contiguous().cpu() for name, one in update.state.items()}) if update.state else b""
        )
        payload = b"" if update.sealed is not None else update.payload
        return Parcel({"is": "update"}, [control.encode(update.request), payload, state_bytes])


def open_state(directory: Path, client_id: int, *, to_write: bool = False) -> ClientStateStore:
    """The state of a client. One that has none has no directory, unless it is ``to_write``."""
    is_there = to_write or (directory / f"client-{client_id}").is_dir()
    return ClientStateStore(directory if is_there else None, client_id)


class _Template:
    """Loads the data, and forks."""

    def __init__(self, task: FederatedTask, settings: PoolSettings, stop: StopFlag, host: socket.socket) -> None:
        self._task = task
        self._settings = settings
        self._stop = stop
        self._host = host
        self._children: set[int] = set()

    def serve(self) -> None:
        """Until the host closes its end; then no training process is left."""
        try:
            while True:
                data, files, _, _ = socket.recv_fds(self._host, 1, 1)
                if not data:
                    return
                if files:
                    self._fork(files[0])
                else:
                    self._prepare(**receive(self._host).head)
        finally:
            for child in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)

    def _prepare(self, client_id: int, num_clients: int) -> None:
        """Load data, so that the training processes share it."""
        try:
            self._task.prepare(client_id, num_clients)
        except Exception as error:
            text = traceback_with_place(error, full=self._settings.full_traceback)
            send(self._host, Parcel({"failed": str(user_error(error)), "text": text[-8000:]}))
        else:
            send(self._host, Parcel({}))

    def _fork(self, file: int) -> None:
        ended = {}
        for child in list(self._children):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                ended[str(child)] = os.waitstatus_to_exitcode(status)
                self._children.discard(child)
        child = os.fork()
        if not child:
            self._children.clear()
            self._host.close()
            own = socket.socket(fileno=file)
            run_and_exit(lambda: _TrainingProcess(self._task, self._settings, self._stop, own).serve())
        os.close(file)
        self._children.add(child)
        send(self._host, Parcel({"process": child, "ended": ended}))


def run_template(task: FederatedTask, settings: PoolSettings, stop: StopFlag, host: socket.socket) -> None:
    """The life of the template, in a process that was just forked for it. Does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the user's process, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(settings.threads)
    run_and_exit(_Template(task, settings, stop, host).serve)


def run_and_exit(function: Callable[[], Any]) -> None:
    """Call it, and end this process without what the user's process would do at its end."""
    code = 1
    try:
        function()
        code = 0
    except BaseException as error:  # nothing may return to what called in the process that this one was forked from
        os.write(2, f"gradbus: a training process has failed: {traceback_with_place(error, full=True)}\n".encode())
    finally:
        os._exit(code)
