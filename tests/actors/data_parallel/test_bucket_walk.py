"""The files that a gradient bucket passes through: a trace of a rank, and docs/architecture.md as it says them."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

import pytest
import walks
from dds_domains import new_domain

OVER_DDS = {"runtime/bus/raw_endpoints.py", "runtime/bus/sender.py", "runtime/bus/receiver.py"}
IN_MEMORY = {"runtime/shm/slots.py", "runtime/shm/mailbox.py"}


@pytest.fixture(scope="module")
def section(root: Path) -> str:
    """What the page says of a bucket."""
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    return page.split("## A gradient bucket, from backward to the mean")[1].split("\n## ")[0]


def named_files(text: str) -> list[str]:
    """The files that a text names, in order; one without a folder is in that of the one before."""
    found, folder = [], ""
    for name in re.findall(r"`([\w/]+\.py)`", text):
        folder = name.rpartition("/")[0] or folder
        found.append(name if "/" in name else f"{folder}/{name}")
    return found


def rows(section: str) -> set[str]:
    """The files of the table's first column, from the hook to the optimizer's step."""
    firsts = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    files = named_files(" ".join(firsts))
    return set(files[files.index("actors/data_parallel/buckets.py") :])


@pytest.fixture(scope="module")
def steps() -> list[walks.Walk]:
    return walks.bucket(new_domain())


def entered(steps: Iterable[walks.Walk]) -> list[set[str]]:
    return [set(step.files) for step in steps]


def test_the_table_has_as_many_files_as_the_page_says(section: str) -> None:
    files = rows(section)
    said = re.search(r"A bucket passes through (\d+) files .*?, or (\d+) over DDS", section, re.DOTALL)
    assert said is not None
    assert [int(number) for number in said.groups()] == [len(files - OVER_DDS), len(files - IN_MEMORY)]


def test_each_file_of_the_table_is_entered_and_each_that_is_always_entered_is_named(
    section: str, steps: list[walks.Walk]
) -> None:
    assert len(steps) == walks.BUCKET_STEPS - 1
    assert rows(section) - OVER_DDS - set.union(*entered(steps)) == set()
    assert set.intersection(*entered(steps)) - set(named_files(section)) == set()


def test_a_trace_enters_as_many_files_as_the_page_says(section: str, steps: list[walks.Walk]) -> None:
    said = re.search(r"enters (\d+) files", section)
    assert said is not None
    # Another machine may wait in another way.
    assert statistics.median(map(len, entered(steps))) == pytest.approx(int(said[1]), abs=3)


def files_of_the_worker(calls: Iterable[walks.Call]) -> list[str]:
    """The files of actors/data_parallel in the order in which they are entered from another file; each as often as one
    of the others was entered in between."""
    folder = "actors/data_parallel/"
    entries = (call.file for call in calls if call.file.startswith(folder) and call.caller != call.file)
    return [file.removeprefix(folder) for file, _ in itertools.groupby(entries)]


def test_a_bucket_enters_each_file_of_the_worker_once_on_its_way_out_and_once_on_its_way_back(
    steps: list[walks.Walk],
) -> None:
    for step in steps:
        calls = [call for call in step.calls if call.thread == "gradbus-worker-0_0"]
        functions = [call.function for call in calls]
        sent, back = functions.index("GradientBuckets.flush"), functions.index("GradientStepper._resume")
        assert files_of_the_worker(calls[:sent]) == ["buckets.py", "stepping.py"]
        assert files_of_the_worker(calls[back:]) == ["stepping.py", "buckets.py", "training.py"]
