"""A program orders the rounds of a run one by one, and a strategy may order them for single clients."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dds_domains import new_domain
from ordering_program import Task as OrderedTask
from structlog.testing import capture_logs

import gradbus
from gradbus.actors.aggregation.orders import RoundOrder
from gradbus.actors.aggregation.strategies import FedAvg
from gradbus.actors.federated.controller.client_terms import ids_in_terms
from gradbus.actors.federated.controller.order_book import check_order
from gradbus.actors.federated.controller.ordered_run import OrderedRun
from gradbus.actors.virtual.client_trainer import PoolSettings
from gradbus.actors.virtual.host import ClientHost
from gradbus.actors.virtual.local_pool import LocalPool
from gradbus.models import NoopTask
from gradbus.runtime.errors import (
    BarrierTimeout,
    BusClosed,
    CallbackFailed,
    CheckpointError,
    ConfigError,
    RunAborted,
    RunOver,
)
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
        self.names: list[str] = []  # of the clients, in place of ids

    async def client(self, number: int) -> Any:
        who: dict[str, Any] = {"name": self.names[number]} if self.names else {"client_id": number}
        async with gradbus.connect(**self.place) as bus:
            return await gradbus.Client(bus, self.tasks[number], **who).run()

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
        ordered,
        {},
        {"epochs": 3, "each": {"1": {"lr": 0.25, "epochs": 1}}},
    ]
    assert gradbus.RoundReport.from_json(reports[2].to_json()).order == reports[2].order
    assert [end.rounds for end in job.ends] == [3, 3]  # the clients end with the program, before the last round


def test_a_round_is_of_the_clients_that_its_order_names() -> None:
    job = Job(clients=3)

    async def program(run: OrderedRun) -> list[tuple[int, ...]]:
        orders: list[list[int] | None] = [[2, 0], None, [1]]
        return [(await run.round(clients=clients)).clients for clients in orders]

    assert job.run(program) == [(0, 2), (0, 1, 2), (1,)]
    assert [sorted(task.asked) for task in job.tasks] == [[1, 2], [2, 3], [1, 2]]


def test_an_order_names_clients_by_name_or_by_id_and_a_wrong_name_gets_the_near_ones() -> None:
    job = Job(clients=3, training={"epochs": 5})
    job.names = ["site-1", "7", "lab"]

    async def program(run: OrderedRun) -> Any:
        rows = dict(run._progress.names.state())  # noqa: SLF001 - which id a name has is by the order of the Hellos
        for wrong, text in (
            ({"clients": ["siet-1"]}, r"clients: no client of this run is named 'siet-1'. Near names: site-1. An id"),
            ({"clients": ["zz"]}, r"named 'zz'. Of 3 names: (site-1|7|lab), .*"),
            ({"clients": ["s\u0456te-1"]}, r"'s\\u0456te-1'. Near names: site-1"),
            ({"clients": ["0"]}, r"named '0'. .* An id is a number, such as 0"),
            ({"clients": "site-1"}, "clients: Input should be a valid tuple, got 'site-1'"),
            ({"each": {"x": {"epochs": 1}}}, "each: no client of this run is named 'x'"),
            ({"each": {"lab": {"epochs": 1}, rows["lab"]: {"epochs": 2}}}, r"each: client . \(lab\) has two orders"),
        ):
            with pytest.raises(ConfigError, match=text):
                await run.round(**wrong)
        first = await run.round(clients=["7", rows["site-1"]])
        second = await run.round(each={"lab": {"epochs": 2}})
        return rows, first, second

    rows, first, second = job.run(program)
    assert first.clients == tuple(sorted((rows["7"], rows["site-1"])))
    assert second.order == {"each": {str(rows["lab"]): {"epochs": 2}}}, "ids are what is kept"
    epochs = [sorted((number, asked["epochs"]) for number, asked in task.asked.items()) for task in job.tasks]
    assert epochs == [[(1, 5), (2, 5)], [(1, 5), (2, 5)], [(2, 2)]]


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
        ({"clients": {"kind": "sites"}, "training": {"steps": 5}}, {"epochs": 2}, "counts the rounds in steps"),
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


class Crash:
    """Ends a controller in round 2, before that is committed."""

    def on_aggregate(self, report: gradbus.RoundReport) -> None:
        if report.round_id == 2:
            raise OSError("cut off")


def cut_off(state: dict[str, Any], first: dict[str, Any], second: dict[str, Any], **changes: Any) -> None:
    """Order two rounds, of which the second one is cut off."""
    job = Job(rounds=4, checkpoint=state, **changes)
    job.callbacks = [Crash()]

    async def program(run: OrderedRun) -> None:
        await run.round(**first)
        await run.round(**second)

    with pytest.raises(ExceptionGroup) as caught:
        job.run(program)
    assert caught.group_contains(CallbackFailed)


def test_an_order_on_the_disk_holds_for_the_round_that_was_cut_off(tmp_path: Path) -> None:
    state = {"dir": str(tmp_path / "state"), "keep": 2}
    cut_off(state, {"lr": 0.25}, {"lr": 0.125, "clients": [1], "each": {1: {"epochs": 3}}})
    assert [path.name for path in (tmp_path / "state").glob("order-*.json")] == [
        "order-000001.json",
        "order-000002.json",
    ]

    again = Job(rounds=4, checkpoint=state)

    async def resumed(run: OrderedRun) -> list[Any]:
        assert run.interrupted == RoundOrder(lr=0.125, clients=(1,), each={1: ClientOrder(epochs=3)})
        assert [report.order for report in run.reports] == [{"lr": 0.25}]
        reports = [await run.round(lr=0.5), await run.round(lr=0.5)]
        assert run.interrupted is None
        return [(report.round_id, report.clients, report.order) for report in reports]

    with capture_logs() as logs:
        assert again.run(resumed) == [
            (2, (1,), {"lr": 0.125, "clients": [1], "each": {"1": {"epochs": 3}}}),
            (3, (0, 1), {"lr": 0.5}),
        ]
    assert again.tasks[1].asked[2]["epochs"] == 3
    (told,) = [one for one in logs if one["event"] == "the order of the interrupted round holds"]
    assert told["given"] == {"lr": 0.5}
    assert [path.name for path in (tmp_path / "state").glob("order-*.json")] == ["order-000003.json"]


def test_a_damaged_order_is_named_and_not_guessed(tmp_path: Path) -> None:
    job = Job(rounds=4, checkpoint={"dir": str(tmp_path)})

    async def program(run: OrderedRun) -> gradbus.RoundReport:
        return await run.round(lr=0.25)

    job.run(program)
    (tmp_path / "order-000002.json").write_text('{"run_id": "00"}')
    again = Job(rounds=4, checkpoint={"dir": str(tmp_path)})
    with pytest.raises(ExceptionGroup) as caught:
        again.run(program)
    remedy = r"or remove it: round 2 is then done by the order that it gets next, and not as it was ordered before the"
    assert caught.group_contains(CheckpointError, match=rf"order-000002.json is damaged: .*backup, {remedy} crash$")
    (tmp_path / "order-000002.json").unlink()
    report = Job(rounds=3, checkpoint={"dir": str(tmp_path)}).run(program)
    assert (report.round_id, report.order) == (2, {"lr": 0.25})


@pytest.mark.parametrize("lr", [True, "0.1", b"0.1", np.bool_(True), float("nan"), 0.0, [0.1]])
def test_a_learning_rate_is_a_number_above_0_and_nothing_that_looks_like_one(lr: Any) -> None:
    for given in ({"lr": lr}, {"each": {0: {"lr": lr}}}):
        with pytest.raises(ConfigError, match=r"order of a round, .*lr"):
            RoundOrder.of(**given)


@pytest.mark.parametrize("lr", [1, 0.5, np.float32(0.5), np.int64(2)])
def test_a_learning_rate_may_be_a_number_of_numpy(lr: Any) -> None:
    (given,) = RoundOrder.of(lr=lr).changes().values()
    assert (given, type(given)) == (float(lr), float)


def test_a_run_without_a_program_repeats_the_round_that_was_cut_off_by_its_order(tmp_path: Path) -> None:
    state = {"dir": str(tmp_path)}
    order = {"clients": [0, 1], "epochs": 4, "each": {1: {"epochs": 2, "lr": 0.5}}}
    cut_off(state, {}, order, clients=3)
    again = Job(clients=3, rounds=3, checkpoint=state)

    async def main() -> list[gradbus.RoundReport]:
        async with asyncio.timeout(60), gradbus.connect(**again.place) as bus, asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(again.client(number))
            return await gradbus.Controller(bus, NoopTask(DIM), again.config).run()

    assert [report.clients for report in asyncio.run(main())] == [(0, 1, 2), (0, 1), (0, 1, 2)]
    assert [task.asked[2]["epochs"] for task in again.tasks[:2]] == [4, 2]
    assert again.tasks[1].asked[2]["lr"] == 0.5
    assert sorted(again.tasks[2].asked) == [3]


def test_a_round_that_was_cut_off_as_configured_stays_so(tmp_path: Path) -> None:
    state = {"dir": str(tmp_path)}
    cut_off(state, {}, {}, training={"lr": 0.25})
    again = Job(rounds=4, checkpoint=state, training={"lr": 0.25})

    async def program(run: OrderedRun) -> None:
        assert run.interrupted == RoundOrder()
        await run.round(lr=0.5)
        await run.round(lr=0.5)

    again.run(program)
    assert [again.tasks[0].asked[number]["lr"] for number in (2, 3)] == [0.25, 0.5]


def test_an_order_that_could_not_begin_does_not_hold(tmp_path: Path) -> None:
    state = {"dir": str(tmp_path)}
    job = Job(rounds=4, checkpoint=state)
    job.config = job.config.replaced("clients.start_timeout_s", 1.0)

    async def names_one_that_never_comes(run: OrderedRun) -> None:
        await run.round()
        await run.round(clients=[77])

    with pytest.raises(ExceptionGroup) as caught:
        job.run(names_one_that_never_comes)
    assert caught.group_contains(BarrierTimeout, match="missing \\[77\\]")

    async def program(run: OrderedRun) -> tuple[int, ...]:
        assert run.interrupted is None
        return (await run.round(clients=[0])).clients

    assert Job(rounds=4, checkpoint=state).run(program) == (0,)


def test_an_order_that_the_configuration_of_a_resume_cannot_have_is_named(tmp_path: Path) -> None:
    state = {"dir": str(tmp_path)}
    cut_off(state, {}, {"clients": [1]})
    again = Job(rounds=4, checkpoint=state)
    again.config = again.config.replaced("clients.min", 2)

    async def program(run: OrderedRun) -> None:
        await run.round()

    with pytest.raises(ExceptionGroup) as caught:
        again.run(program)
    told = (ConfigError, RunAborted)  # the clients have it from the controller, and may be the first to raise it
    assert caught.group_contains(told, match=r"clients names 1, .* of round 2, .* remove order-000002\.json")


class Counting(FedAvg):
    """Orders a seed that differs from round to round, and remembers in its checkpoints how many it has given."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.given = 0

    def order(self, round_id: int, clients: Sequence[int]) -> RoundOrder | None:
        self.given += 1
        return RoundOrder(seed=self.given)

    def state(self) -> dict[str, torch.Tensor]:
        return {**super().state(), "given": torch.tensor(self.given)}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_state({name: one for name, one in state.items() if name != "given"})
        self.given = int(state["given"])


def test_a_strategy_remembers_its_orders_as_if_there_had_been_no_crash(tmp_path: Path) -> None:
    job = Job(rounds=4, checkpoint={"dir": str(tmp_path)})
    job.strategy, job.callbacks = Counting(), [Crash()]

    async def program(run: OrderedRun) -> list[int]:
        while not run.is_over:
            await run.round()
        return [report.order["seed"] for report in run.reports]

    with pytest.raises(ExceptionGroup):
        job.run(program)
    again = Job(rounds=4, checkpoint={"dir": str(tmp_path)})
    again.strategy = Counting()
    assert again.run(program) == [1, 2, 3, 4]


def test_what_ends_the_controller_between_two_rounds_is_the_error_of_the_next_one() -> None:
    job = Job()

    async def main() -> str:
        async with asyncio.timeout(60), gradbus.connect(**job.place) as bus, asyncio.TaskGroup() as group:
            clients = [group.create_task(job.client(number)) for number in (0, 1)]
            try:
                async with gradbus.Controller(bus, NoopTask(DIM), job.config).open() as run:
                    await run.round()
                    (serving,) = [task for task in asyncio.all_tasks() if task.get_name() == "controller"]
                    await bus.close()
                    await asyncio.wait([serving])
                    await run.round()
            except BusClosed as error:
                return str(error)
            finally:
                for client in clients:
                    client.cancel()
        return ""

    assert "the bus was closed under a running controller" in asyncio.run(main())


def test_a_controller_that_waits_for_an_order_says_so() -> None:
    job = Job(rounds=2)

    async def main() -> list[str]:
        async with asyncio.timeout(60), gradbus.connect(**job.place) as bus, asyncio.TaskGroup() as group:
            for number in (0, 1):
                group.create_task(job.client(number))
            controller = gradbus.Controller(bus, NoopTask(DIM), job.config)
            async with controller.open() as run:
                phases = [controller.progress.phase]
                await run.round()
                await asyncio.sleep(0)
                return [*phases, controller.progress.phase]

    assert asyncio.run(main()) == ["waiting", "waiting"]


def test_what_a_program_orders_for_all_is_over_what_the_strategy_orders_for_single_clients() -> None:
    own = RoundOrder(epochs=4, seed=3, each={1: ClientOrder(epochs=2, seed=5), 2: ClientOrder(steps=9)})
    assert RoundOrder(epochs=6).merged(own) == RoundOrder(epochs=6, seed=3, each={1: ClientOrder(seed=5)})
    assert RoundOrder(steps=6, each={2: ClientOrder(seed=1)}).merged(own) == RoundOrder(
        steps=6, seed=3, each={1: ClientOrder(seed=5), 2: ClientOrder(seed=1)}
    )
    assert RoundOrder(each={1: ClientOrder(steps=1)}).merged(own) == RoundOrder(
        epochs=4, seed=3, each={1: ClientOrder(steps=1, seed=5), 2: ClientOrder(steps=9)}
    )


async def weights_ordered(job: Job, clients: Callable[[gradbus.Bus], list[Awaitable[Any]]]) -> list[tuple[int, ...]]:
    """Which clients count in each round and the checksum of its model, where these clients take part."""
    orders: list[dict[str, Any]] = [
        {"lr": 0.5, "each": {1: {"epochs": 3}, 3: {"lr": 0.25, "seed": 5}}},
        {"clients": [0, 3], "each": {0: {"epochs": 2}}},
        {},
    ]
    async with (
        asyncio.timeout(60),
        gradbus.connect(**job.place) as bus,
        gradbus.connect(**job.place) as other,
        asyncio.TaskGroup() as group,
    ):
        for running in clients(other):
            group.create_task(awaited(running))
        async with gradbus.Controller(bus, OrderedTask(DIM), job.config).open() as run:
            return [(*report.clients, report.weights_crc32) for report in [await run.round(**one) for one in orders]]


async def awaited(running: Awaitable[Any]) -> Any:
    return await running


def test_virtual_clients_follow_the_same_orders_as_clients_with_a_process_of_their_own(tmp_path: Path) -> None:
    one, other = Job(clients=4), Job(clients=4)

    def of_their_own(bus: gradbus.Bus) -> list[Awaitable[Any]]:
        return [gradbus.Client(bus, OrderedTask(DIM), client_id=number).run() for number in range(4)]

    async def virtual() -> list[tuple[int, ...]]:
        pool = LocalPool(OrderedTask(DIM), PoolSettings(state_dir=tmp_path), size=1)
        try:
            return await weights_ordered(
                other,
                lambda bus: [ClientHost(bus, OrderedTask(DIM), ids=range(4), pool=pool, state_dir=tmp_path).run()],
            )
        finally:
            await pool.close()

    found = asyncio.run(virtual())
    assert [clients for *clients, _ in found] == [[0, 1, 2, 3], [0, 3], [0, 1, 2, 3]]
    assert found == asyncio.run(weights_ordered(one, of_their_own))


def test_asynchronous_clients_that_do_not_repeat_wait_for_the_next_order() -> None:
    job = Job(rounds=3, mode="asynchronous", asynchronous={"buffer": 2, "repeats": False})

    async def program(run: OrderedRun) -> list[int]:
        return [(await run.round(lr=lr)).max_staleness for lr in (0.5, 0.25, 0.125)]

    assert job.run(program) == [0, 0, 0]
    assert [[task.asked[number]["lr"] for number in (1, 2, 3)] for task in job.tasks] == [[0.5, 0.25, 0.125]] * 2


def test_terms_without_room_for_those_of_an_order_that_are_here_name_all_of_the_order() -> None:
    here, every = range(0, 100_000, 2), range(100_000)
    for may_name_all in (False, True):
        assert ids_in_terms(here, every, may_name_all=may_name_all) == "0-99999"
    assert ids_in_terms(here, None, may_name_all=True) == ""
    assert ids_in_terms([1, 2, 5], every, may_name_all=True) == "1-2,5"
