"""The checkpoints of a run whose ranks come and go: what a founder goes on from, and what rank 0 saves."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from torch import Tensor

from gradbus.actors.data_parallel.joint_checkpoints import HeldDirectory
from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.data_parallel.state import (
    Position,
    RunTensors,
    SavedRank,
    WorkerState,
    check_same_batches,
    position_of,
)
from gradbus.actors.data_parallel.training import ShardTraining
from gradbus.runtime.checkpoint import Checkpoint
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CheckpointError


class ElasticCheckpoints:
    """Finds and saves the checkpoints of one process, which holds their directory until the end of the ``with`` block.
    Its methods block: they are for the compute thread.

    Attributes:
        found: what this process goes on from, until it is taken; None: nothing.
        fault: why this process could not save the newest one; None: it could, or another one had to.
    """

    def __init__(self, config: DataParallelConfig) -> None:
        self._config = config
        self._directory = HeldDirectory(config.checkpoint.dir)
        self.found: Checkpoint | None = None
        self.fault: CheckpointError | None = None

    def __enter__(self) -> Self:
        self._directory.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._directory.__exit__(kind, error, tb)

    def find(self, training: ShardTraining) -> None:
        """Find the newest checkpoint that is whole, for a process that begins the run.

        Raises:
            CheckpointError: there are some, but none is whole; or its place in the epoch means other batches now; or
                another run uses the directory. So the founder that has the directory ends by itself.
        """
        self._directory.hold(begins=True)
        faults = []
        with contextlib.closing(WorkerState(self._config, 0, 1, label=training.label)) as state:
            for step in reversed(state.steps()):
                try:
                    checkpoint = state.load(step)
                except CheckpointError as error:
                    faults.append(str(error))
                else:
                    state.delete_later(step)
                    _check_data(checkpoint, training)
                    self.found = checkpoint
                    return
        if faults:
            raise CheckpointError(f"all checkpoints are damaged or of another run: {'; '.join(faults)}")

    def take_found(self) -> Checkpoint | None:
        """Return what was found, once."""
        found, self.found = self.found, None
        return found

    def hold(self) -> None:
        """Hold the directory, if that can be done: else it is a fault when a checkpoint is saved."""
        with contextlib.suppress(CheckpointError):
            self._directory.hold(begins=False)

    def save(
        self,
        run_id: int,
        position: Position,
        training: ShardTraining,
        model: Mapping[str, Tensor],
        report: EpochReport | None,
    ) -> int | None:
        """Save the state of the run. Returns its bytes; None: it could not be written, and ``fault`` says why. The run
        is in the memory of the ranks, and goes on.

        Args:
            model: of all ranks, or their mean.
        """
        # It is held for this checkpoint only: another process is rank 0 as soon as this one is stopped, cut off or
        # leaves. What is there is of this run.
        config = self._config.replaced("checkpoint.resume", True)
        own = {} if training.algorithm.equal_replicas else training.state.own()
        try:
            with contextlib.closing(WorkerState(config, 0, 1, label=training.label)) as state:
                size = state.save(
                    run_id,
                    position,
                    training.model,
                    RunTensors(own, training.state.shared(), model),
                    # Between two epochs it means nothing, and there may be no next one.
                    num_batches=training.num_batches(position.epoch) if position.epoch_step else 0,
                    report=report,
                )
                state.prune()
        except CheckpointError as error:
            self.fault = error
            return None
        self.fault = None
        return size

    def leave_to_another(self) -> None:
        """Forget a fault of this process as rank 0 of an earlier generation: a later one is rank 0's to write, or to
        fault."""
        self.fault = None


def _check_data(checkpoint: Checkpoint, training: ShardTraining) -> None:
    saved = SavedRank.of(checkpoint)
    if saved.epoch_step:
        # Of a fixed world they are rank 0's alone. Of elastic ranks they are of all together: its world is 1.
        now = training.num_batches(saved.epoch, (0, saved.world))
        of = "of all ranks" if saved.epoch_batches else f"on rank 0 of {saved.world}"
        check_same_batches(saved.epoch, saved.num_batches, now, of=of)


def elastic_position(checkpoint: Checkpoint, config: DataParallelConfig, training: ShardTraining) -> Position:
    """Return where a run stood, with the batches that all of its ranks had: a run of a fixed world has not saved
    them."""
    position = position_of(checkpoint)
    if position.epoch_step and not position.epoch_batches:
        batches = position.epoch_step * config.accumulation_steps * SavedRank.of(checkpoint).world
        position.epoch_batches = min(batches, training.num_batches(position.epoch))
    return position
