"""A program orders the rounds of a run one by one, and a strategy may order them for single clients."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dds_domains import new_domain
from structlog.testing import capture_logs

import gradbus
from gradbus.actors.aggregation.orders import RoundOrder
from gradbus.actors.aggregation.strategies import FedAvg
from gradbus.actors.federated.order_book import check_order
from gradbus.actors.federated.ordered_run import OrderedRun
from gradbus.models import NoopTask
from gradbus.runtime.errors import BarrierTimeout, CallbackFailed, CheckpointError, ConfigError, RunOver
from gradbus.runtime.wire.client_orders import ClientOrder

DIM = 50
_jobs = itertools.count()
ASKED = ("lr", "epochs", "subset_size", "seed")
Program = Callable[[OrderedRun], Awaitable[Any]]


class Recorder(NoopTask):
    """Keeps what its client is asked for, by round."""

    def __init__(self) -> None:
        super().__init__(DIM, delta="seeded")
        self.asked: dict[int, dict[str, Any]] = {}
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def train(self, model: Any, **arguments: Any) -> Any:
        steps = {"steps": arguments.pop("steps")} if "steps" in arguments else {}
        self.asked[arguments["round_id"]] = {**{key: arguments[key] for key in ASKED}, **steps}
        self.has_begun.set()
        self.may_end.wait(30.0)
        return super().train(model, **arguments)


class Job:
    """A run with clients in this process, whose controller a program orders."""

    def __init__(self, clients: int = 2, **changes: Any) -> None:
        self.place = {"job": f"ordered-{os.getpid()}-{next(_jobs)}", "domain": new_domain()}
        settings = {"clients": {"num": clients, "dead_after_s": 30.0}, "eval_every": 0, "rounds": 5, **changes}
        self.config = gradbus.FederatedConfig(**settings)
        self.tasks = [Recorder() for _ in range(clients)]
        self.strategy: Any = None
        self.callbacks: list[Any] = []
        self.ends: list[Any] = []

    async def client(self, client_id: int) -> Any:
        async with gradbus.connect(**self.place) as bus:
            return await gradbus.Client(bus, self.tasks[client_id], client_id=client_id).run()

    async def ordered_by(self, program: Program) -> Any:
        async with asyncio.timeout(60), gradbus.connect(**self.place) as bus, asyncio.TaskGroup() as group:
            clients = [group.create_task(self.client(number)) for number in range(len(self.tasks))]
            options = {"strategy": self.strategy, "callbacks": self.callbacks}
            async with gradbus.Controller(bus, NoopTask(DIM), self.config, **options).open() as run:
                result = await program(run)
            self.ends = await asyncio.gather(*clients)
            return result

    def run(self, program: Program) -> Any:
        return asyncio.run(self.ordered_by(program))


def test_what_a_program_orders_reaches_the_clients_of_that_round_and_no_other() -> None:
    job = Job(training={"lr": 0.5, "subset_size": 40})

    async def program(run: OrderedRun) -> list[gradbus.RoundReport]:
        first = await run.round(lr=0.05, epochs=2, subset_size=30, seed=7)
        second = await run.round()
        third = await run.round(epochs=np.int64(3), each={1: {"lr": 0.25, "epochs": 1}})
        return [first, second, third]

    reports = job.run(program)
    usual = {"lr": 0.5, "epochs": 1, "subset_size": 40, "seed": 0}
    ordered = {"lr": 0.05, "epochs": 2, "subset_size": 30, "seed": 7}
    assert [task.asked[1] for task in job.tasks] == [ordered, ordered]
    assert [task.asked[2] for task in job.tasks] == [usual, usual]
    assert [task.asked[3] for task in job.tasks] == [{**usual, "epochs": 3}, {**usual, "lr": 0.25}]
    assert [report.order for report in reports] == [
        ordered, {}, {"epochs": 3, "each": {"1": {"lr": 0.25, "epochs": 1}}},
    ]  # fmt: skip
    assert gradbus.RoundReport.from_json(reports[2].to_json()).order == reports[2].order
    assert [end.rounds for end in job.ends] == [3, 3]  # the clients end with the program, before the last round


def test_a_round_is_of_the_clients_that_its_order_names() -> None:
    job = Job(clients=3)

    async def program(run: OrderedRun) -> list[tuple[int, ...]]:
        orders: list[list[int] | None] = [[2, 0], None, [1]]
        return [(await run.round(clients=clients)).clients for clients in orders]

    assert job.run(program) == [(0, 2), (0, 1, 2), (1,)]
    assert [sorted(task.asked) for task in job.tasks] == [[1, 2], [2, 3], [1, 2]]


def test_steps_are_ordered_for_all_and_for_single_clients() -> None:
    job = Job(clients=3, training={"epochs": 5})

    async def program(run: OrderedRun) -> None:
        await run.round(steps=6, each={0: ClientOrder(steps=2), 1: ClientOrder(epochs=4)})

    job.run(program)
    found = [(task.asked[1].get("steps"), task.asked[1]["epochs"]) for task in job.tasks]
    assert found == [(2, 5), (None, 4), (6, 5)]


def test_an_order_that_is_not_possible_is_an_error_of_its_caller_and_the_run_goes_on() -> None:
    job = Job(rounds=2)
    job.config = job.config.replaced("clients.min", 2)

    async def program(run: OrderedRun) -> gradbus.RoundReport:
        for wrong, text in (
            ({"lr": -1.0}, "order of a round, lr: Input should be greater than 0, got -1.0"),
            ({"lr": float("nan")}, "order of a round, lr: "),
            ({"epochs": 0}, "order of a round, epochs: "),
            ({"epochs": True}, "order of a round, epochs: "),
            ({"epochs": 1, "steps": 1}, "epochs and steps: a round is counted in one of them"),
            ({"clients": [1]}, "clients names 1, and federated.clients.min is 2"),
            ({"clients": []}, "order of a round, clients: "),
            ({"clients": "01"}, "order of a round, clients: "),
            ({"each": {0: {"momentum": 1}}}, "order of a round, each.0.momentum: Extra inputs are not permitted"),
            ({"each": {n: {"lr": 1e-9 * n} for n in range(1, 4000)}}, "more than the 32,768 characters of a message"),
        ):
            with pytest.raises(ConfigError) as caught:
                await run.round(**wrong)
            assert text in str(caught.value)
        return await run.round(lr=0.25)

    report = job.run(program)
    assert (report.round_id, report.attempt) == (1, 1)
    assert [sorted(task.asked) for task in job.tasks] == [[1], [1]]


@pytest.mark.parametrize(
    ("changes", "order", "text"),
    [
        ({"mode": "asynchronous", "asynchronous": {"buffer": 1}}, {"clients": (0,)}, "takes the newest model"),
        ({"clients": {"kind": "sites"}}, {"steps": 3}, "sites pass on epochs, subset_size, lr and seed"),
        ({"clients": {"kind": "sites"}}, {"each": {0: {"lr": 0.1}}}, "sites pass on"),
    ],
    ids=str,
)
def test_orders_that_a_kind_of_run_cannot_have_are_refused(
    changes: dict[str, Any], order: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        check_order(gradbus.FederatedConfig(**changes), RoundOrder.of(**order))


def test_after_the_last_round_and_after_an_early_end_there_is_nothing_to_order() -> None:
    job = Job(rounds=2)

    async def program(run: OrderedRun) -> str:
        while not run.is_over:
            await run.round()
        with pytest.raises(RunOver, match="all rounds are done"):
            await run.round()
        return run.reason

    assert job.run(program) == "all rounds are done"

    class Stop:
        def on_round(self, round_id: int) -> bool:
            return round_id == 2

    async def ended_by_callback(run: OrderedRun) -> list[int]:
        await run.round()
        assert not run.is_over
        with pytest.raises(RunOver, match=r"Stop\.on_round has ended the run"):
            await run.round()
        return [report.round_id for report in run.reports]

    job = Job(rounds=5)
    job.callbacks = [Stop()]
    assert job.run(ended_by_callback) == [1]
    assert [end.rounds for end in job.ends] == [1, 1]


def test_a_round_that_its_caller_gives_up_goes_on_and_the_next_order_waits_for_it() -> None:
    job = Job(rounds=3)
    job.tasks[0].may_end.clear()

    async def program(run: OrderedRun) -> list[int]:
        waiting = asyncio.create_task(run.round(lr=0.125))
        await asyncio.to_thread(job.tasks[0].has_begun.wait, 30.0)
        with pytest.raises(RuntimeError, match="a round is under way"):
            await run.round()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        job.tasks[0].may_end.set()
        report = await run.round(lr=0.25)
        return [report.round_id, *(one.round_id for one in run.reports)]

    assert job.run(program) == [2, 1, 2]
    assert [task.asked[2]["lr"] for task in job.tasks] == [0.25, 0.25]


class Slower(FedAvg):
    """Has client 1 train less, in every second round."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.seen: list[tuple[int, list[int]]] = []

    def order(self, round_id: int, clients: Sequence[int]) -> RoundOrder | None:
        self.seen.append((round_id, list(clients)))
        return RoundOrder(epochs=4, each={1: ClientOrder(epochs=2)}) if round_id % 2 else None


def test_a_strategy_gives_orders_also_to_single_clients_and_those_of_the_caller_are_over_them() -> None:
    job = Job(rounds=3)
    job.strategy = Slower()

    async def program(run: OrderedRun) -> None:
        await run.round()
        await run.round()
        await run.round(lr=0.125, each={1: {"epochs": 7}})

    job.run(program)
    assert [[task.asked[number]["epochs"] for task in job.tasks] for number in (1, 2, 3)] == [[4, 2], [1, 1], [4, 7]]
    assert [task.asked[3]["lr"] for task in job.tasks] == [0.125, 0.125]
    assert job.strategy.seen == [(1, [0, 1]), (2, [0, 1]), (3, [0, 1])]


def test_a_strategy_orders_the_rounds_of_a_usual_run_too() -> None:
    job = Job(rounds=1)
    job.strategy = Slower()

    async def main() -> list[gradbus.RoundReport]:
        async with asyncio.timeout(60), gradbus.connect(**job.place) as bus, asyncio.TaskGroup() as group:
            for number in (0, 1):
                group.create_task(job.client(number))
            return await gradbus.Controller(bus, NoopTask(DIM), job.config, strategy=job.strategy).run()

    (report,) = asyncio.run(main())
    assert report.order == {"epochs": 4, "each": {"1": {"epochs": 2}}}
    assert [task.asked[1]["epochs"] for task in job.tasks] == [4, 2]


def test_without_clients_the_block_does_not_begin_and_the_error_is_that_of_the_run() -> None:
    job = Job(clients=1)
    job.config = job.config.replaced("clients.start_timeout_s", 0.2)

    async def main() -> None:
        async with gradbus.connect(**job.place) as bus, gradbus.Controller(bus, NoopTask(DIM), job.config).open():
            pytest.fail("there are no clients")

    with pytest.raises(BarrierTimeout):
        asyncio.run(main())


def test_an_order_on_the_disk_holds_for_the_round_that_was_cut_off(tmp_path: Path) -> None:
    state = {"dir": str(tmp_path / "state"), "keep": 2}
    job = Job(rounds=4, checkpoint=state)

    class Crash:
        def on_aggregate(self, report: gradbus.RoundReport) -> None:
            if report.round_id == 2:
                raise OSError("cut off")

    async def crashing(run: OrderedRun) -> None:
        await run.round(lr=0.25)
        await run.round(lr=0.125, clients=[1])

    job.callbacks = [Crash()]
    with pytest.raises(ExceptionGroup) as caught:
        job.run(crashing)
    assert caught.group_contains(CallbackFailed)
    assert [path.name for path in (tmp_path / "state").glob("order-*.json")] == [
        "order-000001.json",
        "order-000002.json",
    ]

    again = Job(rounds=4, checkpoint=state)

    async def resumed(run: OrderedRun) -> list[Any]:
        assert run.interrupted == RoundOrder(lr=0.125, clients=(1,))
        assert [report.order for report in run.reports] == [{"lr": 0.25}]
        reports = [await run.round(lr=0.5), await run.round(lr=0.5)]
        assert run.interrupted is None
        return [(report.round_id, report.clients, report.order) for report in reports]

    with capture_logs() as logs:
        assert again.run(resumed) == [(2, (1,), {"lr": 0.125, "clients": [1]}), (3, (0, 1), {"lr": 0.5})]
    (told,) = [one for one in logs if one["event"] == "the order of the interrupted round holds"]
    assert told["given"] == {"lr": 0.5}
    assert [path.name for path in (tmp_path / "state").glob("order-*.json")] == ["order-000003.json"]


def test_a_damaged_order_is_named_and_not_guessed(tmp_path: Path) -> None:
    job = Job(rounds=4, checkpoint={"dir": str(tmp_path)})

    async def program(run: OrderedRun) -> None:
        await run.round(lr=0.25)

    job.run(program)
    (tmp_path / "order-000002.json").write_text('{"run_id": "00"}')
    again = Job(rounds=4, checkpoint={"dir": str(tmp_path)})
    with pytest.raises(ExceptionGroup) as caught:
        again.run(program)
    assert caught.group_contains(CheckpointError, match=r"order-000002.json is damaged")
