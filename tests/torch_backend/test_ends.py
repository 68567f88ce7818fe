"""A rank that is gone or late is an exception, soon, and never the end of the process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dds_domains import new_domain
from patience import soonest
from ports import kept_ports
from torch_node import LEASE_S, SOON_S, SceneRanks, play

pytestmark = [pytest.mark.slow, pytest.mark.faults]

ENDING_RANKS = Path(__file__).parents[1] / "support" / "ending_ranks.py"
AT_ONCE_S = 3.5  # what waits for no lease, on a machine that does other things, too


def test_a_killed_rank_is_an_exception_on_all_others() -> None:
    assert soonest(one_is_killed, SOON_S) < SOON_S


def one_is_killed() -> float:
    """Seconds until all others know."""
    with SceneRanks("end_scenes", "one_is_killed", world=3, dying=[2]) as ranks:
        died = ranks.nodes[2].wait_for("dies")
        failed = [node.wait_for("failed as it should") for node in ranks.nodes[:2]]
        results = [node.wait_for("done") for node in ranks.nodes[:2]]
        assert [node.wait() for node in ranks.nodes[:2]] == [0, 0]
    assert ranks.value(results[0])["cause"] == "PeerLost"
    for result in map(ranks.value, results):
        assert "rank 2" in result["text"]
        assert len(result["texts"]) == 7
        assert all("rank 2" in text for text in result["texts"].values()), result["texts"]
        assert result["without it"] == 2.0
    return max(event["at_s"] for event in failed) - died["at_s"]


def test_a_killed_rank_ends_a_backward_pass_of_ddp() -> None:
    assert soonest(killed_in_ddp, SOON_S) < SOON_S


def killed_in_ddp() -> float:
    """Seconds until all others know."""
    with SceneRanks("end_scenes", "killed_in_ddp", world=3, dying=[2]) as ranks:
        died = ranks.nodes[2].wait_for("dies")
        failed = [node.wait_for("failed as it should") for node in ranks.nodes[:2]]
        for node in ranks.nodes[:2]:
            assert "rank 2" in ranks.value(node.wait_for("done"))["text"]
            assert node.wait() == 0
    return max(event["at_s"] for event in failed) - died["at_s"]


def test_groups_that_were_destroyed_leave_nothing_behind() -> None:
    for result in play("end_scenes", "many_groups"):
        assert result["more"] == {}, result


def test_deadlines_are_kept() -> None:
    results = play("end_scenes", "deadlines")[0]
    for name in ("barrier", "future"):
        assert " Timed out " in results[name]["text"]
        assert "[1]" in results[name]["text"]
        assert 0.4 < results[name]["after_s"] < 2.0  # at best: see the scene
    assert results["barrier"]["cause"] == "CollectiveTimeout"
    assert "Rank 1 failed to pass monitoredBarrier in 500 ms" in results["monitored"]["text"]
    assert " Timed out after 0.3 s" in results["anyone"]["text"]


def test_ranks_that_call_different_collectives_are_told_at_once() -> None:
    results = play("end_scenes", "different_calls")
    assert all(result["text"] and result["after_s"] < 5.0 for result in results)
    assert any("broadcast" in result["text"] and "all_reduce" in result["text"] for result in results)


def test_a_process_group_can_be_destroyed_and_made_anew() -> None:
    for result in play("end_scenes", "again_and_again"):
        assert result == [0.0, 2.0, 4.0, 0.0]


def test_groups_of_some_ranks() -> None:
    results = play("end_scenes", "groups_within", world=3)
    assert [result["sums"] for result in results] == [[3.0, 0.0], [3.0, 3.0], [3.0, 3.0]]
    assert results[0]["split"] == results[2]["split"] == [0.0, 2.0]
    assert results[2]["came"] == 7.0


def test_callbacks_may_call_collectives() -> None:
    for result in play("end_scenes", "callbacks"):
        assert result["inner"] == [2 * (2.0 * number + 1) for number in range(40)]
        assert result["plain"] == [2.0 * number for number in range(40)]


def test_a_callback_that_waits_for_what_waits_for_it_fails_at_the_deadline() -> None:
    for result in play("end_scenes", "a_callback_waits_for_a_later_call"):
        assert " Timed out " in result["text"]
        assert result["next"] == 2.0


def test_what_needs_a_rank_that_has_left_fails_at_once() -> None:
    assert soonest(one_leaves_first, AT_ONCE_S) < AT_ONCE_S


def one_leaves_first() -> float:
    """Seconds until the other one knows."""
    first, _ = play("end_scenes", "one_leaves_first")
    assert first["cause"] == "PeerLost"
    assert "left" in first["text"]
    return float(first["after_s"])


def test_who_ends_without_destroying_the_group_leaves_in_order() -> None:
    first, _ = play("end_scenes", "one_leaves_first", just_end=True)
    assert first["cause"] == "PeerLost"
    assert "rank 1: its program has ended without destroy_process_group" in first["text"]


@pytest.fixture(scope="module")
def starter() -> Iterator[subprocess.Popen[str]]:
    """The interpreter that ranks are forked from: it loads torch once, for 3 s."""
    command = [sys.executable, "-P", str(ENDING_RANKS)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(30.0) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and ranks that have not ended


Ended = list[tuple[int, str, str]]
Ends = Callable[[str, int], Ended]


@pytest.fixture
def ended(starter: subprocess.Popen[str], tmp_path: Path) -> Ends:
    """Have so many ranks run a program, train.py. Returns the exit code of each, its stdout and its stderr."""

    def run(program: str, world: int) -> Ended:
        (tmp_path / "train.py").write_text(program)
        (tmp_path / "store").unlink(missing_ok=True)
        environment = {
            **os.environ,
            "GRADBUS_BUS__DOMAIN": str(new_domain()),
            "GRADBUS_BUS__LEASE_S": str(LEASE_S),
        }
        started = {"folder": str(tmp_path), "program": "train.py", "world": world, "environment": environment}
        assert starter.stdin is not None
        assert starter.stdout is not None
        starter.stdin.write(f"{json.dumps(started)}\n")
        starter.stdin.flush()
        readable, _, _ = select.select([starter.stdout], [], [], 90.0)
        assert readable, "ranks have not ended within 90 s"
        codes = json.loads(starter.stdout.readline())
        return [
            (code, (tmp_path / f"{rank}.out").read_text(), (tmp_path / f"{rank}.err").read_text())
            for rank, code in enumerate(codes)
        ]

    return run


# Rank 1 has a bug, with a `finally` that leaves in order, or without one. Rank 0 needs it.
FAILING = """
import sys
import torch
import torch.distributed as dist

def read_batch():
    raise ValueError("a bad batch")

rank = int(sys.argv[2])
dist.init_process_group("dds", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=3)
dist.barrier()
try:
    if rank:
        read_batch()
    dist.all_reduce(torch.ones(4))
finally:
    if rank != 1:
        dist.destroy_process_group()
"""


def test_the_others_are_told_what_a_rank_failed_with(ended: Ends) -> None:
    """Also where the failed one leaves the group as it fails, or not at all."""
    told = [err for _, _, err in ended(FAILING, 3)]
    for text in told[1:]:
        assert text.strip().splitlines()[-1].endswith("ValueError: a bad batch")
    last = told[0].strip().splitlines()[-1]
    assert "left: done" not in last
    assert re.search(r"rank [12]: failed with ValueError: a bad batch, at train.py:7 in read_batch", last), told[0]


# Rank 1 destroys its group and makes the next one while rank 0 has the first, and with it the store at MASTER_ADDR.
SUCCESSOR = """
import os, sys, time
from datetime import timedelta
import torch.distributed as dist

os.environ |= {"RANK": sys.argv[2], "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
dist.init_process_group("dds", timeout=timedelta(seconds=60))
dist.barrier()
store = dist.distributed_c10d._get_default_store()
while hasattr(store, "underlying_store"):
    store = store.underlying_store
if sys.argv[2] == "0":
    until_s = time.monotonic() + 60
    while not any(store.get(key) == b"2" for key in store.list_keys() if key.endswith("gradbus/times/1")):
        assert time.monotonic() < until_s, "rank 1 has not come again"
        time.sleep(0.02)
del store
dist.destroy_process_group()
if sys.argv[2] == "1":
    dist.init_process_group("dds", timeout=timedelta(seconds=60))
"""


def test_a_rank_that_finds_the_store_of_the_group_before_is_told_what_to_do(
    ended: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept_ports(1) as (port,):
        monkeypatch.setenv("MASTER_PORT", str(port))
        (first, _, why), (second, _, err) = ended(SUCCESSOR, 2)
    assert (first, second) == (0, 1), f"{why}\n{err}"
    last = err.strip().splitlines()[-1]
    assert f"DistBackendError: [Rank 1] process group 'world': the store at 127.0.0.1:{port} has gone before" in last
    assert "A store has to outlive the process groups that are made with it: make one, and give it to each" in last


# Groups, messages and works are forgotten. What is registered first runs last: when the groups have been left.
FORGETFUL = """
import sys, threading, time
ended_s = []
threading._register_atexit(lambda: print("left after", time.monotonic() - ended_s[0], flush=True))
import torch
import torch.distributed as dist

dist.init_process_group("dds", init_method=f"file://{sys.argv[1]}/store", rank=int(sys.argv[2]), world_size=2)
pair = dist.new_group([0, 1])
works = [dist.all_reduce(torch.ones(300_000), group=group, async_op=True) for group in (None, pair)]
works[0].get_future().then(lambda future: None)
never = dist.irecv(torch.ones(1), 1 - dist.get_rank(), tag=5)
dist.barrier()
print("done", flush=True)
ended_s.append(time.monotonic())
"""


def test_a_program_that_forgets_its_groups_ends_in_order(ended: Ends) -> None:
    """With exit code 0, soon, and without a word, on all ranks."""
    assert soonest(lambda: forgetful(ended), AT_ONCE_S) < AT_ONCE_S


def forgetful(ended: Ends) -> float:
    """Seconds from the end of the program to that of its groups, on the slower rank."""
    taken_s = []
    for code, said, complaints in ended(FORGETFUL, 2):
        assert complaints == ""
        assert code == 0
        done, left = said.splitlines()
        assert done == "done"
        taken_s.append(float(left.removeprefix("left after ")))
    return max(taken_s)


def test_a_group_from_the_environment() -> None:
    with kept_ports(1) as (port,):
        assert play("end_scenes", "from_the_environment", port=port) == [["cpu:dds", [2.0, 2.0]]] * 2


def test_a_world_of_one_needs_no_dds() -> None:
    ((values, threads),) = play("end_scenes", "alone", world=1)
    assert values == [1.0, 2.0]
    assert threads == 1
