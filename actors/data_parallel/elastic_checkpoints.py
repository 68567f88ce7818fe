"""What an elastic run begins from, before there is a group: a checkpoint, and how many steps there are."""

from __future__ import annotations

import contextlib

from gradbus.actors.data_parallel.elastic_plan import ElasticPlan
from gradbus.actors.data_parallel.state import Position, SavedRank, WorkerState, check_same_batches, position_of
from gradbus.actors.data_parallel.training import ShardTraining
from gradbus.runtime.checkpoint import Checkpoint
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CheckpointError


def newest_checkpoint(config: DataParallelConfig, training: ShardTraining) -> Checkpoint | None:
    """Return the newest checkpoint that is whole; None: there is none at all.

    Raises:
        CheckpointError: there are some, but none is whole; or its place in the epoch means other batches now. So the
            founder that has the directory ends by itself.
    """
    faults = []
    with contextlib.closing(WorkerState(config, 0, 1, label=training.label)) as state:
        for step in reversed(state.steps()):
            try:
                checkpoint = state.load(step)
            except CheckpointError as error:
                faults.append(str(error))
            else:
                state.delete_later(step)
                _check_data(checkpoint, training)
                return checkpoint
    if faults:
        raise CheckpointError(f"all checkpoints are damaged or of another run: {'; '.join(faults)}")
    return None


def _check_data(checkpoint: Checkpoint, training: ShardTraining) -> None:
    saved = SavedRank.of(checkpoint)
    if saved.epoch_step:
        # Of a fixed world they are rank 0's alone. Of elastic ranks they are of all together: its world is 1.
        now = training.num_batches(saved.epoch, (0, saved.world))
        of = "of all ranks" if saved.epoch_batches else f"on rank 0 of {saved.world}"
        check_same_batches(saved.epoch, saved.num_batches, now, of=of)


def steps_of_run(config: DataParallelConfig, training: ShardTraining, world: int) -> int:
    """Return the steps of a whole run, if so many ranks make all of it."""
    in_epoch = ElasticPlan.rest_of(
        training.num_batches(0), world, config.accumulation_steps, done=0, first_step=0
    ).steps
    return min(in_epoch * config.epochs, config.max_steps or in_epoch * config.epochs)


def elastic_position(checkpoint: Checkpoint, config: DataParallelConfig, training: ShardTraining) -> Position:
    """Return where a run stood, with the batches that all of its ranks had: a run of a fixed world has not saved
    them."""
    position = position_of(checkpoint)
    if position.epoch_step and not position.epoch_batches:
        batches = position.epoch_step * config.accumulation_steps * SavedRank.of(checkpoint).world
        position.epoch_batches = min(batches, training.num_batches(position.epoch))
    return position
