"""A program that orders its rounds is killed in the middle of one, and started again: nothing of the run differs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain

pytestmark = [pytest.mark.slow, pytest.mark.faults]

PROGRAM = Path(__file__).parents[1] / "support" / "ordering_program.py"
PATIENCE_S = 90.0


def start(role: str, place: list[str], *fail_at: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), role, *place, *fail_at]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ordered(state: Path, fail_at: str = "") -> list[Any]:
    """The rounds of a run, with the checksum of each model and its order: the controller is killed there, if named."""
    place = [f"ordered-{os.getpid()}-{state.name}", str(new_domain()), str(state)]
    clients = start("clients", place)
    try:
        if fail_at:
            with start("controller", place, fail_at) as first:
                first.communicate(timeout=PATIENCE_S)
            assert first.returncode == -signal.SIGKILL
        with start("controller", place) as controller:
            said, _ = controller.communicate(timeout=PATIENCE_S)
        assert controller.returncode == 0
        assert clients.wait(PATIENCE_S) == 0
        return list(json.loads(said.splitlines()[-1]))
    finally:
        clients.kill()
        clients.communicate()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The run that is not killed."""
    return ordered(tmp_path_factory.mktemp("ordered") / "unbroken")


@pytest.mark.parametrize("step", ["before_command", "after_command", "mid_collect", "after_aggregate_before_commit"])
def test_a_program_that_is_killed_in_a_round_comes_to_the_same_bits(
    step: str, unbroken: list[Any], tmp_path: Path
) -> None:
    assert [number for number, *_ in unbroken] == [1, 2, 3, 4, 5, 6]
    assert [order["lr"] for *_, order in unbroken] == [1.0, 0.5, 0.5, 0.25, 0.25, 0.125]
    assert ordered(tmp_path / step, f"{step}:4") == unbroken
