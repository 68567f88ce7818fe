"""What a data-parallel worker does off the event loop: forward, backward, the optimizer, evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradbus.actors.data_parallel.algorithm import AlgorithmLabel, MakeAlgorithm, start_algorithm
from gradbus.actors.data_parallel.buckets import GradientBuckets, Launch, assign_buckets
from gradbus.actors.data_parallel.callbacks import StepReport
from gradbus.actors.data_parallel.epoch_plan import EpochPlan
from gradbus.actors.data_parallel.metrics import MetricSums, combined
from gradbus.actors.data_parallel.module_buffers import ModuleBuffers
from gradbus.actors.data_parallel.optimization import RunOptimizer
from gradbus.actors.data_parallel.replicas import model_tensors
from gradbus.actors.data_parallel.state import Position, restore_model, tensors_below
from gradbus.actors.data_parallel.step import TrainingStep
from gradbus.actors.data_parallel.task import DataParallelTask, ShardCounts
from gradbus.codecs.base import are_finite
from gradbus.runtime.algorithms.base import Algorithm, Place, TensorBucket, bucket_of
from gradbus.runtime.algorithms.live_weights import write_weights
from gradbus.runtime.algorithms.prediction import check_prediction, weights_ahead
from gradbus.runtime.built_model import build_model
from gradbus.runtime.checkpoint import Checkpoint, restore_random_numbers
from gradbus.runtime.choices import ALGORITHMS
from gradbus.runtime.collectives import Group
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.profiling.profile import Profile, StepProfile

_NO_MORE: Any = object()  # batches() ended; None may be a batch


@dataclass(frozen=True, slots=True)
class _RecordedStep:
    """A step of the other ranks. ``flats``: gradients that all have applied, of each bucket; None: it was skipped."""

    number: int
    epoch: int
    flats: list[Tensor] | None


class StepCancelled(Exception):
    """The worker was cancelled, so the step gives up."""


class ShardTraining:
    """One rank's model, data, algorithm and optimizer. Every method is for the compute thread.

    Attributes:
        model: the live module. trained: its parameters that are trained, by name. algorithm: what the ranks do
            together. label: its name and options. optimizer: what changes the model.
        options: all that the configuration gives the algorithm, with their defaults.
        delay_steps: number of steps after which results are applied.
    """

    model: nn.Module
    trained: dict[str, Tensor]
    algorithm: Algorithm
    label: AlgorithmLabel
    optimizer: RunOptimizer
    delay_steps: int

    def __init__(
        self, config: DataParallelConfig, group: Group, task: DataParallelTask, should_stop: Callable[[], bool], *,
        make_algorithm: MakeAlgorithm | None = None,
    ) -> None:  # fmt: skip
        """``make_algorithm``: in place of the one that ``config.algorithm`` names."""
        self._make_algorithm = make_algorithm
        self.options = ALGORITHMS.options(config.algorithm)  # what is wrong in them is found before anything is loaded
        self._config = config
        self._group = group
        self._task = task
        self._should_stop = should_stop
        self._batches: Iterator[Any] = iter(())
        self._metrics = MetricSums()
        self._loss_sum = torch.zeros((), dtype=torch.float64)  # stays on the device: reading it would wait for the step
        self._autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._unfinished: TrainingStep | None = None  # computed, but not applied yet
        self._before: tuple[int, Tensor, MetricSums] | None = None  # the step counted last, and the sums without it
        self._recorded: list[_RecordedStep] | None = None  # of a rank that has not the state of the run yet
        self._looks = False  # at the own gradients, before they are exchanged: from the first step on that was skipped

    def open(self) -> None:
        """Load the data, build the model.

        Raises:
            ValueError: nothing in the model is trained.
            ConfigError: the algorithm cannot work with the model or the optimizer. And as the task does.
        """
        config = self._config
        self._task.prepare_shard(*self._data_place)
        self.model = build_model(self._task)
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._frozen = {name: p for name, p in self.model.named_parameters() if not p.requires_grad}
        if not self.trained:
            raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
        self.algorithm, self.label = start_algorithm(config, self._group, self.trained, self._make_algorithm)
        self.algorithm.may_give_up = config.elastic.is_on
        self.optimizer = RunOptimizer(config, self._task, self.model, self.trained, self.algorithm)
        self.delay_steps = self.algorithm.check_delay(config.delay_steps)
        if config.predicts_weights:
            check_prediction(self.optimizer.optimizer, self.algorithm, self.delay_steps)
        self._finite_names = [f"parameter/{name}" for name in self.trained] + [
            f"buffer/{name}" for name, buffer in self.model.named_buffers()
            if buffer.is_floating_point() and are_finite([buffer])
        ]  # fmt: skip
        sets = 1 if self.algorithm.scope == "weights" else self.delay_steps + 1
        self._gradients = GradientBuckets(
            self.trained, sets=sets,
            assignment=[range(len(self.trained))] if self.algorithm.scope == "step" else assign_buckets(
                list(self.trained.values()), bucket_bytes=config.bucket_bytes,
                first_bucket_bytes=config.first_bucket_bytes,
            ),
        )  # fmt: skip
        self._buffers = [ModuleBuffers(self.model) for _ in range(sets)]
        device = next(iter(self.trained.values())).device
        self._loss_sum = self._loss_sum.to(device)
        if config.autocast is not None:
            self._autocast = partial(torch.autocast, device.type, dtype=torch.bfloat16)

    def begin(self) -> None:
        """Show the algorithm the weights that all ranks begin with, or go on with."""
        if self.algorithm.scope == "weights":
            self.algorithm.begin(bucket_of(self.trained))

    @property
    def _data_place(self) -> tuple[int, int]:
        """Rank and world of the data that this process needs: all of it, where ranks come and go."""
        return (0, 1) if self._config.elastic.is_on else (self._group.rank, self._group.world)

    def regroup(self, group: Group) -> None:
        """Go on as a rank of another group, between two steps."""
        self._group = group
        self.algorithm.regroup(Place(group.rank, group.world, tuple(member.node for member in group.members)))

    def give_up_step(self, number: int) -> None:
        """Step ``number``, which has not ended, is made again: what of it was computed and not applied leaves no trace,
        nor does it count in the sums where the optimizer had stepped before the exchange of its weights."""
        self.algorithm.give_up()
        if self._before is not None and self._before[0] == number:
            _, self._loss_sum, self._metrics = self._before
        if self._unfinished is not None:
            self._buffers[self._unfinished.memory].put_back()
            self._unfinished = None

    def num_batches(self, epoch: int, place: tuple[int, int] | None = None) -> int:
        """Return the number of batches of this rank; where ranks come and go, of all together. ``place``: of another
        rank, of a world."""
        rank, world = place or self._data_place
        return self._task.num_batches(rank=rank, world=world, epoch=epoch)

    def data_facts(self) -> dict[str, Any]:
        """Return what is known of the data that all ranks have, where they come and go."""
        facts: dict[str, Any] = {"batches of an epoch": self.num_batches(0)}
        data_digest = getattr(self._task, "data_digest", None)
        return facts if data_digest is None else facts | {"digest": str(data_digest())}

    def start_epoch(self, plan: EpochPlan, position: Position) -> None:
        """From its beginning, or from where the run stands."""

        def batches(rank: int, world: int) -> Iterator[Any]:
            return self._task.batches(rank=rank, world=world, epoch=position.epoch, seed=self._config.seed)

        self._batches = plan.pick(batches, self._group.rank, position.epoch_step)
        self._before = None
        self._loss_sum = torch.full_like(self._loss_sum, position.loss_sum)
        self._metrics = MetricSums(position.metrics)
        self.model.train()

    def new_step(self, plan: EpochPlan, position: Position) -> TrainingStep:
        """The next one, with nothing computed."""
        return TrainingStep(
            number=position.step, epoch=position.epoch, active=plan.active(position.epoch_step),
            batches=plan.batches_in(self._group.rank, position.epoch_step), memory=position.step % len(self._buffers),
            loss=torch.zeros_like(self._loss_sum), weight=plan.weight(self._group.rank, position.epoch_step),
        )  # fmt: skip

    def compute(
        self, step: TrainingStep, profile: Profile | StepProfile, launch: Launch | None = None, *,
        overlaps: bool = False, late: Sequence[Mapping[Tensor, Tensor]] = (),
    ) -> None:  # fmt: skip
        """Forward and backward over the batches of a step.

        Where the loss is not finite, NaN is put into each bucket, so that what all ranks make of it is not finite.

        Args:
            launch: called with each bucket that is complete, at the latest at the end; None: nothing is.
            overlaps: call it in the midst of the last backward pass already.
            late: own gradients of steps that are still to be applied, oldest first, where weights are predicted.

        Raises:
            StepCancelled: the worker was cancelled.
            ValueError: the task gave fewer batches than it had announced.
            ConfigError: a parameter that build_model froze is not frozen any more.
        """
        self._unfinished = step
        ahead = weights_ahead(self.optimizer.optimizer, late) if late else nullcontext()
        with profile.span("compute"), ahead:
            step.gradients = self._gradients.begin(step.memory, launch, looks=self._looks)
            self._buffers[step.memory].keep()
            for number in range(step.batches):
                if self._should_stop():
                    raise StepCancelled
                batch = next(self._batches, _NO_MORE)
                if batch is _NO_MORE:
                    raise ValueError(
                        f"epoch {step.epoch}: num_batches said {self.num_batches(step.epoch)} batches for rank "
                        f"{self._group.rank}, but batches() ended earlier"
                    )
                with self._autocast():
                    outcome = self._task.loss(self.model, batch)
                loss, reported = outcome if isinstance(outcome, tuple) else (outcome, {})
                step.metrics.add(reported, "loss() of the task")
                step.loss += loss.detach()
                if number == step.batches - 1:
                    self._gradients.mark_unless(step.loss.isfinite())
                    if overlaps:
                        self._gradients.enable_overlap()
                divisor = step.batches / step.weight
                torch.autograd.backward(loss if divisor == 1 else loss / divisor)
            self._check_frozen(step)
        with profile.span("encode"):
            self._gradients.flush()
            step.is_finite = self._gradients.are_finite
            if self._config.predicts_weights and step.batches and step.own_is_finite():
                step.own = self._own_gradients()

    def _check_frozen(self, step: TrainingStep) -> None:
        """Raises ConfigError: ranks would not exchange a parameter that is trained by now."""
        unfrozen = next((name for name, parameter in self._frozen.items() if parameter.requires_grad), None)
        if unfrozen is not None:
            raise ConfigError(
                f"rank {self._group.rank}, step {step.number + 1}: parameter {unfrozen!r} was frozen "
                f"(requires_grad=False) in build_model and is not any more. Ranks exchange what is trained then, so "
                f"this one would differ between them: freeze it in build_model only if it stays so"
            )

    def _own_gradients(self) -> dict[Tensor, Tensor]:
        """A copy of the gradients of this rank, clipped as the mean will be."""
        own = {parameter: parameter.grad.clone() for parameter in self.trained.values() if parameter.grad is not None}
        if self.optimizer.clip_norm is not None and not self.algorithm.clips:
            _clip(list(own.values()), self.optimizer.clip_norm)
        return own

    def count(self, step: TrainingStep) -> None:
        """Add its losses and metrics to those of the epoch; of one that is skipped put back what it has changed."""
        self._unfinished = None
        self._before = step.number, self._loss_sum, self._metrics
        if step.skipped_by is None:
            self._loss_sum = self._loss_sum + step.loss
            self._metrics = self._metrics.merged(step.metrics)
            return
        self._looks = True
        self._buffers[step.memory].put_back()
        for number, buffers in enumerate(self._buffers):
            if number != step.memory:  # steps that were computed since have kept what this one had spoiled
                buffers.keep()

    def apply(self, step: TrainingStep, profile: Profile | StepProfile) -> None:
        """Count a step, and change the model by its gradients, unless it is skipped. Where weights are exchanged, the
        step has not ended by that: a schedule goes on when the exchange has ended."""
        self.count(step)
        if self._recorded is not None:
            flats = None if step.skipped_by is not None else [bucket.flat.clone() for bucket in step.gradients]
            self._recorded.append(_RecordedStep(step.number, step.epoch, flats))
            return
        if step.skipped_by is None:
            with profile.span("apply"):
                if len(self._buffers) > 1:
                    self._gradients.use(step.memory)
                self._change_model(step.number, step.epoch, step.gradients)
        if self.algorithm.scope != "weights":
            self.optimizer.step_has_ended()

    def _change_model(self, number: int, epoch: int, gradients: Sequence[TensorBucket]) -> None:
        if self.optimizer.clip_norm is not None and not self.algorithm.clips:
            _clip([bucket.flat for bucket in gradients], self.optimizer.clip_norm)
        self.optimizer.step(number, epoch)

    # A rank that joins while the others go on

    def follow(self) -> None:
        """From now on record the steps that all ranks make, and change nothing: the state is still to come."""
        self._recorded = []

    @property
    def recorded_bytes(self) -> int:
        """Return the bytes of the gradients that are recorded, and those of two steps more: so many are made before all
        ranks rest where this rank asks for it."""
        sizes = [sum(flat.numel() * flat.element_size() for flat in step.flats or ()) for step in self._recorded or ()]
        return sum(sizes) + 2 * max(sizes, default=0)

    def catch_up(self) -> None:
        """Apply the steps that were recorded to the state that is there now, as the other ranks have done."""
        recorded, self._recorded = self._recorded or [], None
        for step in recorded:
            if step.flats is not None:
                gradients = self._gradients.begin()
                for bucket, flat in zip(gradients, step.flats, strict=True):
                    bucket.flat.copy_(flat)
                self._change_model(step.number, step.epoch, gradients)
            self.optimizer.step_has_ended()

    def stop_following(self) -> None:
        """Drop what was recorded: it is of no use any more."""
        self._recorded = None

    def joiner_state(self) -> dict[str, Tensor]:
        """Return what a rank that joins gets beside the model, by name, not copied: also where replicas differ."""
        return _named("algorithm/", self.algorithm.shared_state()) | self.optimizer.tensors()

    def load_joiner_state(self, tensors: Mapping[str, Tensor], *, keeps_own: bool = False) -> None:
        """The inverse. ``keeps_own``: what the algorithm keeps of this rank alone is of the same step.

        Raises:
            CheckpointError: it does not fit.
        """
        self.optimizer.load(tensors)
        self.load_algorithm(tensors, keeps_own=keeps_own)

    def load_algorithm(self, tensors: Mapping[str, Tensor], *, keeps_own: bool = False) -> None:
        """Load the algorithm's part of the state that a joiner receives, and, where it says so, weights that follow."""
        self._load(self.algorithm.own_state() if keeps_own else {}, tensors_below("algorithm/", tensors))
        if self.algorithm.scope == "weights":
            write_weights(self.trained, self.algorithm.weights_of_joiner(bucket_of(self.trained).flat))

    def model_is_finite(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether all that is finite in a model at the start is so in these :func:`model_tensors`."""
        return are_finite([tensors[name] for name in self._finite_names])

    def loss_sum(self) -> float:
        """Return the sum over this rank's batches of this epoch, without those of steps that were skipped."""
        return self._loss_sum.item()

    def note_sums(self, position: Position) -> None:
        """Put the losses and metrics of this rank's batches of this epoch there, without those of skipped steps."""
        position.loss_sum, position.metrics = self.loss_sum(), self._metrics.plain()

    def evaluate(self) -> ShardCounts | None:
        """On this rank's part of the test set."""
        return self._task.evaluate_shard(self.model, rank=self._group.rank, world=self._group.world)

    def report_of(self, step: TrainingStep) -> StepReport:
        """A step as callbacks get it. Waits for the device."""
        return StepReport(
            step=step.number + 1, epoch=step.epoch, rank=self._group.rank, world=self._group.world,
            loss=float(step.loss) / step.batches if step.batches else math.nan, skipped=step.skipped_by is not None,
            lr=self.optimizer.lr, metrics=combined([step.metrics.plain()]),
        )  # fmt: skip

    # What is kept of it

    def own_state(self) -> dict[str, Tensor]:
        """Return what is this rank's alone, by name, not copied: with replicas that differ also model and optimizer."""
        state = _named("algorithm/", self.algorithm.own_state())
        if not self.algorithm.equal_replicas:
            state |= model_tensors(self.model) | self.optimizer.tensors()
        return state

    def shared_state(self) -> dict[str, Tensor]:
        """Return what is equal on all ranks beside the model, by name, not copied."""
        state = _named("algorithm/", self.algorithm.shared_state())
        if self.algorithm.equal_replicas:
            state |= self.optimizer.tensors()
        return state

    def load_shared_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse. Raises CheckpointError: it does not fit."""
        if self.algorithm.equal_replicas:
            self.optimizer.load(tensors)
        self._load(self.algorithm.own_state(), tensors_below("algorithm/", tensors))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore what this rank has saved: rank 0 the model and what is equal on all ranks, every rank its own, and
        the state of torch's random numbers.

        Raises:
            CheckpointError: something does not fit.
        """
        own = tensors_below("own/", checkpoint.tensors)
        try:
            self._load(tensors_below("algorithm/", own), self.algorithm.shared_state())
            if not self.algorithm.equal_replicas:
                restore_model(self.model, checkpoint, "own/")
                self.optimizer.load(own)
            elif self._group.rank == 0:
                restore_model(self.model, checkpoint)
            if self._group.rank == 0:
                self.load_shared_state(tensors_below("shared/", checkpoint.tensors))
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint of step {checkpoint.round_id}: {error}. If the model is the same, it is damaged: restore "
                f"it from a backup, or choose another checkpoint.dir"
            ) from None
        restore_random_numbers(checkpoint)

    def _load(self, own: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
        try:
            self.algorithm.load_state(own, shared)
        except ValueError as error:
            raise CheckpointError(f"state of {self.label.name}: {error}") from None

    def close(self) -> None:
        """Let go of the model."""
        if hasattr(self, "_gradients"):
            self._gradients.close()


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


@torch.no_grad()
def _clip(flats: Sequence[Tensor], limit: float) -> None:
    """By the norm over all parameters, in float64: so processors of different kinds round to one scale, too."""
    squares = [torch.linalg.vector_norm(flat, dtype=torch.float64).cpu() for flat in flats]
    norm = float(torch.stack(squares).norm())
    if norm > limit:
        for flat in flats:
            flat.mul_(limit / norm)
