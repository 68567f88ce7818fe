"""Elastic workers, all in one process, each with a bus of its own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from ddp_scene import make_task, new_place, small_mlp, train, training_of, vector
from group_node import LEASE_S
from patience import eventually
from settings import nested
from torch import Tensor, nn

import gradbus
from gradbus.actors import ElasticPlace, ElasticWorker, EpochReport
from gradbus.actors.data_parallel import elastic, generation_start, joining, state_copies
from gradbus.actors.data_parallel.callbacks import StopVotes
from gradbus.actors.data_parallel.joining import StateTransfer
from gradbus.actors.data_parallel.parameter_exchange import ParameterExchange
from gradbus.actors.data_parallel.replicas import Replicas
from gradbus.actors.data_parallel.state import WorkerState
from gradbus.actors.data_parallel.step import TrainingStep
from gradbus.actors.data_parallel.training import ShardTraining
from gradbus.actors.data_parallel.weights import WeightStepper
from gradbus.models import ClassificationTask, Metric, glyphs
from gradbus.runtime.algorithms.base import Algorithm, Step, TensorBucket
from gradbus.runtime.algorithms.diloco import StreamingDiLoCo
from gradbus.runtime.algorithms.requests import AllReduce, Program
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.collectives import Group, generations, membership
from gradbus.runtime.collectives.status import StatusReporter
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import BarrierTimeout, CheckpointError, ConfigError, PeerLost

LONG = 5000  # epochs of a run that a callback ends
SETTINGS = {"hash_every": 1, "epochs": 2}


@dataclass
class Rank:
    """A process of the run, and what came of it."""

    worker: ElasticWorker
    reports: list[EpochReport] = field(default_factory=list)
    worlds: list[int] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def parameters(self) -> Tensor:
        return vector(self.worker.model)


@pytest.fixture
def place() -> dict[str, Any]:
    return new_place()


def reporter_of(worker: ElasticWorker) -> StatusReporter:
    """Makes what observers are told of a rank."""
    return worker._group._membership.reporter  # noqa: SLF001 - observers get it from time to time, not in each step


def algorithm_of(stepper: WeightStepper) -> Algorithm:
    """Of the rank whose steps it makes."""
    return stepper._algorithm  # noqa: SLF001 - a stepper is given it, and shows it to nobody


class Watch:
    """A callback: calls a function after each step of a rank, and one at its end."""

    def __init__(self, do: Callable[[Any], object], at_end: Callable[[Any], object]) -> None:
        self.on_step = do
        self.on_end = at_end


class Cast:
    """Starts processes of one run, in tasks that can be cancelled: to the others that is a death."""

    def __init__(self, place: dict[str, Any], tasks: asyncio.TaskGroup, **settings: Any) -> None:
        self._place = place
        self.tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._make_algorithm = settings.pop("make_algorithm", None)
        elastic = {"min_world": settings.pop("min_world", 1), "max_world": 4, "wait_s": settings.pop("wait_s", 20.0)}
        self.config = DataParallelConfig(**nested(SETTINGS | settings), elastic=elastic)
        self.ranks: dict[int, Rank] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    def start(
        self,
        number: int,
        founders: int = 0,
        *,
        task: Any = None,
        on_step: Callable[[Any], object] = lambda _: None,
        on_end: Callable[[Any], object] = lambda _: None,
        on_epoch: Callable[[ElasticWorker], object] | None = None,
    ) -> None:
        """``on_epoch``: called in place of all callbacks, by who takes the reports."""
        running = self._run(number, founders, task or make_task(), on_step, on_end, on_epoch)
        self._running[number] = self.tasks.create_task(running)

    def kill(self, number: int) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._running[number].cancel)

    @property
    def number(self) -> int:
        """Of the process whose task runs."""
        return next(number for number, task in self._running.items() if task is asyncio.current_task())

    def wait_for_a_joiner(self) -> None:
        """Have the rank of this thread make no step until one wants to join: so an epoch is long enough for it."""
        deadline_s = time.monotonic() + 10.0
        while time.monotonic() < deadline_s:
            generations = self.ranks[0].worker.generations
            if generations is not None and generations.change_is_wanted:
                return
            time.sleep(0.005)

    def later(self, function: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(lambda: function(*arguments, **options))

    async def _run(
        self,
        number: int,
        founders: int,
        task: Any,
        on_step: Callable[[Any], object],
        on_end: Callable[[Any], object],
        on_epoch: Callable[[ElasticWorker], object] | None,
    ) -> None:
        async with gradbus.connect(**self._place, lease_s=LEASE_S) as bus:
            place = ElasticPlace(bus=bus, number=number, founders=founders)
            rank: Rank

            def note(report: Any) -> Any:
                if report.world not in rank.worlds[-1:]:
                    rank.worlds.append(report.world)
                return on_step(report)

            callbacks = [Watch(note, on_end)] if on_epoch is None else []
            worker = ElasticWorker(place, task, self.config, callbacks=callbacks, make_algorithm=self._make_algorithm)
            rank = self.ranks[number] = Rank(worker)
            try:
                async with contextlib.aclosing(rank.worker.epochs()) as epochs:
                    async for report in epochs:
                        rank.reports.append(report)
                        if on_epoch is not None:
                            on_epoch(rank.worker)
            except Exception as error:
                rank.error = error


def play(place: dict[str, Any], scene: Callable[[Cast], object], **settings: Any) -> dict[int, Rank]:
    torch.set_num_threads(1)

    async def main() -> dict[int, Rank]:
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            cast = Cast(place, tasks, **settings)
            scene(cast)
        return cast.ranks

    return asyncio.run(main())


def at_step(step: int, do: Callable[[], object]) -> Callable[[Any], None]:
    """Once."""
    done = []

    def on_step(report: Any) -> None:
        if report.step == step and not done:
            done.append(True)
            do()

    return on_step


def one_joins_and_trains(*, at: int, steps: int) -> Callable[[Cast], None]:
    """A scene of two ranks, which rank 4 joins after step ``at``; it ends once rank 4 has made so many steps with
    data."""
    losses: list[float] = []  # of rank 4: NaN without data

    def scene(cast: Cast) -> None:
        start = at_step(at, lambda: cast.later(cast.start, 4, on_step=lambda report: losses.append(report.loss)))

        def until_it_trains(report: Any) -> bool:
            start(report)
            return sum(not math.isnan(loss) for loss in losses) >= steps

        cast.start(0, 2, on_step=until_it_trains)
        cast.start(1, 2)

    return scene


def ends_with(worlds: list[int], cast: Cast, also: Callable[[Any], object] = lambda _: None) -> Callable[[Any], bool]:
    """Ends the run in the third step after rank 0 has seen these worlds, one after the other. Others may be between:
    a rank that the machine lets wait may miss a generation."""
    steps = []

    def on_step(report: Any) -> bool:
        also(report)
        seen = iter(cast.ranks[0].worlds)
        if all(world in seen for world in worlds) and cast.ranks[0].worlds[-1] == worlds[-1]:
            steps.append(report.step)
        return len(steps) >= 3

    return on_step


def test_a_run_in_which_nothing_happens_is_that_of_a_fixed_world(place: dict[str, Any]) -> None:
    def scene(cast: Cast) -> None:
        for number in range(2):
            cast.start(number, 2)

    ranks = play(place, scene, epochs=1, max_steps=6)
    fixed = train(make_task(), world=2, epochs=1, max_steps=6)
    assert torch.equal(ranks[0].parameters, ranks[1].parameters)
    assert torch.equal(ranks[0].parameters, fixed[0].parameters)
    assert ranks[0].reports[0].params_hash == fixed[0].reports[0].params_hash


def test_survivors_go_on_without_a_lost_rank_and_one_that_is_started_joins_them(place: dict[str, Any]) -> None:
    def scene(cast: Cast) -> None:
        cast.start(0, 3, on_step=ends_with([3, 2, 3], cast, at_step(8, lambda: cast.later(cast.start, 5))))
        cast.start(1, 3)
        cast.start(2, 3, on_step=at_step(3, lambda: cast.kill(2)))

    ranks = play(place, scene, epochs=LONG)
    assert ranks[0].error is None
    assert ranks[0].worlds == [3, 2, 3]
    assert ranks[5].worlds == [3]
    for number in (1, 5):
        assert torch.equal(ranks[number].parameters, ranks[0].parameters)
        assert ranks[number].reports[-1].params_hash == ranks[0].reports[-1].params_hash


@pytest.mark.parametrize("dying", [2, 0])
def test_a_rank_that_dies_while_the_first_generation_begins_ends_no_run_unless_it_is_the_one_that_knows_a_checkpoint(
    dying: int, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcast = Replicas.broadcast_named

    def scene(cast: Cast) -> None:
        async def begin(self: Replicas, name: str, *arguments: Any, **options: Any) -> dict[str, Tensor]:
            if name == "elastic/state" and cast.number == dying:
                raise asyncio.CancelledError  # to the others that is a death
            return await broadcast(self, name, *arguments, **options)

        monkeypatch.setattr(Replicas, "broadcast_named", begin)
        for number in range(3):
            cast.start(number, 3)

    ranks = play(place, scene)
    if dying:
        assert ranks[0].error is ranks[1].error is None
        assert (ranks[0].worlds, ranks[1].worlds) == ([2], [2])
        assert torch.equal(ranks[0].parameters, ranks[1].parameters)
    else:
        assert all("no rank of generation 2 has the state" in str(ranks[number].error) for number in (1, 2))


def test_a_run_begins_although_no_group_forms_for_the_second_generation(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcast, join_group = Replicas.broadcast_named, generations.join_group

    @contextlib.asynccontextmanager
    async def join(*arguments: Any, name: str, **options: Any) -> AsyncIterator[Any]:
        if name.endswith("_2"):
            raise TimeoutError
        async with join_group(*arguments, name=name, **options) as group:
            yield group

    monkeypatch.setattr(generations, "join_group", join)

    def scene(cast: Cast) -> None:
        async def begin(self: Replicas, name: str, *arguments: Any, **options: Any) -> dict[str, Tensor]:
            found = cast.ranks[cast.number].worker.generations
            if name == "elastic/state" and found is not None and found.number == 1:
                raise PeerLost("world_1", {2: "has gone"})
            return await broadcast(self, name, *arguments, **options)

        monkeypatch.setattr(Replicas, "broadcast_named", begin)
        for number in range(3):
            cast.start(number, 3)

    ranks = play(place, scene)
    assert [ranks[number].error for number in range(3)] == [None] * 3
    assert ranks[0].worlds == [3]
    assert all(torch.equal(ranks[0].parameters, ranks[number].parameters) for number in (1, 2))


def test_rank_0_may_be_lost_too(place: dict[str, Any]) -> None:
    def scene(cast: Cast) -> None:
        cast.start(0, 3, on_step=at_step(3, lambda: cast.kill(0)))
        cast.start(1, 3)
        cast.start(2, 3)

    ranks = play(place, scene, epochs=3)
    assert ranks[1].error is ranks[2].error is None
    assert torch.equal(ranks[1].parameters, ranks[2].parameters)
    assert [report.epoch for report in ranks[1].reports] == [0, 1, 2]


def test_an_announced_leave_loses_no_step_and_the_others_no_batch(place: dict[str, Any]) -> None:
    steps: dict[int, list[int]] = {0: [], 1: []}

    def scene(cast: Cast) -> None:
        cast.start(0, 2, on_step=lambda report: steps[0].append(report.step))
        leave = at_step(4, lambda: cast.later(cast.ranks[1].worker.leave))

        def note_and_leave(report: Any) -> None:
            steps[1].append(report.step)
            leave(report)

        cast.start(1, 2, on_step=note_and_leave)

    ranks = play(place, scene, epochs=2)
    assert ranks[0].error is ranks[1].error is None
    assert ranks[0].worlds == [2, 1]
    assert steps[0] == list(range(1, len(steps[0]) + 1))  # each once: no step was made again
    assert steps[1] == steps[0][: len(steps[1])]
    assert [report.finished for report in ranks[0].reports] == [True, True]


def test_the_mean_number_of_ranks_a_step_is_shown_while_ranks_leave(place: dict[str, Any]) -> None:
    shown: list[tuple[int, int, float | None, str]] = []
    told: list[float] = []  # to observers, at the beginning of each step

    def scene(cast: Cast) -> None:
        def look(report: Any) -> None:
            worker = cast.ranks[0].worker
            if report.step == 4:
                cast.ranks[1].worker.leave()
            if report.epoch == 0:
                shown.append((report.step, report.world, worker.mean_ranks, worker.progress))
                told.append(reporter_of(worker).now(0.0).mean_ranks)

        for number in range(2):
            cast.start(number, 2, on_step=look if number == 0 else lambda _: None)

    play(place, scene, epochs=1)
    worlds = [world for _, world, _, _ in shown]
    assert set(worlds) == {1, 2}
    for count, (step, _, mean, text) in enumerate(shown, start=1):
        assert mean == pytest.approx(sum(worlds[:count]) / count), step
        assert f", {mean:.2f} a step in this epoch" in text
    assert told == pytest.approx([0.0, *(mean for _, _, mean, _ in shown[:-1])])


def test_below_min_world_training_waits_for_one_more(place: dict[str, Any]) -> None:
    def scene(cast: Cast) -> None:
        async def start_when_it_is_waited_for() -> None:
            said = "waits for 1 more to join: at least 2 members are needed"
            await eventually(lambda: said in cast.ranks[0].worker.progress)
            cast.start(3)

        def start_another() -> None:
            cast.kill(1)
            cast.later(lambda: cast.tasks.create_task(start_when_it_is_waited_for()))

        cast.start(0, 2)
        cast.start(1, 2, on_step=at_step(3, start_another))  # nobody goes on until it has come

    ranks = play(place, scene, min_world=2, epochs=2)
    assert ranks[0].worlds == [2]
    assert ranks[3].error is None
    assert torch.equal(ranks[0].parameters, ranks[3].parameters)


def test_one_that_nobody_meets_ends_with_whom_it_has_waited_for(place: dict[str, Any]) -> None:
    ranks = play(place, lambda cast: cast.start(0, 2), wait_s=0.5)
    assert isinstance(ranks[0].error, BarrierTimeout)
    assert "waits for the processes [1] of 2" in str(ranks[0].error)


def test_whoever_stops_to_take_reports_has_left_the_group_by_then(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed_by: list[asyncio.Task[Any] | None] = []
    close = membership.Membership.close

    async def noted(self: membership.Membership, **options: Any) -> None:
        await close(self, **options)
        closed_by.append(asyncio.current_task())

    monkeypatch.setattr(membership.Membership, "close", noted)

    async def main() -> None:
        async with asyncio.timeout(20), gradbus.connect(**place, lease_s=LEASE_S) as bus:
            config = DataParallelConfig(**nested(SETTINGS | {"epochs": LONG}), elastic={"min_world": 1, "max_world": 1})
            worker = ElasticWorker(ElasticPlace(bus=bus, number=0, founders=1), make_task(), config)

            async def take() -> None:
                async with contextlib.aclosing(worker.epochs()) as epochs:
                    async for _ in epochs:
                        raise OSError("the disk of the reports")

            with pytest.raises(OSError, match="the disk of the reports"):
                await take()
            assert closed_by == [asyncio.current_task()]  # not by a task of nobody's, some time later

    asyncio.run(main())


def test_one_with_another_model_is_refused_by_name_and_the_run_goes_on(place: dict[str, Any]) -> None:
    other = make_task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    assert "its model differs" in str(refusal_of_one_that_joins(place, other))


def other_data() -> ClassificationTask:
    """As many samples as the others have, from another seed."""
    return ClassificationTask(small_mlp, glyphs(seed=1, train=200, test=101), batch_size=16)


def test_one_with_other_data_of_equal_size_is_refused_by_name_and_the_run_goes_on(place: dict[str, Any]) -> None:
    text = str(refusal_of_one_that_joins(place, other_data()))
    assert "its data differs from that of the members. Start it with the same configuration, data" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [("VERSION", generation_start.VERSION + 1), ("POSITION_FIELDS", generation_start.POSITION_FIELDS[:-1])],
    ids=["of the protocol", "what is shared of a position"],
)
def test_one_of_another_version_is_refused_by_name_and_the_run_goes_on(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    def newer() -> None:  # the others have told theirs by now
        monkeypatch.setattr(generation_start, name, value)

    assert "its version differs" in str(refusal_of_one_that_joins(place, make_task(), before=newer))


def test_founders_with_other_data_of_equal_size_are_refused_by_name(place: dict[str, Any]) -> None:
    def scene(cast: Cast) -> None:
        for number in range(3):
            cast.start(number, 3, task=other_data() if number == 1 else make_task())

    for rank in play(place, scene).values():
        assert isinstance(rank.error, ConfigError)
        assert re.search(
            r"^data must be equal on all ranks: digest is '\w+', but rank 1 has '\w+'\. Start all processes with",
            str(rank.error),
        )


class WithoutDigest:
    """A task of one's own."""

    def __init__(self, task: ClassificationTask) -> None:
        for name in ("build_model", "prepare_shard", "num_batches", "batches", "loss", "evaluate_shard"):
            setattr(self, name, getattr(task, name))


def test_of_a_task_without_a_digest_the_numbers_of_batches_are_compared(place: dict[str, Any]) -> None:
    def scene(cast: Cast) -> None:
        cast.start(0, 2, task=WithoutDigest(make_task()))
        cast.start(1, 2, task=WithoutDigest(make_task(batch_size=8)))

    for rank in play(place, scene).values():
        assert "data must be equal on all ranks: batches of an epoch is" in str(rank.error)


def refusal_of_one_that_joins(
    place: dict[str, Any], task: Any, before: Callable[[], object] = lambda: None
) -> ConfigError:
    """What process 1 ends with, while process 0 trains. ``before``: called before it starts."""

    def scene(cast: Cast) -> None:
        def begin() -> None:
            before()
            cast.later(cast.start, 1, task=task)

        start = at_step(2, begin)

        def until_refused(report: Any) -> bool:
            start(report)
            return 1 in cast.ranks and cast.ranks[1].error is not None

        cast.start(0, 1, on_step=until_refused)

    ranks = play(place, scene, epochs=LONG)
    assert ranks[0].error is None
    assert ranks[0].worlds == [1]
    assert isinstance(ranks[1].error, ConfigError)
    return ranks[1].error


def one_joins_and_one_is_lost(cast: Cast) -> None:
    """Process 4 joins processes 0 and 1, and then 1 is lost."""

    def kill(report: Any) -> None:
        if report.world == 3:
            cast.kill(1)

    cast.start(0, 2, on_step=ends_with([2, 3, 2], cast, at_step(3, lambda: cast.later(cast.start, 4))))
    cast.start(1, 2, on_step=kill)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "dgc", "density": 0.1},
        {"name": "powersgd"},
        {"name": "adaptive-powersgd", "window_steps": 3},
        {"name": "topk"},
    ],
    ids=lambda a: a["name"],
)
def test_algorithms_with_a_memory_go_on_with_equal_weights(place: dict[str, Any], algorithm: dict[str, Any]) -> None:
    ranks = play(place, one_joins_and_one_is_lost, algorithm=algorithm, epochs=LONG)
    assert ranks[0].error is ranks[4].error is None
    assert torch.equal(ranks[0].parameters, ranks[4].parameters)


class Listens(Algorithm):
    """The mean of gradients; keeps the losses that it is given, by step, over all generations and ranks."""

    choice = "listens"
    needs_loss = True
    losses: ClassVar[dict[int, set[float]]] = {}

    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        if bucket.index == 0:
            self.losses.setdefault(step.number, set()).add(step.loss)
        yield AllReduce("mean", bucket.flat, "mean", out=bucket.flat, divisor=step.active)


def test_the_loss_that_an_algorithm_goes_by_outlasts_a_generation_and_reaches_one_that_joins(
    place: dict[str, Any],
) -> None:
    Listens.losses.clear()
    ranks = play(
        place, one_joins_and_one_is_lost, make_algorithm=lambda at: Listens(at, Listens.Options()), epochs=LONG
    )
    assert ranks[0].error is ranks[4].error is None
    unknown = [step for step, found in Listens.losses.items() if any(map(math.isnan, found))]
    assert unknown == [0]  # there is none before the first step


class SlowCopies:
    """Copies of the state, in this process, that arrive when they may: the others make steps meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_arrive = threading.Event()
        self.second_may_arrive = threading.Event()
        self.second_may_arrive.set()
        self.asked: list[int] = []
        receive, slow = Group.recv_object, self

        async def late(group: Group, name: str, *, source: int, **options: Any) -> Any:
            slow.asked.append(source)
            first = len(slow.asked) == 1
            await asyncio.to_thread((slow.may_arrive if first else slow.second_may_arrive).wait, 20.0)
            return await receive(group, name, source=source, **options)

        def begin(group: Group, name: str, **options: Any) -> Any:
            return (late if name == "elastic/state/names" else receive)(group, name, **options)

        monkeypatch.setattr(Group, "recv_object", begin)


def change_pieces(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Awaitable[None]]) -> None:
    """``change`` is called with each piece of a copy of the state, with its hash, when it has arrived."""
    receive = Group.recv

    async def changed(piece: Awaitable[Tensor]) -> Tensor:
        came = await piece
        await change(came)
        return came

    def begin(group: Group, name: str, **options: Any) -> Any:
        arriving = receive(group, name, **options)
        return changed(arriving) if name.startswith("elastic/state/") else arriving

    monkeypatch.setattr(Group, "recv", begin)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": {"name": "adamw", "lr": 0.01}, "schedule": {"name": "cosine"}},
        {"algorithm": {"name": "dgc", "density": 0.1}},
        {"algorithm": {"name": "ef21"}},
    ],
    ids=["adamw", "dgc", "ef21"],
)
def test_others_make_steps_while_a_copy_is_on_its_way_and_weights_are_equal_when_it_is_there(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    copies = SlowCopies(monkeypatch)
    trained: list[bool] = []  # in each step of the one that joins
    is_in_step: list[bool] = []  # the same, as its status has it

    def scene(cast: Cast) -> None:
        in_world: list[int] = []

        def on_joined(report: Any) -> None:
            trained.append(not math.isnan(report.loss))
            is_in_step.append(reporter_of(cast.ranks[4].worker).position.step >= 0)

        def on_first(report: Any) -> bool:
            if report.step == 3:
                cast.later(cast.start, 4, on_step=on_joined)
                cast.wait_for_a_joiner()
            if report.world == 2:
                in_world.append(report.step)
            if len(in_world) == 5:
                copies.may_arrive.set()
            return sum(trained) >= 3

        cast.start(0, 1, on_step=on_first)

    ranks = play(place, scene, epochs=LONG, **settings)
    assert ranks[0].error is ranks[4].error is None
    assert trained[:4] == [False] * 4  # it got no data before it had the state
    assert is_in_step == trained
    assert ranks[4].worker.step == ranks[0].worker.step
    assert torch.equal(ranks[0].parameters, ranks[4].parameters)
    assert ranks[0].reports[-1].params_hash == ranks[4].reports[-1].params_hash


def test_of_two_that_join_one_trains_while_the_copy_of_the_other_is_on_its_way(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = SlowCopies(monkeypatch)
    copies.may_arrive.set()
    copies.second_may_arrive.clear()
    trained: dict[int, int] = {4: 0, 5: 0}

    def scene(cast: Cast) -> None:
        def count(report: Any) -> None:
            number = 4 if report.rank == 1 else 5
            trained[number] += not math.isnan(report.loss)
            if any(trained.values()):
                copies.second_may_arrive.set()

        def wait_for_both() -> None:
            cast.later(cast.start, 4, on_step=count)
            cast.later(cast.start, 5, on_step=count)
            deadline_s = time.monotonic() + 10.0
            generations = cast.ranks[0].worker.generations
            while generations is not None and generations.waiting < 2 and time.monotonic() < deadline_s:
                time.sleep(0.005)

        start = at_step(1, wait_for_both)

        def until_both_train(report: Any) -> bool:
            start(report)
            return min(trained.values()) >= 3

        cast.start(0, 1, on_step=until_both_train)

    ranks = play(place, scene, epochs=LONG)
    assert all(rank.error is None for rank in ranks.values())
    assert copies.asked == [0, 0]  # none was taken for broken
    assert ranks[0].worlds == [1, 3]
    for number in (4, 5):
        assert torch.equal(ranks[0].parameters, ranks[number].parameters)


def test_all_wait_for_a_copy_before_more_steps_are_kept_than_there_is_memory_for(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = SlowCopies(monkeypatch)
    size = sum(p.numel() * p.element_size() for p in make_task().build_model().parameters())
    monkeypatch.setattr(elastic, "MAX_RECORDED_BYTES", 4 * size)
    trained: list[bool] = []
    over_within = StateTransfer.is_over_within

    async def let_it_come(transfer: StateTransfer, seconds: float) -> bool:
        asyncio.get_running_loop().call_later(0.1, copies.may_arrive.set)
        return await over_within(transfer, seconds)

    monkeypatch.setattr(StateTransfer, "is_over_within", let_it_come)

    def scene(cast: Cast) -> None:
        def on_first(report: Any) -> bool:
            if report.step == 1:
                cast.later(cast.start, 4, on_step=lambda report: trained.append(not math.isnan(report.loss)))
                cast.wait_for_a_joiner()
            return sum(trained) >= 3

        cast.start(0, 1, on_step=on_first)

    ranks = play(place, scene, epochs=LONG)
    assert ranks[0].error is ranks[4].error is None
    assert 1 <= trained.index(True) <= 4
    assert torch.equal(ranks[0].parameters, ranks[4].parameters)


@pytest.mark.parametrize(
    ("settings", "pieces_s"),
    [
        ({"optimizer": {"name": "adamw", "lr": 0.01}}, [0.2] * 17),
        ({"algorithm": {"name": "qadam", "warmup_steps": 1}, "optimizer": {"lr": 0.001, "momentum": 0.0}}, [1.2] * 3),
    ],
    ids=["the optimizer's", "the algorithm's"],
)
def test_a_copy_may_take_longer_than_a_collective(
    settings: dict[str, Any], pieces_s: list[float], place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    collective_s, left_s = 2.5, list(pieces_s)

    async def slowly(came: Tensor) -> None:
        await asyncio.sleep(left_s.pop() if left_s else 0)

    change_pieces(monkeypatch, slowly)  # all together: longer than 2.5 s

    scene = one_joins_and_trains(at=1, steps=2)
    ranks = play(place, scene, epochs=LONG, timeouts={"collective_s": collective_s}, **settings)
    assert all(rank.error is None for rank in ranks.values())
    assert ranks[0].worlds == [2, 3]  # nobody was taken for lost
    assert ranks[0].worker.generations is not None
    assert ranks[0].worker.generations.number == 2
    assert torch.equal(ranks[0].parameters, ranks[4].parameters)


def test_a_rank_that_is_lost_in_the_last_step_gets_the_result_of_it(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, lost = ShardTraining.apply, []

    def scene(cast: Cast) -> None:
        def apply_or_lose(training: ShardTraining, step: Any, profile: Any) -> None:
            if step.number == 5 and training is training_of(cast.ranks[1].worker) and not lost:
                lost.append(True)
                raise PeerLost("world_1", {0: "has gone"})
            apply(training, step, profile)

        monkeypatch.setattr(ShardTraining, "apply", apply_or_lose)
        cast.start(0, 2)
        cast.start(1, 2)

    ranks = play(place, scene, max_steps=6, hash_every=0)
    assert lost
    assert ranks[0].error is ranks[1].error is None
    assert ranks[0].worker.step == ranks[1].worker.step == 6
    assert torch.equal(ranks[0].parameters, ranks[1].parameters)


@pytest.mark.parametrize("where", ["on its way", "at the sender"])
def test_a_broken_copy_is_taken_again_from_another_process(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    copies = SlowCopies(monkeypatch)
    copies.may_arrive.set()
    broken: list[Tensor] = []

    def break_once(tensor: Tensor) -> None:
        if not broken:
            broken.append(tensor)
            tensor.view(-1).view(torch.uint8)[0] ^= 1

    async def break_piece(came: Tensor) -> None:
        break_once(came)

    def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = joining.copied(tensors)
        break_once(next(iter(found.values())))
        return found

    if where == "on its way":
        change_pieces(monkeypatch, break_piece)
    else:
        monkeypatch.setattr(state_copies, "copied", copied)

    ranks = play(place, one_joins_and_trains(at=3, steps=3), epochs=LONG)
    assert ranks[0].error is ranks[1].error is ranks[4].error is None
    assert copies.asked == [0, 1]
    assert torch.equal(ranks[0].parameters, ranks[4].parameters)


def test_ranks_that_wait_for_a_copy_do_not_wait_on_when_it_is_broken(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, breaks = SlowCopies(monkeypatch), [True]
    monkeypatch.setattr(elastic, "MAX_RECORDED_BYTES", 1)  # so all wait for it after a step
    over_within = StateTransfer.is_over_within

    async def let_it_come(transfer: StateTransfer, seconds: float) -> bool:
        copies.may_arrive.set()
        return await over_within(transfer, seconds)

    async def break_once(came: Tensor) -> None:
        if breaks and breaks.pop():
            came[0] ^= 1

    monkeypatch.setattr(StateTransfer, "is_over_within", let_it_come)
    change_pieces(monkeypatch, break_once)

    ranks = play(place, one_joins_and_trains(at=3, steps=3), epochs=LONG)  # not after the 60 s of a collective
    assert ranks[0].error is ranks[1].error is ranks[4].error is None
    assert copies.asked == [0, 1]
    assert torch.equal(ranks[0].parameters, ranks[4].parameters)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "diloco", "steps": 4, "codec": "q8"},
        {"name": "diloco", "steps": 4, "fragments": 2},
        {"name": "diloco", "steps": 4, "delay": 2, "codec": "q4"},
        {"name": "local-sgd", "steps": 4},
        {"name": "post-local-sgd", "steps": 4, "dense_steps": 2},
        {"name": "sparseloco", "steps": 4},
        {"name": "noloco", "steps": 4},
    ],
    ids=lambda a: "-".join(map(str, a.values())),
)
def test_ranks_that_exchange_weights_come_and_go_by_exchanges(place: dict[str, Any], algorithm: dict[str, Any]) -> None:
    def scene(cast: Cast) -> None:
        def kill(report: Any) -> None:
            # Others may still be at the beginning of this generation, and would miss it.
            if report.step % 4 == 1 and all(rank.worlds[-1:] == [3] for rank in cast.ranks.values()):
                cast.kill(1)

        cast.start(0, 2, on_step=ends_with([2, 3, 2], cast, at_step(3, lambda: cast.later(cast.start, 4))))
        cast.start(1, 2, on_step=kill)

    ranks = play(place, scene, algorithm=algorithm, epochs=LONG)
    assert ranks[0].error is ranks[4].error is None
    assert ranks[0].worker.step == ranks[4].worker.step
    assert torch.equal(ranks[0].parameters, ranks[4].parameters)  # their mean, at the end


LATE = {"name": "diloco", "steps": 4, "delay": 3, "outer_momentum": 0.5}


class SharedStates:
    """Hashes of what all ranks share of an algorithm, by the group: when an exchange was applied, or dropped by all
    ranks, and when its generation has begun. Ranks of one generation have one hash."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[tuple[str, int], set[str]] = {}
        self.begun: dict[int, dict[int, dict[str, Tensor]]] = {}  # by generation and rank: the tensors
        begin, apply = ElasticWorker._begin, WeightStepper._apply_late  # noqa: SLF001 - no public call ends there
        groups: dict[Algorithm, str] = {}  # the newest of each rank

        async def begin_and_note(worker: ElasticWorker, group: Any, generation: int, numbers: Any) -> None:
            algorithm = training_of(worker).algorithm
            groups[algorithm] = group.name
            await begin(worker, group, generation, numbers)
            self._note(group.name, worker._part.stepper.ended_exchanges, algorithm)  # noqa: SLF001 - no report has them
            state = algorithm.shared_state() | algorithm.own_state()
            kept = {name: tensor.clone() for name, tensor in state.items()}
            self.begun.setdefault(generation, {})[group.rank] = kept

        def apply_and_note(stepper: WeightStepper, exchange: ParameterExchange, profile: Any) -> None:
            apply(stepper, exchange, profile)
            self._note(groups[algorithm_of(stepper)], stepper.ended_exchanges, algorithm_of(stepper))

        monkeypatch.setattr(ElasticWorker, "_begin", begin_and_note)
        monkeypatch.setattr(WeightStepper, "_apply_late", apply_and_note)

    def _note(self, group: str, exchanges: int, algorithm: Algorithm) -> None:
        shared = sorted(algorithm.shared_state().items())
        text = "".join(f"{name} {hashlib.sha256(tensor.numpy().data).hexdigest()}\n" for name, tensor in shared)
        self.found.setdefault((group, exchanges), set()).add(text)

    def check(self) -> None:
        assert all(len(texts) == 1 for texts in self.found.values())
        assert any("momentum/fragment0" in text for texts in self.found.values() for text in texts)


@pytest.mark.parametrize(
    "options", [{}, {"fragments": 4, "codec": "q4"}], ids=["one fragment", "several exchanges on their way"]
)
def test_with_a_delay_ranks_join_leave_and_are_lost_while_an_exchange_is_on_its_way_and_share_one_state(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    states = SharedStates(monkeypatch)

    def scene(cast: Cast) -> None:
        def kill(report: Any) -> None:
            if report.world == 4 and report.step % 4 == 1:  # the exchange of the step before is applied two steps later
                cast.kill(1)

        def leave(report: Any) -> None:
            if cast.ranks[0].worlds[-2:] == [4, 3]:
                cast.later(cast.ranks[2].worker.leave)

        cast.start(0, 3, on_step=ends_with([3, 4, 3, 2], cast, at_step(6, lambda: cast.later(cast.start, 4))))
        cast.start(1, 3, on_step=kill)
        cast.start(2, 3, on_step=leave)

    ranks = play(place, scene, algorithm=LATE | options, epochs=LONG)
    assert ranks[0].error is ranks[2].error is ranks[4].error is None
    assert ranks[0].worlds == [3, 4, 3, 2]
    assert ranks[2].worker.has_left
    assert ranks[0].worker.step == ranks[4].worker.step
    assert torch.equal(ranks[0].parameters, ranks[4].parameters)  # their mean, at the end
    assert ranks[0].reports[-1].loss < ranks[0].reports[0].loss
    states.check()


@pytest.mark.parametrize("options", [{}, {"fragments": 4, "codec": "q4", "alpha": 0.0}], ids=["one", "four"])
def test_with_a_delay_a_run_in_which_nothing_happens_has_the_bits_of_a_fixed_world(
    place: dict[str, Any], tmp_path: Path, options: dict[str, Any]
) -> None:
    # An epoch has 5 steps: the first one ends before the exchange of step 4 does.
    settings = {"algorithm": LATE | options, "epochs": 3, "max_steps": 13}

    def scene(cast: Cast) -> None:
        for number in range(2):
            cast.start(number, 2, task=make_task(batch_size=20))

    def checkpoint(name: str) -> dict[str, Any]:
        return {"dir": tmp_path / name, "every_steps": 9}  # the exchange of step 8 is on its way

    ranks = play(place, scene, checkpoint=checkpoint("elastic"), **settings)
    fixed = train(make_task(batch_size=20), checkpoint=checkpoint("fixed"), **settings)
    for number, outcome in enumerate(fixed):
        assert ranks[number].error is outcome.error is None
        assert torch.equal(ranks[number].parameters, outcome.parameters)
        found, expected = (training_of(one.worker).algorithm.shared_state() for one in (ranks[number], outcome))
        assert sorted(found) == sorted(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_late_result_that_no_rank_has_applied_when_the_group_is_lost_leaves_no_trace_on_any(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = SharedStates(monkeypatch)
    wait, conclude = WeightStepper._wait_before, ParameterExchange.conclude  # noqa: SLF001 - it is lost between the two
    before: dict[int, dict[str, Tensor]] = {}  # of each rank, when the first exchange was applied
    lost: set[int] = set()

    async def wait_and_lose(stepper: WeightStepper, number: int, profile: Any) -> None:
        """Both ranks lose their group before they apply the second exchange, of the step with number 7."""
        algorithm = algorithm_of(stepper)
        rank = algorithm.place.rank
        await wait(stepper, number, profile)
        if number == 8 and rank not in lost:
            lost.add(rank)
            before[rank] = algorithm.shared_state() | algorithm.own_state()
            raise PeerLost("world_1", {1 - rank: "has gone"})

    def conclude_on_rank_0(exchange: ParameterExchange) -> None:
        """The result has come to rank 0 alone."""
        if exchange.step.number != 7 or exchange.algorithm.place.rank != 1 or lost:
            conclude(exchange)

    monkeypatch.setattr(WeightStepper, "_wait_before", wait_and_lose)
    monkeypatch.setattr(ParameterExchange, "conclude", conclude_on_rank_0)

    def scene(cast: Cast) -> None:
        for number in range(2):
            cast.start(number, 2)

    ranks = play(place, scene, algorithm=LATE | {"codec": "q4"}, epochs=3)
    assert lost == {0, 1}
    assert ranks[0].error is ranks[1].error is None
    for number in range(2):
        begun = states.begun[2][number]
        assert sorted(begun) == ["anchor/fragment0", "momentum/fragment0", "residual/fragment0"]
        assert all(torch.equal(begun[name], before[number][name]) for name in begun)
    assert ranks[0].worker.step == ranks[1].worker.step
    assert torch.equal(ranks[0].parameters, ranks[1].parameters)
    states.check()


@pytest.mark.parametrize(("steps", "every_steps"), [(5, 6), (4, 4)], ids=["end of an epoch", "checkpoint"])
def test_a_rank_that_is_lost_before_it_applies_a_late_result_early_gets_the_state_of_one_that_has(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: int, every_steps: int
) -> None:
    states = SharedStates(monkeypatch)
    drain, applied, lost = WeightStepper.drain, asyncio.Queue[int](), list[int]()

    def scene(cast: Cast) -> None:
        async def drain_or_lose(stepper: WeightStepper) -> list[TrainingStep]:
            if cast.number == 1 and not lost and await applied.get():
                lost.append(cast.ranks[1].worker.step)
                raise PeerLost("world_1", {0: "has gone"})
            ended = stepper.ended_exchanges
            found = await drain(stepper)
            if cast.number == 0:
                applied.put_nowait(stepper.ended_exchanges - ended)
            return found

        monkeypatch.setattr(WeightStepper, "drain", drain_or_lose)
        for number in range(2):
            cast.start(number, 2, task=make_task(batch_size=20))  # an epoch of two ranks has 5 steps

    checkpoint = {"dir": tmp_path, "every_steps": every_steps}
    ranks = play(place, scene, algorithm=LATE | {"steps": steps}, epochs=4, checkpoint=checkpoint)
    assert lost == [steps]  # its exchange would have been applied three steps later
    assert ranks[0].error is ranks[1].error is None
    assert ranks[0].worker.step == ranks[1].worker.step
    assert "momentum/fragment0" in states.begun[2][1]
    assert torch.equal(ranks[0].parameters, ranks[1].parameters)
    states.check()


def test_a_checkpoint_while_an_exchange_is_on_its_way_has_its_result_and_another_world_goes_on_from_it(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"algorithm": LATE, "checkpoint": {"dir": tmp_path, "every_steps": 5}, "epochs": 3}

    def run(place: dict[str, Any], world: int, **more: Any) -> dict[int, Rank]:
        def scene(cast: Cast) -> None:
            for number in range(world):
                cast.start(number, world)

        return play(place, scene, **settings, **more)

    first = run(place, 2, max_steps=5)  # the exchange of step 4 would be applied in step 7
    states = SharedStates(monkeypatch)
    second = run(new_place(), 3)
    shared = training_of(first[0].worker).algorithm.shared_state()
    assert sorted(shared) == ["anchor/fragment0", "momentum/fragment0"]
    for number, rank in second.items():
        assert rank.error is None
        assert all(torch.equal(states.begun[1][number][name], shared[name]) for name in shared)
        assert torch.equal(rank.parameters, second[0].parameters)
    assert second[0].reports[-1].loss < first[0].reports[0].loss
    states.check()


def test_with_a_delay_no_rank_waits_for_a_vote_before_the_exchange_of_its_step_is_applied(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    send, count, counted = StopVotes.send_vote, StopVotes.counted, set[tuple[int, int]]()
    voted_at: dict[StopVotes, int] = {}

    def note_and_send(votes: StopVotes, *arguments: Any, step: int, **options: Any) -> None:
        voted_at[votes] = step
        send(votes, *arguments, step=step, **options)

    monkeypatch.setattr(StopVotes, "send_vote", note_and_send)

    def scene(cast: Cast) -> None:
        async def note_and_count(votes: StopVotes) -> bool:
            if votes.is_pending:
                counted.add((voted_at[votes], cast.ranks[cast.number].worker.step))
            return await count(votes)

        monkeypatch.setattr(StopVotes, "counted", note_and_count)
        for number in range(2):
            cast.start(number, 2, task=make_task(batch_size=8))  # an epoch has 13 steps

    ranks = play(place, scene, algorithm=LATE | {"fragments": 2}, epochs=1, max_steps=12)
    assert ranks[0].error is ranks[1].error is None
    # An exchange begins after every second step. The next vote goes when the one before is counted.
    assert counted >= {(2, 5), (6, 9), (10, 12)}
    assert all(step - voted == 3 or step == 12 for voted, step in counted)


class Scheduled(ClassificationTask):
    """Counts the steps of its schedule."""

    scheduled = 0

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        def count(step: int) -> float:
            self.scheduled = step
            return 1.0

        return torch.optim.lr_scheduler.LambdaLR(optimizer, count)


@pytest.mark.parametrize(
    ("algorithm", "step"), [(LATE, 5), ({"name": "diloco", "steps": 4}, 2)], ids=["on its way", "between two"]
)
def test_a_rank_that_is_lost_beside_an_exchange_has_the_others_take_no_step_twice(
    place: dict[str, Any], algorithm: dict[str, Any], step: int
) -> None:
    task = Scheduled(small_mlp, make_task().data, batch_size=16)

    def scene(cast: Cast) -> None:
        cast.start(0, 2, on_step=ends_with([2, 1], cast), task=task)
        cast.start(1, 2, on_step=at_step(step, lambda: cast.kill(1)))

    ranks = play(place, scene, algorithm=algorithm, epochs=LONG)
    assert ranks[0].error is None
    assert ranks[0].worlds == [2, 1]
    assert task.scheduled == ranks[0].worker.step


def lose_the_exchange_of(number: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rank 1 loses its group, once, when it has applied this step and its weights are to be exchanged. Returns the step
    then."""
    begin, lost = WeightStepper._begin_exchange, list[int]()  # noqa: SLF001 - nothing public is between the two

    async def begin_or_lose(stepper: WeightStepper, step: TrainingStep, *more: Any) -> None:
        if algorithm_of(stepper).place.rank == 1 and step.number == number and not lost:
            lost.append(number)
            raise PeerLost("world_1", {0: "has gone"})
        await begin(stepper, step, *more)

    monkeypatch.setattr(WeightStepper, "_begin_exchange", begin_or_lose)
    return lost


class EqualLosses(ClassificationTask):
    """The loss of each batch is 1; a metric counts the batches."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return 0 * super().loss(model, batch) + 1, {"batches": Metric(1.0, kind="sum")}


def test_a_step_that_is_made_again_for_its_exchange_counts_once_in_the_loss_and_the_metrics_of_the_epoch(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_the_exchange_of(3, monkeypatch)

    def scene(cast: Cast) -> None:
        for number in range(2):
            task = EqualLosses(small_mlp, make_task().data, batch_size=16)
            cast.start(number, 2, task=task)

    ranks = play(place, scene, algorithm={"name": "local-sgd", "steps": 4}, epochs=1)
    assert lost == [3]
    for rank in ranks.values():
        assert rank.error is None
        assert [(report.loss, report.train_metrics) for report in rank.reports] == [(1.0, {"batches": 13.0})]


def test_a_step_that_is_made_again_for_its_exchange_has_the_schedule_of_the_task_go_on_once(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_the_exchange_of(3, monkeypatch)
    tasks = [Scheduled(small_mlp, make_task().data, batch_size=16) for _ in range(2)]

    def scene(cast: Cast) -> None:
        for number, task in enumerate(tasks):
            cast.start(number, 2, task=task)

    ranks = play(place, scene, algorithm={"name": "local-sgd", "steps": 4}, epochs=1)
    assert lost == [3]
    for number, rank in ranks.items():
        assert rank.error is None
        assert tasks[number].scheduled == rank.worker.step


@pytest.mark.parametrize("options", [{}, {"delay": 2}, {"delay": 2, "fragments": 2}], ids=["at once", "late", "parts"])
def test_exchanges_that_were_skipped_in_an_epoch_are_reported_over_its_generations_and_by_who_joins(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    lost = lose_the_exchange_of(7, monkeypatch)

    def scene(cast: Cast) -> None:
        def overflow() -> None:
            with torch.no_grad():
                next(cast.ranks[1].worker.model.parameters()).fill_(torch.inf)

        def wait_for_a_joiner(report: Any) -> None:
            if report.step == 3:
                cast.later(cast.start, 2, task=make_task(batch_size=8))
                cast.wait_for_a_joiner()

        cast.start(0, 2, on_step=wait_for_a_joiner, task=make_task(batch_size=8))
        cast.start(1, 2, on_step=at_step(1, overflow), task=make_task(batch_size=8))

    ranks = play(place, scene, algorithm={"name": "diloco", "steps": 4} | options, epochs=2)
    assert lost == [7]
    for rank in ranks.values():
        assert rank.error is None
        assert [report.skipped_exchanges for report in rank.reports] == [1, 0]
    assert ranks[2].reports


def test_state_of_the_optimizer_and_schedule_reach_the_one_that_joins(place: dict[str, Any]) -> None:
    def scene(cast: Cast) -> None:
        cast.start(0, 1, on_step=ends_with([1, 2], cast, at_step(3, lambda: cast.later(cast.start, 4))))

    optimizer, schedule = {"name": "adamw", "lr": 0.01}, {"name": "cosine"}
    ranks = play(place, scene, epochs=LONG, optimizer=optimizer, schedule=schedule)
    assert ranks[4].error is None
    assert ranks[4].worker.step == ranks[0].worker.step
    assert torch.equal(ranks[0].parameters, ranks[4].parameters)


def test_a_checkpoint_of_one_world_is_resumed_by_another(place: dict[str, Any], tmp_path: Path) -> None:
    def first(cast: Cast) -> None:
        for number in range(2):
            cast.start(number, 2)

    settings = {"checkpoint": {"dir": tmp_path, "every_steps": 2}, "epochs": 2}
    before = play(place, first, **settings, max_steps=4)

    def second(cast: Cast) -> None:
        for number in range(3):
            cast.start(number, 3)

    after = play(place, second, **settings)
    assert before[0].worker.step == 4
    assert after[0].reports[-1].finished
    assert after[2].error is None
    assert torch.equal(after[0].parameters, after[2].parameters)
    steps = -(-(13 - 8) // 3) + -(-13 // 3)  # 13 batches in an epoch, 8 of which two ranks had in four steps
    assert after[0].worker.step == 4 + steps


@pytest.mark.parametrize(
    ("world", "batches"),
    [(0, "13 batches of all ranks"), (2, "7 batches on rank 0 of 2")],
    ids=["elastic", "fixed world"],
)
def test_a_resume_in_mid_epoch_with_other_batches_is_refused_and_with_the_same_it_goes_on(
    world: int, batches: str, place: dict[str, Any], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"checkpoint": {"dir": tmp_path}, "epochs": 1}
    if world:
        train(make_task(), world=world, **settings, max_steps=5)
    else:
        play(place, lambda cast: cast.start(0, 1), **settings, max_steps=5)

    def resumed(batch_size: int) -> Rank:
        return play(new_place(), lambda cast: cast.start(0, 1, task=make_task(batch_size=batch_size)), **settings)[0]

    refused = resumed(8)
    assert isinstance(refused.error, CheckpointError)
    assert f"in the middle of epoch 0, of {batches}" in str(refused.error)
    assert f"now there are {25 if not world else 13}" in str(refused.error)
    same = resumed(16)
    assert same.error is None
    assert same.reports[-1].finished
    assert same.worker.step == 5 + 13 - 5 * max(1, world)


@pytest.mark.parametrize(("founders", "steps"), [(2, 3), (1, 5)])
def test_a_fixed_world_goes_on_in_mid_epoch_only_from_steps_that_were_of_one_rank(
    founders: int, steps: int, place: dict[str, Any], tmp_path: Path
) -> None:
    """A place in the epoch is counted in steps there: those of two ranks would be half of the batches."""
    settings: dict[str, Any] = {"checkpoint": {"dir": tmp_path}, "epochs": 1}

    def scene(cast: Cast) -> None:
        for number in range(founders):
            cast.start(number, founders)

    play(place, scene, **settings, max_steps=steps)
    (outcome,) = train(make_task(), world=1, **settings)
    if founders == 1:
        assert outcome.error is None
        assert outcome.worker.step == 13
    else:
        assert isinstance(outcome.error, CheckpointError)
        assert "with 6 batches in 3 steps; of one rank they would be 3" in str(outcome.error)


def test_a_run_does_not_begin_in_the_directory_of_one_that_goes_on(place: dict[str, Any], tmp_path: Path) -> None:
    refused: list[BaseException | None] = []

    def scene(cast: Cast) -> None:
        def until_refused(report: Any) -> bool:
            if report.step == 2:
                cast.later(second.start, 0, 1)
            refused[:] = [second.ranks[0].error if 0 in second.ranks else None]
            return refused != [None]

        second = Cast(new_place(), cast.tasks, checkpoint={"dir": tmp_path})
        cast.start(0, 1, on_step=until_refused)

    ranks = play(place, scene, epochs=LONG, checkpoint={"dir": tmp_path})
    assert ranks[0].error is None
    assert isinstance(refused[0], CheckpointError)
    assert "is of a run that goes on" in str(refused[0])


def test_another_rank_writes_checkpoints_while_the_one_that_did_still_lives(
    place: dict[str, Any], tmp_path: Path
) -> None:
    others_have_saved = threading.Event()

    def scene(cast: Cast) -> None:
        leave = at_step(3, lambda: cast.later(cast.ranks[0].worker.leave))
        cast.start(0, 2, on_step=leave, on_end=lambda _: others_have_saved.wait(20.0))
        cast.start(1, 2, on_step=at_step(8, others_have_saved.set))

    ranks = play(place, scene, epochs=2, checkpoint={"dir": tmp_path, "every_steps": 1})
    assert ranks[0].error is ranks[1].error is None
    assert others_have_saved.is_set()
    assert CheckpointStore.to_read(tmp_path / "rank-0").rounds()[-1] == ranks[1].worker.step


def test_the_last_checkpoint_is_written_although_the_rank_that_writes_is_lost(
    place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, killed = WorkerState.save, []

    def scene(cast: Cast) -> None:
        def save_or_die(*arguments: Any, **options: Any) -> int:
            if killed:
                return save(*arguments, **options)
            killed.append(cast.ranks[0].worker.step)
            cast.kill(0)
            return 0

        monkeypatch.setattr(WorkerState, "save", save_or_die)
        cast.start(0, 2)
        cast.start(1, 2)

    ranks = play(place, scene, epochs=1, checkpoint={"dir": tmp_path})
    assert ranks[1].error is None
    assert CheckpointStore.to_read(tmp_path / "rank-0").rounds() == killed == [ranks[1].worker.step]


def test_a_checkpoint_that_this_rank_could_not_write_is_no_fault_once_another_has_written_later_ones(
    place: dict[str, Any], tmp_path: Path
) -> None:
    def scene(cast: Cast) -> None:
        def could_not_write() -> None:
            fault = CheckpointError("the disk was full at step 2")
            cast.ranks[1].worker._checkpoints.fault = fault  # noqa: SLF001 - else it had to be rank 0 and then be rank 1

        cast.start(0, 2)
        cast.start(1, 2, on_step=at_step(3, could_not_write))

    ranks = play(place, scene, epochs=1, checkpoint={"dir": tmp_path})
    assert ranks[0].error is ranks[1].error is None
    assert CheckpointStore.to_read(tmp_path / "rank-0").rounds() == [ranks[1].worker.step]


def lose_rank_0_once(monkeypatch: pytest.MonkeyPatch, cast: Cast, when: Callable[[str, bool], bool]) -> list[str]:
    """Rank 1 loses its group instead of counting a vote, once, when rank 0 has counted that and gone on. Returns the
    occasion then. ``when``: whether it is this one, by its occasion and its result."""
    send, count, lost = StopVotes.send_vote, StopVotes.counted, list[str]()
    newest: dict[StopVotes, tuple[str, int]] = {}
    counted: set[tuple[str, int]] = set()  # by rank 0

    def note_and_send(votes: StopVotes, wants_end: bool, name: str, *, step: int, **options: Any) -> None:
        newest[votes] = name, step
        send(votes, wants_end, name, step=step, **options)

    async def count_or_lose(votes: StopVotes) -> bool:
        is_pending, ends = votes.is_pending, await count(votes)
        if is_pending and cast.number == 0:
            counted.add(newest[votes])
        elif is_pending and not lost and when(newest[votes][0], ends):
            lost.append(newest[votes][0])
            await eventually(lambda: newest[votes] in counted)
            raise PeerLost("world_1", {0: "has gone"})
        return ends

    monkeypatch.setattr(StopVotes, "send_vote", note_and_send)
    monkeypatch.setattr(StopVotes, "counted", count_or_lose)
    return lost


def test_ranks_that_are_lost_between_two_epochs_go_on_in_the_later_one(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[list[str]] = []

    def scene(cast: Cast) -> None:
        lost.append(lose_rank_0_once(monkeypatch, cast, lambda occasion, _: occasion == "epoch"))
        cast.start(0, 2)
        cast.start(1, 2)

    ranks = play(place, scene, epochs=2)
    assert lost == [["epoch"]]
    assert ranks[0].error is ranks[1].error is None
    assert [report.epoch for report in ranks[0].reports] == [0, 1]
    assert ranks[0].worker.step == ranks[1].worker.step == 2 * 7  # of 13 batches each
    assert torch.equal(ranks[0].parameters, ranks[1].parameters)


def test_a_vote_for_the_end_that_one_rank_has_counted_counts_for_all(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[list[str]] = []

    def scene(cast: Cast) -> None:
        lost.append(lose_rank_0_once(monkeypatch, cast, lambda _, ends: ends))
        cast.start(0, 2, on_step=lambda report: report.step == 3)
        cast.start(1, 2)

    ranks = play(place, scene, epochs=LONG)
    assert lost == [["step"]]
    assert ranks[0].error is ranks[1].error is None
    assert ranks[0].worker.step == ranks[1].worker.step == 4
    assert torch.equal(ranks[0].parameters, ranks[1].parameters)


def test_with_a_delay_a_vote_for_the_end_counts_when_the_exchange_of_its_step_is_applied(place: dict[str, Any]) -> None:
    def scene(cast: Cast) -> None:
        cast.start(0, 2, on_step=lambda report: report.step == 2, task=make_task(batch_size=8))
        cast.start(1, 2, task=make_task(batch_size=8))

    ranks = play(place, scene, algorithm=LATE, epochs=LONG)
    assert ranks[0].error is ranks[1].error is None
    # The vote goes with the next exchange, after step 4.
    assert ranks[0].worker.step == ranks[1].worker.step == 4 + 3
    assert torch.equal(ranks[0].parameters, ranks[1].parameters)


def test_a_wish_to_end_in_a_vote_that_is_lost_is_told_again(place: dict[str, Any]) -> None:
    def scene(cast: Cast) -> None:
        cast.start(0, 3, on_step=lambda report: report.step == 3)
        cast.start(1, 3)
        cast.start(2, 3, on_step=at_step(3, lambda: cast.kill(2)))  # before it votes

    ranks = play(place, scene, epochs=LONG)
    assert ranks[0].error is ranks[1].error is None
    assert ranks[0].worker.step == ranks[1].worker.step == 5


def votes_after_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All that are cast from here on."""
    found: list[int] = []
    cast = StopVotes.send_vote

    def noted(self: StopVotes, wants_end: bool, name: str, *, step: int, **options: Any) -> None:
        if name == "step":
            found.append(step)
        cast(self, wants_end, name, step=step, **options)

    monkeypatch.setattr(StopVotes, "send_vote", noted)
    return found


@pytest.mark.parametrize(("every_s", "steps"), [(1e9, [1, 33, 50, 51]), (0.0, list(range(1, 71)))])
def test_ranks_vote_as_rarely_as_they_may_hear_late_of_one_that_leaves(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, every_s: float, steps: list[int]
) -> None:
    monkeypatch.setattr(elastic, "VOTE_EVERY_S", every_s)
    found = votes_after_steps(monkeypatch)

    def scene(cast: Cast) -> None:
        for number in range(2):  # an epoch has 50 steps
            cast.start(number, 2, task=make_task(batch_size=2), on_epoch=lambda _: None)

    ranks = play(place, scene, epochs=LONG, max_steps=70)
    assert ranks[0].error is ranks[1].error is None
    assert sorted(found) == sorted(2 * steps)


def test_with_callbacks_ranks_vote_after_each_step(place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "VOTE_EVERY_S", 1e9)
    found = votes_after_steps(monkeypatch)

    def scene(cast: Cast) -> None:
        cast.start(0, 2)
        cast.start(1, 2, on_epoch=lambda _: None)

    play(place, scene, epochs=LONG, max_steps=9)
    assert sorted(found) == sorted(2 * list(range(1, 10)))


def test_a_leave_between_two_rare_votes_loses_no_step_and_no_batch(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "VOTE_EVERY_S", 1e9)

    def scene(cast: Cast) -> None:
        cast.start(0, 2, task=make_task(batch_size=2), on_epoch=lambda _: None)
        cast.start(1, 2, task=make_task(batch_size=2), on_epoch=ElasticWorker.leave)

    ranks = play(place, scene, epochs=3)
    assert ranks[0].error is ranks[1].error is None
    assert ranks[1].worker.has_left
    assert (
        ranks[1].worker.step == 52
    )  # it leaves after the vote of the first step of an epoch, which the next one counts
    ends = [0, *(report.step for report in ranks[0].reports)]
    assert [after - before for before, after in itertools.pairwise(ends)] == [50, 98, 100]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"delay_steps": 1}, "applies steps late (delay_steps)"),
        ({"algorithm__name": "local-sgd", "delay_steps": 1}, "applies steps late (delay_steps)"),
        ({"algorithm__name": "dense", "algorithm__route": "hierarchical"}, "adds up by hosts"),
        (
            {
                "algorithm__name": "dense",
                "algorithm__route": "hierarchical",
                "algorithm__topology": {"ranks": [{"host": host} for host in "aabb"]},
            },
            "or a topology, which are those of a fixed world",
        ),
        ({"algorithm__name": "bytegrad", "algorithm__hierarchical": True}, "adds up by hosts"),
    ],
)
def test_what_cannot_be_elastic_is_refused(place: dict[str, Any], settings: dict[str, Any], reason: str) -> None:
    def scene(cast: Cast) -> None:
        cast.start(0, 1)

    ranks = play(place, scene, **settings)
    assert reason in str(ranks[0].error)
    assert "ranks cannot come and go then. Set elastic.min_world=0" in str(ranks[0].error)


class OfGradients(StreamingDiLoCo):
    scope = "step"


class NeedsLoss(StreamingDiLoCo):
    needs_loss = True


class OwnCommit(StreamingDiLoCo):
    def commit(self) -> None:
        """As that of any algorithm."""
        super().commit()


@pytest.mark.parametrize("kind", [OfGradients, NeedsLoss, OwnCommit])
def test_an_algorithm_whose_late_exchanges_would_leave_a_trace_is_refused_whatever_it_declares(
    place: dict[str, Any], kind: type[StreamingDiLoCo]
) -> None:
    options = kind.Options(steps=4, delay=2)
    ranks = play(place, lambda cast: cast.start(0, 1), make_algorithm=lambda place: kind(place, options), max_steps=1)
    assert isinstance(ranks[0].error, ConfigError)
    assert "it has can_drop_late, and exchanges no weights, needs the loss or has its own" in str(ranks[0].error)


def test_who_is_cancelled_while_it_gives_up_a_transfer_is_cancelled() -> None:
    async def main() -> None:
        is_ending, may_end = asyncio.Event(), asyncio.Event()

        async def ends_late(*_: object, **__: object) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                is_ending.set()
                await may_end.wait()

        group: Any = SimpleNamespace(recv_object=ends_late)
        transfer = StateTransfer(group, timeout_s=1.0, max_bytes=0)
        transfer.receive(1)
        await asyncio.sleep(0)  # it has begun
        closing = asyncio.create_task(transfer.close())
        await is_ending.wait()
        closing.cancel()
        may_end.set()
        await asyncio.wait([closing])
        assert closing.cancelled()

    asyncio.run(main())
