"""Full disks, directories that nobody may write to, clocks that jump, clients that are slow, silent or many."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain
from federation import Federation
from patience import PATIENT_S, soonest

import gradbus
from gradbus.actors import RoundReport
from gradbus.actors.federated.controller.rounds import CLIENT_LOST
from gradbus.commands.files import ClientFile, ControllerFile
from gradbus.commands.run.federated import run_client, run_controller
from gradbus.commands.run.live import Display
from gradbus.commands.rundir.directory import ControllerDirectory
from gradbus.models import NoopTask
from gradbus.runtime.errors import CheckpointError

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.usefixtures("lone_controllers")]

# Nobody dies here without a word, and a machine that stands still for seconds is no death.
CALM: dict[str, Any] = {"lease_s": PATIENT_S}


@pytest.fixture
def federation() -> Iterator[Federation]:
    with Federation(domain=new_domain(), network=CALM) as federation:
        yield federation


def test_a_disk_that_fills_up_ends_the_controller_and_when_there_is_room_it_goes_on(
    federation: Federation, tmp_path: Path
) -> None:
    rules = {
        "rounds": 4,
        "clients__num": 1,
        "clients__dead_after_s": PATIENT_S,
        "checkpoint__dir": str(tmp_path / "state"),
    }
    client = federation.client(0)
    first = federation.controller(**rules, max_file_bytes={"round": 2, "bytes": 100_000})  # a model has 800,000
    assert first.wait() == 3
    (error,) = first.all("error")
    assert error["kind"] == "CheckpointError"
    assert "checkpoint of round 3 cannot be written" in error["text"]
    assert "make room and start again" in error["text"]
    done = federation.controller(**rules).wait_for("done")
    assert client.wait() == 0  # it has waited
    assert [report["clients"] for report in done["reports"]] == [[0]] * 4
    assert len(client.all("training")) == 5  # round 3 was done again, for its first model was never published


def test_a_run_directory_that_cannot_be_written_hides_no_error_and_gets_the_rounds_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = {"job": f"full-{os.getpid()}", "domain": new_domain()}
    task = {"data": "glyphs", "data_options": {"train": 40, "test": 20}, "model": "gradbus.models:mnist_mlp"}
    rules = {"rounds": 5, "clients": {"num": 1, "dead_after_s": PATIENT_S}}
    file = ControllerFile.model_validate({"bus": bus, "task": task, "federated": rules})
    write, fulls = ControllerDirectory.write_reports, [True]

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_at_first(run: ControllerDirectory, lines: Iterable[str], *, anew: bool) -> None:
        if fulls:
            full(fulls.pop())
        write(run, lines, anew=anew)

    class Ends(Display[RoundReport]):
        def done(self, report: RoundReport) -> None:
            if report.round_id == 2:
                raise CheckpointError("make room and start again")

    async def scenario(run: ControllerDirectory) -> None:
        async with asyncio.timeout(60):
            client = asyncio.create_task(run_client(ClientFile.model_validate({"bus": bus, "task": task}), 0))
            try:
                await run_controller(file, run, lambda _: Ends())
            finally:
                client.cancel()
                await asyncio.wait([client])

    monkeypatch.setattr(ControllerDirectory, "write_reports", full_at_first)
    monkeypatch.setattr(ControllerDirectory, "write_summary", full)
    with ControllerDirectory(tmp_path / "run") as run, pytest.raises(CheckpointError, match="make room"):
        asyncio.run(scenario(run))
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round_id"] for line in lines] == [1, 2]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_named_at_the_start(federation: Federation, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    _refused(federation, tmp_path / "state")


def test_a_directory_that_is_no_directory_is_named_at_the_start(federation: Federation, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _refused(federation, tmp_path / "file" / "state")


def _refused(federation: Federation, where: Path) -> None:
    controller = federation.controller(rounds=1, clients__num=1, checkpoint__dir=str(where))
    assert controller.wait() == 3
    (error,) = controller.all("error")
    assert (error["kind"], str(where) in error["text"]) == ("CheckpointError", True)


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0], ids=["ahead", "back"])
def test_a_clock_that_jumps_in_the_middle_of_a_round_changes_nothing(
    jump_s: float, federation: Federation, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    controller = federation.controller(
        rounds=3, clients__num=2, clients__dead_after_s=PATIENT_S, jump={"round": 1, "seconds": jump_s}
    )
    clients = [
        federation.client(0, hold={"2": str(gate)}, jump={"round": 2, "seconds": jump_s}),
        federation.client(1),
    ]
    clients[0].wait_for("training", round=2)
    gate.touch()
    done = controller.wait_for("done")
    assert [client.wait() for client in clients] == [0, 0]
    assert [(report["clients"], report["attempt"]) for report in done["reports"]] == [([0, 1], 1)] * 3


def test_a_client_much_slower_than_the_others_is_waited_for_as_long_as_the_rules_say(
    federation: Federation, tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")  # is never there: in no round is it done before it is called off
    controller = federation.controller(
        rounds=4,
        clients__num=4,
        round__quorum=0.75,
        round__grace_s=0.1,
        clients__dead_after_s=PATIENT_S,
        clients__start_grace_s=PATIENT_S,
    )
    fast = [federation.client(i) for i in range(3)]
    slow = federation.client(3, hold={str(round_id): gate for round_id in range(1, 5)})
    reports = controller.wait_for("done")["reports"]
    assert [client.wait() for client in (*fast, slow)] == [0] * 4
    assert [(report["clients"], report["outcome"]) for report in reports] == [([0, 1, 2], "quorum and grace")] * 4
    assert [report["expected"] for report in reports] == [4] * 4  # it is waited for again in each
    assert slow.all("training")[0]["round"] == 1


def test_a_client_that_lives_and_sends_nothing_costs_a_round_its_deadline_and_not_the_run(
    federation: Federation,
) -> None:
    controller = federation.controller(rounds=2, clients__num=2, round__timeout_s=2.0, clients__dead_after_s=PATIENT_S)
    # It trains, and its heart beats; what it has learnt never gets through.
    clients = [federation.client(0), federation.client(1, faults="drop upload_request")]
    done = controller.wait_for("done")
    assert [report["clients"] for report in done["reports"]] == [[0], [0]]
    assert [report["outcome"] for report in done["reports"]] == ["deadline", "deadline"]
    assert clients[0].wait() == 0
    assert clients[1].wait() == 0


def test_two_hundred_clients_that_all_start_again_at_once_are_back_within_seconds() -> None:
    seconds = asyncio.run(_all_again(200))
    assert seconds < 30.0


class Busy(NoopTask):
    """Training that needs the interpreter all the time."""

    def train(self, model: Any, **arguments: Any) -> Any:
        until_s = time.thread_time() + 0.03
        while time.thread_time() < until_s:
            pass
        return super().train(model, **arguments)


def test_a_hundred_clients_that_train_in_one_process_leave_its_loop_a_turn() -> None:
    # If all trained at once, most of the 3 s that they need would pass without a turn.
    assert soonest(lambda: asyncio.run(_longest_wait_for_a_turn_s(100)), 1.0) < 1.0


async def _longest_wait_for_a_turn_s(count: int) -> float:
    """Of the loop in which so many clients train, all of which count in the first attempt."""
    longest_s = 0.0

    async def take_turns() -> None:
        nonlocal longest_s
        while True:
            left_s = time.monotonic()
            await asyncio.sleep(0.01)
            longest_s = max(longest_s, time.monotonic() - left_s)

    turns = asyncio.create_task(take_turns())
    try:
        (report,) = await _crowd(count)
    finally:
        turns.cancel()
    assert (len(report.clients), report.attempt) == (count, 1)
    assert CLIENT_LOST not in report.dropped
    return longest_s


async def _crowd(count: int) -> list[gradbus.RoundReport]:
    place: dict[str, Any] = {"job": f"busy-{os.getpid()}", "domain": new_domain(), **CALM}
    config = gradbus.FederatedConfig(rounds=1, clients={"num": count, "dead_after_s": PATIENT_S}, eval_every=0)
    async with (
        asyncio.timeout(60),
        gradbus.connect(**place) as bus,
        gradbus.connect(**place) as crowd,
        asyncio.TaskGroup() as group,
    ):
        for client_id in range(count):
            group.create_task(gradbus.Client(crowd, Busy(100), client_id=client_id).run())
        return await gradbus.Controller(bus, NoopTask(100), config).run()


async def _all_again(count: int) -> float:
    """Seconds from the moment at which all clients start again to the end of the first round that has them all."""
    place: dict[str, Any] = {"job": f"crowd-{os.getpid()}", "domain": new_domain()}
    config = gradbus.FederatedConfig(
        rounds=3,
        clients={"num": count, "min": count, "heartbeat_s": 1.0, "dead_after_s": PATIENT_S, "start_timeout_s": 60.0},
        eval_every=0,
        round={"timeout_s": 60.0},
    )
    async with (
        asyncio.timeout(100),
        gradbus.connect(**place) as bus,
        gradbus.connect(**place) as crowd,
        asyncio.TaskGroup() as group,
    ):

        def start(client_id: int) -> asyncio.Task[Any]:
            return group.create_task(gradbus.Client(crowd, NoopTask(100), client_id=client_id).run())

        clients = [start(client_id) for client_id in range(count)]
        controller = gradbus.Controller(bus, NoopTask(100), config)
        began_s = 0.0
        async for report in controller.rounds():
            assert len(report.clients) == count
            if report.round_id == 1:
                for client in clients:
                    client.cancel()
                await asyncio.wait(clients)
                began_s = time.monotonic()
                clients = [start(client_id) for client_id in range(count)]
            if report.round_id == 2:
                seconds = time.monotonic() - began_s
    return seconds
