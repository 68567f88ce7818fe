"""The state of a data-parallel run between two steps, on disk: each rank saves its own part, rank 0 the model as well.

Each rank has a folder of its own below the state directory, which may be on a disk of its own, too. A step counts only
if all ranks have it: :func:`newest_common` finds the newest such one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from gradbus.actors.data_parallel.algorithm import AlgorithmLabel
from gradbus.actors.data_parallel.joint_checkpoints import JointCheckpoints, separate
from gradbus.actors.data_parallel.metrics import MAX_METRICS, MetricKind
from gradbus.actors.data_parallel.replicas import describe_layout, model_tensors
from gradbus.actors.data_parallel.report import EpochReport
from gradbus.runtime.checkpoint import (
    Checkpoint,
    Count,
    Hex64,
    Meta,
    Number,
    tensor_of,
)
from gradbus.runtime.collectives import Group
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.saved_state import StateNames

# What a run cannot change on its way: the state would not fit, or the place within the epoch would mean other batches.
_KEPT = ("seed", "accumulation_steps")
MAX_LAYOUT = 1_000_000  # parameters and buffers of a model


@dataclass(slots=True)
class Position:
    """Tells where a run stands.

    Attributes:
        step: steps done in all. epoch: that is being gone through, from 0. epoch_step: steps done in it.
        loss_sum: of the losses of this rank's batches in this epoch, but for those of steps that were skipped.
        batches: how many these are. skipped: how many steps those were. skipped_in_row: of them all, up to now.
        skipped_exchanges: exchanges of weights in this epoch whose results were dropped.
        ended_exchanges: of elastic ranks, exchanges of weights whose results were applied or dropped, of all epochs.
        metrics: of these batches, as ``MetricSums.plain`` gives them.
        mean_loss: see ``Stepper.mean_loss``; None if that is NaN.
        epoch_batches: of the order that elastic ranks share, how many all of them have had in this epoch.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    loss_sum: float = 0.0
    batches: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    skipped_exchanges: int = 0
    ended_exchanges: int = 0
    metrics: Mapping[str, tuple[str, float, float]] = field(default_factory=dict)
    mean_loss: float | None = None
    epoch_batches: int = 0

    def next_epoch(self) -> Position:
        """The start of the epoch after this one."""
        return Position(
            step=self.step,
            epoch=self.epoch + 1,
            skipped_in_row=self.skipped_in_row,
            mean_loss=self.mean_loss,
            ended_exchanges=self.ended_exchanges,
        )


def _without_step(position: Position) -> dict[str, Any]:
    """The fields of a position but for the step, which a checkpoint has by itself."""
    return {name: value for name, value in asdict(position).items() if name != "step"}


class SavedRank(Meta):
    """The contents of a rank's checkpoint beside its tensors.

    Attributes:
        run_id: of the run. rank, world: of the rank that saved it. layout: of the model, see ``describe_layout``.
        names: where those of the model's state differ; None: of another rank than 0, or saved by an earlier version.
        settings: that a resume must have, too. num_batches: of this rank in the epoch. report: the newest one.
        And as in :class:`Position`.
    """

    run_id: Hex64
    rank: Count
    world: Count
    layout: Annotated[list[str], Field(max_length=MAX_LAYOUT)]
    names: StateNames | None = None
    settings: dict[str, Any]
    epoch: Count
    epoch_step: Count
    loss_sum: Number
    batches: Count
    skipped: Count
    skipped_in_row: Count
    skipped_exchanges: Count = 0
    ended_exchanges: Count = 0
    metrics: Annotated[dict[str, tuple[MetricKind, Number, Number]], Field(max_length=MAX_METRICS)] = Field(
        default_factory=dict
    )
    mean_loss: Number | None = None
    epoch_batches: Count = 0
    num_batches: Count
    report: EpochReport | None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """As :meth:`Meta.of`, and check that the position is possible."""
        saved, step = super().of(checkpoint), checkpoint.round_id
        for name, most in (
            ("epoch", step),
            ("epoch_step", step),
            ("skipped", saved.epoch_step),
            ("skipped_in_row", step),
            ("skipped_exchanges", step),
            ("ended_exchanges", step),
            ("batches", saved.num_batches),
        ):
            if getattr(saved, name) > most:
                raise CheckpointError(f"meta.{name}: expected 0 to {most} at step {step}, got {getattr(saved, name)}")
        return saved


class WorkerState(JointCheckpoints):
    """The checkpoints of one rank."""

    def __init__(self, config: DataParallelConfig, rank: int, world: int, *, label: AlgorithmLabel) -> None:
        """Raises CheckpointError: the directory cannot be used, or holds a run while ``resume`` is off."""
        super().__init__(config, f"rank-{rank}")
        self._label = label
        self._rank = rank
        self._world = world

    def save(
        self,
        run_id: int,
        position: Position,
        model: nn.Module,
        contents: RunTensors,
        *,
        num_batches: int,
        report: EpochReport | None,
    ) -> int:
        """Save this rank's part; returns its bytes.

        Args:
            model: of which the layout is saved.
            num_batches: of this rank in the epoch of ``position``.
            report: the newest one.

        Raises:
            CheckpointError: it could not be written.
        """
        tensors = {f"own/{name}": tensor for name, tensor in contents.own.items()}
        tensors["torch_rng"] = torch.get_rng_state()  # masks of stock dropout, for example
        names = None
        if self._rank == 0:
            names = StateNames.of_model(model)
            tensors |= contents.model
            tensors |= {f"shared/{name}": tensor for name, tensor in contents.shared.items()}
        meta = {
            "run_id": f"{run_id:016x}", "rank": self._rank, "world": self._world, "layout": describe_layout(model),
            "names": names, "settings": self._settings(), "num_batches": num_batches,
            "report": None if report is None else report.to_json(), **_without_step(position),
        }  # fmt: skip
        return self._store.save(Checkpoint(position.step, separate(tensors), meta))

    def load(self, step: int) -> Checkpoint:
        """Read and check it. Raises CheckpointError: damaged, or of another run than the settings describe."""
        checkpoint = self._store.load(step, SavedRank.of)
        saved = SavedRank.of(checkpoint)
        is_elsewhere = saved.world != self._world and not self._config.elastic.is_on
        if saved.rank != self._rank or is_elsewhere:
            raise CheckpointMismatch(
                f"the checkpoint of step {step} is of rank {saved.rank} of {saved.world}, this is rank "
                f"{self._rank} of {self._world}. Start as many workers as before, or choose another checkpoint.dir"
            )
        if "exchange" in saved.settings:
            raise CheckpointMismatch(
                f"the checkpoint of step {step} is of an earlier version of gradbus, with parallel.exchange="
                f"{saved.settings['exchange']!r:.100}. End the run with that version, or choose another checkpoint.dir"
            )
        for key, value in self._settings().items():
            if saved.settings.get(key) != value:
                raise CheckpointMismatch(
                    f"the checkpoint of step {step} was made with {key}={saved.settings.get(key)!r:.200}, now it is "
                    f"{value!r}. Go on with the same, or choose another checkpoint.dir"
                )
        return checkpoint

    def _settings(self) -> dict[str, Any]:
        kept = {key: getattr(self._config, key) for key in _KEPT}
        # Which of the two it is without a name the task decides: the state of the optimizer tells.
        name = self._config.optimizer.name
        return {**kept, **self._label.kept, "optimizer": "sgd, or the task's" if name in ("sgd", "task") else name}


class CheckpointMismatch(CheckpointError):
    """The checkpoint is whole, but not of this run: an older one would not fit either."""


def newest_common(steps: Sequence[Sequence[int]]) -> list[int]:
    """Steps that all ranks have, newest first. ``steps``: those of each rank.

    Raises:
        CheckpointError: some ranks have checkpoints, but there is no step that all have.
    """
    common = set(steps[0]).intersection(*steps[1:])
    if any(steps) and not common:
        found = "; ".join(f"rank {rank}: {list(own) or 'none'}" for rank, own in enumerate(steps))
        raise CheckpointError(
            f"there is no step that all ranks have a checkpoint of ({found}). Give each rank the "
            f"checkpoint.dir it had, or move all of them away to start afresh"
        )
    return sorted(common, reverse=True)


def position_of(checkpoint: Checkpoint) -> Position:
    """Return where the run stood."""
    saved = SavedRank.of(checkpoint)
    return Position(checkpoint.round_id, **{name: getattr(saved, name) for name in _without_step(Position())})


def check_same_batches(epoch: int, saved: int, now: int, *, of: str) -> None:
    """Raises CheckpointError: an epoch that a resume goes on with has another number of batches than when it was saved,
    so its place in it would mean other ones. ``of``: whose they are."""
    if saved != now:
        raise CheckpointError(
            f"the checkpoint lies in the middle of epoch {epoch}, of {saved} batches {of}; now there are {now}. Go on "
            f"with the same data and batch size, or choose another checkpoint.dir"
        )


@torch.no_grad()
def restore_model(model: nn.Module, checkpoint: Checkpoint, prefix: str = "") -> None:
    """Parameters and buffers as saved below ``prefix``. Raises CheckpointError: saved for another model."""
    if SavedRank.of(checkpoint).layout != describe_layout(model):
        raise CheckpointError("it is of a model with other names, shapes or frozen parts")
    live = model_tensors(model)
    saved = {name: tensor_of(checkpoint, prefix + name, tensor.shape, tensor.dtype) for name, tensor in live.items()}
    for name, tensor in live.items():
        tensor.copy_(saved[name])


@dataclass(frozen=True, slots=True, eq=False)
class RunTensors:
    """Holds what a rank keeps of a run, by name, not copied.

    Attributes:
        own: this rank's alone. shared: equal on all ranks, saved by rank 0. model: for those who only want that, saved
            by rank 0: see :func:`model_tensors`.
    """

    own: Mapping[str, Tensor]
    shared: Mapping[str, Tensor]
    model: Mapping[str, Tensor]


def tensors_below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those whose names start so, without that."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def tensors_with(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those whose names start so."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


log = get_logger("worker")


async def find_checkpoint(
    group: Group,
    compute: ComputeThread,
    state: WorkerState,
    steps: Sequence[Sequence[int]],
    *,
    has_completed: bool,
    timeout_s: float,
) -> Checkpoint | None:
    """This rank's part of the newest checkpoint that is there and whole on all ranks; None if no rank has any.

    Args:
        steps: those that each rank has.
        has_completed: some rank knows of a checkpoint that all ranks had.
        timeout_s: how long to wait for others, which read theirs.

    Raises:
        CheckpointError: there are some, but none that all ranks can go on from.
    """
    faults: list[str] = []
    if any(steps) and not all(steps) and not has_completed:
        log.warning("starting afresh: the first checkpoint was never complete", steps=list(map(list, steps)))
        await compute.run(state.delete_later, -1)
        return None
    for step in newest_common(steps):
        checkpoint, fault, fits = None, "", True
        try:
            checkpoint = await compute.run(state.load, step)
        except CheckpointError as error:
            fault, fits = str(error), not isinstance(error, CheckpointMismatch)
        run_id = None if checkpoint is None else SavedRank.of(checkpoint).run_id
        found = await group.all_gather_object(
            "worker/checkpoint", [run_id, fault, fits], round_id=step, timeout_s=timeout_s
        )
        here = [f"rank {rank}: {why}" for rank, (_, why, _) in enumerate(found) if why]
        if not all(fits for _, _, fits in found):
            raise CheckpointMismatch("; ".join(here))
        if here:
            faults += here
            continue
        _check_one_run(step, [run for run, _, _ in found])
        if faults:
            log.warning("using an older checkpoint", step=step, damaged=faults)
        assert checkpoint is not None
        await compute.run(state.delete_later, step)
        return checkpoint
    if faults:
        raise CheckpointError(
            f"all checkpoints are damaged on some rank ({'; '.join(faults)}). Restore them from a backup, or move the "
            f"state directories away to start afresh"
        )
    return None


def _check_one_run(step: int, run_ids: list[Any]) -> None:
    if len(set(run_ids)) > 1:
        found = ", ".join(f"rank {rank} of run {run}" for rank, run in enumerate(run_ids))
        raise CheckpointError(
            f"the checkpoints of step {step} are of different runs: {found}. Give each rank the checkpoint.dir it had"
        )
