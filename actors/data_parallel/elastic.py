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
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from torch import Tensor

from gradbus.actors.data_parallel.algorithm import MakeAlgorithm
from gradbus.actors.data_parallel.callbacks import StopVotes
from gradbus.actors.data_parallel.elastic_plan import ElasticPlan
from gradbus.actors.data_parallel.replicas import (
    Replicas,
    check_equal,
    check_equal_layouts,
    describe_layout,
    model_tensors,
)
from gradbus.actors.data_parallel.report import EpochReport
from gradbus.actors.data_parallel.state import Position, RunTensors, SavedRank, WorkerState, position_of, tensors_below
from gradbus.actors.data_parallel.task import DataParallelTask
from gradbus.actors.data_parallel.training import EpochPlan
from gradbus.actors.data_parallel.worker import Worker
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.checkpoint import Checkpoint
from gradbus.runtime.collectives import Group, GroupStats
from gradbus.runtime.collectives.generations import LOST, ElasticLimits, Generations, NoGeneration, open_generations
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CheckpointError, CollectiveError, ConfigError
from gradbus.runtime.wire.control import PROTOCOL
from gradbus.runtime.wire.frames import VERSION

# What ranks of one generation that stand at the same step have in common of a position; the rest is each one's own.
_COMMON = ("step", "epoch", "epoch_step", "epoch_batches", "skipped", "skipped_in_row", "mean_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticPlace:
    """How a process comes to a run whose ranks come and go.

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

    rank: int
    world: int
    members: tuple[()] = ()

    @property
    def stats(self) -> GroupStats:
        """No traffic."""
        return GroupStats(0, 0, Counter(), 0, 0)


class ElasticWorker(Worker):
    """One process of a data-parallel run whose ranks come and go. It runs once."""

    def __init__(
        self, place: ElasticPlace, task: DataParallelTask, config: DataParallelConfig, *,
        on_open: Callable[[], object] = lambda: None, make_algorithm: MakeAlgorithm | None = None,
        callbacks: Sequence[Any] = (), fail_at: str | None = None,
    ) -> None:  # fmt: skip
        """A worker that has not started.

        Args:
            place: of this process.
            task: model, data and loss. Every process has all the data.
            config: the rules, with ``elastic.min_world``.
            on_open, make_algorithm, callbacks, fail_at: as for a Worker.

        Raises:
            ConfigError: the group is not elastic by its settings.
        """
        if not config.elastic.is_on:
            raise ConfigError("an ElasticWorker needs elastic.min_world, the ranks that training goes on with at least")
        before = cast(Group, _BeforeGroup(place.number, place.number + 1))
        super().__init__(
            before, task, config, on_open=on_open, make_algorithm=make_algorithm, callbacks=callbacks, fail_at=fail_at
        )
        self._place = place
        self._is_leaving = False
        self._has_opened = self._has_ended = False
        self._synced = -1  # the generation whose state this rank has; -1: none but that of its own model
        self._schedule_steps = 0
        self._saved: Checkpoint | None = None
        self._plan: ElasticPlan | None = None
        self._generations: Generations | None = None

    @property
    def generations(self) -> Generations | None:
        """Who is in, for those who show it; None before the start."""
        return self._generations

    @property
    def progress(self) -> str:
        """Where the run is, and who takes part."""
        found = self._generations
        if found is None or not found.number:
            return "waits for its first generation"
        members = ", ".join(str(member.number) for member in found.members)
        spare = f", {found.waiting} more wait" if found.waiting else ""
        waits = f"; waits for {found.waits_for}" if found.waits_for else ""
        return f"step {self.step}, generation {found.number}: processes {members}{spare}{waits}"

    @property
    def has_left(self) -> bool:
        """Whether this rank was asked to leave before the run had come to its end."""
        return self._is_leaving and not self._is_done

    def leave(self) -> None:
        """Have this rank leave after the step that it is in: :meth:`epochs` ends then, and no step is lost."""
        self._is_leaving = True
        if self._generations is not None:
            self._generations.leave()

    async def epochs(self) -> AsyncGenerator[EpochReport, None]:
        """As those of a Worker. They end early where this rank leaves, or the others have come to the end.

        Raises:
            BarrierTimeout: there were too few ranks, or no majority, for ``elastic.wait_s``.
            And as those of a Worker.
        """
        async with self._running():
            traits = await self._prepare()
            elastic, timeouts = self._config.elastic, self._config.timeouts
            limits = ElasticLimits(
                min_world=elastic.min_world, max_world=elastic.max_world, wait_s=elastic.wait_s,
                collective_s=timeouts.collective_s,
            )  # fmt: skip
            async with open_generations(
                self._place.bus, number=self._place.number, founders=self._place.founders, limits=limits, traits=traits
            ) as self._generations:
                if self._is_leaving:
                    self._generations.leave()
                try:
                    while not self._has_ended:  # to be done is not enough: the others may lack the last step
                        async for report in self._one_generation(self._generations):
                            yield report
                except NoGeneration as error:
                    self._log.info("no more generations", reason=str(error), step=self.step)
                await self._compute.run(self._callbacks.call, "on_end", self.summary)

    async def _one_generation(self, generations: Generations) -> AsyncGenerator[EpochReport, None]:
        """Train as a rank of the next generation, until that is over."""
        try:
            async with generations.next_group() as group:
                await self._begin(group, generations.number)
                if self._is_done:  # who was to write the last checkpoint may have been lost
                    await self._save()
                while not (self._is_done or self._is_resting):
                    report = await self._one_epoch()
                    if report is not None:
                        yield report
                await self._stand_still()
                if self._is_done:
                    self._params_hash = await self._compare()
                    generations.end()
                    self._has_ended = True
                else:
                    generations.rest()
        except LOST as error:
            self._log.warning("generation lost", generation=generations.number, step=self.step, error=str(error))
            await self._give_up_step()
            generations.suspect(error)

    # The start

    async def _prepare(self) -> dict[str, int]:
        """Load everything. Returns what must be equal on all members, as hashes."""
        config, training = self._config, self._training
        await self._compute.run(training.open)
        algorithm = training.algorithm
        for fault, what in (
            (not algorithm.equal_replicas or algorithm.scope == "weights", "exchanges weights, or lets models differ"),
            (training.delay_steps > 0, "applies steps late (delay_steps)"),
            (algorithm.in_network is not None, "adds up in the network"),
        ):
            if fault:
                raise ConfigError(
                    f"{training.label}: it {what}, and ranks cannot come and go then. Set elastic.min_world=0"
                )
        if config.checkpoint.dir is not None and self._place.number == 0 and self._place.founders:
            self._saved = await self._compute.run(self._find_checkpoint)
        label = training.label
        settings = {
            **config.shared({"name": label.name, **label.options}),
            "class of the optimizer": type(training.optimizer.optimizer).__name__,
        }
        return {
            "model": _hash(describe_layout(self.model)), "settings": _hash(settings),
            "data": _hash(await self._compute.run(training.num_batches, 0)), "version": _hash([PROTOCOL, VERSION]),
        }  # fmt: skip

    def _find_checkpoint(self) -> Checkpoint | None:
        """The newest one that is whole. Raises CheckpointError: there are some, but none is."""
        faults = []
        with contextlib.closing(WorkerState(self._config, 0, 1, label=self._training.label)) as state:
            for step in reversed(state.steps()):
                try:
                    checkpoint = state.load(step)
                except CheckpointError as error:
                    faults.append(str(error))
                else:
                    state.delete_later(step)
                    return checkpoint
        if faults:
            raise CheckpointError(f"all checkpoints are damaged or of another run: {'; '.join(faults)}")
        return None

    # The beginning of a generation

    async def _begin(self, group: Group, generation: int) -> None:
        """Become a rank of this group, and have the newest state that one of its ranks has."""
        config, compute, training = self._config, self._compute, self._training
        self._group = group
        self._is_resting = self._checked = False
        self._votes = StopVotes(group, timeout_s=config.timeouts.collective_s)
        self._replicas = Replicas(group, compute, self.model, timeout_s=config.timeouts.collective_s, probe=self._probe)
        await compute.run(training.regroup, group)
        stands = self._position if self._saved is None else position_of(self._saved)
        hello = {
            "settings": config.shared({"name": training.label.name, **training.label.options}),
            "synced": self._synced, "step": stands.step, "epoch": stands.epoch, "is_stopped": self._is_stopped,
            "schedule_steps": self._schedule_steps, "batches": await compute.run(training.num_batches, 0),
            "callbacks": bool(self._callbacks), "layout": describe_layout(self.model) if generation == 1 else [],
        }  # fmt: skip
        hellos = await group.all_gather_object("elastic/hello", hello, timeout_s=config.timeouts.join_s)
        check_equal("settings", [hello["settings"] for hello in hellos])
        check_equal("data", [{"batches of an epoch": hello["batches"]} for hello in hellos])
        check_equal_layouts([hello["layout"] for hello in hellos])
        # Ranks that were lost at the end of an epoch may stand at one step, but in two epochs.
        places = [(hello["synced"], hello["step"], hello["epoch"]) for hello in hellos]
        source = places.index(max(places))
        # A vote that some have counted counts for all; ranks of another past may know of others.
        self._is_stopped = any(hello["is_stopped"] for hello in hellos if hello["synced"] == places[source][0])
        if generation > 1 and places[source][0] < 0:
            raise CollectiveError(
                f"no rank of generation {generation} has the state of the run: go on from a checkpoint, all ranks anew"
            )
        self._votes_after_steps = True
        self._votes_after_epochs = any(hello["callbacks"] for hello in hellos)
        await compute.run(self._start, hellos[source]["schedule_steps"], group.world)
        if places[source][0] < 0 or any(place != places[source] for place in places):
            await self._get_state(source, is_behind=places[group.rank][:2] != places[source][:2])
        self._synced = generation
        self._stepper = self._make_stepper()
        self._probe.note(
            "started", run=f"{self._run_id:016x}", rank=group.rank, world=group.world, step=self.step,
            generation=generation,
        )  # fmt: skip
        self._log.info(
            "generation begins", generation=generation, rank=group.rank, world=group.world, step=self.step,
            state_of=source,
        )  # fmt: skip
        if not self._has_opened:
            self._has_opened = True
            self._on_open()

    def _start(self, schedule_steps: int, world: int) -> None:
        """Begin the schedule, and restore what was saved. On the compute thread, once."""
        if self._schedule_steps:
            return
        config, training = self._config, self._training
        if not schedule_steps:
            in_epoch = ElasticPlan.rest_of(
                training.num_batches(0), world, config.accumulation_steps, done=0, first_step=0
            ).steps
            schedule_steps = min(in_epoch * config.epochs, config.max_steps or in_epoch * config.epochs)
        self._schedule_steps = schedule_steps
        training.optimizer.start_schedule(schedule_steps)
        if self._saved is not None:
            saved = SavedRank.of(self._saved)
            training.restore(self._saved)
            self._position = position_of(self._saved)
            if not self._position.epoch_batches:  # it was saved by a run of a fixed world
                steps = self._position.epoch_step * config.accumulation_steps * saved.world
                self._position.epoch_batches = min(steps, training.num_batches(self._position.epoch))
            self._run_id = int(saved.run_id, 16)
            self._report = saved.report
            self._saved = None

    async def _get_state(self, source: int, *, is_behind: bool) -> None:
        """All ranks get the state of rank ``source``: it takes effect when all of it is there.

        Args:
            is_behind: this rank lacks steps. What the algorithm keeps of this rank alone belongs to other steps then.
        """
        group, compute, position = self._group, self._compute, self._position
        if not self._run_id:
            self._run_id = int.from_bytes(os.urandom(8), "little")
        common = {name: getattr(position, name) for name in _COMMON} | {"run_id": self._run_id}
        common = await group.broadcast_object("elastic/position", common, root=source)
        tensors = model_tensors(self.model) | await compute.run(self._training.shared_state)
        tensors = await self._replicas.broadcast_named("elastic/state", tensors, root=source)
        if group.rank == source:
            return
        same_epoch = common["epoch"] == position.epoch
        self._run_id = common.pop("run_id")
        kept = asdict(position) if same_epoch else {}
        self._position = Position(**(kept | common))
        await compute.run(self._take_state, tensors, is_behind)

    def _take_state(self, tensors: Mapping[str, Tensor], is_behind: bool) -> None:
        live = model_tensors(self.model)
        if set(live) - set(tensors) or any(live[name].shape != tensors[name].shape for name in live):
            raise CollectiveError("the state of the run is of another model")
        for name, tensor in live.items():
            tensor.copy_(tensors[name])
        training = self._training
        shared = {name: tensor for name, tensor in tensors.items() if name not in live}
        training.load_shared_state(shared)
        if is_behind:
            training.algorithm.load_state({}, tensors_below("algorithm/", shared))

    # Steps

    @property
    def _wants_rest(self) -> bool:
        return self._is_leaving or (self._generations is not None and self._generations.change_is_wanted)

    async def _make_plan(self) -> EpochPlan:
        position = self._position
        total = await self._compute.run(self._training.num_batches, position.epoch)
        self._plan = ElasticPlan.rest_of(
            total, self._group.world, self._config.accumulation_steps, done=position.epoch_batches,
            first_step=position.epoch_step,
        )  # fmt: skip
        return self._plan

    def _note_place(self) -> None:
        """Where the epoch stands, for ranks of another number. On the compute thread."""
        position, plan = self._position, self._plan
        if plan is not None and position.epoch_step:
            position.epoch_batches = plan.batches_done(position.epoch_step)
            self._training.note_sums(position)
        self._plan = None

    async def _stand_still(self) -> None:
        """Between two steps, with nothing on its way."""
        self._votes.cancel()
        await self._stepper.close()
        await self._compute.run(self._note_place)

    async def _give_up_step(self) -> None:
        """Somebody was lost: what is not applied yet leaves no trace, and is computed anew."""
        self._wants_end |= self._votes.cancel()  # said again in the next vote
        if hasattr(self, "_stepper"):
            await self._stepper.close()
        await self._compute.run(self._training.give_up_step)
        await self._compute.run(self._note_place)

    # Checkpoints

    async def _save(self) -> None:
        """Rank 0 saves what is equal on all ranks: what each keeps for itself is lost with its process anyway."""
        if self._config.checkpoint.dir is None:
            return
        position = self._position
        await self._drain()
        plan = self._plan
        await self._compute.run(self._note_place)
        self._plan = plan
        await self._replicas.broadcast_buffers(position.step)
        await self._check_model(model_tensors(self.model))
        self._probe.reached("before_save", position.step)
        if self._group.rank == 0:
            size = await self._compute.run(self._write)
            self._log.info("checkpoint", step=position.step, bytes=size)
        self._probe.reached("after_save", position.step)
        await self._barrier("worker/saved")

    def _write(self) -> int:
        training, position = self._training, self._position
        # It is held for this checkpoint only: another process is rank 0 as soon as this one is stopped, cut off or
        # leaves. What is there is of this run.
        config = self._config.replaced("checkpoint.resume", True)
        with contextlib.closing(WorkerState(config, 0, 1, label=training.label)) as state:
            size = state.save(
                self._run_id, position, self.model,
                RunTensors({}, training.shared_state(), model_tensors(self.model)),
                num_batches=training.num_batches(position.epoch), report=self._report,
            )  # fmt: skip
            state.prune()
        return size


def _hash(value: Any) -> int:
    """64 bits of plain data."""
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
