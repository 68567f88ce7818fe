"""Elastic runs whose network is cut in two and mended: each rank on a host of its own, a network namespace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradbus.commands.lab.conditions import LinkConditions
from gradbus.commands.lab.namespaces import Host, NoNamespaces, hosts_on_a_switch, set_sides
from gradbus.experiments.bench.elastic_processes import ElasticProcesses, ElasticSeat, new_job, score
from gradbus.runtime.config.timeouts import ELASTIC_LEASE_S

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.faults]

STARTS_S = 60.0
SOON_S = 30.0  # the lease and a new generation, on a busy machine
ELASTIC = {"min_world": 2, "max_world": 8, "wait_s": 120.0}


@pytest.fixture
def four_hosts() -> Iterator[tuple[Host, ...]]:
    try:
        with hosts_on_a_switch(4, LinkConditions(rate_bit_s=1e9), "kernel") as network:
            yield network.hosts
    except NoNamespaces as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("sides", "goes_on"),
    [(((0, 1), (2, 3)), ()), (((0, 1, 2), (3,)), (0, 1, 2)), (((0,), (1, 2, 3)), (1, 2, 3))],
    ids=["2+2", "3+1", "1+3"],
)
def test_of_a_network_cut_in_two_the_side_with_a_majority_alone_goes_on_and_all_are_equal_when_it_is_mended(
    sides: tuple[tuple[int, ...], ...], goes_on: tuple[int, ...], four_hosts: tuple[Host, ...], tmp_path: Path
) -> None:
    """Half of the members are no majority: on another machine nobody knows whether the others are dead."""
    seat = ElasticSeat(
        job=new_job("sides"),
        directory=tmp_path,
        hosts=four_hosts,
        lease_s=ELASTIC_LEASE_S,
        compute_s=0.03,
        config={"epochs": 1_000_000, "eval_every_epochs": 0, "hash_every": 1, "elastic": ELASTIC},
    )
    began_s = time.monotonic()
    with ElasticProcesses(seat, 4) as run:
        run.first(range(4), 0.0, "step", STARTS_S, world=4)
        cut_s = time.monotonic()
        set_sides(*([four_hosts[number] for number in side] for side in sides))
        waiting = {number: len(side) for side in sides if side != goes_on for number in side}

        def all_say_so() -> bool:
            return all(
                f"a majority: it reaches {reached} of the 4 members of generation 1" in log_of(tmp_path, number)
                for number, reached in waiting.items()
            )

        run.wait("they say that they wait for a majority", all_say_so, SOON_S)
        told_s = time.monotonic()
        if goes_on:
            run.first(goes_on, cut_s, "step", SOON_S, world=len(goes_on))
        time.sleep(1.0)  # this is the fault, in which a minority would make dozens of steps
        mended_s = time.monotonic()
        set_sides(four_hosts)
        run.first(range(4), mended_s, "step", SOON_S, world=4)
        for number in waiting:
            made = run.processes[number].since(told_s, "step")
            assert all(event["at_s"] > mended_s for event in made)
        for number in goes_on:
            assert run.processes[number].since(told_s, "step")[0]["at_s"] < mended_s
        found = score([process.events for process in run.processes], 4, began_s, time.monotonic())
    assert found.differing == ()
    assert found.compared


def log_of(directory: Path, number: int) -> str:
    path = directory / f"log-{number}"
    return path.read_text() if path.exists() else ""
