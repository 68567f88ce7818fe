"""The schedule of a storm, and what the journals of its processes are judged by."""

from __future__ import annotations

import itertools
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradbus.experiments.bench.elastic import TORCHFT_PYTHON, torchft_python
from gradbus.experiments.bench.elastic_processes import CALM_S, KINDS, schedule, score


def events(pid: int, *found: tuple[str, float, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"event": event, "at_s": at_s, "pid": pid, **facts} for event, at_s, facts in found]


def start(at_s: float, generation: int, step: int) -> tuple[str, float, dict[str, Any]]:
    return "started", at_s, {"generation": generation, "step": step}


def made(at_s: float, step: int, world: int, value: str) -> list[tuple[str, float, dict[str, Any]]]:
    return [
        ("begins", at_s - 0.9, {"step": step}),
        ("hash", at_s, {"step": step, "hash": value}),
        ("step", at_s, {"step": step, "world": world}),
    ]


def test_a_storm_follows_from_its_seed_has_all_kinds_equally_often_and_ends_before_the_run() -> None:
    faults = schedule(7, minutes=20, per_hour=120, world=4)
    assert faults == schedule(7, minutes=20, per_hour=120, world=4)
    assert faults != schedule(8, minutes=20, per_hour=120, world=4)
    assert 36 <= len(faults) <= 44
    counts = [sum(fault.kind == kind for fault in faults) for kind in KINDS]
    assert max(counts) - min(counts) <= 1
    assert all(one.at_s + one.lasts_s < later.at_s for one, later in itertools.pairwise(faults))
    assert faults[-1].at_s < 1200 - CALM_S


def test_a_step_that_only_a_lost_rank_has_applied_was_attempted_and_not_committed() -> None:
    lost = events(1, start(0.0, 1, 0), *made(1.0, 1, 2, "a"), *made(2.0, 2, 2, "gone"))
    other = events(
        2,
        start(0.0, 1, 0),
        *made(1.0, 1, 2, "a"),
        ("begins", 1.1, {"step": 2}),
        start(3.0, 2, 1),
        *made(4.0, 2, 1, "b"),
        *made(5.0, 3, 1, "c"),
    )
    found = score([lost, other], 2, 0.0, 5.0)
    assert (found.committed, found.attempted, found.generations) == (3, 4, 2)
    assert found.differing == ()
    assert found.compared == 1
    assert found.participation == (1 * 2 + 3 * 1 + 1 * 1) / 5 / 2
    assert found.useful == 3 / 5


def test_hashes_that_differ_in_one_step_of_a_generation_are_found() -> None:
    journals = [events(rank, start(0.0, 1, 0), *made(1.0, 1, 2, value)) for rank, value in enumerate("ab")]
    (line,) = score(journals, 2, 0.0, 2.0).differing
    assert "generation 1, step 1" in line


def test_the_journals_of_a_process_that_was_started_again_are_of_two_generations() -> None:
    journal = events(1, start(0.0, 1, 0), *made(1.0, 1, 1, "a")) + events(9, start(2.0, 2, 1), *made(3.0, 2, 1, "b"))
    assert score([journal], 1, 0.0, 4.0).committed == 2


def test_torchft_is_measured_with_the_environment_of_the_checkout_where_no_other_one_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TORCHFT_PYTHON, raising=False)
    assert torchft_python() == root / ".venv-integrations" / "bin" / "python"
    monkeypatch.setenv(TORCHFT_PYTHON, "/opt/other/bin/python")
    assert torchft_python() == Path("/opt/other/bin/python")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone ends a process with its parent")
def test_the_measurement_of_torchft_ends_with_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    """Its replicas end with it as all processes of a benchmark do."""
    told = tmp_path / "told"
    os.mkfifo(told)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {told}\nexec sleep 600\n", encoding="utf-8")
    python.chmod(0o700)
    program = "from gradbus.experiments.bench.elastic import run_torchft; run_torchft(1, 1)"
    with subprocess.Popen([sys.executable, "-c", program], env=os.environ | {TORCHFT_PYTHON: str(python)}) as benchmark:
        pid = int(told.read_text(encoding="utf-8"))
        file = os.pidfd_open(pid)
        benchmark.kill()
    with os.fdopen(file):  # readable when its process has ended
        assert select.select([file], [], [], 30.0)[0], "the measurement goes on"
