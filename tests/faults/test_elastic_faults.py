"""Elastic runs under one fault each: a rank dies at a place in its step, while it joins, or with others; a clock jumps;
messages and steps are slow; the disk is full. All ranks in one process, each with a bus of its own, over DDS.

Whatever happens, those that are left go on, nobody waits for longer than a deadline, and weights are equal.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scene import make_task, new_place, training_of, vector
from group_node import LEASE_S
from patience import eventually
from settings import nested

import gradbus
from gradbus.actors import ElasticPlace, ElasticWorker
from gradbus.runtime import checkpoint
from gradbus.runtime.checkpoint import CheckpointStore
from gradbus.runtime.config.data_parallel import DataParallelConfig
from gradbus.runtime.errors import CheckpointError
from gradbus.runtime.testing.failpoints import FailPoint

pytestmark = pytest.mark.faults

STEPS = 8
LONG = 5000  # epochs of a run that a callback ends


def die() -> None:
    raise asyncio.CancelledError  # to the others that is a death: nothing is said


@dataclass
class Run:
    """Processes of a run, in tasks of this one."""

    settings: dict[str, Any]
    place: dict[str, Any] = field(default_factory=new_place)
    workers: dict[int, ElasticWorker] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    steps: list[tuple[int, int]] = field(default_factory=list)  # number of the process, and ranks
    until: Callable[[], bool] = lambda: False  # the run ends

    async def rank(self, number: int, founders: int = 0, *, fail_at: str = "", task: Any = None, **bus: Any) -> None:
        """A process. ``fail_at``: where it dies, as ``after_send:3``."""
        elastic = {"min_world": 1, "max_world": 8, "wait_s": 20.0}
        config = DataParallelConfig(**nested({"epochs": 50, "hash_every": 1} | self.settings), elastic=elastic)
        async with gradbus.connect(**self.place, lease_s=LEASE_S, **bus) as opened:
            seat = ElasticPlace(bus=opened, number=number, founders=founders)
            worker = ElasticWorker(seat, task or make_task(), config, callbacks=[self._watch(number)])
            # The environment's fail point is that of a process, and all ranks are in this one.
            worker._probe.fail = FailPoint(fail_at, die, who=f"rank-{number}")  # noqa: SLF001 - see above
            self.workers[number] = worker
            try:
                await worker.run()
                self.done.add(number)
            except Exception as error:
                self.errors[number] = error

    def _watch(self, number: int) -> Any:
        class Watch:
            def on_step(_, report: Any) -> bool:  # noqa: N805 - self is the outer one
                self.steps.append((number, report.world))
                return self.until()

        return Watch()

    def play(self, scene: Callable[[asyncio.TaskGroup], object], *, within_s: float = 30.0) -> None:
        torch.set_num_threads(1)

        async def main() -> None:
            async with asyncio.timeout(within_s), asyncio.TaskGroup() as tasks:
                scene(tasks)

        asyncio.run(main())

    def check(self, *numbers: int, steps: int | None = STEPS) -> None:
        """Exactly these have come to the end, with equal weights."""
        assert self.errors == {}
        assert self.done == set(numbers)
        made = {self.workers[number].step for number in numbers}
        assert made == {steps} if steps is not None else len(made) == 1
        first, *others = (vector(self.workers[number].model) for number in numbers)
        assert all(torch.equal(first, other) for other in others)


def founders(run: Run, count: int, dying: dict[int, str]) -> Callable[[asyncio.TaskGroup], None]:
    def scene(tasks: asyncio.TaskGroup) -> None:
        for number in range(count):
            tasks.create_task(run.rank(number, count, fail_at=dying.get(number, "")))

    return scene


@pytest.mark.parametrize(
    ("number", "fail_at"),
    [
        (1, "before_step:1"),  # at step 0, before anything
        (2, "before_step:3"),
        (0, "after_send:1"),  # gradients are on their way, and the others add up
        (1, "after_send:3"),
        (0, "after_step:3"),  # it has applied the step, and says so to nobody
        (2, "after_step:8"),  # the last one
    ],
)
def test_a_rank_dies_at_any_place_of_a_step_and_the_others_end_with_equal_weights(number: int, fail_at: str) -> None:
    run = Run({"max_steps": STEPS})
    run.play(founders(run, 3, {number: fail_at}))
    run.check(*({0, 1, 2} - {number}))


@pytest.mark.parametrize(
    ("number", "fail_at"),
    [
        (1, "before_step:5"),  # the exchange of step 4 is on its way until step 7
        (0, "after_send:6"),
        (2, "after_step:7"),  # it has applied the result, and says so to nobody
        (1, "before_save:9"),  # the result of the exchange of step 8 is applied early
    ],
)
def test_a_rank_dies_while_a_late_exchange_is_on_its_way_and_the_others_end_with_equal_weights(
    number: int, fail_at: str, tmp_path: Path
) -> None:
    algorithm = {"name": "diloco", "steps": 4, "delay": 3, "codec": "q4"}
    run = Run({"max_steps": 14, "algorithm": algorithm, "checkpoint": {"dir": tmp_path, "every_steps": 9}})
    run.play(founders(run, 3, {number: fail_at}))
    run.check(*({0, 1, 2} - {number}), steps=14)
    left = [training_of(run.workers[other]).algorithm.shared_state() for other in {0, 1, 2} - {number}]
    assert "momentum/fragment0" in left[0]
    assert all(torch.equal(tensor, left[1][name]) for name, tensor in left[0].items())


def test_two_of_five_ranks_die_in_one_step_at_different_places() -> None:
    run = Run({"max_steps": STEPS})
    run.play(founders(run, 5, {0: "after_send:3", 3: "after_step:3"}))
    run.check(1, 2, 4)


@pytest.mark.parametrize("who", ["the one that joins", "the one whose state it gets"])
def test_a_death_while_a_rank_joins_leaves_the_others_with_equal_weights(who: str) -> None:
    left = (0, 1, 2) if who == "the one that joins" else (1, 2, 7)
    run = Run({"epochs": LONG}, until=lambda: bool(died) and (left[-1], 3) in run.steps[died[0] :])
    died: list[int] = []  # steps until then

    def scene(tasks: asyncio.TaskGroup) -> None:
        running = {number: tasks.create_task(run.rank(number, 3)) for number in range(3)}

        def is_member() -> bool:
            found = run.workers[7].generations if 7 in run.workers else None
            return found is not None and any(member.number == 7 for member in found.members)

        async def join_and_die() -> None:
            await eventually(lambda: len(run.steps) >= 6)
            running[7] = tasks.create_task(run.rank(7))
            await eventually(is_member)
            running[7 if who == "the one that joins" else 0].cancel()
            died.append(len(run.steps))

        tasks.create_task(join_and_die())

    run.play(scene)
    run.check(*left, steps=None)


class Slow:
    """A task whose every batch takes its time."""

    def __init__(self, seconds: float) -> None:
        self._inner = make_task()
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def loss(self, model: Any, batch: Any) -> Any:
        time.sleep(self._seconds)
        return self._inner.loss(model, batch)


def test_slow_messages_and_slow_steps_are_no_deaths() -> None:
    generations: set[int] = set()  # that a step was made in: one, as none before the first step needs to form

    def note() -> bool:
        generations.add(run.workers[0].generations.number)
        return False

    run = Run({"max_steps": STEPS}, until=note)

    def scene(tasks: asyncio.TaskGroup) -> None:
        late = (
            "delay collective p=0.5 seconds=0.05; duplicate collective p=0.2; delay control p=0.3 seconds=0.2; seed=5"
        )
        tasks.create_task(run.rank(0, 3))
        tasks.create_task(run.rank(1, 3, faults=late, shared_memory=False))
        tasks.create_task(run.rank(2, 3, task=Slow(0.1)))

    run.play(scene)
    run.check(0, 1, 2)
    assert {world for _, world in run.steps} == {3}
    assert len(generations) == 1


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_jumps_ends_nothing_and_lets_a_process_that_is_started_again_in(
    hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run({"epochs": LONG}, until=lambda: (1, 2) in run.steps and (2, 3) in run.steps[run.steps.index((1, 2)) :])
    now, now_ns = time.time, time.time_ns

    def scene(tasks: asyncio.TaskGroup) -> None:
        for number in range(3):
            tasks.create_task(run.rank(number, 3, fail_at="after_step:3" if number == 2 else ""))

        async def jump_and_start() -> None:
            await eventually(lambda: (1, 2) in run.steps)
            monkeypatch.setattr(time, "time", lambda: now() + 3600 * hours)
            monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 3600 * hours * 10**9)
            await run.rank(2)

        tasks.create_task(jump_and_start())

    run.play(scene)
    run.check(0, 1, 2, steps=None)


def test_a_full_disk_at_a_checkpoint_is_a_warning_and_training_goes_on_to_the_next_one(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run({"max_steps": STEPS, "checkpoint": {"dir": tmp_path, "every_steps": 4}})
    write, is_full = checkpoint.save_file, [True]

    def write_or_fail(*arguments: Any, **options: Any) -> None:
        if is_full:
            is_full.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments, **options)

    monkeypatch.setattr(checkpoint, "save_file", write_or_fail)
    run.play(founders(run, 3, {}))
    run.check(0, 1, 2)
    assert CheckpointStore.to_read(tmp_path / "rank-0").rounds() == [STEPS]


def test_a_disk_that_is_full_at_the_end_is_an_error_of_the_rank_that_writes(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run({"max_steps": STEPS, "checkpoint": {"dir": tmp_path}})

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    run.play(founders(run, 2, {}))
    error = run.errors.pop(0)
    assert isinstance(error, CheckpointError)
    assert "No space left on device" in str(error)
    assert "make room" in str(error)
    run.check(1)
