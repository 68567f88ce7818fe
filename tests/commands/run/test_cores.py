"""Cores of their own for the ranks of a machine: on made-up machines, and on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from gradbus.commands.doctor.machine import machine
from gradbus.commands.run.cores import Binding, CpuTopology, as_ranges, decide, read_topology
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.errors import ConfigError


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


def make_machine(root: Path, nodes: Sequence[Sequence[Sequence[int]]], online: str) -> Path:
    """A machine of NUMA nodes, each with cores, each with logical processors."""
    files = {"sys/devices/system/cpu/online": online}
    for number, cores in enumerate(nodes):
        files[f"sys/devices/system/node/node{number}/cpulist"] = as_ranges([cpu for core in cores for cpu in core])
        for core in cores:
            for cpu in core:
                files[f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list"] = ",".join(map(str, core))
    write(root, files)
    return root


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two sockets of four cores with two siblings each: cores 0 to 3 with 8 to 11, and 4 to 7 with 12 to 15."""
    nodes = [[[core, core + 8] for core in range(first, first + 4)] for first in (0, 4)]
    return make_machine(tmp_path, nodes, "0-15")


def shares(topology: CpuTopology, ranks: int) -> list[str]:
    return [as_ranges([cpu for core in topology.share(rank, ranks) for cpu in core.cpus]) for rank in range(ranks)]


def test_siblings_stay_together_and_a_rank_within_its_node(two_sockets: Path) -> None:
    found = read_topology(range(16), two_sockets)
    assert (len(found.cores), sorted(found.nodes), found.most_ranks) == (8, [0, 1], 4)
    assert shares(found, 1) == ["0-3,8-11"]  # not both nodes
    assert shares(found, 2) == ["0-3,8-11", "4-7,12-15"]
    assert shares(found, 3) == ["0-1,8-9", "2-3,10-11", "4-5,12-13"]
    assert shares(found, 8) == [f"{core},{core + 8}" for core in range(8)]
    assert shares(found, 9) == [""] * 9


@pytest.mark.parametrize("ranks", range(1, 9))
def test_shares_are_disjoint_and_of_one_size(two_sockets: Path, ranks: int) -> None:
    found = read_topology(set(range(16)) - {2, 7, 15}, two_sockets)  # some siblings and a whole core are not allowed
    parts = [found.share(rank, ranks) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    cores = [core for part in parts for core in part]
    assert len(set(cores)) == len(cores)
    assert all(len({core.node for core in part}) <= 1 for part in parts)


def test_processors_that_are_offline_or_not_allowed_are_given_to_nobody(two_sockets: Path) -> None:
    write(two_sockets, {"sys/devices/system/cpu/online": "0-3,6-9,12"})
    found = read_topology(range(1, 16), two_sockets)
    assert shares(found, 2) == ["1-3,9", "6-7,12"]
    assert {cpu for core in found.cores for cpu in core.cpus} == {1, 2, 3, 6, 7, 8, 9, 12}


def test_the_least_quota_of_the_control_groups_limits_the_ranks(two_sockets: Path) -> None:
    write(
        two_sockets,
        {
            "proc/self/cgroup": "0::/jobs/mine",
            "sys/fs/cgroup/jobs/mine/cpu.max": "max 100000",
            "sys/fs/cgroup/jobs/cpu.max": "450000 100000",
        },
    )
    found = read_topology(range(16), two_sockets)
    assert (found.quota, found.most_ranks) == (4.5, 2)


def test_a_machine_that_says_nothing_of_itself_has_a_core_for_each_processor(tmp_path: Path) -> None:
    found = read_topology({0, 3, 5}, tmp_path)
    assert [core.cpus for core in found.cores] == [(0,), (3,), (5,)]
    assert (sorted(found.nodes), found.quota) == ([0], float("inf"))


def environment(rank: int, world: int, **more: str) -> dict[str, str]:
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), **more}


def test_auto_binds_where_each_rank_gets_two_cores(two_sockets: Path) -> None:
    found = read_topology(range(16), two_sockets)
    assert decide("auto", environment(3, 4), found, is_bound=False) == Binding((6, 7, 14, 15), 1)
    five = decide("auto", environment(0, 5), found, is_bound=False)
    assert five == Binding(why="8 cores are fewer than 2 for each of 5 ranks")
    assert decide("cores", environment(4, 5), found, is_bound=False).cpus == (4, 12)


@pytest.mark.parametrize(
    ("variables", "is_bound", "text"),
    [
        (environment(0, 2, OMP_PLACES="cores"), False, "OMP_PLACES=cores"),
        (environment(0, 2), True, "bound by what has started it"),
        ({}, False, "LOCAL_WORLD_SIZE"),
        (environment(2, 2), False, "LOCAL_WORLD_SIZE"),
        (environment(0, 9), False, "8 cores are fewer than"),
    ],
)
def test_what_stands_against_it_is_respected_or_an_error_where_cores_are_asked_for(
    two_sockets: Path, variables: dict[str, str], is_bound: bool, text: str
) -> None:
    found = read_topology(range(16), two_sockets)
    left = decide("auto", variables, found, is_bound=is_bound)
    assert left.cpus == ()
    assert text in left.why
    with pytest.raises(ConfigError, match=text):
        decide("cores", variables, found, is_bound=is_bound)


def add_cards(root: Path, cards: Mapping[str, str], below: Mapping[str, Sequence[str]] | None = None) -> None:
    """Network cards with what ``numa_node`` says, and virtual interfaces with those below them."""
    write(root, {f"sys/class/net/{name}/device/numa_node": node for name, node in cards.items()})
    write(root, {f"sys/class/net/{name}/operstate": "up" for name in (*cards, *(below or {}))})
    for name, lower in (below or {}).items():
        for one in lower:
            (root / f"sys/class/net/{name}/lower_{one}").symlink_to(root / f"sys/class/net/{one}")


def test_cores_beside_the_network_card_are_given_away_first(two_sockets: Path) -> None:
    add_cards(two_sockets, {"eth0": "0", "eth1": "1"})
    assert shares(read_topology(range(16), two_sockets, "eth1"), 1) == ["4-7,12-15"]
    assert shares(read_topology(range(16), two_sockets, "eth1"), 3) == ["4-5,12-13", "6-7,14-15", "0-1,8-9"]
    assert shares(read_topology(range(16), two_sockets, "eth0"), 3) == ["0-1,8-9", "2-3,10-11", "4-5,12-13"]
    for alone in ("lo", "eth7", "../net/eth1"):  # what stays on the machine crosses no card
        found = read_topology(range(16), two_sockets, alone)
        assert (found.card_nodes, shares(found, 1)) == ({}, ["0-3,8-11"])


def test_the_card_of_a_vlan_is_that_of_the_bond_below_it_and_a_circle_of_interfaces_ends(two_sockets: Path) -> None:
    add_cards(two_sockets, {"eth0": "1", "eth1": "1"}, {"vlan7": ["bond0"], "bond0": ["eth0", "eth1"], "odd": ["odd"]})
    assert read_topology(range(16), two_sockets, "vlan7").card_nodes == {"eth0": 1, "eth1": 1}
    assert read_topology(range(16), two_sockets, "odd").card_nodes == {}


@pytest.mark.parametrize("says", ["-1", "", "one", "1\n2"])
def test_a_card_that_does_not_say_where_it_is_changes_nothing(two_sockets: Path, says: str) -> None:
    add_cards(two_sockets, {"eth0": says})
    found = read_topology(range(16), two_sockets, "eth0")
    assert (found.card_nodes, shares(found, 1)) == ({}, ["0-3,8-11"])
    with pytest.raises(ConfigError, match=r"no network card behind bus\.interface names its NUMA node"):
        decide("network", environment(0, 1), found, is_bound=False)


def test_without_a_name_all_cards_that_are_up_count(two_sockets: Path) -> None:
    add_cards(two_sockets, {"eth0": "0", "eth1": "1"})
    write(two_sockets, {"sys/class/net/eth0/operstate": "down"})
    assert read_topology(range(16), two_sockets, None).card_nodes == {"eth1": 1}


def test_network_binds_all_ranks_beside_the_card_or_is_an_error(two_sockets: Path) -> None:
    add_cards(two_sockets, {"ib0": "1"})
    found = read_topology(range(16), two_sockets, "ib0")
    bound = [decide("network", environment(rank, 2), found, is_bound=False) for rank in range(2)]
    assert bound == [Binding((4, 5, 12, 13), 1), Binding((6, 7, 14, 15), 1)]
    assert decide("cores", environment(1, 2), found, is_bound=False) == Binding((0, 1, 2, 3, 8, 9, 10, 11), 0)
    with pytest.raises(ConfigError, match=r"--bind network: .* 4 cores beside ib0 are fewer than 5 ranks"):
        decide("network", environment(0, 5), found, is_bound=False)


def test_none_binds_nothing(two_sockets: Path) -> None:
    found = read_topology(range(16), two_sockets)
    assert decide("none", environment(0, 2), found, is_bound=False) == Binding(why="--bind none")


BOUND = """
import json, os, threading
from gradbus.commands.run import cores
early, go = [], threading.Event()
thread = threading.Thread(target=lambda: (go.wait(), early.append(sorted(os.sched_getaffinity(0)))))
thread.start()
found = cores.bind("cores")
go.set(); thread.join()
memory = cores.prefer_memory(0)
kept = bytearray(1 << 24)
with open("/proc/self/numa_maps") if os.path.exists("/proc/self/numa_maps") else open(os.devnull) as maps:
    prefers = "prefer:0" in maps.read()
print(json.dumps([sorted(os.sched_getaffinity(0)), early[0], list(found.cpus), memory, prefers]))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no sched_setaffinity")
def test_a_process_and_all_its_threads_are_bound_to_cores_that_no_other_rank_has() -> None:
    ranks = min(2, len(read_topology(os.sched_getaffinity(0)).cores))
    seen: set[int] = set()
    for rank in range(ranks):
        ended = subprocess.run(
            [sys.executable, "-c", BOUND],
            env={**os.environ, **environment(rank, ranks)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        own, early, told, memory, prefers = json.loads(ended.stdout)
        assert own == early == told
        assert seen.isdisjoint(own)
        seen.update(own)
        if os.path.exists("/proc/self/numa_maps") and not memory:
            assert prefers
        else:
            assert memory == "" or memory.startswith("memory: ")


def test_the_doctor_shows_the_cores() -> None:
    (finding,) = [finding for finding in machine(BusSettings()) if finding.name == "cores"]
    cores = len(read_topology(os.sched_getaffinity(0)).cores) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert finding.value.startswith(f"{cores} in ")
    assert "--bind auto" in finding.value
