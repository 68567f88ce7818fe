"""A message that is lost, a TrainCmd above all, costs a heartbeat and not the deadline of its round, whatever kind of
round it is.

All over real DDS. The commands are lost between the controller's writer and DDS, as ``bus.faults`` does it, for all
clients; or in the inbox of one client.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dds_domains import new_domain
from trees import rules as rules_of_tree
from trees import site_of, tree

import gradbus
from gradbus import codecs
from gradbus.actors.federated.client.client_run import ClientRun, Prepared
from gradbus.actors.federated.client.session import ClientContext
from gradbus.actors.virtual.client_trainer import PoolSettings
from gradbus.actors.virtual.host import ClientHost
from gradbus.actors.virtual.local_pool import LocalPool
from gradbus.models import NoopTask, TrainResult
from gradbus.runtime.testing.faults import Faults
from gradbus.runtime.wire.messages import Message, TrainCmd

DIM = 300
ROUNDS = 3
# Where a command is not repeated its round ends after this time, and is begun again: in attempt 2.
ROUND_S = 20.0
LOST = "drop command nth=2"

_jobs = itertools.count()


class Counting(NoopTask):
    """Counts its trainings by round, and fails those of the rounds in ``fails``."""

    def __init__(self, fails: Sequence[int] = ()) -> None:
        super().__init__(DIM, delta="seeded")
        self.fails = fails
        self.trained: Counter[int] = Counter()
        self.rates: list[float] = []

    def train(self, model: Any, **arguments: Any) -> TrainResult:
        self.trained[arguments["round_id"]] += 1
        self.rates.append(arguments["lr"])
        if arguments["round_id"] in self.fails:
            raise ArithmeticError("not this round")
        return super().train(model, **arguments)


class Packets(Counting):
    """Sends its update in two packets."""

    def train(self, model: Any, *, round: Any, **arguments: Any) -> TrainResult:  # type: ignore[override]
        self.trained[arguments["round_id"]] += 1
        for _ in range(2):
            round.send(codecs.get("q8").encode(torch.ones(DIM)))
        return TrainResult(1, 0.5)


class MissesOne(gradbus.Client):
    """Loses the first command of the rounds in ``missed``."""

    missed: set[int]

    def _make_run(self, context: ClientContext, prepared: Prepared) -> MissesOneRun:
        return MissesOneRun(context, prepared, self._outbox, self._observer, self.missed)


class MissesOneRun(ClientRun):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts[:-1])
        self.missed: set[int] = parts[-1]

    def concerns(self, message: Message) -> bool:
        if isinstance(message, TrainCmd) and message.round_id in self.missed:
            self.missed.discard(message.round_id)
            return False
        return super().concerns(message)


def rules(clients: int, *, least: int = 0, **changed: Any) -> gradbus.FederatedConfig:
    members = {"num": clients, "min": least or clients, "dead_after_s": 60.0, "heartbeat_s": 0.2}
    deadline = {"timeout_s": ROUND_S}
    return gradbus.FederatedConfig(
        **{"rounds": ROUNDS, "eval_every": 0, "round": deadline, **changed, "clients": members}
    )


def run(
    tasks: Sequence[Any],
    config: gradbus.FederatedConfig,
    *,
    faults: str = LOST,
    missed: dict[int, set[int]] | None = None,
) -> list[gradbus.RoundReport]:
    """A run of clients with these tasks, some of which miss the commands of rounds."""
    place: dict[str, Any] = {"job": f"lost-{os.getpid()}-{next(_jobs)}", "domain": new_domain()}

    async def one(client_id: int) -> None:
        async with gradbus.connect(**place) as bus:
            client = MissesOne(bus, tasks[client_id], client_id=client_id)
            client.missed = set((missed or {}).get(client_id, ()))
            await client.run()

    async def main() -> list[gradbus.RoundReport]:
        rules = Faults(faults)
        async with asyncio.timeout(60), gradbus.connect(**place, faults=rules) as bus, asyncio.TaskGroup() as group:
            for client_id in range(len(tasks)):
                group.create_task(one(client_id))
            reports = await gradbus.Controller(bus, NoopTask(DIM), config).run()
        assert rules.fired["drop command"] == len(rules.rules)
        return reports

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("side", "lost"),
    [("client", "upload_request"), ("controller", "grant"), ("client", "update"), ("controller", "receipt")],
)
def test_of_an_upload_no_message_that_is_lost_costs_the_deadline(side: str, lost: str) -> None:
    place: dict[str, Any] = {"job": f"lost-{os.getpid()}-{next(_jobs)}", "domain": new_domain()}
    faults = Faults(f"drop {lost} nth=2")

    async def one() -> None:
        async with gradbus.connect(**place, shared_memory=False, faults=faults if side == "client" else "") as bus:
            await gradbus.Client(bus, Counting(), client_id=0).run()

    async def main() -> list[gradbus.RoundReport]:
        own = faults if side == "controller" else ""
        async with (
            asyncio.timeout(60),
            gradbus.connect(**place, shared_memory=False, faults=own) as bus,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(one())
            return await gradbus.Controller(bus, NoopTask(DIM), rules(1)).run()

    assert attempts(asyncio.run(main())) == [1] * ROUNDS
    assert faults.fired[f"drop {lost}"] == 1


def attempts(reports: Sequence[gradbus.RoundReport]) -> list[int]:
    return [report.attempt for report in reports]


@pytest.mark.parametrize(
    "changed",
    [
        {"codec": "s4", "downlink_codec": "q8"},
        {"selection": {"name": "round_robin", "count": 2}},
        {"secure_aggregation": {"enabled": True, "keys_timeout_s": 5.0, "shares_timeout_s": 5.0}},
        {"limits": {"trust": "adversarial"}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_command_that_no_client_gets_is_repeated_and_each_trains_once(changed: dict[str, Any]) -> None:
    tasks = [Counting() for _ in range(3)]
    reports = run(tasks, rules(3, least=2 if "selection" in changed else 3, **changed))
    assert attempts(reports) == [1] * ROUNDS
    assert all(report.outcome in ("all live clients answered", "enough updates") for report in reports)
    assert sum((task.trained for task in tasks), Counter()) == Counter(
        client for report in reports for client in [report.round_id] * len(report.clients)
    )


def test_the_same_of_updates_in_packets() -> None:
    tasks = [Packets() for _ in range(2)]
    reports = run(tasks, rules(2))
    assert attempts(reports) == [1] * ROUNDS
    assert [task.trained for task in tasks] == [Counter({1: 1, 2: 1, 3: 1})] * 2


def test_the_same_of_asynchronous_rounds() -> None:
    tasks = [Counting() for _ in range(2)]
    reports = run(tasks, rules(2, mode="asynchronous", asynchronous={"buffer": 2, "repeats": False}))
    assert attempts(reports) == [1] * ROUNDS


def test_a_repeated_command_has_the_settings_of_its_order() -> None:
    place: dict[str, Any] = {"job": f"lost-{os.getpid()}-{next(_jobs)}", "domain": new_domain()}
    tasks = [Counting(), Counting()]

    async def one(client_id: int) -> None:
        async with gradbus.connect(**place) as bus:
            await gradbus.Client(bus, tasks[client_id], client_id=client_id).run()

    async def main() -> list[int]:
        async with asyncio.timeout(60), gradbus.connect(**place, faults=LOST) as bus, asyncio.TaskGroup() as group:
            for client_id in (0, 1):
                group.create_task(one(client_id))
            async with gradbus.Controller(bus, NoopTask(DIM), rules(2)).open() as run:
                return [(await run.round(lr=0.5 / round_id, each={1: {"lr": 0.125}})).attempt for round_id in (1, 2, 3)]

    assert asyncio.run(main()) == [1, 1, 1]
    assert tasks[0].rates == [0.5, 0.25, 0.5 / 3]
    assert tasks[1].rates == [0.125] * 3


def test_clients_that_have_the_command_do_not_train_again_when_it_is_repeated_for_another_one() -> None:
    tasks = [Counting(), Counting(fails=[2]), Counting()]
    reports = run(tasks, rules(3, least=2), faults="", missed={2: {2}})
    assert attempts(reports) == [1] * ROUNDS
    assert [report.clients for report in reports] == [(0, 1, 2), (0, 2), (0, 1, 2)]
    assert [task.trained for task in tasks] == [Counter({1: 1, 2: 1, 3: 1})] * 3  # the one that failed, too


def test_a_client_that_misses_the_command_of_a_second_attempt_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [Counting(), Counting()]
    failed = Counting(fails=[2])

    def succeed_later(train: Callable[..., TrainResult], task: Counting) -> Callable[..., TrainResult]:
        def call(model: Any, **arguments: Any) -> TrainResult:
            try:
                return train(model, **arguments)
            finally:
                task.fails = () if arguments["round_id"] == 2 else task.fails

        return call

    monkeypatch.setattr(failed, "train", succeed_later(failed.train, failed))
    reports = run([tasks[0], failed], rules(2), faults="drop command nth=3")  # of the second attempt at round 2
    # Its failure is in its heartbeat, too, and may end the second attempt before the command is repeated.
    assert attempts(reports) in ([1, 2, 1], [1, 3, 1])
    assert reports[1].seconds < ROUND_S
    assert failed.trained == Counter({1: 1, 2: 2, 3: 1})
    assert tasks[0].trained == Counter({1: 1, 2: 1, 3: 1})  # its update of the first attempt counts


@pytest.mark.parametrize("level", ["above", "site"])
def test_the_same_of_a_site_and_of_its_clients(level: str) -> None:
    async def main() -> list[gradbus.RoundReport]:
        deadline = {"round": {"timeout_s": ROUND_S}}
        clients = {"heartbeat_s": 0.2}
        async with tree() as levels, asyncio.TaskGroup() as group:
            top = await levels.bus("top", faults=LOST if level == "above" else "")
            above, bus = await levels.bus("top"), await levels.bus("site", faults=LOST if level == "site" else "")
            own = site_of(above, bus, 0, rules_of_tree(2, clients=clients))
            for number in (0, 1):
                task = NoopTask(30_000, delta="seeded")
                client = gradbus.Client(await levels.bus("site"), task, client_id=number)
                group.create_task(client.run())
            group.create_task(own.run())
            config = rules_of_tree(1, sites=True, rounds=ROUNDS, clients=clients, **deadline)
            return await gradbus.Controller(top, NoopTask(30_000), config).run()

    assert attempts(asyncio.run(main())) == [1] * ROUNDS


def test_the_same_of_the_clients_of_a_host(tmp_path: Path) -> None:
    place: dict[str, Any] = {"job": f"lost-{os.getpid()}-{next(_jobs)}", "domain": new_domain()}
    pool = LocalPool(NoopTask(DIM, delta="seeded"), PoolSettings(state_dir=tmp_path), size=1)

    async def main() -> list[gradbus.RoundReport]:
        async with (
            asyncio.timeout(60),
            gradbus.connect(**place, faults=LOST) as bus,
            gradbus.connect(**place) as other,
            asyncio.TaskGroup() as group,
        ):
            host = ClientHost(other, NoopTask(DIM), ids=range(3), pool=pool, state_dir=tmp_path)
            group.create_task(host.run())
            return await gradbus.Controller(bus, NoopTask(DIM), rules(3)).run()

    try:
        reports = asyncio.run(main())
    finally:
        asyncio.run(pool.close())
    assert attempts(reports) == [1] * ROUNDS
    assert [report.clients for report in reports] == [(0, 1, 2)] * ROUNDS
