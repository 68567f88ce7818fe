"""Batch scripts of deploy/slurm under a real Slurm: what is lost while a job trains, and what becomes of the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, events, job_field, output_of, restarts, wait_for_end, wait_until

HERE = Path(__file__).resolve().parent
BIN = Path(os.environ.get("BIN", ".venv/bin")).resolve()
RELAY = {"GRADBUS_BUS__CONNECT": '["tcp/login:7447"]', "GRADBUS_BUS__TLS": "false"}
TASK = {"task": "paced_task:Task", "threads": 1}

EVERY_20 = ("--set", "parallel.checkpoint.every_steps=20")

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes, with the configurations and the key of all jobs."""
    folder = tmp_path_factory.mktemp("slurm")
    files = {
        "ddp": {"task": TASK, "parallel": {"epochs": 8, "checkpoint": {"every_steps": 10}}},
        "elastic": {"task": TASK, "parallel": {"epochs": 20, "elastic": {"min_world": 1, "last_call_s": 60}}},
        "few": {"task": TASK, "parallel": {"epochs": 20, "elastic": {"min_world": 1, "wait_s": 60}}},
        "controller": {"task": TASK, "federated": {"rounds": 80}},
        "client": {"task": TASK},
    }
    for name, settings in files.items():
        (folder / f"{name}.json").write_text(json.dumps(settings))
    (folder / "paced_task.py").write_text((HERE / "paced_task.py").read_text())
    os.environ["PATH"] = f"{BIN}:{os.environ['PATH']}"
    os.environ["GRADBUS_KEY_FILE"] = str(folder / "job.key")
    output_of("gradbus", "keys", "new", folder / "job.key")
    began_s = time.monotonic()
    with Cluster(folder) as made:
        report("slurmctld and the nodes are up", began_s)
        yield made


@pytest.fixture(autouse=True)
def _no_jobs_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.cancel_all()


@pytest.fixture
def relay(cluster: Cluster) -> Iterator[None]:
    """A relay on a machine that no job uses."""
    log = cluster.folder / "relay.log"
    with log.open("w") as out:
        command = ["gradbus", "relay", "--listen", "tcp/0.0.0.0:7447", "--set", "relay.tls=false"]
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        wait_until("the relay listens", lambda: '"relay listens"' in log.read_text())
        yield
    finally:
        process.kill()
        process.wait()


def report(what: str, began_s: float) -> None:
    """Print how long it took."""
    sys.stdout.write(f"slurm: {what}: {time.monotonic() - began_s:.1f} s\n")
    sys.stdout.flush()


def pace(cluster: Cluster, *, hurries: bool) -> None:
    """Have all jobs train quickly, or slowly."""
    file = cluster.folder / "hurry"
    file.touch() if hurries else file.unlink(missing_ok=True)


def newest(folder: Path) -> int:
    """Return the number of the newest checkpoint in a folder; 0: there is none."""
    return max((int(file.stem.removeprefix("round-")) for file in folder.glob("round-*.json")), default=0)


def others(job: str) -> list[str]:
    """Return the nodes of a job without that where its script runs."""
    nodes = output_of("scontrol", "show", "hostnames", job_field(job, "NodeList")).split()
    return [node for node in nodes if node != job_field(job, "BatchHost")]


def newest_generation(run: Path) -> dict[str, Any]:
    """Return the event with which a rank has begun the newest generation of an elastic run."""
    started = [event for rank in range(3) for event in events(run, f"rank-{rank}", "started")]
    return max(started, key=itemgetter("time"), default={"world": 0, "step": 0})


def strike(job: str, what: str, fault: Callable[[], object], checkpoints: Path, more: int) -> None:
    """Do harm to a job once it has ``more`` checkpoints than at its start, and wait until it has begun again."""
    known, before = newest(checkpoints), restarts(job)
    wait_until(f"{what}: there is a checkpoint to resume from", lambda: newest(checkpoints) >= known + more)
    began_s = time.monotonic()
    fault()
    wait_until(f"{what}: the job is requeued", lambda: restarts(job) == before + 1)
    report(f"{what}, requeued after", began_s)


def finish(cluster: Cluster, job: str, checkpoints: Path) -> None:
    """Let a job come to its end, once it trains again."""
    known = newest(checkpoints)
    wait_until("training continues", lambda: newest(checkpoints) > known)
    pace(cluster, hurries=True)
    wait_for_end(job)


def assert_equal_bits(one: Path, other: Path) -> None:
    """Assert that the newest checkpoints in two folders have the same weights."""
    assert newest(one) == newest(other) > 0
    name = f"round-{newest(one):06d}.safetensors"
    assert (one / name).read_bytes() == (other / name).read_bytes()


def test_data_parallel_job_has_the_bits_of_plain_srun_after_a_killed_rank_a_preemption_and_a_lost_node(
    cluster: Cluster, relay: None
) -> None:
    calm, run = cluster.folder / "calm", cluster.folder / "lossy"
    pace(cluster, hurries=True)
    began_s = time.monotonic()
    options = ("--nodes=2", "--ntasks=2", f"--chdir={cluster.folder}")
    output_of("srun", *options, "gradbus", "worker", "ddp.json", "--run-dir", calm, **RELAY)
    report("srun gradbus worker, two ranks, with the address of a relay only", began_s)

    pace(cluster, hurries=False)
    began_s = time.monotonic()
    job = cluster.submit("ddp.sbatch", "ddp.json", GRADBUS_RUN_DIR=str(run))
    checkpoints, lost = run / "state" / "rank-1", ""

    def kill_rank() -> None:
        (rank,) = cluster.processes(others(job)[0], "gradbus worker")
        os.kill(rank, signal.SIGKILL)

    def lose_node() -> None:
        nonlocal lost
        lost = others(job)[0]
        cluster.switch_off(lost)

    strike(job, "a rank is killed", kill_rank, checkpoints, 20)
    strike(job, "the job is preempted", lambda: cluster.preempt(job_field(job, "BatchHost")), checkpoints, 20)
    strike(job, "a node is lost", lose_node, checkpoints, 20)
    finish(cluster, job, checkpoints)
    report("ddp.sbatch, with three faults", began_s)
    cluster.switch_on(lost)

    for rank in ("rank-0", "rank-1"):
        assert_equal_bits(calm / "state" / rank, run / "state" / rank)
    steps = [event["step"] for event in events(run, "rank-1", "started")]
    assert len(steps) == 4, steps
    assert steps == sorted(set(steps)), steps  # each start has resumed, none began again


def test_elastic_jobs_go_on_without_a_lost_node_and_its_rank_joins_again(cluster: Cluster, relay: None) -> None:
    run = cluster.folder / "elastic"
    pace(cluster, hurries=False)
    began_s = time.monotonic()
    array = cluster.submit("elastic.sbatch", "elastic.json", GRADBUS_RUN_DIR=str(run), **RELAY)

    def world() -> int:
        return int(newest_generation(run)["world"])

    def lose(rank: int, what: str, fault: Callable[[str], object], restore: Callable[[str], object]) -> None:
        job = f"{array}_{rank}"
        wait_until("all three ranks train", lambda: world() == 3)
        node, before_s = job_field(job, "BatchHost"), time.monotonic()
        fault(node)
        wait_until(f"{what}: the others go on", lambda: world() == 2)
        report(f"{what}, two ranks go on after", before_s)
        wait_until(f"{what}: its job is requeued", lambda: restarts(job) == 1)
        restore(node)
        wait_until(f"{what}: it is a member again", lambda: world() == 3)
        report(f"{what}, three ranks again after", before_s)

    lose(0, "the node of rank 0 is lost", cluster.switch_off, cluster.switch_on)
    lose(1, "rank 1 is preempted", cluster.preempt, lambda node: None)
    pace(cluster, hurries=True)
    for rank in range(3):
        wait_for_end(f"{array}_{rank}")
    report("elastic.sbatch", began_s)
    assert json.loads((run / "summary.json").read_text())["outcome"] == "done"
    output_of("gradbus", "check", run)
    assert [restarts(f"{array}_{rank}") for rank in range(3)] == [1, 1, 0]


def test_elastic_jobs_that_lose_most_of_their_ranks_resume_from_the_checkpoint(cluster: Cluster, relay: None) -> None:
    run = cluster.folder / "few"
    pace(cluster, hurries=False)
    array = cluster.submit("elastic.sbatch", "few.json", *EVERY_20, GRADBUS_RUN_DIR=str(run), **RELAY)
    jobs = [f"{array}_{rank}" for rank in range(3)]
    wait_until("there is a checkpoint", lambda: newest(run / "state" / "rank-0") >= 20)
    began_s = time.monotonic()
    lost = [job_field(job, "BatchHost") for job in jobs[:2]]
    for node in lost:
        cluster.switch_off(node)
    wait_until("their jobs are requeued", lambda: [restarts(job) for job in jobs[:2]] == [1, 1])
    for node in lost:
        cluster.switch_on(node)
    wait_until("all train again", lambda: newest_generation(run)["step"] >= 20, 900)
    report("the nodes of two of three ranks are lost, three ranks again after", began_s)
    pace(cluster, hurries=True)
    for job in jobs:
        wait_for_end(job)
    assert restarts(jobs[2]) >= 1  # it alone was too few, and gave up


def test_federated_job_has_the_bits_of_a_calm_one_after_the_nodes_of_a_client_and_of_the_controller_are_lost(
    cluster: Cluster,
) -> None:
    calm, run = cluster.folder / "calm-federated", cluster.folder / "lossy-federated"
    pace(cluster, hurries=True)
    began_s = time.monotonic()
    wait_for_end(cluster.submit("federated.sbatch", "controller.json", "client.json", GRADBUS_RUN_DIR=str(calm)))
    report("federated.sbatch, calm", began_s)

    pace(cluster, hurries=False)
    began_s = time.monotonic()
    job = cluster.submit("federated.sbatch", "controller.json", "client.json", GRADBUS_RUN_DIR=str(run))
    checkpoints = run / "state"
    for what, lost in (("a client", lambda: others(job)[-1]), ("the controller", lambda: job_field(job, "BatchHost"))):
        node = ""

        def lose_node(lost: Callable[[], str] = lost) -> None:
            nonlocal node
            node = lost()
            cluster.switch_off(node)

        strike(job, f"the node of {what} is lost", lose_node, checkpoints, 5)
        cluster.switch_on(node)
    finish(cluster, job, checkpoints)
    report("federated.sbatch, with two faults", began_s)
    assert_equal_bits(calm / "state", checkpoints)
