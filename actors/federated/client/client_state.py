"""What a client keeps from round to round: the residual of its codec, the state of its rule, what it does not share,
and what it has released with local privacy.

Of each tensor that is kept the name begins with the part that it belongs to, as the names here say. Those of
``personal.`` and ``own_model.`` go on with the name in the model's state.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from gradbus.runtime.checkpoint import Checkpoint, CheckpointStore, Hex64, Meta, tensor_of
from gradbus.runtime.errors import CheckpointError

RESIDUAL = "residual"  # of the codec
SECTION_RESIDUAL = "section_residual."  # of the codec of the sections beside the model's, by their names
OF_RULE = "rule."
OF_OPTIMIZER, OF_OWN_OPTIMIZER = (
    "optimizer.",
    "own_optimizer.",
)  # that are kept; the latter trains the client's own model
_RELEASED = "released"
_KEPT = 3


class SavedClient(Meta):
    """The run of a saved state."""

    run_id: Hex64


class ClientStateStore:
    """The states of one client in one run, each after an update that counts: tensors by name.

    A round that is done again begins with the same state again, and with local privacy gives what it has given before.
    Methods may block: for the compute thread.
    """

    def __init__(self, directory: Path | None, client_id: int) -> None:
        """``directory``: where they are saved; None: in memory only. Raises CheckpointError: it cannot be used."""
        self._shape: tuple[int] | None = None
        self._store: CheckpointStore | None = None
        if directory is not None:
            self._store = CheckpointStore(directory / f"client-{client_id}", keep=_KEPT, inside=directory)
        self._run_id = 0
        self._by_round: dict[int, Mapping[str, Tensor]] = {}
        self._releases: CheckpointStore | None = None  # opened once there is one
        self._released: tuple[int, Tensor] | None = None  # the newest one

    def start_run(self, run_id: int, dim: int | None = None) -> None:
        """Start with this run, and drop states of others. ``dim``: length of a residual; None: any."""
        if run_id == self._run_id:
            return
        self._run_id, self._shape = run_id, None if dim is None else (dim,)
        self._by_round.clear()
        self._released = None
        if self._releases is not None:
            self._releases.close()
            self._releases = None
        if self._store is None:
            return
        for round_id in self._store.rounds():
            try:
                checkpoint = self._store.load(round_id, self._check)
            except CheckpointError:
                continue  # damaged, and logged by load: an older one counts
            if SavedClient.of(checkpoint).run_id == f"{run_id:016x}":
                self._by_round[round_id] = checkpoint.tensors
            else:
                self._store.remove(round_id)

    def _check(self, checkpoint: Checkpoint) -> None:
        SavedClient.of(checkpoint)
        if RESIDUAL in checkpoint.tensors or not checkpoint.tensors:
            tensor_of(checkpoint, RESIDUAL, self._shape)

    def before(self, round_id: int) -> Mapping[str, Tensor]:
        """The state to start this round with; empty: there is none yet."""
        return self._by_round.get(self.last_before(round_id), {})

    def last_before(self, round_id: int) -> int:
        """The round after which that state is; 0: there is none."""
        return max((known for known in self._by_round if known < round_id), default=0)

    def state_after_newest(self) -> Mapping[str, Tensor]:
        """The state after the newest update that counts; empty: there is none yet."""
        return self.before(self.newest + 1)

    @property
    def newest(self) -> int:
        """The last round of which there is a state; 0: none."""
        return max(self._by_round, default=0)

    def keep(self, round_id: int, state: Mapping[str, Tensor]) -> None:
        """Keep the state after the update of this round, which counts."""
        for stale in [known for known in self._by_round if known >= round_id]:
            del self._by_round[stale]
        self._by_round[round_id] = state
        for old in sorted(self._by_round)[:-_KEPT]:
            del self._by_round[old]
        if self._store is not None:
            for stale in [known for known in self._store.rounds() if known >= round_id]:
                self._store.remove(stale)  # undone, and newer than this one
            self._store.save(Checkpoint(round_id, dict(state), {"run_id": f"{self._run_id:016x}"}))

    @property
    def is_durable(self) -> bool:
        """Whether states are saved, so that they outlive this process."""
        return self._store is not None

    def released(self, round_id: int) -> Tensor | None:
        """Return the update that has left this client in this round, float32, shape (D,); None: none has.

        Raises:
            CheckpointError: it is damaged: the round cannot be done again without telling more.
        """
        if self._released is not None and self._released[0] == round_id:
            return self._released[1]
        store = self._open_releases()
        if store is None or round_id not in store.rounds():
            return None
        return store.load(round_id, lambda one: tensor_of(one, _RELEASED, self._shape)).tensors[_RELEASED]

    def release(self, round_id: int, update: Tensor) -> None:
        """Keep what is about to leave this client. It has its noise: who reads it here learns as much from the message.

        Raises:
            CheckpointError: it cannot be written.
        """
        if (store := self._open_releases(to_write=True)) is not None:
            # Those of later rounds stay, too: if the controller has gone back, these will be done again. The store goes
            # by their numbers, and this one has to stay, whatever its number.
            for old in [known for known in store.rounds() if known != round_id][: 1 - _KEPT]:
                store.remove(old)
            store.save(Checkpoint(round_id, {_RELEASED: update}, {}))
        self._released = round_id, update

    def _open_releases(self, *, to_write: bool = False) -> CheckpointStore | None:
        """Open the store of this run's releases; None: there is none on the disk."""
        if self._releases is None and self._store is not None:
            directory = self._store.directory / f"{_RELEASED}-{self._run_id:016x}"
            if to_write:
                for other in self._store.directory.glob(f"{_RELEASED}-*"):
                    if other != directory:
                        shutil.rmtree(other, ignore_errors=True)
            if to_write or directory.is_dir():
                self._releases = CheckpointStore(directory, keep=_KEPT, inside=self._store.directory)
        return self._releases

    def close(self) -> None:
        """Let another process use the directory."""
        for store in (self._store, self._releases):
            if store is not None:
                store.close()
