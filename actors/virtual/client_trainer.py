"""Training many clients one after the other with one model, in whatever process does it.

It keeps nothing of a client: what a client keeps from round to round is given before its training, and comes back with
its update, for the host to write once that counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from gradbus.actors.federated.client_state import ClientStateStore
from gradbus.actors.federated.flat_model import FlatModel
from gradbus.actors.federated.local_training import LocalTraining, NonFiniteResult, RoundInputs
from gradbus.actors.federated.rounds import TRAINING_FAILED
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.virtual.channel import Parcel
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
        state_dir: where the clients' states are, on the host's machine. rule: of the user's own, that a controller may
            name.
        threads: of torch, in each process. full_traceback: failures are reported with all lines.
        shared_memory: updates may lie in memory that a controller of this machine reads.
    """

    state_dir: Path
    rule: str = ""
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


class ClientTrainer:
    """Trains clients with the work that was begun last."""

    def __init__(self, task: FederatedTask, settings: PoolSettings, stopped_up_to: Callable[[], int]) -> None:
        """``stopped_up_to``: the number of the last work that is no longer wanted, asked between batches."""
        self._task = task
        self._settings = settings
        self._stopped_up_to = stopped_up_to
        self._model = FlatModel(task.build_model())
        # What the model has beside the vector, such as counts of batches: each client begins with it as it was built.
        self._local = {
            name: tensor.clone() for name, tensor in self._model.module.state_dict().items()
            if not tensor.is_floating_point()
        }  # fmt: skip
        self._memory = PayloadMemory(switched_on=settings.shared_memory)
        self._no_memory = PayloadMemory(switched_on=False)
        self._probe = no_probe()
        self._prepared: tuple[int, int] | None = None  # client, and number of clients
        self._sealed: dict[int, SharedPayload] = {}  # by transfer: updates that the controller may still read
        self._inputs: RoundInputs
        self.work = 0  # the number of what was begun last

    def begin(self, head: Mapping[str, Any], parts: Sequence[Any]) -> None:
        """Take what the next trainings have in common, as :class:`.pool.RoundWork` has it. The parts are kept, and
        may be written to."""
        base, broadcast, frozen, welcome, terms = parts
        welcome, terms = control.decode(welcome), control.decode(terms) if terms else None
        assert isinstance(welcome, control.Welcome)
        assert terms is None or isinstance(terms, control.RoundTerms)
        self.work = head["work"]
        self._inputs = RoundInputs(
            welcome=welcome, command=TrainCmd(**head["command"]), base=_vector(base), broadcast=_vector(broadcast),
            terms=terms, commanded_s=head["commanded_s"],
        )  # fmt: skip
        if frozen:
            self._model.arrange("trained")
            self._model.write_frozen(_vector(frozen))

    def has_waited(self, waited_s: float) -> None:
        """Where the host's clock is another one: its command came so long ago."""
        self._inputs = replace(self._inputs, commanded_s=time.perf_counter() - waited_s)

    def release(self, transfer: int) -> None:
        """An update is no longer needed in the memory of this process."""
        self._sealed.pop(transfer).hide()

    def train(self, client: Identity, transfer: int, open_kept: Callable[[int], ClientStateStore]) -> Parcel:
        """Train a client: its update, or why there is none. ``open_kept``: what it keeps, by its id."""
        work = self.work
        try:
            return self._update(client, transfer, open_kept, lambda: self._stopped_up_to() >= work)
        except Exception as error:
            if self._stopped_up_to() >= work:
                return Parcel({"is": "stopped"})
            reason = error.reason if isinstance(error, NonFiniteResult) else TRAINING_FAILED
            text = traceback_with_place(error, full=self._settings.full_traceback)
            return Parcel({"is": "failed", "reason": reason, "summary": str(user_error(error)), "text": text[-8000:]})

    def _update(
        self, client: Identity, transfer: int, open_kept: Callable[[int], ClientStateStore],
        should_stop: Callable[[], bool],
    ) -> Parcel:  # fmt: skip
        num_clients = self._inputs.welcome.num_clients
        if self._prepared != (client.sender, num_clients):
            self._prepared = None
            self._task.prepare(client.sender, num_clients)
            self._prepared = client.sender, num_clients
        with torch.no_grad():
            state = self._model.module.state_dict()
            for name, tensor in self._local.items():
                state[name].copy_(tensor)
        kept = open_kept(client.sender)
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
