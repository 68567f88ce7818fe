"""What a data-parallel worker does off the event loop: forward, backward, the optimizer, evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradbus.actors.data_parallel.algorithm import MakeAlgorithm, start_algorithm
from gradbus.actors.data_parallel.buckets import GradientBuckets, Launch, assign_buckets
from gradbus.actors.data_parallel.callbacks import StepReport
from gradbus.actors.data_parallel.epoch_plan import EpochPlan
from gradbus.actors.data_parallel.metrics import combined
from gradbus.actors.data_parallel.module_buffers import ModuleBuffers
from gradbus.actors.data_parallel.optimization import RunOptimizer
from gradbus.actors.data_parallel.recorded_steps import RecordedSteps
from gradbus.actors.data_parallel.state import Position
from gradbus.actors.data_parallel.step import EpochSums, TrainingStep
from gradbus.actors.data_parallel.task import DataParallelTask, ShardCounts
from gradbus.actors.data_parallel.training_state import TrainingState
from gradbus.runtime.algorithms.base import Place, TensorBucket, bucket_of
from gradbus.runtime.algorithms.prediction import check_prediction, weights_ahead
from gradbus.runtime.built_model import build_model
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.profiling.profile import Profile, StepProfile

_NO_MORE: Any = object()  # batches() ended; None may be a batch


class StepCancelled(Exception):
    """The worker was cancelled, so the step gives up."""


class ShardTraining:
    """One rank's model, data, algorithm and optimizer. It is made, and every method is called, on the compute thread.

    Attributes:
        model: the live module. trained: its parameters that are trained, by name. algorithm: what the ranks do
            together. label: its name and options. optimizer: what changes the model. state: what is saved of them.
        delay_steps: number of steps after which results are applied.
    """

    def __init__(
        self,
        config: DataParallelConfig,
        place: Place,
        task: DataParallelTask,
        make_algorithm: MakeAlgorithm,
        *,
        should_stop: Callable[[], bool],
    ) -> None:
        """Load the data, build the model.

        Args:
            place: of this rank among the others.
            make_algorithm: makes what the ranks do together.
            should_stop: whether a step is no longer wanted.

        Raises:
            ValueError: nothing in the model is trained.
            ConfigError: the algorithm cannot work with the model or the optimizer. And as the task does.
        """
        self._config = config
        self._place = place
        self._task = task
        self._should_stop = should_stop
        task.prepare_shard(*self._data_place)
        self.model = build_model(task)
        named = dict(self.model.named_parameters())
        self.trained: dict[str, Tensor] = {name: one for name, one in named.items() if one.requires_grad}
        self._frozen = {name: one for name, one in named.items() if not one.requires_grad}
        if not self.trained:
            raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
        self.algorithm, self.label = start_algorithm(config, place, self.trained, make_algorithm)
        self.optimizer = RunOptimizer(config, task, self.model, self.trained, self.algorithm)
        self.delay_steps = self.algorithm.check_delay(config.delay_steps)
        if config.predicts_weights:
            check_prediction(self.optimizer.optimizer, self.algorithm, self.delay_steps)
        self.state = TrainingState(self.model, self.trained, self.optimizer, self.algorithm, self.label)
        sets = 1 if self.algorithm.scope == "weights" else self.delay_steps + 1
        self._gradients = GradientBuckets(self.trained, sets=sets, assignment=self._assignment())
        self._buffers = [ModuleBuffers(self.model) for _ in range(sets)]
        device = next(iter(self.trained.values())).device
        self._autocast: Callable[[], AbstractContextManager[Any]] = (
            nullcontext if config.autocast is None else partial(torch.autocast, device.type, dtype=torch.bfloat16)
        )
        self._batches: Iterator[Any] = iter(())
        self._sums = EpochSums(device)
        self._unfinished: TrainingStep | None = None  # computed, but not applied yet
        self._recorded: RecordedSteps | None = None  # of a rank that has not the state of the run yet
        self._looks = False  # at the own gradients, before they are exchanged: from the first step on that was skipped

    def _assignment(self) -> Sequence[Sequence[int]]:
        """The parameters of each bucket."""
        config, parameters = self._config, list(self.trained.values())
        if self.algorithm.scope == "step":
            return [range(len(parameters))]
        return assign_buckets(
            parameters, bucket_bytes=config.bucket_bytes, first_bucket_bytes=config.first_bucket_bytes
        )

    def begin(self) -> None:
        """Show the algorithm the weights that all ranks begin with, or go on with."""
        if self.algorithm.scope == "weights":
            self.algorithm.begin(bucket_of(self.trained))

    @property
    def _data_place(self) -> tuple[int, int]:
        """Rank and world of the data that this process needs: all of it, where ranks come and go."""
        return (0, 1) if self._config.elastic.is_on else (self._place.rank, self._place.world)

    def regroup(self, place: Place) -> None:
        """Go on among other ranks, between two steps."""
        self._place = place
        self.algorithm.regroup(place)

    def give_up_step(self, number: int) -> None:
        """Step ``number``, which has not ended, is made again: what of it was computed and not applied leaves no trace,
        nor does it count in the sums where the optimizer had stepped before the exchange of its weights."""
        self.algorithm.give_up()
        self._sums.undo(number)
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

        self._batches = plan.pick(batches, self._place.rank, position.epoch_step)
        self._sums.start(position.loss_sum, position.metrics)
        self.model.train()

    def new_step(self, plan: EpochPlan, position: Position) -> TrainingStep:
        """The next one, with nothing computed."""
        return TrainingStep(
            number=position.step,
            epoch=position.epoch,
            active=plan.active(position.epoch_step),
            batches=plan.batches_in(self._place.rank, position.epoch_step),
            memory=position.step % len(self._buffers),
            loss=self._sums.new_loss(),
            weight=plan.weight(self._place.rank, position.epoch_step),
        )

    def compute(
        self,
        step: TrainingStep,
        profile: Profile | StepProfile,
        launch: Launch | None = None,
        *,
        overlaps: bool = False,
        late: Sequence[Mapping[Tensor, Tensor]] = (),
    ) -> None:
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
                        f"{self._place.rank}, but batches() ended earlier"
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
                f"rank {self._place.rank}, step {step.number + 1}: parameter {unfrozen!r} was frozen "
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
        self._sums.add(step)
        if step.skipped_by is None:
            return
        self._looks = True
        self._buffers[step.memory].put_back()
        for number, buffers in enumerate(self._buffers):
            if number != step.memory:  # steps that were computed since have kept what this one had spoiled
                buffers.keep()

    def apply(self, step: TrainingStep, profile: Profile | StepProfile) -> None:
        """Count a step, and change the model by its gradients, unless it is skipped. Where weights are exchanged, the
        step has not ended by that: a schedule goes on when the exchange has ended."""
        if self._recorded is not None:
            self.count(step)
            self._recorded.add(step)
            return
        if step.skipped_by is None:
            with profile.span("apply"):
                if len(self._buffers) > 1:
                    self._gradients.use(step.memory)
                self._change_model(step.number, step.epoch, step.gradients)
        self.count(step)
        if self.algorithm.scope != "weights":
            self.optimizer.step_has_ended()

    def _change_model(self, number: int, epoch: int, gradients: Sequence[TensorBucket]) -> None:
        if self.optimizer.clip_norm is not None and not self.algorithm.clips:
            _clip([bucket.flat for bucket in gradients], self.optimizer.clip_norm)
        self.optimizer.step(number, epoch)

    # A rank that joins while the others go on

    def begin_recording(self) -> None:
        """Record the steps that all ranks make from now on, and change nothing: the state is still to come."""
        self._recorded = RecordedSteps()

    @property
    def recorded_bytes(self) -> int:
        """Return the bytes that recorded steps take, see :attr:`RecordedSteps.nbytes`."""
        return 0 if self._recorded is None else self._recorded.nbytes

    def catch_up(self) -> None:
        """Apply the steps that were recorded to the state that is there now, as the other ranks have done."""
        recorded, self._recorded = self._recorded, None
        for step in () if recorded is None else recorded.steps:
            if step.flats is not None:
                gradients = self._gradients.begin()
                for bucket, flat in zip(gradients, step.flats, strict=True):
                    bucket.flat.copy_(flat)
                self._change_model(step.number, step.epoch, gradients)
            self.optimizer.step_has_ended()

    def drop_recording(self) -> None:
        """Drop what was recorded: it is of no use any more."""
        self._recorded = None

    def loss_sum(self) -> float:
        """Return the sum over this rank's batches of this epoch, without those of steps that were skipped."""
        return self._sums.loss

    def note_sums(self, position: Position) -> None:
        """Put the losses and metrics of this rank's batches of this epoch there, without those of skipped steps."""
        position.loss_sum, position.metrics = self._sums.loss, self._sums.metrics

    def evaluate(self) -> ShardCounts | None:
        """On this rank's part of the test set."""
        return self._task.evaluate_shard(self.model, rank=self._place.rank, world=self._place.world)

    def report_of(self, step: TrainingStep) -> StepReport:
        """A step as callbacks get it. Waits for the device."""
        return StepReport(
            step=step.number + 1,
            epoch=step.epoch,
            rank=self._place.rank,
            world=self._place.world,
            loss=float(step.loss) / step.batches if step.batches else math.nan,
            skipped=step.skipped_by is not None,
            lr=self.optimizer.lr,
            metrics=combined([step.metrics.plain()]),
        )

    def close(self) -> None:
        """Let go of the model."""
        self._gradients.close()


@torch.no_grad()
def _clip(flats: Sequence[Tensor], limit: float) -> None:
    """By the norm over all parameters, in float64: so processors of different kinds round to one scale, too."""
    squares = [torch.linalg.vector_norm(flat, dtype=torch.float64).cpu() for flat in flats]
    norm = float(torch.stack(squares).norm())
    if norm > limit:
        for flat in flats:
            flat.mul_(limit / norm)
