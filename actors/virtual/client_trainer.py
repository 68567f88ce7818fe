"""Training and evaluating for many clients one after the other with one model, in whatever process does it.

It keeps nothing of a client: what a client keeps from round to round is given before its training, and comes back with
its update, for the host to write once that counts. With local privacy the update itself is kept before it leaves: here,
where the client's folder is, else by the host.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.client.local_evaluation import EvaluationStopped, LocalEvaluation, log_failure
from gradbus.actors.federated.client.local_training import LocalTraining
from gradbus.actors.federated.client.round_inputs import RoundInputs
from gradbus.actors.federated.client.run_terms import NOTHING_OWN, Allowed, RunChoices
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing
from gradbus.actors.federated.protocol import SAT_OUT
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.federated.task_results import NothingToTrain, reason_of
from gradbus.actors.virtual.channel import Parcel
from gradbus.runtime.built_model import build_model
from gradbus.runtime.shm.segment import PayloadMemory, SharedPayload
from gradbus.runtime.testing.journal import no_probe
from gradbus.runtime.user_errors import traceback_with_place, user_error
from gradbus.runtime.wire import control
from gradbus.runtime.wire.messages import Identity, TrainCmd

TRAIN, EVALUATE = "train", "evaluate"  # what is asked for a client
ROUND, MODEL = "round", "model"  # what comes before: of what all trainings, or all evaluations, have in common
# What a client keeps, by its id, and whether more is to be written.
OpenKept = Callable[[int, bool], ClientStateStore]

MAX_SEALED = 128  # updates in shared memory, each with an open file; what comes beyond goes through the host


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Holds what all training processes of a pool have in common.

    Attributes:
        state_dir: where the clients' states are, on the host's machine. allowed: of the user's own, what a controller
            may name.
        threads: of torch, in each process. full_traceback: failures are reported with all lines.
        shared_memory: updates may lie in memory that a controller of this machine reads.
    """

    state_dir: Path
    allowed: Allowed = NOTHING_OWN
    threads: int = 1
    full_traceback: bool = False
    shared_memory: bool = True


def prepare_task(task: FederatedTask, client_id: int, num_clients: int, *, full_traceback: bool) -> dict[str, str]:
    """Load the data. Returns why that failed: ``failed``, in one line, and ``text``; empty: it did not."""
    try:
        task.prepare(client_id, num_clients)
    except Exception as error:
        text = traceback_with_place(error, full=full_traceback)
        return {"failed": str(user_error(error)), "text": text[-8000:]}
    return {}


def vector_bytes(vector: Tensor) -> memoryview:
    """A float32 vector as bytes, without a copy."""
    return vector.contiguous().numpy().data.cast("B")


def _vector(data: bytearray) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.float32)) if data else torch.empty(0)


class _GivenModel(NamedTuple):
    """Holds a model that is to be evaluated: its vector, its merged buffers, and for whom."""

    vector: Tensor
    buffers: bytes
    welcome: control.Welcome
    request: control.EvaluationRequest


class ClientTrainer:
    """Does for clients what was begun last: trains them, or evaluates with them.

    Attributes:
        work: the number of what was begun last.
    """

    def __init__(self, task: FederatedTask, settings: PoolSettings, stopped_up_to: Callable[[], int]) -> None:
        """``stopped_up_to``: the number of the last work that is no longer wanted, asked between batches."""
        self._task = task
        self._settings = settings
        self._stopped_up_to = stopped_up_to
        self._model = FlatModel(build_model(task), rebuild=partial(build_model, task))
        self._memory = PayloadMemory(switched_on=settings.shared_memory)
        self._no_memory = PayloadMemory(switched_on=False)
        self._probe = no_probe()
        self._choices = RunChoices(settings.allowed)
        self._prepared: tuple[int, int] | None = None  # client, and number of clients
        self._sealed: dict[int, SharedPayload] = {}  # by transfer: updates that the controller may still read
        self._begun: RoundInputs | _GivenModel | None = None
        self.work = 0

    def begin(self, head: Mapping[str, Any], parts: Sequence[Any]) -> None:
        """Take what the next answers have in common, as a :class:`.pool.PoolWork` has it. The parts are kept, and may
        be written to."""
        vector, frozen, welcome, *others = parts
        welcome = control.decode(welcome)
        assert isinstance(welcome, control.Welcome)
        self.work = head["work"]
        if frozen:
            self._model.arrange(Sharing.of_welcome(welcome))
            self._model.write_frozen(_vector(frozen))
        if head["do"] == MODEL:
            request, buffers = control.decode(others[0]), bytes(others[1])
            assert isinstance(request, control.EvaluationRequest)
            self._begun = _GivenModel(_vector(vector), buffers, welcome, request)
            return
        broadcast, terms, buffers = others
        terms = control.decode(terms) if terms else None
        assert terms is None or isinstance(terms, control.RoundTerms)
        self._begun = RoundInputs(
            welcome=welcome,
            command=TrainCmd(**head["command"]),
            base=_vector(vector),
            broadcast=_vector(broadcast),
            buffers=bytes(buffers),
            terms=terms,
        )

    def answer(self, do: str, given: Mapping[str, Any], open_kept: OpenKept) -> Parcel:
        """Answer what a :class:`.pool.TrainingProcess` asks for one client, of what was begun last."""
        match self._begun:
            case RoundInputs() as inputs if do == TRAIN:
                return self._train(inputs, open_kept, **given)
            case _GivenModel() as model if do == EVALUATE:
                return self._evaluate(model, open_kept, **given)
        raise AssertionError(f"asked to {do}, and that was not begun")

    def release(self, transfer: int) -> None:
        """An update is no longer needed in the memory of this process."""
        self._sealed.pop(transfer).hide()

    def _prepare(self, client_id: int, num_clients: int) -> None:
        """Make this client's data ready."""
        if self._prepared != (client_id, num_clients):
            self._prepared = None
            self._task.prepare(client_id, num_clients)
            self._prepared = client_id, num_clients

    def _evaluate(self, model: _GivenModel, open_kept: OpenKept, client_id: int, tells_errors: bool) -> Parcel:
        """Evaluate the model on the data of a client: its result."""
        work, (vector, buffers, welcome, request) = self.work, model

        def should_stop() -> bool:
            return self._stopped_up_to() >= work

        try:
            self._prepare(client_id, welcome.num_clients)
            with contextlib.closing(open_kept(client_id, False)) as kept:
                evaluation = LocalEvaluation(self._task, self._model, client_id, kept, tells_errors, self._choices)
                result = evaluation.evaluate(vector, welcome, request, should_stop, buffers)
        except EvaluationStopped:
            return Parcel({"is": "stopped"})
        except Exception as error:  # its data cannot be loaded
            why = log_failure(error, client_id, tells_errors)
            result = control.EvaluationResult(request.run_id, request.round_id, 0, {}, why, 0.0)
        return Parcel({"is": "result"}, [control.encode(result)])

    def _train(
        self, inputs: RoundInputs, open_kept: OpenKept, client_id: int, incarnation: int, transfer: int, waited_s: float
    ) -> Parcel:
        """Train a client: its update, or why there is none. ``waited_s``: since the command came, as the host's clock
        may be another one."""
        work = self.work
        inputs = replace(inputs, commanded_s=time.perf_counter() - waited_s)
        try:
            return self._update(
                inputs, Identity(client_id, incarnation), transfer, open_kept, lambda: self._stopped_up_to() >= work
            )
        except Exception as error:
            if self._stopped_up_to() >= work:
                return Parcel({"is": "stopped"})
            if isinstance(error, NothingToTrain):
                return Parcel({"is": "failed", "reason": SAT_OUT, "summary": SAT_OUT, "text": SAT_OUT})
            text, summary = traceback_with_place(error, full=self._settings.full_traceback), str(user_error(error))
            return Parcel({"is": "failed", "reason": reason_of(error), "summary": summary, "text": text[-8000:]})

    def _update(
        self, inputs: RoundInputs, client: Identity, transfer: int, open_kept: OpenKept, should_stop: Callable[[], bool]
    ) -> Parcel:
        self._prepare(client.sender, inputs.welcome.num_clients)
        privacy = self._choices.read(inputs.welcome).privacy
        releases = privacy is not None and privacy.is_local  # which are kept before they leave
        with contextlib.closing(open_kept(client.sender, releases)) as kept:
            memory = self._memory if len(self._sealed) < MAX_SEALED else self._no_memory
            training = LocalTraining(self._task, client, self._model, kept, memory, self._probe, self._choices)
            update = training.train(inputs, transfer, should_stop)
            released = kept.released(inputs.command.round_id) if releases and not kept.is_durable else None
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
        released_bytes = b"" if released is None else vector_bytes(released)
        return Parcel({"is": "update"}, [control.encode(update.request), payload, state_bytes, released_bytes])


def open_state(directory: Path, client_id: int, *, to_write: bool = False) -> ClientStateStore:
    """The state of a client. One that has none has no directory, unless it is ``to_write``."""
    is_there = to_write or (directory / f"client-{client_id}").is_dir()
    return ClientStateStore(directory if is_there else None, client_id)
