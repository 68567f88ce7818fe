"""A client whose program pauses it: it sits rounds out, nobody waits for it, and it takes part again later."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from dds_domains import new_domain
from patience import PATIENT_S, eventually, run, until
from secure_runs import DIM as SECURE_DIM
from secure_runs import Moving, delta_of
from structlog.testing import capture_logs
from trees import DIM as TREE_DIM
from trees import rules, site_of, tree

import gradbus
from gradbus.actors.federated.client.client import Client
from gradbus.actors.federated.client.client_run import ClientRun, Prepared
from gradbus.actors.federated.client.session import ClientContext, ClientStatus
from gradbus.actors.federated.controller.rounds import Outcome, Round, RoundRules
from gradbus.actors.federated.controller.selection import StartCondition
from gradbus.actors.federated.protocol import PAUSED, SAT_OUT
from gradbus.commands.history.invariants import check
from gradbus.commands.history.reader import read_history
from gradbus.models import NoopTask, TrainingStopped
from gradbus.models.task import EvalResult
from gradbus.runtime.errors import BarrierTimeout, CallbackFailed

DIM = 50
_jobs = itertools.count()


class Held(NoopTask):
    """Trains in the rounds ``held`` until they are let go, or it is called off. ``begun``: the rounds so far."""

    def __init__(self, *held: int, dim: int = DIM) -> None:
        super().__init__(dim, delta="seeded")
        self.held = set(held)
        self.begun: list[int] = []

    def train(self, model: Any, **arguments: Any) -> Any:
        hold(self, arguments)
        return super().train(model, **arguments)


def hold(task: Any, arguments: dict[str, Any]) -> None:
    """Stay in training as the task says."""
    task.begun.append(arguments["round_id"])
    while arguments["round_id"] in task.held:
        if arguments["should_stop"]():
            raise TrainingStopped(0)
        threading.Event().wait(0.002)


class HeldMoving(Moving):
    """The same for runs with secure aggregation."""

    def __init__(self, *held: int) -> None:
        super().__init__()
        self.held = set(held)
        self.begun: list[int] = []

    def train(self, model: Any, **arguments: Any) -> Any:
        hold(self, arguments)
        return super().train(model, **arguments)


Program = Callable[["Scene"], Coroutine[Any, Any, None]]


class Scene:
    """A controller and clients, each with a task of its own, on one loop, and a program that pauses them."""

    def __init__(self, *tasks: Any, make: Callable[..., Client] = Client, **settings: Any) -> None:
        self.tasks = tasks
        self._make = make
        self.job, self.domain = f"pauses-{os.getpid()}-{next(_jobs)}", new_domain()
        clients = {"num": len(tasks), "min": 1, "dead_after_s": PATIENT_S, "heartbeat_s": 0.1}
        clients["start_grace_s"] = PATIENT_S  # all join on one loop, which a busy machine holds up
        clients |= settings.pop("clients", {})
        self.config = gradbus.FederatedConfig(**{"rounds": 3, "eval_every": 0, "clients": clients, **settings})
        self.clients: list[Client] = []
        self.reports: list[gradbus.RoundReport] = []
        self.controller: gradbus.Controller

    @contextlib.asynccontextmanager
    async def _parts(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for client_id, task in enumerate(self.tasks):
                bus = await stack.enter_async_context(gradbus.connect(self.job, domain=self.domain))
                self.clients.append(self._make(bus, task, client_id=client_id))
            bus = await stack.enter_async_context(gradbus.connect(self.job, domain=self.domain))
            self.controller = gradbus.Controller(bus, self.tasks[0], self.config)
            yield

    async def _control(self) -> None:
        async for report in self.controller.rounds():
            self.reports.append(report)

    async def _main(self, before: Callable[[Scene], None], program: Program) -> None:
        async with self._parts(), asyncio.TaskGroup() as group:
            before(self)
            for client in self.clients:
                group.create_task(client.run())
            group.create_task(self._control())
            group.create_task(program(self))

    def play(self, program: Program, before: Callable[[Scene], None] = lambda scene: None) -> list[Any]:
        """Have the run and this program done. Returns the log. ``before``: is called before anything starts."""
        with capture_logs() as logs:
            run(self._main(before, program))
        return logs


def warnings_in(logs: list[Any]) -> list[Any]:
    return [one for one in logs if one["log_level"] in ("warning", "error")]


def events(logs: list[Any], *names: str) -> list[str]:
    return [one["event"] for one in logs if one["event"] in names]


async def nothing(scene: Scene) -> None:
    """A program that does nothing."""


def sits_out(client: Client, round_id: int) -> bool:
    """Whether a client has reported that it sits this round out."""
    failure = client._session.failure  # noqa: SLF001 - no event tells of it
    return failure is not None and (failure.round_id, failure.reason) == (round_id, PAUSED)


def test_a_client_that_pauses_in_mid_round_sits_it_out_and_takes_part_again_without_a_warning() -> None:
    scene = Scene(Held(3), Held(2), rounds=4)

    async def program(scene: Scene) -> None:
        other, task = scene.tasks
        await eventually(lambda: task.begun == [1, 2])
        scene.clients[1].pause()
        await eventually(lambda: other.begun == [1, 2, 3])  # the next round goes on without it
        await eventually(lambda: sits_out(scene.clients[1], 3))  # else it is resumed before
        scene.clients[1].resume()
        await eventually(lambda: not scene.controller._run.parts.registry.paused_ids())  # noqa: SLF001 - no event tells of it
        other.held.clear()

    logs = scene.play(program)
    assert [report.clients for report in scene.reports] == [(0, 1), (0,), (0,), (0, 1)]
    assert [report.dropped.get(PAUSED, 0) for report in scene.reports] == [0, 1, 0, 0]
    assert [report.outcome for report in scene.reports] == ["all live clients answered"] * 4
    assert [report.attempt for report in scene.reports] == [1] * 4
    assert not any(report.strikes for report in scene.reports)
    assert scene.tasks[1].begun == [1, 2, 4]
    assert warnings_in(logs) == []
    assert events(logs, "client paused", "client resumed") == ["client paused", "client resumed"]


def test_a_client_that_pauses_in_mid_round_and_goes_on_at_once_sits_that_round_out() -> None:
    scene = Scene(Held(), Held(2), rounds=3)

    async def program(scene: Scene) -> None:
        await eventually(lambda: 2 in scene.tasks[1].begun)
        scene.clients[1].pause()
        scene.clients[1].resume()

    logs = scene.play(program)
    assert [report.clients for report in scene.reports] == [(0, 1), (0,), (0, 1)]
    assert [report.dropped.get(PAUSED, 0) for report in scene.reports] == [0, 1, 0]
    assert warnings_in(logs) == []


def test_a_run_starts_without_a_client_that_is_paused_from_the_start_and_says_nothing() -> None:
    scene = Scene(Held(), Held(), rounds=2)
    logs = scene.play(nothing, before=lambda scene: scene.clients[1].pause())
    assert [report.clients for report in scene.reports] == [(0,), (0,)]
    assert scene.tasks[1].begun == []
    assert warnings_in(logs) == []
    assert scene.controller.progress.never_counted == {1: "it had paused"}


def test_a_named_client_is_paused_before_it_has_an_id_and_takes_part_once_it_is_resumed() -> None:
    def make(bus: gradbus.Bus, task: Any, *, client_id: int) -> Client:
        return Client(bus, task, name=f"site-{client_id}")

    scene = Scene(Held(2), Held(), make=make)

    async def program(scene: Scene) -> None:
        await eventually(lambda: 2 in scene.tasks[0].begun)
        await eventually(lambda: sits_out(scene.clients[1], 2))  # else it trains in this round
        scene.clients[1].resume()
        await eventually(lambda: not scene.controller._run.parts.registry.paused_ids())  # noqa: SLF001 - no event tells of it
        scene.tasks[0].held.clear()

    logs = scene.play(program, before=lambda scene: scene.clients[1].pause())
    assert [len(report.clients) for report in scene.reports] == [1, 1, 2]
    assert scene.tasks[1].begun == [3]
    assert warnings_in(logs) == []
    assert {one["name"] for one in logs if one["event"] == "client resumed"} == {"site-1"}


@pytest.mark.parametrize("least", [1, 2], ids=["both pause", "one of two that are needed"])
def test_a_round_in_which_too_few_take_part_waits_for_them_and_goes_on(least: int) -> None:
    scene = Scene(Held(*([2] * (least == 1))), Held(2), rounds=3, clients={"min": least})

    async def program(scene: Scene) -> None:
        pausing = scene.clients if least == 1 else scene.clients[1:]
        await eventually(lambda: all(2 in task.begun for task in scene.tasks))
        for client in pausing:
            client.pause()
        await eventually(lambda: scene.controller.progress.phase == "waiting")
        for task in scene.tasks:
            task.held.clear()
        for client in pausing:
            client.resume()

    scene.play(program)
    assert [report.round_id for report in scene.reports] == [1, 2, 3]
    assert scene.reports[1].attempt == 2
    assert {0, 1}.intersection(scene.reports[1].clients)
    assert scene.reports[2].clients == (0, 1)
    assert len({report.weights_crc32 for report in scene.reports}) == 3


def test_a_client_that_is_needed_may_pause_more_often_in_a_round_than_the_round_is_tried() -> None:
    scene = Scene(Held(), Held(2), rounds=2, clients={"min": 2}, round={"max_attempts": 2})
    pauses = 5

    async def program(scene: Scene) -> None:
        for number in range(1, pauses + 1):
            await eventually(lambda number=number: scene.tasks[1].begun.count(2) == number)
            scene.clients[1].pause()
            await eventually(lambda: scene.controller.progress.phase == "waiting")
            if number == pauses:
                scene.tasks[1].held.clear()
            scene.clients[1].resume()

    logs = scene.play(program)
    assert [report.clients for report in scene.reports] == [(0, 1), (0, 1)]
    assert scene.reports[1].attempt == pauses + 1
    assert warnings_in(logs) == []


def test_a_round_for_which_too_few_clients_are_back_in_time_ends_as_the_settings_say() -> None:
    scene = Scene(Held(), Held(2), rounds=3, clients={"min": 2, "start_timeout_s": 0.5})

    async def program(scene: Scene) -> None:
        await eventually(lambda: 2 in scene.tasks[1].begun)
        scene.clients[1].pause()
        await asyncio.get_running_loop().create_future()

    with pytest.raises(ExceptionGroup) as caught:
        scene.play(program)
    assert caught.group_contains(BarrierTimeout, match=r"round 2 cannot start.*\[1\]")


def test_the_checker_of_histories_computes_rounds_without_a_paused_client_again(tmp_path: Path) -> None:
    history = {"dir": str(tmp_path), "payloads": True}

    def make(bus: gradbus.Bus, task: Any, *, client_id: int) -> Client:
        return Client(bus, task, client_id=client_id, config=gradbus.ClientConfig(history={"dir": str(tmp_path)}))

    scene = Scene(Held(3), Held(2), make=make, rounds=4, history=history)

    async def program(scene: Scene) -> None:
        await eventually(lambda: 2 in scene.tasks[1].begun)
        scene.clients[1].pause()
        await eventually(lambda: 3 in scene.tasks[0].begun)
        scene.clients[1].resume()
        await eventually(lambda: not scene.controller._run.parts.registry.paused_ids())  # noqa: SLF001 - no event tells of it
        scene.tasks[0].held.clear()

    scene.play(program)
    found = {one.name: one for one in check(read_history(tmp_path))}
    assert {name: one.violations for name, one in found.items() if one.violations} == {}
    assert found["I3"].checked >= 4


class Notes(Client):
    """Notes on which threads it changes what its event loop looks at."""

    threads: ClassVar[list[int]] = []

    def _announce_pause(self) -> None:
        self.threads.append(threading.get_ident())
        super()._announce_pause()


def test_a_callback_pauses_and_resumes_its_client_on_the_thread_that_it_is_called_on() -> None:
    class PausesOnce:
        client: Client
        threads: ClassVar[set[int]] = set()

        def on_report(self, report: Any) -> None:
            self.threads.add(threading.get_ident())
            if report.round_id == 1:
                for _ in range(100):
                    self.client.pause()
                    self.client.resume()
                self.client.pause()

    callback = PausesOnce()

    def make(bus: gradbus.Bus, task: Any, *, client_id: int) -> Client:
        client = Notes(bus, task, client_id=client_id, callbacks=[callback] if client_id else [])
        if client_id:
            callback.client = client
        return client

    Notes.threads.clear()
    scene = Scene(Held(2), Held(), rounds=3, make=make)

    async def program(scene: Scene) -> None:
        await eventually(lambda: 2 in scene.tasks[0].begun)
        await eventually(lambda: scene.controller._run.parts.registry.paused_ids())  # noqa: SLF001 - no event tells of it
        scene.clients[1].resume()
        await eventually(lambda: not scene.controller._run.parts.registry.paused_ids())  # noqa: SLF001 - no event tells of it
        scene.tasks[0].held.clear()

    scene.play(program)
    assert scene.reports[-1].clients == (0, 1)
    assert len(Notes.threads) == 202
    assert set(Notes.threads) == {threading.get_ident()}
    assert callback.threads.isdisjoint(Notes.threads)


def test_a_pause_before_a_training_that_ends_at_once_sits_the_round_out() -> None:
    class Pauses:
        client: Client

        def on_round(self, round_id: int) -> None:
            if round_id == 1:
                self.client.pause()
                self.client.resume()

    callback = Pauses()

    def make(bus: gradbus.Bus, task: Any, *, client_id: int) -> Client:
        client = Client(bus, task, client_id=client_id, callbacks=[callback] if client_id else [])
        if client_id:
            callback.client = client
        return client

    scene = Scene(Held(), Held(), rounds=2, make=make)
    logs = scene.play(nothing)
    assert [report.clients for report in scene.reports] == [(0,), (0, 1)]
    assert scene.reports[0].dropped == {PAUSED: 1}
    assert scene.tasks[1].begun == [2]
    assert warnings_in(logs) == []


class Unstoppable(Held):
    """Trains until ``may_end``, whoever calls it off."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def train(self, model: Any, **arguments: Any) -> Any:
        self.begun.append(arguments["round_id"])
        self.may_end.wait(PATIENT_S)
        return NoopTask.train(self, model, **arguments)


def test_a_client_that_something_has_ended_is_paused_while_it_waits_for_its_training() -> None:
    task = Unstoppable()

    class Fails:
        def on_model(self, round_id: int, model: Any) -> None:
            until(lambda: task.begun)
            raise KeyError("map")

    def make(bus: gradbus.Bus, task: Any, *, client_id: int) -> Client:
        return Client(bus, task, client_id=client_id, callbacks=[Fails()])

    async def program(scene: Scene) -> None:
        try:
            await eventually(lambda: scene.clients[0]._failures.leaving.startswith("failed"))  # noqa: SLF001 - no event tells of it
            scene.clients[0].pause()
            scene.clients[0].resume()
            paused.append(True)
        finally:
            task.may_end.set()

    paused: list[bool] = []
    with pytest.raises(ExceptionGroup) as caught:
        Scene(task, make=make).play(program)
    assert caught.group_contains(CallbackFailed, match="KeyError: 'map'")
    assert paused == [True]


def test_a_pause_after_the_end_of_the_run_is_none() -> None:
    scene = Scene(Held(), Held(), rounds=1)
    scene.play(nothing)
    scene.clients[1].pause()
    assert not scene.clients[1].is_paused
    scene.clients[1].resume()


class PausesWhileSending(Client):
    """Is paused by its program as soon as its update of round 1 is made."""

    def _make_run(self, context: ClientContext, prepared: Prepared) -> PausedWhileSending:
        return PausedWhileSending(context, prepared, self._outbox, self._observer, self.pause)


class PausedWhileSending(ClientRun):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts[:-1])
        self.pause = parts[-1]

    async def _train_and_send(self, welcome: Any, command: Any, base: Any) -> None:
        deliver = self._outbox.updates.deliver

        async def pauses(update: Any, **options: Any) -> Any:
            if command.round_id == 1 and self._context.client_id == 1:
                self.pause()
                await self._context.heartbeat.send_hello()  # it says nothing of the pause yet
            return await deliver(update, **options)

        self._outbox.updates.deliver = pauses  # type: ignore[method-assign]
        await super()._train_and_send(welcome, command, base)
        self._outbox.updates.deliver = deliver  # type: ignore[method-assign]


def test_an_update_that_is_made_is_sent_and_counts_before_its_client_pauses() -> None:
    scene = Scene(Held(), Held(), make=PausesWhileSending, rounds=2)
    logs = scene.play(nothing)
    assert [report.clients for report in scene.reports] == [(0, 1), (0,)]
    assert not scene.reports[0].dropped
    assert set(scene.reports[1].dropped) <= {PAUSED}  # its pause may be received only after that command
    assert warnings_in(logs) == []


@pytest.mark.parametrize("repeats", [True, False])
def test_asynchronous_rounds_go_on_without_a_paused_client_and_with_it_as_soon_as_it_is_back(repeats: bool) -> None:
    settings = {"mode": "asynchronous", "asynchronous": {"buffer": 1, "repeats": repeats}}
    scene = Scene(Held(4), Held(*range(1, 6)), rounds=5, **settings)

    async def program(scene: Scene) -> None:
        other, task = scene.tasks
        await eventually(lambda: task.begun)
        scene.clients[1].pause()
        await eventually(lambda: 4 in other.begun)
        before = len(task.begun)
        task.held.clear()
        scene.clients[1].resume()
        await eventually(lambda: len(task.begun) > before)
        other.held.clear()

    logs = scene.play(program)
    assert [report.round_id for report in scene.reports] == [1, 2, 3, 4, 5]
    assert any(1 in report.clients for report in scene.reports[3:])
    assert [one for one in warnings_in(logs) if one["event"] != "update refused"] == []


def test_with_secure_aggregation_the_sums_are_those_of_the_others_until_the_paused_client_is_back() -> None:
    tasks = [HeldMoving(2), HeldMoving(), HeldMoving(1), HeldMoving()]
    scene = Scene(*tasks, clients={"min": 2}, secure_aggregation={"enabled": True})

    async def program(scene: Scene) -> None:
        await eventually(lambda: all(task.begun for task in tasks))
        scene.clients[2].pause()
        await eventually(lambda: 2 in tasks[0].begun)
        scene.clients[2].resume()
        await eventually(lambda: not scene.controller._run.parts.registry.paused_ids())  # noqa: SLF001 - no event tells of it
        tasks[0].held.clear()

    logs = scene.play(program)
    assert [report.clients for report in scene.reports] == [(0, 1, 3), (0, 1, 3), (0, 1, 2, 3)]
    assert [report.attempt for report in scene.reports] == [1, 1, 1]
    assert warnings_in(logs) == []
    expected = torch.zeros(SECURE_DIM, dtype=torch.float64)
    for report in scene.reports:
        updates = [delta_of(one, report.round_id).double() * (20 + one) for one in report.clients]
        expected += torch.stack(updates).sum(0) / sum(20 + one for one in report.clients)
    assert torch.allclose(scene.controller.weights, expected.float(), atol=1e-6)


class Evaluating(Held):
    """Evaluates on its own data."""

    def evaluate_local(self, model: Any, *, client_id: int) -> EvalResult:
        return EvalResult(0.5, 1.0, 10)


def test_a_paused_client_is_not_asked_to_evaluate() -> None:
    scene = Scene(Evaluating(), Evaluating(), rounds=2, evaluation={"every": 1})
    logs = scene.play(nothing, before=lambda scene: scene.clients[1].pause())
    assert [(one.by_clients.asked, one.by_clients.answered) for one in scene.reports] == [(1, 1), (1, 1)]
    assert warnings_in(logs) == []


def test_a_client_below_a_site_pauses_and_the_sum_of_its_site_is_that_of_the_others() -> None:
    async def main() -> list[gradbus.RoundReport]:
        async with tree() as place, asyncio.TaskGroup() as group:
            own = rules(2, clients={"num": 2, "min": 1})
            group.create_task(site_of(await place.bus("centre"), await place.bus("site-0"), 0, own).run())
            for client_id in range(2):
                task = Held(dim=TREE_DIM)
                client = Client(await place.bus("site-0"), task, client_id=client_id)
                if client_id == 1:
                    client.pause()
                group.create_task(client.run())
            rounds = rules(1, sites=True, rounds=2)
            return await gradbus.Controller(await place.bus("centre"), NoopTask(TREE_DIM), rounds).run()

    with capture_logs() as logs:
        reports = run(main())
    assert [report.num_samples for report in reports] == [1, 1]
    assert warnings_in(logs) == []


# Pure parts


def test_a_round_of_which_all_clients_pause_has_failed_and_is_not_over_with_nothing() -> None:
    round_ = Round(1, range(2), RoundRules(minimum=1, quorum=1.0, deadline_s=60.0, grace_s=0.0), now_s=0.0)
    round_.fail(0, PAUSED)
    assert round_.verdict(1.0) is None
    round_.fail(1, SAT_OUT)
    assert round_.verdict(1.0) is Outcome.TOO_FEW
    assert round_.may_send(0) is None, "an update that was on its way counts all the same"
    round_.accept(1, 2.0)
    assert round_.verdict(2.0) is Outcome.ALL


def test_a_start_waits_for_no_paused_client_but_for_the_least_number() -> None:
    condition = StartCondition(minimum=2, expected=range(4), now_s=0.0, timeout_s=60.0, grace_s=5.0)
    assert not condition.may_start([0, 1, 2], 0.0)
    assert condition.may_start([0, 1, 2], 0.0, paused=[3])
    assert not condition.may_start([0], 0.0, paused=[1, 2, 3])


def test_the_phase_of_a_paused_client_is_that_of_its_update_until_the_receipt() -> None:
    status = ClientStatus(clock=lambda: 7.0)
    with status.delivering():
        assert not status.pause(None)
        assert status.report("uploading") == ("uploading", 0.0)
    assert status.report("idle") == ("paused", 0.0)
