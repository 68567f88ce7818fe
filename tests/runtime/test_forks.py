"""Children by fork of processes that have a bus open: they end, they are told what they cannot do, and their parents go
on. Scenes of tests/support/forking.py in programs of their own, as only these end as programs do: one for those of the
bus, one for a rank of torch.distributed. The other rank forks nothing, and may be forked itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from backend_support import needs_torch_backend
from dds_domains import new_domain
from forked_commands import Forked

PROGRAM = Path(__file__).parents[1] / "support" / "forking.py"
PROGRAM_S = 80.0

pytestmark = pytest.mark.slow

Seen = dict[str, dict[str, Any]]


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def seen(program: subprocess.Popen[str] | Forked) -> Seen:
    """What a program saw, by what it was."""
    try:
        out, err = program.communicate(timeout=PROGRAM_S)
    finally:
        program.kill()
    assert program.returncode == 0, err
    return {line["what"]: line for line in map(json.loads, out.splitlines())}


@pytest.fixture(scope="module")
def of_the_bus() -> Seen:
    # In this order: where the main thread has added up tensors, with torch's threads, a child that does so hangs.
    return seen(start("bus_and_group", "inside_the_loop"))


def test_a_child_of_a_process_with_a_bus_and_a_group_ends_and_the_parent_goes_on(of_the_bus: Seen) -> None:
    found = of_the_bus
    child = found["child"]
    for what in ("publish", "subscribe", "all_reduce", "barrier", "another bus"):
        assert child[what].startswith("ForkedProcess: "), what
        assert "multiprocessing.get_context('spawn')" in child[what]
    assert (child["leave"], child["close"], child["exit"]) == ("None", "None", "3")
    for what in ("seal", "seal what was begun", "seal another topic"):
        assert child[what].startswith("ForkedProcess: "), f"{what}: its nonces are those of the parent"
    assert found["multiprocessing"]["exit"] == 4
    assert [found[when]["works"] for when in ("before", "after", "at the end")] == [True] * 3
    assert found["at the end"]["sealed"]
    assert found["afterwards"] == {"what": "afterwards", "a bus": "'open: another'", "exit": "3"}


def test_a_child_that_begins_in_a_coroutine_ends_and_the_parent_goes_on(of_the_bus: Seen) -> None:
    assert of_the_bus["child of a coroutine"]["exit"] == 5
    assert of_the_bus["after a coroutine"]["works"]


@needs_torch_backend
def test_children_of_a_rank_of_torch_distributed_end_and_workers_load_data_for_it() -> None:
    domain = new_domain()
    program = start("torch_backend", 0, domain)
    forked = Forked(["torch_backend", "1", str(domain)], PROGRAM.parent, os.environ, program=PROGRAM)
    found, other = map(seen, (program, forked))
    child = found["child"]
    for what in ("all_reduce", "send", "barrier"):
        assert child[what].startswith("DistBackendError: "), what
        assert "multiprocessing.get_context('spawn')" in child[what]
    assert "multiprocessing.get_context('spawn')" in child["store"]
    assert "was forked from" in child["a new group"]
    assert (child["destroy"], child["exit"]) == ("None", "3")
    assert found["multiprocessing"]["exit"] == 4
    assert found["after"]["works"]
    assert other["after"]["works"]
    assert found["epoch"]["seen"] == 2 * sum(range(40))
    assert found["workers"]["left"] == []


_HELD = """
import os, threading
from gradbus.runtime.forks import ForkLock
lock, held, over = ForkLock(), threading.Event(), threading.Event()
def hold():
    with lock:
        held.set()
        over.wait(20)
thread = threading.Thread(target=hold)
thread.start()
held.wait(20)
child = os.fork()
if child == 0:
    with lock:
        os._exit(7)
over.set()
thread.join()
with lock:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_lock_is_free_in_a_child_also_if_another_thread_of_the_parent_held_it() -> None:
    done = subprocess.run([sys.executable, "-c", _HELD], capture_output=True, text=True, timeout=PROGRAM_S, check=True)
    assert done.stdout == "7\n"
