"""A client that cannot get ready for its first round: its controller says why, and what to do is to mend it."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain
from structlog.testing import capture_logs
from torch import nn

import gradbus
from gradbus.actors.federated.client import failures
from gradbus.actors.federated.controller import liveness, selection
from gradbus.models import EvalResult, NoopTask
from gradbus.runtime.errors import BarrierTimeout, ConfigError, JoinDeclined, RunAborted, TrainingFailed
from gradbus.runtime.wire.control import BEFORE_FIRST_ROUND, NOT_WELCOMED, TrainingFailure
from gradbus.runtime.wire.messages import Identity

DIM = 100
_jobs = itertools.count()


class WithoutColumn(NoopTask):
    """Its data lack what it reads."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(DIM)
        self._error = error

    def prepare(self, client_id: int, num_clients: int) -> None:
        if self._error is not None:
            raise self._error
        {"age": 1}["label"]


PLACE = f"{Path(__file__).name}:{WithoutColumn.prepare.__code__.co_firstlineno + 3} in prepare"
SAID = "KeyError: 'label', at "


async def ended(awaitable: Any) -> Any:
    """Return what it returns, or what it raises."""
    try:
        return await awaitable
    except Exception as error:
        return error


def run(
    tasks: list[Any],
    *,
    num: int | None = None,
    again: dict[int, Any] | None = None,
    task: Any = None,
    wrong: dict[str, Any] | None = None,
    named: bool = False,
    heartbeat_s: float = 0.5,
    **options: Any,
) -> tuple[Any, list[Any], list[Any]]:
    """What a controller and its clients end with, and the log.

    Args:
        num: of clients that the controller waits for. wrong: more of its settings. task: its own.
        again: tasks with which clients start once more after they have failed. options: of the clients.
        named: they have names in place of ids. heartbeat_s: that they are asked for.
    """
    job, domain = f"unprepared-{os.getpid()}-{next(_jobs)}", new_domain()
    num = num or len(tasks)
    config = gradbus.FederatedConfig(
        rounds=1,
        clients={"num": num, "min": num, "start_timeout_s": 60.0, "dead_after_s": 30.0, "heartbeat_s": heartbeat_s},
        **{"eval_every": 0, **(wrong or {})},
    )

    async def start(client_id: int, task: Any) -> Any:
        who = {"name": f"site-{client_id}"} if named else {"client_id": client_id}
        async with gradbus.connect(job=job, domain=domain) as bus:
            client = gradbus.Client(bus, task, **who, config=gradbus.ClientConfig(**options))  # type: ignore[arg-type]
            return await ended(client.run())

    async def one(client_id: int, task: Any) -> Any:
        found = await start(client_id, task)
        return await start(client_id, again[client_id]) if again and isinstance(found, Exception) else found

    async def main() -> tuple[Any, list[Any]]:
        async with asyncio.timeout(90), gradbus.connect(job=job, domain=domain) as bus:
            controller = ended(gradbus.Controller(bus, task or NoopTask(DIM), config).run())
            first, *others = await asyncio.gather(controller, *(one(*each) for each in enumerate(tasks)))
            return first, others

    with capture_logs() as logs:
        return *asyncio.run(main()), logs


def give_up_once_told(monkeypatch: pytest.MonkeyPatch, others: int = 1) -> None:
    """The controller's deadline passes when a client has reported its failure and left, and the others are ready."""
    told: list[Any] = []
    note = selection.ParticipantSelection.note_unprepared

    def noting(self: Any, client_id: int, why: str) -> None:
        note(self, client_id, why)
        told.append(self)

    class UntilTold(selection.StartCondition):
        def may_start(self, ready: Sequence[int], now_s: float, paused: Collection[int] = ()) -> bool:
            is_over = bool(told) and len(ready) == others == told[0]._registry.count_live()  # noqa: SLF001 - who is here is the controller's own affair
            return super().may_start(ready, math.inf if is_over else now_s, paused)

    monkeypatch.setattr(selection.ParticipantSelection, "note_unprepared", noting)
    monkeypatch.setattr(selection, "StartCondition", UntilTold)


def test_the_controller_names_type_message_and_line_and_ends_with_them_as_the_other_clients_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_up_once_told(monkeypatch)
    controller, (first, second), logs = run([NoopTask(DIM), WithoutColumn()])
    assert isinstance(second, KeyError)
    assert isinstance(controller, TrainingFailed)
    assert controller.clients == (1,)
    assert str(controller).startswith(
        f"round 1 cannot start, as 1 of 2 clients are ready: client 1 failed before its first round: {SAID}"
    )
    assert f"{PLACE}. Mend it there and start the client again" in str(controller)
    assert "INTERFACE" not in str(controller)
    assert isinstance(first, RunAborted)
    assert PLACE in str(first)
    (told,) = [one for one in logs if one["event"] == "preparing failed on a client"]
    assert (told["client"], told["round"]) == (1, 0)
    assert told["error"].startswith(SAID)
    assert '{"age": 1}["label"]' in told["traceback"]
    (left,) = [one for one in logs if one["event"] == "client left" and one["client"] == 1]
    assert left["reason"].startswith(f"failed: {SAID}")
    assert left["reason"].endswith(PLACE)


def test_a_client_that_is_mended_while_the_controller_waits_takes_part() -> None:
    controller, clients, _ = run([NoopTask(DIM), WithoutColumn()], again={1: NoopTask(DIM)})
    assert [report.clients for report in controller] == [(0, 1)]
    assert [client.rounds for client in clients] == [1, 1]


def test_only_the_type_leaves_a_client_that_keeps_its_failures_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_up_once_told(monkeypatch)
    controller, _, logs = run([NoopTask(DIM), WithoutColumn()], report_failures=False)
    assert "client 1 failed before its first round: KeyError. Mend" in str(controller)
    (left,) = [one for one in logs if one["event"] == "client left" and one["client"] == 1]
    assert left["reason"] == "failed: KeyError"
    assert not any("label" in str(one) for one in logs)


def test_an_error_of_the_settings_is_told_without_a_place_in_gradbus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_up_once_told(monkeypatch)
    error = ConfigError("task.data_root 'here' has no MNIST")
    controller, *_ = run([NoopTask(DIM), WithoutColumn(error)])
    assert "client 1 failed before its first round: ConfigError: task.data_root 'here' has no MNIST" in str(controller)


class WithoutModel(NoopTask):
    """Cannot build its model."""

    def __init__(self) -> None:
        super().__init__(DIM)

    def build_model(self) -> nn.Module:
        raise FileNotFoundError("pretrained.pt")


def test_a_client_that_cannot_build_its_model_says_so_to_a_controller_that_it_has_not_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_up_once_told(monkeypatch)
    controller, (first, second), logs = run([NoopTask(DIM), WithoutModel()])
    assert isinstance(second, FileNotFoundError)
    assert isinstance(controller, TrainingFailed)
    assert controller.clients == (1,)
    assert "client 1 failed before its first round: FileNotFoundError: pretrained.pt, at " in str(controller)
    assert "in build_model. Mend it there" in str(controller)
    assert isinstance(first, RunAborted)
    (told,) = [one for one in logs if one["event"] == "preparing failed on a client"]
    assert 'raise FileNotFoundError("pretrained.pt")' in told["traceback"]


def test_a_client_that_fails_before_it_has_an_id_is_named_and_ends_the_run_as_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_up_once_told(monkeypatch)
    controller, (first, second), logs = run([NoopTask(DIM), WithoutModel()], named=True)
    assert isinstance(second, FileNotFoundError)
    assert isinstance(controller, TrainingFailed)
    assert controller.clients == ()
    assert "client site-1 failed before its first round: FileNotFoundError: pretrained.pt, at " in str(controller)
    assert "INTERFACE" not in str(controller)
    assert isinstance(first, RunAborted)
    (told,) = [one for one in logs if one["event"] == "preparing failed on a client"]
    assert (told["name"], "client" in told) == ("site-1", False)


def test_a_client_that_failed_before_it_had_an_id_and_is_mended_takes_part() -> None:
    controller, clients, _ = run([NoopTask(DIM), WithoutModel()], again={1: NoopTask(DIM)}, named=True)
    assert [report.clients for report in controller] == [(0, 1)]
    assert [client.rounds for client in clients] == [1, 1]


def test_a_client_that_cannot_build_its_model_waits_for_no_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "FIND_S", 0.05)

    async def main() -> Any:
        async with asyncio.timeout(60), gradbus.connect(job="nobody-here", domain=new_domain()) as bus:
            return await ended(gradbus.Client(bus, WithoutModel(), client_id=0).run())

    assert isinstance(asyncio.run(main()), FileNotFoundError)


def test_a_client_that_gives_less_than_the_run_asks_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up_once_told(monkeypatch, others=0)
    controller, (client,), logs = run([NoopTask(DIM)], least_members=2)
    assert isinstance(client, JoinDeclined)
    declined = "JoinDeclined: this client takes no part in the run: the controller takes updates that are not masked"
    assert f"client 0 failed before its first round: {declined}" in str(controller)
    assert "INTERFACE" not in str(controller)
    (left,) = [one for one in logs if one["event"] == "client left"]
    assert left["reason"].startswith(f"failed: {declined}")


def test_the_report_of_a_process_with_the_id_of_a_client_that_is_here_is_not_believed() -> None:
    class Late(NoopTask):
        def prepare(self, client_id: int, num_clients: int) -> None:
            assert asyncio.run_coroutine_threadsafe(false_report(), loops[0]).result(30) is None

    loops: list[asyncio.AbstractEventLoop] = []
    job, domain = f"unprepared-{os.getpid()}-{next(_jobs)}", new_domain()

    async def false_report() -> None:
        await buses[0].publish(Identity(0, 77), TrainingFailure(NOT_WELCOMED, BEFORE_FIRST_ROUND, "a lie"))

    buses: list[Any] = []

    async def main() -> Any:
        loops.append(asyncio.get_running_loop())
        config = gradbus.FederatedConfig(rounds=1, clients={"num": 1, "dead_after_s": 30.0}, eval_every=0)
        async with (
            asyncio.timeout(60),
            gradbus.connect(job=job, domain=domain) as bus,
            gradbus.connect(job=job, domain=domain) as other,
            asyncio.TaskGroup() as group,
        ):
            buses.append(other)
            client = group.create_task(gradbus.Client(other, Late(DIM), client_id=0).run())
            reports = await gradbus.Controller(bus, NoopTask(DIM), config).run()
            return reports, await client

    with capture_logs() as logs:
        reports, _ = asyncio.run(main())
    assert [report.clients for report in reports] == [(0,)]
    assert not [one for one in logs if one["event"].startswith("preparing failed")]


def test_a_controller_that_misses_others_as_well_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up_once_told(monkeypatch, others=0)
    controller, _, _ = run([WithoutColumn()], num=2)
    assert isinstance(controller, BarrierTimeout)
    assert controller.missing == (0, 1)
    assert f"client 0 failed before its first round: {SAID}" in str(controller)
    assert "GRADBUS_BUS__INTERFACE" in str(controller), "the other may be on another machine"


class Measured(NoopTask):
    """Has an evaluation with one metric beside the loss."""

    def __init__(self) -> None:
        super().__init__(DIM)

    def evaluate(self, model: Any) -> EvalResult:
        return EvalResult(None, 0.5, 10, {"rmse": 0.5})


@pytest.mark.parametrize("named", [False, True])
def test_clients_of_a_controller_with_a_wrong_configuration_end_with_its_words(
    monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Also where new names would have to wait for longer than the controller is there."""
    if named:  # they have an answer more to wait for
        monkeypatch.setattr(liveness, "BYE_S", 5.0)
    wrong = {"eval_every": 1, "early_stop": {"metric": "rsme", "patience": 1}}
    controller, clients, _ = run(
        [Measured(), Measured()], wrong=wrong, task=Measured(), controller_timeout_s=20.0, named=named, heartbeat_s=5.0
    )
    assert isinstance(controller, ConfigError)
    assert "federated.early_stop.metric" in str(controller)
    for client in clients:
        assert isinstance(client, RunAborted)
        assert str(client) == f"the run has ended: {controller}"


def test_a_controller_with_a_wrong_configuration_ends_once_all_clients_that_it_expects_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its clients get the reason, and no further one will come that could miss it."""
    monkeypatch.setattr(liveness, "BYE_S", 3600.0)
    wrong = {"eval_every": 1, "early_stop": {"metric": "rsme", "patience": 1}}
    controller, clients, _ = run([Measured(), Measured()], wrong=wrong, task=Measured(), controller_timeout_s=20.0)
    assert isinstance(controller, ConfigError)
    assert [type(client) for client in clients] == [RunAborted, RunAborted]
