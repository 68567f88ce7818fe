"""The command line in earnest: real processes, real DDS on the loopback interface."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import shlex
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from forked_commands import Forked
from patience import PATIENT_S, soonest
from report_runs import federated_run
from safetensors.torch import load_file

from gradbus.actors import Client, Controller
from gradbus.commands.configured_task import ConfiguredTask
from gradbus.commands.doctor import local_bus, remote_bus
from gradbus.commands.doctor import security as doctor_security
from gradbus.commands.exit_codes import exit_code_of
from gradbus.commands.files import ClientFile, ControllerFile, load
from gradbus.commands.run.federated import run_client
from gradbus.commands.rundir.export import export
from gradbus.models import NoopTask, TrainResult
from gradbus.runtime.bus.bus import connect
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import JoinRefused

T = TypeVar("T")

pytestmark = pytest.mark.slow

FEW = 'task.data_options={"train": 1000, "test": 100}'
DEMO = ("demo", "--data", "glyphs", "--samples", 200, "--no-live", "--set", FEW)


def read_until(process: Forked, wanted: str) -> None:
    for line in process.stdout:
        if wanted in line:
            return
    pytest.fail(f"no {wanted!r} before the end; stderr: {process.communicate()[1]}")


def without_waiting(err: str) -> str:
    """What is there but for lines that come every ten seconds of a wait, which a slow machine makes of any start."""
    return "".join(
        line
        for line in err.splitlines(keepends=True)
        if not any(word in line for word in ("still waiting", "final-ready="))
    )


def last_line(text: str) -> str:
    assert "Traceback" not in text, text
    return text.strip().splitlines()[-1]


def test_a_demo_trains_and_leaves_a_complete_run_directory(fork, invoke, domain, tmp_path: Path) -> None:
    process = fork(*DEMO, "--rounds", 2, "--run-dir", "run", "--domain", domain, "--codec", "sq8")
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert without_waiting(err) == ""
    assert [line.split(":")[0] for line in out.splitlines()][2:] == ["round 1/2", "round 2/2", "done"], out
    run = tmp_path / "run"
    reports = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [(report["round_id"], report["clients"]) for report in reports] == [(1, [0, 1]), (2, [0, 1])]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["outcome"] == "done"
    assert summary["bytes_up"] == sum(report["bytes_up"] for report in reports) > 0
    assert (run / "accuracy.png").stat().st_size > 1000
    assert load(ControllerFile, run / "config.json").federated.codec.name == "sq8"
    checked = invoke("check", "run")
    assert checked.code == 0, checked.out
    assert [line.split()[0] for line in checked.out.splitlines()] == [f"I{number}" for number in range(1, 9)]
    assert "I7  what counts is what was sent             holds                     4 compared" in checked.out
    for number in (0, 1):
        told = [json.loads(line) for line in (run / f"client-{number}.log").read_text().splitlines()]
        assert told[-1]["event"] == "client done"
        assert [event["round"] for event in told if event["event"] == "round done"] == [1, 2]
        assert all(event["samples"] > 0 < event["bytes"] for event in told if event["event"] == "round done")
    assert sorted(path.name for path in (run / "state").glob("round-*.json")) == [
        f"round-00000{i}.json" for i in range(3)
    ]
    task = ConfiguredTask(load(ControllerFile, run / "config.json").task)
    model = task.build_model()
    model.load_state_dict(load_file(export(run).path), strict=True)
    again = task.evaluate(model)
    assert again is not None
    assert again.accuracy == summary["accuracy"]


def test_ctrl_c_ends_a_demo_and_all_its_processes_in_order(fork, domain, tmp_path: Path) -> None:
    runs = (f"run-{number}" for number in itertools.count())

    def takes_s() -> float:
        run = next(runs)
        process = fork(*DEMO, "--rounds", 5000, "--run-dir", run, "--domain", domain)
        read_until(process, "round 1/5000")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(signal.SIGINT)
        sent_s = time.monotonic()
        _, err = process.communicate(timeout=20)
        taken_s = time.monotonic() - sent_s
        assert process.returncode == 130
        assert without_waiting(err) == f"gradbus demo: stopped by Ctrl-C. What was done until then is in {run}\n"
        assert psutil.wait_procs(children, timeout=10)[1] == []
        assert json.loads((tmp_path / run / "summary.json").read_text())["outcome"] == "stopped"
        return taken_s

    assert soonest(takes_s, 4.0) < 4


def test_a_demo_goes_on_when_a_client_is_killed(fork, domain, monkeypatch) -> None:
    monkeypatch.setenv("GRADBUS_FAIL_AT", "client-1/before_training:2")
    monkeypatch.setenv("GRADBUS_BUS__LEASE_S", "5")  # as long as its death may take to be known
    process = fork(*DEMO, "--rounds", 3, "--run-dir", "run", "--domain", domain)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    ends = {line.partition(":")[0]: line for line in out.splitlines() if line.startswith("round ")}
    assert "clients 2/2" in ends["round 1/3"]
    assert "clients 1/1" in ends["round 3/3"]
    assert "client ended early client=1 end=signal 9" in err


class SlowTask(NoopTask):
    """Rounds that take a tenth of a second, so that there is something to come late for."""

    def train(self, *arguments: object, **more: object) -> TrainResult:
        time.sleep(0.1)
        return super().train(*arguments, **more)  # type: ignore[arg-type]


def null_client(domain: int, dim: int) -> dict[str, object]:
    return {
        "bus": {"job": "refusals", "domain": domain},
        "task": {"task": "gradbus.models:NoopTask", "task_options": {"dim": dim}},
    }


def test_clients_that_do_not_fit_are_refused_and_the_run_goes_on(fork, domain, tmp_path: Path) -> None:
    (tmp_path / "client.json").write_text(json.dumps(null_client(domain, dim=10)))
    other_model = ClientFile.model_validate(null_client(domain, dim=11))

    async def run() -> Forked:
        same_id, rounds_after = None, 0
        async with connect("refusals", domain=domain) as bus, connect("refusals", domain=domain) as other:
            client = asyncio.create_task(Client(other, SlowTask(10), client_id=0).run())
            misfit = asyncio.create_task(run_client(other_model, 1))
            config = FederatedConfig(rounds=1000, clients={"num": 1, "dead_after_s": PATIENT_S})
            try:
                async with contextlib.aclosing(Controller(bus, SlowTask(10), config).rounds()) as rounds:
                    async for _ in rounds:
                        same_id = same_id or fork("client", "client.json", "--id", 0)  # the other one has it by now
                        rounds_after += same_id.poll() is not None and misfit.done()
                        if rounds_after == 2:
                            break
            finally:
                client.cancel()
                misfit.cancel()
                await asyncio.wait([client, misfit])
        error = misfit.exception()
        assert isinstance(error, JoinRefused)
        assert exit_code_of(error) == 7
        assert "its model is not the same as the controller's (11 values, here 10)" in str(error)
        assert rounds_after == 2
        assert same_id is not None
        return same_id

    same_id = asyncio.run(bounded(run()))
    assert same_id.returncode == 7
    assert "client id 0 is in use by" in last_line(same_id.communicate()[1])


async def bounded(work: Coroutine[Any, Any, T]) -> T:
    """Its result, or TimeoutError before the test's own limit ends everything."""
    async with asyncio.timeout(90):
        return await work


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(fork, invoke, domain, tmp_path: Path) -> None:
    state = tmp_path / "state"
    config = tmp_path / "controller.json"
    file = {
        "bus": {"job": "damage", "domain": domain},
        "task": {"task": "gradbus.models:NoopTask", "task_options": {"dim": 10}},
        "federated": {"rounds": 3, "clients": {"num": 1, "dead_after_s": PATIENT_S}, "checkpoint": {"dir": str(state)}},
        "run_dir": "run",
    }
    config.write_text(json.dumps(file))

    async def train() -> None:
        async with connect("damage", domain=domain) as bus, connect("damage", domain=domain) as other:
            client = asyncio.create_task(Client(other, NoopTask(10), client_id=0).run())
            await Controller(bus, NoopTask(10), load(ControllerFile, config).federated).run()
            await client

    async def help_out(process: Forked) -> tuple[str, str]:
        async with connect("damage", domain=domain) as bus:
            client = asyncio.create_task(Client(bus, NoopTask(10), client_id=0).run())
            try:
                return await asyncio.to_thread(process.communicate, timeout=90)
            finally:
                client.cancel()
                await asyncio.wait([client])

    asyncio.run(bounded(train()))
    (state / "round-000003.safetensors").write_bytes(b"not any more")
    process = fork("controller", config)
    out, err = asyncio.run(bounded(help_out(process)))
    assert process.returncode == 0, err
    assert "round-000003.json" in err
    assert re.search(r'"round": 2.*"event": "using an older checkpoint"', err)
    assert "done: 3 rounds" in out
    reports = [json.loads(line)["round_id"] for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert reports == [1, 2, 3]

    for path in state.glob("*.json"):
        path.write_text("{}")
    ended = invoke("controller", config, "--log-level", "error")
    assert ended.code == 6
    assert "checkpoints in" in last_line(ended.err)
    assert "are damaged" in last_line(ended.err)
    assert len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == 3


def test_a_controller_that_is_terminated_says_how_to_go_on(fork, domain, tmp_path: Path, configs: Path) -> None:
    null = ("--set", "task.task=gradbus.models:NoopTask", "--set", 'task.task_options={"dim": 10}')
    config = configs / "controller.conf.json"
    runs = (f"run-{number}" for number in itertools.count())

    def takes_s() -> float:
        run = next(runs)
        process = fork("controller", config, *null, "--set", f"bus.domain={domain}", "--run-dir", run)
        while not (tmp_path / run / "state" / ".lock").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        sent_s = time.monotonic()
        _, err = process.communicate(timeout=20)
        taken_s = time.monotonic() - sent_s
        assert process.returncode == 143
        own = (*null, "--set", f"bus.domain={domain}")
        how = shlex.join(["gradbus", "controller", str(config), "--run-dir", run, *own])
        *started, end = without_waiting(err).splitlines()
        assert end == f"gradbus controller: stopped by SIGTERM. To continue: {how}"
        assert [json.loads(line)["event"] for line in started] == ["run starts", "timeouts"]
        return taken_s

    assert soonest(takes_s, 3.0) < 3


def test_the_doctor_finds_this_machine_well_and_measures_it(invoke, domain, monkeypatch, tmp_path) -> None:
    # A second process that stands still for seconds is no fault of this machine.
    monkeypatch.setattr(doctor_security, "TRIP_S", PATIENT_S)
    monkeypatch.setattr(local_bus, "DEADLINE_S", PATIENT_S)
    monkeypatch.setattr(remote_bus, "STEP_S", PATIENT_S)
    monkeypatch.setenv("COLUMNS", "300")  # no line of the table is wrapped
    assert invoke("keys", "new", "job.key").code == 0
    (tmp_path / "job.json").write_text(
        json.dumps({"bus": {"job": "cells", "domain": domain, "key_file": "job.key", "lease_s": PATIENT_S}})
    )
    doctor = invoke("doctor", "--config", "job.json")
    out, err = doctor.out, doctor.err
    assert doctor.code == 0, out + err
    assert f"(domain {domain})" in " ".join(out.split())
    assert re.search(r"security +psk, key [0-9a-f]{16}: works, \d+ ms; from .*job\.key", out), out
    assert (tmp_path / "job.key").read_text().split()[1] not in out + err
    for pattern in (r"discovery +(\d+) ms", r"round trip, 64 B +(\d+) us", r"throughput, 1 MiB frames +(\d+) MB/s"):
        match = re.search(pattern, out)
        assert match, out
        assert int(match[1]) > 0


def test_a_finished_run_that_is_started_again_stays_as_it_is_and_tells_clients_that_still_wait(
    fork, domain, tmp_path: Path
) -> None:
    config = tmp_path / "controller.json"
    file = {
        "bus": {"job": "finished", "domain": domain},
        "task": {"task": "gradbus.models:NoopTask", "task_options": {"dim": 10}},
        "federated": {"rounds": 2, "clients": {"num": 2, "min": 1, "start_grace_s": 0.5}},
        "run_dir": "run",
    }
    config.write_text(json.dumps(file))

    async def beside(*arguments: str) -> tuple[int, str]:
        process = fork("controller", config, *arguments)
        async with connect("finished", domain=domain) as bus:
            client = asyncio.create_task(Client(bus, NoopTask(10), client_id=0).run())
            out, err = await asyncio.to_thread(process.communicate, timeout=90)
            assert process.returncode == 0, err
            client.cancel()
            await asyncio.wait([client])
        return process.returncode, out

    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()}

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]

    _, out = asyncio.run(bounded(beside()))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    why = "it was expected and never took part in a round"
    assert summary["never_counted"] == [{"client": 1, "reason": why}]
    assert f"never counted: client 1, {why}" in out
    before, first = files(), rows()
    _, out = asyncio.run(bounded(beside()))
    assert "finished: all 2 rounds of this run are done" in out
    assert "--set federated.rounds=4" in out
    assert files() == before

    asyncio.run(bounded(beside("--set", "federated.rounds=3")))
    after = rows()
    assert after[:2] == first  # its bytes and seconds, too, which the checkpoint does not have
    totals = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (totals["rounds"], totals["bytes_down"]) == (3, sum(row["bytes_down"] for row in after))


def test_a_start_that_is_refused_leaves_the_run_that_is_there_as_it_was(invoke, domain, tmp_path: Path) -> None:
    run = federated_run(tmp_path / "run", domain=domain, rounds=2, clients=1)

    def left() -> dict[str, bytes]:
        return {name: (run / name).read_bytes() for name in ("config.json", "rounds.jsonl", "summary.json")}

    before = left()
    more = ("--set", "federated.rounds=4", "--set", "federated.downlink_codec=q8")
    refused = invoke("controller", run / "config.json", *more)
    assert refused.code == 6, refused.err
    assert "downlink_codec=fp32" in refused.err
    assert left() == before
