"""Commands of a controller that was replaced: a TrainCmd does not say whose it is, and the earlier start of a run may
still send some. All over real DDS."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

from dds_domains import new_domain

import gradbus
from gradbus.models import NoopTask, TrainResult
from gradbus.runtime.bus.bus import Bus
from gradbus.runtime.transport.channels import ToClients, ToController
from gradbus.runtime.wire.control import Hello, RepeatedCommand
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import Control, Identity, TrainCmd

DIM = 300
STRAY = TrainCmd(50, subset_size=0, epochs=1, lr=99.0, seed=0)

_jobs = itertools.count()


class Counting(NoopTask):
    """Counts its trainings by round and rate."""

    def __init__(self) -> None:
        super().__init__(DIM, delta="seeded")
        self.trained: Counter[tuple[int, float]] = Counter()

    def train(self, model: Any, **arguments: Any) -> TrainResult:
        self.trained[arguments["round_id"], arguments["lr"]] += 1
        return super().train(model, **arguments)


def rules(directory: Path, rounds: int) -> gradbus.FederatedConfig:
    return gradbus.FederatedConfig(
        **{
            "rounds": rounds,
            "eval_every": 0,
            "checkpoint": {"dir": directory},
            "round": {"timeout_s": 20.0},
            "clients": {"num": 1, "min": 1, "dead_after_s": 60.0, "heartbeat_s": 0.2},
        }
    )


async def command_astray(bus: Bus, said: list[Control]) -> None:
    """Command a round that is far ahead, over and over, from the moment at which a controller has welcomed a client;
    note what that controller says."""
    is_welcomed = False
    with bus.subscribe(ToController, ToClients) as inbox:
        while True:
            message = await inbox.get()
            if not isinstance(message, Control):
                continue
            if isinstance(message.body, Hello):
                assert message.body.round_id != STRAY.round_id, "the client follows a command of nobody"
                is_welcomed = is_welcomed or message.body.session != 0
            if message.sender == CONTROLLER:
                said.append(message)
            if is_welcomed:
                await bus.publish(Identity(CONTROLLER, 1), STRAY)


async def run(place: dict[str, Any], config: gradbus.FederatedConfig, task: Counting) -> list[gradbus.RoundReport]:
    async with (
        gradbus.connect(**place) as bus,
        gradbus.connect(**place) as its_bus,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(gradbus.Client(its_bus, task, client_id=0).run())
        return await gradbus.Controller(bus, NoopTask(DIM), config).run()


def test_clients_of_a_later_start_take_no_command_that_does_not_name_it(tmp_path: Path) -> None:
    place: dict[str, Any] = {"job": f"replaced-{os.getpid()}-{next(_jobs)}", "domain": new_domain()}
    task, said = Counting(), []

    async def main() -> list[gradbus.RoundReport]:
        async with asyncio.timeout(60):
            await run(place, rules(tmp_path, 1), Counting())
            async with gradbus.connect(**place) as other, asyncio.TaskGroup() as group:
                astray = group.create_task(command_astray(other, said))
                reports = await run(place, rules(tmp_path, 4), task)
                astray.cancel()
                return reports

    reports = asyncio.run(main())
    assert [report.attempt for report in reports] == [1] * 4
    assert sorted(round_id for round_id, _ in task.trained) == [2, 3, 4]
    assert set(task.trained.values()) == {1}
    assert STRAY.lr not in {rate for _, rate in task.trained}
    assert {one.body.round_id for one in said if isinstance(one.body, RepeatedCommand)} == {2, 3, 4}
