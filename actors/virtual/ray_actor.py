"""What a Ray actor does that trains clients, on whichever machine of a cluster Ray makes it. It does not import Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load

from gradbus.actors.federated.client_state import ClientStateStore
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.virtual.channel import Parcel
from gradbus.actors.virtual.client_trainer import ClientTrainer, PoolSettings, prepare_task
from gradbus.runtime.wire.messages import Identity


class ClientWork(NamedTuple):
    """One training of one client.

    Attributes:
        client, incarnation, transfer: of its update.
        waited_s: since the command came.
        run_id: of the run. kept: what the client keeps before this round, as safetensors has it; empty: nothing yet.
    """

    client: int
    incarnation: int
    transfer: int
    waited_s: float
    run_id: int
    kept: Any


class RayTrainer:
    """Trains one client after the other. Only :meth:`stop` is called while it does."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._stopped = 0
        self._trainer: ClientTrainer | None = None

    def place(self) -> int:
        """The number of its process."""
        return os.getpid()

    def prepare(self, task: FederatedTask, client_id: int, num_clients: int) -> dict[str, str]:
        """Take the task, load its data on this machine, build the model. Returns as
        :func:`.client_trainer.prepare_task` does."""
        torch.set_num_threads(self._settings.threads)  # after a task that sets it as it is made
        found = prepare_task(task, client_id, num_clients, full_traceback=self._settings.full_traceback)
        if not found and self._trainer is None:
            self._trainer = ClientTrainer(task, self._settings, lambda: self._stopped)
        return found

    def train(
        self, work: tuple[Mapping[str, Any], Sequence[Any]], given: ClientWork
    ) -> tuple[dict[str, Any], list[Any]]:
        """Train a client. Returns head and parts of the answer.

        Args:
            work: head and parts of :class:`.pool.RoundWork`, in memory that all actors of this machine share.
        """
        trainer = self._trainer
        assert trainer is not None, "prepare comes first"
        head, parts = work
        if trainer.work != head["work"]:
            trainer.begin(head, [bytearray(part) for part in parts])  # what Ray shares cannot be written to
        trainer.has_waited(given.waited_s)

        def open_kept(client_id: int) -> ClientStateStore:
            store = ClientStateStore(None, client_id)
            if len(given.kept):
                store.start_run(given.run_id)
                store.accepted(head["command"]["round_id"] - 1, load(bytes(given.kept)))
            return store

        answer: Parcel = trainer.train(Identity(given.client, given.incarnation), given.transfer, open_kept)
        return answer.head, [as_array(part) for part in answer.parts]

    def stop(self, up_to: int) -> None:
        """Work up to this number is no longer wanted."""
        self._stopped = max(self._stopped, up_to)


def as_array(data: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes as an array, which Ray passes on without a copy of its own."""
    return np.frombuffer(data, np.uint8)
