"""The files that a gradient bucket passes through, as docs/architecture.md has them, and a trace of two ranks."""

from __future__ import annotations

import functools
import re
import statistics
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
from ddp_scene import make_task, succeeded, train

from gradbus.actors.data_parallel.buckets import GradientBuckets
from gradbus.actors.data_parallel.optimization import RunOptimizer
from gradbus.models import mnist_mlp

WORLD = 2
OVER_DDS = {"runtime/bus/raw_endpoints.py", "runtime/bus/sender.py", "runtime/bus/receiver.py"}
IN_MEMORY = {"runtime/shm/slots.py", "runtime/shm/mailbox.py"}


class BucketTrace:
    """The files of this package in which functions are called, on any thread, from the first bucket of a step that is
    complete until all ranks have stepped their optimizers: one set for each step."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[set[str]] = []
        self._entered: set[str] | None = None
        self._stepped = 0
        self._lock = threading.Lock()
        self._root = f"{root}/"
        complete, step = GradientBuckets._complete, RunOptimizer.step  # noqa: SLF001 - the moment has no public name

        def begin(buckets: GradientBuckets, bucket: object) -> None:
            with self._lock:
                if self._entered is None:
                    self._entered = set()
            complete(buckets, bucket)  # type: ignore[arg-type]

        def end(optimizer: RunOptimizer, number: int, epoch: int) -> None:
            step(optimizer, number, epoch)
            with self._lock:
                self._stepped += 1
                if self._stepped == WORLD:
                    self.steps.append(self._entered or set())
                    self._entered, self._stepped = None, 0

        monkeypatch.setattr(GradientBuckets, "_complete", begin)
        monkeypatch.setattr(RunOptimizer, "step", end)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """For :func:`sys.setprofile`."""
        entered, path = self._entered, frame.f_code.co_filename
        if event == "call" and entered is not None and path.startswith(self._root):
            name = path.removeprefix(self._root)
            # Clients are not of this way: they are what an earlier test of this process has left running.
            is_of_clients = name.startswith("actors/federated/")
            if name.partition("/")[0] in ("actors", "codecs", "models", "runtime") and not is_of_clients:
                entered.add(name)

    def __enter__(self) -> BucketTrace:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as sys.setprofile takes it


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
def steps(root: Path) -> list[set[str]]:
    with pytest.MonkeyPatch.context() as monkeypatch, BucketTrace(root, monkeypatch) as trace:
        succeeded(train(make_task(functools.partial(mnist_mlp, hidden=600)), epochs=2))
    return trace.steps


def test_the_table_has_as_many_files_as_the_page_says(section: str) -> None:
    files = rows(section)
    said = re.search(r"The table has (\d+) files .*?, or (\d+) over DDS", section, re.DOTALL)
    assert said is not None
    assert [int(number) for number in said.groups()] == [len(files - OVER_DDS), len(files - IN_MEMORY)]


def test_each_file_of_the_table_is_entered_and_each_that_is_always_entered_is_named(
    section: str, steps: list[set[str]]
) -> None:
    assert len(steps) == 14
    assert rows(section) - OVER_DDS - set.union(*steps) == set()
    assert set.intersection(*steps) - set(named_files(section)) == set()


def test_a_trace_enters_about_as_many_files_as_the_page_says(section: str, steps: list[set[str]]) -> None:
    said = re.search(r"enters some (\d+) files", section)
    assert said is not None
    assert statistics.median(len(entered) for entered in steps) == pytest.approx(int(said[1]), abs=6)
