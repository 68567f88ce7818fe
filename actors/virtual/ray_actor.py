"""What a Ray actor does that trains clients, on whichever machine of a cluster Ray makes it. It does not import Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load

from gradbus.actors.federated.client.client_state import ClientStateStore
from gradbus.actors.federated.task import FederatedTask
from gradbus.actors.virtual.client_trainer import ClientTrainer, PoolSettings, prepare_task


class Question(NamedTuple):
    """Is asked for one client.

    Attributes:
        do, given: as of :meth:`.client_trainer.ClientTrainer.answer`.
        run_id, round_id: of the run and the round.
        kept: the tensors that the client keeps before this round, as safetensors has them; empty: nothing yet.
        released: with local privacy what has left it in this round already, float32 as bytes; empty: nothing has.
    """

    do: str
    given: Mapping[str, Any]
    run_id: int
    round_id: int
    kept: Any
    released: Any

    def open_kept(self, client_id: int, to_write: bool) -> ClientStateStore:
        """Return what the client keeps, in memory: the host writes it."""
        store = ClientStateStore(None, client_id)
        store.start_run(self.run_id)
        if len(self.kept):
            store.keep(self.round_id - 1, load(bytes(self.kept)))
        if len(self.released):
            store.release(self.round_id, torch.from_numpy(np.array(self.released).view(np.float32)))
        return store


class RayTrainer:
    """Trains one client after the other, and evaluates with them. Only :meth:`stop` is called while it does."""

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

    def answer(
        self, work: tuple[Mapping[str, Any], Sequence[Any]], question: Question
    ) -> tuple[dict[str, Any], list[Any]]:
        """Train or evaluate. Returns head and parts of the answer.

        Args:
            work: head and parts of a :class:`.pool.PoolWork`, in memory that all actors of this machine share.
        """
        trainer = self._trainer
        assert trainer is not None, "prepare comes first"
        head, parts = work
        if trainer.work != head["work"]:
            trainer.begin(head, [bytearray(part) for part in parts])  # what Ray shares cannot be written to
        answer = trainer.answer(question.do, question.given, question.open_kept)
        return answer.head, [as_array(part) for part in answer.parts]

    def stop(self, up_to: int) -> None:
        """Work up to this number is no longer wanted."""
        self._stopped = max(self._stopped, up_to)


def as_array(data: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes as an array, which Ray passes on without a copy of its own."""
    return np.frombuffer(data, np.uint8)
