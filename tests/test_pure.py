"""The tests of `make check`: which they are, and that none of them can be more than it is."""

from __future__ import annotations

import contextlib
import ctypes.util
import multiprocessing
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cyclonedds.domain import DomainParticipant
from pure import Guard, NotPure, is_listed


def test_the_list_names_each_file_once_and_in_order(root: Path) -> None:
    paths = (root / "tests" / "pure.txt").read_text(encoding="utf-8").splitlines()  # as pytest takes them
    assert paths == sorted(set(paths))
    assert [path for path in paths if not (root / path).exists()] == []
    assert [path for path in paths if any(str(above) in paths for above in Path(path).parents)] == []
    assert all(Path(path).name.startswith("test_") for path in paths if path.endswith(".py"))


def test_no_file_of_the_list_has_a_marker_of_what_is_not_pure(root: Path) -> None:
    files = [file for file in (root / "tests").rglob("test_*.py") if is_listed(file)]
    assert len(files) > 150
    marked = {
        str(file.relative_to(root)): name
        for file in files
        for name in ("slow", "netns", "gpu")
        if f"pytest.mark.{name}" in file.read_text(encoding="utf-8")
    }
    assert marked == {}, "take these off tests/pure.txt"


def end_at_once() -> None:
    """For a process that is not to start."""


DEEDS: dict[str, Callable[[], Any]] = {
    "starts a program": lambda: subprocess.run(["true"], check=True),
    "starts a process": lambda: multiprocessing.get_context("spawn").Process(target=end_at_once).start(),
    "forks": lambda: os.fork() or os._exit(0),
    "joins a DDS domain": lambda: DomainParticipant("not a domain"),
}


def in_place() -> tuple[Any, ...]:
    """What the guard replaces, as it is now."""
    return subprocess.Popen._execute_child, os.fork, DomainParticipant.__init__  # type: ignore[attr-defined]  # noqa: SLF001 - starts programs


@pytest.mark.parametrize("deed", DEEDS)
def test_what_is_not_pure_is_barred_and_found_where_the_error_is_hidden(deed: str) -> None:
    before = in_place()
    guard = Guard()
    guard.bar()
    with contextlib.suppress(Exception):
        DEEDS[deed]()
    with pytest.raises(NotPure, match=rf"this test {deed}, .*tests/pure\.txt"):
        guard.lift()
    assert in_place() == before
    guard.bar()
    guard.lift()  # it did nothing since


def test_a_package_that_looks_for_a_library_may_be_imported() -> None:
    guard = Guard()
    guard.bar()
    with contextlib.suppress(OSError):  # there is no ldconfig and no compiler
        ctypes.util.find_library("no-such-library")
    guard.lift()


@pytest.mark.parametrize("phase", ["setup", "call"])
@pytest.mark.parametrize("file", ["tests/codecs/test_registry.py", "tests/actors/test_flows.py"])
def test_fixtures_and_tests_of_the_list_are_guarded(
    root: Path, pytestconfig: pytest.Config, phase: str, file: str
) -> None:
    path = str(root / "tests" / "conftest.py")
    (conftest,) = (it for it in pytestconfig.pluginmanager.get_plugins() if getattr(it, "__file__", "") == path)
    before = in_place()
    run = getattr(conftest, f"pytest_runtest_{phase}")(SimpleNamespace(path=root / file))
    next(run)
    assert (in_place() != before) == is_listed(root / file) == ("codecs" in file)
    with pytest.raises(StopIteration):
        next(run)
    assert in_place() == before
