"""Two controllers with the name of one job: the second one stays away, and says who is there."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import itertools
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dds_domains import new_domain
from federation import Federation
from patience import until

import gradbus
from gradbus.actors.federated.controller import liveness as duplicate_controller
from gradbus.actors.federated.controller.liveness import DuplicateControllers, claim_job
from gradbus.commands.history.reader import read_history
from gradbus.runtime.errors import ControllerReplaced, JobInUse
from gradbus.runtime.wire.control import Leave, RoundTerms, RunEnded, Status
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import Control, Identity, PeerGone, TrainCmd


def said(incarnation: int, body: Any, sender: int = CONTROLLER) -> Control:
    return Control(sender, incarnation, body)


RUN, OTHER_RUN = 5, 6
STATUS = Status(RUN, 3, "training", 1, 2, "there:17")


def test_a_controller_that_is_heard_twice_holds_the_job_and_the_error_says_where() -> None:
    rivals = DuplicateControllers("mnist", Identity(CONTROLLER, 9))
    assert rivals.observe(said(7, STATUS)) is None
    error = rivals.observe(said(7, STATUS))
    assert isinstance(error, JobInUse)
    assert "job 'mnist' has a controller already: there:17, training, round 3" in str(error)


def test_last_words_own_words_and_those_of_clients_mean_nothing() -> None:
    rivals = DuplicateControllers("mnist", Identity(CONTROLLER, 9))
    words = [
        said(7, STATUS), said(7, RunEnded(5, True, "done")), said(7, STATUS), said(6, STATUS), said(9, STATUS),
        said(9, STATUS), said(4, STATUS, 3), said(4, STATUS, 3), PeerGone(CONTROLLER, 6),
    ]  # fmt: skip
    assert [rivals.observe(word) for word in words] == [None] * len(words)


def test_of_two_that_begin_together_the_later_one_gives_way() -> None:
    earlier, later = (
        DuplicateControllers("mnist", Identity(CONTROLLER, 8)),
        DuplicateControllers("mnist", Identity(CONTROLLER, 9)),
    )
    waits = dataclasses.replace(STATUS, phase="waiting")
    for _ in range(2):
        for_the_earlier = earlier.observe_running(said(9, waits), OTHER_RUN, has_begun=False)
        for_the_later = later.observe_running(said(8, waits), OTHER_RUN, has_begun=False)
    assert for_the_earlier is None
    assert isinstance(for_the_later, JobInUse)


def test_a_controller_that_was_paused_while_it_waited_gives_way_to_a_later_one_that_has_begun_its_rounds() -> None:
    """Else it would wait, beside a run that goes on, for clients that follow the other one."""
    earlier, later = (
        DuplicateControllers("mnist", Identity(CONTROLLER, 8)),
        DuplicateControllers("mnist", Identity(CONTROLLER, 9)),
    )
    waits = dataclasses.replace(STATUS, phase="waiting")
    assert earlier.observe_running(said(9, STATUS), OTHER_RUN, has_begun=False) is None  # may be the last of one
    assert isinstance(earlier.observe_running(said(9, STATUS), OTHER_RUN, has_begun=False), ControllerReplaced)
    assert [later.observe_running(said(8, waits), OTHER_RUN, has_begun=True) for _ in range(3)] == [None] * 3


def test_a_later_start_of_its_own_run_ends_a_controller_by_any_word_at_any_time() -> None:
    """Its clients follow that one from then on, and no earlier one again."""
    for has_begun in (False, True):
        duplicates = DuplicateControllers("mnist", Identity(CONTROLLER, 7))
        for word in (STATUS, RoundTerms(RUN, 3, {}), RunEnded(RUN, False, "stopped")):
            error = duplicates.observe_running(said(9, word), RUN, has_begun=has_begun)
            assert isinstance(error, ControllerReplaced)
            assert (error.run_id, error.incarnation) == (RUN, 9)


def test_the_error_of_a_controller_that_was_replaced_says_by_whom_since_when_and_what_to_do() -> None:
    started = int(datetime.datetime(2026, 11, 29, 14, 40, 5, tzinfo=datetime.UTC).timestamp())
    later = started * 1_000_000 << 11
    error = DuplicateControllers("mnist", Identity(CONTROLLER, 7)).observe_running(
        said(later, STATUS), RUN, has_begun=True
    )
    assert str(error) == (
        "run 0000000000000005: a later start of it has taken the place of this controller: there:17, started "
        "2026-11-29 14:40:05 UTC, training, round 3. This one was paused or cut off meanwhile, and commits nothing "
        "more. Training goes on there: do not start this one again. If you want this one instead, stop the other one "
        "first; a start with this state directory then goes on from the last round that is committed in it"
    )


def test_an_earlier_start_of_its_own_run_is_no_reason_to_give_way() -> None:
    """It was paused or cut off, and ends when it hears of the later one."""
    duplicates = DuplicateControllers("mnist", Identity(CONTROLLER, 9))
    for has_begun in (False, True):
        assert [duplicates.observe_running(said(7, STATUS), RUN, has_begun=has_begun) for _ in range(3)] == [None] * 3


def test_of_two_runs_that_have_begun_the_one_that_began_later_goes_on() -> None:
    """The earlier controller was silent for so long that the later one has taken the job."""
    earlier, later = (
        DuplicateControllers("mnist", Identity(CONTROLLER, 8)),
        DuplicateControllers("mnist", Identity(CONTROLLER, 9)),
    )
    waits = dataclasses.replace(STATUS, phase="waiting")
    assert [earlier.observe_running(said(9, waits), OTHER_RUN, has_begun=True) for _ in range(3)] == [None] * 3
    assert earlier.observe_running(said(9, STATUS), OTHER_RUN, has_begun=True) is None  # may be the last of one
    error = earlier.observe_running(said(9, STATUS), OTHER_RUN, has_begun=True)
    assert isinstance(error, ControllerReplaced)
    assert "a controller of another run, 0000000000000005, has taken the place" in str(error)
    assert [later.observe_running(said(8, STATUS), OTHER_RUN, has_begun=True) for _ in range(3)] == [None] * 3


async def _claim(*, heartbeat_s: float, speaks_after_s: float, leaves_after_s: float) -> tuple[float, str]:
    """Seconds that a claim takes, and its error, of a job whose controller is slow to speak, or leaves, while clients
    never stop."""
    place: dict[str, Any] = {"job": f"claim-{os.getpid()}", "domain": new_domain()}
    async with (
        asyncio.timeout(40),
        gradbus.connect(**place) as bus,
        gradbus.connect(**place) as crowd,
        gradbus.connect(**place) as holder,
        asyncio.TaskGroup() as group,
    ):

        async def talk() -> None:
            for number in itertools.count():
                await crowd.publish(Identity(3, 1), Leave(f"{number}"))
                await asyncio.sleep(0.001)

        async def hold() -> None:
            await asyncio.sleep(speaks_after_s)
            for _ in range(2):
                await holder.publish(Identity(CONTROLLER, 7), STATUS)

        async def leave() -> None:
            await asyncio.sleep(leaves_after_s)
            await holder.close()

        with bus.subscribe(TrainCmd):
            holder.open_writer(TrainCmd)
            await bus.matched(lambda: bus.matched_writers(TrainCmd) > 0, timeout_s=20)
            tasks = [group.create_task(talk()), group.create_task(hold()), group.create_task(leave())]
            began_s = time.monotonic()
            error = ""
            try:
                await claim_job(bus, Identity(CONTROLLER, 9), heartbeat_s)
            except JobInUse as taken:
                error = str(taken)
            for task in tasks:
                task.cancel()
            return time.monotonic() - began_s, error


def test_a_controller_that_is_slow_to_speak_is_heard_among_clients_that_never_stop() -> None:
    _, error = asyncio.run(_claim(heartbeat_s=4.0, speaks_after_s=0.6, leaves_after_s=60.0))
    assert "there:17" in error


def test_the_claim_of_a_job_does_not_wait_for_a_controller_that_has_gone() -> None:
    seconds, error = asyncio.run(_claim(heartbeat_s=9.0, speaks_after_s=60.0, leaves_after_s=0.5))
    assert (error, seconds < 9.0) == ("", True)  # 31.5 s is as long as it waits for one that is there and silent


class Silence:
    """A bus, and its inbox, on which a controller is heard only when this process, which has stood still, goes on."""

    def __init__(self) -> None:
        self.job, self.access_policy = "mnist", SimpleNamespace(check_controller=lambda: None)
        self.now_s, self.turns = 100.0, 0

    def writes(self, message: type) -> bool:
        return False

    def matched_writers(self, message: type) -> int:
        return int(self.turns > 1)

    @contextlib.contextmanager
    def subscribe(self, *messages: type) -> Iterator[Silence]:
        yield self

    async def get(self) -> Control:
        self.turns += 1
        if self.turns == 1:
            self.now_s += 3.0
            raise TimeoutError
        self.now_s += 0.05
        return said(7, STATUS)


def test_a_process_that_stood_still_while_it_should_listen_listens_after_that(monkeypatch: pytest.MonkeyPatch) -> None:
    silence = Silence()
    monkeypatch.setattr(duplicate_controller, "time", SimpleNamespace(monotonic=lambda: silence.now_s))
    with pytest.raises(JobInUse):
        asyncio.run(claim_job(silence, Identity(CONTROLLER, 9), 0.5))  # type: ignore[arg-type]


def test_a_start_that_follows_a_replaced_one_is_not_kept_out_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start in between has ended before the replaced one, which goes on, has heard of it."""
    silence = Silence()
    monkeypatch.setattr(duplicate_controller, "time", SimpleNamespace(monotonic=lambda: silence.now_s))
    own, rules = Identity(CONTROLLER, 9), {"hangs_after_s": 60.0, "run_id": RUN}
    asyncio.run(claim_job(silence, own, 0.5, **rules, last_start=8))  # type: ignore[arg-type]
    assert silence.now_s < 110.0  # its writer of commands is not that of another controller, which would hang
    for last_start, run_id in ((7, RUN), (0, RUN), (8, OTHER_RUN)):  # it is the last start itself, or of another run
        with pytest.raises(JobInUse, match="there:17"):
            asyncio.run(claim_job(silence, own, 0.5, **rules | {"run_id": run_id}, last_start=last_start))  # type: ignore[arg-type]


@pytest.fixture
def federation() -> Iterator[Federation]:
    with Federation(domain=new_domain(), network={"lease_s": 20.0}) as federation:
        yield federation


@pytest.mark.slow
@pytest.mark.faults
def test_a_second_controller_is_refused_while_the_first_one_trains_or_waits_and_disturbs_nobody(
    federation: Federation, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    # Who wants the job waits for 3.5 heartbeats for one who is there and says nothing: as a busy machine may make it.
    rules: dict[str, Any] = {"rounds": 2, "clients__num": 1, "clients__heartbeat_s": 0.5, "clients__dead_after_s": 20.0}
    first = federation.controller(**rules, checkpoint__dir=str(tmp_path / "one"))
    until(lambda: any(federation.history.glob("controller.jsonl")))  # it has the job, as it begins to note what happens
    waiting = federation.controller(**rules, checkpoint__dir=str(tmp_path / "two"))
    assert waiting.wait() == 3
    client = federation.client(0, hold={"1": str(gate)})
    client.wait_for("training", round=1)
    second = federation.controller(**rules, checkpoint__dir=str(tmp_path / "three"))
    assert second.wait() == 3
    for refused, where in ((waiting, "waiting"), (second, "training, round 1")):
        (error,) = refused.all("error")
        assert error["kind"] == "JobInUse"
        assert f":{first.process.pid}, {where}" in error["text"]
    gate.touch()
    first.wait_for("done")
    assert client.wait() == 0
    assert [event["round"] for event in client.all("training")] == [1, 2]  # and nothing twice


@pytest.mark.slow
@pytest.mark.faults
def test_the_successor_of_a_controller_that_was_killed_is_not_kept_waiting(
    federation: Federation, tmp_path: Path
) -> None:
    rules = {
        "rounds": 2,
        "clients__num": 1,
        "checkpoint__dir": str(tmp_path / "state"),
        "clients__heartbeat_s": 3.0,
        "clients__dead_after_s": 9.0,
    }
    client = federation.client(0)
    first = federation.controller(**rules, fail_at="after_command:2", network={"lease_s": 1.0})
    assert first.wait() == -signal.SIGKILL
    killed_s = time.monotonic()
    second = federation.controller(**rules)
    second.wait_for("started")  # and listens
    listens_s = time.monotonic()
    second.wait_for("done")
    assert time.monotonic() - killed_s < 20.0
    assert client.wait() == 0
    start = read_history(federation.history).controller[1]
    assert start.opening["at_s"] - listens_s < 5.0  # until DDS knows, which is a second; not for 3.5 heartbeats


@pytest.mark.slow
@pytest.mark.faults
def test_a_controller_that_was_stopped_and_replaced_ends_when_it_goes_on_and_its_client_follows_the_newer_one(
    federation: Federation, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    rules: dict[str, Any] = {"rounds": 4, "clients__num": 1, "clients__dead_after_s": 2.0}
    first = federation.controller(**rules, checkpoint__dir=str(tmp_path / "one"))
    client = federation.client(0, hold={"2": str(gate)})
    client.wait_for("training", round=2)
    first.signal(signal.SIGSTOP)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    second = federation.controller(**rules, checkpoint__dir=str(tmp_path / "two"))
    client.wait_for("training", round=2)  # again, for that one
    first.signal(signal.SIGCONT)
    assert first.wait() == 3
    (error,) = first.all("error")
    assert error["kind"] == "ControllerReplaced"
    assert f":{second.process.pid}, started 20" in error["text"]
    gate.touch()
    second.wait_for("done")
    assert client.wait() == 0
    assert [event["round"] for event in client.all("training")] == [1, 2, 2, 3, 4]
    assert not list((tmp_path / "one").glob("round-000002.*"))
    assert list((tmp_path / "two").glob("round-000004.*"))
