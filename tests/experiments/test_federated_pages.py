"""The configurations and the Python of the pages on federated runs, each run small or at least loaded.

Their commands are those of ``test_documented_commands.py``, the tutorials those of ``test_tutorials.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from dds_domains import new_domain
from doc_pages import fenced_blocks, python_blocks, rows, section
from fresh_shells import write_mnist

import gradbus
from gradbus.actors.federated.combinations import check_combination
from gradbus.actors.federated.selectors.base import make_selector
from gradbus.actors.virtual.simulation import settings_of
from gradbus.experiments.files import ControllerFile, WorkerFile, load
from gradbus.models import NoopTask

pytestmark = pytest.mark.slow

PAGES = {"asynchronous.md": 3, "partitions.md": 2, "privacy.md": 2, "selection.md": 2, "trees.md": 2}
"""Blocks of JSON of each."""
ELSEWHERE = {
    "operations.md": 1,  # tests/experiments/test_operations_page.py
    "parameter-server.md": 1,
    "security.md": 1,
    "tutorial-data-parallel.md": 1,  # tests/experiments/test_tutorials.py, and its next line
    "tutorial-federated.md": 3,
}


def blocks_of(root: Path, page: str) -> list[str]:
    return fenced_blocks((root / "docs" / page).read_text(encoding="utf-8"), "json")


def test_every_configuration_in_the_documents_is_known_to_a_test(root: Path) -> None:
    found = {path.name: len(fenced_blocks(path.read_text(encoding="utf-8"), "json")) for path in (root / "docs").glob("*.md")}
    assert {name: count for name, count in found.items() if count} == PAGES | ELSEWHERE


def configurations(root: Path, page: str, folder: Path) -> list[ControllerFile]:
    found = []
    for number, block in enumerate(blocks_of(root, page)):
        path = folder / f"{number}.json"
        path.write_text(block, encoding="utf-8")
        found.append(load(ControllerFile, path))
    return found


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_configurations_of_a_page_are_those_of_a_run_that_starts(root: Path, page: str, tmp_path: Path) -> None:
    for file in configurations(root, page, tmp_path):
        check_combination(file.federated)


def test_the_other_configurations_are_right_as_well(root: Path, tmp_path: Path) -> None:
    for page in ("operations.md", "parameter-server.md", "security.md"):
        (block,) = blocks_of(root, page)
        (tmp_path / "file.json").write_text(block, encoding="utf-8")
        load(WorkerFile if page == "parameter-server.md" else ControllerFile, tmp_path / "file.json")


@pytest.mark.parametrize("page", ["asynchronous.md", "privacy.md", "selection.md"])
def test_the_synchronous_configurations_of_a_page_train(root: Path, page: str, tmp_path: Path) -> None:
    """With two rounds, and as many clients as it takes for a part of them."""
    trained = 0
    for file in configurations(root, page, tmp_path):
        if file.federated.mode != "synchronous":
            continue  # virtual clients are; tests/actors/federated/test_asynchronous.py runs the others
        config = settings_of(file.federated, 130, None).replaced("rounds", 2).replaced("eval_every", 0)
        config = config.replaced("training.steps", 0) if page == "asynchronous.md" else config
        result = gradbus.simulate(
            OneStep(7), 130, config=config,
            options=gradbus.SimulationOptions(domain=new_domain(), processes=1, state_dir=tmp_path),
        )  # fmt: skip
        asked = make_selector(config.selection).wanted(130, config.clients.min)
        assert len(result.rounds) == 2
        assert all(1 <= report.updates <= asked for report in result.rounds)
        trained += 1
    assert trained
