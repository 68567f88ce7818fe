"""Data-parallel training from the command line in earnest: real processes, real DDS on the loopback interface."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from forked_commands import Forked, torchrun
from identities import Identities

from gradbus.commands.files import WorkerFile, load
from gradbus.commands.run.cores import read_topology
from gradbus.runtime.config.bus import default_job
from gradbus.runtime.cores import usable_cpus
from gradbus.runtime.profiling.summary import read_summary

pytestmark = pytest.mark.slow

# A task of one's own: two numbers to be learnt, and an evaluation that counts to ten. Rank FAILS fails in step 3, rank
# ABSENT before it is there, and the first start of rank KILLED is killed then.
TASK = """
import os, pathlib, signal, torch
from torch import nn

class Task:
    def __init__(self, fails=-1, batches=5, absent=-1, killed=-1):
        started = pathlib.Path("killed")
        if os.environ.get("RANK") == str(killed) and not started.exists():
            started.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("RANK") == str(absent):
            raise RuntimeError("this machine has no data")
        self.fails, self.count = fails, batches

    def build_model(self):
        return nn.Linear(1, 1)

    def prepare_shard(self, rank, world):
        self.rank = rank

    def num_batches(self, *, rank, world, epoch):
        return self.count + rank

    def batches(self, *, rank, world, epoch, seed):
        for number in range(self.count + rank):
            yield number, torch.randn(8, 1, generator=torch.Generator().manual_seed(1000 * epoch + 10 * number + rank))

    def loss(self, model, batch):
        number, x = batch
        if self.rank == self.fails and number == 3:
            raise ZeroDivisionError("this loss divides by nothing")
        return (model(x) - 2 * x - 1).square().mean()

    def evaluate_shard(self, model, *, rank, world):
        class Counts:
            correct, total, loss_sum = 4 + rank, 5, 1.0
        return Counts()
"""


@pytest.fixture
def config(tmp_path: Path, domain: int) -> Path:
    """A configuration that trains the task above."""
    (tmp_path / "mine.py").write_text(TASK)
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps(
            {
                "bus": {"domain": domain},
                "task": {"task": "mine:Task"},
                "parallel": {"epochs": 2, "timeouts": {"join_s": 100}},
            }
        )
    )
    return path


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Identities:
    """Every process has the key of one machine, but for who is given another one."""
    known = Identities(tmp_path, clients=0)
    monkeypatch.setenv("GRADBUS_BUS__SECURITY", "identity")
    for name in ("key_file", "controller_key"):
        monkeypatch.setenv(f"GRADBUS_BUS__{name.upper()}", known.security("server")[name])
    return known


def read_until(process: subprocess.Popen[str] | Forked, wanted: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if wanted in line:
            return line
    pytest.fail(f"no {wanted!r} before the end; stderr: {process.communicate()[1]}")


def reports_of(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "epochs.jsonl").read_text().splitlines()]


@pytest.mark.timeout(200)  # two launches, each of which loads torch twice
def test_a_launch_trains_leaves_a_complete_run_directory_and_can_be_continued_also_where_it_is_sealed_by_now(
    start, fork, config, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    process = start("run", "-n", 2, "--", config, "--run-dir", "run")
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, out + err
    slow = "still waiting"  # a line for each ten seconds of it
    assert [line for line in err.splitlines() if slow not in line] == []
    lines = [line.removeprefix("[rank 0] ") for line in out.splitlines()]
    assert lines[0].startswith("waiting for 1 more of 2 ranks: job default-")
    assert lines[1].startswith("2 ranks on this machine, here with ")
    assert [line.split(":")[0] for line in lines if line.startswith("epoch ")] == ["epoch 1/2", "epoch 2/2"]
    assert lines[-1].startswith("done: 2 epochs, 12 steps, accuracy 90.00 %, sent ")
    of_the_other = [line.removeprefix("[rank 1] ") for line in lines if line.startswith("[rank 1] ")]
    assert [line.split(",")[0].split(":")[0] for line in of_the_other] == ["epoch 1/2", "epoch 2/2"]
    assert all(text in out for text in ("compute", "wait (network)", "rank 1"))

    run = tmp_path / "run"
    assert [(report["epoch"], report["step"]) for report in reports_of(run)] == [(0, 6), (1, 12)]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"], summary["world"]) == ("done", 12, 2)
    assert [profile["rank"] for profile in summary["profiles"]] == [0, 1]
    for rank in range(2):
        profile = read_summary(run / f"profile-rank-{rank}.jsonl")
        assert profile is not None
        assert (profile.rank, profile.steps) == (rank, 12)
    trace = json.loads((run / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"] if event["ph"] == "X"} == {0, 1}
    assert (run / "accuracy.png").stat().st_size > 1000
    assert load(WorkerFile, run / "config.json").world == 2

    request.getfixturevalue("known")
    has_cores = len(read_topology(usable_cpus()).cores) > 1
    binding = ("--bind", "cores") if has_cores else ()
    process = fork("run", "-n", 2, "--", config, "--run-dir", "run", "--set", "parallel.epochs=3", *binding)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, out + err
    assert ("each, on cores of its own; run directory" in out) == has_cores
    assert "done: 3 epochs, 18 steps" in out
    assert [report["epoch"] for report in reports_of(run)] == [0, 1, 2]


def test_a_rank_that_fails_ends_the_launch_with_its_own_traceback(fork, config) -> None:
    process = fork("run", "-n", 2, config, "--set", 'task.task_options={"fails": 1}')
    out, err = process.communicate(timeout=90)
    assert process.returncode == 13, out + err
    *_, report = err.partition("gradbus run: the last lines of rank 1:\n")
    assert report.startswith("  Traceback (most recent call last):\n")
    assert report.endswith(
        "in loss. Mend it there and start again; --traceback shows also the lines of libraries\n"
        "gradbus run: rank 1 failed with exit code 13\n"
    )
    assert len(report.splitlines()) < 10
    assert "  gradbus worker: ZeroDivisionError: this loss divides by nothing, at " in report


def test_an_elastic_launch_ends_with_the_error_of_a_rank_that_fails_before_the_run_has_begun(fork, config) -> None:
    """Process 0 has not seen it, and would wait for it for ``elastic.wait_s``, 600 s."""
    process = fork("run", "--elastic", "1:2", config, "--set", 'task.task_options={"absent": 1}')
    out, err = process.communicate(timeout=90)
    assert process.returncode == 13, out + err
    assert "gradbus run: rank 1 failed with exit code 13; ending the others\n" in err
    assert "RuntimeError: this machine has no data" in err.partition("the last lines of rank 1:\n")[2]


@pytest.mark.parametrize(
    ("rank", "restarts"), [(0, 1), (1, 0)], ids=["process 0, which comes again", "another, which is lost"]
)
def test_an_elastic_launch_begins_although_a_rank_is_killed_before_process_0_has_seen_it(
    fork, config, rank: int, restarts: int
) -> None:
    settings = {"task.task_options": json.dumps({"killed": rank}), "parallel.elastic.last_call_s": 1}
    more = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    process = fork("run", "--elastic", "1:2", "--restarts", str(restarts), config, *more)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, out + err
    assert f"gradbus run: rank {rank} was killed by SIGKILL" in err
    assert ("; starting it again, 0 restarts are left\n" if restarts else "; the others go on\n") in err


def test_ranks_started_one_by_one_find_each_other_and_miss_one_that_is_stopped(
    fork, config, known: Identities, tmp_path: Path, monkeypatch, domain: int
) -> None:
    """Each is a machine with a key of its own."""
    known.allow_rank("host-b", 1)
    monkeypatch.setenv("GRADBUS_BUS__ALLOW_FILE", str(known.list_file))
    monkeypatch.setenv("WORLD", "2")
    endless = ("--set", "parallel.epochs=1000000")
    first = fork("worker", config, "--rank", 0, "--run-dir", "run", "--no-live", *endless)
    read_until(first, f"waiting for 1 more of 2 ranks: job {default_job()}, DDS domain {domain} on lo")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("GRADBUS_BUS__KEY_FILE", known.security("host-b")["key_file"])
    second = fork("worker", config, *endless)
    read_until(first, "epoch 3/1000000")
    second.terminate()
    _, err = second.communicate(timeout=30)
    assert second.returncode == 143
    assert err.endswith("gradbus worker: stopped by SIGTERM\n")
    _, err = first.communicate(timeout=30)
    assert first.returncode == 9
    assert "has lost rank 1" in err.splitlines()[-1]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "failed"
    assert (tmp_path / "run" / "trace-rank-1.json").exists()


def test_a_launch_that_is_stopped_stops_in_order_and_says_how_to_go_on(fork, config, tmp_path: Path) -> None:
    # Who stands still when it is told to end shall not be killed for it.
    process = fork("run", "-n", 2, "--grace", 25, config, "--run-dir", "run", "--set", "parallel.epochs=1000000")
    read_until(process, "epoch 3/1000000")
    ranks = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, out + err
    assert "gradbus worker: stopped by Ctrl-C. To continue: the same command for all ranks, with --run-dir run\n" in err
    assert err.endswith("gradbus run: stopped by Ctrl-C\n")
    assert len(ranks) == 2
    assert not any(rank.is_running() for rank in ranks)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "stopped"


def test_torchrun_can_start_the_ranks_with_one_key_for_all_of_a_machine(
    config, known: Identities, tmp_path: Path
) -> None:
    arguments = [
        "--standalone", "--nproc-per-node", "2", "--no-python", Path(sys.executable).with_name("gradbus"), "worker",
        config, "--run-dir", "run",
    ]  # fmt: skip
    agent = torchrun(list(map(str, arguments)), tmp_path, os.environ)
    out, err = agent.communicate(110)
    assert agent.returncode == 0, err
    assert "waiting for 1 more of 2 ranks: job torchrun-" in out
    assert "done: 2 epochs, 12 steps" in out
