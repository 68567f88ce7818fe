"""The controller's heartbeat: who says nothing is not waited for, and who could not be heard is."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from patience import PATIENT_S, eventually

from gradbus.actors.federated.client_names import ClientNames
from gradbus.actors.federated.controller import dispatch as reception_module
from gradbus.actors.federated.controller import liveness
from gradbus.actors.federated.controller.client_evaluation import ClientEvaluator
from gradbus.actors.federated.controller.clients import ClientRegistry, ExpectedModel
from gradbus.actors.federated.controller.current_round import CurrentRound
from gradbus.actors.federated.controller.dispatch import Dispatcher
from gradbus.actors.federated.controller.liveness import LivenessMonitor, make_status
from gradbus.actors.federated.controller.report import Progress, RoundReport
from gradbus.actors.federated.controller.round_losses import RoundLosses
from gradbus.actors.federated.controller.run_membership import RunMembership
from gradbus.actors.federated.controller.state import RunContext
from gradbus.runtime.config.federated import EvaluationSettings
from gradbus.runtime.errors import BusClosed
from gradbus.runtime.transport.access_policy import AccessPolicy
from gradbus.runtime.wire import control
from gradbus.runtime.wire.control import PROTOCOL, Hello, Status
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import Identity, PeerGone

HEARTBEAT_S, DEAD_AFTER_S = 0.5, 2.5
_numbers = itertools.count(1)


def nothing() -> None:
    """Nobody says anything."""


class Scene:
    """A presence whose beats take as long as a test says; clients talk in between."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.beats = 0
        self.found_dead = 0
        self.members = ClientRegistry(ExpectedModel(1, 0), session=1, dead_after_s=DEAD_AFTER_S, duplicate_after_s=1.2)
        self.presence: LivenessMonitor
        self.heard_next: Callable[[], None] = nothing
        self.script: Iterator[tuple[float | None, Callable[[], None]]] = iter(())
        monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(liveness, "asyncio", SimpleNamespace(sleep=self.sleep))

    async def sleep(self, seconds: float) -> None:
        """A heartbeat later, or when the script says. What comes then is handled after the timer."""
        self.beats += 1
        self.heard_next()
        takes_s, self.heard_next = next(self.script, (None, nothing))
        if takes_s is None:
            raise asyncio.CancelledError
        self.now_s += takes_s

    def hello(self, client_id: int) -> None:
        hello = Hello(PROTOCOL, 1, 0, True, 1, "idle", -1, -1, "", 1, "")
        self.members.answer_hello(Identity(client_id, 1), hello, next(_numbers), now_s=self.now_s, next_round=1)

    @property
    def context(self) -> Any:
        config = SimpleNamespace(clients=SimpleNamespace(heartbeat_s=HEARTBEAT_S, num=None))
        state = SimpleNamespace(run_id=1, names=ClientNames())
        self.closed: list[int] = []  # inboxes
        bus = SimpleNamespace(
            publish=self.publish, job="job", access_policy=AccessPolicy(), close_inbox=self.closed.append
        )
        return RunContext(bus, Identity(CONTROLLER, 1), None, config, state, None)  # type: ignore[arg-type]

    async def publish(self, sender: Identity, body: Any) -> None:
        assert isinstance(body, Status)

    def left(self) -> None:
        self.found_dead += 1

    def run(self, *script: tuple[float, Callable[[], None]]) -> list[int]:
        """Beats that take so long, with what is heard after each. Returns the clients that are still there."""
        self.script = iter(script)
        membership: Any = SimpleNamespace(follow_registry=self.left)
        self.presence = LivenessMonitor(self.context, self.members, Progress(), CurrentRound(Progress()), membership)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(self.presence.run())
        return sorted(member.client_id for member in self.members if not member.silent)


def monitor_of(context: Any, members: ClientRegistry) -> LivenessMonitor:
    """A monitor of a run without a round."""
    progress, names = Progress(), ClientNames()
    current_round = CurrentRound(progress)
    losses, evaluator = RoundLosses(Counter(), names), ClientEvaluator(context, members, current_round)
    return LivenessMonitor(
        context,
        members,
        progress,
        current_round,
        RunMembership(context, members, progress, current_round, losses, evaluator),
    )


def test_who_is_silent_for_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    for client_id in (0, 1):
        scene.hello(client_id)
    assert scene.run(*[(0.5, lambda: scene.hello(1))] * 5) == [0, 1]
    assert scene.run(*[(0.5, lambda: scene.hello(1))] * 2) == [1]
    assert scene.found_dead == 1


@pytest.mark.parametrize("stopped_s", [2.6, 10.0, 3600.0])
def test_a_controller_that_was_stopped_takes_nobody_for_dead_whom_it_has_not_heard_since(
    stopped_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(monkeypatch)

    def all_hear() -> None:
        for client_id in (0, 1):
            scene.hello(client_id)

    all_hear()
    assert scene.run((0.5, nothing), (stopped_s, all_hear), (0.5, nothing), (stopped_s, all_hear)) == [0, 1]
    assert scene.found_dead == 0


def test_after_that_a_client_that_died_meanwhile_is_noticed_as_soon_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.hello(0)
    assert scene.run((60.0, nothing), *[(0.5, nothing)] * 4) == [0]
    assert scene.run(*[(0.5, nothing)] * 2) == []


def test_what_dds_says_of_who_is_gone_is_doubted_when_this_process_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    doubts: list[bool] = []

    def ask() -> None:
        doubts.append(scene.presence.is_stalled())

    scene.run((0.5, nothing), (0.6, ask), (1.1, nothing), (0.5, ask), (0.6, ask), (0.5, ask), (0.5, nothing))
    assert doubts == [False, True, False, False]
    scene.now_s += 1.1  # the timer has yet to come
    assert scene.presence.is_stalled()


@pytest.mark.parametrize(("why", "in_doubt", "stays"), [("", True, True), ("", False, False), ("removed", True, False)])
def test_who_is_said_to_be_gone_has_its_full_time_where_that_is_in_doubt(
    why: str, in_doubt: bool, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(monkeypatch)
    scene.hello(0)
    forgotten: list[int] = []
    intake = SimpleNamespace(forget=lambda client_id, incarnation: forgotten.append(client_id))
    recipients: Any = SimpleNamespace(
        updates=intake,
        joining=SimpleNamespace(id_of=lambda sender, incarnation: sender),
        selection=SimpleNamespace(remember_departure=lambda client_id, why: None),
    )
    monitor: Any = SimpleNamespace(is_stalled=lambda: in_doubt)
    membership: Any = SimpleNamespace(follow_registry=scene.left)
    reception = Dispatcher(scene.context, scene.members, membership, monitor, CurrentRound(Progress()), recipients)
    monkeypatch.setattr(reception_module, "time", SimpleNamespace(monotonic=lambda: scene.now_s))
    scene.now_s += 60.0
    messages = iter([PeerGone(0, 1, why)])

    async def get() -> PeerGone:
        try:
            return next(messages)
        except StopIteration:
            raise BusClosed("of the test") from None

    with pytest.raises(BusClosed, match="of the test"):
        asyncio.run(reception.run(SimpleNamespace(get=get, fault=True), None))  # type: ignore[arg-type]
    assert (len(scene.members), forgotten, scene.found_dead) == ((1, [], 0) if stays else (0, [0], 1))
    assert scene.closed == ([] if stays else [1])
    if stays:
        assert scene.members.mark_silent(scene.now_s + DEAD_AFTER_S) == []
        assert len(scene.members.mark_silent(scene.now_s + DEAD_AFTER_S + 0.1)) == 1


def test_where_every_beat_is_late_the_dead_are_noticed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.hello(0)
    assert scene.run(*[(3.0, nothing)] * 7) == []
    assert scene.beats <= 8


def test_the_status_of_a_task_without_accuracy_tells_its_metrics_as_far_as_there_is_room() -> None:
    progress = Progress()
    progress.add(RoundReport(round_id=1, eval_loss=0.5, metrics={"rmse": 0.25, "r2": math.nan}))
    progress.add(RoundReport(round_id=2))
    members = ClientRegistry(ExpectedModel(1, 0), session=1, dead_after_s=1.0, duplicate_after_s=1.0)

    def said() -> dict[str, float]:
        return dict(make_status(progress, None, members, {}, run_id=1, host="", now_s=0.0).metrics)

    assert said() == {"rmse": 0.25}
    many = {f"metric {number} {'x' * 100}": 1.0 for number in range(50)}
    progress.amend(RoundReport(round_id=2, eval_loss=0.5, metrics=many))
    assert len(said()) == 16
    assert max(map(len, said())) == 64


def test_the_status_tells_the_newest_accuracy_however_long_ago_that_was() -> None:
    progress = Progress()
    progress.add(RoundReport(round_id=1, accuracy=0.5))
    progress.add(RoundReport(round_id=2))
    members = ClientRegistry(ExpectedModel(1, 0), session=1, dead_after_s=1.0, duplicate_after_s=1.0)

    def said() -> float:
        return make_status(progress, None, members, {}, run_id=1, host="", now_s=0.0).accuracy

    assert said() == 0.5
    progress.amend(RoundReport(round_id=2, accuracy=0.6))
    assert (said(), progress.reports[-1].accuracy) == (0.6, 0.6)
    progress.reports[:] = []  # nothing is looked for in what may be a million rounds
    assert said() == 0.6


def test_the_end_of_a_run_is_announced_with_its_reason_also_where_that_names_a_file_that_is_not_utf_8() -> None:
    said: list[Any] = []

    async def publish(sender: Identity, body: Any) -> None:
        said.append(body)

    clients = SimpleNamespace(heartbeat_s=HEARTBEAT_S, num=None)
    config = SimpleNamespace(clients=clients, evaluation=EvaluationSettings())
    context: Any = RunContext(
        SimpleNamespace(publish=publish, remote_lease_s=None),
        Identity(CONTROLLER, 1),
        None,
        config,
        SimpleNamespace(run_id=1),
        None,  # type: ignore[arg-type]
    )
    members = ClientRegistry(ExpectedModel(1, 0), session=1, dead_after_s=1.0, duplicate_after_s=1.0)
    monitor = monitor_of(context, members)
    asyncio.run(monitor.announce_end(ok=False, reason="no space left: /data/\udcff/round-000003"))
    assert [control.decode(control.encode(body)) for body in said] == said
    assert [body.reason for body in said] == ["no space left: /data/\N{REPLACEMENT CHARACTER}/round-000003"]


def test_the_end_of_a_run_waits_for_a_client_that_fetches_the_last_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "BYE_S", 0.0)
    said: list[Any] = []

    async def publish(sender: Identity, body: Any) -> None:
        said.append(body)

    config = SimpleNamespace(clients=SimpleNamespace(heartbeat_s=0.01, num=None), evaluation=EvaluationSettings())
    context: Any = RunContext(
        SimpleNamespace(publish=publish, remote_lease_s=None, delivery_progress=lambda kind: (0, 0)),
        Identity(CONTROLLER, 1),
        None,
        config,
        SimpleNamespace(run_id=1),
        None,  # type: ignore[arg-type]
    )
    members = ClientRegistry(ExpectedModel(1, 0), session=1, dead_after_s=1.0, duplicate_after_s=1.0)
    monitor = monitor_of(context, members)

    def report(phase: str) -> None:
        hello = Hello(PROTOCOL, 1, 0, True, 1, phase, 0, 0, "h", 1)
        members.answer_hello(Identity(0, 1), hello, next(_numbers), now_s=0.0, next_round=1)

    async def main() -> None:
        report("fetching")
        ending = asyncio.create_task(monitor.announce_end(ok=True, reason="all rounds are done"))
        await eventually(lambda: len(said) > 3)
        assert not ending.done()
        report("idle")  # it has the model; that it has not left yet is of no matter, as the time for that is over
        await asyncio.wait_for(ending, PATIENT_S)

    asyncio.run(main())


def test_the_last_model_has_its_time_from_its_last_progress_on() -> None:
    """However slow the link is, something is taken or acknowledged now and then, until it is there."""
    taken = acknowledged = 0
    bus: Any = SimpleNamespace(delivery_progress=lambda kind: (taken, acknowledged))
    delivery = liveness._Delivery(bus, 100.0)  # noqa: SLF001 - its sums, without a wait
    assert delivery.until_s(100.0) == 100.0 + liveness.LAST_MODEL_S
    assert delivery.until_s(120.0) == 100.0 + liveness.LAST_MODEL_S
    taken = 1 << 20
    assert delivery.until_s(125.0) == 125.0 + liveness.LAST_MODEL_S
    for number in range(100):
        acknowledged = number + 1
        assert delivery.until_s(150.0 + 20 * number) == 150.0 + 20 * number + liveness.LAST_MODEL_S
    assert delivery.until_s(9_999.0) == 150.0 + 20 * 99 + liveness.LAST_MODEL_S, "then it is given up"


def test_the_end_of_a_run_waits_for_clients_that_are_here_and_have_not_joined_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over a lossy link to join takes seconds. A start after the last round was gone before its clients had joined."""
    monkeypatch.setattr(liveness, "BYE_S", 0.0)
    said: list[Any] = []
    matched = 1

    async def publish(sender: Identity, body: Any) -> None:
        said.append(body)

    config = SimpleNamespace(clients=SimpleNamespace(heartbeat_s=0.01, num=None), evaluation=EvaluationSettings())
    bus = SimpleNamespace(publish=publish, remote_lease_s=PATIENT_S, matched_readers=lambda kind: matched)
    context: Any = RunContext(bus, Identity(CONTROLLER, 1), None, config, SimpleNamespace(run_id=1), None)  # type: ignore[arg-type]
    members = ClientRegistry(ExpectedModel(1, 0), session=1, dead_after_s=1.0, duplicate_after_s=1.0)
    monitor = monitor_of(context, members)

    async def main() -> None:
        nonlocal matched
        ending = asyncio.create_task(monitor.announce_end(ok=True, reason="all rounds are done", linger=True))
        await eventually(lambda: len(said) > 3)
        assert not ending.done()
        matched = 0
        await asyncio.wait_for(ending, PATIENT_S)

    asyncio.run(main())


def test_the_end_of_a_run_waits_for_each_client_from_its_first_message_on() -> None:
    """One that comes only now, or was cut off, would else miss it, and wait for a controller that has gone."""
    members = ClientRegistry(ExpectedModel(1, 0), session=1, dead_after_s=60.0, duplicate_after_s=1.0)

    def report(client_id: int, now_s: float) -> None:
        hello = Hello(PROTOCOL, 1, 0, True, 1, "idle", 0, 0, "h", 1)
        members.answer_hello(Identity(client_id, 1), hello, next(_numbers), now_s=now_s, next_round=1)

    report(0, now_s=90.0)
    on_one_machine = liveness._Goodbyes(members, 100.0, 2.0, lease_s=0.0)  # noqa: SLF001 - its sums, without a wait
    assert on_one_machine.until_s() == 102.0
    goodbyes = liveness._Goodbyes(members, 100.0, 2.0, lease_s=10.0)  # noqa: SLF001 - its sums, without a wait
    assert goodbyes.until_s() == 112.0  # client 0 may be cut off
    report(0, now_s=101.0)
    assert goodbyes.until_s() == 103.0
    report(1, now_s=102.9)
    report(0, now_s=102.9)  # it is still there: its time is over
    assert goodbyes.until_s() == 104.9
    members.remove(1, 1)
    assert goodbyes.until_s() == 103.0
    at_once = liveness._Goodbyes(members, 100.0, 0.0, lease_s=10.0)  # noqa: SLF001 - its sums, without a wait
    assert at_once.until_s() == 100.0
