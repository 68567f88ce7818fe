"""Each transport keeps the contract of ``gradbus.runtime.transport.api``, clause by clause. That in memory, when it is
broken on purpose, fails the clause that it breaks, and no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transport_contract import CLAUSES, Clause
from transport_scenes import DdsScene, MemoryScene, in_steps, with_threads

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
