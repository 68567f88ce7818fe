"""Planted faults, one after the other, each until a seed or its test finds it. In a prepared process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from fault_simulation import in_tests, sweep
from fault_simulation.mutations import Mutation
from fault_simulation.planted_table import Outcome
from fault_simulation.world import World

TEST_LIMIT_S = 300.0


def search(
    mutations: Iterable[Mutation], seeds: range, flavour: str, size: tuple[int, int], root: Path, transport: str
) -> Iterator[tuple[Outcome, World | None]]:
    """Plant each fault, and run seeds until one finds it. Yields what came of it, and the run that has found it.

    Args:
        flavour: of the runs; any: that of the mutation. root: the repository, in which tests run.
        transport: of the runs, unless the mutation names its own.
    """
    sweep.run_calm(size)
    for mutation in mutations:
        if mutation.found_by:
            yield Outcome(mutation.name, mutation.found_by, is_found=_test_finds(mutation, root)), None
            continue
        flavour_here = mutation.flavour if flavour == "any" else flavour
        with mutation.planted():
            yield _search_one(mutation, seeds, flavour_here, size, mutation.transport or transport)


def _search_one(
    mutation: Mutation, seeds: range, flavour: str, size: tuple[int, int], transport: str
) -> tuple[Outcome, World | None]:
    number = 0
    for number, (world, _) in enumerate(sweep.run_seeds(seeds, flavour, size, mutation.name, transport), 1):
        if world.findings:
            invariant = world.findings[0].invariant
            return Outcome(mutation.name, flavour, number, invariant=invariant, is_found=True), world
    return Outcome(mutation.name, flavour, number), None


def _test_finds(mutation: Mutation, root: Path) -> bool:
    """Return whether the test of a mutation, which is green in the suite, fails with it."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-x", "-n", "0", "-p", in_tests.__name__, mutation.found_by],
        cwd=root,
        env={**os.environ, in_tests.ENVIRONMENT: mutation.name},
        capture_output=True,
        text=True,
        timeout=TEST_LIMIT_S,
        check=False,
    )
    return done.returncode == 1  # others: no such test, or the plugin has failed
