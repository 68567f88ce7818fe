"""A program follows its client: callbacks, reports of rounds, and every global model, the last one included."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from dds_domains import new_domain
from patience import PATIENT_S, eventually, run
from structlog.testing import capture_logs
from torch import Tensor, nn

import gradbus
from gradbus.actors.federated.client.client import Client
from gradbus.actors.federated.client.client_observer import CALLED_OFF, ClientReport
from gradbus.actors.federated.client.client_run import ClientRun, Prepared
from gradbus.actors.federated.client.session import ClientContext
from gradbus.models import NoopTask, TrainResult
from gradbus.runtime import callbacks as callback_module
from gradbus.runtime import compute as compute_module
from gradbus.runtime.errors import CallbackFailed, CallbackTimeout, ConfigError, OutOfTurn

_jobs = itertools.count()


_one_at_a_time = threading.Lock()


class Net(nn.Module):
    """Has a shared layer, a head, a frozen layer and a buffer that is merged."""

    def __init__(self) -> None:
        super().__init__()
        with _one_at_a_time, torch.random.fork_rng():  # the generator is one for all threads
            torch.manual_seed(7)
            self.body, self.head, self.fixed = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2)
        self.fixed.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))


class NetTask:
    """Moves what is trained by the client's id and the round. ``held``: rounds that last until they are let go."""

    def __init__(self, *held: int) -> None:
        self.held = set(held)
        self.begun: list[int] = []

    def build_model(self) -> nn.Module:
        return Net()

    def prepare(self, client_id: int, num_clients: int) -> None:
        pass

    def train(self, model: Any, *, client_id: int, round_id: int, should_stop: Any, **_: Any) -> TrainResult:
        self.begun.append(round_id)
        while round_id in self.held and not should_stop():
            threading.Event().wait(0.002)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.125 * (1 + client_id) * round_id
            model.seen += 1
        return TrainResult(10, 0.5 * round_id, metrics={"f1": 0.25})

    def evaluate(self, model: Any) -> None:
        return None


class Follower:
    """Notes its calls, in order, and the models that it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.models: dict[int, dict[str, Tensor]] = {}
        self.reports: list[ClientReport] = []
        self.threads: set[str] = set()
        self.summaries: list[Any] = []

    def _note(self, what: str, round_id: int) -> None:
        self.calls.append((what, round_id))
        self.threads.add(threading.current_thread().name)

    def on_round(self, round_id: int) -> None:
        self._note("round", round_id)

    def on_model(self, round_id: int, model: dict[str, Tensor]) -> None:
        self._note("model", round_id)
        self.models[round_id] = model

    def on_report(self, report: ClientReport) -> None:
        self._note("report", report.round_id)
        self.reports.append(report)

    def on_end(self, summary: Any) -> None:
        self._note("end", summary.rounds)
        self.summaries.append(summary)


class Scene:
    """A controller and clients on one loop. ``make``: makes each client of its bus and id."""

    def __init__(
        self, make: Callable[[gradbus.Bus, int], Client], count: int = 2, task: Any = None, **settings: Any
    ) -> None:
        self._make, self.count, self._task = make, count, task or NetTask()
        self.job, self.domain = f"followed-{os.getpid()}-{next(_jobs)}", new_domain()
        clients = {"num": count, "min": 1, "dead_after_s": PATIENT_S, "heartbeat_s": 0.1, "start_grace_s": PATIENT_S}
        clients |= settings.pop("clients", {})
        self.config = gradbus.FederatedConfig(**{"rounds": 3, "eval_every": 0, "clients": clients, **settings})
        self.clients: dict[int, Client] = {}
        self.results: dict[int, Any] = {}
        self.states: list[dict[str, Tensor]] = []
        self.reports: list[gradbus.RoundReport] = []
        self.controller: gradbus.Controller

    async def _client(self, client_id: int) -> None:
        async with gradbus.connect(self.job, domain=self.domain) as bus:
            client = self.clients[client_id] = self._make(bus, client_id)
            self.results[client_id] = await self.take_part(client)

    async def take_part(self, client: Client) -> Any:
        """Have a client run."""
        return await client.run()

    async def main(self) -> None:
        async with gradbus.connect(self.job, domain=self.domain) as bus, asyncio.TaskGroup() as group:
            self.controller = gradbus.Controller(bus, self._task, self.config)
            for client_id in range(self.count):
                group.create_task(self._client(client_id))
            async for report in self.controller.rounds():
                self.reports.append(report)
                self.states.append(await self.controller.state_dict())


def same(left: dict[str, Tensor], right: dict[str, Tensor], names: Callable[[str], bool] = lambda name: True) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[one], right[one]) for one in left if names(one))


def test_callbacks_follow_rounds_models_and_reports_on_a_thread_of_their_own() -> None:
    follower = Follower()
    scene = Scene(lambda bus, one: Client(bus, NetTask(), client_id=one, callbacks=[follower] if one else []))
    run(scene.main())
    without_models = [call for call in follower.calls if call[0] != "model"]
    rounds = [(what, number) for number in (1, 2, 3) for what in ("round", "report")]
    assert without_models == [*rounds, ("end", 3)]
    assert ("model", 3) in follower.calls[-3:-1], "the last model comes before the end"
    assert follower.threads == {"gradbus-client-callbacks_0"}
    assert sorted(follower.models) == list(follower.models)
    assert same(follower.models[3], scene.states[-1])
    assert all(same(model, scene.states[number - 1]) for number, model in follower.models.items() if number)
    first = follower.reports[0]
    assert (first.round_id, first.counted, first.reason, first.num_samples, first.loss) == (1, True, "", 10, 0.5)
    assert first.metrics == {"f1": 0.25}
    assert first.bytes_up > 0
    assert follower.summaries == [scene.results[1]]


class NotingBuilds(NetTask):
    """Notes the threads on which its model is built."""

    def __init__(self) -> None:
        super().__init__()
        self.built_on: list[str] = []

    def build_model(self) -> nn.Module:
        self.built_on.append(threading.current_thread().name)
        return super().build_model()


@pytest.mark.parametrize("settings", [{}, {"share": {"exclude": ["head.*"]}}, {"exchange": "all"}])
def test_the_model_of_a_client_is_built_once_however_it_is_followed(settings: dict[str, Any]) -> None:
    """A second module would take memory, and random numbers that its training draws."""
    tasks = [NotingBuilds(), NotingBuilds()]
    states: list[dict[str, Tensor]] = []

    class Taking(Scene):
        async def take_part(self, client: Client) -> Any:
            found = [(report, await client.state_dict()) async for report in client.rounds()]
            states.append(found[-1][1])
            return found

    scene = Taking(
        lambda bus, one: Client(bus, tasks[one], client_id=one, callbacks=[Follower()] if one else []), **settings
    )
    run(scene.main())
    assert [task.built_on for task in tasks] == [["gradbus-client-0_0"], ["gradbus-client-1_0"]], "before training"
    assert [state.keys() for state in states] == [Net().state_dict().keys()] * 2


class Iterating(Scene):
    """Clients whose programs iterate over their rounds."""

    async def take_part(self, client: Client) -> Any:
        return [(report, await client.state_dict()) async for report in client.rounds()]


def test_a_program_iterates_over_the_rounds_of_its_client_and_has_the_model_at_any_time() -> None:
    scene = Iterating(lambda bus, one: Client(bus, NetTask(), client_id=one))
    run(scene.main())
    for client_id, client in scene.clients.items():
        reports = [report for report, _ in scene.results[client_id]]
        assert [(report.round_id, report.counted) for report in reports] == [(1, True), (2, True), (3, True)]
        assert same(run(client.state_dict()), scene.states[-1]), "after the end, too, and that of the last round"
    net = Net()
    net.load_state_dict(scene.results[0][0][1])


def test_before_the_first_model_there_is_no_state() -> None:
    async def main() -> None:
        async with gradbus.connect(f"followed-{os.getpid()}-{next(_jobs)}", domain=new_domain()) as bus:
            await Client(bus, NetTask(), client_id=0).state_dict()

    with pytest.raises(RuntimeError, match="no global model has arrived yet"):
        run(main())


class Asking:
    """Asks its client for the newest model in the midst of a callback, and waits for it there."""

    def __init__(self) -> None:
        self.client: Client
        self.loop: asyncio.AbstractEventLoop
        self.states: list[dict[str, Tensor]] = []

    def on_model(self, round_id: int, model: dict[str, Tensor]) -> None:
        asked = asyncio.run_coroutine_threadsafe(self.client.state_dict(), self.loop)
        self.states.append(asked.result(PATIENT_S))


def test_a_callback_may_wait_for_the_state_of_its_client() -> None:
    asking = Asking()

    def make(bus: gradbus.Bus, client_id: int) -> Client:
        asking.loop = asyncio.get_running_loop()
        asking.client = Client(bus, NetTask(), client_id=client_id, callbacks=[asking])
        return asking.client

    scene = Scene(make, count=1, rounds=1)
    run(scene.main())
    assert same(asking.states[-1], scene.states[-1])


def test_a_client_runs_once_and_a_second_time_is_an_error_that_says_so() -> None:
    async def again(client: Client) -> None:
        with pytest.raises(OutOfTurn, match=r"make another gradbus\.Client"):
            await anext(client.rounds())
        with pytest.raises(OutOfTurn, match="runs now"):
            await client.run()

    class Twice(Scene):
        async def take_part(self, client: Client) -> Any:
            async for report in client.rounds():
                if report.round_id == 1:
                    await again(client)
            await again(client)

    scene = Twice(lambda bus, one: Client(bus, NetTask(), client_id=one), count=1, rounds=2)
    run(scene.main())
    assert [report.clients for report in scene.reports] == [(0,), (0,)]


def test_a_model_comes_while_the_client_still_trains() -> None:
    follower, tasks = Follower(), [NetTask(), NetTask(1)]
    # The quorum is one client: the other one is in the midst of round 1 when the model after it arrives.
    scene = Scene(
        lambda bus, one: Client(bus, tasks[one], client_id=one, callbacks=[follower] if one else []),
        round={"quorum": 0.5, "grace_s": 0.0},
        rounds=1,
    )
    run(scene.main())
    assert ("model", 1) in follower.calls
    assert [(one.round_id, one.counted, one.reason) for one in follower.reports if not one.counted] in (
        [(1, False, CALLED_OFF)],
        [],
    )


def test_personal_tensors_of_the_model_are_the_clients_own() -> None:
    follower = Follower()
    scene = Iterating(
        lambda bus, one: Client(bus, NetTask(), client_id=one, callbacks=[follower] if one else []),
        share={"exclude": ["head.*"]},
    )
    run(scene.main())
    state = run(scene.clients[1].state_dict())
    assert same(state, scene.states[-1], lambda name: not name.startswith("head."))
    expected = Net().head.weight.detach() + 0.125 * 2 * (1 + 2 + 3)
    assert torch.allclose(state["head.weight"], expected)
    assert torch.allclose(follower.models[3]["head.weight"], expected)


def test_what_a_client_kept_of_one_run_is_not_in_its_state_of_another_run() -> None:
    task = NetTask(2)
    config = gradbus.FederatedConfig(
        rounds=3,
        eval_every=0,
        share={"exclude": ["head.*"]},
        clients={"num": 1, "dead_after_s": PATIENT_S, "heartbeat_s": 0.1},
    )

    async def main() -> dict[str, Tensor]:
        job, domain = f"followed-{os.getpid()}-{next(_jobs)}", new_domain()
        async with gradbus.connect(job, domain=domain) as bus, gradbus.connect(job, domain=domain) as other:
            client = Client(other, task, client_id=0)
            taking_part = asyncio.create_task(client.run())
            first = asyncio.create_task(gradbus.Controller(bus, NetTask(), config).run())
            await eventually(lambda: 2 in task.begun)
            assert not torch.equal((await client.state_dict())["head.weight"], Net().head.weight)
            first.cancel()
            await asyncio.wait([first])
            task.held = {1}
            second = asyncio.create_task(gradbus.Controller(bus, NetTask(), config).run())
            await eventually(lambda: task.begun[-1] == 1 and len(task.begun) > 2)
            state = await client.state_dict()
            task.held = set()
            await asyncio.gather(second, taking_part)
            return state

    assert same(run(main()), Net().state_dict())


def test_with_a_selection_a_follower_gets_the_models_of_rounds_that_it_sits_out_and_the_last_one() -> None:
    followers = [Follower() for _ in range(4)]
    scene = Scene(
        lambda bus, one: Client(bus, NetTask(), client_id=one, callbacks=[followers[one]]),
        count=4,
        selection={"name": "uniform", "count": 1},
        rounds=4,
        clients={"min": 1},
    )
    run(scene.main())
    assert all(len(report.clients) == 1 for report in scene.reports)
    for follower in followers:
        assert same(follower.models[4], scene.states[-1])
        assert len(follower.models) >= 3


class OtherFrozen(NetTask):
    """Builds the model with other frozen values than the controller's."""

    def build_model(self) -> nn.Module:
        net = Net()
        with torch.no_grad():
            net.fixed.weight.fill_(9.0)
        return net


@pytest.mark.parametrize("is_paused", [False, True], ids=["trains", "paused"])
def test_models_are_given_with_the_frozen_parameters_of_the_controller(is_paused: bool) -> None:
    follower = Follower()

    def make(bus: gradbus.Bus, one: int) -> Client:
        client = Client(bus, OtherFrozen() if one else NetTask(), client_id=one, callbacks=[follower] if one else [])
        if one and is_paused:
            client.pause()
        return client

    scene = Scene(make)
    run(scene.main())
    assert same(follower.models[3], scene.states[-1])
    assert not any((model["fixed.weight"] == 9.0).any() for model in follower.models.values())
    assert ("report", 3) not in follower.calls or not is_paused


def test_a_client_that_sits_out_has_the_state_of_a_new_run_that_shares_another_part() -> None:
    clients: dict[str, Any] = {"num": 2, "min": 1, "dead_after_s": PATIENT_S, "heartbeat_s": 0.1}
    everything, a_part = (
        gradbus.FederatedConfig(rounds=3, eval_every=0, clients=clients, **share)
        for share in ({}, {"share": {"exclude": ["head.*"]}})
    )
    task = NetTask(2)

    async def main() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        job, domain = f"followed-{os.getpid()}-{next(_jobs)}", new_domain()
        async with gradbus.connect(job, domain=domain) as bus, gradbus.connect(job, domain=domain) as other:
            training, client = Client(other, task, client_id=0), Client(other, NetTask(), client_id=1)
            client.pause()
            taking_part = [asyncio.create_task(one.run()) for one in (training, client)]
            before = gradbus.Controller(bus, NetTask(), everything)
            first = asyncio.create_task(before.run())
            await eventually(lambda: 2 in task.begun and 1 in before.progress.clients)
            first.cancel()
            await asyncio.wait([first])
            task.held = set()
            second = gradbus.Controller(bus, NetTask(), a_part)
            await asyncio.gather(second.run(), *taking_part)
            return await client.state_dict(), await second.state_dict()

    held, committed = run(main())
    assert same(held, committed, lambda name: not name.startswith("head."))
    assert torch.equal(held["head.weight"], Net().head.weight)


class Losing(Client):
    """Loses the model after the last round on its way."""

    def _make_run(self, context: ClientContext, prepared: Prepared) -> LosingRun:
        return LosingRun(context, prepared, self._outbox, self._observer)


class LosingRun(ClientRun):
    def _on_controller(self, session: int, body: Any) -> None:
        if type(body).__name__ == "ModelAvailable" and body.round_id == 3 and self._session.ended is None:
            return
        super()._on_controller(session, body)


def test_a_last_model_that_is_late_is_waited_for() -> None:
    follower = Follower()
    task = NoopTask(20_000, delta="seeded")  # large enough for shared memory
    scene = Scene(
        lambda bus, one: (Losing if one else Client)(bus, task, client_id=one, callbacks=[follower] if one else []),
        task=task,
    )
    with capture_logs() as logs:
        run(scene.main())
    assert same(follower.models[3], scene.states[-1])
    assert not [one for one in logs if one["log_level"] in ("warning", "error")]


@pytest.mark.parametrize("method", ["on_round", "on_report", "on_model"])
def test_a_callback_that_returns_true_has_its_client_leave(method: str) -> None:
    class Ending:
        pass

    setattr(Ending, method, lambda self, *arguments: True)
    scene = Scene(lambda bus, one: Client(bus, NetTask(), client_id=one, callbacks=[Ending()] if one else []))
    with capture_logs() as logs:
        run(scene.main())
    assert [report.clients for report in scene.reports][-1] == (0,)
    (left,) = [one for one in logs if one["event"] == "client left" and one["client"] == 1]
    assert left["reason"] == f"{__name__}:{Ending.__qualname__}.{method} has ended it"


@pytest.mark.parametrize("method", ["on_round", "on_report", "on_model"])
def test_a_callback_that_raises_ends_its_client_with_its_name(method: str) -> None:
    class Broken:
        pass

    def fails(self: Any, *arguments: Any) -> None:
        raise KeyError("battery")

    setattr(Broken, method, fails)
    scene = Scene(lambda bus, one: Client(bus, NetTask(), client_id=one, callbacks=[Broken()] if one else []))
    with capture_logs() as logs, pytest.raises(ExceptionGroup) as caught:
        run(scene.main())
    assert caught.group_contains(CallbackFailed, match=f"Broken: {method} raised KeyError: 'battery'")
    left = [one for one in logs if one["event"] == "client left" and one["client"] == 1]
    assert all(one["reason"].startswith("failed: ") and "battery" in one["reason"] for one in left), left
    assert {one["log_level"] for one in left} <= {"warning"}  # what a program sees that has asked for no more


def test_settings_of_another_class_are_refused_with_the_call_that_makes_them() -> None:
    async def embedded(given: Any) -> None:
        async with gradbus.connect(f"followed-{os.getpid()}-{next(_jobs)}", domain=new_domain()) as bus:
            Client(bus, NetTask(), client_id=0, config=given)

    for given, text in (({"budget": {}}, r"\*\*config"), (gradbus.FederatedConfig(rounds=1), r"\.\.\.")):
        advice = rf"expected a ClientConfig, got .*write config=ClientConfig\({text}\)"
        with pytest.raises(TypeError, match=advice):
            run(embedded(given))
        with pytest.raises(TypeError, match=advice):
            gradbus.client("robots", client_id=0, config=given)  # type: ignore[arg-type]


def test_what_is_no_callback_of_a_client_is_refused_at_once() -> None:
    class Wrong:
        def on_step(self, report: Any) -> None:
            pass

    async def main() -> None:
        async with gradbus.connect(f"followed-{os.getpid()}-{next(_jobs)}", domain=new_domain()) as bus:
            Client(bus, NetTask(), client_id=0, callbacks=[Wrong()])

    with pytest.raises(ConfigError, match="some of on_round, on_model, on_report, on_end"):
        run(main())


def test_callbacks_of_the_configuration_are_made_by_the_client() -> None:
    config = gradbus.ClientConfig(callbacks=[f"{__name__}:Named"])
    scene = Scene(lambda bus, one: Client(bus, NetTask(), client_id=one, config=config), count=1)
    run(scene.main())
    assert Named.made == [1, 2, 3]


class Named:
    """Is named in a configuration."""

    made: ClassVar[list[int]] = []

    def on_report(self, report: ClientReport) -> None:
        self.made.append(report.round_id)


def test_a_slow_reader_of_reports_misses_the_oldest_and_never_the_end() -> None:
    from gradbus.runtime.tasks import items_of

    async def serve(put: Callable[[int], object]) -> None:
        for number in range(10):
            put(number)

    async def main() -> list[int]:
        numbers = []
        async for number in items_of(serve, name="numbers", most=4):
            numbers.append(number)
            await eventually(lambda: True)
        return numbers

    assert run(main()) == [6, 7, 8, 9]


class Hanging:
    """Does not return from one method, at its last call, until it is let go."""

    def __init__(self, method: str) -> None:
        self.is_held, self.let_go = threading.Event(), threading.Event()
        setattr(self, method, self._hang)

    def _hang(self, *arguments: Any) -> None:
        number = getattr(arguments[0], "round_id", arguments[0])
        if number == 3 or not isinstance(number, int):
            self.is_held.set()
            self.let_go.wait(PATIENT_S)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks that take long are reported and given up soon."""
    monkeypatch.setattr(callback_module, "WARN_S", 0.1)
    monkeypatch.setattr(callback_module, "END_S", 0.5)
    monkeypatch.setattr(compute_module, "LET_GO_S", 0.1)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("method", ["on_model", "on_report", "on_end"])
def test_a_callback_that_never_returns_ends_its_client_after_the_run(method: str) -> None:
    callback = Hanging(method)
    scene = Scene(lambda bus, one: Client(bus, NetTask(), client_id=one, callbacks=[callback] if one else []))
    try:
        with capture_logs() as logs, pytest.raises(ExceptionGroup) as caught:
            run(scene.main())
    finally:
        callback.let_go.set()
    text = rf"Hanging: {method} has not returned within 0\.5 s, although the run has ended, .* a thread of its own$"
    assert caught.group_contains(CallbackTimeout, match=text)
    assert not caught.group_contains(TimeoutError)  # of a script's receive, that says to call it again
    assert len(scene.reports) == 3
    named = [one for one in logs if one["event"] == "callback has not returned"]
    assert {(one["callback"], one["method"]) for one in named} == {(f"{__name__}:Hanging", method)}
    assert named[0]["log_level"] == "warning"


@pytest.mark.usefixtures("soon")
def test_a_callback_of_a_controller_that_never_returns_ends_the_run_with_an_error() -> None:
    callback = Hanging("on_end")

    async def main() -> None:
        config = gradbus.FederatedConfig(rounds=1, eval_every=0, clients={"num": 1, "min": 1})
        place = {"job": f"followed-{os.getpid()}-{next(_jobs)}", "domain": new_domain()}
        async with gradbus.connect(**place) as bus, gradbus.connect(**place) as other:
            client = asyncio.create_task(Client(other, NetTask(), client_id=0).run())
            try:
                await gradbus.Controller(bus, NetTask(), config, callbacks=[callback]).run()
            finally:
                client.cancel()
                await asyncio.wait([client])

    try:
        with (
            capture_logs() as logs,
            pytest.raises(CallbackTimeout, match=r"Hanging: on_end has not returned within 0\.5"),
        ):
            run(main())
    finally:
        callback.let_go.set()
    assert "callback has not returned" in [one["event"] for one in logs]


@pytest.mark.usefixtures("soon")
def test_a_callback_that_takes_long_before_the_end_of_the_run_is_named_and_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warned = threading.Event()
    warn = callback_module.CallbackWait._warn  # noqa: SLF001 - to wait for the line

    def note(self: Any, waited_s: float) -> None:
        warn(self, waited_s)
        warned.set()

    class Slow:
        def on_round(self, round_id: int) -> None:
            if round_id == 1:
                assert warned.wait(PATIENT_S)

    monkeypatch.setattr(callback_module.CallbackWait, "_warn", note)
    scene = Scene(lambda bus, one: Client(bus, NetTask(), client_id=one, callbacks=[Slow()] if one else []))
    with capture_logs() as logs:
        run(scene.main())
    assert [report.clients for report in scene.reports] == [(0, 1)] * 3
    found = [one for one in logs if one["event"] == "callback has not returned"]
    assert {(one["method"], one["effect"]) for one in found} == {("on_round", "the run waits for it")}
