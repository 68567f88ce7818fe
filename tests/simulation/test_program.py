"""The simulation as a whole: what it has found stays mended, a seed is a run, and it finds what is planted."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
from fault_simulation.flavours import FLAVOURS
from fault_simulation.mutants import MUTANTS
from fault_simulation.seeds import first_seed
from simulations import simulate

# Each takes some seconds of one core, and minutes where other tests have the machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_faults_that_were_found_do_not_come_back() -> None:
    done = simulate("--found")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_gives_the_same_digest_in_two_processes_whatever_has_run_before() -> None:
    """The second process has another hash seed, and has run other seeds before."""
    number = len(FLAVOURS)
    alone = simulate("--digests", "--first", str(number), "--seeds", str(number), "--jobs", "1")
    after = simulate("--digests", "--first", str(number - 6), "--seeds", str(number + 6), "--jobs", "1", hash_seed=7)
    digests = [
        {line for line in done.stdout.splitlines() if re.fullmatch(r"\d+ \w+ [0-9a-f]{64}", line)}
        for done in (alone, after)
    ]
    assert len(digests[0]) == number, alone.stdout + alone.stderr
    assert digests[0] <= digests[1]
    assert {line.split()[1] for line in digests[0]} == set(FLAVOURS)


@pytest.mark.parametrize("mutant", ["counted is not saved", "receipt before the sum"])
def test_a_planted_fault_is_found_and_its_seed_shows_it_again(mutant: str) -> None:
    done = simulate(
        "--mutant", mutant, "--first", "0", "--seeds", "60", "--flavour", "s4", "--until-found", "--jobs", "1"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = re.search(r"replay: make simulate-faults SEED=(\d+) FLAVOUR=s4", done.stdout)
    assert found is not None, done.stdout
    assert "the last events:" in done.stdout
    again = simulate("--mutant", mutant, "--seed", found[1], "--flavour", "s4", "--shrink")
    assert again.returncode == 1, again.stdout + again.stderr
    assert "KEEP=" in again.stdout


@pytest.mark.parametrize("name", MUTANTS)
def test_the_text_that_a_planted_fault_replaces_is_in_the_product(name: str) -> None:
    mutant = MUTANTS[name]
    module = importlib.import_module(mutant.module)
    owner = getattr(module, mutant.owner) if mutant.owner else module
    source = inspect.getsource(inspect.unwrap(getattr(owner, mutant.name)))
    assert source.count(mutant.before) >= 1, f"write mutant {name!r} anew: {mutant.name} has changed"


def test_a_flavour_that_does_not_exist_is_named_with_those_that_do() -> None:
    done = simulate("--flavour", "fp23")
    assert done.returncode == 2
    assert "no flavour 'fp23': expected any, fp32, q8" in done.stderr


def test_the_first_seed_is_that_of_the_tree_and_0_where_there_is_none(root: Path, tmp_path: Path) -> None:
    assert first_seed(root) == first_seed(root)
    assert first_seed(tmp_path) == (0, "as git knows no tree here")
