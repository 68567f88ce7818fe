"""A worker of a data-parallel run: equal ranks that exchange gradients or weights, as an algorithm says.

    async with gradbus.join_group(bus, rank=0, world=2) as group:
        async for report in gradbus.Worker(group, task, DataParallelConfig(epochs=10)).epochs(): ...

All ranks run the same script. Rank 0 differs in one thing: the others start as copies of it. Tensor work is done on a
thread of its own, never on the event loop.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from gradbus.actors.data_parallel.algorithm import MakeAlgorithm, place_in
from gradbus.actors.data_parallel.callbacks import StopVotes
from gradbus.actors.data_parallel.epoch_plan import EpochPlan
from gradbus.actors.data_parallel.late_stepping import LateGradientStepper
from gradbus.actors.data_parallel.rank import Rank
from gradbus.actors.data_parallel.replicas import (
    Replicas,
    check_equal,
    check_equal_layouts,
    describe_layout,
    model_tensors,
)
from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.data_parallel.state import (
    RunTensors,
    SavedRank,
    WorkerState,
    find_checkpoint,
    position_of,
)
from gradbus.actors.data_parallel.step import TrainingStep
from gradbus.actors.data_parallel.stepping import GradientStepper, Stepper, StepperParts
from gradbus.actors.data_parallel.task import DataParallelTask
from gradbus.actors.data_parallel.weights import WeightStepper
from gradbus.runtime.checkpoint import Checkpoint, copy_state
from gradbus.runtime.collectives import Group
from gradbus.runtime.collectives.in_network import join_aggregator
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.timeouts import log_timeouts, parallel_timeouts
from gradbus.runtime.errors import CheckpointError, ConfigError, TrainingDiverged
from gradbus.runtime.testing.journal import Probe


@dataclass(slots=True)
class EpochClock:
    """Sums over the steps of an epoch, of this process. ``wait_before_s``: of the epochs before. ``sent_bytes``,
    ``step_s``: with what was on its way at the end of the last step."""

    sent_bytes: int = 0
    wait_before_s: float = 0.0
    started_s: float = field(default_factory=time.perf_counter)
    steps: int = 0
    step_s: float = 0.0


@dataclass(slots=True, eq=False)
class GroupPart:
    """What a rank has of the group that it trains in, once its ranks fit together.

    Attributes:
        votes: on when the run ends. replicas: compares the models. stepper: makes the steps.
        is_compared: the parameters have been compared in this group.
    """

    votes: StopVotes
    replicas: Replicas
    stepper: Stepper
    is_compared: bool = False

    async def close(self) -> None:
        """Cancel what is on its way."""
        self.votes.cancel()
        await self.stepper.close()


class Worker(Rank):
    """One rank of a data-parallel run whose ranks exchange gradients or weights. It runs once."""

    _call = "Worker(group, task, config)"

    def __init__(
        self,
        group: Group,
        task: DataParallelTask,
        config: DataParallelConfig | None = None,
        *,
        on_open: Callable[[], object] = lambda: None,
        make_algorithm: MakeAlgorithm | None = None,
        callbacks: Sequence[Any] = (),
        fail_at: str | None = None,
    ) -> None:
        """A worker that has not started.

        Args:
            group: all ranks are in it.
            task: model, data and loss.
            config: the rules, equal on all ranks.
            on_open: called once the ranks fit together and the state is restored: from then on it is this run.
            make_algorithm: makes what the ranks do together, in place of what ``config.algorithm`` names; the same on
                all ranks: name and options are compared.
            callbacks: of this rank, beside those that ``config.callbacks`` names: objects as :mod:`.callbacks` says.
            fail_at: a fail point for tests; by default from the environment.

        Raises:
            ConfigError: group, task or config is another kind of thing, this rank has left the group, or a callback is
                none.
        """
        config = DataParallelConfig() if config is None else config
        super().__init__(group, task, config, callbacks, make_algorithm)
        self._group = group
        self._on_open = on_open
        self._probe = Probe(f"rank-{group.rank}", config.history.dir, fail_at=fail_at)
        self._in_group: GroupPart | None = None
        self._clock = EpochClock()
        self._run_id = 0
        self._state: WorkerState | None = None
        self._aggregator = contextlib.AsyncExitStack()
        self._set_aside: Mapping[str, Tensor] | None = None  # this rank's model, while the mean is evaluated in it
        self._skipped_before = 0  # exchanges, in the epochs before this one

    @property
    def _part(self) -> GroupPart:
        """Return what this rank has of its group. Raises RuntimeError: it is in none yet."""
        if self._in_group is None:
            raise RuntimeError("this worker is in no group yet: it is when run() or epochs() has met the other ranks")
        return self._in_group

    def _copy_state(self) -> dict[str, Any]:
        if self._set_aside is None:
            return copy_state(self.model)
        mean = self._part.replicas.exchange_with(self._set_aside)
        try:
            return copy_state(self.model)
        finally:
            self._part.replicas.exchange_with(mean)

    @property
    def algorithm(self) -> str:
        """Name of what the ranks exchange, its own once the run has started."""
        return self._config.algorithm.name if self._loaded is None else self._loaded.label.name

    @property
    def _group_and_world(self) -> tuple[Group, int]:
        return self._group, self._group.world

    @property
    def mean_ranks(self) -> float | None:
        """Return how many ranks a step of this epoch had, in the mean; None where they do not come and go."""
        return None

    async def epochs(self) -> AsyncGenerator[EpochReport, None]:
        """Train, and give a report after each epoch. The next one begins when the next report is asked for.

        Raises:
            ConfigError: settings or models of the ranks differ.
            CheckpointError: the state cannot be written, or does not fit.
            ReplicasDiverged: the parameters of some ranks differ from the others'.
            TrainingDiverged: too many steps in a row had NaN or infinity, or the parameters have.
            CallbackFailed: a callback has raised an exception.
            PeerLost, CollectiveTimeout: another rank has gone, or is silent.
            And what the task raises.
        """
        async with self._running():
            await self._open()
            await self._join_aggregator()
            self._on_open()
            while not self._is_done:
                report = await self._one_epoch()
                if report is not None:
                    yield report
            if not self._are_equal:
                await self._end_as_mean()
            elif not self._part.is_compared:
                self._params_hash = await self._compare()  # resumed at the end: nothing was left to do
            await self._call_at_end()

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """The whole run: it is noted how it ends, and everything is released. Raises RuntimeError: it has run."""
        self._start_once()
        try:
            yield
        except Exception as error:
            self._probe.note("failed", step=self.step, error=type(error).__name__, text=str(error)[:500])
            raise
        finally:
            self._seconds = time.perf_counter() - self._started_s
            if self._in_group is not None:
                await self._in_group.close()
            await self._aggregator.aclose()
            self._compute.close()
            if self._loaded is not None:
                self._loaded.close()
            self.profile.close()
            self._probe.end(step=self.step, done=self._is_done)
            if self._state is not None:
                self._state.close()

    # The start

    async def _open(self) -> None:
        """Agree with the others, and become a copy of rank 0."""
        config, group = self._config, self._group
        log_timeouts(self._log, parallel_timeouts(config, lease_s=group.bus.remote_lease_s))
        training = await self._load(place_in(group))
        if config.checkpoint.dir is not None:
            self._state = await self._compute.run(WorkerState, config, group.rank, group.world, label=training.label)
        hello = {
            "settings": self._shared_settings(),
            "batches": await self._compute.run(training.num_batches, 0),
            "callbacks": [bool(self._callbacks), self._callbacks.have("on_step")],
            "layout": describe_layout(self.model),
            "run_id": int.from_bytes(os.urandom(8), "little"),
            "steps": [] if self._state is None else self._state.steps(),
            "has_completed": self._state is not None and self._state.has_completed,
        }
        hellos = await group.all_gather_object("worker/hello", hello, timeout_s=config.timeouts.join_s)
        check_equal("settings", [hello["settings"] for hello in hellos])
        check_equal_layouts([hello["layout"] for hello in hellos])
        self._run_id = hellos[0]["run_id"]
        after_epochs, after_steps = map(any, zip(*(hello["callbacks"] for hello in hellos), strict=True))
        votes = StopVotes(
            group, timeout_s=config.timeouts.collective_s, after_steps=after_steps, after_epochs=after_epochs
        )
        first = EpochPlan.of([hello["batches"] for hello in hellos], config.accumulation_steps)
        steps = min(first.steps * config.epochs, config.max_steps or first.steps * config.epochs)
        await self._compute.run(training.optimizer.start_schedule, steps)
        replicas = Replicas(group, self._compute, self.model, timeout_s=config.timeouts.collective_s, probe=self._probe)
        checkpoint = None
        if self._state is not None:
            checkpoint = await find_checkpoint(
                group,
                self._compute,
                self._state,
                [hello["steps"] for hello in hellos],
                has_completed=any(hello["has_completed"] for hello in hellos),
                timeout_s=max(config.timeouts.collective_s, config.checkpoint.timeout_s),  # others read theirs
            )
        if checkpoint is not None:
            await self._restore(checkpoint)
        if checkpoint is None or self._are_equal:
            await replicas.broadcast_model()
        await self._compute.run(self.profile.begin_run, f"{self._run_id:016x}")
        shared = await replicas.broadcast_named("worker/shared", training.state.shared())
        await self._compute.run(training.state.load_shared, shared)
        await self._compute.run(training.begin)
        self._in_group = GroupPart(votes, replicas, self._make_stepper())
        self._probe.note("started", run=f"{self._run_id:016x}", rank=group.rank, world=group.world, step=self.step)
        self._log.info("started", world=group.world, step=self.step, algorithm=str(training.label))

    def _shared_settings(self) -> dict[str, Any]:
        """Return what must be equal on all ranks."""
        label, optimizer = self._training.label, self._training.optimizer.optimizer
        settings = self._config.shared({"name": label.name, **label.options})
        return {**settings, "class of the optimizer": type(optimizer).__name__}

    async def _join_aggregator(self) -> None:
        """Join an aggregator, where sums of the algorithm go through one. Raises ConfigError: it refuses;
        BarrierTimeout: there is none."""
        options = self._training.algorithm.in_network
        if options is not None:
            joining = join_aggregator(self._group, options, timeout_s=self._config.timeouts.join_s)
            await self._aggregator.enter_async_context(joining)

    def _make_stepper(self) -> Stepper:
        config, training = self._config, self._training
        parts = StepperParts(
            self._group,
            config.timeouts.collective_s,
            training,
            self._compute,
            self.profile,
            on_sent=partial(self._probe.reached, "after_send") if self._probe.is_armed else None,
        )
        if training.algorithm.scope == "weights":
            return WeightStepper(
                parts,
                self._position,
                waits_for_all=config.elastic.is_on,
                max_nonfinite_steps=config.max_nonfinite_steps,
            )
        if training.delay_steps:
            return LateGradientStepper(parts, self._position)
        return GradientStepper(parts, self._position, overlap=config.overlap)

    @property
    def _are_equal(self) -> bool:
        """Whether all ranks have one model."""
        return self._training.algorithm.equal_replicas

    @property
    def _hash_every(self) -> int:
        """Steps after which parameters are compared; 0: they are not."""
        return self._config.hash_every if self._are_equal else 0

    async def _restore(self, checkpoint: Checkpoint) -> None:
        """Go on from this rank's part. What does not fit on one rank, which alone may have it, is an error on all."""
        fault: CheckpointError | ConfigError | None = None
        try:
            await self._compute.run(self._take_over, checkpoint)
        except (CheckpointError, ConfigError) as error:
            fault = error
        own = None if fault is None else [isinstance(fault, ConfigError), str(fault)]
        found = await self._group.all_gather_object(
            "worker/restored", own, timeout_s=self._config.timeouts.collective_s
        )
        if fault is not None:
            raise fault
        for rank, other in enumerate(found):
            if other is not None:
                raise (ConfigError if other[0] else CheckpointError)(f"rank {rank}: {other[1]}")

    def _take_over(self, checkpoint: Checkpoint) -> None:
        saved = SavedRank.of(checkpoint)
        own = min(saved.num_batches, saved.epoch_step * self._config.accumulation_steps)
        if saved.epoch_batches not in (0, own):  # of an elastic run: a step was one of several ranks
            raise CheckpointError(
                f"the checkpoint of step {checkpoint.round_id} lies in the middle of epoch {saved.epoch} of an elastic "
                f"run, with {saved.epoch_batches} batches in {saved.epoch_step} steps; of one rank they would be "
                f"{own}. Go on with elastic.min_world, or choose another checkpoint.dir"
            )
        self._training.state.restore(checkpoint, self._group.rank)
        self._position = position_of(checkpoint)
        self._position.epoch_batches = 0
        self._run_id = int(saved.run_id, 16)
        self._restored_batches = saved.num_batches
        self._report = saved.report

    # An epoch

    async def _begin_epoch(self) -> EpochPlan:
        stepper = self._part.stepper
        self._clock = EpochClock(wait_before_s=stepper.wait_s)
        self._skipped_before = stepper.skipped_exchanges - self._position.skipped_exchanges
        return await self._make_plan()

    async def _make_plan(self) -> EpochPlan:
        own = await self._own_batches()
        counts = await self._group.all_gather_object(
            "worker/batches", own, round_id=self.step, timeout_s=self._config.timeouts.collective_s
        )
        return EpochPlan.of(counts, self._config.accumulation_steps)

    async def _one_step(self, plan: EpochPlan) -> None:
        position, clock, started_s = self._position, self._clock, time.perf_counter()
        self._probe.reached("before_step", position.step + 1)
        self._note_step()
        with self.profile.step(position.step) as measured:
            applied = await self._part.stepper.step(plan, position, measured)
        position.step += 1
        self._probe.reached("after_step", position.step)
        position.epoch_step += 1
        await self._count(applied)
        await self._count_votes_if_due()
        await self._after_steps(applied)
        if self._part.votes.after_steps:
            self._vote("step", position.step)
        clock.steps += 1
        clock.sent_bytes += measured.sent_bytes
        clock.step_s += time.perf_counter() - started_s
        every = self._hash_every
        if every and (not self._part.is_compared or position.step % every == 0):
            await self._compare()
        wait_s = self._part.stepper.wait_s - clock.wait_before_s
        await self._report_progress_if_due(
            steps=clock.steps, seconds=clock.step_s, wait_s=wait_s, bytes_out=clock.sent_bytes
        )

    def _note_step(self) -> None:
        """Note for observers in which step this rank is."""
        self._group.at_step(self._position.step, self._position.epoch, mean_ranks=self.mean_ranks or 0.0)

    async def _end_steps(self) -> None:
        await self._drain()
        await self._count_votes()

    async def _drain(self) -> None:
        """Apply what is on its way."""
        started_s, (sent_before, _) = time.perf_counter(), self.profile.exchanged
        applied = await self._part.stepper.drain()
        self._clock.sent_bytes += self.profile.exchanged[0] - sent_before
        await self._count(applied)
        await self._after_steps(applied)
        self._clock.step_s += time.perf_counter() - started_s

    # Callbacks

    async def _after_steps(self, applied: Sequence[TrainingStep]) -> None:
        """Call those that follow steps, if there are any. Whether one wants the run to end is said in the next vote."""
        if applied and self._callbacks.have("on_step"):
            await self._compute.run(self._call_after, applied)

    def _call_after(self, applied: Sequence[TrainingStep]) -> None:
        for step in applied:
            self._wants_end |= bool(self._callbacks.call("on_step", self._training.report_of(step)))

    def _vote(self, name: str, step: int) -> None:
        self._part.votes.send_vote(self._wants_end, name, step=step, wants_rest=self._wants_rest)
        self._wants_end = False

    @property
    def _wants_rest(self) -> bool:
        """Whether this rank would have all stop between two steps."""
        return False

    async def _after_epoch(self, report: EpochReport) -> None:
        if not self._part.votes.after_epochs:
            return
        await self._call_after_epoch(report)
        self._vote("epoch", report.step)
        await self._count_votes()

    async def _count_votes_if_due(self) -> None:
        """Called after each step, before its own vote."""
        await self._count_votes()

    async def _count_votes(self) -> None:
        """Find out whether callbacks of any rank have wanted the run to end, in the newest vote."""
        if await self._part.votes.counted() and not self._is_stopped:
            self._is_stopped = True
            self._log.info("callbacks end the run", step=self.step, ranks=self._part.votes.ranks)
        self._is_resting |= self._part.votes.rest

    async def _count(self, applied: Sequence[TrainingStep]) -> None:
        """Steps that have changed the model, or were skipped."""
        for step in applied:
            if step.skipped_by is None:
                self._position.batches += step.batches
                self._position.skipped_in_row = 0
            else:
                await self._note_skipped(step, step.skipped_by)
        if self._part.stepper.take_diverged():
            of_ranks = await self._group.all_gather_object(
                "worker/skipped",
                self._position.skipped_in_row,
                round_id=self.step,
                timeout_s=self._config.timeouts.collective_s,
            )
            limit = self._config.max_nonfinite_steps
            if ranks := [rank for rank, count in enumerate(of_ranks) if count >= limit]:
                raise self._diverged(f"the last {max(of_ranks)} steps in a row were skipped", ranks)

    async def _note_skipped(self, step: TrainingStep, ranks: Sequence[int]) -> None:
        """A step was taken back. Raises TrainingDiverged: not for the first time, and all ranks know."""
        config, position = self._config, self._position
        position.skipped += 1
        position.skipped_in_row += 1
        self.skipped_steps += 1
        in_a_row = position.skipped_in_row
        is_own = bool(ranks) and not self._are_equal  # of this rank alone: the others learn of it when the epoch ends
        if not ranks:  # the sum does not tell; this exchange is made in steps that are skipped only
            is_finite = await self._compute.run(step.own_is_finite)
            of_ranks = await self._group.all_gather_object(
                "worker/finite", [is_finite, in_a_row], round_id=position.step, timeout_s=config.timeouts.collective_s
            )
            ranks = [rank for rank, (is_finite, _) in enumerate(of_ranks) if not is_finite]
            in_a_row = max(count for _, count in of_ranks)  # with steps of their own they differ
        tells = self._group.rank in (0, *ranks)  # the others have it in their log for whoever looks for it
        (self._log.warning if tells else self._log.info)(
            "step skipped: NaN or infinity",
            step=step.number + 1,
            by_ranks=list(ranks),
            in_a_row=in_a_row,
            limit=config.max_nonfinite_steps or None,
        )
        if not is_own and 0 < config.max_nonfinite_steps <= in_a_row:
            raise self._diverged(f"the last {in_a_row} steps in a row were skipped", ranks)

    def _check_progress(self, finished: bool, skipped: Sequence[int], in_a_row: Sequence[int]) -> None:
        """A run whose last epoch changed nothing has not succeeded, nor one where a rank skips all that it does.

        Args:
            skipped, in_a_row: of each rank: steps of the epoch that it skipped, and how many the last ones are.

        Raises:
            TrainingDiverged: the same on all ranks.
        """
        config, position = self._config, self._position
        if not config.max_nonfinite_steps:
            return
        ends = (finished and position.epoch + 1 >= config.epochs) or self._ends_early
        for what, limit, counts in (
            (f"the last {max(in_a_row)} steps in a row were skipped", config.max_nonfinite_steps, in_a_row),
            ("all steps of the last epoch were skipped", position.epoch_step if ends else 0, skipped),
        ):
            ranks = [rank for rank, count in enumerate(counts) if 0 < limit <= count]
            if ranks:
                raise self._diverged(what, ranks if len(ranks) < len(counts) else ())

    def _diverged(self, what: str, ranks: Sequence[int]) -> TrainingDiverged:
        config = self._config
        whose = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "some rank"
        optimizer = self._training.optimizer
        limit = "lower optimizer.clip_norm" if optimizer.clip_norm is not None else "set optimizer.clip_norm"
        return TrainingDiverged(
            self.step,
            f"{what}, for NaN or infinity in the loss or the gradients of {whose}",
            f"Look at the data and the loss there, lower optimizer.lr ({optimizer.lr:g}), or {limit}. The "
            f"parameters are those of the last step that was not skipped. max_nonfinite_steps "
            f"({config.max_nonfinite_steps}) says how many may be, 0: any number",
            ranks,
        )

    async def _check_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing that is not finite is reported as a model, or saved. ``tensors``: equal on all ranks, so that all
        raise TrainingDiverged, or none."""
        if not await self._compute.run(self._training.state.has_stayed_finite, tensors):
            raise TrainingDiverged(
                self.step,
                "the parameters or buffers have NaN or infinity",
                f"Lower optimizer.lr ({self._training.optimizer.lr:g}), or set optimizer.clip_norm; checkpoints from "
                f"before are as they were",
            )

    async def _compare(self) -> int:
        """The hash of the parameters. Raises ReplicasDiverged: another rank's differs, and is to be compared."""
        self._part.is_compared = True
        return await (self._part.replicas.check(self.step) if self._config.hash_every else self._part.replicas.hash())

    async def _report_epoch(self, finished: bool) -> EpochReport:
        position, clock = self._position, self._clock
        await self._compute.run(self._training.note_sums, position)
        if self._are_equal:
            await self._part.replicas.broadcast_buffers(position.step)
            mean = None
            await self._check_model(model_tensors(self.model))
        else:
            mean = await self._part.replicas.mean(position.step)
            await self._check_model(mean.tensors)
            await self._compute.run(self._show, mean.tensors)
        own = [*await self._evaluate(), position.skipped_in_row]
        of_ranks = await self._group.all_gather_object(
            "worker/epoch", own, round_id=position.step, timeout_s=self._config.timeouts.collective_s
        )
        tallies, in_a_row = [one[:-1] for one in of_ranks], [one[-1] for one in of_ranks]
        self._params_hash = await self._compare()
        if mean is not None:
            await self._compute.run(self._show, None)
        self._check_progress(finished, [tally[-1] for tally in tallies], in_a_row)
        steps = max(1, clock.steps)
        return self._reported(
            finished,
            tallies,
            model="equal" if mean is None else "mean",
            consensus_distance=None if mean is None else mean.distance,
            skipped_exchanges=self._skipped_exchanges,
            density=self._training.algorithm.density,
            step_s_mean=clock.step_s / steps,
            wait_s_mean=(self._part.stepper.wait_s - clock.wait_before_s) / steps,
            bytes_out_per_step=clock.sent_bytes / steps,
            seconds=time.perf_counter() - clock.started_s,
        )

    def _show(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Put these tensors into the model, and this rank's own aside; None: those back. On the compute thread."""
        if tensors is not None:
            self._set_aside = self._part.replicas.exchange_with(tensors)
        elif self._set_aside is not None:
            self._part.replicas.exchange_with(self._set_aside)
            self._set_aside = None

    async def _end_as_mean(self) -> None:
        """From now on the model is the mean of all ranks'."""
        mean = await self._part.replicas.mean(self.step)
        await self._compute.run(self._part.replicas.exchange_with, mean.tensors)
        self._params_hash = await self._compare()

    # Checkpoints

    async def _save(self) -> None:
        """All exchanges of the step have ended. Nobody saves before all are here, nor goes on before all have saved."""
        state, position = self._state, self._position
        if state is None:
            return
        started_s = time.perf_counter()
        await self._drain()
        if position.epoch_step:
            await self._compute.run(self._training.note_sums, position)
            position.skipped_exchanges = self._skipped_exchanges
        model = await self._model_to_save()
        self._note_mean_loss()
        await self._barrier("worker/save")
        # Within an epoch its place means these batches; between two it means nothing, and there may be no next one.
        num_batches = await self._compute.run(self._training.num_batches, position.epoch) if position.epoch_step else 0
        self._probe.reached("before_save", position.step)
        size = await self._compute.run(
            state.save,
            self._run_id,
            position,
            self.model,
            RunTensors(self._training.state.own(), self._training.state.shared(), model),
            num_batches=num_batches,
            report=self._report,
        )
        self._probe.note("saved", step=position.step)
        self._probe.reached("after_save", position.step)
        await self._barrier("worker/saved")
        await self._compute.run(state.prune)
        self.profile.add_span("checkpoint", started_s, time.perf_counter())
        self._log.info("checkpoint", step=position.step, bytes=size)

    async def _model_to_save(self) -> Mapping[str, Tensor]:
        """Return the model of all ranks, or their mean. Raises TrainingDiverged: it has NaN or infinity."""
        model: Mapping[str, Tensor] = model_tensors(self.model)
        if self._are_equal:
            await self._part.replicas.broadcast_buffers(self.step)
        else:
            model = (await self._part.replicas.mean(self.step)).tensors
        await self._check_model(model)
        return model

    @property
    def _skipped_exchanges(self) -> int:
        """Exchanges of weights in this epoch whose results were dropped, once it has begun."""
        return self._part.stepper.skipped_exchanges - self._skipped_before

    def _note_mean_loss(self) -> None:
        """Note the newest loss where the algorithm goes by it, for who goes on from this position."""
        if self._training.algorithm.needs_loss:
            loss = self._part.stepper.loss.value
            self._position.mean_loss = None if math.isnan(loss) else loss

    async def _barrier(self, name: str) -> None:
        await self._group.barrier(name, round_id=self.step, timeout_s=self._config.checkpoint.timeout_s)
