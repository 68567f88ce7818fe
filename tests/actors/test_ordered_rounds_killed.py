"""A program that orders its rounds is killed in the middle of one, and started again: nothing of the run differs."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import ordering_program
import pytest
import warm
from dds_domains import new_domain
from federation import Node

pytestmark = [pytest.mark.slow, pytest.mark.faults]

PATIENCE_S = 90.0


def ordered(state: Path, fail_at: str = "") -> list[Any]:
    """The rounds of a run, with the checksum of each model and its order: the controller is killed there, if named."""
    place = {"job": f"ordered-{os.getpid()}-{state.name}", "domain": new_domain()}
    with contextlib.ExitStack() as ends:

        def start(role: str, **more: Any) -> Node:
            process, _, events = warm.fork_that_tells(
                ordering_program.play, {"role": role, "place": place, "state": str(state), **more}
            )
            node = Node(process, events)
            ends.callback(node.end)
            return node

        clients = start("clients")
        if fail_at:
            assert start("controller", fail_at=fail_at).wait(PATIENCE_S) == -signal.SIGKILL
        controller = start("controller")
        assert controller.wait(PATIENCE_S) == 0
        assert clients.wait(PATIENCE_S) == 0
        (done,) = controller.all("done")
        return list(done["rounds"])


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
