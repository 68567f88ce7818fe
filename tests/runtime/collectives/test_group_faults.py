"""What becomes of a group of processes when one of them dies, hangs, fails, or comes late: everybody ends, in time."""

from __future__ import annotations

import itertools
import signal
import time
from typing import Any

import pytest
from federation import Node
from group_node import group_ranks
from group_scripts import lives, steps_until_the_end

pytestmark = [pytest.mark.slow, pytest.mark.faults]

NETWORK: dict[str, Any] = {}  # as it is by default: a lease of a minute
# The kernel tells of a lost rank, within milliseconds. The rest is for a machine whose cores are busy with other
# processes: the receive threads and loops of the survivors have to get a turn. docs/reliability.md has what it takes.
NOTICED_S = 10.0  # of the minute of a lease


def ends_of(nodes: list[Node]) -> list[dict[str, Any]]:
    """How the steps of each ended; all processes have to end well."""
    ends = [node.wait_for("ended") for node in nodes]
    assert [node.wait() for node in nodes] == [0] * len(nodes)
    return ends


def assert_later_ones_end_at_once(node: Node, end: dict[str, Any]) -> None:
    """They have a deadline of 0.5 s, and it is not that which ends them."""
    later = node.all("later") + node.all("later still")
    assert [(event["kind"], event["ranks"]) for event in later] == [("PeerLost", end["ranks"])] * 2


@pytest.mark.parametrize(("world", "victim"), [(2, 0), (3, 1)])
def test_a_killed_rank_ends_pending_and_later_collectives_of_all_others_in_time(world: int, victim: int) -> None:
    with group_ranks(steps_until_the_end, world, network=NETWORK) as ranks:
        nodes = ranks.start_all()
        for node in nodes:
            node.wait_for("under way")
        nodes[victim].signal(signal.SIGKILL)
        killed_s = time.monotonic()
        survivors = [node for rank, node in enumerate(nodes) if rank != victim]
        ends = ends_of(survivors)
        for node, end in zip(survivors, ends, strict=True):
            assert (end["kind"], end["ranks"]) == ("PeerLost", [victim])
            assert end["at_s"] - killed_s < NOTICED_S
            assert_later_ones_end_at_once(node, end)
        assert nodes[victim].wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("algorithm", "shared"), [("direct", True), ("direct", False), ("shards", True), ("ring", False)]
)
def test_a_rank_killed_while_it_sends_a_large_vector_is_a_lost_one_as_well(algorithm: str, shared: bool) -> None:
    dies = {"die_in_step": 2, "die_after_bytes": 2 << 20}
    network = NETWORK | {"shared_memory": shared}
    with group_ranks(steps_until_the_end, 3, network=network, numel=4 << 20, algorithm=algorithm) as ranks:
        nodes = ranks.start_all(rank_1=dies)
        killed_s = nodes[1].wait_for("dies")["at_s"]
        for end in ends_of([nodes[0], nodes[2]]):
            assert (end["kind"], end["ranks"]) == ("PeerLost", [1])
            assert end["step"] >= 2  # all may have left its process by the time it died
            assert end["at_s"] - killed_s < NOTICED_S
        assert nodes[1].wait() == -signal.SIGKILL


@pytest.mark.parametrize("stopped", [[2], [0, 1, 2]], ids=["one", "all at once"])
def test_stopped_ranks_are_waited_for_and_all_go_on_when_they_do(stopped: list[int]) -> None:
    with group_ranks(steps_until_the_end, 3, network={}, steps=40) as ranks:
        nodes = ranks.start_all()
        for node in nodes:
            node.wait_for("under way")
        for rank in stopped:
            nodes[rank].signal(signal.SIGSTOP)
        time.sleep(2.5)  # no event: that is the case
        for rank in stopped:
            nodes[rank].signal(signal.SIGCONT)
        for node in nodes:
            node.wait_for("done")
            assert node.wait() == 0
        assert not any(node.all("ended") for node in nodes)


def test_a_rank_whose_loop_hangs_is_named_at_the_deadline_and_ends_when_it_goes_on() -> None:
    """It lives, and the kernel knows."""
    limits = {"collective_timeout_s": 2.0}
    with group_ranks(steps_until_the_end, 3, network=NETWORK, limits=limits) as ranks:
        nodes = ranks.start_all(rank_1={"block_in_step": 8})
        hung_s = nodes[1].wait_for("blocks")["at_s"]
        for end in ends_of([nodes[0], nodes[2]]):
            assert (end["kind"], end["ranks"], end["step"]) == ("CollectiveTimeout", [1], 8)
            assert "after 2 s" in end["text"]
            assert end["at_s"] - hung_s < 2.0 + NOTICED_S
        ranks.tell(1)
        (end,) = ends_of([nodes[1]])
        assert end["kind"] == "PeerLost"
        assert set(end["ranks"]) <= {0, 2}


def test_a_rank_that_raises_ends_the_others_at_once_and_they_know_why() -> None:
    with group_ranks(steps_until_the_end, 3) as ranks:
        nodes = ranks.start_all(rank_2={"raise_in_step": 6})
        for end in ends_of(nodes[:2]):
            assert (end["kind"], end["ranks"]) == ("PeerLost", [2])
            assert "rank 2: failed with RuntimeError: a mistake of the program, at " in end["text"]
        assert nodes[2].wait() == 1


def test_a_rank_that_starts_seconds_after_the_others_is_waited_for() -> None:
    with group_ranks(steps_until_the_end, 3, steps=10) as ranks:
        early = [ranks.start(0), ranks.start(1)]
        time.sleep(2.0)  # no event: that is the case
        assert all(node.process.is_alive() for node in early)
        late = ranks.start(2)
        for node in [*early, late]:
            assert node.wait() == 0
            assert node.all("done")


@pytest.mark.parametrize("pause_s", [0.0, 1.5], ids=["at once", "later"])
def test_a_killed_rank_that_starts_again_forms_the_group_anew_with_the_survivors(pause_s: float) -> None:
    """They use the same names and rounds: nothing of its former life is taken for the new one's."""
    with group_ranks(lives, 3, network=NETWORK) as ranks:
        nodes = ranks.start_all(rank_1={"die_in_life": 0})
        first = {tuple(node.wait_for("joined")["members"]) for node in nodes}
        assert nodes[1].wait() == -signal.SIGKILL
        time.sleep(pause_s)
        again = ranks.start(1, first_life=1)
        members = set()
        for node in (nodes[0], again, nodes[2]):
            joined = node.wait_for("joined", life=1)
            members.add(tuple(joined["members"]))
            assert node.wait() == 0
            assert node.all("done")
        for node in (nodes[0], nodes[2]):
            (lost,) = node.all("lost")
            assert lost["ranks"] == [1]
        assert len(first) == len(members) == 1
        assert all(before < after for before, after in zip(first.pop(), members.pop(), strict=True))


def test_a_rank_killed_while_the_group_forms_is_replaced_by_its_next_start() -> None:
    with group_ranks(lives, 3, network=NETWORK) as ranks:
        first, early = ranks.start(0), ranks.start(1)
        early.wait_for("connected")
        early.signal(signal.SIGKILL)
        assert early.wait() == -signal.SIGKILL
        for node in [first, ranks.start(1), ranks.start(2)]:
            assert node.wait() == 0
            assert len(node.all("joined")) == 1


def test_ranks_that_die_one_after_the_other_leave_the_last_one_with_the_names_of_both() -> None:
    with group_ranks(steps_until_the_end, 3, network=NETWORK) as ranks:
        nodes = ranks.start_all()
        for node in nodes:
            node.wait_for("under way")
        for victim in (1, 2):
            nodes[victim].signal(signal.SIGKILL)
        (end,) = ends_of([nodes[0]])
        assert end["kind"] == "PeerLost"
        assert set(end["ranks"]) <= {1, 2}
        assert list(itertools.chain(*(event["ranks"] for event in nodes[0].all("later")))) in ([1], [2], [1, 2])
