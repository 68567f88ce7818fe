"""One rank of a data-parallel run, whatever brings the gradients together: epochs, callbacks, evaluation, reports."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from gradbus.actors.data_parallel.algorithm import MakeAlgorithm
from gradbus.actors.data_parallel.epoch_plan import EpochPlan
from gradbus.actors.data_parallel.evaluation import Evaluation
from gradbus.actors.data_parallel.metrics import combined, tally
from gradbus.actors.data_parallel.report import EpochReport, StepProgress, WorkerSummary
from gradbus.actors.data_parallel.state import Position, check_same_batches
from gradbus.actors.data_parallel.task import DataParallelTask, ShardCounts
from gradbus.actors.data_parallel.training import ShardTraining
from gradbus.runtime.algorithms.base import Place, algorithm_maker
from gradbus.runtime.callbacks import Callbacks, CallbackWait
from gradbus.runtime.checkpoint import copy_state
from gradbus.runtime.collectives import Group, check_group
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.logs import get_logger
from gradbus.runtime.misuse import awaited, check_instance, check_task
from gradbus.runtime.not_finite import warn_not_finite
from gradbus.runtime.profiling.profile import Profile

TASK_METHODS = ("build_model", "prepare_shard", "num_batches", "batches", "loss")  # that are called in every run


class Rank(ABC):
    """One rank of a run. It runs once; make another one to run again.

    Attributes:
        profile: where the time goes. skipped_steps: by this rank, since this process started.
        on_progress: called on the loop with each progress report, every ``config.report_every_steps`` steps.
    """

    _call: ClassVar[str]  # how a program makes it

    def __init__(
        self,
        group: Group,
        task: DataParallelTask,
        config: DataParallelConfig,
        callbacks: Sequence[Any],
        make_algorithm: MakeAlgorithm | None = None,
    ) -> None:
        """A rank that has not started.

        Args:
            group: of those that train.
            task: model, data and loss.
            config: the rules.
            callbacks: of this rank, beside those that ``config.callbacks`` names.
            make_algorithm: makes what the ranks do together, in place of what ``config.algorithm`` names.

        Raises:
            ConfigError: group, task or config is another kind of thing, this rank has left the group, or a callback is
                none.
        """
        self._check_group(group)
        advice = "Write gradbus.DataParallelConfig(epochs=10, ...), and keep the order of the arguments"
        check_instance(self._call, "config", config, DataParallelConfig, advice)
        called = (*TASK_METHODS, "evaluate_shard") if config.eval_every_epochs else TASK_METHODS
        unless = {"evaluate_shard": "parallel.eval_every_epochs to 0"}
        check_task(self._call, task, called, "gradbus.actors.DataParallelTask", unless=unless)
        rank = group.rank
        self._config = config
        self._log = get_logger("worker", rank=rank)
        self._compute = ComputeThread(f"worker-{rank}")
        self._callbacks = Callbacks("parallel", callbacks, config.callbacks)
        self._wants_end = False  # a callback of this rank, since the others were told last
        self._is_stopped = False  # callbacks want it
        self._is_resting = False  # the ranks stop between two steps, as others want to join or to leave
        self._task = task
        self._make_algorithm = make_algorithm or algorithm_maker(config.algorithm)  # a wrong one is an error by now
        self._loaded: ShardTraining | None = None
        jsonl = None if config.profile.dir is None else config.profile.dir / f"profile-rank-{rank}.jsonl"
        self.profile = Profile(rank, window_steps=config.profile.window_steps, jsonl=jsonl, traffic=group.bus.traffic)
        self.skipped_steps = 0
        self.on_progress: Callable[[StepProgress], object] = lambda report: None
        self._position = Position()
        self._report: EpochReport | None = None
        self._params_hash = 0
        self._restored_batches: int | None = None  # of this rank in the epoch that a resume goes on with
        self._has_started = False
        self._seconds = self._started_s = 0.0

    def _check_group(self, group: Group) -> None:
        """Raises ConfigError: it is none, or this rank has left it."""
        check_group(self._call, "group", group)

    async def _load(self, place: Place) -> ShardTraining:
        """Load the data and build the model, for a rank at this place. Raises as :class:`ShardTraining` does."""
        self._loaded = await self._compute.run(
            ShardTraining, self._config, place, self._task, self._make_algorithm, should_stop=self._compute.should_stop
        )
        return self._loaded

    @property
    def _training(self) -> ShardTraining:
        """Return model, data and algorithm. Raises AttributeError: they are not loaded yet."""
        if self._loaded is None:
            raise AttributeError("this worker has no model yet: it is built when run() or epochs() begins")
        return self._loaded

    @property
    def model(self) -> nn.Module:
        """The live module, changed by every step. Raises AttributeError: the run has not started."""
        return self._training.model

    async def state_dict(self) -> dict[str, Any]:
        """The model after the newest step: tensors by name, for ``model.load_state_dict``.

        They are copies on the CPU, made off the event loop, and never in the midst of a step.
        """
        return await self._compute.run_or_follow(self._copy_state)

    def _copy_state(self) -> dict[str, Any]:
        return copy_state(self.model)

    @property
    @abstractmethod
    def algorithm(self) -> str:
        """Name of what the ranks exchange."""

    @property
    @abstractmethod
    def _group_and_world(self) -> tuple[Group, int]:
        """The group that this rank is in, and the number of those that train."""

    @property
    def step(self) -> int:
        """Steps done, those before a resume included."""
        return self._position.step

    @property
    def progress(self) -> str:
        """Return where the run is, for people."""
        return f"step {self.step}"

    @property
    def summary(self) -> WorkerSummary:
        """Return what was done so far."""
        (group, world), report = self._group_and_world, self._report
        sent_bytes, received_bytes = self.profile.exchanged
        return WorkerSummary(
            rank=group.rank,
            world=world,
            epochs=self._position.epoch,
            steps=self._position.step,
            accuracy=None if report is None else report.accuracy,
            loss=None if report is None else report.loss,
            metrics={} if report is None else report.metrics,
            params_hash=self._params_hash,
            skipped_steps=self.skipped_steps,
            bytes_out=sent_bytes,
            bytes_in=received_bytes,
            seconds=self._seconds,
            profile=self.profile.summary(),
            algorithm=self.algorithm,
        )

    @awaited("worker.run()")
    async def run(self) -> WorkerSummary:
        """All epochs that are left.

        Raises:
            As :meth:`epochs`.
        """
        async for _ in self.epochs():
            pass
        return self.summary

    @abstractmethod
    def epochs(self) -> AsyncGenerator[EpochReport, None]:
        """Train, and give a report after each epoch. The next one begins when the next report is asked for."""

    def _start_once(self) -> None:
        """Raises RuntimeError: it has run."""
        if self._has_started:
            raise RuntimeError(
                "a worker runs once: make another one; with a checkpoint.dir it goes on where this one ended"
            )
        self._has_started, self._started_s = True, time.perf_counter()

    # An epoch

    @property
    def _ends_early(self) -> bool:
        at_max = self._config.max_steps is not None and self._position.step >= self._config.max_steps
        return at_max or self._is_stopped

    @property
    def _is_done(self) -> bool:
        return self._position.epoch >= self._config.epochs or self._ends_early

    async def _one_epoch(self) -> EpochReport | None:
        """The rest of an epoch. None: the ranks rest in the midst of it."""
        position = self._position
        plan = await self._begin_epoch()
        await self._compute.run(self._training.start_epoch, plan, position)
        while position.epoch_step < plan.steps and not (self._ends_early or self._is_resting):
            await self._one_step(plan)
            if self._is_due_after(position.step) and position.epoch_step < plan.steps and not self._ends_early:
                await self._save()
        await self._end_steps()
        finished = position.epoch_step >= plan.steps
        if self._is_resting and not (finished or self._ends_early):
            return None
        report = self._report = await self._report_epoch(finished)
        await self._after_epoch(report)
        due = self._is_due_after(position.step) or not self._config.checkpoint.every_steps
        if finished:
            self._position = position.next_epoch()
        if due or self._is_done:
            await self._save()
        self._seconds = time.perf_counter() - self._started_s
        return report

    @abstractmethod
    async def _begin_epoch(self) -> EpochPlan:
        """Return who has how much data. Raises CheckpointError: it is no longer as much as when the run was saved."""

    async def _own_batches(self) -> int:
        """Batches of this rank in this epoch. Raises CheckpointError: they are others than when the run was saved."""
        epoch = self._position.epoch
        own = await self._compute.run(self._training.num_batches, epoch)
        restored, self._restored_batches = self._restored_batches, None
        if restored is not None and self._position.epoch_step:
            check_same_batches(epoch, restored, own, of=f"on rank {self._group_and_world[0].rank}")
        return own

    @abstractmethod
    async def _one_step(self, plan: EpochPlan) -> None:
        """Make the next step."""

    async def _end_steps(self) -> None:  # noqa: B027 - where nothing is on its way
        """The epoch has no more steps, or the ranks rest: apply what is on its way."""

    async def _call_at_end(self) -> None:
        """Call ``on_end``. Raises CallbackFailed; CallbackTimeout: one does not return."""
        wait = CallbackWait(self._callbacks)
        wait.run_has_ended()
        await wait.wait(self._compute.run(self._callbacks.call, "on_end", self.summary))

    @abstractmethod
    async def _after_epoch(self, report: EpochReport) -> None:
        """Call back, and find out whether callbacks of any rank want the run to end."""

    async def _call_after_epoch(self, report: EpochReport) -> None:
        methods = ("on_evaluation", "on_epoch") if report.test_samples else ("on_epoch",)
        for method in methods:
            self._wants_end |= bool(await self._compute.run(self._callbacks.call, method, report))

    async def _report_progress_if_due(self, *, steps: int, seconds: float, wait_s: float, bytes_out: int) -> None:
        """Log how training goes, and show it. The sums are those of so many steps, which this process has done in this
        epoch."""
        position, every = self._position, self._config.report_every_steps
        if every and position.step % every == 0:
            loss_sum = await self._compute.run(self._training.loss_sum)
            report = StepProgress(
                step=position.step,
                epoch=position.epoch,
                loss=loss_sum / max(1, position.batches),
                step_s_mean=seconds / steps,
                wait_s_mean=wait_s / steps,
                bytes_out_per_step=bytes_out / steps,
            )
            self._log.info(
                "training",
                step=report.step,
                epoch=report.epoch,
                loss=report.loss,
                step_s=round(report.step_s_mean, 4),
                wait_s=round(report.wait_s_mean, 4),
                bytes_out_per_step=round(report.bytes_out_per_step),
            )
            self.on_progress(report)

    # What the ranks have learnt together

    @abstractmethod
    async def _report_epoch(self, finished: bool) -> EpochReport:
        """Return what the ranks have learnt together."""

    async def _evaluate(self) -> list[Any]:
        """Evaluate, if that is due. Returns this rank's part of :meth:`_reported`."""
        config, position = self._config, self._position
        every, is_last = config.eval_every_epochs, self._ends_early or position.epoch + 1 >= config.epochs
        counts: ShardCounts | None = None
        if every and (is_last or (position.epoch + 1) % every == 0):
            started_s = time.perf_counter()
            counts = await self._compute.run(self._training.evaluate)
            self.profile.add_span("eval", started_s, time.perf_counter())
        return [position.loss_sum, position.batches, position.metrics, *tally(counts), position.skipped]

    def _reported(
        self,
        finished: bool,
        tallies: Sequence[Sequence[Any]],
        train_metrics: Mapping[str, float] | None = None,
        **own: Any,
    ) -> EpochReport:
        """The report of an epoch, which is logged.

        Args:
            tallies: of all ranks, as of :meth:`_evaluate`.
            train_metrics: beside those of the task. own: what else this rank reports.
        """
        loss_sums, batches, trained, *counts, skipped = list(zip(*tallies, strict=True))
        evaluation = Evaluation.of(list(zip(*counts, strict=True)))
        report = EpochReport(
            epoch=self._position.epoch,
            step=self._position.step,
            finished=finished,
            loss=sum(loss_sums) / sum(batches) if sum(batches) else math.nan,
            accuracy=evaluation.accuracy,
            eval_loss=evaluation.loss,
            metrics=evaluation.metrics,
            train_metrics={**combined(trained), **(train_metrics or {})},
            test_samples=evaluation.test_samples,
            params_hash=self._params_hash,
            skipped_steps=max(skipped),
            **own,
        )
        unequal_only = ("model", "consensus_distance") if report.model == "equal" else ()
        self._log.info(
            "epoch done",
            **{name: value for name, value in report.to_json().items() if name not in ("params_hash", *unequal_only)},
        )
        if not self._group_and_world[0].rank:  # all ranks have the same numbers
            evaluated = {"accuracy": report.accuracy, "eval_loss": report.eval_loss, **report.metrics}
            warn_not_finite(self._log, evaluated, epoch=report.epoch, step=report.step)
        return report

    # Checkpoints

    def _is_due_after(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        every = self._config.checkpoint.every_steps
        return every > 0 and step % every == 0

    @abstractmethod
    async def _save(self) -> None:
        """Save the state of the run after the newest step."""
