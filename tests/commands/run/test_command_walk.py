"""The files that `gradbus controller` enters until its first round: a trace, and docs/architecture.md on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from dds_domains import new_domain

pytestmark = pytest.mark.slow

# Each belongs to something that the settings of the walk leave out.
LEFT_OUT = {
    "actors/aggregation/bounded_strategy.py",
    "actors/aggregation/clipping.py",
    "actors/aggregation/grid_steps.py",
    "actors/aggregation/typical.py",
    "actors/aggregation/updates.py",
    "actors/federated/controller/asynchronous.py",
    "actors/federated/controller/best_model.py",
    "actors/federated/controller/client_evaluation.py",
    "actors/federated/controller/cross_site.py",
    "actors/federated/controller/deadline.py",
    "actors/privacy/mechanisms.py",
    "commands/report/followed.py",
    "commands/report/metrics_server.py",
    "commands/report/scalars.py",
    "commands/run/continuation.py",
    "commands/run/live.py",
    "runtime/optimization/optimizers.py",
    "runtime/optimization/signatures.py",
    "runtime/testing/failpoints.py",
    "runtime/testing/fault_injection.py",
    "runtime/testing/faults.py",
}


@pytest.fixture(scope="module")
def section(root: Path) -> str:
    """What the page says of a command."""
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    return page.split("## A command, from its arguments to the first round")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def legs(root: Path) -> dict[str, list[str]]:
    """The files by thread, in the order of their first call. In a process of its own: a command has the logs, the
    signals and the end of its process to itself."""
    walk = subprocess.run(
        [sys.executable, "-P", "-m", "walks", "command", "--domain", str(new_domain())],
        env={**os.environ, "PYTHONPATH": str(root / "tests" / "tools")},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert walk.returncode == 0, walk.stderr
    threads = re.split(r"^  on ", walk.stdout, flags=re.MULTILINE)[1:]
    return {text.splitlines()[0]: re.findall(r"^    ([\w/]+\.py)", text, re.MULTILINE) for text in threads}


@pytest.fixture(scope="module")
def entered(legs: dict[str, list[str]]) -> set[str]:
    return set().union(*legs.values())


def named_files(section: str) -> list[str]:
    """The files of the table's first column; one without a folder is in that of the one before."""
    found, folder = [], ""
    for line in section.splitlines():
        for name in re.findall(r"`([\w/]+\.py)`", line.split("|")[1] if line.startswith("| `") else ""):
            folder = name.rpartition("/")[0] or folder
            found.append(name if "/" in name else f"{folder}/{name}")
    return found


def test_the_files_of_the_table_are_entered_in_its_order(
    section: str, legs: dict[str, list[str]], entered: set[str]
) -> None:
    named, main_thread = named_files(section), legs["MainThread"]
    assert len(named) > 20
    assert [name for name in named if name not in entered] == []
    in_order = [name for name in named if name in main_thread]
    assert sorted(in_order, key=main_thread.index) == in_order


def test_what_is_not_set_is_not_entered(root: Path, entered: set[str]) -> None:
    assert sorted(name for name in LEFT_OUT if not (root / name).exists()) == []
    assert LEFT_OUT & entered == set()


def test_a_trace_enters_as_many_files_as_the_page_says(section: str, entered: set[str]) -> None:
    said = re.search(r"enters (\d+) files", section)
    assert said is not None
    assert len(entered) == pytest.approx(int(said[1]), abs=3)  # another machine may wait in another way
