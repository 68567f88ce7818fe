"""``gradbus worker`` in an elastic run, started again by a supervisor that repeats the same command."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import until
from shard_commands import read_until_epoch, write_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

Start = Callable[..., Any]


def write(folder: Path, domain: int, job: str = "again") -> Path:
    """A configuration of a run with no end, with the task beside it."""
    path = folder / f"{job}.json"
    settings = {
        "bus": {"domain": domain, "job": job},
        "task": write_task(folder, "again", inputs=32, width=32, batches=4, more_each_rank=0, slow_s=0.05),
        "parallel": {"epochs": 100_000, "elastic": {"min_world": 2}, "timeouts": {"join_s": 100}},
    }
    path.write_text(json.dumps(settings))
    return path


def begun(folder: Path) -> list[tuple[int, int]]:
    """Generation and number of ranks of each start that the journal of rank 1 has."""
    lines = (folder / "run" / "history" / "rank-1.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [(one["generation"], one["world"]) for one in found if one.get("event") == "started"]


def test_process_0_with_the_same_command_joins_its_run_that_goes_on(fork: Start, domain: int, tmp_path: Path) -> None:
    config = write(tmp_path, domain)

    def start(rank: int) -> Any:
        return fork("worker", config, "--run-dir", "run", "--rank", rank, "--world", 3)

    ranks = [start(rank) for rank in range(3)]
    read_until_epoch(ranks[0], 2)
    ranks[0].send_signal(signal.SIGKILL)
    ranks[0].communicate(timeout=60)
    until(lambda: begun(tmp_path)[-1][1] == 2)
    ranks[0] = start(0)
    until(lambda: begun(tmp_path)[-1][1] == 3)
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert ranks[0].returncode == 0, outputs[0]
    assert "joins its run, which goes on" in outputs[0][0]


def test_process_0_of_another_job_is_refused_in_the_directory_of_a_run_that_goes_on(
    fork: Start, domain: int, tmp_path: Path
) -> None:
    config = write(tmp_path, domain)
    ranks = [fork("worker", config, "--run-dir", "run", "--rank", rank, "--world", 2) for rank in range(2)]
    read_until_epoch(ranks[0], 2)
    other = fork("worker", write(tmp_path, domain, "other"), "--run-dir", "run", "--rank", 0, "--world", 2)
    _, errors = other.communicate(timeout=60)
    assert other.returncode == 6
    assert "is of a run that goes on" in errors
    assert [rank.poll() for rank in ranks] == [None, None]
