"""What a lossy codec still owes: one vector per client, kept by round and over a restart.

The residual that a client starts round r with is that of its last *accepted* update before r. Several are kept, because
a controller that died may do its last round again, and the client has to go back with it.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from gradbus.runtime.checkpoint import Checkpoint, CheckpointStore, Hex64, Meta, tensor_of
from gradbus.runtime.errors import CheckpointError

_KEPT = 3


class SavedResidual(Meta):
    """What the checkpoint of a client says beside the residual: the run that it is of."""

    run_id: Hex64


class Residuals:
    """The residuals of one client in one run. Methods may block: for the compute thread."""

    def __init__(self, directory: Path | None, client_id: int) -> None:
        """Raises CheckpointError: the directory cannot be used.

        Args:
            directory: where they are kept; None: in memory only.
        """
        self._shape: tuple[int] | None = None
        self._store = CheckpointStore(directory / f"client-{client_id}", keep=_KEPT) if directory is not None else None
        self._run_id = 0
        self._by_round: dict[int, Tensor] = {}

    def start_run(self, run_id: int, dim: int | None = None) -> None:
        """The client takes part in this run now; residuals of another one are worth nothing.

        Args:
            dim: length of a residual, which the controller decides: frozen parameters may travel, too. None: any.
        """
        if run_id == self._run_id:
            return
        self._run_id, self._shape = run_id, None if dim is None else (dim,)
        self._by_round.clear()
        if self._store is None:
            return
        for round_id in self._store.rounds():
            try:
                checkpoint = self._store.load(round_id, self._check)
            except CheckpointError:
                continue  # damaged: the load has named it; an older one counts
            if SavedResidual.of(checkpoint).run_id == f"{run_id:016x}":
                self._by_round[round_id] = checkpoint.tensors["residual"]
            else:
                self._store.remove(round_id)

    def _check(self, checkpoint: Checkpoint) -> None:
        SavedResidual.of(checkpoint)
        tensor_of(checkpoint, "residual", self._shape)

    def before(self, round_id: int) -> Tensor | None:
        """The residual to start this round with."""
        earlier = [known for known in self._by_round if known < round_id]
        return self._by_round[max(earlier)] if earlier else None

    def accepted(self, round_id: int, residual: Tensor) -> None:
        """The update of this round counts: this is owed after it."""
        for stale in [known for known in self._by_round if known >= round_id]:
            del self._by_round[stale]
        self._by_round[round_id] = residual
        for old in sorted(self._by_round)[:-_KEPT]:
            del self._by_round[old]
        if self._store is not None:
            for stale in [known for known in self._store.rounds() if known >= round_id]:
                self._store.remove(stale)  # undone; as the newest ones they would also be kept in the place of this
            self._store.save(Checkpoint(round_id, {"residual": residual}, {"run_id": f"{self._run_id:016x}"}))

    def close(self) -> None:
        """Let another process use the directory."""
        if self._store is not None:
            self._store.close()
