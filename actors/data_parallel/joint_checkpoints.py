"""Checkpoints of which each process of a run has a part: a rank, or a parameter server.

A step counts when all processes have saved theirs, so that the run can go on from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CheckpointError

_COMPLETED = "saved-by-all"


class JointCheckpoints:
    """The parts of one process. Its methods block: they are for the compute thread."""

    def __init__(self, config: DataParallelConfig, part: str) -> None:
        """Open the directory of this process.

        Args:
            config: with ``checkpoint.dir``. part: name of the directory in it.

        Raises:
            CheckpointError: the directory cannot be used, or holds a run while ``resume`` is off.
        """
        assert config.checkpoint.dir is not None
        self._config = config
        # One more than asked for until all have saved: a crash in between must leave a step that all have.
        self._store = CheckpointStore(Path(config.checkpoint.dir) / part, keep=config.checkpoint.keep + 1)
        if self.steps() and not config.checkpoint.resume:
            self._store.close()
            raise CheckpointError(
                f"{self._store.directory} holds a run (step {self.steps()[-1]}), resume is off. Choose another "
                f"checkpoint.dir, or set checkpoint.resume=true"
            )

    def steps(self) -> list[int]:
        """Steps that this process has a checkpoint of, ascending."""
        return self._store.rounds()

    @property
    def has_completed(self) -> bool:
        """Whether all once had a checkpoint, as far as this process knows: only then does it make a second one."""
        return (self._store.directory / _COMPLETED).exists() or len(self.steps()) > 1

    def prune(self) -> None:
        """All have saved: the oldest beyond ``checkpoint.keep`` are needed no more."""
        with contextlib.suppress(OSError):  # without the mark the second checkpoint says the same
            (self._store.directory / _COMPLETED).touch()
        for step in self.steps()[: -self._config.checkpoint.keep]:
            self._store.remove(step)

    def delete_later(self, step: int) -> None:
        """Remove what not all have: the run goes on from ``step`` and saves those anew."""
        for later in self.steps():
            if later > step:
                self._store.remove(later)

    def close(self) -> None:
        """Let another process use the directory."""
        self._store.close()


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, no two in one storage: safetensors refuses those."""
    apart: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        saved = tensor.cpu()
        storage = saved.untyped_storage().data_ptr()
        apart[name] = saved.clone() if storage in storages else saved
        storages.add(storage)
    return apart
