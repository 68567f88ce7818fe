"""A worker whose ranks come and go while training goes on.

    async with gradbus.connect(job="mnist") as bus:
        place = gradbus.ElasticPlace(bus=bus, number=0, founders=3)     # of one that joins later: founders=0
        worker = gradbus.ElasticWorker(place, task, config)
        async for report in worker.epochs(): ...

Each generation of ranks (:mod:`gradbus.runtime.collectives.generations`) trains as a Worker does. It begins with an
agreement on where training stands: the newest step that any of its ranks has applied. A rank that lacks it, as it has
just joined or as a rank was lost in the midst of the step, gets the state of one that has it. So a step that one rank
of the next generation has applied is applied by all, and one that none has is computed anew, from the same place in the
data.

The others do not wait for that. While its copy is on the way (:mod:`.joining`), a rank takes part in the exchanges with
gradients of zero, which do not count, and keeps the results. When the copy is there, which is of the step at which the
generation has begun, it applies to it what the others have applied since: so it has their bits. It votes that it is
ready, and after the same step all divide the data anew, with it. No step is sent twice for that.

Where weights are exchanged, ranks are on their own between two exchanges, and all this goes by exchanges: they come
and go after one. A rank that joins begins its first step when its copy is there; the others meet it in the next one.

With a delay exchanges are on their way when a generation ends. Where ranks rest, all of them wait for these and apply
them early. Where one is lost, some ranks may have applied more of them than others at the same step: so it is also
their number that tells who has the newest state. What none has applied is dropped by all (see :mod:`.weights`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from gradbus.actors.data_parallel.algorithm import MakeAlgorithm, place_in
from gradbus.actors.data_parallel.callbacks import StopVotes
from gradbus.actors.data_parallel.elastic_checkpoints import ElasticCheckpoints, elastic_position
from gradbus.actors.data_parallel.elastic_plan import ElasticPlan
from gradbus.actors.data_parallel.epoch_plan import EpochPlan
from gradbus.actors.data_parallel.generation_start import POSITION_FIELDS, GenerationStart, equal_traits
from gradbus.actors.data_parallel.joining import BrokenCopy
from gradbus.actors.data_parallel.replicas import Replicas, describe_layout
from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.data_parallel.state import Position, SavedRank, position_of
from gradbus.actors.data_parallel.state_copies import HeldState, StateCopies
from gradbus.actors.data_parallel.task import DataParallelTask
from gradbus.actors.data_parallel.worker import GroupPart, Worker
from gradbus.runtime.algorithms.base import Place, Step
from gradbus.runtime.bus.bus import Bus, check_bus
from gradbus.runtime.collectives import Group
from gradbus.runtime.collectives.generations import (
    LOST,
    ElasticLimits,
    Generations,
    NoGeneration,
    WaitedInVain,
    open_generations,
)
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.config.timeouts import ELASTIC_LEASE_S, log_timeouts, parallel_timeouts
from gradbus.runtime.errors import ConfigError, ReplicasDiverged
from gradbus.runtime.misuse import check_instance

MAX_RECORDED_BYTES = 1 << 30
"""Of the steps that a rank keeps while its copy of the state is on the way; before there are more, all wait for it."""
VOTE_EVERY_S = 0.05
"""Where steps are shorter, ranks vote after so much time on whether one joins or leaves: after each of them, a vote
would cost much of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticPlace:
    """Tells how a process comes to a run whose ranks come and go.

    Attributes:
        bus: from :func:`gradbus.connect`.
        number: of this process, which no other one that runs has. Founder 0 looks for a checkpoint.
        founders: number of processes that begin the run, with the numbers 0 .. founders - 1, of which this is one.
            0: it joins, as one that takes the place of another does.
    """

    bus: Bus
    number: int
    founders: int = 0


@dataclass(frozen=True, slots=True)
class _BeforeGroup:
    """The place of a process that is in no group yet: the only one that it knows of."""

    bus: Bus
    rank: int
    world: int
    members: tuple[()] = ()


class ElasticWorker(Worker):
    """One process of a data-parallel run whose ranks come and go. It runs once."""

    _call = "ElasticWorker(place, task, config)"

    def __init__(
        self,
        place: ElasticPlace,
        task: DataParallelTask,
        config: DataParallelConfig,
        *,
        on_open: Callable[[], object] = lambda: None,
        make_algorithm: MakeAlgorithm | None = None,
        callbacks: Sequence[Any] = (),
        fail_at: str | None = None,
    ) -> None:
        """A worker that has not started.

        Args:
            place: of this process.
            task: model, data and loss. Every process has all the data.
            config: the rules, with ``elastic.min_world``.
            on_open, make_algorithm, callbacks, fail_at: as for a Worker.

        Raises:
            ConfigError: the group is not elastic by its settings; place, task or config is another kind of thing; or
                the bus is closed.
        """
        advice = "Write gradbus.ElasticPlace(bus=bus, number=0, founders=3), and keep the order of the arguments"
        check_instance(self._call, "place", place, ElasticPlace, advice)
        check_bus(self._call, "place.bus", place.bus)
        advice = "Write gradbus.DataParallelConfig(elastic={'min_world': 2}), and keep the order of the arguments"
        check_instance(self._call, "config", config, DataParallelConfig, advice)
        if not config.elastic.is_on:
            raise ConfigError("an ElasticWorker needs elastic.min_world, the ranks that training goes on with at least")
        before = cast(Group, _BeforeGroup(place.bus, place.number, place.number + 1))
        super().__init__(
            before, task, config, on_open=on_open, make_algorithm=make_algorithm, callbacks=callbacks, fail_at=fail_at
        )
        self._place = place
        self._is_leaving = False
        self._has_opened = self._has_ended = False
        self._data: dict[str, Any] = {}  # what must be equal of the data
        self._checkpoints = ElasticCheckpoints(config)
        self._plan: ElasticPlan | None = None
        self._held = HeldState()
        self._generations: Generations | None = None

    @property
    def _copies(self) -> StateCopies:
        """Return the copies of the state that are on their way in this generation."""
        return self._held.copies

    def _check_group(self, group: Group) -> None:
        """There is none yet: the constructor checks the place."""

    @property
    def generations(self) -> Generations | None:
        """Return who is in, for those who show it; None before the start."""
        return self._generations

    @property
    def progress(self) -> str:
        """Return where the run is, and who takes part."""
        found = self._generations
        if found is None or not found.number:
            return "waits for its first generation"
        members = ", ".join(str(member.number) for member in found.members)
        spare = f", {found.waiting} more wait" if found.waiting else ""
        waits = f"; waits for {found.waits_for}" if found.waits_for else ""
        share = "" if (mean := self.mean_ranks) is None else f", {mean:.2f} a step in this epoch"
        return f"step {self.step}, generation {found.number}: processes {members}{share}{spare}{waits}"

    @property
    def mean_ranks(self) -> float | None:
        """Return how many ranks a step of this epoch had, in the mean: who is a member need not take part in it, as one
        that gets its copy of the state. None: there was no step yet."""
        plan, steps = self._plan, self._position.epoch_step
        return (
            plan.batches_done(steps) / (steps * self._config.accumulation_steps) if plan is not None and steps else None
        )

    @property
    def has_left(self) -> bool:
        """Whether this rank was asked to leave before the run had come to its end."""
        return self._is_leaving and not self._is_done

    @property
    def has_ended(self) -> bool:
        """Whether this rank was one of those that have come to the end of the run."""
        return self._has_ended

    def leave(self) -> None:
        """Have this rank leave after the next vote: :meth:`epochs` ends then, and no step is lost. The vote is of its
        step or, where steps are short, of one some ``VOTE_EVERY_S`` later. Where weights are exchanged it goes with the
        next exchange, and with a delay, in which one vote is on its way at a time, it counts so many steps later."""
        self._is_leaving = True
        if self._generations is not None:
            self._generations.leave()

    async def epochs(self) -> AsyncGenerator[EpochReport, None]:
        """As those of a Worker. They end early where this rank leaves, or the others have come to the end.

        Raises:
            CheckpointError: the run has come to its end, and this rank could not write the last checkpoint. A fault
                before that is a warning, and training goes on.
            WaitedInVain: there were too few ranks, or no majority, for ``elastic.wait_s``.
            And as those of a Worker.
        """
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._running())
            stack.enter_context(self._checkpoints)
            traits = await self._prepare()
            elastic, timeouts = self._config.elastic, self._config.timeouts
            limits = ElasticLimits(
                min_world=elastic.min_world,
                max_world=elastic.max_world,
                wait_s=elastic.wait_s,
                collective_s=timeouts.collective_s,
                last_call_s=math.inf if elastic.last_call_s is None else elastic.last_call_s,
            )
            async with open_generations(
                self._place.bus, number=self._place.number, founders=self._place.founders, limits=limits, traits=traits
            ) as self._generations:
                if self._is_leaving:
                    self._generations.leave()
                try:
                    while not self._has_ended:  # to be done is not enough: the others may lack the last step
                        async with contextlib.aclosing(self._one_generation(self._generations)) as reports:
                            async for report in reports:
                                yield report
                except NoGeneration as error:
                    self._log.info("no more generations", reason=str(error), step=self.step)
                await self._call_at_end()
                if self._has_ended and self._checkpoints.fault is not None:
                    raise self._checkpoints.fault

    async def _one_generation(self, generations: Generations) -> AsyncGenerator[EpochReport, None]:
        """Train as a rank of the next generation, until that is over."""
        numbers: list[int] = []  # of the members
        try:
            async with generations.next_group() as group:
                numbers = [member.number for member in generations.members]
                await self._begin(group, generations.number, numbers)
                if self._is_done:  # who was to write the last checkpoint may have been lost, or a rank in the last step
                    await self._drain_all()
                    await self._save()
                while not (self._is_done or self._is_resting):
                    report = await self._one_epoch()
                    if report is not None:
                        yield report
                    await self._divide_anew()
                await self._stand_still()
                if self._is_done:
                    if self._are_equal:
                        self._params_hash = await self._compare()
                    else:
                        await self._end_as_mean()
                    generations.end()
                    self._has_ended = True
                else:
                    generations.rest()
        except WaitedInVain:
            raise
        except LOST as error:
            self._probe.note("lost", generation=self._held.generation, step=self.step, error=type(error).__name__)
            self._log.warning("generation lost", generation=generations.number, step=self.step, error=str(error))
            await self._give_up_step()
            generations.suspect(error)
        except BrokenCopy as error:
            number = numbers[error.source]
            if not self._held.note_broken(number):
                raise
            self._log.warning("state taken again from another process", broken_copy_of=number, error=str(error))
            await self._give_up_step()
            generations.rest()
        finally:
            await self._held.close()

    # The start

    async def _prepare(self) -> dict[str, int]:
        """Load everything. Returns what must be equal on all members, as hashes."""
        config, bus = self._config, self._place.bus
        log_timeouts(self._log, parallel_timeouts(config, lease_s=bus.remote_lease_s))
        if bus.remote_lease_s is not None and bus.has_default_lease:
            self._log.warning(
                "lease is that of a fixed world",
                lease_s=bus.remote_lease_s,
                effect="when another machine is lost, all stand still for so long",
                do=f"open the bus with lease_s={ELASTIC_LEASE_S:g}, or with another one that you choose",
            )
        training = await self._load(Place(self._place.number, self._place.number + 1))
        if config.checkpoint.dir is not None and self._place.number == 0 and self._place.founders:
            await self._compute.run(self._checkpoints.find, training)
        self._data = await self._compute.run(training.data_facts)
        return equal_traits(self.model, self._shared_settings(), self._data)

    # The beginning of a generation

    async def _begin(self, group: Group, generation: int, numbers: Sequence[int]) -> None:
        """Become a rank of this group, and have the newest state that one of its ranks has. ``numbers``: of its
        processes, by rank."""
        config, compute, training = self._config, self._compute, self._training
        self._group = group
        self._is_resting, self._in_group = False, None
        timeout_s = config.timeouts.collective_s
        replicas = Replicas(group, compute, self.model, timeout_s=timeout_s, probe=self._probe)
        await compute.run(training.regroup, place_in(group))
        found = self._checkpoints.found
        stands = self._position if found is None else position_of(found)
        hello = {
            "settings": config.shared({"name": training.label.name, **training.label.options}),
            **self._held.hello(), "is_stopped": self._is_stopped,
            "step": stands.step, "ended_exchanges": stands.ended_exchanges, "epoch": stands.epoch,
            "schedule_steps": training.optimizer.schedule_steps, "data": self._data,
            "begins": self._generations is not None and self._generations.has_been_in_all and not self._place.number,
            "callbacks": bool(self._callbacks), "layout": describe_layout(self.model) if generation == 1 else [],
        }  # fmt: skip
        hellos = await group.all_gather_object("elastic/hello", hello, timeout_s=config.timeouts.join_s)
        start = GenerationStart.of(hellos, numbers, generation)
        self._is_stopped = start.is_stopped
        await compute.run(self._start, start.schedule_steps, group.world)
        await compute.run(training.begin)
        before = self._position
        if start.is_apart or not start.has_state:
            await self._share_position(start.source)
        copies = StateCopies(
            group, compute, training, generation, timeout_s=timeout_s, sends_to=start.sends_to, stood=before
        )
        self._held.expect(copies, is_mixed=bool(training.algorithm.shared))
        if not start.has_state:
            await self._get_state(start.source, replicas)
        await copies.begin()
        if group.rank not in copies.follows:
            self._held.note_newest()
            await compute.run(training.begin)  # what was loaded may lack it
        await compute.run(self.profile.begin_run, f"{self._run_id:016x}")
        votes = StopVotes(
            group,
            timeout_s=timeout_s,
            after_steps=True,  # not only for callbacks
            after_epochs=start.has_callbacks,
        )
        self._in_group = GroupPart(votes, replicas, self._make_stepper())
        self._probe.note(
            "started",
            run=f"{self._run_id:016x}",
            rank=group.rank,
            world=group.world,
            step=self.step,
            generation=generation,
        )
        self._log.info(
            "generation begins",
            generation=generation,
            rank=group.rank,
            world=group.world,
            step=self.step,
            state_of=start.source,
            without_state=sorted(copies.follows),
        )
        if not self._are_equal and group.rank in copies.follows:
            await self._catch_up()  # it trains by itself from there on; the others meet it in their next exchange
        if not self._are_equal:
            copies.start_data(set(copies.follows))
        await compute.run(self._checkpoints.hold)
        votes.begin_at(self.step)
        if not self._has_opened:
            self._has_opened = True
            self._on_open()

    def _start(self, schedule_steps: int, world: int) -> None:
        """Begin the schedule, and restore what was saved. On the compute thread, once."""
        config, training = self._config, self._training
        if training.optimizer.schedule_steps:
            return
        steps = schedule_steps or ElasticPlan.steps_of_run(config, training.num_batches(0), world)
        training.optimizer.start_schedule(steps)
        if (found := self._checkpoints.take_found()) is not None:
            saved = SavedRank.of(found)
            training.state.restore(found, self._group.rank)
            self._position = elastic_position(found, config, training)
            self._run_id = int(saved.run_id, 16)
            self._report = saved.report

    async def _share_position(self, source: int) -> None:
        """All ranks stand where rank ``source`` does."""
        group, position = self._group, self._position
        if not self._run_id:
            self._run_id = int.from_bytes(os.urandom(8), "little")
        common = {name: getattr(position, name) for name in POSITION_FIELDS} | {"run_id": self._run_id}
        common = await group.broadcast_object("elastic/position", common, root=source)
        if group.rank == source:
            return
        self._run_id = common.pop("run_id")
        kept = asdict(position) if common["epoch"] == position.epoch else {}
        self._position = Position(**(kept | common))

    async def _get_state(self, source: int, replicas: Replicas) -> None:
        """All ranks get the state of rank ``source`` at once: nobody else has one to go on with."""
        tensors = await self._compute.run(self._copies.state)
        tensors = await replicas.broadcast_named("elastic/state", tensors, root=source)
        if self._group.rank != source:
            await self._compute.run(self._copies.take, tensors)

    async def _catch_up(self) -> None:
        """Wait for the copy of the state, and apply to it what the others have applied since."""
        step, waited_s = self.step, await self._copies.load()
        if waited_s is not None:
            self._held.note_newest()
            self._log.info("state is there", step=step, waited_s=round(waited_s, 3))

    # Steps

    @property
    def _wants_rest(self) -> bool:
        if self._is_leaving or self._training.recorded_bytes > MAX_RECORDED_BYTES:
            return True
        return self._generations is not None and self._generations.change_is_wanted

    async def _make_plan(self) -> EpochPlan:
        position = self._position
        total = await self._compute.run(self._training.num_batches, position.epoch)
        self._plan = ElasticPlan.rest_of(
            total,
            self._group.world,
            self._config.accumulation_steps,
            done=position.epoch_batches,
            first_step=position.epoch_step,
            follows=self._copies.follows,
        )
        return self._plan

    async def _one_step(self, plan: EpochPlan) -> None:
        await super()._one_step(plan)
        if self._copies.is_there:
            await self._catch_up()
        elif not self._are_equal and not self._training.delay_steps:
            await self._count_votes()  # at once: so they come and go where the exchange has made weights equal

    def _note_step(self) -> None:
        """As a Worker does. A rank that gets no data yet is in no step: so observers tell it from the others."""
        if self._group.rank not in self._copies.follows:
            super()._note_step()

    def _vote(self, name: str, step: int) -> None:
        if name == "step" and not self._is_vote_due(step):
            return
        votes, copies, every = self._part.votes, self._copies, 1
        if self._are_equal and not votes.after_epochs:  # what a callback wants, the run does one step later
            every = votes.steps_in(VOTE_EVERY_S, step)
        votes.send_vote(
            self._wants_end,
            name,
            step=step,
            wants_rest=self._wants_rest,
            is_ready=self._group.rank in copies.follows and copies.held is None,
            every=every,
        )
        self._wants_end = False

    def _is_vote_due(self, step: int) -> bool:
        """Whether the ranks vote after this step, equal on all of them. They do after the first and the last step of an
        epoch, so that what takes time in between makes nobody wait longer, and after each step while a copy is on its
        way, as so many steps are kept. Between two exchanges of weights ranks are on their own. A vote whose exchange
        is not applied yet is not counted: the next one waits for that, as a rank has one vote on its way."""
        votes, plan, epoch_step = self._part.votes, self._plan, self._position.epoch_step
        if not self._are_equal:
            alone = self._group.world == 1
            is_due = alone or self._training.algorithm.is_due(Step(step - 1, self._position.epoch))
            return is_due and not votes.is_pending
        is_at_end = plan is not None and plan.is_at_end(epoch_step)
        return is_at_end or bool(self._copies.follows) or step - votes.newest_at >= votes.every

    async def _count_votes_if_due(self) -> None:
        """As a Worker does. With a delay nobody waits for a vote before the exchange of its step is applied."""
        if self.step - self._part.votes.newest_at >= self._training.delay_steps:
            await self._count_votes()

    async def _count_votes(self) -> None:
        await super()._count_votes()
        self._is_resting |= not self._copies.follows.isdisjoint(self._part.votes.ready)

    async def _divide_anew(self) -> None:
        """Ranks that have got their copy have said so, after the same step on all ranks: from here on they get data."""
        votes, copies = self._part.votes, self._copies
        if copies.follows.isdisjoint(votes.ready):
            return
        copies.start_data(votes.ready)
        self._is_resting = votes.rest
        await self._compute.run(self._note_place)
        if self._config.hash_every:
            await self._compare()

    async def _compare(self) -> int:
        """As a Worker does. A rank that has joined, and differs, takes the state again from another one. Those whose
        copy is still on its way have other parameters, and are left out.

        Raises:
            BrokenCopy: on that rank alone: the others learn that it has left the generation.
        """
        rank, held = self._group.rank, self._held
        try:
            found = await super()._compare()
        except ReplicasDiverged as error:
            found = error.hashes[rank]
            if (spoiled := held.spoiled(error.hashes)) is None:
                raise
            if rank in spoiled:
                held.lose()
                raise BrokenCopy(str(error), source=held.copies.source or 0) from error
            if spoiled:
                return found
        held.note_equal(rank)
        return found

    @property
    def _hash_every(self) -> int:
        return 0 if self._copies.follows else super()._hash_every

    async def _drain(self) -> None:
        """As a Worker does. All get the state, too, but where the ranks only divide the data anew and go on."""
        if self._is_resting:
            await self._count_votes()  # the newest one may want more
        is_done = self._plan is None or self._position.epoch_step >= self._plan.steps or self._ends_early
        if self._is_resting and not (is_done or self._part.votes.rest):
            await super()._drain()
        else:
            await self._drain_all()

    async def _drain_all(self) -> None:
        """Wait for what is on its way: what is to come is of ranks that all have the state."""
        await super()._drain()
        await self._copies.wait_for_all()
        await self._catch_up()
        await self._copies.all_sent()

    def _note_place(self) -> None:
        """Note where the epoch stands, for ranks of another number, and the loss, for other steppers. On the compute
        thread."""
        position, plan = self._position, self._plan
        if self._in_group is not None:  # else a rank was lost before the first step of the generation
            self._note_mean_loss()
            position.ended_exchanges = self._in_group.stepper.ended_exchanges
        if plan is not None and position.epoch_step:
            position.epoch_batches = plan.batches_done(position.epoch_step)
            position.skipped_exchanges = self._skipped_exchanges
            self._training.note_sums(position)
        self._plan = None

    async def _stand_still(self) -> None:
        """Between two steps, with nothing on its way."""
        await self._part.close()
        await self._copies.close()
        await self._compute.run(self._note_place)

    async def _give_up_step(self) -> None:
        """Somebody was lost: what is not applied yet leaves no trace, and is computed anew."""
        if self._in_group is not None:
            self._wants_end |= self._in_group.votes.cancel()  # said again in the next vote
            await self._in_group.stepper.close()
        await self._compute.run(self._show, None)
        await self._compute.run(self._training.give_up_step, self.step)
        await self._held.close()
        await self._compute.run(self._note_place)
        if (stood := self._held.give_up()) is not None:
            self._position = stood
            await self._compute.run(self._training.drop_recording)

    # Checkpoints

    async def _save(self) -> None:
        """Rank 0 saves what is equal on all ranks: what each keeps for itself is lost with its process anyway."""
        if self._config.checkpoint.dir is None:
            return
        position, checkpoints = self._position, self._checkpoints
        await self._drain_all()
        plan = self._plan
        await self._compute.run(self._note_place)
        self._plan = plan
        model = await self._model_to_save()
        self._probe.reached("before_save", position.step)
        if self._group.rank == 0:
            size = await self._compute.run(
                checkpoints.save, self._run_id, position, self._training, model, self._report
            )
            if size is None:  # a full disk, for one
                fault = str(checkpoints.fault)
                self._log.warning("no checkpoint: training goes on without", step=position.step, error=fault)
            else:
                self._log.info("checkpoint", step=position.step, bytes=size)
        self._probe.reached("after_save", position.step)
        await self._barrier("worker/saved")
        if self._group.rank != 0:
            checkpoints.leave_to_another()
