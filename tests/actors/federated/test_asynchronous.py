"""Asynchronous runs: the buffer as a pure object, and whole runs over DDS with all actors on one loop."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from patience import eventually

import gradbus
from gradbus.actors.aggregation.robust import CoordinateMedian
from gradbus.actors.federated.controller.asynchronous import (
    BufferRound,
    adaptive_grace_s,
    check_asynchronous,
    proportional_steps,
)
from gradbus.actors.federated.controller.report import ClientTimeline, RoundReport
from gradbus.actors.federated.controller.rounds import Outcome, RoundRules
from gradbus.models import NoopTask
from gradbus.runtime.config.federated import AsynchronousSettings
from gradbus.runtime.errors import ConfigError

DIM = 50_000
RULES = RoundRules(minimum=1, quorum=1.0, deadline_s=100.0, grace_s=5.0)

_jobs = itertools.count()


def buffer_of(size: int, *, local_s: float = 0.0, sync_s: float = 0.0, **settings: Any) -> BufferRound:
    buffer = BufferRound(7, [0, 1, 2], RULES, AsynchronousSettings(buffer=size, **settings), now_s=0.0)
    timeline = (ClientTimeline(client_id=0, train_s=local_s),)
    buffer.go_on(RoundReport(round_id=6, timeline=timeline, publish_s=sync_s), updates=0)
    return buffer


def test_a_buffer_is_full_after_so_many_updates_whoever_sent_them() -> None:
    buffer = buffer_of(3)
    for _ in range(2):
        assert buffer.may_send(0) is None
        buffer.accept(0, 1.0)
        assert buffer.verdict(1.0) is None
    buffer.accept(1, 2.0)
    assert buffer.verdict(2.0) is Outcome.FULL
    assert buffer.is_full
    assert (buffer.ready, buffer.needed, buffer.accepted) == (3, 3, {0, 1})
    assert [buffer.staleness(round_id) for round_id in (8, 7, 5)] == [-1, 0, 2]


def test_without_repeats_each_client_counts_once_and_a_lost_one_is_not_waited_for() -> None:
    buffer = buffer_of(3, repeats=False)
    buffer.accept(0, 1.0)
    assert buffer.may_send(0) == "repeated"
    assert buffer.open == {1, 2}
    assert buffer.follow_clients({0, 1}, ()) == ([2], [])
    buffer.accept(1, 2.0)
    assert buffer.verdict(2.0) is Outcome.ALL


def test_the_deadline_ends_a_buffer_that_is_not_full() -> None:
    buffer = buffer_of(5)
    assert buffer.verdict(100.0) is Outcome.TOO_FEW
    buffer.accept(0, 1.0)
    assert buffer.verdict(99.0) is None
    assert buffer.verdict(100.0) is Outcome.DEADLINE


def test_the_grace_is_a_share_of_the_slack_and_never_negative() -> None:
    assert adaptive_grace_s(share=0.5, local_s=10.0, quorum_s=2.0, sync_s=1.0) == 3.5
    assert adaptive_grace_s(share=0.5, local_s=1.0, quorum_s=2.0, sync_s=1.0) == 0.0
    buffer = buffer_of(2, local_s=10.0, sync_s=1.0, grace_share=0.5)
    buffer.accept(0, 1.0)
    buffer.accept(1, 3.0)
    assert not buffer.is_full
    assert buffer.next_check_s() == 6.5
    assert buffer.verdict(6.4) is None
    assert buffer.verdict(6.5) is Outcome.FULL


def test_slow_clients_make_steps_in_proportion_to_their_speed() -> None:
    assert proportional_steps(50, {0: 100.0, 1: 10.0, 2: 55.0, 3: 0.0}) == {0: 50, 1: 5, 2: 28, 3: 1}
    assert proportional_steps(50, {0: math.inf, 1: 10.0, 2: 5.0}) == {1: 50, 2: 25}
    assert proportional_steps(50, {0: 1e300, 1: 10.0, 2: 10.0}) == {0: 50, 1: 5, 2: 5}  # and not 1
    assert proportional_steps(50, {}) == proportional_steps(50, {0: 0.0}) == {}
    assert proportional_steps(500, {0: 10.0, 1: 12.0, 2: 1.7e308}) == {0: 42, 1: 50, 2: 500}  # and no overflow
    assert proportional_steps(100, {0: 0.5, 1: 0.5, 2: 1.7e308}) == {0: 10, 1: 10, 2: 100}


class Paced(NoopTask):
    """Client 1 takes its time in each step. Notes the steps of each training."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.steps: dict[int, list[int]] = {0: [], 1: []}

    def train(self, model: Any, *, client_id: int, steps: int, **arguments: Any) -> Any:
        self.steps[client_id].append(steps)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.vector.grad = torch.zeros(DIM)
        for _ in range(steps):
            time.sleep(0.005 + 0.1 * client_id)  # stands for work, on a slow machine
            optimizer.step()
        return super().train(model, client_id=client_id, **arguments)


def test_a_client_that_is_found_slow_makes_fewer_steps_from_then_on() -> None:
    task = Paced()
    config = config_of(
        rounds=4,
        clients={"num": 2},
        training={"steps": 10},
        asynchronous={"buffer": 2, "repeats": False, "proportional_steps": True},
    )
    run(config, [task, task])
    assert set(task.steps[0]) == {10}
    assert task.steps[1][0] == 10
    assert max(task.steps[1][1:]) < 8


def config_of(**settings: Any) -> gradbus.FederatedConfig:
    return gradbus.FederatedConfig(**{"mode": "asynchronous", "eval_every": 0, "rounds": 4, **settings})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"mode": "synchronous", "asynchronous": {"buffer": 3}}, "asynchronous.buffer needs mode = asynchronous"),
        ({"clients": {"kind": "sites"}}, "cannot be brought to a newer model"),
        ({"round": {"quorum": 0.5}}, "set asynchronous.buffer"),
        ({"clients": {"min": 4}, "asynchronous": {"buffer": 3}}, "less than clients.min"),
        ({"clients": {"num": 2}, "asynchronous": {"buffer": 3, "repeats": False}}, "never full"),
    ],
)
def test_settings_that_cannot_work_together_are_refused_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        config_of(**settings)


class Gated(NoopTask):
    """Each training waits for the test, which gives the order of arrival. It notes the numbers of the trainings."""

    def __init__(self) -> None:
        super().__init__(DIM, delta="seeded")
        self.may_train = threading.Semaphore(0)
        self.has_begun = threading.Event()
        self.numbers: list[int] = []

    def train(self, model: Any, **arguments: Any) -> Any:
        self.has_begun.set()
        while not self.may_train.acquire(timeout=0.05):
            if arguments["should_stop"]():
                break
        self.numbers.append(arguments["round_id"])
        return super().train(model, **arguments)


def run(
    config: gradbus.FederatedConfig,
    tasks: Sequence[Any],
    conduct: Callable[[gradbus.Controller], Any] | None = None,
) -> tuple[list[gradbus.RoundReport], gradbus.Controller]:
    """A whole run, with a bus for each. ``conduct``: a coroutine beside it."""
    job, domain = f"asynchronous-{os.getpid()}-{next(_jobs)}", new_domain()
    config = config.replaced("clients.dead_after_s", 30.0)

    async def one(client_id: int, task: Any) -> None:
        async with gradbus.connect(job=job, domain=domain) as bus:
            await gradbus.Client(bus, task, client_id=client_id).run()

    async def main() -> tuple[list[gradbus.RoundReport], gradbus.Controller]:
        async with asyncio.timeout(60), gradbus.connect(job=job, domain=domain) as bus:
            controller = gradbus.Controller(bus, NoopTask(DIM), config)
            async with asyncio.TaskGroup() as group:
                for client_id, task in enumerate(tasks):
                    group.create_task(one(client_id, task))
                if conduct is not None:
                    group.create_task(conduct(controller))
                return await controller.run(), controller

    return asyncio.run(main())


async def counted(controller: gradbus.Controller, round_id: int, ready: int) -> None:
    """Wait until this round has so many updates."""
    await eventually(lambda: (controller.progress.round_id, controller.progress.ready) >= (round_id, ready), 20.0)


@pytest.mark.parametrize("version", [1, 2])
def test_the_slow_client_is_not_waited_for_and_its_late_update_counts(version: int) -> None:
    async def conduct(controller: gradbus.Controller) -> None:
        assert await asyncio.to_thread(slow.has_begun.wait, 20.0)  # else it may begin with a later model
        fast.may_train.release(4)
        await counted(controller, 3, 0)
        slow.may_train.release(1)  # from model 0: two models are newer by now
        await counted(controller, 3, 1)
        fast.may_train.release(100)

    fast, slow = Gated(), Gated()
    config = config_of(
        rounds=3,
        clients={"num": 2},
        asynchronous={"buffer": 2},
        codec={"name": "fp32", "version": version},
        limits={"cap_samples": None},
    )
    reports, controller = run(config, [fast, slow], conduct)
    assert [(report.updates, report.clients, report.outcome) for report in reports] == [
        (2, (0,), "buffer full"),
        (2, (0,), "buffer full"),
        (2, (0, 1), "buffer full"),
    ]
    assert reports[2].max_staleness == 2
    assert fast.numbers == list(range(1, len(fast.numbers) + 1))  # each with data of its own
    assert controller.weights.any()


def test_without_repeats_a_client_trains_once_from_each_model_and_one_vote_is_enough_for_the_median() -> None:
    tasks = [NoopTask(DIM, delta="seeded") for _ in range(4)]
    config = config_of(
        clients={"num": 4, "min": 3},
        strategy={"name": "median", "byzantine": 1},
        asynchronous={"buffer": 3, "repeats": False},
    )
    reports, _ = run(config, tasks)
    assert all(len(report.clients) == report.updates >= 3 for report in reports)


def test_a_strategy_of_one_vote_each_is_refused_where_fast_clients_count_more_often() -> None:
    config = config_of(clients={"num": 4, "min": 3}, strategy="median")
    with pytest.raises(ConfigError, match=r"one vote.*repeats"):
        check_asynchronous(config, CoordinateMedian(DIM, byzantine=1))


@pytest.mark.parametrize("strategy", ["delayednesterov", "fedavgm"])
def test_a_run_that_goes_on_from_its_checkpoint_has_the_bits_of_one_that_never_stopped(
    strategy: str, tmp_path: Path
) -> None:
    def weights(rounds: Sequence[int], folder: Path) -> torch.Tensor:
        for number in rounds:
            config = config_of(
                rounds=number,
                clients={"num": 1},
                asynchronous={"buffer": 1, "repeats": False},
                strategy=strategy,
                checkpoint={"dir": folder},
            )
            found = run(config, [NoopTask(DIM, delta="seeded")])[1].weights
        return found

    assert torch.equal(weights([5], tmp_path / "whole"), weights([2, 5], tmp_path / "parts"))
