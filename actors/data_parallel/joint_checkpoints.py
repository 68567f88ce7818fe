"""Checkpoints of which each process of a run has a part: a rank, or a parameter server.

A step counts when all processes have saved theirs, so that the run can go on from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.foreign_files import open_to_append
from gradbus.runtime.private_folder import make_private

_COMPLETED = "saved-by-all"
_HELD_BY = ".run"  # all processes of a run that goes on have a lock on it


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
        place = Path(config.checkpoint.dir)
        self._store = CheckpointStore(place / part, keep=config.checkpoint.keep + 1, inside=place)
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
        """Remove what not all have: the run goes on from ``step`` and saves those anew. Raises CheckpointError: that
        cannot be made durable."""
        self._store.remove_durably(later for later in self.steps() if later > step)

    def close(self) -> None:
        """Let another process use the directory."""
        self._store.close()


@contextlib.contextmanager
def held_together(directory: Path, *, begins: bool) -> Iterator[None]:
    """Hold a directory together with the other processes of one run, until the end of the block.

    Args:
        begins: this process begins a run, so no process of any may hold the directory yet.

    Raises:
        CheckpointError: one does; or the directory cannot be made or written.
    """
    try:
        make_private(directory)
        lock = open_to_append(directory / _HELD_BY, 0o600)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.dir {directory} cannot be written: {error.strerror}. Choose another, or change its rights"
        ) from None
    try:
        if begins:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CheckpointError(
                    f"checkpoint.dir {directory} is of a run that goes on: processes of it use it. Start this one as "
                    f"one that joins, stop them all, or choose another checkpoint.dir"
                ) from None
        with contextlib.suppress(OSError):  # another run is being refused at this moment
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def is_held(directory: Path) -> bool:
    """Return whether processes of a run hold this directory together."""
    try:
        lock = open_to_append(directory / _HELD_BY, 0o600)
    except OSError:  # there is no directory, or what is wrong there is another's to report
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(lock)
    return False


class HeldDirectory(contextlib.ExitStack):
    """The directory of a run's checkpoints, held from :meth:`hold` until the end of the block, so that no second run
    goes on from the checkpoints of this one."""

    def __init__(self, directory: Path | str | None) -> None:
        """``directory``: None: the run has none."""
        super().__init__()
        self._directory = directory
        self._is_held = False

    def hold(self, *, begins: bool) -> None:
        """Hold the directory, once. Raises CheckpointError: as :func:`held_together`."""
        if self._directory is not None and not self._is_held:
            self.enter_context(held_together(Path(self._directory), begins=begins))
            self._is_held = True


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
