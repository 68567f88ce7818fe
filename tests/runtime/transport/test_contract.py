"""Each transport keeps the contract of ``gradbus.runtime.transport.api``, clause by clause. That in memory, when it is
broken on purpose, fails the clause that it breaks, and no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transport_contract import CLAUSES, Clause
from transport_mutants import MUTANTS, Plant
from transport_scenes import DdsScene, MemoryScene, SteppedZenohScene, ZenohScene, in_steps, with_threads
from zenoh_node import Relay

MUTANT_S = 10.0  # for what a thread does in memory within milliseconds
BROKEN_S = 3.0  # the same for a clause that is to fail: where that is too short, it fails, too
IN_STEPS = [one for one in CLAUSES if not one.needs_threads]


@pytest.mark.parametrize("clause", IN_STEPS, ids=str)
def test_in_memory_in_steps(clause: Clause) -> None:
    scene = in_steps()
    clause.check(scene)
    scene.close()


@pytest.fixture
def memory() -> Iterator[MemoryScene]:
    scene = with_threads()
    yield scene
    scene.close()


@pytest.mark.parametrize("clause", CLAUSES, ids=str)
def test_in_memory_with_threads(clause: Clause, memory: MemoryScene) -> None:
    clause.check(memory)


@pytest.fixture
def dds() -> Iterator[DdsScene]:
    scene = DdsScene()
    yield scene
    scene.close()


@pytest.mark.slow
@pytest.mark.parametrize("clause", CLAUSES, ids=str)
def test_on_dds(clause: Clause, dds: DdsScene) -> None:
    clause.check(dds)


@pytest.mark.parametrize("clause", IN_STEPS, ids=str)
def test_on_zenoh_over_a_simulated_relay(clause: Clause) -> None:
    clause.check(SteppedZenohScene())


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    with Relay() as relay:
        yield relay


@pytest.fixture
def on_zenoh(relay: Relay) -> Iterator[ZenohScene]:
    scene = ZenohScene(relay.port)
    yield scene
    scene.close()


@pytest.mark.slow
@pytest.mark.parametrize("clause", CLAUSES, ids=str)
def test_on_zenoh(clause: Clause, on_zenoh: ZenohScene) -> None:
    clause.check(on_zenoh)


def test_each_clause_has_a_fault_that_breaks_it() -> None:
    assert sorted(MUTANTS) == sorted(clause.name for clause in CLAUSES)


def fails(clause: Clause, *, is_broken: bool) -> bool:
    """Check a clause in memory, in steps where it can be. ``is_broken``: it is the one that is to fail.

    A write that another clause leaves waiting may give up soon: that clause holds then as well.
    """
    scene = with_threads(BROKEN_S if is_broken else MUTANT_S) if clause.needs_threads else in_steps()
    if not is_broken:
        scene.stall_s = 0.2
    try:
        clause.check(scene)
    except (AssertionError, pytest.fail.Exception):
        return True
    finally:
        scene.network.close()
    return False


@pytest.mark.parametrize(("broken", "plant"), MUTANTS.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_a_fault_fails_the_clause_that_it_breaks_and_no_other(
    broken: str, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert [clause.name for clause in CLAUSES if fails(clause, is_broken=clause.name == broken)] == [broken]
