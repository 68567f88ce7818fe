"""Finding the checkpoint that all ranks go on from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradbus.actors.data_parallel.state import Misfit, SavedRank, WorkerState, newest_common
from gradbus.runtime.checkpoint import Checkpoint
from gradbus.runtime.collectives import Group
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.logs import get_logger

log = get_logger("worker")


async def find_checkpoint(
    group: Group, compute: ComputeThread, state: WorkerState, steps: Sequence[Sequence[int]], *,
    has_completed: bool, timeout_s: float,
) -> Checkpoint | None:  # fmt: skip
    """This rank's part of the newest checkpoint that is there and whole on all ranks; None if no rank has any.

    Args:
        steps: those that each rank has.
        has_completed: some rank knows of a checkpoint that all ranks had.

    Raises:
        CheckpointError: there are some, but none that all ranks can go on from.
    """
    faults: list[str] = []
    if any(steps) and not all(steps) and not has_completed:
        log.warning("starting afresh: the first checkpoint was never complete", steps=list(map(list, steps)))
        await compute.run(state.forget_after, -1)
        return None
    for step in newest_common(steps):
        checkpoint, fault, fits = None, "", True
        try:
            checkpoint = await compute.run(state.load, step)
        except CheckpointError as error:
            fault, fits = str(error), not isinstance(error, Misfit)
        run_id = None if checkpoint is None else SavedRank.of(checkpoint).run_id
        found = await group.all_gather_object(
            "worker/checkpoint", [run_id, fault, fits], round_id=step, timeout_s=timeout_s
        )
        here = [f"rank {rank}: {why}" for rank, (_, why, _) in enumerate(found) if why]
        if not all(fits for _, _, fits in found):
            raise Misfit("; ".join(here))
        if here:
            faults += here
            continue
        _check_one_run(step, [run for run, _, _ in found])
        if faults:
            log.warning("using an older checkpoint", step=step, damaged=faults)
        assert checkpoint is not None
        await compute.run(state.forget_after, step)
        return checkpoint
    if faults:
        raise CheckpointError(
            f"all checkpoints are damaged on some rank ({'; '.join(faults)}). Restore them from a backup, or move the "
            f"state directories away to start afresh"
        )
    return None


def _check_one_run(step: int, run_ids: list[Any]) -> None:
    if len(set(run_ids)) > 1:
        told = ", ".join(f"rank {rank} of run {run}" for rank, run in enumerate(run_ids))
        raise CheckpointError(
            f"the checkpoints of step {step} are of different runs: {told}. Give each rank the state_dir it had"
        )
