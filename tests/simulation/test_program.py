"""The simulation as a whole: what it has found stays mended, a seed is a run, and it finds what is planted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fault_simulation.flavours import DRAWN
from fault_simulation.seeds import SEEDS_A_DAY, first_seed
from simulations import simulate, simulate_afresh

# Each takes some seconds of one core, and minutes where other tests have the machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_faults_that_were_found_do_not_come_back() -> None:
    done = simulate("--found")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("half", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_seed_gives_the_same_digest_in_two_processes_whatever_has_run_before(half: int) -> None:
    """A seed of each flavour, by halves; that of the suite has all three worlds. The second process has another hash
    seed, and has run another seed before."""
    size = (len(DRAWN) + 1) // 2
    first, flavours = len(DRAWN) + half * size, DRAWN[half * size :][:size]
    seeds = ["--digests", "--jobs", "1"]
    alone = simulate_afresh(*seeds, "--first", str(first), "--seeds", str(len(flavours)), hash_seed=0)
    after = simulate_afresh(*seeds, "--first", str(first - 1), "--seeds", str(len(flavours) + 1), hash_seed=7)
    digests = [
        {line for line in done.stdout.splitlines() if re.fullmatch(r"\d+ \w+ [0-9a-f]{64}", line)}
        for done in (alone, after)
    ]
    assert len(digests[0]) == len(flavours), alone.stdout + alone.stderr
    assert digests[0] <= digests[1]
    assert {line.split()[1] for line in digests[0]} == set(flavours)


def test_seeds_hold_over_a_simulated_relay_and_give_the_same_digest_in_two_processes() -> None:
    over = ["--transport", "zenoh", "--digests", "--jobs", "1"]
    alone = simulate_afresh(*over, "--first", "6", "--seeds", "3", hash_seed=0)
    after = simulate_afresh(*over, "--first", "5", "--seeds", "4", hash_seed=7)
    assert alone.returncode == after.returncode == 0, alone.stdout + after.stdout + after.stderr
    digests = [
        {line for line in done.stdout.splitlines() if re.fullmatch(r"\d+ \w+ [0-9a-f]{64}", line)}
        for done in (alone, after)
    ]
    assert len(digests[0]) == 3
    assert digests[0] <= digests[1]


def test_a_fault_that_is_planted_in_the_framing_of_zenoh_is_found_over_a_simulated_relay() -> None:
    done = simulate("--plant", "a gap is skipped", "--first", "0", "--seeds", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a sample arrives once, in order" in done.stdout
    assert re.search(r'replay: make simulate-faults SEED=\d+ FLAVOUR=\w+ TRANSPORT=zenoh PLANT="a gap', done.stdout)


@pytest.mark.parametrize(
    "name",
    ["what has counted is not saved", pytest.param("a receipt goes out before the sum", marks=pytest.mark.nightly)],
)
def test_a_planted_fault_is_found_and_its_seed_shows_it_again(name: str) -> None:
    done = simulate("--plant", name, "--first", "0", "--seeds", "60", "--flavour", "s4")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(rf'replay: make simulate-faults SEED=(\d+) FLAVOUR=s4 PLANT="{name}"', done.stdout)
    assert found is not None, done.stdout
    assert "the last events:" in done.stdout
    again = simulate("--plant", name, "--seed", found[1], "--flavour", "s4", "--shrink")
    assert again.returncode == 1, again.stdout + again.stderr
    assert "KEEP=" in again.stdout


@pytest.mark.parametrize(
    ("name", "flavour", "invariant"),
    [
        ("the end of the run ends the wait for its last receipt", "fp32", "clients know what counts"),
        ("a server begins with a fresh optimizer after a resume", "servers", "the model of a run without faults"),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in (
                ("the model is published before it is committed", "fp32", "a model is committed first"),
                ("the end of the run ends the wait for its last receipt", "secure", "clients know what counts"),
                (
                    "the masks of a client that dropped out stay in the sum",
                    "secure",
                    "the model is the mean of what was learned",
                ),
                ("a worker goes on however slow the others are", "servers_stale", "no worker is too far ahead"),
                (
                    "a generation takes the batches of the last step again",
                    "elastic",
                    "a step is applied by all or by none",
                ),
            )
        ),
    ],
)
def test_invariants_that_the_journals_do_not_have_find_planted_faults(name: str, flavour: str, invariant: str) -> None:
    done = simulate("--plant", name, "--first", "0", "--seeds", "60", "--flavour", flavour)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"of flavour {flavour}: {invariant}" in done.stdout


def test_a_controller_that_was_replaced_goes_on_beside_the_one_in_its_place() -> None:
    done = simulate("--seed", "14", "--flavour", "replaced")
    starts = re.findall(r"(controller\.\d+) starts", done.stdout)
    assert starts[:2] == ["controller.1", "controller.2"], done.stdout[-4000:] + done.stderr
    assert done.stdout.index("controller.2 journals commanded") < done.stdout.index("controller.1 goes on")


def test_an_elastic_rank_that_was_killed_joins_again_and_gets_the_state_from_another_one() -> None:
    done = simulate("--seed", "2", "--flavour", "elastic")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    begun = {int(number) for number in re.findall(r"logs info: generation begins generation=(\d+)", done.stdout)}
    assert len(begun) >= 3
    assert "logs info: state is there" in done.stdout


def test_a_planted_fault_that_no_seed_finds_is_named() -> None:
    done = simulate("--plant", "a site takes any sum that it has sent for counted", "--first", "0", "--seeds", "1")
    assert done.returncode == 1
    assert "not found: a site takes any sum that it has sent for counted" in done.stdout


def test_a_planted_fault_that_no_simulated_run_meets_is_found_by_its_test() -> None:
    done = simulate("--plant", "two vectors are masked with the same masks")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found by tests/actors/secure_aggregation/test_protocol.py::" in done.stdout


def test_a_planted_fault_that_does_not_exist_is_answered_with_the_names_of_all() -> None:
    done = simulate("--plant", "an update counts thrice")
    assert done.returncode == 2
    assert "no mutation 'an update counts thrice'; there are: an update counts twice;" in done.stderr


def test_a_flavour_that_does_not_exist_is_named_with_those_that_do() -> None:
    done = simulate("--flavour", "fp23")
    assert done.returncode == 2
    assert "no flavour 'fp23': expected any, fp32, q8" in done.stderr


def test_the_first_seed_is_that_of_the_tree_and_0_where_there_is_none(root: Path, tmp_path: Path) -> None:
    assert first_seed(root) == first_seed(root)
    assert first_seed(tmp_path) == (0, "as git knows no tree here")


def test_each_day_has_first_seeds_that_are_far_from_those_of_others(root: Path) -> None:
    first, source = first_seed(root, "today")
    assert first % SEEDS_A_DAY == 0
    assert re.fullmatch(r"of \d{4}-\d\d-\d\d", source)
