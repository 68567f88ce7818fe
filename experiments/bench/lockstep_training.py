"""Data-parallel training of all ranks in one process: the accuracy of an algorithm for the time of one core.

What :class:`gradbus.Worker` does in a process for each rank is done here one rank after the other, with the programs in
lockstep (:class:`~gradbus.experiments.bench.lockstep.Lockstep`): same batches, same buckets, sums in rank order. So
the parameters have the bits of the deployed run, which a test checks. Where an algorithm promises equal replicas there
is one model, and results that differ between ranks are an error.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradbus import models
from gradbus.actors.data_parallel.buckets import assign_buckets
from gradbus.actors.data_parallel.optimization import RunOptimizer
from gradbus.codecs.base import are_finite
from gradbus.commands.simulate.rank_programs import reduced
from gradbus.experiments.bench.lockstep import Lockstep
from gradbus.experiments.bench.recipes import Recipe
from gradbus.experiments.examples.text import TextTask
from gradbus.runtime.algorithms.base import Algorithm, Place, Scope, Step, TensorBucket, bucket_of, make_algorithm
from gradbus.runtime.algorithms.live_weights import apply_result, write_weights
from gradbus.runtime.algorithms.prediction import weights_ahead
from gradbus.runtime.config.data_parallel import DataParallelConfig


class ReplicasDiffer(RuntimeError):
    """An algorithm that promises equal replicas has left ranks with other bits. The text says in which step."""


class NotFinite(RuntimeError):
    """A gradient or weight is NaN or infinite: the training has diverged. The text says in which step."""


class TrainingOutcome(NamedTuple):
    """Holds what a training came to.

    Attributes:
        accuracy: share of the test set that is right, of the mean of all ranks' models. distance: of the ranks' weights
            from their mean, by its length: the root of the mean square over the ranks; 0 for equal replicas.
        bytes_per_step: that a rank sends, the mean over ranks and steps. late_bytes: the same of the second half.
        loss: the mean of the ranks in the last step.
    """

    accuracy: float
    distance: float
    bytes_per_step: float
    late_bytes: float
    loss: float


class _Late(NamedTuple):
    """Holds what a step is still to change, as ``[model][bucket]``: gradients; of weights, as they were, and the
    result. ``own``: where weights are predicted, the gradients of each rank by parameter; None: it had no data."""

    step: Step
    flats: list[list[Tensor]]
    own: list[Mapping[Tensor, Tensor] | None]


class LockstepTraining:
    """All ranks of one run.

    Attributes:
        models: of the ranks; one for all of them where replicas are equal.
        lockstep: with what has been sent so far.
        coding_s: processor time of the programs of a rank, and of the sums between them, so far.
    """

    def __init__(
        self,
        recipe: Recipe,
        task: models.ClassificationTask | TextTask,
        world: int,
        seed: int = 0,
        *,
        schedule: Mapping[str, Any] | None = None,
    ) -> None:
        """``seed``: of the order of the samples. ``schedule``: of the learning rate over a run. As the Worker's
        settings."""
        self.world = world
        self.lockstep = Lockstep(world)
        self.coding_s = 0.0
        self.algorithms: list[Algorithm] = [
            make_algorithm(recipe.algorithm, Place(rank, world), recipe.options) for rank in range(world)
        ]
        first = self.algorithms[0]
        self._delay = first.check_delay(recipe.delay_steps)
        self._late: deque[_Late] = deque()  # oldest first
        self._predicts = recipe.predicts_weights
        self.models: list[nn.Module] = [task.build_model() for _ in range(1 if first.equal_replicas else world)]
        self._task, self._seed = task, seed
        self._parameters = [_trained(model) for model in self.models]
        config = DataParallelConfig(**recipe.settings(), **({} if schedule is None else {"schedule": schedule}))
        made = [  # for each rank, as an algorithm may take its settings from that of the optimizer
            RunOptimizer(config, task, self.models[rank % len(self.models)], self._of(rank), algorithm)
            for rank, algorithm in enumerate(self.algorithms)
        ]
        self._optimizers = made[: len(self.models)]
        self._gradients = [_Gradients(self._of(rank), first.scope, config) for rank in range(world)]
        for rank, algorithm in enumerate(self.algorithms if first.scope == "weights" else ()):
            algorithm.begin(bucket_of(self._of(rank)))
        self._steps = self._batches()
        self._epoch = 0
        self.loss = math.nan

    def _of(self, rank: int) -> dict[str, Tensor]:
        """The parameters of a rank."""
        return self._parameters[rank % len(self._parameters)]

    def _batches(self) -> Iterator[tuple[int, list[Any]]]:
        """The epoch, and a batch or None for each rank, step by step without end."""
        for epoch in itertools.count():
            ranks = [
                self._task.batches(rank=rank, world=self.world, epoch=epoch, seed=self._seed)
                for rank in range(self.world)
            ]
            for batches in itertools.zip_longest(*ranks):
                yield epoch, list(batches)

    def run(self, steps: int, *, evaluates: bool = True) -> TrainingOutcome:
        """Take so many steps from the beginning, then evaluate, or leave the accuracy NaN.

        Raises:
            ReplicasDiffer, NotFinite: see there.
        """
        first_half = 0
        for optimizer in self._optimizers:
            optimizer.start_schedule(steps)
        for number in range(steps):
            if number == steps // 2:
                first_half = sum(self.lockstep.cost.bytes_out)
            self.step(number)
        self.drain()
        sent = sum(self.lockstep.cost.bytes_out)
        mean, distance = self.mean_model()
        found = self._task.evaluate(mean) if evaluates else None
        accuracy = None if found is None else found.accuracy
        return TrainingOutcome(
            accuracy=math.nan if accuracy is None else accuracy,
            distance=distance,
            bytes_per_step=sent / self.world / steps,
            loss=self.loss,
            late_bytes=(sent - first_half) / self.world / (steps - steps // 2),
        )

    def step(self, number: int) -> None:
        """One step of all ranks. ``number``: from 0."""
        epoch, batches = next(self._steps)
        if epoch != self._epoch:
            self.drain()  # as the Worker does at the end of each epoch
            self._epoch = epoch
        active = sum(batch is not None for batch in batches)
        algorithm = self.algorithms[0]
        step = Step(number, epoch, active, self.loss if algorithm.needs_loss else math.nan)
        losses = [self._backward(rank, batch) for rank, batch in enumerate(batches)]
        if not are_finite([bucket.flat for gradients in self._gradients for bucket in gradients.buckets]):
            raise NotFinite(f"step {number}: a gradient has NaN or infinity in it, losses {losses}")
        self.loss = sum(float(loss) for loss in losses) / active
        if algorithm.scope == "weights":
            self._step_of_weights(step)
        else:
            self._step_of_gradients(step)

    def drain(self) -> None:
        """Apply what is late, as before an evaluation or at the end."""
        self._apply_before(None)

    def _backward(self, rank: int, batch: Any) -> Tensor:
        """The gradients of a rank into its buckets; zeros without a batch. Returns the loss, 0 without one."""
        gradients = self._gradients[rank]
        gradients.zero()
        if batch is None:
            return torch.zeros(())
        model = self.models[rank % len(self.models)]
        model.train()
        parameters, optimizer = self._of(rank), self._optimizers[rank % len(self.models)].optimizer
        gradients.attach(parameters)
        with weights_ahead(optimizer, [own for late in self._late if (own := late.own[rank]) is not None]):
            loss = self._task.loss(model, batch)
            torch.autograd.backward(loss)
        if self._predicts:
            gradients.own = {one: one.grad.clone() for one in parameters.values() if one.grad is not None}
        return loss.detach()

    def _step_of_gradients(self, step: Step) -> None:
        """Step with what this step has exchanged, or with what a step before has, if results are late."""
        for buckets in zip(*(gradients.buckets for gradients in self._gradients), strict=True):
            self._exchange(buckets, step)
        self._commit()
        if not self._delay:
            self._take_steps(step)
            return
        gradients = self._gradients[: len(self.models)]
        flats = [[bucket.flat.clone() for bucket in one.buckets] for one in gradients]
        self._late.append(_Late(step, flats, [one.own for one in self._gradients]))
        self._apply_before(step.number + 1 - self._delay)

    @torch.no_grad()
    def _step_of_weights(self, step: Step) -> None:
        """Exchange weights before the optimizer steps, or after it; late results are added as what they change."""
        algorithm = self.algorithms[0]
        is_early = algorithm.overlaps and not self._delay
        if not is_early:
            self._take_steps(step)
        self._apply_before(step.number + 1 - self._delay)
        if algorithm.is_due(step):
            buckets = [bucket_of(self._of(rank)) for rank in range(self.world)]
            before = [bucket.flat.clone() for bucket in buckets] if self._delay else []
            self._exchange(buckets, step)
            self._commit()
            for rank, bucket in enumerate(buckets[: len(self.models)] if not self._delay else ()):
                write_weights(self._of(rank), bucket.flat)
            if self._delay:
                both = [[old, bucket.flat] for bucket, old in zip(buckets, before, strict=True)]
                self._late.append(_Late(step, both[: len(self.models)], [None] * self.world))
        if is_early:
            self._take_steps(step)

    def _apply_before(self, number: int | None) -> None:
        """Apply the late results of steps before this one; None: all."""
        while self._late and (number is None or self._late[0].step.number < number):
            step, flats, _ = self._late.popleft()
            if self.algorithms[0].scope == "weights":
                for rank, (before, result) in enumerate(flats):
                    apply_result(self._of(rank), self.algorithms[rank], step, result, before)
                continue
            for gradients, own in zip(self._gradients, flats, strict=False):
                for bucket, flat in zip(gradients.buckets, own, strict=True):
                    bucket.flat.copy_(flat)
            self._take_steps(step)

    def _take_steps(self, step: Step) -> None:
        for rank, optimizer in enumerate(self._optimizers):  # one for all ranks: with the first one's gradients
            self._gradients[rank].attach(self._of(rank))
            optimizer.step(step.number, step.epoch)

    def _commit(self) -> None:
        for algorithm in self.algorithms:
            algorithm.commit()

    def _exchange(self, buckets: Sequence[TensorBucket], step: Step) -> None:
        began_s = time.thread_time()
        self.lockstep.run([one.exchange(bucket, step) for one, bucket in zip(self.algorithms, buckets, strict=True)])
        self.coding_s += (time.thread_time() - began_s) / self.world
        if not are_finite([bucket.flat for bucket in buckets]):
            raise NotFinite(f"step {step.number}: what the ranks have exchanged has NaN or infinity in it")
        for rank, bucket in enumerate(buckets if len(self.models) == 1 else ()):
            if not torch.equal(bucket.flat, buckets[0].flat):
                raise ReplicasDiffer(f"step {step.number}: rank {rank} has another result than rank 0")

    @torch.no_grad()
    def mean_model(self) -> tuple[nn.Module, float]:
        """The mean of the ranks' models, and how far they are from it: see :class:`TrainingOutcome`."""
        mean = self._task.build_model()
        if len(self.models) == 1:
            mean.load_state_dict(self.models[0].state_dict())
            return mean, 0.0
        squares, length = 0.0, 0.0
        for name, parameter in _trained(mean).items():
            tensors = [of_rank[name].detach() for of_rank in self._parameters]
            parameter.copy_(reduced(tensors, "mean"))
            squares += sum(float((tensor - parameter).double().square().sum()) for tensor in tensors)
            length += float(parameter.double().square().sum())
        return mean, (squares / self.world / length) ** 0.5


class _Gradients:
    """The buckets of one rank. ``p.grad`` is a view of one of them, as with the Worker.

    Attributes:
        own: a copy, by parameter, where weights are predicted; None without data.
    """

    own: Mapping[Tensor, Tensor] | None = None

    def __init__(self, parameters: Mapping[str, Tensor], scope: Scope, config: DataParallelConfig) -> None:
        if scope == "step":
            self.buckets = [bucket_of(parameters)]
            return
        names = list(parameters)
        plan = assign_buckets(
            list(parameters.values()), bucket_bytes=config.bucket_bytes, first_bucket_bytes=config.first_bucket_bytes
        )
        self.buckets = [
            bucket_of({names[at]: parameters[names[at]] for at in members}, index) for index, members in enumerate(plan)
        ]

    def zero(self) -> None:
        self.own = None
        for bucket in self.buckets:
            bucket.flat.zero_()

    def attach(self, parameters: Mapping[str, Tensor]) -> None:
        for bucket in self.buckets:
            for name, view in bucket.tensors.items():
                parameters[name].grad = view


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
