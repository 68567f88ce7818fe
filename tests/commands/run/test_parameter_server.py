"""Parameter servers from the command line: real processes over DDS, one of which is killed."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_scene import serve
from shard_commands import read_until_epoch, write_task

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(200)]

OPTIMIZER = {"name": "adamw", "lr": 0.01}


@pytest.fixture
def config(tmp_path: Path, domain: int) -> Path:
    path = tmp_path / "served.json"
    settings: dict[str, Any] = {
        "bus": {"domain": domain},
        "task": write_task(tmp_path, "served", slow_s=0.02),
        "parallel": {"epochs": 500, "optimizer": OPTIMIZER, "timeouts": {"join_s": 100}},
        "parameter_server": {"servers": 2},
    }
    path.write_text(json.dumps(settings))
    return path


def everybody(fork: Any, config: Path, monkeypatch: pytest.MonkeyPatch, *more: Any) -> tuple[list[Any], list[Any]]:
    """Two workers and two servers, each named in another way."""
    cluster = {"worker": ["a:1", "b:1"], "ps": ["c:1", "d:1"]}
    run = (config, "--run-dir", "run", *more)
    workers = [fork("worker", *run, "--rank", 0, "--world", 2)]
    servers = [fork("parameter-server", *run, "--index", 0, "--world", 2)]
    servers.append(fork("worker", *run, "--job-name", "ps", "--task-index", 1, "--world", 2))
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}))
    workers.append(fork("worker", *run))
    monkeypatch.delenv("TF_CONFIG")
    return workers, servers


@pytest.mark.usefixtures("in_one_theme")
def test_a_dead_server_is_named_by_every_worker_and_the_run_goes_on_to_the_same_bits(
    fork: Any, invoke: Any, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, servers = everybody(fork, config, monkeypatch)
    read_until_epoch(workers[0], 2)
    killed_s = time.monotonic()
    servers[1].send_signal(signal.SIGKILL)
    for worker in workers:
        _, err = worker.communicate(timeout=60)
        assert worker.returncode == 9
        assert "server 1: its process on" in err
    took_s = time.monotonic() - killed_s
    assert took_s < float(os.environ.get("GRADBUS_BUS__LEASE_S", "20")), "within the lease"
    _, err = servers[0].communicate(timeout=60)
    assert servers[0].returncode == 9
    assert "server 1" in err, "the workers have said why they left"

    done = json.loads((tmp_path / "run" / "epochs.jsonl").read_text().splitlines()[-1])["epoch"] + 1
    workers, servers = everybody(fork, config, monkeypatch, "--set", f"parallel.epochs={done + 2}")
    outputs = [process.communicate(timeout=90) for process in (*workers, *servers)]
    assert [process.returncode for process in (*workers, *servers)] == [0, 0, 0, 0], outputs
    assert f"epoch {done + 1}/{done + 2}" in outputs[0][0], "from the checkpoint"
    assert "done: parameter server 1 of 2" in outputs[3][0]

    workers, servers = everybody(fork, config, monkeypatch, "--set", f"parallel.epochs={done + 2}")
    outputs = [process.communicate(timeout=90) for process in (*workers, *servers)]
    assert [process.returncode for process in (*workers, *servers)] == [0, 0, 0, 0], outputs
    assert all("finished: all of this run is done" in outputs[number][0] for number in (0, 2, 3))

    monkeypatch.syspath_prepend(str(tmp_path))
    task = importlib.import_module("served").Task()
    sys.modules.pop("served")
    whole = serve(task, servers=2, parallel={"epochs": done + 2, "optimizer": OPTIMIZER}).succeeded()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["params_hash"] == whole.workers[0].summary.params_hash  # type: ignore[union-attr]
    assert (summary["steps"], summary["algorithm"]) == (6 * (done + 2), "synchronous parameter server")

    exported = invoke("export", "run")
    assert exported.code == 0, exported.err
    assert "4 tensors, after step" in exported.out
    report = invoke("report", "run")
    assert report.code == 0, report.err
    assert "synchronous parameter server" in (tmp_path / "run" / "report.html").read_text()


def test_a_launch_starts_servers_too_and_goes_on_without_an_asynchronous_worker(
    fork: Any, config: Path, tmp_path: Path
) -> None:
    settings = ("parameter_server.servers=1", "parameter_server.mode=asynchronous", "parallel.epochs=30")
    options = [word for setting in settings for word in ("--set", setting)]
    launch = fork("run", "-n", 2, "--", config, "--run-dir", "run", *options)
    killed = False
    lines = []
    for line in launch.stdout:
        lines.append(line)
        if "epoch 2/" in line and not killed:
            killed = True
            os.kill(_rank_process(launch.pid, 1), signal.SIGKILL)
    _, err = launch.communicate(timeout=60)
    assert launch.returncode == 0, (lines, err)
    assert any("[server 0] done:" in line and "without workers 1" in line for line in lines), lines
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["epochs"]) == ("done", 30)
    last = json.loads((tmp_path / "run" / "epochs.jsonl").read_text().splitlines()[-1])
    assert last["train_metrics"]["staleness_max"] >= 0


def _rank_process(launcher: int, rank: int) -> int:
    """The launcher starts them in the order of their ranks. The environment of one that is forked is not its own."""
    children = psutil.Process(launcher).children()
    return sorted(children, key=lambda child: (child.create_time(), child.pid))[rank].pid


def test_what_does_not_fit_is_said_before_anything_is_loaded(invoke: Any, config: Path) -> None:
    for arguments, text in (
        (("parameter-server", config, "--index", 2, "--world", 2), "must be 0 to 1, for there are 2; got 2"),
        (("parameter-server", config, "--world", 2), "no index is given"),
        (("parameter-server", config, "--index", 0), "no world is given"),
        (("worker", config, "--job-name", "ps", "--world", 2), "belong together"),
        (("worker", config, "--job-name", "evaluator", "--task-index", 0), "there is no evaluator"),
        (("run", "-n", 2, config, "--job-name", "ps"), "--job-name is not for 'gradbus run'"),
        (("worker", config, "--rank", 0, "--set", "parameter_server.staleness=-1"), "parameter_server.staleness"),
    ):
        ended = invoke(*arguments)
        assert (ended.code, text in ended.err) == (2, True), ended.err


def test_a_server_that_does_not_come_is_named_with_the_command_that_starts_it(invoke: Any, config: Path) -> None:
    short = ("--set", "parallel.timeouts.join_s=1.5", "--run-dir", "run")
    ended = invoke("worker", config, "--rank", 0, "--world", 1, *short)
    assert ended.code == 4
    assert "no parameter server 0, parameter server 1: 1 of 3 ready after 1.5 s" in ended.err
    assert "gradbus parameter-server CONFIG --index I" in ended.err
